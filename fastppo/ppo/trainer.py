"""The PPO trainer: the algorithm, top to bottom.

One iteration (`PPOTrainer.iterate`) is

    generate          responses to a batch of prompts, with the policy as it is
    score             each response with the rewards
    make experience   old and reference logprobs, values; shaped rewards, advantages, whitening
    update            mini-epochs over shuffled minibatches of microbatches
    log

`train()` runs iterations with checkpoints and records; `step(prompts, responses, scores)` makes
experience of responses that somebody else generated and scored, and updates on it. One forward pass
of the trunk feeds both heads, and only hidden states that predict response tokens reach them. All
that changes during a run is in the model, the optimiser, `RunState` and a reference that was
refreshed, so a checkpoint is those. `config` is the run's; `options`, what the phases are handed,
is the config with the schedules of the iteration applied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from fastppo_kernels.records import SUMS, combine_sums
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, set_seed

from fastppo.data.batch import Batch
from fastppo.data.chat import decode_completions
from fastppo.data.prompts import Prompts
from fastppo.data.rows import Rows
from fastppo.data.world import World
from fastppo.models.device import busy_cpu, device_name
from fastppo.models.sharding import settle, unsharded
from fastppo.ppo.advantages import make_advantages
from fastppo.ppo.build import build, world_of
from fastppo.ppo.checkpoints import Checkpoints, export
from fastppo.ppo.checks import (
    TokenRows,
    check_on_policy,
    given_responses,
    odd_options,
    random_state_restored,
    take_step,
)
from fastppo.ppo.config import PPOConfig
from fastppo.ppo.evaluation import LOGGED_SAMPLES
from fastppo.ppo.experience import Experience
from fastppo.ppo.metrics import (
    Clock,
    Meter,
    experience_metrics,
    policy_metrics,
    response_metrics,
    sample_records,
    status,
    to_floats,
    update_metrics,
)
from fastppo.ppo.objective import add_ptx_gradient, minibatch_gradient
from fastppo.ppo.old_policy import GivenPolicy, read_policies
from fastppo.ppo.optimizer import clip_gradients, set_learning_rate
from fastppo.ppo.out_of_memory import Halving
from fastppo.ppo.state import RunState
from fastppo.rewards.dropping import without_dropped
from fastppo.rewards.reward import Reward
from fastppo.rewards.scorer import Scorer, Scores
from fastppo.rollout import Rollout, RolloutEngine, Sampling
from fastppo.run.callbacks import Callbacks
from fastppo.run.checkpoint import random_state, restore_random_state
from fastppo.run.lock import held
from fastppo.run.log import SharedLog, check_no_run, progress, read_jsonl, say
from fastppo.run.report import write_report
from fastppo.run.signals import PhaseEndedError, Stopped, StopRequest, listening
from fastppo.run.watch import rollout_health


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
        ValueError: the parts do not fit; see `fastppo.ppo.build`.
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
        self.world = world = world or world_of(config)
        console = console or Console(stderr=True)
        self.console = console if world.is_main else Console(quiet=True)
        set_seed(config.seed)
        parts = build(
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
            world=world,
        )
        self.device, self.context = parts.device, parts.context
        self.model, self.reference = parts.model, parts.reference
        self.tokenizer, self.optimizer, self._notes = parts.tokenizer, parts.optimizer, parts.notes
        self.engine, self.sampling, self.turns = parts.engine, parts.sampling, parts.turns
        self.prompts, self.curriculum, self.scorer = parts.prompts, parts.curriculum, parts.scorer
        self.pretraining, self.evaluation = parts.pretraining, parts.evaluation
        self.state = RunState.of(config)
        self.callbacks = told = Callbacks(callbacks, config, world, self.say, **parts.of_callbacks)
        self.checkpoints = Checkpoints(config, self.state, parts, self.say, world, told.saved)
        of_passes = self.say, world.size == 1, functools.partial(settle, self.model)
        self._halving, self._reading = Halving(*of_passes), Halving(*of_passes, reading=True)

    # ------------------------------------------------------------------------------ the algorithm

    def train(self) -> dict[str, float]:
        """Runs to `config.iterations` and writes the policy and the report; the last metrics.

        Raises:
            RunStoppedError: a metric crossed a threshold of `stop_if`; all is written first.
            Stopped: a signal asked for it; a checkpoint is written first.
            CheckpointError: a checkpoint could not be written.
            FloatingPointError: `MAX_SKIPPED_STEPS` steps in a row were not finite.
            RewardError: a reward raised, or returned what cannot be trained on.
            RuntimeError: the self-check failed.
        """
        if self.prompts is None or not (self.scorer.terms or self.turns.pays):
            raise ValueError("train() needs prompts and at least one reward; step() needs neither")
        config, state, world = self.config, self.state, self.world
        run_dir = Path(config.output_dir)
        with (
            world.answering(),
            held(run_dir, world),
            listening(world) as stop_request,
            closing(self.callbacks),
            closing(self.turns),
        ):
            set_seed(config.seed)
            if config.resume:
                self.checkpoints.resume()
                self.engine.weights_changed(self.model)
            elif state.iteration == 0:
                world.first(lambda: check_no_run(run_dir))
            self.self_check(self.prompts)
            metrics = self._iterations(run_dir, stop_request)
            self.checkpoints.finish()
            if (
                stop_request.stop
                and state.iteration < config.iterations
                and not state.watch.stopped_by
            ):
                raise Stopped(stop_request.stop, self.checkpoints.how_far())
            self.save_policy(run_dir / "policy")
            world.first(lambda: write_report(run_dir))
            self.callbacks.tell("on_train_end")
        state.raise_if_stopped(run_dir)
        return metrics or world.first(lambda: read_jsonl(run_dir / "metrics.jsonl")[-1])

    def _iterations(self, run_dir: Path, stop_request: StopRequest) -> dict[str, float]:
        """Iterates to the end, or until the watch or a signal stops it; the last metrics."""
        config, state, told, end = self.config, self.state, self.callbacks, self.config.iterations
        about = {"first": state.iteration, "device": device_name(self.device)}
        log = SharedLog(self.world, run_dir, config, callbacks=told, **about)
        self._notes += log.notes
        metrics: dict[str, float] = {}
        bar = progress("PPO", self.console, total=end, completed=state.iteration)
        with closing(log), bar as show:
            told.begin(state.iteration)
            while state.iteration < end and not (
                stop_request.stop or told.stop or state.has_enough(config)
            ):
                told.tell("on_step_begin")
                at_start = random_state()
                try:
                    metrics = self.iterate(log, stop_request)
                except PhaseEndedError:
                    restore_random_state(*at_start)
                    break
                except FloatingPointError as error:
                    # No checkpoint: half of the iteration's steps were taken.
                    skipped = {"skipped_steps": float(state.skipped_in_a_row)}
                    log.metrics(state.iteration, skipped, [f"stopped: {error}"])
                    self.world.first(lambda: write_report(run_dir))
                    raise
                show(completed=state.iteration, status=status(metrics))
                save = told.step_ended() | stop_request.checkpoint_wanted()
                self.checkpoints.after_iteration(metrics, asked=save)
        return metrics

    def iterate(self, log: SharedLog, stop_request: StopRequest | None = None) -> dict[str, float]:
        """One PPO iteration; returns its metrics. `stop_request` may end it before its update."""
        assert self.prompts is not None
        stop_request = stop_request or StopRequest()
        options, clock = self._begin_iteration(), Clock()
        how_many = options.prompts_per_iteration, options.seed, options.samples_per_prompt
        chosen = self.curriculum.at(self.state, *how_many)
        prompts = self.prompts.select(chosen.rows)
        prompts, rollout = self.turns.play(prompts, self.engine, self.sampling)
        clock.lap("generate")
        stop_request.end_phase()
        scores = self.score(prompts, rollout, options)
        clock.lap("score")
        stop_request.end_phase()
        metrics = self.curriculum.take(chosen, scores, self.state)
        prompts, rollout, scores, dropped = without_dropped(prompts, rollout, scores)
        batch = Batch.of(prompts.token_ids, rollout.tokens, self.device, rollout.written)
        rewards = self.training_rewards(scores, options)
        experience, found = self.make_experience(batch, rewards, rollout, options)
        clock.lap("experience")
        metrics |= found | self._learn(experience, options)
        clock.lap("update")
        metrics |= response_metrics(scores, rollout, metrics)
        metrics |= clock.metrics(batch.response_count, self.world)
        metrics |= rollout_health(rollout.written_tokens, scores.total, scores.monitors) | dropped
        iteration = self.state.iteration
        metrics |= self.evaluation.after(self, log, self.callbacks.take("should_evaluate"))
        log.metrics(iteration, metrics, self._warnings(metrics))
        texts = self.completions(prompts, rollout, LOGGED_SAMPLES)
        log.samples(iteration, sample_records(prompts, texts, rollout, scores, experience))
        self.state.finish_iteration(metrics.get("kl"), len(prompts), options)
        return metrics

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
            masks: for each token, True if the policy wrote it; the others, a tool's answer say, are
                read and not learned from.
            token_rewards: for each token; what is not on one of the policy's is paid at the last
                one before it.
            old_logprobs, values: for each token, nats under softmax(z/T) of the policy that drew
                it, and of the state before it; read where the mask is True; else the model's own.

        Raises:
            ValueError: lengths disagree; a prompt or response is empty, too long for the context
                or outside the vocabulary; a number is not finite, a mask not bool or never True.
            RunStoppedError: a metric crossed a threshold of `stop_if`; the update is done.
        """
        stop, room = self.sampling.stop_token_ids, (self.model.head.vocabulary, self.context)
        of_tokens = self.tokenizer, stop, room, masks, token_rewards, old_logprobs, values
        given = given_responses(prompts, responses, scores, finish_reasons, *of_tokens)
        ids, rollout, paid, old = given
        options = self._begin_iteration()
        batch = Batch.of(ids, rollout.tokens, self.device, rollout.written)
        rewards = self.training_rewards(paid, options)
        experience, metrics = self.make_experience(batch, rewards, rollout, options, old)
        metrics |= self._learn(experience, options)
        metrics["reward"] = paid.total.mean().item()
        metrics |= rollout_health(rollout.written_tokens, paid.total)
        self._warnings(metrics)
        self.state.finish_iteration(metrics.get("kl"), len(batch), options)
        self.state.raise_if_stopped()
        return metrics

    def score(
        self, prompts: Prompts, rollout: Rollout, options: PPOConfig, scorer: Scorer | None = None
    ) -> Scores:
        """Rewards of the responses' texts: their weighted sum, less the penalties."""
        texts = self.completions(prompts, rollout)
        scores = (scorer or self.scorer)(prompts, texts, rollout.tokens, rollout.written)
        scores = scores.plus("environment", rollout.rewards)
        return scores.charged(rollout.truncated, options.missing_eos_penalty)

    def training_rewards(self, scores: Scores, options: PPOConfig) -> Scores:
        """Scores normalised and clipped: what advantages are made from."""
        method, clip = options.score_normalization, options.score_clip
        return scores.normalized(method, clip, self.state.score_scale)

    @torch.no_grad()
    def make_experience(
        self,
        batch: Batch,
        rewards: Scores,
        rollout: Rollout,
        options: PPOConfig,
        given: GivenPolicy | None = None,
    ) -> tuple[Experience, dict[str, float]]:
        """Old logprobs, reference logprobs and values of the responses; then their advantages.

        Args:
            given: old logprobs and values of responses that no engine of the trainer drew.
        """
        kl_coef = self.state.kl_control.coef
        of = self.model, self.reference, self.engine, self.sampling, rollout, batch, given
        attempt = functools.partial(read_policies, *of, kl_coef, options, self.world)
        limits = options.limits(self.model.packing)
        old, ref_logprobs, exact_kl, metrics = self._reading.run(attempt, limits, len(batch))
        result = make_advantages(
            batch, rewards, rollout.truncated, old, ref_logprobs, exact_kl, kl_coef, options
        )
        made = result.advantages, result.returns, ref_logprobs, old.importance_weights
        experience = Experience(batch, old.logprobs, old.values, *made)
        metrics = experience_metrics(experience, result.spread) | metrics
        return experience, metrics if ref_logprobs is None else metrics | {"kl_coef": kl_coef}

    def _learn(self, experience: Experience, options: PPOConfig) -> dict[str, float]:
        """The update, with the engine out of its way before and told of it after."""
        self.engine.release()
        metrics = self.update(experience, options)
        self.optimizer.zero_grad(set_to_none=True)  # a rollout needs their memory
        self.engine.weights_changed(self.model)
        return metrics

    def update(self, experience: Experience, options: PPOConfig) -> dict[str, float]:
        """Mini-epochs of clipped updates on one batch of experience; returns their mean metrics."""
        meter, state = Meter(), self.state
        before = state.steps
        too_far = False
        for _ in range(options.ppo_epochs):
            order = torch.randperm(len(experience))
            policy_kls: list[float] = []
            for minibatch in experience.minibatches(
                order, options.minibatches, options.aggregation
            ):
                policy_kls.append(self._optimizer_step(minibatch, meter, options))
            policy_kl = sum(policy_kls) / len(policy_kls)
            too_far = options.stops_at(policy_kl)
            if too_far:
                break
        taken = state.optimizer_step - before.all
        spikes = [state.watch.loss_spikes(step["loss"]) for step in meter.steps[:taken]]
        metrics = update_metrics(meter, taken, too_far, options)
        metrics["loss_spikes"] = float(sum(spikes))
        metrics |= state.step_metrics(before)
        if options.objective == "penalty":
            metrics["policy_kl_coef"] = state.policy_kl_control.coef
            if not state.is_warming_up(options):
                state.policy_kl_control.update(policy_kl, len(experience))
        return metrics

    def _optimizer_step(self, minibatch: Experience, meter: Meter, options: PPOConfig) -> float:
        """Accumulates the gradient of one minibatch over its microbatches and takes a step; the KL
        to the rollout policy before the step, nats per token."""
        warming_up = self.state.is_warming_up(options)
        planned = self.state.iteration * options.steps_per_iteration + len(meter.steps)
        learning_rate = set_learning_rate(self.optimizer, planned, self.config)
        beta = self.state.policy_kl_control.coef
        given = minibatch, self.model, self.reference, self.optimizer, self.world
        limits, scaler = options.limits(self.model.packing), self.state.scaler
        attempt = functools.partial(minibatch_gradient, *given, scaler, beta, warming_up, options)
        found = self._halving.run(attempt, limits, len(minibatch))
        meter.microbatches(found)
        meter.dealt(minibatch.batch.lengths, self._halving.limits(limits), self.world)
        loss = torch.stack([part.loss for part in found]).sum()
        if options.ptx_coef and not warming_up:
            assert self.pretraining is not None
            blocks = self.pretraining.at(self.state.ptx_seen, options.ptx_batch_size, options.seed)
            self.state.ptx_seen += len(blocks)
            ptx_loss = add_ptx_gradient(self.model, blocks, options, self.world, scaler)
            loss += options.ptx_coef * ptx_loss
            meter.pretraining(ptx_loss)
        self.state.unscale(self.optimizer)
        norms = clip_gradients(self.optimizer, self.model, options)
        sums = functools.reduce(combine_sums, [part.sums for part in found])
        kl = sums[SUMS.index("approx_kl")] / sums[SUMS.index("tokens")].clamp(min=1)
        numbers = to_floats({"loss": loss, **norms, "kl": kl})
        policy_kl = numbers.pop("kl")
        meter.minibatch(self.state.overflowed, **numbers, learning_rate=learning_rate)
        how = self.state, numbers, self.config, self.world
        if skipped := take_step(self.optimizer, self.model, minibatch, *how):
            self.say(skipped, "yellow")
        return policy_kl

    # ----------------------------------------------------------------------- looking at the policy

    def evaluate(
        self, prompts: Prompts, sampling: Sampling | None = None, scorer: Scorer | None = None
    ) -> dict[str, Any]:
        """Samples and scores responses to `prompts` without learning from them.

        Returns:
            dict: reward, each reward term and monitor, kl (nats per sequence), entropy (nats per
            token), response_length, eos_rate: means; `completions`, the texts; `scores`; `rollout`.
        """
        options = self.config.at(self.state.iteration)
        with random_state_restored(options.seed):
            prompts, rollout = self.turns.play(prompts, self.engine, sampling or self.sampling)
            scores = self.score(prompts, rollout, options, scorer)
        batch = Batch.of(prompts.token_ids, rollout.tokens, self.device, rollout.written)
        of = self.model, self.reference, batch, options, self.world
        limits = options.limits(self.model.packing)
        return {
            **response_metrics(scores, rollout, {}),
            **self._reading.run(functools.partial(policy_metrics, *of), limits, len(batch)),
            "completions": self.completions(prompts, rollout),
            "scores": scores,
            "rollout": rollout,
        }

    def completions(self, prompts: Prompts, rollout: Rollout, most: int | None = None) -> list[str]:
        """The responses, or the first `most`, as texts without special tokens: what comes after the
        prompt's text."""
        return decode_completions(self.tokenizer, prompts.token_ids[:most], rollout.tokens[:most])

    def self_check(self, prompts: Prompts) -> None:
        """Raises RuntimeError if the first update would not be on-policy; says what else is odd."""
        is_fresh = self.state.optimizer_step == 0
        sampler = self.engine, prompts, self.sampling
        check_on_policy(
            self.model, self.reference, *sampler, self.config, reference_is_fresh=is_fresh
        )
        for sentence in [*odd_options(self.config), *busy_cpu(self.device)]:
            self.say(sentence, "yellow")

    # ------------------------------------------------------------------------- saving and resuming

    def save_checkpoint(self) -> Path:
        """Writes a checkpoint of the run as it is now; its path."""
        return self.checkpoints.save()

    def save_policy(self, directory: str | Path) -> None:
        """Writes the policy, its tokenizer and generation config; the value function beside it."""
        directory = Path(directory)
        with unsharded(self.model):
            self.world.first(lambda: export(self.model, self.tokenizer, directory))

    # ---------------------------------------------------------------------------- around a step

    def _begin_iteration(self) -> PPOConfig:
        """The options of this iteration; the reference is refreshed if it is time."""
        iteration, interval = self.state.iteration, self.config.reference_refresh
        if self.reference is not None and interval and iteration and iteration % interval == 0:
            self.reference.refresh()
        options = self.config.at(iteration)
        self.state.begin_iteration(options)
        return options

    def say(self, sentence: str, style: str = "") -> None:
        """Shows the user a sentence."""
        say(self.console, sentence, style)

    def _warnings(self, metrics: dict[str, float]) -> list[str]:
        """What the watch says of the metrics, to which it adds; the terminal gets it too."""
        sentences, self._notes = self._notes + self.state.watch(metrics), []
        for sentence in sentences:
            self.say(f"iteration {self.state.iteration}: {sentence}", "yellow")
        return sentences + [f"stopped: {sentence}" for sentence in self.state.watch.stopped_by]
