"""Record where peers define things differently: their formula in words and as an fp64 variant.

Line numbers belong to the releases that docs/conformance.md names. The variant is checked in every
run, so a changed definition fails.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Difference:
    formula: str
    where: str
    """File and line in the package."""
    variant: dict[str, Any] = field(default_factory=dict)
    """Keywords of the function in `formulas.py`."""


COLUMNS_COUNT = "V_next = V_{t+1} of the next column, masked or not"
CLAMPED = "k3 clamped to ±10, without gradient beyond"
NAN_PRODUCT = "−Σ p·log p, and 0·(−∞) is NaN"
NAN_ENTROPY = "logsumexp(z) − Σ p·z, and 0·(−∞) is NaN"
NAN_LOSS = "Σ loss·mask, and NaN·0 is NaN"
UPPER_ONLY = "the detached min(r, `epsilon_high`); a lower bound is not offered"
MEAN_OF_MEANS = "the mean of the microbatches' token means"
NAN = {"nan": ("loss", "gradient")}


def _whitened(formula: str, where: str, *names: str, **variant: Any) -> dict[str, Difference]:
    return {name: Difference(formula, where, variant) for name in names}


DIFFERENCES: dict[str, dict[str, Difference]] = {
    "TRL 1.12 (PPO)": {
        "entropy-masked-vocabulary": Difference(
            NAN_PRODUCT, "trl/trainer/utils.py:557", {"zero_times_infinity": True}
        ),
    },
    "TRL 1.16 (GRPO)": {
        "masked-nan": Difference(NAN_LOSS, "trl/trainer/grpo_trainer.py:3173", NAN),
        "cispo-below": Difference(
            UPPER_ONLY, "trl/trainer/grpo_trainer.py:3110", {"no_lower_clip": True}
        ),
        "entropy-masked-vocabulary": Difference(
            NAN_PRODUCT, "trl/trainer/utils.py:639", {"zero_times_infinity": True}
        ),
    },
    "verl": {
        "kl-k3-large": Difference(CLAMPED, "verl/trainer/ppo/core_algos.py:2245", {"limit": 10.0}),
        "entropy-masked-vocabulary": Difference(
            NAN_ENTROPY, "verl/utils/torch_functional.py:244", {"zero_times_infinity": True}
        ),
    },
    "OpenRLHF": {
        "gae-gap": Difference(
            "values and rewards of masked tokens are 0, and they count as steps",
            "openrlhf/trainer/ppo_utils/experience_maker.py:377",
            {"masked": "zero"},
        ),
        **_whitened(
            "the variance without Bessel's correction",
            "openrlhf/models/utils.py:211",
            "whiten-mask",
            "whiten-all",
            "whiten-bessel",
            bessel=False,
        ),
        "kl-k3-large": Difference(CLAMPED, "openrlhf/models/utils.py:113", {"limit": 10.0}),
        "masked-nan": Difference(NAN_LOSS, "openrlhf/models/loss.py:32", {"nan": ("loss",)}),
        "entropy-masked-vocabulary": Difference(
            NAN_ENTROPY, "openrlhf/models/utils.py:218", {"zero_times_infinity": True}
        ),
        "weights-sequence-mask": Difference(
            "a sequence is kept by the geometric mean, and its tokens have their own ratios",
            "openrlhf/models/loss.py:223, 239",
            {"geometric": True, "keep_token_ratio": True},
        ),
    },
    "SkyRL": {
        "gae-padding-values": Difference(
            COLUMNS_COUNT,
            "skyrl/backends/skyrl_train/utils/ppo_utils.py:1275",
            {"masked": "count"},
        ),
        "gae-gap": Difference(
            COLUMNS_COUNT,
            "skyrl/backends/skyrl_train/utils/ppo_utils.py:1275",
            {"masked": "count"},
        ),
        "kl-k3-large": Difference(
            CLAMPED, "skyrl/backends/skyrl_train/utils/ppo_utils.py:117", {"limit": 10.0}
        ),
        "masked-nan": Difference(
            NAN_LOSS, "skyrl/backends/skyrl_train/utils/ppo_utils.py:1092", {"nan": ("loss",)}
        ),
        "entropy-masked-vocabulary": Difference(
            NAN_PRODUCT,
            "skyrl/backends/skyrl_train/utils/torch_utils.py:103",
            {"zero_times_infinity": True},
        ),
        "value-token-mean": Difference(
            "the mean of the sequences' means",
            "skyrl/backends/skyrl_train/utils/ppo_utils.py:172",
            {"aggregation": "seq-mean-token-mean"},
        ),
    },
    "AReaL": {
        "entropy-masked-vocabulary": Difference(
            NAN_PRODUCT,
            "areal/utils/functional/vocab_parallel.py:27",
            {"zero_times_infinity": True},
        ),
        "kl-k3-large": Difference(CLAMPED, "areal/utils/data.py:1655", {"limit": 10.0}),
        "masked-nan": Difference(
            "a masked NaN is cut from the loss, not from its gradient",
            "areal/utils/functional/functional.py:509",
            {"nan": ("gradient",)},
        ),
        "gspo-uneven": Difference(
            "the mean over all tokens, so longer sequences weigh more",
            "areal/utils/functional/functional.py:542",
            {"aggregation": "token-mean"},
        ),
        **{
            name: Difference(
                "the ratio of a sequence is the geometric mean of its tokens'",
                "areal/utils/functional/functional.py:356",
                {"geometric": True},
            )
            for name in ("weights-sequence-truncate", "weights-sequence-mask")
        },
    },
    "AgileRL": {
        "masked-nan": Difference(
            f"{NAN_LOSS}; its trainer fills masked logprobs before",
            "agilerl/utils/llm_utils.py:2013",
            NAN,
        ),
        "token-mean": Difference(
            MEAN_OF_MEANS,
            "agilerl/utils/llm_utils.py:2013, agilerl/algorithms/ppo_llm.py:1261",
            {"mean_of_means": True},
        ),
    },
    "Liger-Kernel": {
        "masked-nan": Difference(NAN_LOSS, "liger_kernel/chunked_loss/grpo_loss.py:231", NAN),
        "cispo-below": Difference(
            UPPER_ONLY, "liger_kernel/chunked_loss/grpo_loss.py:81", {"no_lower_clip": True}
        ),
    },
    "ms-swift": {
        "entropy-masked-vocabulary": Difference(
            NAN_PRODUCT, "swift/rlhf_trainers/utils.py:665", {"zero_times_infinity": True}
        ),
    },
    "torchtune": {
        **{
            name: Difference(COLUMNS_COUNT, "torchtune/rlhf/rewards.py:199", {"masked": "count"})
            for name in ("gae-padding-values", "gae-gap")
        },
        **_whitened(
            "shift_mean=True, the default, adds the mean back",
            "torchtune/rlhf/rewards.py:159",
            "whiten-mask",
            "whiten-all",
            "whiten-bessel",
            shift_mean=False,
        ),
        **_whitened(
            "shift_mean=False leaves the mean at 0",
            "torchtune/rlhf/rewards.py:159",
            "whiten-keep-mean",
            shift_mean=True,
        ),
        "masked-nan": Difference(NAN_LOSS, "torchtune/rlhf/rewards.py:112", NAN),
        "token-mean": Difference(
            MEAN_OF_MEANS,
            "torchtune/rlhf/rewards.py:112, recipes/ppo_full_finetune_single_device.py:1118",
            {"mean_of_means": True},
        ),
    },
}
