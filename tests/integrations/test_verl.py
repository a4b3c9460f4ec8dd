"""FastPPO's functions inside verl against verl's own: values and gradients, in fp32.

Tolerance: 1e-6 of the largest number (fp64: 1e-13), for sums of hundreds of terms in another order.
"""

from __future__ import annotations

import runpy
from typing import Any

import pytest
import torch
from processes import ROOT
from torch import Tensor

import fastppo
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.policies import importance

pytest.importorskip("verl", reason="expected verl==0.9.1, installed as in benchmarks/README.md")
core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
fused = pytest.importorskip("verl.utils.experimental.torch_functional")
THEIRS = {  # before ours take their places
    "linear": fused.FusedLinearForPPO,
    "gae": core_algos.compute_gae_advantage_return,
}
adapter = pytest.importorskip("fastppo.integrations.verl")
workers = pytest.importorskip("verl.workers.config")
correction = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")

pytestmark = pytest.mark.filterwarnings("default")  # verl's own warnings

B = 5
T = 9
H = 16
V = 37
GLOBAL = {"dp_size": 2, "batch_num_tokens": 61, "global_batch_size": 12, "loss_scale_factor": 7}


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(
        ours, theirs, rtol=0, atol=1e-6 * max(1.0, float(theirs.abs().max()))
    )


def mask_of(lengths: tuple[int, ...] = (9, 4, 1, 7, 6)) -> Tensor:
    mask = (torch.arange(T) < torch.tensor(lengths)[:, None]).float()
    mask[0, 3:5] = 0.0  # what a tool wrote
    return mask


def config(**options: Any) -> Any:
    return workers.ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options
    )


# ------------------------------------------------------------------------------- the fused lm-head


@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.tensor(0.7), torch.tensor([0.7])])
@pytest.mark.parametrize("shape", [(B * T,), (1, B * T)], ids=["flat", "packed"])
def test_the_fused_head_equals_verls(shape: tuple[int, ...], temperature: float | Tensor) -> None:
    hidden = torch.randn(*shape, H)
    weight = torch.randn(V, H) / 4
    tokens = torch.randint(V, shape)
    upstream = torch.randn(2, *shape)
    results = []
    for kind in (THEIRS["linear"], fused.FusedLinearForPPO):
        h = hidden.clone().requires_grad_()
        w = weight.clone().requires_grad_()
        logprobs, entropy = kind(chunk_size=16)(h, w, tokens, temperature)
        (logprobs * upstream[0] + entropy * upstream[1]).sum().backward()
        results.append((logprobs.detach(), entropy.detach(), h.grad, w.grad))
    for ours, theirs in zip(results[1], results[0], strict=True):
        close(ours, theirs)


def test_a_temperature_per_token_equals_the_formula() -> None:
    hidden = torch.randn(B * T, H)
    weight = torch.randn(V, H)
    tokens = torch.randint(V, (B * T,))
    temperature = torch.rand(B * T) + 0.5
    ours = fused.FusedLinearForPPO()(hidden, weight, tokens, temperature)
    for our_tensor, theirs in zip(ours, _by_hand(hidden, weight, tokens, temperature), strict=True):
        close(our_tensor, theirs)


def _by_hand(
    hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(hidden @ weight.T / temperature[:, None], -1)
    return logp.gather(-1, tokens[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


# ---------------------------------------------------------------------------------- the policy loss


@pytest.mark.parametrize("mode", adapter.MODES)
@pytest.mark.parametrize("info", [{}, GLOBAL], ids=["of-the-batch", "of-all-ranks"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
def test_the_policy_loss_equals_verls(mode: str, info: dict[str, Any], weighted: bool) -> None:
    mask = mask_of()
    advantages = 3 * torch.randn(B, T)
    logprobs = torch.randn(B, T) - 2
    old = logprobs + torch.randn(B, T)  # beyond the clips, and beyond the dual clip
    options = config(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=2.0)
    options.global_batch_info.update(info)
    weights = torch.rand(B, T) + 0.5 if weighted else None
    results = []
    for name in ("vanilla", adapter.LOSS_MODE):
        new = logprobs.clone().requires_grad_()
        loss, metrics = core_algos.get_policy_loss_fn(name)(
            old_log_prob=old,
            log_prob=new,
            advantages=advantages,
            response_mask=mask,
            loss_agg_mode=mode,
            config=options,
            rollout_is_weights=weights,
        )
        loss.backward()
        results.append((loss.detach(), new.grad, metrics))
    (theirs, gradient, metrics), (ours, our_gradient, reported) = results
    close(ours, theirs)
    close(our_gradient, gradient)
    assert float(gradient.abs().max()) > 0
    assert reported == pytest.approx(metrics, abs=1e-6)
    assert reported["actor/pg_clipfrac_lower"] > 0


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("objective", ["cispo", "sapo", "gspo", "dis"])
def test_the_other_objectives_equal_verls(objective: str, weighted: bool) -> None:
    """From logits, value and gradient. SAO's mask is verl's REINFORCE with IcePop's weights."""
    mask = mask_of()
    logits = torch.randn(B, T, V)
    tokens = torch.randint(V, (B, T))
    advantages = 3 * torch.randn(B, T)
    weights = torch.rand(B, T) + 0.5 if weighted else None
    leaf = logits.clone().requires_grad_()
    logprobs = torch.log_softmax(leaf, -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    old = logprobs.detach() + 0.5 * torch.randn(B, T)
    options = config(clip_ratio_low=0.2, clip_ratio_high=0.28, tau_pos=1.0, tau_neg=1.7)
    given = {
        "log_prob": logprobs,
        "advantages": advantages,
        "response_mask": mask,
        "loss_agg_mode": "seq-mean-token-mean",
        "config": options,
        "rollout_is_weights": weights,
    }
    if objective == "dis":
        ratio = (logprobs.detach() - old) * mask
        of_sampler, _ = correction.compute_rollout_correction_weights(
            ratio, mask, rollout_is="token", rollout_is_threshold="0.8_1.28"
        )
        given["rollout_is_weights"] = of_sampler if weights is None else of_sampler * weights
        loss, _ = core_algos.compute_policy_loss_reinforce(rollout_log_prob=old, **given)
    else:
        loss, _ = core_algos.get_policy_loss_fn(objective)(old_log_prob=old, **given)
    (gradient,) = torch.autograd.grad(loss, leaf)
    ours = fastppo.ppo_loss(
        leaf,
        tokens,
        old,
        advantages,
        mask.bool(),
        objective=objective,
        clip_ratio=(0.2, 0.28),
        sapo_tau=(1.0, 1.7) if objective == "sapo" else None,
        importance_weights=weights,
        aggregation="seq-mean-token-mean",
    )
    (our_gradient,) = torch.autograd.grad(ours.loss, leaf)
    close(ours.loss.detach(), loss.detach())
    close(our_gradient, gradient)
    assert float(gradient.abs().max()) > 1e-2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("objective", ["dppo_tv", "dppo_kl"])
def test_dppo_equals_verls(objective: str, dtype: torch.dtype) -> None:
    """300 random batches with random bounds: loss, gradient by the logits, and clip fraction.

    As in the authors' runs, verl's bound of the ratio is beyond reach.
    """
    shares = []
    for case in range(300):
        mask = mask_of()
        tokens = torch.randint(V, (B, T))
        logits = torch.randn(B, T, V, dtype=dtype)
        likelier = (5 * torch.rand(B, T, 1, dtype=dtype)).expand_as(logits)
        logits = logits.scatter_add(-1, tokens.unsqueeze(-1), likelier).requires_grad_()
        logprobs = torch.log_softmax(logits, -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        moves = 0.5 * torch.randn(B, T, dtype=dtype)
        old = (logprobs.detach() + moves).clamp(max=-1e-3)
        advantages = torch.randn(B, T, dtype=dtype)
        weights = torch.rand(B, T, dtype=dtype) + 0.5 if case % 2 else None
        low, high = (torch.rand(2) * (0.2 if objective == "dppo_tv" else 0.05)).tolist()
        theirs, reported = core_algos.get_policy_loss_fn(objective)(
            old_log_prob=old,
            log_prob=logprobs,
            advantages=advantages,
            response_mask=mask,
            loss_agg_mode="token-mean",
            config=config(clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=1e9),
            rollout_is_weights=weights,
        )
        (gradient,) = torch.autograd.grad(theirs, logits)
        ours = fastppo.ppo_loss(
            logits,
            tokens,
            old,
            advantages,
            mask.bool(),
            objective=objective,
            clip_ratio=(low, high),
            importance_weights=weights,
        )
        (our_gradient,) = torch.autograd.grad(ours.loss, logits)
        tolerance = 1e-13 if dtype == torch.float64 else 1e-6
        for our_tensor, other in ((ours.loss, theirs), (our_gradient, gradient)):
            scale = max(1.0, float(other.detach().abs().max()))
            torch.testing.assert_close(our_tensor, other, rtol=0, atol=tolerance * scale)
        share = ours.metrics["clip_fraction"].item()
        assert share == pytest.approx(reported["actor/pg_clipfrac"], abs=1e-6)
        shares.append(share)
    assert 0.05 < sum(shares) / len(shares) < 0.7


@pytest.mark.parametrize("bounds", ["2.0", "0.5_1.5"], ids=["truncate", "icepop"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_equal_verls(level: str, bounds: str) -> None:
    mask = mask_of()
    log_ratio = 0.5 * torch.randn(B, T) * mask
    theirs, _ = correction.compute_rollout_correction_weights(
        log_ratio, mask, rollout_is=level, rollout_is_threshold=bounds
    )
    floor, _, cap = bounds.rpartition("_")
    options = PPOConfig(
        importance_mode=f"{level}_{'mask' if floor else 'truncate'}",
        importance_cap=cap,
        importance_floor=floor or None,
    )
    counted = mask.bool()
    lengths = mask.sum(1).long()
    ours, _ = importance(log_ratio[counted], torch.zeros(int(lengths.sum())), lengths, options)
    assert ours is not None
    close(ours, theirs[counted])
    assert len(ours.unique()) > 2


def test_an_unknown_aggregation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"loss_agg_mode must be one of token-mean, .* got 'mean'"):
        adapter.policy_loss(*torch.zeros(4, B, T), loss_agg_mode="mean", config=config())


def test_a_mean_over_ranks_needs_their_number_of_tokens() -> None:
    options = config()
    options.global_batch_info["dp_size"] = 2
    with pytest.raises(ValueError, match="batch_num_tokens must be that of all 2 ranks, got None"):
        adapter.policy_loss(*torch.zeros(3, B, T), mask_of(), config=options)


# -------------------------------------------------------------------------------------- advantages


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.99, 1.0), (0.9, 0.0)])
def test_advantages_equal_verls(gamma: float, lam: float) -> None:
    mask = mask_of()
    rewards = torch.randn(B, T) * mask
    values = torch.randn(B, T)
    theirs = THEIRS["gae"](rewards, values, mask, gamma, lam)
    ours = core_algos.compute_gae_advantage_return(rewards, values, mask, gamma, lam)
    for our_tensor, other in zip(ours, theirs, strict=True):
        close(our_tensor, other * mask)


def test_verls_compute_advantage_calls_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = pytest.importorskip("verl.trainer.ppo.ray_trainer")
    verl = pytest.importorskip("verl")
    mask = mask_of()
    batch = {
        "token_level_rewards": torch.randn(B, T) * mask,
        "values": torch.randn(B, T),
        "response_mask": mask,
    }
    results = []
    for function in (THEIRS["gae"], adapter.gae_advantage_return):
        monkeypatch.setattr(core_algos, "compute_gae_advantage_return", function)
        data = verl.DataProto.from_dict(dict(batch))
        done = trainer.compute_advantage(data, "gae", gamma=1.0, lam=0.95, config={})
        results.append((done.batch["advantages"] * mask, done.batch["returns"] * mask))
    for our_tensor, other in zip(results[1], results[0], strict=True):
        close(our_tensor, other)
    assert not torch.equal(results[0][0], torch.zeros(B, T))


# --------------------------------------------------------------------- examples of objectives

EXAMPLES = runpy.run_path(str(ROOT / "examples" / "objectives.py"))


def _example_case(seed: int) -> dict[str, Tensor]:
    """Logprobs, advantages and mask of padded responses, fp64."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(3, B, T, generator=generator, dtype=torch.float64)
    scale = (0.001, 0.05, 0.5)[seed % 3]
    logprobs = -2 * noise[0].abs()
    mask = mask_of(tuple(torch.randint(1, T + 1, (B,), generator=generator).tolist())).double()
    mask[0, 0] = 1.0
    return {
        "logprobs": logprobs.requires_grad_(),
        "old_logprobs": logprobs.detach() + scale * noise[1],
        "advantages": 2 * noise[2],
        "mask": mask,
    }


def _seam(name: str, case: dict[str, Tensor], **options: Any) -> Tensor:
    """Sum of the losses of an example on packed tokens, divided by the number of tokens."""
    mask = case["mask"].bool()
    packed = {key: case[key][mask] for key in ("logprobs", "old_logprobs", "advantages")}
    if name.endswith("rejection"):
        options["cu_seqlens"] = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
    return EXAMPLES[name](**packed, mask=torch.ones(int(mask.sum())).bool(), **options).mean()


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "geometric_mean_rejection", "k3_rejection"])
def test_an_example_of_an_objective_is_verls(name: str) -> None:
    """300 random cases in fp64: values and gradients. Some of them select, some do not."""
    rejected = set()
    for seed in range(300):
        case = _example_case(seed)
        mask = case["mask"]
        keywords = {
            "old_log_prob": case["old_logprobs"],
            "log_prob": case["logprobs"],
            "advantages": case["advantages"],
            "loss_agg_mode": "token-mean",
        }
        options: dict[str, Any] = {}
        if name.endswith("cov"):
            options["share"] = 0.2
            losses = {"clip_cov_ratio": 0.2, "kl_cov_ratio": 0.2, "ppo_kl_coef": 1.0}
            policy = workers.PolicyLossConfig(**losses)
            actor = config(clip_ratio=0.2, policy_loss=policy)
            function = getattr(core_algos, f"compute_policy_loss_{name}")
        else:
            mode, threshold = ("seq_mean_k1", "0.999_1.001")
            if name == "k3_rejection":
                mode, threshold = ("seq_mean_k3", 0.001)
            mask, _ = correction.compute_rollout_rejection_mask(
                (case["logprobs"] - case["old_logprobs"]).detach(), mask, mode, threshold
            )
            rejected.add(bool((mask.sum(1) < case["mask"].sum(1)).any()))
            actor = config(clip_ratio=0.2, clip_ratio_c=1e9)
            function = core_algos.compute_policy_loss_vanilla
        actor.global_batch_info.update(dp_size=1, batch_num_tokens=int(case["mask"].sum()))
        torch.manual_seed(seed)
        theirs, _ = function(**keywords, response_mask=mask, config=actor)
        torch.manual_seed(seed)
        ours = _seam(name, case, **options)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        gradients = [torch.autograd.grad(x, case["logprobs"])[0] for x in (ours, theirs)]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    if name.endswith("rejection"):
        assert rejected == {True, False}
