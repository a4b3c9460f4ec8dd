"""Fingerprints: short texts that differ where two datasets, files or models do.

A run's checkpoint has those of its prompts, its rewards and the model that it started from, so that
a resumed run can say which of them have changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from importlib.machinery import PathFinder
from modulefinder import Module, ModuleFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

PACKAGE_FOLDER = 5
"""`modulefinder`'s word for a package."""

NOT_OF_A_MODEL = ("_name_or_path", "dtype", "torch_dtype", "transformers_version")
"""What a config says of where it came from and how it was loaded."""

DIGITS = 16
"""Hexadecimal digits of a fingerprint: enough against accidents, short enough to be shown."""


def of_weights(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Fingerprint of named tensors: names, shapes, dtypes, and every bit of each."""
    import torch  # a fingerprint of a file needs none

    digest = hashlib.sha256()
    for name, weight in weights:
        digest.update(f"{name} {list(weight.shape)} {weight.dtype} ".encode())
        flat = weight.detach().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()[:DIGITS]


def of_model(model: Any) -> str:
    """Fingerprint of a model of transformers: its weights, its config and how it generates."""
    parts = [of_weights(model.named_parameters())]
    for config in (model.config, getattr(model, "generation_config", None)):
        values = {} if config is None else config.to_diff_dict()
        parts.append(of_rows([{k: v for k, v in values.items() if k not in NOT_OF_A_MODEL}]))
    return of_text(" ".join(parts))


def of_tokenizer(tokenizer: Any) -> str:
    """Fingerprint of a tokenizer: the tokens by their ids, and the chat template."""
    return of_rows([tokenizer.get_vocab(), getattr(tokenizer, "chat_template", None)])


def of_rows(rows: Iterable[Any]) -> str:
    """Fingerprint of rows as JSON has them; what JSON cannot hold counts by its type."""
    digest = hashlib.sha256()
    for row in rows:
        text = json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__)
        digest.update(text.encode() + b"\n")
    return digest.hexdigest()[:DIGITS]


def of_file(path: str | Path) -> str:
    """Fingerprint of a file's bytes."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]


def of_code(path: str | Path) -> str:
    """Fingerprint of a Python file and of what it imports from its folder; of a module in a
    package, of what it imports from the package."""
    file = Path(path).resolve()
    name = file.stem
    folder = file.parent
    while (folder / "__init__.py").exists():
        name = f"{folder.name}.{name}"
        folder = folder.parent
    # `fastppo` itself may lie beside a file in a checkout; of that a run knows the version.
    excludes = {"fastppo"}
    is_in_package = "." in name
    if is_in_package:  # beside a package there may be all packages of an environment
        excludes |= {entry.stem for entry in folder.iterdir()} - {name.partition(".")[0]}
    finder = _ImportFinder(path=[str(folder)], excludes=[*excludes])
    try:
        if is_in_package:
            finder.import_hook(name)
        else:
            finder.run_script(str(file))
    except ImportError:  # `from . import` where no `__init__.py` says what the package is
        return _of_files(file.parent.glob("*.py"))
    files = {getattr(module, "__file__", None) for module in finder.modules.values()}
    return _of_files(filter(None, files))


class _ImportFinder(ModuleFinder):
    """Python's own, which raises AttributeError at a package without `__init__.py`."""

    def find_module(self, name: str, path: Any, parent: Any = None) -> Any:
        try:
            return super().find_module(name, path, parent)
        except AttributeError:
            spec = PathFinder.find_spec(name, path or self.path)
            if spec is None or not spec.submodule_search_locations:
                raise
            return None, next(iter(spec.submodule_search_locations)), ("", "", PACKAGE_FOLDER)

    def load_package(self, fqname: str, pathname: str) -> Module:
        if (Path(pathname) / "__init__.py").exists():
            return super().load_package(fqname, pathname)
        package: Any = self.add_module(fqname)
        package.__path__ = [pathname]
        return package


def _of_files(files: Iterable[str | Path]) -> str:
    return of_text(" ".join(of_file(file) for file in sorted(files)))


def of_text(text: str) -> str:
    """Fingerprint of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]
