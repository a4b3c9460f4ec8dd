"""Load users' functions and classes: `file.py:name`, `package.module:name`, or a callable.

Every seam loads them here: rewards, environment, engine, objective, advantage and optimizer.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from fastppo.data import fingerprint
from fastppo.data.files import MissingPathError
from fastppo.plugins.calling import UserCodeError, call, place_of

FUNCTION = re.compile(r"^(?P<where>.+):(?P<name>[A-Za-z_]\w*)$")


@dataclass(frozen=True, slots=True)
class Plugin:
    """A user's function or class."""

    name: str
    """Its name in messages and metrics."""
    function: Callable[..., Any]
    fingerprint: str = ""
    """Changes with its code, so that a resumed run can tell."""


def load_plugin(spec: str | Callable[..., Any], option: str) -> Plugin:
    """Load what an option names, or take a callable.

    Args:
        option: name of the option, which becomes the name of the plugin.

    Raises:
        MissingPathError: there is no such file.
        ValueError: it does not exist otherwise.
    """
    function: Any = spec
    if isinstance(spec, str):
        match = FUNCTION.match(spec)
        if match is None:
            raise ValueError(f"{option} {spec}: expected file.py:name or package.module:name")
        function = _load(match["where"], match["name"], option)
    return Plugin(option, function, fingerprint=code_fingerprint(spec, function))


def _load(where: str, name: str, option: str) -> Any:
    is_file = where.endswith(".py")
    if is_file and not Path(where).is_file():
        raise MissingPathError(f"{option} {where}:{name}: there is no file {where}", where)
    try:
        module = call(lambda: _load_file(Path(where)) if is_file else _load_module(where))
    except UserCodeError as error:
        cause = error.__cause__
        sentence = f"importing {where} {error}{place_of(cause)}"
        if isinstance(cause, ModuleNotFoundError) and not is_file:
            sentence = f"no module {cause.name!r}"
        raise ValueError(f"{option} {where}:{name}: {sentence}") from cause
    function = getattr(module, name, None)
    if not callable(function):
        known = [
            key
            for key, value in vars(module).items()
            if (inspect.isfunction(value) or inspect.isclass(value))
            and value.__module__.startswith(module.__name__)
        ]
        raise ValueError(
            f"{option} {where}:{name}: no function {name!r} there; "
            f"it has {', '.join(known) or 'none'}"
        )
    return function


def _load_module(name: str) -> ModuleType:
    # A console script does not look for modules in the current folder.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    return importlib.import_module(name)


def _load_file(path: Path) -> ModuleType:
    """Import a file under a unique name, and register it for pickle and dataclasses."""
    unique = f"fastppo_plugin_{fingerprint.of_text(str(path.resolve()))}_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(unique, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[unique] = module
    try:
        with _importable_from(path.parent):
            module_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[unique]
        raise
    return module


@contextmanager
def _importable_from(folder: Path) -> Iterator[None]:
    """Append a folder to the import path, so that its files cannot shadow libraries."""
    path = str(folder.resolve())
    sys.path.append(path)
    try:
        yield
    finally:
        last = len(sys.path) - 1 - sys.path[::-1].index(path)
        del sys.path[last]


# ----------------------------------------------------------------------------------- fingerprints


def code_fingerprint(spec: Any, function: Callable[..., Any]) -> str:
    """Fingerprint the code of a function: the file that names it, and the file that defines it.

    Without a file, take the name.

    Args:
        spec: the string that names the function, or the function itself.
    """
    parts = []
    if isinstance(spec, str) and (match := FUNCTION.match(spec)):
        where = match["where"]
        parts.append(_code(where if where.endswith(".py") else sys.modules[where]))
    defined: Any = function
    while isinstance(defined, functools.partial):
        defined = defined.func
    defined = inspect.unwrap(defined)
    parts.append(_code(defined if _is_definition(defined) else type(defined)))
    if isinstance(function, functools.partial):
        parts.append(fingerprint.of_rows([function.args, function.keywords]))
    known = sorted({part for part in parts if part})
    if known:
        return known[0] if len(known) == 1 else fingerprint.of_text(" ".join(known))
    kind = function if _is_definition(function) else type(function)
    name = spec if isinstance(spec, str) else f"{kind.__module__}.{kind.__qualname__}"
    return fingerprint.of_text(name)


def _is_definition(function: Any) -> bool:
    return inspect.isroutine(function) or inspect.isclass(function)


def _code(found: Any) -> str:
    """Fingerprint the file of a path, a module, a function or a class; "" if there is none.

    For a definition in `__main__`, fingerprint its own lines: the options may be in that file.
    """
    try:
        if isinstance(found, str):
            return fingerprint.of_file(found)
        if getattr(found, "__module__", None) == "__main__":
            return fingerprint.of_text(inspect.getsource(found))
        return fingerprint.of_file(inspect.getsourcefile(found) or "")
    except (OSError, TypeError, SyntaxError):  # built in, or of an interactive session
        return ""
