"""The PPO trainer: the algorithm, top to bottom.

One iteration (`PPOTrainer.iterate`) is

    generate     responses to a batch of prompts, from the current policy
    score        the responses with the rewards
    experience   old and reference logprobs, values; shaped rewards, advantages, whitening
    update       epochs over shuffled minibatches: loss, gradient, optimizer step

`train()` runs the iterations, with records and checkpoints around them (`training_run`). `step()`
updates on responses generated and scored elsewhere. One forward pass of the trunk feeds both heads,
and only the hidden states that predict response tokens reach them.

Everything that changes during a run is in the model, the optimizer, `RunState` and a refreshed
reference, and a checkpoint holds those. `config` is fixed for the run; `options`, an argument of
each phase, is the config with the iteration's schedules applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from fastppo.data.batch import Batch
from fastppo.data.chat import decode_completions
from fastppo.data.datasets import Rows
from fastppo.data.microbatches import Limits, split
from fastppo.data.prompts import Prompts
from fastppo.data.world import World
from fastppo.ppo.advantages import make_advantages
from fastppo.ppo.checkpoints import Checkpoints
from fastppo.ppo.critic import train_critic, value_loss
from fastppo.ppo.dynamic_sampling import with_replacements
from fastppo.ppo.evaluation import evaluate_policy
from fastppo.ppo.experience import Experience, Responses
from fastppo.ppo.given_responses import TokenRows, given_responses
from fastppo.ppo.metrics import (
    LossSums,
    PhaseTimer,
    UpdateMeter,
    experience_metrics,
    response_metrics,
    successes_per_minibatch,
    to_floats,
    update_metrics,
)
from fastppo.ppo.objective import add_ptx_gradient, kl_keywords, policy_loss
from fastppo.ppo.old_policy import (
    GivenPolicy,
    OldPolicy,
    ReferenceStats,
    read_old_policy,
    read_reference,
)
from fastppo.ppo.optimizer import set_learning_rate
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.out_of_memory import MicrobatchLimits, explain_out_of_memory
from fastppo.ppo.rate_control import LARGEST_RATE, TOO_FAR
from fastppo.ppo.reporter import Reporter
from fastppo.ppo.setup.build import build, world_of
from fastppo.ppo.setup.checks import check_can_train
from fastppo.ppo.setup.preflight import Given
from fastppo.ppo.state import RunState
from fastppo.ppo.training_run import TrainingRun
from fastppo.ppo.value_regression import ValueRegression
from fastppo.rewards.reward import Reward
from fastppo.rewards.scorer import Scorer, Scores
from fastppo.rollout import Rollout, RolloutEngine, Sampling
from fastppo.run.callbacks import Callbacks
from fastppo.run.progress import console_of_first
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


class PPOTrainer:
    """PPO on one device, or on one device per process under torchrun.

    Args:
        config: the options.
        model, tokenizer: the policy and its tokenizer. By default loaded from `config.model`.
        prompts: rows with a prompt column. By default loaded from `config.prompts`.
        rewards, monitor_rewards: functions or names. By default those of the config.
        reference: reference model of the KL. By default a frozen copy of the initial policy.
        environment: class or function that makes environments for multi-turn responses. By default
            the config's.
        engine: a `RolloutEngine`, or an object with its `generate`. By default the config's.
        objective, advantage, optimizer: functions, classes or names. By default the config's.
        callbacks: transformers' `TrainerCallback`s.
        console: console for progress and messages.
        world: the processes; by default those that torchrun started.

    Raises:
        ValueError: the components are incompatible; see `fastppo.ppo.setup.build`.
    """

    def __init__(
        self,
        config: PPOConfig,
        *,
        model: PreTrainedModel | None = None,
        tokenizer: Any = None,
        prompts: Rows | None = None,
        rewards: Sequence[str | Reward] | None = None,
        monitor_rewards: Sequence[str | Reward] | None = None,
        reference: PreTrainedModel | None = None,
        environment: Callable[[], Any] | None = None,
        engine: RolloutEngine | None = None,
        objective: str | Callable[..., Tensor] | None = None,
        advantage: str | Callable[..., Any] | None = None,
        optimizer: str | Callable[..., Any] | None = None,
        callbacks: Sequence[Any] = (),
        console: Console | None = None,
        world: World | None = None,
    ) -> None:
        given = Given(
            model=model,
            tokenizer=tokenizer,
            prompts=prompts,
            rewards=rewards,
            monitor_rewards=monitor_rewards,
            reference=reference,
            environment=environment,
            engine=engine,
            functions={"objective": objective, "advantage": advantage, "optimizer": optimizer},
        )
        self.config = config = given.named_in(config)
        self.world = world_of(config, world)
        self.reporter = Reporter(console_of_first(self.world, console))
        self.say = self.reporter.say
        with explain_out_of_memory("loading", config):
            components = build(config, given, say=self.say, world=self.world)
        self.reporter.notes += components.notes
        self.device = components.device
        self.context = components.context
        self.tokenizer = components.tokenizer
        self.model = components.model
        self.reference = components.reference
        self.optimizer = components.optimizer
        self.engine = components.engine
        self.sampling = components.sampling
        self.episode_runner = components.episode_runner
        self.prompts = components.prompts
        self.curriculum = components.curriculum
        self.pretraining = components.pretraining
        self.scorer = components.scorer
        self.functions = components.functions
        self.evaluation = components.evaluation
        self.state = RunState.of(config)
        self.microbatch_limits = MicrobatchLimits(self.say, self.world.size)
        self.callbacks = Callbacks(
            callbacks,
            config,
            world=self.world,
            model=self.model.causal_lm,
            processing_class=self.tokenizer,
            optimizer=self.optimizer,
        )
        self.checkpoints = Checkpoints(
            config,
            self.state,
            components,
            say=self.say,
            world=self.world,
            saved=self.callbacks.saved,
        )

    def train(self) -> dict[str, float]:
        """Train for `config.iterations` and write the policy and the report.

        Returns:
            The metrics of the last iteration.

        Raises:
            RunStoppedError: a metric crossed a threshold of `stop_if`; everything is written first.
            Stopped: a signal ended the run; a checkpoint is written first.
            CheckpointError: a checkpoint could not be written.
            FloatingPointError: too many optimizer steps in a row were not finite.
            RewardError: a reward raised, or returned something that cannot be trained on; after the
                first iteration, a checkpoint is written first.
            RolloutError: the engine returned no responses; a checkpoint is written first.
            RuntimeError: the self-check failed.
        """
        check_can_train(self)
        return TrainingRun(self).run()

    # ------------------------------------------------------------------------------ the algorithm

    def iterate(
        self,
        prompts: Prompts,
        options: PPOConfig,
        timer: PhaseTimer | None = None,
        more_prompts: Callable[[int], Prompts] | None = None,
    ) -> Iteration:
        """Run one PPO iteration on a batch of prompts.

        Args:
            options: the config with this iteration's schedules applied; see `begin_iteration`.
            timer: times each phase, and may end the iteration between phases.
            more_prompts: returns the next prompts, for dynamic sampling.

        Raises:
            PhaseEndedError: `timer` was asked to stop; no weight has changed.
        """
        timer = timer or PhaseTimer(options)

        def respond(prompts: Prompts) -> Responses:
            with timer("generate"):
                prompts, rollout = self.episode_runner.run(prompts, self.engine, self.sampling)
            with timer("score"):
                return Responses(prompts, rollout, self.score(prompts, rollout, options))

        responses = drawn = respond(prompts)
        if options.dynamic_sampling and more_prompts is not None:
            responses, drawn = with_replacements(
                responses,
                lambda count: respond(more_prompts(count)),
                samples=options.samples_per_prompt,
                rounds=options.dynamic_sampling,
            )
        prompts, rollout, scores = responses
        with timer("experience"):
            experience, metrics = self.make_experience(prompts.token_ids, rollout, scores, options)
        with timer("update"), self.engine_released():
            metrics |= self.update(experience, options)
        self.state.move_coefficients(metrics, len(experience), options, experience.has_loss)

        metrics |= response_metrics(scores, rollout, metrics, options.samples_per_prompt)
        metrics |= timer.metrics(experience.batch.response_count, self.world)
        metrics |= rollout_health(rollout.generated_tokens, scores.total, scores.monitors)
        return Iteration(metrics, responses, experience, drawn)

    def score(
        self, prompts: Prompts, rollout: Rollout, options: PPOConfig, scorer: Scorer | None = None
    ) -> Scores:
        """Return the rewards of the responses: their weighted sum, minus the penalties."""
        completions = self.completions(prompts, rollout)
        scores = (scorer or self.scorer)(
            prompts, completions, rollout.tokens, rollout.response_mask
        )
        scores = scores.add_term("environment", rollout.rewards)
        return scores.with_eos_penalty(rollout.truncated, options.missing_eos_penalty)

    @torch.no_grad()
    def make_experience(
        self,
        prompt_ids: list[list[int]],
        rollout: Rollout,
        scores: Scores,
        options: PPOConfig,
        *,
        given_policy: GivenPolicy | None = None,
    ) -> tuple[Experience, dict[str, float]]:
        """Compute old logprobs, reference logprobs and values, and the advantages from them.

        Args:
            given_policy: old logprobs and values of responses generated elsewhere.

        Returns:
            (the update's data, metrics).
        """
        batch = Batch.of(prompt_ids, rollout.tokens, self.device, rollout.response_mask)
        token_scores = scores.total.repeat_interleave(batch.generated_lengths).to(self.device)
        score_metrics = successes_per_minibatch(scores.total, options.minibatches)
        scores = scores.normalized(
            options.score_normalization, options.score_clip, self.state.score_scale
        )
        kl_coef = self.state.kl_control.coef

        def read_policies(limits: Limits) -> tuple[OldPolicy, ReferenceStats]:
            plan = split(batch, limits, self.world)
            old = read_old_policy(
                rollout,
                plan,
                options,
                model=self.model,
                engine=self.engine,
                sampling=self.sampling,
                given_policy=given_policy,
            )
            return old, read_reference(self.reference, plan, options, kl_coef=kl_coef)

        old, ref_stats = self.in_microbatches(read_policies, batch, options)
        estimates = make_advantages(
            batch,
            scores,
            options,
            truncated=rollout.truncated,
            old=old,
            ref_stats=ref_stats,
            kl_coef=kl_coef,
            score_scale=self.state.usual_scores,
            function=self.functions.get("advantage"),
        )
        experience = Experience(
            batch,
            old_logprobs=old.logprobs,
            old_values=old.values,
            advantages=estimates.advantages,
            returns=estimates.returns,
            monte_carlo_returns=estimates.monte_carlo_returns,
            ref_logprobs=ref_stats.logprobs,
            importance_weights=old.importance_weights,
            scores=token_scores,
            masked=torch.tensor(rollout.truncated) if options.truncated == "mask" else None,
        )
        metrics = experience_metrics(experience, estimates.spread, options)
        metrics |= score_metrics | old.metrics
        if ref_stats.logprobs is not None:
            metrics["kl_coef"] = kl_coef
        return experience, metrics

    def update(self, experience: Experience, options: PPOConfig) -> dict[str, float]:
        """Train on a batch for `ppo_epochs` of minibatches, and return the mean metrics.

        If all responses earn the same, only the value function is trained. No masked response is
        trained on. With learning_rate=auto, an update that moves the policy much too far is undone.
        """
        state = self.state
        experience = experience.in_loss()
        state.has_signal = bool(experience.advantages.any())
        skipped_before = state.skipped_steps
        overflowed_before = self.optimizer.overflowed_steps
        first_step = state.iteration * options.steps_per_iteration
        regression = state.value_regression
        meter = UpdateMeter()
        if options.is_adaptive and state.trains_by_reward(options):
            self.optimizer.copy_weights()
        steps = options.ppo_epochs * min(options.minibatches, len(experience))
        state.rate_control.begin_update(options.update_target, steps)
        for _ in range(options.critic_only_epochs if experience.has_loss else 0):
            self.set_learning_rate(first_step)
            train_critic(
                experience,
                options,
                model=self.model,
                optimizer=self.optimizer,
                microbatch_limits=self.microbatch_limits,
                world=self.world,
            )
        early_stopped = False
        for epoch in range(options.ppo_epochs):
            # The value head is fitted to the states of the last epoch. With early_stop_kl, any
            # epoch may turn out to be the last.
            may_be_last = epoch + 1 == options.ppo_epochs or options.early_stop_kl is not None
            if regression is not None:
                regression.begin_batch()
            policy_kls: list[float] = []
            order = torch.randperm(len(experience))
            for minibatch in experience.minibatches(
                order, options.minibatches, options.aggregation
            ):
                sums = self.accumulate_gradient(
                    minibatch, options, regression if may_be_last else None
                )
                # The schedule also counts steps skipped by early stopping.
                step_metrics = self.optimizer_step(sums, options, first_step + len(meter.steps))
                policy_kls.append(step_metrics.pop("policy_kl", 0.0))
                meter.add(minibatch, sums, step_metrics)
                if state.rate_control.is_too_far:
                    break
            policy_kl = sum(policy_kls) / len(policy_kls)
            early_stopped = options.stops_at(policy_kl)
            if early_stopped or state.rate_control.is_too_far:
                break
        metrics = update_metrics(meter, options, early_stopped=early_stopped)
        metrics["skipped_steps"] = float(state.skipped_steps - skipped_before)
        metrics["no_signal"] = float(not state.has_signal)
        if steps > 1:
            metrics["still_iterations"] = float(state.count_still(metrics["approx_kl"], options))
        metrics |= state.rate_control.metrics
        if state.rate_control.is_too_far:
            self.optimizer.restore_weights()
            if regression is not None:
                regression.begin_batch()  # its states are of other weights
        state.rate_control.end_update(metrics["entropy"])
        if state.rate_control.is_stuck:
            self.reporter.warn(
                f"learning_rate=auto ends at {LARGEST_RATE:g}, which does not move the policy by "
                "step_kl: it is made for AdamW; choose a number for other optimizers"
            )
        metrics |= self.optimizer.metrics(overflowed_before)
        if regression is not None:
            regression.fit(self.model.value_function.head, self.world)
            metrics |= regression.metrics
        if options.objective == "penalty":
            metrics["policy_kl_coef"] = state.policy_kl_control.coef
            if not state.is_value_warmup(options):
                state.policy_kl_control.update(policy_kl, len(experience))
        return metrics

    def accumulate_gradient(
        self, minibatch: Experience, options: PPOConfig, regression: ValueRegression | None = None
    ) -> LossSums:
        """Accumulate the gradient of a minibatch's loss over its microbatches.

        Args:
            regression: collects the value head's inputs.

        Returns:
            The minibatch's loss and sums for the metrics, over all processes.
        """
        attempts = 0

        def accumulate(limits: Limits) -> list[LossSums]:
            nonlocal attempts
            attempts += 1
            if regression is not None and attempts > 1:
                regression.begin_batch()  # it holds part of this minibatch already
            self.optimizer.zero_grad()
            parts = []
            for micro in minibatch.microbatches(limits, self.world):
                loss, sums, value_states = self.loss(micro, options)
                if regression is not None:
                    regression.add(value_states, micro)
                # A gradient of 0 would let AdamW continue by momentum and decay.
                if loss.requires_grad and minibatch.has_loss:
                    self.optimizer.backward(loss)
                parts.append(sums)
            return parts

        parts = self.in_microbatches(accumulate, minibatch, options)
        sums = LossSums.joined(parts, self.world)
        if options.ptx_coef and not self.state.is_value_warmup(options):
            assert self.pretraining is not None
            blocks = self.pretraining.at(self.state.ptx_seen, options.ptx_batch_size, options.seed)
            self.state.ptx_seen += len(blocks)
            ptx_loss = add_ptx_gradient(
                self.model, blocks, options, world=self.world, backward=self.optimizer.backward
            )
            loss = sums.loss + options.ptx_coef * ptx_loss
            sums = sums._replace(loss=loss, ptx_loss=ptx_loss)
        return sums

    def loss(self, micro: Experience, options: PPOConfig) -> MicrobatchLoss:
        """Compute policy and value loss of a microbatch from one pass of the trunk.

        While the value function warms up, the loss is the value loss alone.
        """
        warming_up = self.state.is_value_warmup(options)
        layout = self.model.layout(micro.batch)
        own = self.functions.get("objective")
        beta = self.state.policy_kl_control.coef
        with self.model.autocast():
            hidden, values, value_states = self.model(layout, detach_values=warming_up)
            with (
                kl_keywords(self.reference, layout, options) as kl,
                torch.set_grad_enabled(not warming_up),
            ):
                policy = policy_loss(
                    hidden, micro, options, head=self.model.head, kl=kl, function=own, beta=beta
                )
            value, value_clipped = value_loss(values, micro, options)
        loss = options.vf_coef * value
        if not warming_up:
            loss = policy.loss + loss
        sums = LossSums(
            policy=policy.sums,
            loss=loss.detach(),
            value_loss=value.detach(),
            value_clipped=value_clipped,
            computed=layout.input_ids.numel(),
        )
        return MicrobatchLoss(loss, sums, value_states)

    def optimizer_step(self, sums: LossSums, options: PPOConfig, step: int) -> dict[str, float]:
        """Clip the gradient and take a step, unless loss or gradient are not finite.

        With learning_rate=auto, no step is taken if the policy has already moved too far.

        Args:
            step: optimizer steps before this one, for the learning rate's schedule.

        Returns:
            Loss and gradient norms, without non-finite ones; the learning rate; and `policy_kl`: KL
            to the rollout policy before the step, nats per token.
        """
        rate_control = self.state.rate_control
        if not self.optimizer.has_gradients:
            # All responses are masked, or a closed-form head warms up on the policy's trunk.
            return to_floats({"loss": sums.loss}) | {"learning_rate": self.set_learning_rate(step)}
        norms = self.optimizer.clip_gradients(options.max_grad_norm)
        # The host waits for a GPU here, once per step, and nowhere within a microbatch.
        metrics = to_floats({"policy_kl": sums.approx_kl, "loss": sums.loss, **norms})
        numbers = {name: metrics[name] for name in ("loss", *norms)}
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        finite["policy_kl"] = metrics["policy_kl"]
        if self.state.trains_by_reward(options):
            rate_control.before_step(metrics["policy_kl"])
        if rate_control.is_too_far:
            self.reporter.warn(
                f"approx_kl = {metrics['policy_kl']:.3g} after an optimizer step, above "
                f"{TOO_FAR:g} times target_kl: the update was undone and the learning rate lowered",
                f"iteration {self.state.iteration + 1}: ",
            )
            return finite
        learning_rate = self.set_learning_rate(step)
        overflowed_before = self.optimizer.overflowed_steps
        if self.optimizer.step(numbers):
            self.state.skipped_in_a_row = 0
            if self.optimizer.overflowed_steps == overflowed_before:
                rate_control.step_taken()
        else:
            self.reporter.warn(self.state.skip_step(numbers))
        self.state.optimizer_step += 1
        return {**finite, "learning_rate": learning_rate}

    def set_learning_rate(self, step: int) -> float:
        """Set the learning rate of an optimizer step, counted from the start of the run."""
        return set_learning_rate(self.optimizer, step, self.config, self.state.rate_control.rate)

    def in_microbatches(
        self, run: Callable[[Limits], Result], sequences: Sized, options: PPOConfig
    ) -> Result:
        """Call `run` with microbatch limits that fit in memory; see `MicrobatchLimits.fit`."""
        wanted = options.limits(self.model.packing)
        return self.microbatch_limits.fit(run, wanted, len(sequences))

    @contextmanager
    def engine_released(self) -> Iterator[None]:
        """Free the engine's memory during an update, then give it the new weights."""
        self.engine.release()
        yield
        self.optimizer.zero_grad()  # the next rollout needs the memory
        self.engine.weights_changed(self.model)

    def begin_iteration(self) -> PPOConfig:
        """Refresh the reference if it is due, and return the iteration's options."""
        iteration = self.state.iteration
        interval = self.config.reference_refresh
        if self.reference is not None and interval and iteration and iteration % interval == 0:
            self.reference.refresh()
        return self.state.begin_iteration(self.config.at(iteration))

    # ------------------------------------------------------------ responses generated elsewhere

    def step(
        self,
        prompts: Sequence[str | Sequence[Any]],
        responses: Sequence[str | Sequence[int]],
        scores: Sequence[float] | Tensor,
        finish_reasons: Sequence[str] | None = None,
        *,
        masks: Sequence[Sequence[bool] | Tensor] | None = None,
        token_rewards: TokenRows | None = None,
        old_logprobs: TokenRows | None = None,
        values: TokenRows | None = None,
    ) -> dict[str, float]:
        """Make one PPO update on given responses, and return its metrics.

        Args:
            prompts, responses: texts or token ids; prompts may be chat messages.
            scores: [B]. They are normalized and clipped as configured; no length or EOS penalty
                applies.
            finish_reasons: `stop` or `length`. The default is `stop` if the last token is a stop
                token.
            masks: per token, True if the policy generated it. The model reads the other tokens,
                such as a tool's output, but does not learn from them.
            token_rewards: per token, a reward in addition to the score, scaled like it. A reward at
                a token outside the mask moves to the last token before it inside the mask.
            old_logprobs: per token, the logprob under the policy that generated it, nats of
                softmax(z/T). The default is the current model's.
            values: per token, the value of the state before it. The default is the current model's.

        Raises:
            ValueError: lengths disagree; a prompt or response is empty, too long for the context
                or outside the vocabulary; a number is not finite; a mask is not bool or has no
                True; without masks, tokens follow a stop token, as padding does.
            RunStoppedError: a metric crossed a threshold of `stop_if`, after the update.
        """
        given = given_responses(
            prompts,
            responses,
            scores,
            finish_reasons=finish_reasons,
            tokenizer=self.tokenizer,
            stop_token_ids=self.sampling.stop_token_ids,
            vocabulary=self.model.head.vocabulary,
            context=self.context,
            masks=masks,
            token_rewards=token_rewards,
            old_logprobs=old_logprobs,
            values=values,
        )
        options = self.begin_iteration()
        experience, metrics = self.make_experience(
            given.prompt_ids, given.rollout, given.scores, options, given_policy=given.policy
        )
        with self.engine_released():
            metrics |= self.update(experience, options)
        self.state.move_coefficients(metrics, len(experience), options, experience.has_loss)
        metrics["reward"] = given.scores.total.mean().item()
        metrics |= rollout_health(given.rollout.generated_tokens, given.scores.total)
        self.reporter.watch(self.state, metrics)
        self.state.iteration += 1
        self.state.raise_if_stopped()
        return metrics

    # ------------------------------------------------------------------------ evaluating and saving

    def evaluate(
        self, prompts: Prompts, sampling: Sampling | None = None, scorer: Scorer | None = None
    ) -> dict[str, Any]:
        """Generate and score responses without learning; see `evaluate_policy`."""
        return evaluate_policy(self, prompts, sampling or self.sampling, scorer)

    def completions(
        self, prompts: Prompts, rollout: Rollout, max_count: int | None = None
    ) -> list[str]:
        """Return the responses, or the first `max_count`, as texts without special tokens."""
        return decode_completions(
            self.tokenizer, prompts.token_ids[:max_count], rollout.tokens[:max_count]
        )

    def save_checkpoint(self) -> Path:
        """Write a checkpoint and return its path."""
        return self.checkpoints.save()

    def save_policy(self, directory: str | Path) -> None:
        """Write the policy with its tokenizer and generation config, and the value function."""
        self.checkpoints.save_policy(self.tokenizer, Path(directory))
