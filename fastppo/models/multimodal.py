"""Vision-language models: the language model is trained, and everything else is frozen.

transformers wraps a vision tower, a projector and a language model. The wrapper is the `base_model`
of the whole, so the one trunk and the one head of FastPPO stay what they are, and the policy is
saved under the names of the weights in its checkpoint. Vision tower and projector are frozen. The
policy's copies share them in memory, and so does another reference or critic if there are images.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from fastppo.models.trunk import trunk_of

Module = TypeVar("Module", bound=nn.Module)

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
"""Files of a checkpoint that transformers and vLLM need to read images, apart from the
tokenizer's."""


def auto_class(config: Any) -> Any:
    """Return the auto class of transformers that loads a checkpoint with all its parts.

    `AutoModelForCausalLM` would load some vision-language checkpoints without the vision tower, and
    does not know others.
    """
    whole: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    names = config.architectures or []
    if whole is None or (names and whole.__name__ not in names):
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


def is_multimodal(config: Any) -> bool:
    """Return whether a config has a language model's config within it."""
    return config.get_text_config() is not config


def language_trunk(model: PreTrainedModel) -> Any:
    """Return the trunk of a causal LM without a vision tower and a projector."""
    return model.get_decoder() if is_multimodal(model.config) else trunk_of(model)


def language_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return the language model and the lm-head, if there is one.

    Args:
        model: a causal LM or its trunk.

    Raises:
        ValueError: transformers cannot tell the language model from the rest.
    """
    decoder = model.get_decoder()
    if decoder is model or decoder is model.base_model:
        raise ValueError(
            f"{type(model).__name__}: its language model cannot be told from its vision tower"
        )
    head = model.get_output_embeddings()
    return [decoder] if head is None else [decoder, head]


def frozen_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the parameters outside the language model; none for a model of text.

    Raises:
        ValueError: transformers cannot tell the language model from the rest.
    """
    if not is_multimodal(model.config):
        return []
    language = {id(p) for module in language_modules(model) for p in module.parameters()}
    return [p for p in model.parameters() if id(p) not in language]


def named_frozen(model: PreTrainedModel) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters outside the language model under all their names."""
    frozen = {id(p) for p in frozen_parameters(model)}
    named = model.named_parameters(remove_duplicate=False)
    return [(name, p) for name, p in named if id(p) in frozen]


def frozen_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules outside the language model by their names; none for a model of text."""
    frozen = {id(p) for p in frozen_parameters(model)}
    return {
        name: module
        for name, module in model.named_modules()
        if frozen and any(id(p) in frozen for p in module.parameters(recurse=False))
    }


def freeze(model: PreTrainedModel) -> None:
    """Freeze everything outside the language model.

    Raises:
        ValueError: transformers cannot tell the language model from the rest.
    """
    for parameter in frozen_parameters(model):
        parameter.requires_grad_(False)


def copy_sharing_frozen(module: Module, model: PreTrainedModel) -> Module:
    """Return a deep copy of a module that shares what is frozen in `model`."""
    shared: dict[int, Any] = {id(p): p for p in frozen_parameters(model)}
    return copy.deepcopy(module, shared)


def different_frozen(trunk: Any, other: Any) -> str | None:
    """Return the name of the first frozen parameter in which two trunks differ.

    Args:
        trunk, other: trunks of one class, on one device.

    Returns:
        None if vision tower and projector are the same.
    """
    theirs = dict(other.named_parameters(remove_duplicate=False))
    for name, parameter in named_frozen(trunk):
        own = theirs.get(name)
        if own is None or own.dtype != parameter.dtype or not torch.equal(own, parameter):
            return name
    return None


def share_frozen(trunk: Any, other: Any) -> None:
    """Replace the frozen parameters of `trunk` by those of `other`, so that one is in memory."""
    theirs = dict(other.named_parameters(remove_duplicate=False))
    for name, _ in named_frozen(trunk):
        module, _, attribute = name.rpartition(".")
        setattr(trunk.get_submodule(module), attribute, theirs[name])


def not_quantized(config: Any) -> list[str] | None:
    """Return the names of the modules that keep their dtype when a model is quantized.

    These are the lm-head and what is frozen. None leaves the choice to transformers, which names
    the lm-head for models of text.
    """
    if not is_multimodal(config):
        return None
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    head = model.get_output_embeddings()
    heads = [name for name, module in model.named_modules() if module is head]
    return [*heads, *frozen_modules(model)]


def processor_files(name: str, *, local_files_only: bool = False) -> list[Path]:
    """Return the files of an image processor in a directory or a repository of the hub.

    Args:
        name: a directory or hub name; "" has no files.
        local_files_only: whether to look only in the hub's cache.
    """
    directory = Path(name)
    if not name:
        return []
    if not directory.is_dir():
        from huggingface_hub import snapshot_download

        directory = Path(
            snapshot_download(
                name, allow_patterns=list(PROCESSOR_FILES), local_files_only=local_files_only
            )
        )
    return [path for file in PROCESSOR_FILES if (path := directory / file).is_file()]


def save_processor_files(model: PreTrainedModel, directory: Path) -> None:
    """Copy the processor files of the checkpoint that a model was loaded from; none for text."""
    if is_multimodal(model.config):
        for path in processor_files(model.name_or_path or "", local_files_only=True):
            shutil.copyfile(path, directory / path.name)
