"""The panels of a report: their headings, and the metrics that each draws."""

from __future__ import annotations

from typing import NamedTuple


class Panel(NamedTuple):
    """One plot: a title, the axis label with its unit, and the metrics drawn in it."""

    title: str
    unit: str
    metrics: tuple[str, ...]
    prefixes: tuple[str, ...] = ()
    note: str = ""


OVERVIEW = "Overview"
"""The heading of the panels that are drawn first, also where they do not change."""

GROUPS = (
    (
        OVERVIEW,
        (
            Panel(
                "Reward",
                "reward",
                ("reward", "eval/reward", "eval/greedy/reward"),
                note="in training, and held out",
            ),
            Panel("KL to the reference", "nats per sequence", ("kl",)),
            Panel(
                "Critic",
                "explained variance",
                ("explained_variance",),
                note="of Monte Carlo returns; 1 is perfect, 0 a constant",
            ),
            Panel("Response length", "tokens", ("response_length",)),
        ),
    ),
    (
        "Reward",
        (
            Panel("Rewards", "unweighted", (), ("reward/",)),
            Panel("Held-out rewards", "unweighted", (), ("eval/reward/",)),
            Panel(
                "Agreement with the gold reward",
                "correlation over responses",
                (),
                ("correlation/",),
                "of each monitored reward and the trained one",
            ),
            Panel(
                "Disagreement of the ensemble",
                "reward",
                ("ensemble_disagreement",),
                note="standard deviation over its members",
            ),
            Panel("Reward less the cost of the KL", "reward", ("rlhf_reward",)),
            Panel(
                "Solved",
                "share",
                ("solved", "left_out"),
                note="of responses; of prompts",
            ),
        ),
    ),
    (
        "Policy",
        (
            Panel("Entropy", "nats per token", ("entropy",)),
            Panel("KL to the rollout policy", "nats per token", ("approx_kl",)),
            Panel("β of the KL to the reference", "per nat", ("kl_coef",)),
            Panel("β of the KL to the rollout policy", "per nat", ("policy_kl_coef",)),
            Panel("Early stops", "stopped", ("early_stopped",), note="on the KL to the rollout"),
            Panel("Ratio", "new / old probability", ("ratio_mean", "ratio_max")),
            Panel("Clip fraction", "share of tokens", ("clip_fraction",)),
            Panel(
                "Beyond the clip range",
                "share of tokens",
                (
                    "ratio_above_positive",
                    "ratio_below_positive",
                    "ratio_above_negative",
                    "ratio_below_negative",
                ),
                note="by the sign of the advantage A",
            ),
        ),
    ),
    (
        "Critic",
        (
            Panel(
                "Values and returns",
                "mean over tokens",
                ("value", "return"),
                note="before the update",
            ),
            Panel(
                "Calibration of the values",
                "slope of the returns",
                ("value_calibration",),
                note="at the prompt; 1 is calibrated",
            ),
            Panel(
                "What the values change",
                "correlation",
                ("advantage_correlation",),
                note="of the advantages with those without values; 1 is nothing",
            ),
            Panel(
                "Spread",
                "standard deviation",
                ("advantage_std", "reward_std"),
                note="of the advantages before whitening; of the responses' rewards",
            ),
            Panel("Value loss", "½(V − R)²", ("value_loss",)),
            Panel("Clipped values", "share of tokens", ("value_clip_fraction",)),
        ),
    ),
    (
        "Responses",
        (
            Panel("EOS rate", "share of responses", ("eos_rate",)),
            Panel(
                "Reward and length",
                "correlation over responses",
                ("length_correlation",),
                note="near 1, length is what pays",
            ),
            Panel(
                "Variety of the responses",
                "share",
                ("distinct_1", "distinct_2", "unique_responses"),
                note="distinct n-grams within one; distinct ones of all",
            ),
            Panel("Turns", "per episode", ("turns",)),
            Panel("Ends of episodes", "share", (), ("finish/",)),
            Panel("Calls of tools", "per episode", (), ("tools/",)),
        ),
    ),
    (
        "Optimiser",
        (
            Panel("Loss", "as a step follows it", ("loss",)),
            Panel("Loss on pretraining text", "nats per token", ("ptx_loss",)),
            Panel("Learning rate", "", ("learning_rate",)),
            Panel("Schedules", "coefficient", (), ("schedule/",)),
            Panel("Gradient norm", "before clipping", ("grad_norm", "value_grad_norm")),
            Panel(
                "Skipped steps",
                "steps",
                ("skipped_steps", "overflowed_steps"),
                note="loss or gradient not finite; a loss scale that was too large",
            ),
            Panel("Scale of the loss", "under fp16", ("loss_scale",)),
        ),
    ),
    (
        "Speed",
        (
            Panel("Speed", "response tokens per second", ("tokens_per_second",)),
            Panel("Time of an iteration", "seconds", (), ("seconds/",)),
        ),
    ),
)
"""The panels under their headings. A panel without data is left out, and so is an empty heading."""

PANELS = tuple(panel for _, panels in GROUPS for panel in panels)

LABELS = {
    "ratio_above_positive": "A > 0, above: clipped",
    "ratio_below_positive": "A > 0, below",
    "ratio_above_negative": "A < 0, above",
    "ratio_below_negative": "A < 0, below: clipped",
}
"""Legends of metrics whose names need the context of their panel."""
