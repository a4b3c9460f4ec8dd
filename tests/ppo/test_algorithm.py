"""The algorithm starts on-policy, and the split of a batch into microbatches changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import waits
from tiny import random_batch
from torch import Tensor

from fastppo.data.batch import Batch
from fastppo.data.microbatches import split
from runs import (
    ONE_STEP,
    Watched,
    experience_of,
    first_experience,
    first_prompts,
    make_trainer,
    perturb,
    records,
    tensors_of,
    update_gradients,
    weights_of,
)

# ------------------------------------------------------------------------------------ an iteration


def test_samples_per_prompt_are_adjacent_rows(tmp_path: Path) -> None:
    """`rollout_batch_size` counts responses, and `prompts_seen` counts prompts."""
    trainer = make_trainer(tmp_path, samples_per_prompt=4, iterations=1)
    batches: list[list[list[int]]] = []
    trainer.engine = Watched(trainer.engine, lambda rollout, ids, _: batches.append(ids))
    trainer.train()
    rows = batches[-1]
    assert len(rows) == 16
    assert all(rows[i] == rows[i - i % 4] for i in range(16))
    assert len({*map(tuple, rows)}) == 4
    assert trainer.state.prompts_seen == 4


def test_the_engine_is_released_before_an_update_and_gets_the_new_weights(
    tmp_path: Path,
) -> None:
    trainer = make_trainer(tmp_path, iterations=2)
    calls: list[tuple[str, Tensor]] = []

    class Recorded(Watched):
        def release(self) -> None:
            calls.append(("release", trainer.model.head.weight.detach().clone()))

        def weights_changed(self, policy: Any) -> None:
            assert all(p.grad is None for p in policy.parameters())
            calls.append(("weights_changed", policy.head.weight.detach().clone()))

    trainer.engine = Recorded(trainer.engine, lambda *_: None)
    trainer.train()
    assert [name for name, _ in calls] == ["release", "weights_changed"] * 2
    weights = [weight for _, weight in calls]
    assert not torch.equal(weights[0], weights[1])
    assert torch.equal(weights[1], weights[2])


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_after_a_refresh_the_kl_is_zero(lora_rank: int, tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, lora_rank=lora_rank, reference_refresh=2, iterations=4, learning_rate=1e-2
    )
    trainer.train()
    kl = [abs(record["kl"]) for record in records(trainer)]
    assert kl[0] < 1e-4
    assert kl[1] > 1e-3
    assert kl[2] < 1e-4
    assert kl[3] > 1e-3


# ---------------------------------------------------------------------------------- the experience


@pytest.mark.parametrize("options", [{"microbatch_tokens": 40}, {"microbatch_size": 3}])
@pytest.mark.parametrize("packing", ["off", "on"])
@pytest.mark.parametrize("estimator", ["k1", "full"])
def test_microbatches_do_not_change_the_experience(
    options, packing: str, estimator: str, tmp_path: Path
) -> None:
    """Logprobs and values are in the order of the batch."""
    experiences = []
    for more in ({"microbatch_size": 16}, options | {"packing": packing}):
        trainer = make_trainer(tmp_path, kl_estimator=estimator, value_model="critic", **more)
        torch.manual_seed(1)
        torch.nn.init.normal_(trainer.model.value_function.head.weight)
        batch = random_batch((7, 2, 5, 1, 6, 3, 4, 8))
        experience, _ = experience_of(trainer, batch, torch.arange(8.0))
        experiences.append(tensors_of(experience))
    whole, parts = experiences
    for name in ("old_logprobs", "old_values", "advantages", "returns", "ref_logprobs"):
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-4, atol=1e-4)


def test_scores_are_normalized_and_clipped(tmp_path: Path) -> None:
    """Without a KL and with λ = 1, the returns are the processed scores."""
    options = {"kl_coef": 0.0, "lam": 1.0, "score_normalization": "running", "score_clip": 1.2}
    trainer = make_trainer(tmp_path, **options)
    batch = random_batch((1, 1, 1))
    first, second = torch.tensor([1.0, 3.0, 5.0]), torch.tensor([100.0, 0.0, 9.0])
    for scores, seen in ((first, first), (second, torch.cat([first, second]))):
        experience, _ = experience_of(trainer, batch, scores)
        scaled = (scores / seen.std(correction=0)).clamp(-1.2, 1.2)
        torch.testing.assert_close(experience.returns, scaled)


# -------------------------------------------------------------------------------------- the update


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "opt"])
def test_the_first_update_is_on_policy(architecture: str, tmp_path: Path) -> None:
    """Property 2: before the first step the ratio is 1, and the KL to a fresh reference is 0."""
    trainer = make_trainer(tmp_path, architecture, temperature=0.7, **ONE_STEP)
    experience = first_experience(trainer)
    assert experience.ref_logprobs is not None
    # The same weights and tokens through two copies: equal but for fp32 rounding.
    torch.testing.assert_close(experience.ref_logprobs, experience.old_logprobs, rtol=0, atol=1e-5)
    metrics = trainer.update(experience, trainer.begin_iteration())
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["clip_fraction"] == 0
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_the_split_into_microbatches_does_not_matter(aggregation: str, tmp_path: Path) -> None:
    """Property 1, for the gradients of trunk, policy head and value head. Microbatches are limited
    by sequences or by tokens, padded or packed."""
    gradients, shares = [], []
    for options in (
        {"microbatch_size": 16},
        {"microbatch_size": 5},
        {"microbatch_tokens": 30},
        {"microbatch_tokens": 30, "packing": "on"},
        {"microbatch_tokens": 1},
    ):
        trainer = make_trainer(
            tmp_path,
            aggregation=aggregation,
            entropy_coef=0.02,
            max_grad_norm=1e9,
            value_head="gradient",
            **ONE_STEP,
            **options,
        )
        torch.manual_seed(5)
        # Its responses end early, at different lengths.
        stops = make_trainer(tmp_path, stop_token_ids=[*range(1, 12)])
        metrics = trainer.update(first_experience(stops), trainer.begin_iteration())
        gradients.append({n: p.grad.clone() for n, p in trainer.model.named_parameters()})
        shares.append(metrics["useful_share"])
    scale = max(gradient.abs().max().item() for gradient in gradients[0].values())
    for other in gradients[1:]:
        # fp32 sums in another order
        torch.testing.assert_close(other, gradients[0], rtol=1e-4, atol=1e-6 * scale)
    assert gradients[0]["value_function.head.weight"].abs().max() > 0
    together, _, budgeted, packed, alone = shares
    assert together < budgeted < packed == alone == 1


@pytest.mark.parametrize(
    ("architecture", "packing"),
    [
        *((name, "off") for name in ("llama", "mistral-window", "qwen3", "gpt2")),
        *((name, "on") for name in ("llama", "mistral-window")),
    ],
)
def test_a_microbatch_does_not_synchronize(architecture: str, packing: str, tmp_path: Path) -> None:
    """No tensor that would be on a GPU is read by `.item()`, `nonzero`, a boolean index or
    `.tolist()`, so many microbatches wait no more often than one."""
    experience = first_experience(make_trainer(tmp_path))
    counts = []
    for size in (16, 2):
        trainer = make_trainer(
            tmp_path, architecture, microbatch_size=size, packing=packing, **ONE_STEP
        )
        if architecture == "mistral-window":  # rows within the window; packed, any will do
            trainer.model.config.sliding_window = 64
        with waits.counted() as seen:
            trainer.update(experience, trainer.begin_iteration())
        counts.append(seen.total())
    assert counts[0] == counts[1]
    assert counts[0] > 0, "the sums of a step are read once"


def test_an_experience_is_read_once(tmp_path: Path) -> None:
    """On a CPU, whitening reads its moments too, which is free."""
    trainer = make_trainer(tmp_path, precision="bf16", whiten_advantages=False)
    prompts = first_prompts(trainer, trainer.config.rollout_batch_size)
    coefficients = trainer.begin_iteration()
    rollout = trainer.engine.generate(prompts.token_ids, trainer.parts.sampling)
    scores = trainer.score(prompts, rollout, coefficients)
    with waits.counted() as seen:
        _, metrics = trainer.make_experience(prompts.token_ids, rollout, scores, coefficients)
    assert seen["tolist"] == 1
    assert {"kl", "value", "mismatch/mean"} <= metrics.keys()


def test_an_optimizer_step_synchronizes_once(tmp_path: Path) -> None:
    experience = first_experience(make_trainer(tmp_path))
    counts = []
    for steps in (1, 3):
        trainer = make_trainer(tmp_path, ppo_epochs=steps, minibatches=1)
        with waits.counted() as seen:
            trainer.update(experience, trainer.begin_iteration())
        counts.append(seen["tolist"])
    assert counts == [1 + 1, 3 + 1], "and once at the update's end"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("packing", ["off", "on"])
def test_torch_detects_no_synchronization_in_a_microbatch(packing: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, device="cuda", packing=packing, microbatch_size=4, **ONE_STEP)
    experience = first_experience(trainer)
    coefficients = trainer.begin_iteration()
    trainer.update(experience, coefficients)  # kernels are compiled and memory is allocated
    minibatch = experience.weighted(trainer.config.aggregation)
    with waits.refused_by_torch():
        for micro in minibatch.microbatches(trainer.config.limits(trainer.model.packing)):
            loss = trainer.loss(micro, coefficients).loss
            loss.backward()


def test_only_response_positions_reach_the_heads(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, ppo_epochs=1)
    experience = first_experience(trainer)
    rows = []
    trainer.model.value_function.head.register_forward_hook(
        lambda module, args, output: rows.append(len(args[0]))
    )
    trainer.update(experience, trainer.begin_iteration())
    assert sum(rows) == experience.batch.response_count
    assert sum(rows) < experience.batch.layout().input_ids.numel()


def test_token_sum_is_token_mean_times_the_tokens(tmp_path: Path) -> None:
    """token-sum has the gradient of token-mean, times the number of tokens."""
    mean = update_gradients(tmp_path, aggregation="token-mean", vf_coef=0.0)
    total = update_gradients(tmp_path, aggregation="token-sum", vf_coef=0.0)
    name = "causal_lm.lm_head.weight"
    trainer = make_trainer(tmp_path)
    torch.manual_seed(5)
    tokens = first_experience(trainer).batch.response_count
    scale = total[name].abs().max().item()
    torch.testing.assert_close(total[name], tokens * mean[name], rtol=1e-4, atol=1e-6 * scale)


def test_a_multi_turn_response_has_the_gradient_of_its_turns(tmp_path: Path) -> None:
    """Given its advantages, a response of two turns trains like two responses, the second of which
    has all tokens before it as its prompt."""
    options = {"kl_loss_coef": 0.2, "entropy_coef": 0.01, "learning_rate": 1e-30}
    trainer = make_trainer(tmp_path, **options, max_grad_norm=1e9, **ONE_STEP)
    mask = [True] * 3 + [False] * 2 + [True] * 2
    turns = Batch.of([[4, 5]], [[7, 8, 1, 20, 21, 9, 1]], response_mask=[mask])
    apart = Batch.of([[4, 5], [4, 5, 7, 8, 1, 20, 21]], [[7, 8, 1], [9, 1]])
    assert turns.response_tokens.tolist() == apart.response_tokens.tolist() == [7, 8, 1, 9, 1]
    experience, _ = experience_of(trainer, turns, torch.ones(1))
    perturb(trainer)
    gradients = []
    for batch in (turns, apart):
        torch.manual_seed(5)
        metrics = trainer.update(replace(experience, batch=batch), trainer.begin_iteration())
        gradients.append([p.grad.clone() for p in trainer.model.causal_lm.parameters()])
        assert metrics["entropy"] > 0
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    # The KL of the metrics and of the reward is over the five tokens of the policy alone.
    now = trainer.model.evaluate_plan(split(apart, trainer.config.limits())).logprobs
    again, metrics = experience_of(trainer, turns, torch.ones(1))
    kl = (now - experience.old_logprobs).sum().item()
    assert metrics["kl"] == pytest.approx(kl, rel=1e-4)
    assert metrics["response_length"] == 5
    assert abs(kl) > 1e-3
    assert again.returns.shape == (5,)


# ---------------------------------------------------------------------------------- what is trained


@pytest.mark.parametrize("kl_loss_coef", [0.0, 0.1])
def test_without_a_signal_only_the_kl_in_the_loss_moves_the_policy(
    kl_loss_coef: float, tmp_path: Path
) -> None:
    """Advantages of equal rewards are only errors of the value function."""
    trainer = make_trainer(tmp_path, kl_loss_coef=kl_loss_coef, kl_coef=0.0, **ONE_STEP)
    if kl_loss_coef:
        perturb(trainer)
    batch = random_batch((5, 3, 1, 4))
    before = weights_of(trainer)
    experience, _ = experience_of(trainer, batch, torch.ones(4))
    assert not experience.trained.by_reward
    metrics = trainer.update(experience, trainer.begin_iteration())
    assert metrics["no_signal"] == 1
    head = [id(p) for p in trainer.model.value_function.parameters()]
    names = {
        "head" if id(p) in head else "policy"
        for p, old in zip(trainer.model.parameters(), before, strict=True)
        if not torch.equal(p, old)
    }
    assert names == ({"head", "policy"} if kl_loss_coef else {"head"})


def test_masked_responses_change_no_weight(tmp_path: Path) -> None:
    """With truncated=mask, a run learns from the finished responses alone."""
    changed = {}
    runs = {"mask": ("mask", 0.0), "same": ("mask", 9.0), "learn": ("learn", 0.0)}
    for name, (truncated, reward) in runs.items():

        def pay(prompts: list[str], completions: list[str], reward: float = reward) -> list[float]:
            shares = tiny.count_w7(prompts, completions)
            long = [len(completion.split()) == 8 for completion in completions]
            return [reward if cut else x for x, cut in zip(shares, long, strict=True)]

        trainer = make_trainer(
            tmp_path / name,
            rewards=[pay],
            truncated=truncated,
            max_new_tokens=8,
            rollout_batch_size=32,
            value_head="gradient",
            iterations=2,
        )
        trainer.train()
        lines = records(trainer)
        assert 0 < lines[0]["eos_rate"] < 1
        changed[name] = weights_of(trainer)
    pairs = zip(changed["mask"], changed["same"], strict=True)
    assert all(torch.equal(*pair) for pair in pairs), "their rewards do not matter"
    pairs = zip(changed["mask"], changed["learn"], strict=True)
    assert not all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize(
    "options",
    [
        {"kl_loss_coef": 0.1, "kl_coef": 0.0, "value_head": "gradient"},
        {"value_model": "critic", "critic_options": {"epochs": 4}},
    ],
    ids=["kl in the loss", "critic"],
)
def test_a_batch_without_a_finished_response_moves_nothing(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """The momentum of the batch before and the weight decay move nothing, either."""
    trainer = make_trainer(tmp_path, truncated="mask", minibatches=2, weight_decay=0.1, **options)
    given = [[4, 5]] * 4, [[6, 1], [7, 1], [8, 1], [9, 1]], [0.0, 1.0, 2.0, 3.0]
    weights = [weights_of(trainer)]
    for reason in ("stop", "length"):
        trainer.step(*given, finish_reasons=[reason] * 4)
        weights.append(weights_of(trainer))
    assert not all(map(torch.equal, weights[0], weights[1]))
    assert all(map(torch.equal, weights[1], weights[2]))


@pytest.mark.parametrize("coef", [0.0, 0.5])
def test_without_a_signal_an_entropy_bonus_moves_the_policy(coef: float, tmp_path: Path) -> None:
    """All responses earn the same, so that their advantages are 0."""
    trainer = make_trainer(
        tmp_path,
        rewards=[lambda prompts, completions: [1.0] * len(completions)],
        entropy_coef=coef,
        kl_coef=0.0,
        learning_rate=1e-2,
        iterations=8,
    )
    with torch.no_grad():
        trainer.model.head.weight.mul_(20)  # away from the uniform distribution
    policy = [*trainer.model.causal_lm.parameters()]
    before = [weight.detach().clone() for weight in policy]
    trainer.train()
    assert all(record["no_signal"] == 1 for record in records(trainer))
    assert all(map(torch.equal, before, policy)) == (coef == 0)
    if coef:
        entropies = [record["entropy"] for record in records(trainer)]
        assert entropies[-1] > 1.1 * entropies[0]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_without_a_signal_momentum_does_not_move_the_policy(precision: str, tmp_path: Path) -> None:
    """A user's objective without another term has a gradient of 0, and AdamW has moments."""

    def objective(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor):
        return -(logprobs - old_logprobs).exp() * advantages

    trainer = make_trainer(tmp_path, objective=objective, kl_coef=0.0, precision=precision)
    given = [[4, 5]] * 4, [[6, 1], [7, 1], [8, 1], [9, 1]]
    trainer.step(*given, [0.0, 1.0, 2.0, 3.0])
    policy = [*trainer.model.causal_lm.parameters()]
    before = [weight.detach().clone() for weight in policy]
    trainer.step(*given, [1.0] * 4)
    assert all(map(torch.equal, before, policy))


def test_a_batch_without_a_finished_response_has_no_gradient(tmp_path: Path) -> None:
    options = {"truncated": "mask", "stop_token_ids": [], "max_new_tokens": 4, "iterations": 1}
    trainer = make_trainer(tmp_path, **options)
    before = weights_of(trainer)
    trainer.train()
    assert records(trainer)[0]["eos_rate"] == 0
    assert all(map(torch.equal, before, weights_of(trainer)))
