"""The PPO trainer: the algorithm, top to bottom.

One iteration (`PPOTrainer.iterate`) is

    generate     responses to a batch of prompts, with the policy as it is
    score        each response with the rewards
    experience   old and reference logprobs, values; shaped rewards, advantages, whitening
    update       mini-epochs over shuffled minibatches of microbatches

`train()` iterates to the end, with records and checkpoints around it (`training_run`). `step()`
updates on responses that somebody else generated and scored. One forward pass of the trunk feeds
both heads, and only hidden states that predict response tokens reach them.

All that changes during a run is in the model, the optimiser, `RunState` and a refreshed reference,
and a checkpoint holds those. `config` is the run's; `options`, which each phase is given, is the
config with the iteration's schedules applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from fastppo.data.batch import Batch
from fastppo.data.chat import decode_completions
from fastppo.data.microbatches import split
from fastppo.data.prompts import Prompts
from fastppo.data.rows import Rows
from fastppo.data.world import World
from fastppo.functional.losses import linear_ppo_loss
from fastppo.functional.tutorial_losses import ValueLossFunction
from fastppo.models.device import busy_cpu
from fastppo.models.sharding import unsharded
from fastppo.ppo.advantages import make_advantages
from fastppo.ppo.checkpoints import Checkpoints, export
from fastppo.ppo.experience import Experience, Responses
from fastppo.ppo.given_responses import TokenRows, given_responses
from fastppo.ppo.metrics import (
    LossSums,
    PhaseTimer,
    UpdateMeter,
    experience_metrics,
    policy_metrics,
    response_metrics,
    to_floats,
    update_metrics,
)
from fastppo.ppo.objective import (
    add_ptx_gradient,
    kl_keywords,
    penalty_loss,
)
from fastppo.ppo.old_policy import GivenPolicy, read_old_policy, read_reference
from fastppo.ppo.optimizer import clip_gradients, set_learning_rate
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.out_of_memory import Attempt, MicrobatchLimits, explain_out_of_memory
from fastppo.ppo.setup.build import build, world_of
from fastppo.ppo.setup.checks import check_on_policy, odd_options, random_state_restored
from fastppo.ppo.state import RunState
from fastppo.ppo.training_run import TrainingRun
from fastppo.ppo.value_regression import ValueRegression
from fastppo.rewards.reward import Reward
from fastppo.rewards.scorer import Scorer, Scores
from fastppo.rollout import Rollout, RolloutEngine, Sampling
from fastppo.run.callbacks import Callbacks
from fastppo.run.progress import console_of_first, say
from fastppo.run.watch import advice, kind_of, rollout_health


class Iteration(NamedTuple):
    """An iteration's responses, what was learned from them, and its metrics."""

    metrics: dict[str, float]
    responses: Responses
    experience: Experience


class MicrobatchLoss(NamedTuple):
    """The loss of a microbatch."""

    loss: Tensor
    """0-d, with its gradient."""
    sums: LossSums
    """What it adds to the metrics."""
    value_states: Tensor
    """[N, H], what the value head read."""


class StepReport(NamedTuple):
    """What an optimiser step reports."""

    metrics: dict[str, float]
    policy_kl: float
    """KL to the rollout policy before the step, nats per token."""


class PPOTrainer:
    """PPO on one device, or on as many as torchrun has started processes for.

    Args:
        config: the options.
        model, tokenizer: instead of loading `config.model`.
        prompts: rows with a prompt column, instead of loading `config.prompts`.
        rewards, monitor_rewards: callables or specs, instead of those of the config.
        reference: a model for the KL, instead of a frozen copy of the policy as it starts.
        environment: makes the environments that answer the policy's turns, instead of the config's.
        engine: a `RolloutEngine`, or an object that has its `generate`, instead of the config's.
        callbacks: transformers' `TrainerCallback`s, told how `train` goes.
        console: where progress is shown.
        world: the processes; by default those of torchrun.

    Raises:
        ValueError: the parts do not fit; see `fastppo.ppo.setup.build`.
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
        callbacks: Sequence[Any] = (),
        console: Console | None = None,
        world: World | None = None,
    ) -> None:
        self.config = config
        self.world = world_of(config, world)
        self.console = console_of_first(self.world, console)
        with explain_out_of_memory("loading", config):
            components = build(
                config,
                model=model,
                tokenizer=tokenizer,
                prompts=prompts,
                rewards=rewards,
                monitor_rewards=monitor_rewards,
                reference=reference,
                environment=environment,
                engine=engine,
                say=self.say,
                world=self.world,
            )
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
        self.evaluation = components.evaluation
        self.notes = components.notes
        """Sentences that are said with the next metrics."""
        self._warned: set[str] = set()
        """The kinds of the warnings that the console has shown."""
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

    # ------------------------------------------------------------------------------ the algorithm

    def train(self) -> dict[str, float]:
        """Runs to `config.iterations` and writes the policy and the report; the last metrics.

        Raises:
            RunStoppedError: a metric crossed a threshold of `stop_if`; all is written first.
            Stopped: a signal asked for it; a checkpoint is written first.
            CheckpointError: a checkpoint could not be written.
            FloatingPointError: too many optimiser steps in a row were not finite.
            RewardError: a reward raised, or returned what cannot be trained on.
            RolloutError: the engine has no responses any more; a checkpoint is written first.
            RuntimeError: the self-check failed.
        """
        if self.prompts is None or not (self.scorer.terms or self.episode_runner.has_rewards):
            raise ValueError("train() needs prompts and at least one reward; step() needs neither")
        return TrainingRun(self).run()

    def iterate(
        self, prompts: Prompts, options: PPOConfig, timer: PhaseTimer | None = None
    ) -> Iteration:
        """One PPO iteration on a batch of prompts.

        Args:
            options: the config with this iteration's schedules applied; see `begin_iteration`.
            timer: measures the phases; a run's may end the iteration between two of them.

        Raises:
            PhaseEndedError: `timer` was asked to stop; no weight has changed.
        """
        timer = timer or PhaseTimer()
        with timer("generate"), explain_out_of_memory("generate", options):
            prompts, rollout = self.episode_runner.run(prompts, self.engine, self.sampling)
        with timer("score"), explain_out_of_memory("score", options):
            scores = self.score(prompts, rollout, options)
        with timer("experience"), explain_out_of_memory("experience", options):
            experience, metrics = self.make_experience(prompts.token_ids, rollout, scores, options)
        with timer("update"), explain_out_of_memory("update", options), self.engine_released():
            metrics |= self.update(experience, options)
        self.state.move_kl_coef(metrics.get("kl"), len(experience), options)

        metrics |= response_metrics(scores, rollout, metrics)
        metrics |= timer.metrics(experience.batch.response_count, self.world)
        metrics |= rollout_health(rollout.written_tokens, scores.total, scores.monitors)
        return Iteration(metrics, Responses(prompts, rollout, scores), experience)

    def score(
        self, prompts: Prompts, rollout: Rollout, options: PPOConfig, scorer: Scorer | None = None
    ) -> Scores:
        """Rewards of the responses' texts: their weighted sum, less the penalties."""
        texts = self.completions(prompts, rollout)
        scores = (scorer or self.scorer)(prompts, texts, rollout.tokens, rollout.written)
        scores = scores.plus("environment", rollout.rewards)
        return scores.charged(rollout.truncated, options.missing_eos_penalty)

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
        """Old logprobs, reference logprobs and values of the responses; then their advantages.

        Args:
            given_policy: old logprobs and values of responses that no engine of the trainer drew.

        Returns:
            (what the update learns from, metrics).
        """
        batch = Batch.of(prompt_ids, rollout.tokens, self.device, rollout.written)
        normalized_scores = scores.normalized(
            options.score_normalization, options.score_clip, self.state.score_scale
        )
        kl_coef = self.state.kl_control.coef
        for attempt in self.attempts(batch, options):
            with attempt as limits:
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
                ref_stats = read_reference(self.reference, plan, options, kl_coef=kl_coef)
        estimates = make_advantages(
            batch,
            normalized_scores,
            options,
            truncated=rollout.truncated,
            old=old,
            ref_stats=ref_stats,
            kl_coef=kl_coef,
        )
        experience = Experience(
            batch,
            old_logprobs=old.logprobs,
            old_values=old.values,
            advantages=estimates.advantages,
            returns=estimates.returns,
            complete_returns=estimates.complete_returns,
            ref_logprobs=ref_stats.logprobs,
            importance_weights=old.importance_weights,
        )
        metrics = experience_metrics(experience, estimates.spread) | old.metrics
        if ref_stats.logprobs is not None:
            metrics["kl_coef"] = kl_coef
        return experience, metrics

    def update(self, experience: Experience, options: PPOConfig) -> dict[str, float]:
        """Mini-epochs of clipped updates on one batch of experience; returns their mean metrics."""
        state = self.state
        steps_before = state.steps
        regression = state.value_regression
        meter = UpdateMeter()
        if options.value_epochs is not None:
            for _ in range(options.value_epochs - options.ppo_epochs):
                self.train_critic(experience, options)
        early_stopped = False
        for epoch in range(options.ppo_epochs):
            # The value head is fitted to the states of the last epoch, and with early_stop_kl any
            # epoch may be the last.
            may_be_last = epoch + 1 == options.ppo_epochs or options.early_stop_kl is not None
            if regression is not None:
                regression.begin_batch()
            order = torch.randperm(len(experience))
            policy_kls: list[float] = []
            for minibatch in experience.minibatches(
                order, options.minibatches, options.aggregation
            ):
                # The schedule counts the steps that an early stop left out.
                step = state.iteration * options.steps_per_iteration + len(meter.steps)
                learning_rate = set_learning_rate(self.optimizer, step, self.config)
                sums = self.accumulate_gradient(
                    minibatch, options, regression if may_be_last else None
                )
                report = self.take_step(sums, options)
                meter.add(minibatch, sums, report.metrics | {"learning_rate": learning_rate})
                policy_kls.append(report.policy_kl)
            policy_kl = sum(policy_kls) / len(policy_kls)
            early_stopped = options.stops_at(policy_kl)
            if early_stopped:
                break
        metrics = update_metrics(meter, options, early_stopped=early_stopped)
        metrics |= state.step_metrics(steps_before)
        if regression is not None:
            regression.fit(self.model.value_function.head, self.world)
            metrics |= regression.metrics
        if options.objective == "penalty":
            metrics["policy_kl_coef"] = state.policy_kl_control.coef
            if not state.is_warming_up(options):
                state.policy_kl_control.update(policy_kl, len(experience))
        return metrics

    def accumulate_gradient(
        self, minibatch: Experience, options: PPOConfig, regression: ValueRegression | None = None
    ) -> LossSums:
        """Adds up the gradient of a minibatch's loss over its microbatches, and returns what they
        add to the loss and the metrics.

        Args:
            regression: is given the states that the value head read.
        """
        for number, attempt in enumerate(self.attempts(minibatch, options)):
            with attempt as limits:
                self.optimizer.zero_grad(set_to_none=True)
                loss = None  # that of a failed attempt would keep its activations
                parts: list[LossSums] = []
                for micro in minibatch.microbatches(limits, self.world):
                    loss, part, value_states = self.loss(micro, options)
                    # A second attempt would add the tokens of the first once more.
                    if regression is not None and number == 0:
                        regression.add(value_states, micro)
                    if loss.requires_grad:
                        self.state.scaler.scale(loss).backward()
                    parts.append(part)
        sums = LossSums.joined(parts, self.world)
        if options.ptx_coef and not self.state.is_warming_up(options):
            sums = self.add_ptx(sums, options)
        return sums

    def train_critic(self, experience: Experience, options: PPOConfig) -> None:
        """A pass over the batch that trains a critic of its own alone, at the iteration's first
        learning rate."""
        set_learning_rate(
            self.optimizer, self.state.iteration * options.steps_per_iteration, self.config
        )
        order = torch.randperm(len(experience))
        for minibatch in experience.minibatches(order, options.minibatches, options.aggregation):
            self.accumulate_critic_gradient(minibatch, options)
            self.state.unscale(self.optimizer)
            norms = to_floats(clip_gradients(self.optimizer, self.model, options))
            if all(map(math.isfinite, norms.values())):
                self.optimizer.step()

    def accumulate_critic_gradient(self, minibatch: Experience, options: PPOConfig) -> None:
        """Adds up the gradient of a minibatch's value loss alone over its microbatches."""
        for attempt in self.attempts(minibatch, options):
            with attempt as limits:
                self.optimizer.zero_grad(set_to_none=True)
                for micro in minibatch.microbatches(limits, self.world):
                    layout = self.model.layout(micro.batch)
                    with self.model.autocast():
                        values = self.model.values(layout, layout.predicting)
                    value, _ = self.value_loss(values, micro, options)
                    self.state.scaler.scale(options.vf_coef * value).backward()

    def attempts(self, sequences: Sized, options: PPOConfig) -> Iterator[Attempt]:
        """One attempt at a pass over the sequences, unless memory runs out: then another, with
        smaller microbatches (`MicrobatchLimits.attempts`)."""
        return self.microbatch_limits.attempts(options.limits(self.model.packing), len(sequences))

    @staticmethod
    def value_loss(values: Tensor, micro: Experience, options: PPOConfig) -> tuple[Tensor, Tensor]:
        """(the value loss of a microbatch, 0-d, with its gradient; tokens that are clipped)."""
        return ValueLossFunction.apply(
            values, micro.returns, micro.token_weights, micro.old_values, options.value_clip
        )

    def loss(self, micro: Experience, options: PPOConfig) -> MicrobatchLoss:
        """Policy and value loss of a microbatch, from one pass of the trunk. While the value
        function warms up, its loss alone."""
        warming_up = self.state.is_warming_up(options)
        layout = self.model.layout(micro.batch)
        with self.model.autocast():
            hidden, values, value_states = self.model(layout, detach_values=warming_up)
            # After the forward pass, which has gathered its weight where models are sharded.
            head = self.model.head
            with (
                kl_keywords(self.reference, layout, options) as kl,
                torch.set_grad_enabled(not warming_up),
            ):
                if options.objective == "penalty":
                    beta = self.state.policy_kl_control.coef
                    policy = penalty_loss(hidden, micro, options, head=head, beta=beta)
                else:
                    policy = linear_ppo_loss(
                        hidden,
                        head.weight,
                        micro.batch.response_tokens,
                        micro.old_logprobs,
                        micro.advantages,
                        bias=head.bias,
                        weights=micro.token_weights,
                        importance_weights=micro.importance_weights,
                        objective=options.objective,
                        cu_seqlens=micro.batch.cu_seqlens if options.objective == "gspo" else None,
                        clip_ratio=options.clip_range,
                        dual_clip=options.dual_clip,
                        ref_logprobs=micro.ref_logprobs,
                        **kl,
                        entropy_coef=options.entropy_coef,
                        temperature=options.temperature,
                        backend=options.backend,
                        **head.transform,
                    )
            value, value_clipped = self.value_loss(values, micro, options)
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

    def add_ptx(self, sums: LossSums, options: PPOConfig) -> LossSums:
        """Adds the gradient of the next blocks of pretraining text, and their loss to the sums."""
        assert self.pretraining is not None
        blocks = self.pretraining.at(self.state.ptx_seen, options.ptx_batch_size, options.seed)
        self.state.ptx_seen += len(blocks)
        ptx_loss = add_ptx_gradient(
            self.model, blocks, options, world=self.world, scaler=self.state.scaler
        )
        return sums._replace(loss=sums.loss + options.ptx_coef * ptx_loss, ptx_loss=ptx_loss)

    def take_step(self, sums: LossSums, options: PPOConfig) -> StepReport:
        """Clips the gradient and takes an optimiser step, if loss and gradient are finite."""
        state = self.state
        if all(weight.grad is None for weight in self.optimizer.weights):
            # While a head in closed form warms up on the policy's trunk, AdamW has nothing to do.
            return StepReport(to_floats({"loss": sums.loss}), 0.0)
        state.unscale(self.optimizer)
        norms = clip_gradients(self.optimizer, self.model, options)
        # Once a step the host waits for a GPU, here. A gradient that is not finite must not reach
        # AdamW, nor zeros in its place: its moments would still decay and the weights move by them.
        # So the step waits until the host has seen the norm; nothing in a microbatch waits.
        metrics = to_floats({"loss": sums.loss, **norms, "policy_kl": sums.approx_kl})
        policy_kl = metrics.pop("policy_kl")
        if all(map(math.isfinite, metrics.values())):
            self.optimizer.step()
            state.skipped_in_a_row = 0
        elif state.overflowed and math.isfinite(metrics["loss"]):
            state.overflowed_steps += 1
        else:
            self.warn(state.skip_step(metrics))
        state.optimizer_step += 1
        if state.overflowed:
            # A norm is no metric where a loss scale that was too large made it.
            metrics = {
                name: value
                for name, value in metrics.items()
                if name == "loss" or math.isfinite(value)
            }
        return StepReport(metrics, policy_kl)

    @contextmanager
    def engine_released(self) -> Iterator[None]:
        """Frees the engine's memory for an update, then hands it the new weights."""
        self.engine.release()
        yield
        self.optimizer.zero_grad(set_to_none=True)  # a rollout needs their memory
        self.engine.weights_changed(self.model)

    # ----------------------------------------------------------------------- responses of others

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
        """One PPO update on responses that are given; returns its metrics.

        Args:
            prompts, responses: texts or token ids; prompts may be chat messages.
            scores: [B], normalised and clipped as the config says, not charged for length or EOS.
            finish_reasons: `stop` or `length`; by default, whether a stop token comes last.
            masks: for each token, True if the policy wrote it. The others, such as a tool's answer,
                are read by the model and not learned from.
            token_rewards: a reward for each token, in addition to the score and scaled with it
                where scores are normalised or clipped. A reward at a token that the policy did not
                write is paid at the last one before it that the policy wrote.
            old_logprobs: for each token its logprob under the policy that drew it, nats of
                softmax(z/T); by default those of the model as it is. Read where the mask is True.
            values: for each token the value of the state before it; by default the model's.

        Raises:
            ValueError: lengths disagree; a prompt or response is empty, too long for the context
                or outside the vocabulary; a number is not finite; a mask is not bool or has no
                True; without masks, tokens follow a stop token, as padding does.
            RunStoppedError: a metric crossed a threshold of `stop_if`; the update is done.
        """
        external = given_responses(
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
            external.prompt_ids,
            external.rollout,
            external.scores,
            options,
            given_policy=external.policy,
        )
        with self.engine_released():
            metrics |= self.update(experience, options)
        self.state.move_kl_coef(metrics.get("kl"), len(experience), options)
        total = external.scores.total
        metrics["reward"] = total.mean().item()
        metrics |= rollout_health(external.rollout.written_tokens, total)
        self.watch(metrics)
        self.state.iteration += 1
        self.state.raise_if_stopped()
        return metrics

    # ----------------------------------------------------------------------- looking at the policy

    def evaluate(
        self, prompts: Prompts, sampling: Sampling | None = None, scorer: Scorer | None = None
    ) -> dict[str, Any]:
        """Samples and scores responses to `prompts` without learning from them.

        Returns:
            dict: reward, each reward term and monitor, kl (nats per sequence; of a run with a
            reference), entropy (nats per token), response_length, eos_rate: means; `completions`,
            the texts; `scores`; `rollout`.
        """
        options = self.config.at(self.state.iteration)
        with random_state_restored(options.seed):
            prompts, rollout = self.episode_runner.run(
                prompts, self.engine, sampling or self.sampling
            )
            scores = self.score(prompts, rollout, options, scorer)
        batch = Batch.of(prompts.token_ids, rollout.tokens, self.device, rollout.written)
        for attempt in self.attempts(batch, options):
            with attempt as limits:
                policy_means = policy_metrics(
                    batch,
                    split(batch, limits, self.world),
                    options,
                    model=self.model,
                    reference=self.reference,
                )
        return {
            **response_metrics(scores, rollout, {}),
            **policy_means,
            "completions": self.completions(prompts, rollout),
            "scores": scores,
            "rollout": rollout,
        }

    def completions(self, prompts: Prompts, rollout: Rollout, most: int | None = None) -> list[str]:
        """The responses, or the first `most`, as texts without special tokens: what comes after the
        prompt's text."""
        return decode_completions(self.tokenizer, prompts.token_ids[:most], rollout.tokens[:most])

    def self_check(self, prompts: Prompts) -> None:
        """Raises RuntimeError if the first update would not be on-policy; warns of options that are
        legal but probably unintended."""
        fresh_reference = self.reference
        if self.state.optimizer_step or (fresh_reference is not None and fresh_reference.is_given):
            fresh_reference = None
        with explain_out_of_memory("the self-check", self.config):
            check_on_policy(
                prompts,
                self.config,
                model=self.model,
                engine=self.engine,
                sampling=self.sampling,
                fresh_reference=fresh_reference,
            )
        for sentence in [*odd_options(self.config), *busy_cpu(self.device)]:
            self.say(sentence, "yellow")

    # --------------------------------------------------------------------- saving, and what is said

    def save_checkpoint(self) -> Path:
        """Writes a checkpoint of the run as it is now; its path."""
        return self.checkpoints.save()

    def save_policy(self, directory: str | Path) -> None:
        """Writes the policy, its tokenizer and generation config; the value function beside it."""
        directory = Path(directory)
        with unsharded(self.model):
            value_function = directory.parent / "value_function.safetensors"
            self.world.on_main_rank(
                lambda: export(self.model, self.tokenizer, directory, value_function)
            )

    def begin_iteration(self) -> PPOConfig:
        """The options of this iteration; the reference is refreshed if it is time."""
        iteration = self.state.iteration
        interval = self.config.reference_refresh
        if self.reference is not None and interval and iteration and iteration % interval == 0:
            self.reference.refresh()
        options = self.config.at(iteration)
        self.state.begin_iteration(options)
        return options

    def watch(self, metrics: dict[str, float]) -> list[str]:
        """Warnings about the metrics of an iteration, which the console shows too; the last of them
        say why the run stops."""
        sentences = self.notes + self.state.watch(metrics)
        self.notes = []
        for sentence in sentences:
            self.warn(sentence, f"iteration {self.state.iteration + 1}: ")
        return sentences + [f"stopped: {reason}" for reason in self.state.watch.stopped_by]

    def warn(self, warning: str, where: str = "") -> None:
        """Shows the user a warning with the page that helps, once for each kind of warning.

        Args:
            where: begins the sentence, such as the iteration.
        """
        kind = kind_of(warning)
        if kind not in self._warned:
            self._warned.add(kind)
            self.say(f"{where}{warning}{advice(warning)}", "yellow")

    def say(self, sentence: str, style: str = "") -> None:
        """Shows the user a sentence."""
        say(self.console, sentence, style)
