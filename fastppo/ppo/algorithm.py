"""PPO, top to bottom.

One iteration (`PPO.iterate`) is

    generate     responses to a batch of prompts, from the current policy
    score        the responses with the rewards
    experience   old and reference logprobs, values; shaped rewards, advantages, whitening
    update       epochs over shuffled minibatches: loss, gradient, optimizer step

One forward pass of the trunk feeds both heads, and only the hidden states that predict response
tokens reach them.

What is optional is an object with a variant that does nothing, chosen in `PPO.__init__`: dynamic
sampling, the training of the value head, the step control, pretraining text. `config` is fixed for
the run. The numbers that change during it are the iteration's `Coefficients`. Everything else that
changes is in the model, the optimizer, `RunState` and a refreshed reference, and a checkpoint holds
those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fastppo.activity import counted
from fastppo.data.chat import decode_completions
from fastppo.data.microbatches import Limits, split
from fastppo.data.prompts import Prompts
from fastppo.ppo.coefficients import Coefficients
from fastppo.ppo.dynamic_sampling import make_dynamic_sampling
from fastppo.ppo.estimators import estimate_advantages, what_to_train
from fastppo.ppo.experience import Experience, Responses
from fastppo.ppo.metrics import (
    LossSums,
    PhaseTimer,
    UpdateMeter,
    read_experience,
    response_metrics,
    successes_per_minibatch,
)
from fastppo.ppo.objective import PolicyLoss, value_loss
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.out_of_memory import MicrobatchLimits
from fastppo.ppo.parts import Parts
from fastppo.ppo.policies import GivenPolicy, read_old_policy, read_reference
from fastppo.ppo.pretraining import make_pretraining
from fastppo.ppo.reporter import Reporter
from fastppo.ppo.rows import Rows
from fastppo.ppo.state import RunState
from fastppo.ppo.step_control import make_step_control
from fastppo.ppo.value_head import make_value_head
from fastppo.rewards.scorer import Scorer, Scores
from fastppo.rollout import Rollout
from fastppo.run.watch import rollout_health

Result = TypeVar("Result")


class Iteration(NamedTuple):
    """Metrics, responses and experience of one iteration."""

    metrics: dict[str, float]
    responses: Responses
    experience: Experience
    drawn: Responses
    """`responses`, and those that dynamic sampling replaced."""


class MicrobatchLoss(NamedTuple):
    """The loss of a microbatch."""

    loss: Tensor
    """0-d, differentiable."""
    sums: LossSums
    """Metric sums of this microbatch."""
    value_states: Tensor
    """[N, H], the value head's input."""


class PPO:
    """The algorithm over the parts of a run."""

    def __init__(self, config: PPOConfig, parts: Parts, reporter: Reporter) -> None:
        self.config = config
        self.parts = parts
        self.reporter = reporter
        self.say = reporter.say
        self.world = parts.world
        self.model = parts.model
        self.tokenizer = parts.tokenizer
        self.reference = parts.reference
        self.optimizer = parts.optimizer
        self.engine = parts.engine
        self.limits = MicrobatchLimits(parts.world.size)
        self.step_control = make_step_control(config, parts.optimizer, reporter.warn)
        self.state = RunState.of(config, self.step_control)
        self.draw = make_dynamic_sampling(config)
        self.value_head = make_value_head(config, parts, self.limits)
        self.pretraining = make_pretraining(config, parts, self.state)
        objective = parts.functions.get("objective")
        self.policy_loss = PolicyLoss(config, parts.model, parts.reference, objective)

    def iterate(
        self,
        prompts: Prompts,
        coefficients: Coefficients,
        timer: PhaseTimer | None = None,
        more_prompts: Callable[[int], Prompts] | None = None,
    ) -> Iteration:
        """Run one PPO iteration on a batch of prompts.

        Args:
            coefficients: of this iteration; see `begin_iteration`.
            timer: times each phase, and may end the iteration between phases.
            more_prompts: returns the next prompts, for dynamic sampling.

        Raises:
            PhaseEndedError: `timer` was asked to stop; no weight has changed.
        """
        timer = timer or PhaseTimer(self.config)

        def respond(prompts: Prompts) -> Responses:
            with timer("generate"):
                prompts, rollout = self.parts.episode_runner.run(
                    prompts, self.engine, self.parts.sampling
                )
            with timer("score"):
                return Responses(prompts, rollout, self.score(prompts, rollout, coefficients))

        responses, drawn = self.draw(prompts, respond, more_prompts)
        prompts, rollout, scores = responses
        with timer("experience"):
            experience, metrics = self.make_experience(
                prompts.token_ids, rollout, scores, coefficients
            )
        with timer("update"), self.engine_released():
            metrics |= self.update(experience, coefficients)
        self.state.coefficient_control.update(metrics, len(experience), experience.trained)

        metrics |= response_metrics(scores, rollout, metrics, self.config.samples_per_prompt)
        metrics |= self.parts.episode_runner.metrics()
        metrics |= timer.metrics(experience.batch.response_count, self.world)
        metrics |= rollout_health(rollout.generated_tokens, scores.total, scores.monitors)
        return Iteration(metrics, responses, experience, drawn)

    @torch.no_grad()
    def make_experience(
        self,
        prompt_ids: list[list[int]],
        rollout: Rollout,
        scores: Scores,
        coefficients: Coefficients,
        *,
        given: GivenPolicy | None = None,
    ) -> tuple[Experience, dict[str, float]]:
        """Compute old logprobs, reference logprobs and values, and the advantages from them.

        Args:
            given: old logprobs and values of responses generated elsewhere.

        Returns:
            (the update's data, metrics).
        """
        config, state = self.config, self.state
        rows = Rows.of(prompt_ids, rollout)
        batch = rows.batch(self.parts.device)
        masks = config.truncated == "mask"
        rolled_out = Experience.of_rows(batch, rows, rows.scores(scores), masks=masks)
        metrics = successes_per_minibatch(scores.total, config.minibatches)
        scores = scores.normalized(config.score_normalization, config.score_clip, state.score_scale)

        def read_policies(limits: Limits) -> tuple[Experience, dict[str, Tensor]]:
            plan = split(batch, limits, self.world)
            old, mismatch = read_old_policy(
                rolled_out, rows.rollout, plan, config, parts=self.parts, given=given
            )
            kl_coef = coefficients.kl_coef
            return read_reference(old, self.reference, plan, config, kl_coef=kl_coef), mismatch

        experience, mismatch = self.in_microbatches(read_policies, batch)
        experience = estimate_advantages(
            experience,
            rows.scores(scores),
            config,
            coefficients,
            function=self.parts.functions.get("advantage"),
        )
        # The host waits for a GPU here, and nowhere else before the update.
        read = read_experience(experience, config, mismatch)
        trained = what_to_train(read.has_signal, experience.masked, config, coefficients)
        experience = replace(experience, trained=trained, response_kl=read.response_kl)
        metrics |= read.metrics
        if experience.ref_logprobs is not None:
            metrics["kl_coef"] = coefficients.kl_coef
        return experience, metrics

    def update(self, experience: Experience, coefficients: Coefficients) -> dict[str, float]:
        """Train on a batch for `ppo_epochs` of minibatches, and return the mean metrics.

        `experience.trained` says what is trained. Masked responses are excluded. The step control
        may end the update early.
        """
        config = self.config
        experience = experience.in_loss()
        meter = UpdateMeter()
        self.step_control.begin_update(experience, coefficients)
        self.value_head.begin_update(experience, coefficients)
        for epoch in range(config.ppo_epochs):
            self.step_control.begin_epoch()
            self.value_head.begin_epoch(epoch)
            order = torch.randperm(len(experience))
            minibatches = experience.minibatches(order, config.minibatches, config.aggregation)
            for minibatch in counted(minibatches, f"epoch {epoch + 1}"):
                sums = self.accumulate_gradient(minibatch, coefficients)
                meter.add(minibatch, sums, self.step_control.step(sums))
            if self.step_control.exceeds_limit:
                break
        fit = self.value_head.begin_fit()
        metrics = meter.metrics(config, coefficients, fit) | coefficients.metrics
        fitted = {name: metrics.pop(name) for name in fit}
        metrics |= self.step_control.end_update(metrics)
        self.value_head.end_fit(fitted)
        return metrics | self.value_head.metrics

    def accumulate_gradient(self, minibatch: Experience, coefficients: Coefficients) -> LossSums:
        """Accumulate the gradient of a minibatch's loss over its microbatches.

        Returns:
            The minibatch's loss and sums for the metrics, over all processes.
        """
        self.value_head.begin_minibatch()

        def accumulate(limits: Limits) -> list[LossSums]:
            self.optimizer.zero_grad()
            self.value_head.begin_attempt()
            parts = []
            for micro in minibatch.microbatches(limits, self.world):
                loss, sums, value_states = self.loss(micro, coefficients)
                self.value_head.observe(value_states, micro)
                # A gradient of 0 would let AdamW continue by momentum and decay.
                if loss.requires_grad and minibatch.trained.value:
                    self.optimizer.backward(loss)
                parts.append(sums)
            return parts

        sums = LossSums.joined(self.in_microbatches(accumulate, minibatch.batch), self.world)
        return self.pretraining.add_gradient(sums, coefficients, minibatch.trained)

    def loss(self, micro: Experience, coefficients: Coefficients) -> MicrobatchLoss:
        """Compute policy and value loss of a microbatch from one pass of the trunk.

        If the policy is not trained, the loss is the value loss alone.
        """
        trains_policy = micro.trained.policy
        layout = self.model.layout(micro.batch)
        with self.model.autocast():
            detach = not trains_policy or not self.value_head.has_loss
            hidden, values, value_states = self.model(layout, detach_values=detach)
            with torch.set_grad_enabled(trains_policy):
                policy = self.policy_loss(hidden, layout, micro, coefficients)
            value, value_clipped = value_loss(values, micro, coefficients)
        loss = policy.loss if trains_policy else torch.zeros_like(value)
        loss = loss + self.value_head.loss(value, coefficients)
        sums = LossSums(
            policy=policy.sums,
            loss=loss.detach(),
            value_loss=value.detach(),
            value_clipped=value_clipped,
            computed=layout.input_ids.numel(),
        )
        return MicrobatchLoss(loss, sums, value_states)

    # ------------------------------------------------------------------------ around the algorithm

    def begin_iteration(self) -> Coefficients:
        """Refresh the reference if it is due, and return the iteration's coefficients."""
        iteration = self.state.iteration
        interval = self.config.reference_refresh
        if self.reference is not None and interval and iteration and iteration % interval == 0:
            self.reference.refresh()
        return self.state.coefficient_control.at(iteration)

    def score(
        self,
        prompts: Prompts,
        rollout: Rollout,
        coefficients: Coefficients,
        scorer: Scorer | None = None,
    ) -> Scores:
        """Return the rewards of the responses: their weighted sum, minus the penalties."""
        scorer = scorer or self.parts.scorer
        completions = self.completions(prompts, rollout)
        scores = scorer(prompts, completions, rollout.tokens, rollout.response_mask)
        scores = scores.add_term("environment", rollout.rewards)
        return scores.with_eos_penalty(rollout.truncated, coefficients.missing_eos_penalty)

    def completions(
        self, prompts: Prompts, rollout: Rollout, max_count: int | None = None
    ) -> list[str]:
        """Return the responses, or the first `max_count`, as texts without special tokens."""
        return decode_completions(
            self.tokenizer, prompts.token_ids[:max_count], rollout.tokens[:max_count]
        )

    def in_microbatches(self, run: Callable[[Limits], Result], sequences: Sized) -> Result:
        """Call `run` with microbatch limits that fit in memory; see `MicrobatchLimits.fit`."""
        return self.limits.fit(run, self.config.limits(self.model.packing), len(sequences))

    @contextmanager
    def engine_released(self) -> Iterator[None]:
        """Free the engine's memory during an update, then give it the new weights."""
        self.engine.release()
        yield
        self.optimizer.zero_grad()  # the next rollout needs the memory
        self.engine.weights_changed(self.model)
