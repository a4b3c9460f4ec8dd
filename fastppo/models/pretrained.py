"""Load models and tokenizers from a directory or the Hugging Face Hub.

Models that would load and then train wrongly are rejected: other kinds of models, and models with
missing weights, which transformers initializes at random.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    ProcessorMixin,
)

from fastppo.data.datasets import is_missing_path
from fastppo.data.files import MissingPathError
from fastppo.data.hub import check_reachable
from fastppo.models.multimodal import auto_class, is_multimodal, processor_files

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
"""A directory with a tokenizer has one of these."""


def model_config(name: str, what: str = "model") -> Any:
    """Return the config of a directory or hub name.

    Args:
        what: name of the option, for the message.

    Raises:
        ValueError: there is no such model.
    """
    path = Path(name)
    if is_missing_path(name):
        raise MissingPathError(f"{what} {name}: there is no such directory", name)
    if path.exists():
        _check_model_directory(path, f"{what} {name}")
    if not path.is_dir():
        try:
            check_reachable(name, "config.json")
        except ConnectionError as error:
            raise ValueError(f"{what} {name}: no such directory, and {error}") from error
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        # Loading a model ignores a damaged file, which would drop stop tokens.
        if (path / "generation_config.json").exists():
            GenerationConfig.from_pretrained(name)
    except Exception as error:  # damaged files can fail in any way
        begin = "" if path.is_dir() else "no such directory, and no model of the hub: "
        raise ValueError(f"{what} {name}: {begin}{_first_line(error)}") from error
    return config


def _check_model_directory(path: Path, which: str) -> None:
    """Raise ValueError unless a directory holds a full model; point to the policy of a run.

    Args:
        which: option and name, for the message.
    """
    if (path / "adapter_config.json").exists():
        raise ValueError(
            f"{which} holds a PEFT adapter; merge it first (merge_and_unload) and save the whole "
            "model"
        )
    if (path / "config.json").exists():
        return
    if (path / "policy" / "config.json").exists():
        raise ValueError(f"{which} is the directory of a run; its policy is {path / 'policy'}")
    if is_checkpoint(path):
        out = path.with_name(path.name.replace("checkpoint", "policy"))
        raise ValueError(f"{which} is a checkpoint; export its policy: fastppo export {path} {out}")
    raise ValueError(f"{which}: no config.json there; expected what save_pretrained writes")


def is_checkpoint(name: str | Path) -> bool:
    """Return whether a directory is a checkpoint of a PPO run."""
    path = Path(name)
    return path.name.startswith("checkpoint-") and (path / "manifest.json").is_file()


def _first_line(error: Exception) -> str:
    """Return the first line of an error, with the class of unusual errors."""
    text = next(iter(str(error).strip().splitlines()), "")
    return text if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {text}"


def is_sequence_classifier(config: Any) -> bool:
    """Return whether a config belongs to a sequence classifier, such as a reward model."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def load_whole(
    auto_class: Any,
    name: str,
    what: str,
    may_lack: Callable[[PreTrainedModel, str], bool] | None = None,
    **options: Any,
) -> tuple[PreTrainedModel, list[str]]:
    """Load a model with all its weights from a directory or hub name.

    Args:
        auto_class: a class of transformers, such as AutoModelForCausalLM.
        what: name of the option, for the message.
        may_lack: a function of the model and the name of a missing weight that returns whether the
            weight may be initialized at random. By default none may.

    Returns:
        The model, and the names of its missing weights.

    Raises:
        ValueError: files cannot be read, or weights are missing or have other shapes.
    """
    try:
        model, loading = auto_class.from_pretrained(
            name,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
            **options,
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # damaged files, or an invalid config
        raise ValueError(
            f"{what} {name}: the weights cannot be read: {_first_line(error)}"
        ) from error
    kind = type(model).__name__
    lacking = sorted(loading["missing_keys"])
    refused = [key for key in lacking if may_lack is None or not may_lack(model, key)]
    if refused:
        raise ValueError(
            f"{what} {name} lacks weights of {kind}: {_some(refused)}. They would be random; was "
            "it saved as another kind of model?"
        )
    other = [f"{key} {list(files)}" for key, files, _ in sorted(loading["mismatched_keys"])]
    if other:
        raise ValueError(
            f"{what} {name}: config.json and weights disagree; the files have {_some(other)}"
        )
    return model, lacking


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def load_tokenizer(name: str, what: str = "model") -> Any:
    """Load the tokenizer of a directory or hub name, with its chat template.

    Raises:
        ValueError: there is none.
    """
    config = model_config(name, what)  # reports a wrong name as such
    path = Path(name)
    if path.is_dir() and not any(any(path.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise ValueError(
            f"{what} {name} has no tokenizer; save it with the model by "
            f"tokenizer.save_pretrained({name!r})"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        if tokenizer.chat_template is None and is_multimodal(config):
            # Older checkpoints have it in chat_template.json, which tokenizers do not read.
            files, _ = ProcessorMixin.get_processor_dict(name)
            tokenizer.chat_template = files.get("chat_template")
    except Exception as error:  # damaged files, or the class of errors of `tokenizers`
        raise ValueError(
            f"{what} {name}: the tokenizer or its chat template cannot be loaded: "
            f"{_first_line(error)}"
        ) from error
    return tokenizer


def pad_token_id(tokenizer: Any, model: PreTrainedModel) -> int:
    """Return a padding id. Any token will do, since masks come from lengths."""
    model_pad_token = getattr(model.config.get_text_config(), "pad_token_id", None)
    for value in (tokenizer.pad_token_id, model_pad_token, tokenizer.eos_token_id):
        if isinstance(value, int) and value >= 0:
            return value
    return 0


def stop_token_ids(
    chosen: Sequence[int] | None, tokenizer: Any, model: PreTrainedModel
) -> tuple[int, ...]:
    """Return the chosen stop tokens, or the EOS tokens of the model and the tokenizer."""
    if chosen is not None:
        return tuple(chosen)
    stops: list[int] = []
    for value in (model.generation_config.eos_token_id, tokenizer.eos_token_id):
        if isinstance(value, list):
            stops += value
        elif value is not None:
            stops.append(value)
    return tuple(dict.fromkeys(stops))


def check_vocabulary(tokenizer: Any, rows: int) -> None:
    """Raise ValueError if the tokenizer has more tokens than the model's `rows`."""
    if len(tokenizer) > rows:
        raise ValueError(
            f"vocabulary mismatch: the tokenizer has {len(tokenizer)} tokens and the "
            f"model {rows}; this is another model's tokenizer"
        )


def attention_implementation(choice: str, dtype: torch.dtype) -> str | None:
    """Return the attention implementation for transformers.

    `auto` is flash-attn if it is installed and can run (a GPU, half-precision weights). Otherwise
    it is None: transformers' default, SDPA if the model supports it.

    Raises:
        ValueError: flash-attn with fp32 weights, for which it has no kernels.
    """
    if choice == "auto":
        installed = importlib.util.find_spec("flash_attn") is not None
        usable = installed and torch.cuda.is_available() and dtype != torch.float32
        return "flash_attention_2" if usable else None
    if choice.startswith("flash") and dtype == torch.float32:
        raise ValueError(f"attn_implementation={choice} needs param_dtype=bfloat16, got float32")
    return choice


def causal_lm_config(name: str, what: str = "model") -> Any:
    """Return the config of a causal LM; raise ValueError for other models."""
    config = model_config(name, what)
    if config.is_encoder_decoder:
        raise ValueError(
            f"{what} {name} is an encoder–decoder ({config.model_type}); expected a causal LM"
        )
    # A classifier with tied embeddings has all weights of a causal LM, so loading would succeed.
    for kind in config.architectures or ():
        if kind.endswith(("ForSequenceClassification", "ForTokenClassification")):
            raise ValueError(f"{what} {name} is a {kind}; expected a causal LM")
    return config


def load_causal_lm(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "auto",
    device: torch.device | str = "cpu",
    what: str = "model",
    quantization: Any = None,
) -> PreTrainedModel:
    """Load a causal LM from a directory or hub name, with its vision tower if it has one.

    Args:
        what: name of the option, for the message.
        quantization: a quantization config of transformers, for frozen weights.

    Raises:
        ValueError: there is no such model, it is not a causal LM, or it lacks weights.
    """
    config = causal_lm_config(name, what)
    place: dict[str, Any] = {}
    if quantization is not None:  # quantized on the device of the run
        place = {"quantization_config": quantization, "device_map": {"": device}}
    if is_multimodal(config):
        processor_files(name)  # into the hub's cache, since they are saved with the policy
    model, _ = load_whole(
        auto_class(config),
        name,
        what,
        dtype=dtype,
        attn_implementation=attention_implementation(attn_implementation, dtype),
        **place,
    )
    return model.to(device)  # type: ignore[arg-type]
