"""`PPOTrainer`: a run on every architecture, updates on given responses, and evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from fastppo.data.batch import Batch
from fastppo.data.chat import token_ids
from fastppo.data.microbatches import split
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.trainer import PPOTrainer
from runs import make_trainer, perturb

# ------------------------------------------------------------------------------------------- a run


@pytest.mark.parametrize("architecture", tiny.TRAINED)
def test_transformers_loads_the_trained_policy(architecture: str, tmp_path: Path) -> None:
    start = tiny.saved_model(tmp_path / "sft", architecture)
    config = PPOConfig(**tiny.options(tmp_path), model=start)
    # AutoTokenizer gives a Qwen2 model Qwen2's own tokenizer whatever is saved beside it, so the
    # word tokenizer of these tests is passed in and loaded by its class.
    trainer = PPOTrainer(
        config, tokenizer=tiny.tokenizer(), prompts=tiny.PROMPTS, rewards=[tiny.count_w7]
    )
    metrics = trainer.train()
    assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values())

    run = tmp_path / "run"
    policy = AutoModelForCausalLM.from_pretrained(run / "policy")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(run / "policy")
    assert (run / "policy" / "generation_config.json").exists()
    assert (run / "value_function.safetensors").exists()
    assert not any("value_head" in name for name in policy.state_dict())
    trained = trainer.model.causal_lm.state_dict()
    torch.testing.assert_close(policy.state_dict(), trained, rtol=0, atol=0)
    before = AutoModelForCausalLM.from_pretrained(start).state_dict()
    assert any(not torch.equal(p, before[name]) for name, p in policy.state_dict().items())
    output = policy.generate(**tokenizer("w1 w2", return_tensors="pt"), max_new_tokens=4)
    assert output.shape[1] > 2


def test_lora_trains_only_adapters_without_a_second_model(tmp_path: Path) -> None:
    start = tiny.saved_model(tmp_path / "sft")
    config = PPOConfig(**tiny.options(tmp_path, lora_rank=4), model=start)
    trainer = PPOTrainer(config, prompts=tiny.PROMPTS, rewards=[tiny.count_w7])
    assert trainer.reference is not None
    with trainer.reference.loaded() as reference:
        assert reference is trainer.model
    metrics = trainer.train()
    assert metrics["kl"] != 0
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "policy").state_dict()
    original = AutoModelForCausalLM.from_pretrained(start).state_dict()
    assert policy.keys() == original.keys()
    changed = {name for name, p in policy.items() if not torch.equal(p, original[name])}
    assert changed
    assert all("proj" in name for name in changed)


# ------------------------------------------------------------------------ responses that are given

GIVEN = [[4, 5], [6]], [[7, 8, 1], [9, 1]], [1.0, 0.0]


def test_step_trains_on_given_responses(tmp_path: Path) -> None:
    """Responses with a score above the rest become likelier; texts and ids both work."""
    trainer = make_trainer(tmp_path, prompts=None, rewards=[], learning_rate=3e-3, kl_coef=0.0)
    prompts = ["w1 w2", "w3", "w4 w5 w6", "w8"] * 2
    responses = ["w7 w7 <eos>"] * 4 + ["w9 w9 <eos>"] * 4
    scores = [1.0] * 4 + [0.0] * 4

    def likelihood(response: str) -> float:
        ids = [token_ids(trainer.tokenizer, prompt) for prompt in prompts[:4]]
        batch = Batch.of(ids, [token_ids(trainer.tokenizer, response)] * 4)
        return trainer.model.response_logprobs(batch).sum().item()

    before = likelihood("w7 w7 <eos>") - likelihood("w9 w9 <eos>")
    for _ in range(5):
        metrics = trainer.step(prompts, responses, scores)
    assert likelihood("w7 w7 <eos>") - likelihood("w9 w9 <eos>") > before + 1
    assert metrics["reward"] == 0.5
    assert trainer.state.iteration == 5
    assert trainer.step([[4, 5]] * 4, [[6, 1]] * 4, torch.ones(4))["response_length"] == 2


def _stepped(tmp_path: Path, name: str, *given: Any, **more: Any) -> tuple[Any, dict[str, float]]:
    """Return all weights after a step, in one vector, and the metrics of the step."""
    options = {"prompts": None, "rewards": [], "kl_coef": 0.1, "entropy_coef": 0.01, "lam": 0.9}
    trainer = make_trainer(tmp_path / name, **options)
    torch.manual_seed(3)
    metrics = trainer.step(*given, **more)
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]), metrics


def test_a_gap_before_the_response_belongs_to_the_prompt(tmp_path: Path) -> None:
    """The step has the bits of a step on longer prompts."""
    prompts, responses, scores = GIVEN
    gaps = [[20, 21], [22]]
    filled = [gap + response for gap, response in zip(gaps, responses, strict=True)]
    masks = [[False, False, True, True, True], torch.tensor([False, True, True])]
    weights, metrics = _stepped(tmp_path, "gap", prompts, filled, scores, masks=masks)
    longer = [prompt + gap for prompt, gap in zip(prompts, gaps, strict=True)]
    wanted, of_longer = _stepped(tmp_path, "cut", longer, responses, scores)
    assert torch.equal(weights, wanted)
    assert metrics == of_longer


def test_a_gap_after_the_response_changes_nothing(tmp_path: Path) -> None:
    """Only the rounding of fp32 differs, because the rows have another width."""
    prompts, responses, scores = GIVEN
    filled = [[7, 8, 1, 20, 21], [9, 1, 22]]
    masks = [[True] * 3 + [False] * 2, [True, True, False]]
    reasons = ["stop", "stop"]
    weights, metrics = _stepped(tmp_path, "gap", prompts, filled, scores, reasons, masks=masks)
    wanted, of_shorter = _stepped(tmp_path, "cut", prompts, responses, scores, reasons)
    torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-6)
    assert metrics.keys() == of_shorter.keys()
    for name in metrics.keys() - {"useful_share"}:
        assert metrics[name] == pytest.approx(of_shorter[name], abs=2e-6), name


def test_given_old_logprobs_and_values_are_used(tmp_path: Path) -> None:
    """Each replaces what a forward pass would compute. If they are what it would compute, the step
    is the same."""
    trainer = make_trainer(tmp_path, prompts=None, rewards=[])
    own = trainer.model.evaluate_plan(split(Batch.of(*GIVEN[:2]), trainer.config.limits()))
    logprobs, values = own.logprobs.split([3, 2]), own.values.split([3, 2])
    wanted, _ = _stepped(tmp_path, "made", *GIVEN)
    for name, more in {
        "both": {"old_logprobs": logprobs, "values": values},
        "logprobs": {"old_logprobs": logprobs},
        "values": {"values": values},
    }.items():
        assert torch.equal(_stepped(tmp_path, name, *GIVEN, **more)[0], wanted), name
    lower = [part - 0.1 for part in logprobs]
    _, metrics = _stepped(tmp_path, "lower", *GIVEN, old_logprobs=lower)
    assert metrics["ratio_max"] > 1.1, "of another policy the ratio is not 1 at first"


# ------------------------------------------------------------------------------------ an evaluation


def test_evaluate_uses_the_current_policy(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, monitor_rewards=[tiny.count_w7])
    prompts = trainer.parts.prompts.select(range(5))
    perturb(trainer)
    result = trainer.evaluate(prompts)
    assert len(result["completions"]) == 5
    assert result["reward"] == pytest.approx(result["scores"].total.mean().item())
    assert result["monitor/count_w7"] == pytest.approx(result["reward"])
    assert result["kl"] != 0
    assert 0 <= result["eos_rate"] <= 1
    assert result["response_length"] <= trainer.config.max_new_tokens
    again = trainer.evaluate(prompts)
    assert again["completions"] == result["completions"], "the same seed draws the same"
