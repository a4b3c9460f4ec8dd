"""Count relative words per 100 words of docstrings and Markdown pages.

    python tests/tools/relative_words.py [--files] [PATH ...]

Text that leans on "that", "which", "what", "whose", "where" and "whom" reads as if translated. For
scale: TRL's docstrings have 0.8 per 100 words, nanochat's 1.0. `--files` lists the worst files.
Paths are files or folders; the default is the packages, the benchmarks, the docs and the README.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DEFAULT = ("fastppo", "kernels", "benchmarks", "docs", "README.md")
RELATIVE = re.compile(r"\b(that|which|what|whose|where|whom)\b", re.IGNORECASE)
WORD = re.compile(r"[A-Za-z']+")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Count(NamedTuple):
    """Words of a text."""

    relative: int
    words: int

    def __add__(self, other: tuple[int, ...]) -> Count:
        return Count(self.relative + other[0], self.words + other[1])

    @property
    def per_100(self) -> float:
        return 100 * self.relative / max(1, self.words)


def count(text: str) -> Count:
    """Count the words of a text."""
    return Count(len(RELATIVE.findall(text)), len(WORD.findall(text)))


def docstrings(source: str) -> str:
    """Return the docstrings of a Python file."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED))
    return "\n".join(ast.get_docstring(node) or "" for node in nodes)


def prose(markdown: str) -> str:
    """Return a page without its fenced code."""
    return re.sub(r"```.*?```", "", markdown, flags=re.DOTALL)


def files(paths: list[Path]) -> Iterator[Path]:
    """Yield the Python files and Markdown pages under the paths."""
    for path in paths:
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (file for file in found if file.suffix in (".py", ".md"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--files", action="store_true", help="list the worst files")
    arguments = parser.parse_args()
    counts: dict[Path, Count] = {}
    for path in files(arguments.paths or [ROOT / name for name in DEFAULT]):
        text = path.read_text("utf-8")
        counts[path] = count(docstrings(text) if path.suffix == ".py" else prose(text))
    for kind, suffix in (("docstrings", ".py"), ("pages", ".md")):
        total = sum((n for path, n in counts.items() if path.suffix == suffix), Count(0, 0))
        print(f"{kind}: {total.per_100:.2f} per 100 ({total.relative} of {total.words} words)")
    if arguments.files:
        for path, n in sorted(counts.items(), key=lambda item: -item[1].relative)[:30]:
            print(f"{n.relative:4d} {n.per_100:5.1f}  {path}")


if __name__ == "__main__":
    main()
