"""Build the pages as a site: python docs/make_site.py SITE (pip install -e ".[docs]")

The site is built from a copy of the pages and the files they link to, in the folders of the
repository, so that every link works in both. A broken link or anchor is an error.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "kernels/NOTES.md", "examples")
LINK = re.compile(r"\]\(([^)#\s]+)")

CSS = """/* Options and formulas break only between words; wide tables scroll. */
.md-typeset table code { word-break: normal; }
/* Tables without a header. */
.md-typeset thead:not(:has(th:not(:empty))) { display: none; }
/* Tables use the width of a phone. */
@media (max-width: 44em) {
  .md-typeset table:not([class]) :is(th, td) { min-width: 0; padding: .6em .7em; }
}
/* Pictures have a white background. */
.md-typeset img { background: white; }
"""

CONFIG = {
    "site_name": "FastPPO",
    "theme": {
        "name": "material",
        "font": False,  # a page loads nothing from other sites
        "palette": [
            {"media": "(prefers-color-scheme: light)", "scheme": "default"},
            {"media": "(prefers-color-scheme: dark)", "scheme": "slate"},
        ],
        "features": ["navigation.indexes", "content.code.copy"],
    },
    "markdown_extensions": [
        "tables",
        "fenced_code",
        "md_in_html",
        {"toc": {"permalink": True, "slugify": "!!slugify"}},
    ],
    "plugins": ["search"],
    "extra_css": ["site.css"],
    "use_directory_urls": False,  # so that the site works from files
    "validation": {
        "links": {"not_found": "warn", "anchors": "warn", "unrecognized_links": "warn"},
        "nav": {"omitted_files": "ignore"},
    },
}


def navigation(index: str) -> list[dict[str, str]]:
    """Return the pages in the order of docs/README.md."""
    found = dict.fromkeys(re.findall(r"\[([^]]+)\]\((\w[\w-]*\.md)\)", index))
    return [{title: f"docs/{page}"} for title, page in found]


def gather(target: Path) -> None:
    """Copy the pages and the files they link to into `target`."""
    for name in PAGES:
        source = ROOT / name
        if source.is_dir():
            kept = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
            shutil.copytree(source, target / name, ignore=kept)
        else:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target / name)
    for page in list(target.rglob("*.md")):
        for link in LINK.findall(page.read_text("utf-8")):
            linked = (ROOT / page.relative_to(target).parent / link).resolve()
            place = target / linked.relative_to(ROOT) if linked.is_relative_to(ROOT) else None
            if place is not None and linked.is_file() and not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(linked, place)


def build(site: Path) -> None:
    """Build the site; raises SystemExit with the warnings of mkdocs, if there are any."""
    with tempfile.TemporaryDirectory() as folder:
        pages = Path(folder) / "pages"
        gather(pages)
        (pages / "site.css").write_text(CSS, encoding="utf-8")
        index = (ROOT / "docs" / "README.md").read_text("utf-8")
        config = CONFIG | {
            "docs_dir": str(pages),
            "site_dir": str(site.resolve()),
            "nav": [{"FastPPO": "README.md"}, {"Pages": "docs/README.md"}, *navigation(index)],
        }
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        # Anchors as on GitHub.
        github = "!!python/object/apply:pymdownx.slugs.slugify {kwds: {case: lower}}"
        path = Path(folder) / "mkdocs.yml"
        path.write_text(text.replace("'!!slugify'", github), encoding="utf-8")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = [line for line in done.stderr.splitlines() if line.startswith(("WARNING", "ERROR"))]
        if done.returncode or said:
            raise SystemExit("\n".join(said) or done.stderr)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
