"""Load rewards by name. In a config, a reward is one of

path/to/file.py:function     a function in a file
package.module:function      a function in an importable module
directory or hub name        a model for AutoModelForSequenceClassification
https://host/path            a reward server
package:name                 a reward of another package, see `fastppo.data.addresses`
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fastppo.data import addresses, fingerprint
from fastppo.data.datasets import DataError
from fastppo.data.files import MissingPathError
from fastppo.rewards.calling import UserCodeError, call, place_of
from fastppo.rewards.reward import Reward, RewardTerm
from fastppo.rewards.url import URLReward, address_name

if TYPE_CHECKING:
    import torch

URL = re.compile(r"^https?://", re.IGNORECASE)
FUNCTION = re.compile(r"^(?P<where>.+):(?P<name>[A-Za-z_]\w*)$")


def load_reward(
    spec: str,
    *,
    device: torch.device | str = "cpu",
    batch_size: int = 32,
    timeout: float | None = None,
) -> Reward:
    """Load a reward by its spec; see the module's docstring.

    Args:
        device: of a reward model.
        batch_size: texts per forward pass of a reward model, or per request.
        timeout: seconds per request; None means the default of `URLReward`.

    Raises:
        ValueError: the file, module, function or model does not exist.
    """
    if URL.match(spec):
        return URLReward(spec, batch_size=batch_size, timeout=timeout)
    if addresses.is_address(spec):
        return _load_from_package(spec)
    if match := match_function(spec):
        return _load_function(match["where"], match["name"], "reward")
    from fastppo.rewards.model import RewardModel  # imports transformers

    return RewardModel(spec, device=device, batch_size=batch_size)


def _load_from_package(spec: str) -> Reward:
    def load_from(adapter: ModuleType, target: str) -> Reward:
        if target not in adapter.REWARDS:
            known = ", ".join(adapter.REWARDS)
            raise DataError(f"reward {spec}: expected one of {known}, got {target!r}")
        return adapter.REWARDS[target]

    return addresses.load(spec, "reward", load_from)


def match_function(spec: str) -> re.Match[str] | None:
    """Match `where` and `name` of a spec that names a function; None for other specs.

    Raises:
        ValueError: the spec is a Python file without a function.
    """
    if URL.match(spec) or Path(spec).is_dir():
        return None
    if spec.endswith(".py"):
        raise ValueError(f"reward {spec}: expected {spec}:function, got no function")
    return None if Path(spec).exists() else FUNCTION.match(spec)


def load_callable(spec: str | Callable[..., Any], option: str) -> RewardTerm:
    """Load `file.py:name` or `package.module:name`, or take a callable, with its fingerprint.

    Args:
        option: name of the option, which becomes the name of the term.

    Raises:
        ValueError: it does not exist.
    """
    function: Any = spec
    if isinstance(spec, str):
        match = FUNCTION.match(spec)
        if match is None:
            name = "Name" if option == "environment" else "function"
            raise ValueError(f"{option} {spec}: expected file.py:{name} or module:{name}")
        function = _load_function(match["where"], match["name"], option)
    return RewardTerm(option, function, fingerprint=_fingerprint(spec, function))


def _load_function(where: str, name: str, option: str) -> Any:
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
        is_kind = inspect.isclass if option == "environment" else inspect.isfunction
        known = [key for key, value in vars(module).items() if is_kind(value)]
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
    unique = f"fastppo_reward_{fingerprint.of_text(str(path.resolve()))}_{path.stem}"
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


def _fingerprint(spec: str | Reward, function: Any) -> str:
    """Fingerprint the weights of a reward model, an address, or the code of a function.

    The code is the file that the spec names and the file that defines the function. Without a file,
    take the name.
    """
    if not _is_definition(function):
        from fastppo.rewards.model import RewardModel  # imports transformers

        if isinstance(function, RewardModel):
            tokenizer = fingerprint.of_tokenizer(function.tokenizer)
            return fingerprint.of_text(f"{fingerprint.of_model(function.model)} {tokenizer}")
    parts = []
    if isinstance(spec, str):
        match = FUNCTION.match(spec)
        if URL.match(spec) or addresses.is_address(spec) or match is None:
            return fingerprint.of_text(spec)
        where = match["where"]
        parts.append(_code(where if where.endswith(".py") else sys.modules[where]))
    defined = function
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


def reward_name(spec: str) -> str:
    """Return a short name for logs: of the function, the model directory or the URL."""
    if URL.match(spec):
        return address_name(spec)
    if match := match_function(spec):
        return match["name"]
    return Path(spec).name


def make_terms(
    rewards: Sequence[str | Reward], weights: Sequence[float] | None = None, **options: Any
) -> list[RewardTerm]:
    """Load rewards and give each a unique name.

    Args:
        options: options of `load_reward`.

    Raises:
        ValueError: the number of weights is not the number of rewards.
    """
    if weights is not None and len(weights) != len(rewards):
        raise ValueError(f"got {len(rewards)} rewards and {len(weights)} reward_weights")
    terms: dict[str, RewardTerm] = {}
    for i, reward in enumerate(rewards):
        if isinstance(reward, str):
            name = reward_name(reward)
            function = load_reward(reward, **options)
        else:
            name = getattr(reward, "__name__", type(reward).__name__)
            function = reward
        unique = name
        suffix = 2
        while unique in terms:
            unique = f"{name}_{suffix}"
            suffix += 1
        weight = 1.0 if weights is None else float(weights[i])
        terms[unique] = RewardTerm(
            unique,
            function,
            weight,
            fingerprint=_fingerprint(reward, function),
            is_named_function=isinstance(reward, str) and match_function(reward) is not None,
        )
    return list(terms.values())
