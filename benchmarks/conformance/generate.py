"""Write the fixtures: `python -m benchmarks.conformance.generate`."""

# A row of the table is easier to read on one line.
# ruff: noqa: E501

from __future__ import annotations

import json
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks.conformance.fixtures import FOLDER
from benchmarks.conformance.formulas import OPERATIONS, Array, Arrays

GAE = "Schulman et al. 2016 (arXiv:1506.02438), eq. 11, 12, 16"
SHAPING = (
    "Ziegler et al. 2019 (arXiv:1909.08593), eq. 2; Stiennon et al. 2020 (arXiv:2009.01325), 3.4"
)
WHITEN = "Ziegler et al. 2019, the code of lm-human-preferences, `whiten`"
KL = "Schulman 2020, Approximating KL divergence"
PPO = "Schulman et al. 2017 (arXiv:1707.06347), eq. 7"
DPPO = "Qi et al. 2026 (DPPO, arXiv:2602.04879), eq. 11, 12, "
IMPORTANCE = "Precup et al. 2000: a sequence's ratio is the product; Espeholt et al. 2018 (V-trace)"

GAP = np.array([[1, 1, 0, 0, 1, 1], [1, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]], bool)
TAIL = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0]], bool)
FULL = np.ones((2, 3), bool)
UNEVEN = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]], bool)


def normal(seed: int, *shape: int) -> Array:
    """Draw multiples of 1/64, which fp32 represents exactly."""
    return np.round(np.random.default_rng(seed).normal(size=shape) * 64) / 64


def logprobs(seed: int, *shape: int) -> Array:
    return -0.125 - np.abs(normal(seed, *shape))


def trajectories(mask: Array, *, tail: bool = True) -> Arrays:
    """Draw trajectories. Rewards are 0 where masked; values are too, unless there is a `tail`."""
    values = normal(2, *mask.shape)
    return {
        "rewards": np.where(mask, normal(1, *mask.shape), 0.0),
        "values": values if tail else np.where(mask, values, 0.0),
        "mask": mask,
    }


def scored(mask: Array) -> Arrays:
    return {
        "scores": normal(3, len(mask)) + 2,
        "logprobs": logprobs(4, *mask.shape),
        "ref_logprobs": logprobs(5, *mask.shape),
        "mask": mask,
    }


def updated(log_ratios: Any, advantages: Any, mask: Array | None = None) -> Arrays:
    """Draw an updated batch with one advantage per sequence."""
    log_ratio = np.array(log_ratios, np.float64)
    new = logprobs(6, *log_ratio.shape) - 1
    return {
        "logprobs": new,
        "old_logprobs": new - log_ratio,
        "advantages": np.array(advantages, np.float64)[:, None] * np.ones_like(new),
        "mask": np.ones(new.shape, bool) if mask is None else mask,
    }


def probable() -> Arrays:
    """Draw probabilities that change by up to 0.3; that of a rare token grows tenfold."""
    new = np.array([[0.45, 0.1, 0.02], [0.3, 0.5, 0.2]])
    old = np.array([[0.2, 0.15, 0.002], [0.6, 0.4, 0.21]])
    new, old = (np.round(np.log(x) * 64) / 64 for x in (new, old))
    return updated(new - old, [1.0, -1.0]) | {"logprobs": new, "old_logprobs": old}


def batches() -> Arrays:
    return updated(normal(7, 4, 5) / 4, [1.5, -0.75, 2.0, -1.0], UNEVEN)


def valued(mask: Array) -> Arrays:
    return {
        "values": normal(8, *mask.shape),
        "old_values": normal(9, *mask.shape),
        "returns": normal(10, *mask.shape),
        "mask": mask,
    }


def with_nan() -> Arrays:
    inputs = updated(normal(11, 2, 3) / 8, [1.0, -1.0], np.array([[1, 1, 0], [1, 1, 1]], bool))
    return inputs | {"logprobs": np.where(inputs["mask"], inputs["logprobs"], np.nan)}


def packed() -> Arrays:
    mask = np.array([1, 1, 1, 0, 1, 1, 0, 0, 1, 1, 1], bool)
    return {
        "rewards": np.where(mask, normal(12, 11), 0.0),
        "values": normal(13, 11),
        "mask": mask,
        "cu_seqlens": np.array([0, 3, 9, 11]),
    }


def tokens(masked: bool = False) -> Arrays:
    logits = 2 * normal(14, 2, 4, 7)
    chosen = np.argmax(normal(15, 2, 4, 7) - (np.arange(7) == 6) * 9, -1)
    logits[..., 6] = -np.inf if masked else logits[..., 6]
    return {"logits": logits, "tokens": chosen}


def sampled(mask: Array) -> Arrays:
    new = logprobs(16, *mask.shape)
    return {
        "logprobs": new,
        "sampler_logprobs": new + normal(17, *mask.shape) / 2,
        "mask": mask,
    }


def two(x: Array) -> Arrays:
    return {"x": x, "mask": np.ones(x.shape, bool)}


CLIP = {"objective": "clip", "clip": [0.2, 0.2]}
HALVES = [[0, 1], [2, 3]]
LOW, HIGH = np.log(0.5), np.log(1.75)
PAIR = {"logprobs": logprobs(18, 2, 4), "ref_logprobs": logprobs(19, 2, 4)}
FAR = {"logprobs": np.array([[-6.0, -0.5]]), "ref_logprobs": np.array([[-1.0, -0.75]])}
SCORES = np.array([1000.0, -2000.0, 500.0, 3000.0, 10.0, 4000.0, -700.0, 100.0])

Row = tuple[str, str, str, str, str, dict[str, Any], Arrays]

# (name, topic, operation, question, source, options, inputs)
ROWS: list[Row] = [
    ("gae-padded", "Advantages", "gae", "Is GAE the discounted sum of residuals, if rewards and values of padding are 0?", GAE, {"gamma": 0.9, "lam": 0.8}, trajectories(TAIL, tail=False)),
    ("gae-padding-values", "Advantages", "gae", "Is the value after the last token 0, if padding holds values?", GAE, {"gamma": 0.9, "lam": 0.8}, trajectories(TAIL)),
    ("gae-gap", "Advantages", "gae", "Is a masked gap (a tool's output) skipped, so that the next value is that of the next own token?", GAE, {"gamma": 0.9, "lam": 0.8}, trajectories(GAP)),
    ("gae-packed", "Advantages", "gae", "Do packed sequences with gaps have the advantages of padded ones?", GAE, {"gamma": 0.9, "lam": 0.8}, packed()),
    ("gae-gamma-0", "Advantages", "gae", "Is the advantage r − V for γ = 0?", GAE, {"gamma": 0.0, "lam": 0.95}, trajectories(TAIL, tail=False)),
    ("gae-lambda-1", "Advantages", "gae", "Are returns the discounted rewards for λ = 1?", GAE, {"gamma": 0.9, "lam": 1.0}, trajectories(TAIL, tail=False)),
    ("gae-bootstrap", "Advantages", "gae", "Does a truncated response continue with the value of its last state?", GAE, {"gamma": 0.9, "lam": 0.8}, trajectories(TAIL, tail=False) | {"bootstrap": np.array([0.75, 0.0, -1.5])}),
    ("score-tail", "Rewards", "rewards", "Is the score on the last token before a masked tail?", SHAPING, {"kl_coef": 0.0, "estimator": "k1"}, scored(TAIL)),
    ("score-gap", "Rewards", "rewards", "Is the score on the last own token of a response with gaps?", SHAPING, {"kl_coef": 0.0, "estimator": "k1"}, scored(GAP)),
    ("kl-reward-k1", "Rewards", "rewards", "Is the penalty of each token −β(log π − log π_ref)?", SHAPING, {"kl_coef": 0.1, "estimator": "k1"}, scored(TAIL)),
    ("kl-reward-k3", "Rewards", "rewards", "Is the penalty of each token −β·k3?", KL, {"kl_coef": 0.1, "estimator": "k3"}, scored(TAIL)),
    ("whiten-mask", "Whitening", "whiten", "Do mean and variance leave out padding?", WHITEN, {"shift_mean": True}, {"x": 10 * normal(20, *TAIL.shape), "mask": TAIL}),
    ("whiten-all", "Whitening", "whiten", "Is the mean 0 and the deviation 1 without a mask?", WHITEN, {"shift_mean": True}, {"x": 3 + normal(21, 4, 6)}),
    ("whiten-keep-mean", "Whitening", "whiten", "Does shift_mean=False keep the mean?", WHITEN, {"shift_mean": False}, {"x": 3 + normal(22, *TAIL.shape), "mask": TAIL}),
    ("whiten-bessel", "Whitening", "whiten", "Are two values whitened to ±0.707 (Bessel's correction) and not to ±1?", WHITEN, {"shift_mean": True}, two(np.array([[4.0, 6.0]]))),
    ("kl-k1", "KL", "kl", "Is k1 = log π − log π_ref, with gradient 1?", KL, {"estimator": "k1"}, PAIR),
    ("kl-k2", "KL", "kl", "Is k2 = ½(log π − log π_ref)²?", KL, {"estimator": "k2"}, PAIR),
    ("kl-k3", "KL", "kl", "Is k3 = π_ref/π − 1 − log(π_ref/π), of the policy's samples, with gradient 1 − π_ref/π?", KL, {"estimator": "k3"}, PAIR),
    ("kl-k3-large", "KL", "kl", "Is k3 = 142 with its gradient, where the reference is e⁵ times as likely?", KL, {"estimator": "k3"}, FAR),
    ("kl-k3-ratio", "KL", "kl", "Is k3 times the ratio differentiated through both?", "DeepSeek-AI 2025 (DeepSeek-V3.2), section 3.1", {"estimator": "k3", "ratio_weighted": True}, PAIR | {"old_logprobs": logprobs(23, 2, 4)}),
    ("kl-adaptive", "KL", "kl_control", "Does β follow the KL with an error clipped to ±0.2?", "Ziegler et al. 2019, section 2.2", {"coef": 0.1, "target": 6.0, "horizon": 1000}, {"kl": np.array([3.0, 6.5, 60.0]), "sequences": np.array([64, 64, 128])}),
    ("ppo-first-update", "Policy loss", "policy", "Is the gradient −A/N at a ratio of 1?", PPO, CLIP, updated(np.zeros((2, 3)), [1.0, -0.5])),
    ("clip-both", "Policy loss", "policy", "Is there no gradient above 1 + ε for A > 0, and below 1 − ε for A < 0?", PPO, CLIP, updated([[HIGH, 0.05, HIGH], [LOW, LOW, -0.05]], [1.0, -1.0])),
    ("clip-pulled-back", "Policy loss", "policy", "Is the gradient whole below 1 − ε for A > 0, and above 1 + ε for A < 0?", PPO, CLIP, updated([[LOW, -0.05, LOW], [HIGH, HIGH, 0.05]], [1.0, -1.0])),
    ("clip-higher", "Policy loss", "policy", "Can the upper bound differ from the lower?", "Yu et al. 2025 (DAPO, arXiv:2503.14476), eq. 10", {"objective": "clip", "clip": [0.1, 0.6]}, updated([[np.log(1.5), 0.05, HIGH], [np.log(0.85), LOW, 0.0]], [1.0, -1.0])),
    ("dual-clip", "Policy loss", "policy", "Is the loss bounded by −c·A for A < 0, with c = 3?", "Ye et al. 2020 (arXiv:1912.09729), eq. 3", CLIP | {"dual_clip": 3.0}, updated([[1.5, 0.05, 0.0], [1.5, 0.9, -0.05]], [1.0, -1.0])),
    ("masked-nan", "Policy loss", "policy", "Do loss and gradient ignore NaN in masked entries?", "A masked entry is no token", CLIP, with_nan()),
    ("importance-weights", "Policy loss", "policy", "Do weights of the sampler's mismatch multiply the policy term?", "Yao et al. 2025, truncated importance sampling", CLIP, updated(normal(24, 2, 3) / 2, [1.0, -1.0]) | {"importance_weights": np.array([[1.0, 0.5, 2.0], [0.25, 1.0, 1.5]])}),
    ("token-mean", "Aggregation", "policy", "Is token-mean the same in two uneven microbatches as in one batch?", "Yu et al. 2025 (DAPO), section 3.3", CLIP | {"aggregation": "token-mean", "microbatches": HALVES}, batches()),
    ("seq-mean-token-mean", "Aggregation", "policy", "Is the mean of the sequences' means the same in two microbatches?", "Shao et al. 2024 (GRPO, arXiv:2402.03300), eq. 3", CLIP | {"aggregation": "seq-mean-token-mean", "microbatches": HALVES}, batches()),
    ("seq-mean-token-mean-rows", "Aggregation", "policy", "And in microbatches of three and of one sequence?", "Shao et al. 2024 (GRPO), eq. 3", CLIP | {"aggregation": "seq-mean-token-mean", "microbatches": [[0, 1, 2], [3]]}, batches()),
    ("seq-mean-token-sum", "Aggregation", "policy", "Is the mean of the sequences' sums the same in two microbatches?", "Williams 1992 (REINFORCE): the return of an episode", CLIP | {"aggregation": "seq-mean-token-sum", "microbatches": HALVES}, batches()),
    ("constant-length", "Aggregation", "policy", "Is the sum over B times a constant length the same in two microbatches?", "Liu et al. 2025 (Dr. GRPO, arXiv:2503.20783), section 3.2", CLIP | {"aggregation": "constant", "length": 8, "microbatches": HALVES}, batches()),
    ("gspo", "Objectives", "policy", "Is the ratio the geometric mean over a sequence's own tokens?", "Zheng et al. 2025 (GSPO, arXiv:2507.18071), eq. 7", {"objective": "gspo", "clip": [0.2, 0.3], "aggregation": "seq-mean-token-mean"}, updated([[0.5, -0.25, 0.0], [0.5, 0.5, 0.75], [-0.5, 0.25, 0.0]], [1.0, 1.0, -1.0])),
    ("gspo-uneven", "Objectives", "policy", "And with sequences of different lengths?", "Zheng et al. 2025 (GSPO), eq. 5, 7", {"objective": "gspo", "clip": [0.2, 0.3], "aggregation": "seq-mean-token-mean"}, updated([[0.5, -0.25, 4.0], [-0.5, 0.25, 0.0]], [1.0, -1.0], np.array([[1, 1, 0], [1, 1, 1]], bool))),
    ("cispo", "Objectives", "policy", "Is the clipped ratio detached, above 1 + ε too?", "MiniMax 2025 (arXiv:2506.13585), section 3.1", {"objective": "cispo", "clip": [0.2, 0.2]}, updated([[HIGH, 0.05, HIGH], [HIGH, -0.05, 0.0]], [1.0, -1.0])),
    ("cispo-below", "Objectives", "policy", "Is the ratio clipped below 1 − ε?", "MiniMax 2025, section 3.1", {"objective": "cispo", "clip": [0.2, 0.2]}, updated([[LOW, 0.05, LOW], [LOW, -0.05, 0.0]], [1.0, -1.0])),
    ("sapo", "Objectives", "policy", "Is the gate 4/τ·σ(τ(r − 1)), with one τ for A > 0 and another for A ≤ 0?", "Gao et al. 2025 (SAPO, arXiv:2511.20347)", {"objective": "sapo", "clip": [0.2, 0.2], "tau": [1.0, 1.75], "aggregation": "seq-mean-token-mean"}, updated(normal(25, 2, 3) / 2, [1.0, -1.0])),
    ("dis", "Objectives", "policy", "Is the detached ratio 0 outside of the range?", "Hou et al. 2026 (SAO, arXiv:2607.07508), eq. 1", {"objective": "dis", "clip": [0.2, 0.25]}, updated([[HIGH, 0.05, LOW], [LOW, HIGH, -0.05]], [1.0, -1.0])),
    ("dppo-tv", "Objectives", "policy", "Is a token masked by the change of its probability, and not of its ratio, in the direction of its advantage?", DPPO + "13", {"objective": "dppo_tv", "clip": [0.1, 0.15]}, probable()),
    ("dppo-kl", "Objectives", "policy", "Is a token masked by the binary KL(q‖p) in the direction of its advantage?", DPPO + "14", {"objective": "dppo_kl", "clip": [0.05, 0.05]}, probable()),
    ("value-half", "Value loss", "value", "Is the loss ½(V − R)², or (V − R)²?", "OpenAI baselines, ppo2; Schulman et al. 2017, eq. 9, has no ½", {"clip": None}, valued(FULL)),
    ("value-clip", "Value loss", "value", "Is the larger of both errors taken, with the change of V clipped?", "OpenAI baselines, ppo2", {"clip": 0.2}, valued(FULL)),
    ("value-token-mean", "Value loss", "value", "Does each token count the same, in sequences of different lengths?", "Schulman et al. 2017, eq. 9: the mean over time steps", {"clip": 0.2}, valued(TAIL)),
    ("entropy-temperature", "Token statistics", "token", "Are logprob and entropy those of softmax(z/T), which was sampled?", "Schulman et al. 2017, eq. 9: S[π] of the policy that acts", {"temperature": 0.7}, tokens()),
    ("entropy-masked-vocabulary", "Token statistics", "token", "Is the entropy finite with logits of −∞?", "0·log 0 = 0", {"temperature": 1.0}, tokens(masked=True)),
    ("weights-token-truncate", "Importance weights", "importance", "Is min(π/π_sampler, c) taken by token?", IMPORTANCE, {"level": "token", "mode": "truncate", "floor": None, "cap": 1.25}, sampled(TAIL)),
    ("weights-token-mask", "Importance weights", "importance", "Are tokens outside of the bounds dropped, and the others weighted by their ratio?", "IcePop, Ling team 2025", {"level": "token", "mode": "mask", "floor": 0.75, "cap": 1.5}, sampled(TAIL)),
    ("weights-sequence-truncate", "Importance weights", "importance", "Is the ratio of a sequence the product of its tokens' ratios?", IMPORTANCE, {"level": "sequence", "mode": "truncate", "floor": None, "cap": 2.0}, sampled(TAIL)),
    ("weights-sequence-mask", "Importance weights", "importance", "Is a whole sequence dropped by the product of its ratios?", IMPORTANCE, {"level": "sequence", "mode": "mask", "floor": 0.5, "cap": 2.0}, sampled(TAIL)),
    ("rloo", "Group advantages", "group", "Is the baseline the mean of the other responses?", "Ahmadian et al. 2024 (RLOO, arXiv:2402.14740)", {"kind": "rloo", "size": 4}, {"scores": SCORES}),
    ("grpo", "Group advantages", "group", "Is the deviation that of a sample (with Bessel's correction)?", "Shao et al. 2024 (GRPO), section 4.1.2; the correction is torch's default", {"kind": "grpo", "size": 4}, {"scores": SCORES}),
    ("grpo-mean-only", "Group advantages", "group", "Can the division by the deviation be left out?", "Liu et al. 2025 (Dr. GRPO), section 3.2", {"kind": "mean", "size": 4}, {"scores": SCORES}),
    ("grpo-equal", "Group advantages", "group", "Is the advantage 0 in a group of equal scores?", "Shao et al. 2024 (GRPO), section 4.1.2", {"kind": "grpo", "size": 4}, {"scores": np.array([0.1, 0.1, 0.1, 0.1, 1.0, 1.0, 1.0, 1.0])}),
]  # fmt: skip


def generate() -> tuple[list[dict[str, Any]], Arrays]:
    """Return the contents of fixtures.json and of fixtures.safetensors."""
    records = []
    arrays: Arrays = {}
    for name, topic, operation, question, source, options, inputs in ROWS:
        records.append(
            {
                "name": name,
                "topic": topic,
                "operation": operation,
                "question": question,
                "source": source,
                "options": options,
            }
        )
        answer = OPERATIONS[operation](inputs, **options)
        for kind, tensors in (("inputs", inputs), ("answer", answer)):
            for key, x in tensors.items():
                arrays[f"{name}/{kind}/{key}"] = np.array(x, order="C")
    return records, arrays


if __name__ == "__main__":
    records, arrays = generate()
    text = json.dumps(records, indent=1, ensure_ascii=False)
    (FOLDER / "fixtures.json").write_text(text + "\n")
    save_file(arrays, FOLDER / "fixtures.safetensors")
