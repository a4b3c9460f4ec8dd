"""Write the table of docs/models.md: what a run does with a tiny model of each architecture.

    PYTHONPATH=.:kernels:tests/helpers python tests/tools/models_page.py [type …]

With types, only their rows are measured anew.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

import architectures
import transformers
from architectures import Row
from processes import ROOT

PAGE = ROOT / "docs" / "models.md"


def counts_of(rows: dict[str, Row], version: str) -> str:
    """Return the sentence with the counts for a version of transformers."""
    engines = Counter(row.engine for row in rows.values() if row.engine)
    trained = sum(engines.values())
    generated = trained - engines["decoder"]
    sentences = [
        f"Of the types of `AutoModelForCausalLM` in transformers {version}, {len(rows)} are "
        f"decoders of text, and all of them were built. {trained} train: "
        f"{engines['decoder']} with FastPPO's decoder, {generated} with Hugging Face `generate`."
    ]
    failed = [f"`{name}`" for name, row in sorted(rows.items()) if not row.engine]
    if failed:
        sentences.append(f"{len(failed)} do not: {', '.join(failed)}.")
    return "\n".join(sentences)


def line_of(name: str, row: Row) -> str:
    """Return a row of the table."""
    cells = [cell or "–" for cell in (row.engine, row.packing, row.lora)]
    note = architectures.NOTES.get(name, "")
    return f"| `{name}` | {' | '.join(cells)} | {note} |"


def page_of(text: str, rows: dict[str, Row]) -> str:
    """Return the text of the page with these rows."""
    table = ["| type | engine | packing | LoRA | notes |", "|---|---|---|---|---|"]
    table += [line_of(name, row) for name, row in sorted(rows.items())]
    others = [
        f"- {kind}: {', '.join(f'`{name}`' for name in names.split())}"
        for kind, names in architectures.OTHER_KINDS.items()
    ]
    parts = {
        "counts": counts_of(rows, transformers.__version__),
        "rows": "\n".join(table),
        "others": "\n".join(others),
    }
    for name, part in parts.items():
        begin = f"<!-- {name} -->\n"
        before, _, rest = text.partition(begin)
        _, end, after = rest.partition("\n<!-- end -->")
        text = f"{before}{begin}{part}{end}{after}"
    return text


def main(names: list[str]) -> None:
    """Measure the rows, and write the page after each of them."""
    text = PAGE.read_text("utf-8")
    rows = architectures.page_rows(text) if names else {}
    for name in names or architectures.known_types():
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = architectures.examine(name, Path(folder))
        print(line_of(name, rows[name]), rows[name].failure, flush=True)
        PAGE.write_text(page_of(text, rows), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
