"""Load users' functions: their names, and the fingerprints of their code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fastppo.data.files import MissingPathError
from fastppo.plugins.loading import load_plugin


def test_a_callable_is_taken_as_it_is() -> None:
    def mine() -> None: ...

    plugin = load_plugin(mine, "optimizer")
    assert (plugin.name, plugin.function) == ("optimizer", mine)
    assert plugin.fingerprint


@pytest.mark.parametrize("spec", ["mine.py", "nowhere.module:f", "fastppo.plugins.loading:absent"])
def test_an_error_names_the_option_and_the_spec(spec: str) -> None:
    with pytest.raises(ValueError, match=f"advantage {spec}"):
        load_plugin(spec, "advantage")


def test_a_missing_file_is_a_missing_path() -> None:
    """The command line then looks for it next to the YAML file."""
    with pytest.raises(MissingPathError) as missing:
        load_plugin("nowhere.py:f", "objective")
    assert missing.value.path == "nowhere.py"


def test_an_error_of_an_import_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("first = 1\nsecond = first / 0\n")
    with pytest.raises(ValueError, match=rf"ZeroDivisionError.*{file}, line 2"):
        load_plugin(f"{file}:second", "objective")


@pytest.mark.parametrize(
    "source",
    [
        "import functools\n\ndef base(x, **columns): return [1.0]\n"
        "score = functools.partial(base, x=2)\n",
        "class Score:\n    def __call__(self, *texts, **columns): return [1.0]\nscore = Score()\n",
        "from scoring_words import score\n",
    ],
    ids=["partial", "object", "from another file"],
)
def test_changed_code_changes_the_fingerprint(source: str, tmp_path) -> None:
    neighbor = tmp_path / "scoring_words.py"
    neighbor.write_text("def score(*texts, **columns): return [1.0]\n")
    file = tmp_path / "reward.py"
    file.write_text(source)
    prints = [load_plugin(f"{file}:score", "reward").fingerprint]
    for changed in (file, neighbor) if "scoring_words" in source else (file,):
        changed.write_text(changed.read_text().replace("1.0", "2.0") + "\n")
        sys.modules.pop("scoring_words", None)
        prints.append(load_plugin(f"{file}:score", "reward").fingerprint)
    assert len(set(prints)) == len(prints)
