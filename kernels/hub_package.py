"""The kernels as a package of the Hub's `kernels` library: `python kernels/hub_package.py FOLDER`.

Writes what that library's builder wants, and what the builder would make of it: nothing here is
compiled before its first call.

    build.toml, flake.nix    the project
    torch-ext/fastppo/       `fastppo.functional` and `fastppo_kernels`, from the files of this tree
    build/torch-BACKEND/     the same files and a metadata.json, as `kernels.get_kernel` loads them

A package of the Hub is imported under a name of its own, so that several versions can be loaded
beside each other: imports of this project's packages become relative, and operators are registered
under that name, which `record_operator` sees to.

Source of the form: https://huggingface.co/docs/kernels/kernel-requirements and
https://huggingface.co/docs/kernels/builder/writing-kernels (edition 5, kernels 0.17).
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    "functional": ROOT / "fastppo" / "functional",
    "fastppo_kernels": ROOT / "kernels" / "fastppo_kernels",
}
NAME = "fastppo"
VERSION = 0
"""Of the package. By the Hub's convention, 0 is not for production: no GPU has run the kernels."""
LICENSE = "Apache-2.0"
BACKENDS = ("cpu", "cuda", "rocm")

FLAKE = """{
  description = "FastPPO's kernels";
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
"""


def write(folder: Path) -> None:
    """The project and its builds, into a folder that holds none yet.

    Raises:
        FileExistsError: there is a build.toml, torch-ext or build in it.
        ValueError: a source imports what is not part of the package.
    """
    for name in ("build.toml", "torch-ext", "build"):
        if (folder / name).exists():
            raise FileExistsError(f"expected no {name} in {folder}: give another folder")
    package = folder / "torch-ext" / NAME
    _write_package(package)
    (folder / "build.toml").write_text(_build_toml())
    (folder / "flake.nix").write_text(FLAKE)
    for backend in BACKENDS:
        build = folder / "build" / f"torch-{backend}"
        shutil.copytree(package, build)
        (build / "metadata.json").write_text(json.dumps(_metadata(build, backend), indent=2))


def _write_package(package: Path) -> None:
    for name, source in SOURCES.items():
        (package / name).mkdir(parents=True)
        for file in sorted(source.glob("*.py")):
            text = _with_relative_imports(file.read_text(encoding="utf-8"), file)
            (package / name / file.name).write_text(text, encoding="utf-8")
    (package / "__init__.py").write_text(_init(), encoding="utf-8")


def _with_relative_imports(text: str, file: Path) -> str:
    text = re.sub(r"^(\s*from )(?=fastppo_kernels\b)", r"\1..", text, flags=re.MULTILINE)
    text = re.sub(r"^(\s*from )fastppo\.(?=functional\b)", r"\1..", text, flags=re.MULTILINE)
    left = re.search(r"^\s*(?:from|import) fastppo.*", text, flags=re.MULTILINE)
    if left:
        raise ValueError(f"{file} imports what is not part of the package: {left[0].strip()}")
    return text


def _init() -> str:
    """Exports what `fastppo` does, of the functions: no trainer, no models."""
    import fastppo

    lines = ['"""PPO\'s losses, statistics of tokens and advantages: FastPPO\'s kernels."""', ""]
    exported = []
    for module, names in fastppo.HOMES.items():
        home = module.removeprefix("fastppo.")
        if home.partition(".")[0] in SOURCES:
            lines.append(f"from .{home} import {', '.join(names)}")
            exported += names
    return "\n".join([*lines, "", f"__all__ = {sorted(exported)}", ""])


def _build_toml() -> str:
    return (
        "[general]\n"
        f'name = "{NAME}"\n'
        f"version = {VERSION}\n"
        "edition = 5\n"
        f'license = "{LICENSE}"\n'
        f"backends = {json.dumps(BACKENDS)}\n\n"
        "[torch-noarch]\n"
    )


def _metadata(build: Path, backend: str) -> dict[str, object]:
    files = {}
    for file in sorted(build.rglob("*.py")):
        digest = hashlib.sha256(file.read_bytes()).digest()
        files[file.relative_to(build).as_posix()] = base64.b64encode(digest).decode()
    unique = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:7]
    return {
        "name": NAME,
        "id": f"_{NAME}_{backend}_{unique}",
        "version": VERSION,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": files},
    }


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    parser = argparse.ArgumentParser(
        description="FastPPO's kernels as a package of the Hub's form."
    )
    parser.add_argument("folder", type=Path, help="made if it is not there")
    write(parser.parse_args().folder)
