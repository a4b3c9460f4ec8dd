"""Loading models and tokenizers from a directory or hub name. What would load and then train
wrongly is refused: another kind of model, or missing weights, which would be random.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)

from fastppo.data.files import MissingPathError
from fastppo.data.rows import is_missing_path
from fastppo.functional.scalars import describe

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
"""A directory with a tokenizer has at least one of these."""


def model_config(name: str, what: str = "model") -> Any:
    """Return the config of a directory or hub name.

    Args:
        what: the option that names it, for the message.

    Raises:
        ValueError: there is no model of that name.
    """
    path = Path(name)
    if is_missing_path(name):
        raise MissingPathError(f"{what} {name}: there is no such directory", name)
    if path.exists():
        _check_model_directory(path, f"{what} {name}")
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        context = getattr(config.get_text_config(), "max_position_embeddings", None)
    except Exception as error:  # a config.json may hold anything, and fail in any way
        begin = "" if path.is_dir() else "no such directory, and no model of the hub that loads: "
        raise ValueError(f"{what} {name}: {begin}{_sentence(error)}") from error
    _check_stop_tokens(f"{what} {name}: config.json", config)
    if (path / GENERATION).exists():  # transformers does without one that it cannot read
        try:
            generation = GenerationConfig.from_pretrained(name)
        except Exception as error:  # as above
            raise ValueError(f"{what} {name}: {GENERATION}: {_sentence(error)}") from error
        _check_stop_tokens(f"{what} {name}: {GENERATION}", generation)
    if context is not None and (not isinstance(context, int) or context < 1):
        raise ValueError(
            f"{what} {name}: config.json: max_position_embeddings must be an integer >= 1, "
            f"got {context!r}"
        )
    return config


def _check_model_directory(path: Path, which: str) -> None:
    """Raise ValueError unless a directory holds a whole model; name the model of a run.

    Args:
        which: option and name, for the message.
    """
    if path.is_file():
        raise ValueError(f"{which} is a file; expected a directory of save_pretrained")
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


GENERATION = "generation_config.json"
"""Where a model's stop tokens may be."""


def _check_stop_tokens(where: str, config: Any) -> None:
    """Raises ValueError unless a config's stop tokens are none, an integer or a list of them."""
    value = getattr(config, "eos_token_id", None)
    tokens = value if isinstance(value, (list, tuple)) else [value]
    if value is not None and not all(type(token) is int for token in tokens):
        raise ValueError(
            f"{where}: eos_token_id must be an integer or a list of them, got {describe(value)}"
        )


def _sentence(error: Exception) -> str:
    """The first line of an error, with its kind where it says little by itself."""
    text = next(iter(str(error).strip().splitlines()), "")
    return text if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {text}"


def is_sequence_classifier(config: Any) -> bool:
    """Return whether a config is that of a sequence classifier, as reward models are."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def load_whole(
    auto_class: Any,
    name: str,
    what: str,
    may_lack: Callable[[PreTrainedModel, str], bool] | None = None,
    **options: Any,
) -> tuple[PreTrainedModel, list[str]]:
    """(the model of a directory or hub name, the names of the weights that the files lack).

    Args:
        auto_class: of transformers, such as AutoModelForCausalLM.
        what: the option that names it, for the message.
        may_lack: whether the model may do without a weight in the files; by default never.
            transformers draws such weights at random.

    Raises:
        ValueError: files that cannot be read, weights that are not there or of another shape.
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
    except Exception as error:  # of files that are damaged, or of a config that no model fits
        raise ValueError(
            f"{what} {name}: the weights cannot be read: {_sentence(error)}"
        ) from error
    kind = type(model).__name__
    lacking = sorted(loading["missing_keys"])
    refused = [key for key in lacking if may_lack is None or not may_lack(model, key)]
    if refused:
        raise ValueError(
            f"{what} {name} lacks weights of {kind}: {_some(refused)}. They would be random; was "
            "it saved as a model of another kind?"
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
    """The tokenizer of a directory or hub name; raises ValueError if there is none."""
    model_config(name, what)  # a wrong name is not a missing tokenizer
    path = Path(name)
    if path.is_dir() and not any(any(path.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise ValueError(
            f"{what} {name}: no tokenizer is there; save it beside the model by "
            f"tokenizer.save_pretrained({name!r})"
        )
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # the tokenizers' own have no kind but this
        raise ValueError(
            f"{what} {name}: no tokenizer that loads there: {_sentence(error)}"
        ) from error


def pad_token_id(tokenizer: Any, model: PreTrainedModel) -> int:
    """The id to pad with: any token will do, since masks come from lengths."""
    model_pad_token = getattr(model.config.get_text_config(), "pad_token_id", None)
    for value in (tokenizer.pad_token_id, model_pad_token, tokenizer.eos_token_id):
        if isinstance(value, int) and value >= 0:
            return value
    return 0


def stop_token_ids(
    chosen: Sequence[int] | None, tokenizer: Any, model: PreTrainedModel
) -> tuple[int, ...]:
    """The tokens that end a response: the chosen ones, or the model's and the tokenizer's EOS."""
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
    """Raises ValueError where the tokenizer has tokens that a model of `rows` tokens has not."""
    if len(tokenizer) > rows:
        raise ValueError(
            f"vocabulary mismatch: the tokenizer has {len(tokenizer)} tokens and the "
            f"model {rows}; this is another model's tokenizer"
        )


def attention_implementation(choice: str, dtype: torch.dtype) -> str | None:
    """What transformers is asked for. `auto` is flash-attn where it is installed and can run (a
    GPU, half-precision weights), else None: transformers then takes SDPA if the model allows it.

    Raises:
        ValueError: flash-attn is asked for with fp32 weights, which it has no kernels for.
    """
    if choice == "auto":
        installed = importlib.util.find_spec("flash_attn") is not None
        usable = installed and torch.cuda.is_available() and dtype != torch.float32
        return "flash_attention_2" if usable else None
    if choice.startswith("flash") and dtype == torch.float32:
        raise ValueError(f"attn_implementation={choice} needs param_dtype=bfloat16, got float32")
    return choice


def causal_lm_config(name: str, what: str = "model") -> Any:
    """The config of a directory or hub name that is of a causal LM; raises ValueError if not."""
    config = model_config(name, what)
    if config.is_encoder_decoder:
        raise ValueError(
            f"{what} {name} is an encoder–decoder ({config.model_type}); expected a causal LM"
        )
    # A classifier with tied embeddings has every weight of a causal LM, so loading would succeed.
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
    """A causal LM of a directory or hub name.

    Args:
        quantization: a config of transformers, for frozen weights of few bits.
        what: the option that names it, for the message.

    Raises:
        ValueError: there is no model, or it is no causal LM (an encoder–decoder, a reward model,
            a checkpoint without all of its weights).
    """
    causal_lm_config(name, what)
    place: dict[str, Any] = {}
    if quantization is not None:  # made on the device that they are used on
        place = {"quantization_config": quantization, "device_map": {"": device}}
    model, _ = load_whole(
        AutoModelForCausalLM,
        name,
        what,
        dtype=dtype,
        attn_implementation=attention_implementation(attn_implementation, dtype),
        **place,
    )
    return model.to(device)  # type: ignore[arg-type]
