"""What limits the demo's critic: what can be foreseen, or what a linear head sees of it?

    python -m benchmarks.studies.critic_limit runs/critic-limit

The demo's PPO stage with its default head, on a seed of its own. At a few iterations the policy, as
it is, answers further prompts, and of the Monte Carlo returns of all tokens the share of variance
is printed that is explained by

    the run's head      as it stands
    a fit of n          ridge regression on the same states of n fresh responses, of half as many
                        others; the best λ by what is held out, so no linear head does better
    any function        at most: each prefix of a response is continued a second time; the
                        covariance of the two returns is the variance of their expectation given
                        the prefix

in all, and by the number of tokens that are written already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.studies.common import CONSOLE, demo_stages, parser_of, print_table
from benchmarks.training import iterate
from fastppo.data.prompts import Prompts
from fastppo.demo.run import ppo_config
from fastppo.ppo.checks import random_state_restored
from fastppo.ppo.experience import Experience
from fastppo.ppo.trainer import PPOTrainer
from fastppo.ppo.value_regression import RIDGES, ridge_head
from fastppo.rollout import Rollout

SEED = 400
"""Neither the method nor the critic's study has seen it."""

FITS = (128, 1024)
"""Responses of a fit: those of an iteration, and eight times as many."""

HELD_OUT = 1024
CONTINUED = 256
"""Responses whose prefixes are continued once more."""

WRITTEN = ((0, 3), (3, 6), (6, 9), (9, 12), (12, 40))
"""Tokens written, from the first up to before the second."""


class Returns(NamedTuple):
    """Of prefixes of responses, each [N]."""

    written: np.ndarray
    """Tokens of the response that are there."""
    values: np.ndarray
    """The run's head's."""
    first: np.ndarray
    """Monte Carlo returns of the response; `second`, of another continuation."""
    second: np.ndarray


def experience_of(trainer: PPOTrainer, prompts: Prompts, rollout: Rollout) -> Experience:
    """What the trainer makes of the responses."""
    options = trainer.config.at(trainer.state.iteration)
    scores = trainer.score(prompts, rollout, options)
    experience, _ = trainer.make_experience(prompts.token_ids, rollout, scores, options)
    return experience


def explained(returns: Tensor, values: Tensor) -> float:
    return float(1 - (returns - values).var() / returns.var())


def fit_shares(trainer: PPOTrainer, experience: Experience) -> list[float]:
    """What fits of `FITS` responses explain of those held out, which are the last."""
    rows = []
    for micro in experience.batch.split([CONTINUED] * (len(experience) // CONTINUED)):
        layout = trainer.model.layout(micro)
        with torch.no_grad(), trainer.model.autocast():
            rows.append(trainer.model(layout).value_states.double())
    states = torch.cat(rows)
    returns = experience.complete_returns.double()
    z = torch.cat([states, torch.ones(len(states), 1), returns[:, None]], dim=1)
    ends = experience.batch.cu_seqlens
    held_out = z[ends[-1 - HELD_OUT] :]
    shares = []
    for count in FITS:
        fitted = z[: ends[count]]
        moments = fitted.T @ fitted
        heads = [ridge_head(moments, ridge) for ridge in RIDGES]
        shares.append(max(explained(held_out[:, -1], held_out[:, :-1] @ u[:-1]) for u in heads))
    return shares


def continued(
    trainer: PPOTrainer, prompts: Prompts, rollout: Rollout, experience: Experience
) -> Returns:
    """The returns of the first `CONTINUED` responses, and of another continuation of each of their
    prefixes."""
    starts = experience.batch.cu_seqlens.tolist()
    columns: dict[str, list[float]] = {name: [] for name in Returns._fields}
    for written in range(max(rollout.lengths[:CONTINUED])):
        rows = [row for row in range(CONTINUED) if rollout.lengths[row] > written]
        prefixes = [rollout.tokens[row][:written] for row in rows]
        again = prompts.select(rows)
        contexts = [ids + prefix for ids, prefix in zip(again.token_ids, prefixes, strict=True)]
        room = trainer.sampling.max_new_tokens - written
        ends = trainer.engine.generate(contexts, trainer.sampling.shortened(room))
        tokens = [prefix + end for prefix, end in zip(prefixes, ends.tokens, strict=True)]
        whole = Rollout(tokens=tokens, finish_reasons=ends.finish_reasons)
        other = experience_of(trainer, again, whole)
        places = [starts[row] + written for row in rows]
        columns["written"] += [written] * len(rows)
        columns["values"] += experience.old_values[places].tolist()
        columns["first"] += experience.complete_returns[places].tolist()
        columns["second"] += other.complete_returns[other.batch.cu_seqlens[:-1] + written].tolist()
    return Returns(**{name: np.array(values) for name, values in columns.items()})


def share_at_most(returns: Returns, chosen: np.ndarray) -> float:
    """What no function of the prefixes exceeds."""
    covariance = np.cov(returns.first[chosen], returns.second[chosen])
    return float(2 * covariance[0, 1] / covariance.trace())


def looked_at(trainer: PPOTrainer) -> dict[str, list[float]]:
    """Shares of the returns' variance: those of the table's rows, and by tokens written."""
    assert trainer.prompts is not None
    iteration = trainer.state.iteration
    with random_state_restored(iteration):
        drawn = torch.randint(len(trainer.prompts), (FITS[-1] + HELD_OUT,)).tolist()
        prompts = trainer.prompts.select(drawn)
        rollout = trainer.engine.generate(prompts.token_ids, trainer.sampling)
        experience = experience_of(trainer, prompts, rollout)
        returns = continued(trainer, prompts, rollout, experience)
    everywhere = returns.written >= 0
    rows = {
        "the run's head": [explained(experience.complete_returns, experience.old_values)],
        "any function": [share_at_most(returns, everywhere)],
    }
    for count, share in zip(FITS, fit_shares(trainer, experience), strict=True):
        rows[f"a fit of {count}"] = [share]
    for begin, end in WRITTEN:
        chosen = (returns.written >= begin) & (returns.written < end)
        first = torch.from_numpy(returns.first[chosen])
        values = torch.from_numpy(returns.values[chosen])
        rows[f"{begin} to {end - 1} tokens written: the run's head, any function"] = [
            explained(first, values),
            share_at_most(returns, chosen),
        ]
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser_of(__doc__).parse_args(arguments)
    iterations = (1,) if options.quick else (3, 7, 12, 20)
    stages = demo_stages(options.directory, SEED)
    config = ppo_config(
        stages, stages / "ppo", seed=SEED, device="cpu", lr_schedule="constant", iterations=10_000
    )
    torch.set_num_threads(1)
    trainer = PPOTrainer(config, console=CONSOLE)
    table: dict[str, list[str]] = {}
    for iteration in iterations:
        while trainer.state.iteration < iteration:
            iterate(trainer)
        for name, shares in looked_at(trainer).items():
            table.setdefault(name, []).append(", ".join(f"{share:.2f}" for share in shares))
    print_table(["explained variance", *(f"iteration {i}" for i in iterations)], table)


if __name__ == "__main__":
    main()
