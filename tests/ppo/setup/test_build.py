"""Parts of a run, built from its options; parts that do not fit are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from fastppo.data.datasets import DataError
from fastppo.models.value import CriticValue, DetachedValue, SharedValue
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.parts import Parts
from fastppo.ppo.setup.build import build
from fastppo.ppo.setup.preflight import Given
from fastppo.ppo.trainer import PPOTrainer
from fastppo.rollout.decoder import DecoderEngine
from fastppo.rollout.generate import GenerateEngine
from runs import make_trainer


def _build(tmp_path: Path, architecture: str = "llama", **options: Any) -> Parts:
    """Build a run on a tiny model; `options` are fields of the config or of `Given`."""
    handed: dict[str, Any] = {"model": tiny.model(architecture), "tokenizer": tiny.tokenizer()}
    names = (
        "model",
        "tokenizer",
        "prompts",
        "rewards",
        "reference",
        "engine",
        "environment",
        "monitor_rewards",
    )
    handed |= {name: options.pop(name) for name in names if name in options}
    return build(PPOConfig(**tiny.options(tmp_path, **options)), Given(**handed))


# ----------------------------------------------------------------------------------- what is built


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, SharedValue),
        ({"value_model": "detached"}, DetachedValue),
        ({"value_model": "critic"}, CriticValue),
    ],
)
def test_value_model_chooses_the_value_function(options, kind: type, tmp_path: Path) -> None:
    assert type(_build(tmp_path, **options).model.value_function) is kind


@pytest.mark.parametrize("saved", ["reward", "causal"])
def test_a_critic_starts_from_critic_model(saved: str, tmp_path: Path) -> None:
    if saved == "reward":
        name = tiny.saved_reward_model(tmp_path / "critic")
    else:
        tiny.model(seed=5).save_pretrained(tmp_path / "critic")
        tiny.tokenizer().save_pretrained(tmp_path / "critic")
        name = str(tmp_path / "critic")
    model = _build(tmp_path, value_model="critic", critic_model=name).model
    own = model.causal_lm.base_model.state_dict()
    critic = model.value_function.trunk.state_dict()
    assert not torch.equal(
        own["layers.0.mlp.up_proj.weight"], critic["layers.0.mlp.up_proj.weight"]
    )
    started = model.value_function.head.weight.abs().max().item() > 0
    assert started == (saved == "reward"), "only a reward model has a head"


def test_sampling_follows_the_options(tmp_path: Path) -> None:
    sampling = _build(
        tmp_path, max_new_tokens=5, temperature=0.7, top_k=9, top_p=0.9, stop_token_ids=[7, 8]
    ).sampling
    assert (sampling.max_new_tokens, sampling.temperature) == (5, 0.7)
    assert (sampling.top_k, sampling.top_p, sampling.greedy) == (9, 0.9, False)
    assert sampling.stop_token_ids == (7, 8)
    assert _build(tmp_path, stop_strings=["w1"]).sampling.stop_strings == ("w1",)
    assert _build(tmp_path).sampling.stop_token_ids == (tiny.tokenizer().eos_token_id,)


def test_the_engine_samples_from_the_policy_unless_another_is_given(tmp_path: Path) -> None:
    components = _build(tmp_path, engine_options={"batch_size": 3}, truncated="bootstrap")
    assert isinstance(components.engine, DecoderEngine)
    assert components.engine.policy is components.model
    assert (components.engine.batch_size, components.engine.final_values) == (3, True)
    assert components.notes == []
    components = _build(
        tmp_path, engine_options={"batch_size": 3}, precision="bf16", rollout="generate"
    )
    assert isinstance(components.engine, GenerateEngine)
    assert components.engine.model is components.model.causal_lm
    assert (components.engine.batch_size, components.engine.compute_dtype) == (3, torch.bfloat16)
    engine = GenerateEngine(tiny.model(), 0)
    assert _build(tmp_path, engine=engine).engine is engine


def test_rewards_get_their_weights_and_an_ensemble_comes_last(tmp_path: Path) -> None:
    (tmp_path / "many.py").write_text("def one(prompts, completions):\n    return [1.0]\n")
    spec = f"{tmp_path}/many.py:one"
    scorer = _build(
        tmp_path,
        rewards=[tiny.count_w7, spec],
        monitor_rewards=[tiny.saved_reward_model(tmp_path / "rm")],
        reward_weights=[8.0, -0.5, 3.0],
        reward_ensemble=[spec, spec],
        reward_ensemble_by="lcb",
    ).scorer
    terms = [(term.name, term.weight) for term in scorer.terms]
    assert terms == [("count_w7", 8.0), ("one", -0.5), ("ensemble", 3.0)]
    assert scorer.terms[-1].function.by == "lcb"
    (monitor,) = scorer.monitors
    assert (monitor.name, monitor.weight, monitor.function.batch_size) == ("rm", 1.0, 32)
    assert scorer.failure_file == tmp_path / "run" / "failed_reward.json"


# ------------------------------------------------------------------------------------ the reference


def test_without_a_kl_there_is_no_reference(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, kl_coef=0.0)
    assert trainer.reference is None
    assert "kl" not in trainer.train()


def test_a_reference_by_name(tmp_path: Path) -> None:
    other = tiny.saved_model(tmp_path / "other", "qwen2")
    trainer = make_trainer(tmp_path, reference_model=other)
    assert trainer.train()["kl"] != 0
    with trainer.reference.loaded() as reference:
        assert reference.config.model_type == "qwen2"


def test_a_reference_that_is_passed_in_may_be_another_model(tmp_path: Path) -> None:
    assert make_trainer(tmp_path, reference=tiny.model(seed=1)).train()["kl"] > 0.01


def test_a_reference_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    small = tiny.model(seed=1)
    small.resize_token_embeddings(40)
    with pytest.raises(ValueError, match="a vocabulary of 40 tokens and the policy's tokenizer 43"):
        _build(tmp_path, reference=small)
    with pytest.raises(ValueError, match="reference_refresh replaces the reference"):
        _build(tmp_path, reference=tiny.model(seed=1), reference_refresh=3)


@pytest.mark.parametrize("option", ["reference_model", "critic_model"])
def test_a_model_of_another_vocabulary_is_refused(option: str, tmp_path: Path) -> None:
    name = tiny.saved_model(tmp_path / "other")
    other = tiny.tokenizer()
    other.add_tokens(["new"])
    other.save_pretrained(name)
    options = {option: name, "value_model": "critic" if option == "critic_model" else "shared"}
    with pytest.raises(ValueError, match=rf"{option} .* another vocabulary \(44 tokens\)"):
        _build(tmp_path, **options)


# ------------------------------------------------------------------------------------- the contexts


def _short_model(directory: Path, tokens: int) -> str:
    short = tiny.model("gpt2")
    short.config.n_positions = tokens
    short.transformer.wpe = torch.nn.Embedding(tokens, 32)
    short.save_pretrained(directory)
    tiny.tokenizer().save_pretrained(directory)
    return str(directory)


def test_the_context_is_the_shortest_of_policy_reference_and_critic(tmp_path: Path) -> None:
    assert _build(tmp_path).context == tiny.CONTEXT
    nine, ten = (_short_model(tmp_path / str(n), n) for n in (9, 10))
    critic = {"value_model": "critic", "critic_model": ten}
    assert _build(tmp_path, **critic).context == 10
    assert _build(tmp_path, reference_model=nine, **critic).context == 9


def test_a_critic_with_a_short_context_shortens_the_prompts(tmp_path: Path) -> None:
    short = _short_model(tmp_path / "short", 9)
    options = {"value_model": "critic", "critic_model": short}
    with pytest.raises(DataError, match=r"the prompt has 2 tokens; .* for 1"):
        _build(tmp_path, prompts=tiny.PROMPTS, **options)
    make_trainer(tmp_path, max_new_tokens=7, iterations=1, **options).train()


# -------------------------------------------------------------------------------- what does not fit


def test_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    large = tiny.tokenizer()
    large.add_tokens([f"new{i}" for i in range(50)])
    with pytest.raises(ValueError, match="vocabulary mismatch: the tokenizer has 93 tokens"):
        make_trainer(tmp_path, tokenizer=large)
    with pytest.raises(DataError, match=r"row 2: the prompt has 60 tokens; .* for 56"):
        make_trainer(tmp_path, prompts=[{"prompt": "w1"}, {"prompt": "w1 " * 60}])
    with pytest.raises(ValueError, match="max_new_tokens=64 leaves no room"):
        make_trainer(tmp_path, max_new_tokens=64)
    with pytest.raises(ValueError, match="needs prompts and at least one reward"):
        make_trainer(tmp_path, prompts=None).train()
    with pytest.raises(ValueError, match="model must be a directory or hub name"):
        PPOTrainer(PPOConfig(**tiny.options(tmp_path)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tokenizer": None}, "a model that is passed in needs its tokenizer passed in too"),
        ({"stop_token_ids": [1, 43]}, r"stop_token_ids must be in \[0, 43\), got \(1, 43\)"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be >= 0, got -1"),
        ({"lora_rank": 2, "lora_target_modules": ["lm_head"]}, "adapters on the lm_head"),
        ({"rewards": ["nowhere.py:f"]}, r"there is no file nowhere\.py"),
        ({"monitor_rewards": ["nowhere.py:f"]}, r"there is no file nowhere\.py"),
        ({"reward_weights": [1.0], "rewards": [tiny.count_w7] * 2}, "got 2 rewards and 1 reward_w"),
        ({"device": "gpu"}, "device must be auto, cpu, mps, cuda"),
    ],
)
def test_options_that_do_not_fit_the_parts_are_refused(
    options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=says):
        _build(tmp_path, **options)


def test_a_missing_reward_column_is_refused(tmp_path: Path) -> None:
    def of_answers(prompts, completions, answer, weight=1.0, **columns):
        return [0.0 for _ in answer]

    with pytest.raises(DataError, match=r"reward of_answers needs the column 'answer'; .*: wanted"):
        make_trainer(tmp_path, rewards=[of_answers])
    rows = [{**row, "answer": "x"} for row in tiny.PROMPTS]
    make_trainer(tmp_path, rewards=[of_answers], prompts=rows)


def test_a_reward_may_not_take_the_ensembles_name(tmp_path: Path) -> None:
    def ensemble(prompts, completions):
        return [0.0] * len(prompts)

    (tmp_path / "many.py").write_text("def one(prompts, completions):\n    return [1.0]\n")
    with pytest.raises(ValueError, match="a reward is called 'ensemble'"):
        make_trainer(tmp_path, rewards=[ensemble], reward_ensemble=[f"{tmp_path}/many.py:one"] * 2)


@pytest.mark.parametrize("lora", [0, 4])
def test_with_bf16_frozen_weights_are_bf16_and_trained_ones_fp32(lora: int, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, precision="bf16", lora_rank=lora, kl_coef=0.1)
    frozen = trainer.reference.frozen or trainer.model
    dtypes = {m.weight.dtype for m in frozen.causal_lm.base_model.modules() if _is_frozen(m)}
    assert dtypes == {torch.bfloat16}
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.float32}
    assert trainer.train()["kl"] is not None


def _is_frozen(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear) and not module.weight.requires_grad


def test_a_quantized_model_is_refused(tmp_path: Path) -> None:
    name = tiny.saved_model(tmp_path)
    path = tmp_path / "config.json"
    kind = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": kind}))
    with pytest.raises(ValueError, match="is quantized already, and quantization=none does not"):
        build(PPOConfig(**tiny.options(tmp_path, model=name)), Given())
