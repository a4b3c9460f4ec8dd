"""The panels of a report: headings, titles and metrics."""

from __future__ import annotations

from typing import NamedTuple


class Panel(NamedTuple):
    """One plot: its title, the label of its axis, and its metrics."""

    title: str
    unit: str
    metrics: tuple[str, ...]
    prefixes: tuple[str, ...] = ()
    note: str = ""


OVERVIEW = "Overview"
"""Heading of the first panels, which are drawn even if they are constant."""

GROUPS = (
    (
        OVERVIEW,
        (
            Panel("Reward", "reward", ("reward", "eval/reward")),
            Panel("KL to the reference", "nats per sequence", ("kl",)),
            Panel(
                "Critic",
                "explained variance",
                ("explained_variance",),
                note="of Monte Carlo returns; 1 is perfect, 0 is a constant",
            ),
            Panel("Response length", "tokens", ("response_length",)),
        ),
    ),
    (
        "Reward",
        (
            Panel("Rewards", "unweighted", (), ("reward/",)),
            Panel("Held-out rewards", "unweighted", (), ("eval/reward/",)),
            Panel("Monitored held-out rewards", "unweighted", (), ("eval/monitor/",)),
            Panel(
                "Correlation with the gold reward",
                "correlation over responses",
                (),
                ("correlation/",),
                "of each monitored reward with the trained one",
            ),
            Panel(
                "Ensemble disagreement",
                "reward",
                ("ensemble_disagreement",),
                note="standard deviation over the members",
            ),
            Panel("Reward minus the KL penalty", "reward", ("rlhf_reward",)),
            Panel(
                "Spread",
                "standard deviation",
                ("reward_std", "advantage_std"),
                note="of rewards, and of advantages before whitening",
            ),
            Panel(
                "Solved prompts",
                "fraction",
                ("solved", "left_out"),
                note="solved responses, and prompts left out",
            ),
        ),
    ),
    (
        "Policy",
        (
            Panel("Entropy", "nats per token", ("entropy",)),
            Panel(
                "KL to the rollout policy",
                "nats per token",
                ("approx_kl", "update_kl", "target_kl"),
            ),
            Panel("β of the KL to the reference", "per nat", ("kl_coef",)),
            Panel("β of the KL to the rollout policy", "per nat", ("policy_kl_coef",)),
            Panel("Early stops", "stopped", ("early_stopped",), note="by the KL to the rollout"),
            Panel("Ratio", "new / old probability", ("ratio_mean", "ratio_max")),
            Panel("Clip fraction", "fraction of tokens", ("clip_fraction",)),
            Panel(
                "Ratio outside the clip range",
                "fraction of tokens",
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
                "Value calibration",
                "slope of the returns",
                ("value_calibration",),
                note="at the prompt; 1 is calibrated",
            ),
            Panel(
                "Effect of the values",
                "correlation",
                ("advantage_correlation",),
                note="of advantages with and without values; 1 is no effect",
            ),
            Panel("Value loss", "½(V − R)²", ("value_loss",)),
            Panel("Clipped values", "fraction of tokens", ("value_clip_fraction",)),
        ),
    ),
    (
        "Responses",
        (
            Panel("EOS rate", "fraction of responses", ("eos_rate",)),
            Panel(
                "Reward and length",
                "correlation over responses",
                ("length_correlation",),
                note="near 1, the reward pays for length",
            ),
            Panel(
                "Diversity of the responses",
                "fraction",
                ("distinct_1", "distinct_2", "unique_responses"),
                note="distinct n-grams per response, and distinct responses",
            ),
            Panel("Turns", "per episode", ("turns", "rows")),
            Panel("Finish reasons", "fraction", (), ("finish/",)),
            Panel("Outcomes", "fraction of episodes", (), ("outcome/",)),
            Panel("Invalid actions", "per episode", ("invalid_actions",)),
            Panel("Failed episodes", "episodes", ("failed_episodes",)),
            Panel("Tool calls", "per episode", (), ("tools/",)),
        ),
    ),
    (
        "Optimizer",
        (
            Panel("Loss", "minimized loss", ("loss",)),
            Panel("Pretraining loss", "nats per token", ("ptx_loss",)),
            Panel("Learning rate", "", ("learning_rate",)),
            Panel("Schedules", "coefficient", (), ("schedule/",)),
            Panel("Gradient norm", "before clipping", ("grad_norm", "value_grad_norm")),
            Panel(
                "Skipped steps",
                "steps",
                ("skipped_steps", "overflowed_steps"),
                note="loss or gradient not finite, or the loss scale too large",
            ),
            Panel("Loss scale", "fp16", ("loss_scale",)),
        ),
    ),
    (
        "Speed",
        (
            Panel("Speed", "response tokens per second", ("tokens_per_second",)),
            Panel("Time per iteration", "seconds", (), ("seconds/",)),
        ),
    ),
)
"""Panels by heading. A report omits panels without data and empty headings."""

PANELS = tuple(panel for _, panels in GROUPS for panel in panels)

LABELS = {
    "ratio_above_positive": "A > 0, above: clipped",
    "ratio_below_positive": "A > 0, below",
    "ratio_above_negative": "A < 0, above",
    "ratio_below_negative": "A < 0, below: clipped",
}
"""Legends of metrics whose names are unclear in a plot."""
