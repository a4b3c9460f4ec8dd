"""The names of models, a directory or a name of the hub, and of devices, checked before torch is
imported."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastppo.data.files import MissingPathError
from fastppo.data.rows import is_missing_path
from fastppo.functional.scalars import describe

HUB_SECONDS = 10.0
"""In which the hub says whether it has a model. Loading asks five times, with pauses."""


TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
"""A directory with a tokenizer has at least one of these."""

WEIGHT_FILES = ("*.safetensors", "*.bin")
"""And one with weights one of these."""

DEVICE_NAME = re.compile(r"auto|cpu(:0)?|cuda(:(0|[1-9][0-9]*))?")
"""`auto`, and names that torch has for the devices that are computed on."""


def check_device_name(name: str) -> None:
    """Raises ValueError for a name of no device, or of none that FastPPO computes on."""
    if DEVICE_NAME.fullmatch(name) is None:
        raise ValueError(f"device must be auto, cpu, cuda, cuda:1, …, got {describe(name)}")


def check_model_name(name: str, what: str = "model") -> None:
    """Checks that there is a model of this name.

    Args:
        what: the option that names it, for the message.

    Raises:
        ValueError: there is no model; of a run or a checkpoint it says where the policy is.
    """
    path = Path(name)
    if is_missing_path(name):
        raise MissingPathError(f"{what} {name}: there is no such directory", name)
    if path.is_file():
        raise ValueError(f"{what} {name} is a file; expected a directory of save_pretrained")
    if not path.exists():
        _check_hub(name, what)
        return
    if (path / "adapter_config.json").exists():
        raise ValueError(
            f"{what} {name} holds a PEFT adapter; merge it first (merge_and_unload) and save the "
            "whole model"
        )
    if (path / "config.json").exists():
        try:
            json.loads((path / "config.json").read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{what} {name}: config.json is not valid JSON: {error}") from error
        return
    if (path / "policy" / "config.json").exists():
        best = path / "policy-best"
        or_best = f", its best one {best}" if (best / "config.json").exists() else ""
        raise ValueError(
            f"{what} {name} is the directory of a run; its policy is {path / 'policy'}{or_best}"
        )
    if is_checkpoint(name):
        out = path.with_name(path.name.replace("checkpoint", "policy"))
        raise ValueError(
            f"{what} {name} is a checkpoint; `fastppo export {name} {out}` writes its policy to "
            f"{out}"
        )
    raise ValueError(f"{what} {name}: no config.json there; expected what save_pretrained writes")


def is_checkpoint(name: str) -> bool:
    """Whether a name is that of a directory that is a checkpoint of a run."""
    return Path(name).name.startswith("checkpoint-") and (Path(name) / "manifest.json").is_file()


def check_tokenizer_files(name: str, what: str = "model") -> None:
    """Raises ValueError for a directory without a tokenizer."""
    if not _has_one_of(name, TOKENIZER_FILES):
        raise ValueError(
            f"{what} {name}: no tokenizer is there; save it beside the model by "
            f"tokenizer.save_pretrained({name!r})"
        )


def check_weight_files(name: str, what: str = "model") -> None:
    """Raises ValueError for a directory without weights."""
    if not _has_one_of(name, WEIGHT_FILES):
        raise ValueError(
            f"{what} {name}: no weights are there; expected what save_pretrained writes"
        )


def _has_one_of(name: str, patterns: Sequence[str]) -> bool:
    """Whether a directory has such a file; true of a name of the hub."""
    path = Path(name)
    return not path.is_dir() or any(any(path.glob(pattern)) for pattern in patterns)


def _check_hub(name: str, what: str) -> None:
    """Raises ValueError where neither the hub nor its cache here has a model of this name."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        if _cached_config(name) is None:
            HfApi().model_info(name, timeout=HUB_SECONDS)
    except HFValidationError:
        raise MissingPathError(f"{what} {name}: there is no such directory", name) from None
    except RepositoryNotFoundError:
        raise MissingPathError(
            f"{what} {name}: no such directory, and no model of the hub that can be read",
            name,
        ) from None
    except Exception as error:  # of its HTTP library, which is no dependency of ours
        raise MissingPathError(
            f"{what} {name}: no such directory, and the hub does not answer: {error}", name
        ) from error


def _cached_config(name: str, file: str = "config.json") -> Path | None:
    """A file of a model in the hub's cache, if it is there."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, file)
    return Path(cached) if isinstance(cached, str) else None


def context_of(name: str) -> int | None:
    """Tokens that a model takes, if its config.json is here or in the hub's cache, and says it."""
    config = read_config(name)
    config = config.get("text_config", config)
    if not isinstance(config, dict):
        return None
    context = config.get("max_position_embeddings", config.get("n_positions"))
    return context if isinstance(context, int) else None


def read_config(name: str, file: str = "config.json") -> dict[str, Any]:
    """A file of JSON of a model that is here or in the hub's cache; nothing where it is not here or
    holds something else, which is told where it is loaded."""
    path = Path(name) / file if Path(name).exists() else _cached_config(name, file)
    try:
        config = json.loads(path.read_text("utf-8")) if path else {}
    except (OSError, ValueError, RecursionError):  # it may be anything
        return {}
    return config if isinstance(config, dict) else {}
