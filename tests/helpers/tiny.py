"""Tiny models with random weights, for all tested architectures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    LlamaForSequenceClassification,
    MistralConfig,
    OPTConfig,
    PhiConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from fastppo.data.batch import Batch

WORDS = 40
VOCABULARY = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>"])}
VOCABULARY |= {f"w{i}": i + 3 for i in range(WORDS)}
CONTEXT = 64

CHAT_TEMPLATE = (
    "{% for m in messages %}w{{ loop.index }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}w0{% endif %}"
)


def tokenizer(*, pad_is_eos: bool = False, chat: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word, w0 … w39."""
    words = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<eos>" if pad_is_eos else "<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE if chat else None,
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per UTF-8 byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": 0} | {character: i + 1 for i, character in enumerate(alphabet)}
    pieces = Tokenizer(models.BPE(vocabulary, []))
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="<eos>")


def _common(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(VOCABULARY),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        **more,
    }


def _decoder(**more: Any) -> dict[str, Any]:
    return _common(intermediate_size=48, num_key_value_heads=2, **more)


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_decoder()),
    "qwen2": lambda: Qwen2Config(**_decoder(tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3Config(**_decoder(head_dim=8)),
    "mistral": lambda: MistralConfig(**_decoder(sliding_window=None)),
    # The cap is small enough to affect random weights.
    "gemma2": lambda: Gemma2Config(**_decoder(head_dim=8, final_logit_softcapping=0.3)),
    "gpt2": lambda: GPT2Config(
        vocab_size=len(VOCABULARY),
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=CONTEXT,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**_common(intermediate_size=48)),
    # The windows are shorter than the sequences of the tests.
    "gemma3": lambda: Gemma3TextConfig(
        **_decoder(
            head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
        )
    ),
    "mistral-window": lambda: MistralConfig(**_decoder(sliding_window=4)),
    "opt": lambda: OPTConfig(**_common(ffn_dim=48, word_embed_proj_dim=24, dropout=0.3)),
    "cohere": lambda: CohereConfig(**_decoder(logit_scale=0.25)),
    "granite": lambda: GraniteConfig(**_decoder(logits_scaling=3.0)),
    "phi": lambda: PhiConfig(**_decoder()),  # its lm-head has a bias
}
TRAINED = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2", "opt")
"""Architectures for tests of the trainer; the others are for tests of heads."""


def model(architecture: str = "llama", seed: int = 0) -> Any:
    """Return a causal LM with random weights, large enough for distinct logits."""
    return model_of(CONFIGS[architecture](), seed)


def model_of(config: PretrainedConfig, seed: int = 0) -> Any:
    """Return a causal LM of the given config."""
    torch.manual_seed(seed)
    causal_lm = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in causal_lm.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(3.0)
        bias = getattr(causal_lm.get_output_embeddings(), "bias", None)
        if bias is not None:
            bias.normal_()
    return causal_lm


def stir_adapters(causal_lm: Any, std: float = 0.3) -> None:
    """Set the B matrices of adapters, which are initially zero, to random values."""
    with torch.no_grad():
        for name, parameter in causal_lm.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=std)


def saved_model(directory: Path, architecture: str = "llama", **options: Any) -> str:
    """Save a model and tokenizer; return the directory."""
    model(architecture).save_pretrained(directory)
    tokenizer(**options).save_pretrained(directory)
    return str(directory)


def saved_reward_model(directory: Path, *, labels: int = 1, pad_is_eos: bool = False) -> str:
    """Save a sequence classifier and tokenizer; return the directory."""
    torch.manual_seed(0)
    config = LlamaConfig(**_decoder(num_labels=labels))
    config.pad_token_id = 1 if pad_is_eos else 0
    LlamaForSequenceClassification(config).save_pretrained(directory)
    tokenizer(pad_is_eos=pad_is_eos, chat=True).save_pretrained(directory)
    return str(directory)


def saved_text(path: Path) -> str:
    """Save pretraining text: eight rows of w1 w2 w3 w4, repeated."""
    row = '{"text": "' + " ".join(["w1", "w2", "w3", "w4"] * 6) + '"}\n'
    path.write_text(row * 8)
    return str(path)


def without_weight(directory: str, name: str) -> str:
    """Remove a tensor of a saved model; return the directory."""
    path = Path(directory) / "model.safetensors"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


PROMPTS = [{"prompt": f"w{i} w{(i * 7 + 1) % WORDS}", "wanted": f"w{i % 5}"} for i in range(24)]


def random_batch(lengths: Sequence[int] = (5, 3, 1)) -> Batch:
    """Return responses of these lengths to one prompt, the same in each call."""
    generator = torch.Generator().manual_seed(3)
    responses = [torch.randint(3, 40, (n,), generator=generator).tolist() for n in lengths]
    return Batch.of([[4, 5, 6]] * len(lengths), responses)


def count_w7(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """A reward that is easy to learn: the number of w7, divided by 8."""
    return [completion.split().count("w7") / 8 for completion in completions]


def every_other(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """Return rewards that differ whatever the completions are."""
    return [float(i % 2) for i in range(len(completions))]


def options(directory: Path, **more: Any) -> dict[str, Any]:
    """Return options of a run of one or two seconds."""
    return {
        "rollout_batch_size": 16,
        "max_new_tokens": 8,
        "iterations": 2,
        "ppo_epochs": 2,
        "minibatches": 2,
        "microbatch_size": 8,
        "learning_rate": 1e-3,
        "output_dir": str(directory / "run"),
        "checkpoint_interval": 0,
        "device": "cpu",
        **more,
    }
