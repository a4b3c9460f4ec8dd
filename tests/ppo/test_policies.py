"""Old logprobs come from a sampler that computes the same weights; others are recomputed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from torch import nn

from fastppo.data.batch import Batch
from fastppo.data.microbatches import split
from fastppo.ppo.experience import Experience
from fastppo.ppo.metrics import to_floats
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.policies import importance, mismatch, read_old_policy, read_reference
from fastppo.ppo.rows import Rows
from fastppo.ppo.trainer import PPOTrainer
from fastppo.rewards.scorer import Scores
from fastppo.rollout import Rollout
from runs import Watched, make_trainer, records


def _drawn(trainer: PPOTrainer, rows: int = 6) -> tuple[Rollout, Batch]:
    ids = trainer.parts.prompts.token_ids[:rows]
    torch.manual_seed(0)
    rollout = trainer.engine.generate(ids, trainer.parts.sampling)
    return rollout, Batch.of(ids, rollout.tokens)


def _read(
    trainer: PPOTrainer, rollout: Rollout, batch: Batch
) -> tuple[Experience, dict[str, float]]:
    """Return the experience with the old policy's statistics, and the metrics of the mismatch."""
    experience = Experience.of_rows(
        batch, Rows([], rollout), Scores(torch.zeros(len(batch))), masks=False
    )
    plan = split(batch, trainer.config.limits())
    old, metrics = read_old_policy(experience, rollout, plan, trainer.config, parts=trainer.parts)
    return old, {name: x.item() for name, x in metrics.items()}


def _passes(trainer: PPOTrainer) -> list[int]:
    """Record the number of sequences in each pass of the policy's trunk."""
    passes: list[int] = []
    words = trainer.model.causal_lm.get_input_embeddings()
    words.register_forward_hook(lambda module, args, output: passes.append(len(args[0])))
    return passes


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("options", [{}, {"truncated": "bootstrap"}, {"temperature": 0.7}])
def test_sampler_logprobs_are_used_without_a_forward_pass(
    architecture: str, options, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, architecture, **options)
    nn.init.normal_(trainer.model.value_function.head.weight)
    rollout, batch = _drawn(trainer)
    passes = _passes(trainer)
    old, metrics = _read(trainer, rollout, batch)
    assert passes == []
    wanted = trainer.model.evaluate(batch, **trainer.config.softmax)
    torch.testing.assert_close(old.old_logprobs, wanted.logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(old.old_values, wanted.values, rtol=1e-5, atol=1e-5)
    assert old.importance_weights is None
    assert metrics == {}
    if options.get("truncated") == "bootstrap":
        cut = torch.tensor(rollout.truncated)
        assert cut.any()
        torch.testing.assert_close(
            old.final_values[cut], wanted.final_values[cut], rtol=1e-5, atol=1e-5
        )
    else:
        assert old.final_values is None


@pytest.mark.parametrize(
    "options",
    [
        {"old_logprobs": "recompute"},
        {"rollout": "generate"},
        {"value_model": "critic"},
        {"precision": "bf16"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_otherwise_old_logprobs_are_recomputed(options, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **options)
    rollout, batch = _drawn(trainer)
    passes = _passes(trainer)
    old, metrics = _read(trainer, rollout, batch)
    assert passes == [6]
    assert {"mismatch/mean", "mismatch/worst", "mismatch/outside"} <= metrics.keys()
    is_exact = "precision" not in options
    assert metrics["mismatch/worst"] < (1e-5 if is_exact else 0.1)
    assert metrics["mismatch/outside"] < 0.05
    assert (old.importance_weights is None) == is_exact


def test_sampler_logprobs_can_be_forced_under_bf16(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, precision="bf16", old_logprobs="sampler")
    rollout, batch = _drawn(trainer)
    passes = _passes(trainer)
    assert torch.equal(_read(trainer, rollout, batch)[0].old_logprobs, torch.cat(rollout.logprobs))
    assert passes == []


@pytest.mark.parametrize(
    ("options", "passes_of_the_policy"),
    [
        ({"value_model": "critic"}, []),
        ({"value_model": "critic", "truncated": "bootstrap", "rollout": "generate"}, []),
        ({"rollout": "generate"}, [6]),
    ],
    ids=["critic", "critic-generate", "shared-generate"],
)
def test_missing_values_are_computed_by_the_value_function(
    options, passes_of_the_policy: list[int], tmp_path: Path
) -> None:
    """The logprobs are the sampler's, so with a critic the policy makes no pass."""
    trainer = make_trainer(tmp_path, old_logprobs="sampler", **options)
    nn.init.normal_(trainer.model.value_function.head.weight)
    rollout, batch = _drawn(trainer)
    sampled = rollout.sampler_logprobs if rollout.logprobs is None else rollout.logprobs
    passes = _passes(trainer)
    old, _ = _read(trainer, rollout, batch)
    assert passes == passes_of_the_policy
    assert torch.equal(old.old_logprobs, torch.cat(sampled))
    wanted = trainer.model.evaluate(batch, **trainer.config.softmax)
    torch.testing.assert_close(old.old_values, wanted.values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(old.final_values, wanted.final_values, rtol=1e-5, atol=1e-5)


def test_sampler_logprobs_after_top_p_need_no_weights(
    tmp_path: Path,
) -> None:
    """The ratio in the loss is to the restricted distribution itself."""
    trainer = make_trainer(tmp_path, old_logprobs="sampler", top_k=3)
    rollout, batch = _drawn(trainer)
    old, metrics = _read(trainer, replace(rollout, logprobs=None), batch)
    assert torch.equal(old.old_logprobs, torch.cat(rollout.sampler_logprobs))
    assert (old.importance_weights, metrics) == (None, {})


@pytest.mark.parametrize("rollout", ["decoder", "generate"])
@pytest.mark.parametrize("restriction", [{"top_k": 4}, {"top_p": 0.6}])
def test_a_restriction_is_corrected_by_the_remaining_mass(
    rollout: str, restriction, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, rollout=rollout, **restriction)
    drawn, batch = _drawn(trainer)
    old, metrics = _read(trainer, drawn, batch)
    with torch.no_grad():
        layout = batch.layout()
        logits = trainer.model.head.logits(trainer.model.hidden(layout)).double()
    p = logits.softmax(1).sort(1, descending=True).values
    if "top_k" in restriction:
        kept = p[:, :4].sum(1)
    else:
        kept = (p * (p.cumsum(1) - p < 0.6)).sum(1)
    torch.testing.assert_close(old.importance_weights.double(), kept, rtol=1e-4, atol=1e-5)
    assert metrics["mismatch/excluded_mass"] == pytest.approx((1 - kept).mean().item(), 1e-4)
    assert 0 < metrics["mismatch/excluded_share"] <= 1
    assert 0 < metrics["mismatch/effective_sample_size"] < 1


def test_given_responses_are_recomputed_without_weights(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, old_logprobs="sampler", top_k=3)
    rollout, batch = _drawn(trainer)
    old, metrics = _read(trainer, Rollout(rollout.tokens, rollout.finish_reasons), batch)
    assert torch.equal(old.old_logprobs, trainer.model.evaluate(batch).logprobs)
    assert (old.importance_weights, metrics) == (None, {})


def test_the_exact_kl_is_read_only_for_a_kl_in_the_reward(tmp_path: Path) -> None:
    """A schedule may begin at 0."""
    trainer = make_trainer(tmp_path, kl_estimator="full", reference=tiny.model(seed=1))
    rollout, batch = _drawn(trainer)
    experience, _ = _read(trainer, rollout, batch)
    plan = split(batch, trainer.config.limits())
    without, exact = (
        read_reference(experience, trainer.reference, plan, trainer.config, kl_coef=kl_coef)
        for kl_coef in (0.0, 0.1)
    )
    assert without.exact_kl is None
    assert exact.exact_kl is not None
    assert exact.exact_kl.min() > 0
    torch.testing.assert_close(without.ref_logprobs, exact.ref_logprobs, rtol=1e-5, atol=1e-5)
    assert read_reference(experience, None, plan, trainer.config, kl_coef=0.1) is experience


@pytest.mark.parametrize(
    ("options", "wanted", "beyond"),
    [
        ({}, [1, 1.5, 2, 0.25, 1.5], 1 / 5),
        ({"importance": "mask"}, [1, 1.5, 0, 0, 1.5], 2 / 5),
        ({"importance": "mask", "importance_cap": 4}, [1, 1.5, 3, 0.25, 1.5], 0),
        # The products are 4.5 and 0.375, of three tokens and of two; a response may have none.
        ({"importance": "sequence-truncate"}, [2, 2, 2, 0.375, 0.375], 1 / 3),
        ({"importance": "sequence-mask"}, [0, 0, 0, 0, 0], 2 / 3),
        ({"importance": "sequence-mask", "importance_cap": 3}, [0, 0, 0, 0.375, 0.375], 1 / 3),
    ],
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else "",
)
def test_importance_weights_are_bounded(options, wanted, beyond) -> None:
    logprobs = torch.full((5,), -1.0)
    ratios = torch.tensor([1.0, 1.5, 3.0, 0.25, 1.5])
    lengths = torch.tensor([3, 0, 2])
    config = PPOConfig(**options)
    assert config.importance_bounds is not None
    weights, metrics = importance(
        logprobs,
        logprobs - ratios.log(),
        lengths,
        mode=config.importance,
        bounds=config.importance_bounds,
    )
    w = torch.tensor(wanted, dtype=torch.float32)
    torch.testing.assert_close(weights, w)
    assert metrics["mismatch/beyond_bounds"].item() == pytest.approx(beyond)
    size = (w.sum() ** 2 / (5 * (w**2).sum())).nan_to_num().item()
    assert metrics["mismatch/effective_sample_size"].item() == pytest.approx(size)


def test_mismatch_metrics_are_per_token() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    metrics = to_floats(mismatch(logprobs, logprobs - torch.tensor([0.0, 0.05, -0.2, 0.3])))
    assert metrics["mismatch/mean"] == pytest.approx(0.55 / 4)
    assert metrics["mismatch/worst"] == pytest.approx(0.3)
    assert metrics["mismatch/outside"] == pytest.approx(0.5)


def test_a_wrong_sampler_policy_shows_in_the_metrics(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, precision="bf16", iterations=1)
    drawn = []

    def lower(rollout, *_) -> None:
        drawn.append(rollout)
        if len(drawn) > 1:  # after the check before the run
            rollout.logprobs = [logprobs - 0.3 for logprobs in rollout.logprobs]
            rollout.sampler_logprobs = rollout.logprobs

    trainer.engine = Watched(trainer.engine, lower)
    trainer.train()
    (record,) = records(trainer)
    assert record["mismatch/mean"] == pytest.approx(0.3, abs=0.05)
    assert any("mismatch/outside" in sentence for sentence in record["warnings"])
