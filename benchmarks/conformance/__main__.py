"""`fastppo conformance FILE.py:FUNCTION`: the fixtures that a function of your own answers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

OPERATIONS = ("policy", "value", "gae", "rewards", "whiten", "group", "kl", "token", "importance")

EPILOG = """\
The function gets the inputs and options that it names as parameters, such as logprobs,
old_logprobs, advantages, mask and clip for a policy loss. A fixture with an option or input that it
does not name is not asked, unless it has **keywords. A loss returns a scalar, and its gradient is
compared as well; other functions return a tensor, or a dictionary of the answer's outputs. The
fixtures and their options are in benchmarks/conformance/fixtures.json.
"""


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=prog or "python -m benchmarks.conformance",
        description="Compare a function of yours with the published formulas.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("function", metavar="FILE.py:FUNCTION")
    parser.add_argument(
        "--operation", choices=OPERATIONS, default="policy", help="what it computes (policy)"
    )
    chosen = parser.parse_args(arguments)
    # Nothing above imports torch, so that --help is fast.
    from benchmarks.conformance.user_function import SAME, check
    from fastppo.plugins.loading import load_plugin

    function = load_plugin(chosen.function, "function").function
    verdicts = check(function, chosen.operation)
    for name, verdict in verdicts.items():
        print(f"{name:26} {verdict}")
    asked = [verdict for verdict in verdicts.values() if not verdict.startswith("not asked")]
    same = asked.count(SAME)
    print(f"{same} of {len(asked)} are the same; {len(verdicts) - len(asked)} were not asked")
    return int(same < len(asked) or not asked)


if __name__ == "__main__":
    sys.exit(main())
