"""Loading what a directory or hub name holds, and refusing what would train in silence on less:
another kind of model, or weights that are not there and would be random.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


def model_config(name: str, what: str = "model") -> Any:
    """The config of a directory or hub name.

    Args:
        what: the option that names it, for the message.

    Raises:
        ValueError: there is no model of that name.
    """
    path = Path(name)
    if not path.exists() and (name.count("/") > 1 or name.startswith((".", "/", "~"))):
        raise ValueError(f"{what} {name}: there is no such directory")
    if path.is_file():
        raise ValueError(f"{what} {name} is a file; want a directory of save_pretrained")
    if path.is_dir() and not (path / "config.json").exists():
        raise ValueError(f"{what} {name}: no config.json there; want what save_pretrained wrote")
    try:
        return AutoConfig.from_pretrained(name)
    except OSError as error:
        raise ValueError(
            f"{what} {name}: no such directory, and no model of the hub that loads: {error}"
        ) from error


def is_sequence_classifier(config: Any) -> bool:
    """Whether a config is of a sequence-classification model, as reward models are."""
    return any(each.endswith("ForSequenceClassification") for each in config.architectures or ())


def check_all_loaded(name: str, what: str, model: PreTrainedModel, missing: Any) -> None:
    """Raises ValueError for weights that the files lack: transformers draws them at random."""
    if missing:
        named = ", ".join(sorted(missing)[:3]) + (", …" if len(missing) > 3 else "")
        raise ValueError(
            f"{what} {name} lacks weights of {type(model).__name__}: {named}. They would be "
            "random; was it saved as a model of another kind?"
        )


def load_tokenizer(name: str, what: str = "model") -> Any:
    """The tokenizer of a directory or hub name; raises ValueError if there is none."""
    model_config(name, what)  # tells a wrong name from a missing tokenizer
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"{what} {name}: no tokenizer that loads there: {error}") from error


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


def load_causal_lm(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "auto",
    device: torch.device | str = "cpu",
    what: str = "model",
) -> PreTrainedModel:
    """A causal LM of a directory or hub name.

    Args:
        what: the option that names it, for the message.

    Raises:
        ValueError: there is no model, or it is no causal LM (an encoder–decoder, a reward model,
            a checkpoint without all of its weights).
    """
    config = model_config(name, what)
    if config.is_encoder_decoder:
        raise ValueError(
            f"{what} {name} is an encoder–decoder ({config.model_type}); want a causal LM"
        )
    if is_sequence_classifier(config):
        raise ValueError(f"{what} {name} is a {config.architectures[0]}; want a causal LM")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        name,
        dtype=dtype,
        attn_implementation=attention_implementation(attn_implementation, dtype),
        output_loading_info=True,
    )
    model, loading = loaded
    check_all_loaded(name, what, model, loading["missing_keys"])
    return model.to(device)
