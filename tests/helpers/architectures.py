"""Tiny models of the causal LMs of transformers, and what a run does with each of them.

`tests/tools/models_page.py` writes the results into docs/models.md.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any, NamedTuple

import tiny
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fastppo.models.adapters import add_adapters, merged_state
from fastppo.models.packing import difference
from fastppo.models.policy import LanguageModel
from fastppo.models.trunk import hidden_states, trunk_of
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.trainer import PPOTrainer
from fastppo.rollout.decoder import DecoderEngine

TINY: dict[str, Any] = {
    "vocab_size": len(tiny.VOCABULARY),
    "pad_token_id": 0,
    "eos_token_id": 1,
    "max_position_embeddings": tiny.CONTEXT,
    "n_positions": tiny.CONTEXT,
    "initializer_range": 0.15,  # distinct logits
    "hidden_size": 32,
    "d_model": 32,
    "embedding_size": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    # Mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    # Multi-head latent attention, and its index
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "qk_head_dim": 8,
    "v_head_dim": 8,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": tiny.CONTEXT,  # all tokens of so short sequences
    # Linear attention and state spaces
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_d_ssm": 64,
    "mamba_n_groups": 1,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_dt_rank": 4,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "ssm_state_size": 8,
    "state_size": 8,
    "time_step_rank": 4,
    "lru_width": 32,
}
"""Sizes of a tiny model, by field of a config; a config takes the fields that it has."""

LATENT = {"num_key_value_heads": 4}
"""Multi-head latent attention has as many heads of keys as of queries."""
INKLING = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 8,
    "rel_extent": 16,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OVERRIDES: dict[str, dict[str, Any]] = {
    "axk1": LATENT,
    "axk2": LATENT,
    "bailing_hybrid": {"layer_group_size": 2, "first_k_dense_replace": 1, **LATENT},
    "bamba": {"attn_layer_indices": [1]},
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
        "sliding_window": 4,
    },
    "cpmant": {
        "dim_head": 8,
        "dim_ff": 48,
        "position_bias_num_buckets": 8,
        "position_bias_max_distance": 32,
    },
    "ctrl": {"dff": 48},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4},
    },
    "deepseek_v2": LATENT,
    "deepseek_v3": {"first_k_dense_replace": 1, **LATENT},
    "deepseek_v32": {"first_k_dense_replace": 1, **LATENT},
    "deepseek_v4": {"sliding_window": 8, "o_lora_rank": 8, "o_groups": 2, "num_key_value_heads": 1},
    "dory": {
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
        "sliding_window": 8,
    },
    "dots3_note_text": LATENT,
    "gemma3_text": {
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma3n_text": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": len(tiny.VOCABULARY),
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "gemma4_text": {
        "sliding_window": 8,
        "global_head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": len(tiny.VOCABULARY),
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
    },
    "gemma4_unified_text": {
        "sliding_window": 8,
        "global_head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": {"first_k_dense_replace": 1, **LATENT},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "inkling_text": INKLING,
    "inkling2_text": {"unpadded_vocab_size": len(tiny.VOCABULARY), **INKLING},
    "inkling2_loop_text": {"unpadded_vocab_size": len(tiny.VOCABULARY), **INKLING},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "use_mamba_kernels": False,
    },
    "kimi_linear": {
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "num_key_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"zero_expert_num": 2, "head_dim": 4, **LATENT},
    "minicpm3": LATENT,
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "nemotron_h": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "attention", "moe"],
        "moe_shared_expert_intermediate_size": 16,
        "n_groups": 1,
    },
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": tiny.CONTEXT,
        "indexer_compress_ratio": 4,
    },
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {
        "block_types": ["recurrent", "attention"],
        "attention_window_size": 8,
    },
    "xlstm": {"num_heads": 4, "embedding_dim": 32, "ffn_round_up_to_multiple_of": 8},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
        "n_mamba_heads": 2,
        "use_mamba_kernels": False,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "mamba_headdim": 8,
        "num_key_value_heads": 4,
        "use_mamba_kernels": False,
        "adapter_rank": 4,
    },
    "youtu": {"pad_token_id": None, **LATENT},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
"""Further values by type, where those of `TINY` do not fit: one layer of each kind in a hybrid
model, and dimensions under names of their own."""

OTHER_KINDS = {
    "encoders": (
        "bert camembert data2vec-text electra ernie megatron-bert rembert roberta "
        "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod big_bird reformer "
        "xlm xlnet"
    ),
    "decoders of encoder-decoder models": (
        "bart bert-generation bigbird_pegasus blenderbot blenderbot-small marian mbart musicgen "
        "musicgen_melody mvp pegasus plbart prophetnet trocr whisper"
    ),
    "models of bytes, images or speech": (
        "blt emu3 fuyu gemma3 gemma3n gemma4 gemma4_unified git got_ocr2 mllama moshi "
        "moss_transcribe_diarize phi4_multimodal dots3_note qwen3_5 qwen3_5_moe qwen4_exp llama4"
    ),
    "draft models": "gemma4_assistant gemma4_unified_assistant",
    "models of another type's class": (
        "exaone gpt-sw3 internlm3 iquestcoder sarvam_mla sarvam_moe"
    ),
}
"""Types of `AutoModelForCausalLM` that are no decoders of text alone, or repeat another one. Text
models of the third group have types of their own, such as llama4_text."""


SPARSE = "Tested with a top-k as large as the context: its sparse attention is not covered."
NOTES: dict[str, str] = {
    "axk2": SPARSE,
    "cpmant": "The self-check stops the run: no engine has the logprobs of the trainer.",
    "deepseek_v32": SPARSE,
    "deepseek_v4": SPARSE,
    "doge": (
        "Tested with `keep_window_size` above the context. Beyond it the logprobs of every engine "
        "differed from a tiny model's own, by up to 0.4 nats; the self-check sees short sequences."
    ),
    "dots3_note_text": SPARSE,
    "glm_moe_dsa": SPARSE,
    "hy_v4": SPARSE,
    "modernbert-decoder": "A run stops at the start: there is a layer between trunk and lm-head.",
    "qwen4_exp_text": SPARSE,
    "zamba": "LoRA is refused: layers share their weights.",
    "zamba2": "LoRA is refused: layers share their weights.",
    "youtu": "Once loaded, the saved policy gives the padding token a logit of 0.",
}
"""Notes on docs/models.md, by type."""


class Row(NamedTuple):
    """What a run does with an architecture."""

    engine: str
    """`decoder`, or how `generate` works; "" if it does not train."""
    packing: str
    """`yes` or `no`."""
    lora: str
    """Names of the layers that get adapters by default; "" if PEFT knows none."""
    failure: str = ""
    """The error at the start of a run."""


def known_types() -> list[str]:
    """Return the types of the installed transformers that are decoders of text."""
    excluded = {name for names in OTHER_KINDS.values() for name in names.split()}
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - excluded)


def config_of(model_type: str) -> PretrainedConfig:
    """Return the config of a tiny model."""
    kind = CONFIG_MAPPING[model_type]
    names = {*inspect.signature(kind.__init__).parameters, *kind.attribute_map}
    if dataclasses.is_dataclass(kind):
        names |= {field.name for field in dataclasses.fields(kind)}
    values = {name: value for name, value in TINY.items() if name in names}
    return kind(**values | OVERRIDES.get(model_type, {}))


def model(model_type: str) -> Any:
    """Return a tiny model, the same in each call."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(model_type)).eval()


IDS = torch.arange(3, 3 + 18).view(2, 9)
PROMPTS = [{"prompt": " ".join(f"w{3 * i + j}" for j in range(1 + i))} for i in range(4)]
"""Prompts of one to four tokens."""


@torch.no_grad()
def logits_of(causal_lm: Any) -> torch.Tensor:
    """Return a model's own logits of `IDS`."""
    return causal_lm(input_ids=IDS, use_cache=False).logits.float()


def trainer_of(model_type: str, directory: Path) -> PPOTrainer:
    """Return a trainer of two iterations, whose rows end at different tokens."""
    config = PPOConfig(
        **tiny.options(
            directory,
            rollout_batch_size=8,
            samples_per_prompt=2,
            max_new_tokens=6,
            stop_token_ids=[1, 3, 4, 5, 6, 7, 8],
            ppo_epochs=1,
            microbatch_size=4,
            learning_rate=1e-2,
        )
    )
    return PPOTrainer(
        config,
        model=model(model_type),
        tokenizer=tiny.tokenizer(),
        prompts=PROMPTS,
        rewards=[tiny.every_other],
        console=Console(quiet=True),
    )


def examine(model_type: str, directory: Path) -> Row:
    """Train a tiny model, save and load it, pack its rows and add adapters.

    Raises:
        AssertionError: a result is wrong.
    """
    try:
        trainer = trainer_of(model_type, directory)
        before = logits_of(trainer.model.causal_lm)
        metrics = trainer.train()  # checks that the first update is on-policy
    except ValueError as error:
        return Row("", "", "", failure=str(error))
    except RuntimeError as error:
        if not str(error).startswith("self-check"):
            raise
        return Row("", "", "", failure=str(error))
    trained = logits_of(trainer.model.causal_lm)
    assert not torch.equal(trained, before)
    assert all(value == value for value in metrics.values()), metrics
    loaded = LanguageModel(AutoModelForCausalLM.from_pretrained(directory / "run" / "policy"))
    assert_equal(logits_of(loaded.causal_lm), trained)
    assert_equal(loaded.head.logits(hidden_states(trunk_of(loaded.causal_lm), IDS)), trained)
    packs = difference(trunk_of(loaded.causal_lm)) is None
    if packs:
        batch = tiny.random_batch()
        padded = loaded.response_logprobs(batch)
        loaded.packing = True
        assert_equal(loaded.response_logprobs(batch), padded)
    return Row(
        engine=engine_name(trainer.engine),
        packing="yes" if packs else "no",
        lora=adapted_layers(model_type),
    )


def engine_name(engine: Any) -> str:
    """Return how the engine of a run works, on docs/models.md."""
    if isinstance(engine, DecoderEngine):
        return "decoder"
    return "generate" + " by length" * engine.equal_lengths + ", no cache" * (not engine.use_cache)


def assert_equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare logits or logprobs, sums in fp32 that may be in another order."""
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def adapted_layers(model_type: str) -> str:
    """Return the names of the layers that get adapters by default, and check that they merge."""
    causal_lm = model(model_type)
    try:
        add_adapters(causal_lm, rank=2, alpha=4.0)
    except ValueError:  # PEFT, or tied layers
        return ""
    tiny.stir_adapters(causal_lm)
    names = [
        [part for part in name.split(".") if part != "base_layer"][-2]
        for name, _ in causal_lm.named_modules()
        if name.endswith(".lora_A")
    ]
    plain = model(model_type)
    plain.load_state_dict(merged_state(causal_lm))
    assert_equal(logits_of(plain), logits_of(causal_lm))
    return ", ".join(sorted({*names}))


def page_rows(text: str) -> dict[str, Row]:
    """Read the rows of docs/models.md by type."""
    rows = {}
    for line in text.splitlines():
        if match := re.match(r"\| `([^`]+)` \|(.*)\|$", line):
            engine, packing, lora, _ = (cell.strip() for cell in match[2].split(" | "))
            rows[match[1]] = Row(engine.strip("–"), packing.strip("–"), lora.strip("–"))
    return rows


def version_of(text: str) -> str:
    """Return the version of transformers on docs/models.md."""
    match = re.search(r"transformers ([0-9]+\.[0-9]+\.[0-9]+)", text)
    assert match is not None
    return match[1]
