"""What the files of a model say of it before torch is imported: its kind, labels, vocabulary,
context and tokenizer.

Loading asks the same functions of the config that it has read, and so says the same sentences.
Where files are not here, or damaged, they say nothing: that is told where they are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastppo.models.names import read_config

TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
"""Files of chat templates; older ones stand in tokenizer_config.json."""

DEFAULT_LABELS = 2
"""Of a config that names none, as transformers has it."""


def architectures_of(config: Mapping[str, Any]) -> list[str]:
    """Classes of transformers that the weights were saved from."""
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, (list, tuple)) else []


def labels_of(config: Mapping[str, Any]) -> int:
    """How many labels a classifier of this config has."""
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else config.get("num_labels")
    return count if isinstance(count, int) else DEFAULT_LABELS


def is_a(config: Mapping[str, Any], *kinds: str) -> bool:
    """Whether the name of an architecture ends in one of the kinds, such as `ForCausalLM`."""
    return any(name.endswith(kinds) for name in architectures_of(config))


def check_causal_lm(config: Mapping[str, Any], name: str, what: str = "model") -> None:
    """Raises ValueError for a config of an encoder–decoder or a classifier.

    Args:
        what: the option that names the model, for the message.
    """
    if config.get("is_encoder_decoder"):
        kind = config.get("model_type")
        raise ValueError(f"{what} {name} is an encoder–decoder ({kind}); expected a causal LM")
    # With tied weights nothing would be missing.
    if is_a(config, "ForSequenceClassification", "ForTokenClassification"):
        raise ValueError(f"{what} {name} is a {architectures_of(config)[0]}; expected a causal LM")


def check_reward_model(config: Mapping[str, Any], name: str) -> None:
    """Raises ValueError for a config of a model that gives several numbers, or none."""
    if config and labels_of(config) != 1:
        kind = ", ".join(architectures_of(config) or ["model"])
        raise ValueError(
            f"reward {name} is a {kind} with {labels_of(config)} labels; expected a sequence "
            "classifier with 1"
        )


def check_critic(name: str, kind: str, *, labels: int, is_decoder: bool = True) -> None:
    """Raises ValueError for a classifier that gives other than one value of each state."""
    if labels != 1 or not is_decoder:
        raise ValueError(
            f"critic_model {name}: expected a decoder with one label, got {kind} with {labels}"
        )


def check_not_quantized(config: Mapping[str, Any], name: str) -> None:
    """Raises ValueError for a config of weights that are quantized already."""
    if config.get("quantization_config") is not None:
        raise ValueError(
            f"model {name} is quantized already, which quantization=none does not train; pass "
            "its whole weights, and quantization=nf4 or fp4 with LoRA"
        )


def check_stop_tokens(stop: Sequence[int], vocabulary: int) -> None:
    """Raises ValueError for stop tokens beyond a model's vocabulary."""
    if any(not 0 <= token < vocabulary for token in stop):
        raise ValueError(f"stop_token_ids must be in [0, {vocabulary}), got {tuple(stop)}")


def vocabulary_of(config: Mapping[str, Any]) -> int | None:
    """Tokens of a model, where its config says it."""
    text_config = config.get("text_config", config)
    count = text_config.get("vocab_size") if isinstance(text_config, dict) else None
    return count if isinstance(count, int) and count > 0 else None


def check_room(context: int | None, max_new_tokens: int) -> int:
    """Tokens that a prompt may have beside a response.

    Raises:
        ValueError: there is no room for one.
    """
    if context is not None and max_new_tokens >= context:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} leaves no room for a prompt in the context of "
            f"{context} tokens"
        )
    return (context or 2**31) - max_new_tokens


def check_block_size(size: int, context: int | None) -> None:
    """Raises ValueError for blocks of pretraining text that are longer than the context."""
    if context is not None and size > context:
        raise ValueError(f"ptx_block_size={size} is longer than the context of {context} tokens")


def check_attention(choice: str, dtype: str) -> None:
    """Raises ValueError for flash-attn with fp32 weights, which it has no kernels for."""
    if choice.startswith("flash") and dtype == "float32":
        raise ValueError(f"attn_implementation={choice} needs param_dtype=bfloat16, got float32")


def has_chat_template(name: str) -> bool:
    """Whether the tokenizer of a directory has a chat template; true of a name of the hub."""
    path = Path(name)
    if not path.is_dir() or any(any(path.glob(pattern)) for pattern in TEMPLATES):
        return True
    return bool(read_config(name, "tokenizer_config.json").get("chat_template"))


def read_tokenizer(name: str) -> Any:
    """The tokenizer of a directory's tokenizer.json, of the library `tokenizers`, which costs a
    hundredth of transformers'; None where there is none that can be read."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(Path(name) / "tokenizer.json"))
    except Exception:  # its own errors have no other kind
        return None


def tokens_of(name: str) -> dict[str, int]:
    """The tokens of a directory's tokenizer.json with their ids; none where it cannot be read."""
    tokenizer = read_tokenizer(name)
    return {} if tokenizer is None else dict(tokenizer.get_vocab())


def count_tokens(tokenizer: Any, text: str) -> int:
    """Tokens of a text without special ones, by what `read_tokenizer` gives; 0 without one."""
    return 0 if tokenizer is None else len(tokenizer.encode(text, add_special_tokens=False).ids)


def check_same_vocabulary(
    tokens: Mapping[str, int], policy_tokens: Mapping[str, int], name: str, what: str
) -> None:
    """Raises ValueError if a token of the policy's tokenizer means another thing to a model.

    Args:
        tokens: of the model's tokenizer, with their ids.
        what: the option that names the model.
    """
    if tokens != policy_tokens:
        raise ValueError(
            f"{what} {name}: its tokenizer has another vocabulary ({len(tokens)} tokens) than the "
            f"policy's ({len(policy_tokens)}), so it cannot read the policy's tokens"
        )
