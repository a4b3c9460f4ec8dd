"""The PPO trainer: the algorithm, top to bottom.

One iteration (`PPOTrainer.iterate`) is

    generate    responses to a batch of prompts, with the policy as it is
    score       each response with the rewards
    appraise    old and reference logprobs, values; shaped rewards, advantages, whitening
    update      mini-epochs over shuffled minibatches of microbatches
    log

`train()` runs iterations with checkpoints and records; `step(prompts, responses, scores)` is an
appraisal and an update for people who generate and score by themselves. One forward pass of the
trunk feeds both heads, and only hidden states that predict response tokens reach them. All that
changes during a run is in the model, the optimiser, `RunState` and a reference that was refreshed,
so a checkpoint is those. The options of one iteration, schedules applied, are `self.now`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fastppo_kernels.reference import SUMS, combine_sums
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import PreTrainedModel, set_seed

from fastppo import checkpoint, parts
from fastppo.advantages import Advantages, PenaltyKL, compute_advantages, sampled_kl, whiten
from fastppo.batch import Experience, Sequences
from fastppo.config import WARNINGS, PPOConfig
from fastppo.data import Prompts, Rows, decode_completions
from fastppo.losses import (
    PPOLoss,
    aggregation_weights,
    linear_ppo_loss,
    ppo_loss,
    value_loss,
)
from fastppo.metrics import Clock, Meter, explained_variance, to_floats
from fastppo.model import Head, LanguageModel, autocast
from fastppo.monitor import (
    ABSENT_AFTER,
    SLOPE_WINDOW,
    AbsentMetrics,
    SpikeDetector,
    crossed,
    non_finite_gradients,
    parse_threshold,
    rollout_health,
    save_batch,
    slope,
)
from fastppo.optimizer import make_optimizer, set_learning_rate
from fastppo.parts import choose_device
from fastppo.pretrained import load_tokenizer
from fastppo.report import write_report
from fastppo.reward_processing import (
    RunningScale,
    length_normalized,
    length_penalty,
    whiten_scores,
)
from fastppo.rewards import Reward, Scored, place_rewards, score
from fastppo.rollout import FINISHED, TRUNCATED, Rollout, RolloutEngine, Sampling
from fastppo.rollout.hf import HFEngine
from fastppo.run_log import RunLog, check_no_run, read_jsonl


@dataclass(slots=True)
class RunState:
    """The counters of a run; the schedules and the place in the prompts follow from them."""

    iteration: int = 0
    optimizer_step: int = 0
    prompts_seen: int = 0
    ptx_seen: int = 0
    kl_coef: float = 0.0
    policy_kl_coef: float = 0.0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    score_scale: dict[str, float] = field(default_factory=dict)
    kl_history: list[float] = field(default_factory=list)
    loss_history: list[float] = field(default_factory=list)


CLIP_METRICS = (
    *("clip_fraction", "dual_clip_fraction", "ratio_above_positive", "ratio_below_positive"),
    *("ratio_above_negative", "ratio_below_negative"),
)
"""Metrics of the clipped objective alone."""


class RunStoppedError(RuntimeError):
    """A threshold of `stop_if` was crossed; checkpoint, policy and report are written."""


class Scores(NamedTuple):
    """Rewards of a batch of responses: [B] each, in the prompts' order."""

    total: Tensor
    """The weighted sum of the terms, less the penalties."""
    terms: dict[str, Scored]
    """Each trained term, unweighted."""
    monitors: dict[str, Scored]
    """Each monitored reward."""
    token_rewards: Tensor | None = None
    """[N] packed: the part of the totals that was earned at a token or step, or None."""


class PPOTrainer:
    """PPO on one device.

    Args:
        config: the options.
        model, tokenizer: instead of loading `config.model`.
        prompts: rows with a prompt column, instead of loading `config.prompts`.
        rewards, monitor_rewards: callables or specs, instead of those of the config.
        reference: a model for the KL, instead of a frozen copy of the policy as it starts.
        engine: a rollout engine, instead of Hugging Face `generate` on the policy.
        console: where progress is shown.

    Raises:
        ValueError: the parts do not fit: a tokenizer larger than the vocabulary, a prompt longer
            than the context, a model whose logits FastPPO does not know how to form.
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
        engine: RolloutEngine | None = None,
        console: Console | None = None,
    ) -> None:
        self.config = config
        self.console = console or Console(stderr=True)
        self.device = choose_device(config.device)
        self.autocast_dtype = parts.autocast_dtype(config.precision, self.device)
        self.now = config.at(0)
        set_seed(config.seed)

        if model is None and not config.model:
            raise ValueError("model must be a directory or hub name, got nothing")
        if tokenizer is None and not config.model:
            raise ValueError("a model that is passed in needs its tokenizer passed in too")
        self.tokenizer = tokenizer or load_tokenizer(config.model)
        causal_lm = model or parts.load_model(config.model, config, self.device)
        causal_lm = causal_lm.to(self.device)  # type: ignore[arg-type]
        self.pad_token_id = parts.pad_token_id(self.tokenizer, causal_lm)
        self.stop_token_ids = parts.stop_token_ids(config.stop_token_ids, self.tokenizer, causal_lm)
        self.model = parts.make_actor_critic(causal_lm, self.tokenizer, config)
        parts.check_vocabulary(self.model, self.tokenizer, self.stop_token_ids)
        self._reference = parts.make_reference(self.model, reference, self.tokenizer, config)
        self.context = parts.shortest_context(self.model, self._reference)

        self.sampling = Sampling(
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            stop_token_ids=self.stop_token_ids,
        )
        self.engine: RolloutEngine = engine or HFEngine(
            causal_lm,
            self.pad_token_id,
            batch_size=config.generate_batch_size,
            autocast_dtype=self.autocast_dtype,
        )
        self.prompts = parts.load_prompts(prompts, self.tokenizer, self.context, config)
        self.pretraining = parts.load_pretraining(self.tokenizer, self.model.context, config)
        self.rewards = parts.load_rewards(rewards or config.rewards, config, self.device)
        self.monitors = parts.load_monitors(
            monitor_rewards or config.monitor_rewards, config, self.device
        )
        self.optimizer = make_optimizer(self.model, config)
        self.kl_controller = parts.kl_controller(config)
        self.policy_kl = PenaltyKL(config.policy_kl_coef, config.policy_kl_target)
        self.score_scale = RunningScale()
        self._loss_spikes = SpikeDetector()
        self.state = RunState(kl_coef=config.kl_coef, policy_kl_coef=config.policy_kl_coef)
        self._last_saved: int | None = None
        self.warn_if = [parse_threshold(text) for text in config.warn_if]
        self.stop_if = [parse_threshold(text) for text in config.stop_if]
        # The default thresholds are for any run; one of the user's own is missed if it is absent.
        own = [t for t in self.warn_if if str(t) not in WARNINGS] + self.stop_if
        self._absent_metrics = AbsentMetrics(own, min(ABSENT_AFTER, config.iterations))
        self._stopped_by: list[str] = []

    # ------------------------------------------------------------------------------ the algorithm

    def train(self) -> dict[str, float]:
        """Runs to `config.iterations` and writes the policy and the report; the last metrics.

        Raises:
            RunStoppedError: a metric crossed a threshold of `stop_if`; all is written first.
            FloatingPointError: `max_skipped_steps` steps in a row were not finite.
            RewardError: a reward raised, or returned what cannot be trained on.
            RuntimeError: the self-check failed.
        """
        if self.prompts is None or not self.rewards:
            raise ValueError("train() needs prompts and at least one reward; step() needs neither")
        run_dir = Path(self.config.output_dir)
        set_seed(self.config.seed)
        if self.config.resume:
            self._resume(run_dir)
        elif self.state.iteration == 0:
            check_no_run(run_dir)
        self.self_check(self.prompts)
        if self.config.warmup_steps > self.config.optimizer_steps:
            self.console.print(
                f"[yellow]warmup_steps={self.config.warmup_steps}: the run has "
                f"{self.config.optimizer_steps} optimiser steps and ends before its peak learning "
                "rate"
            )
        log = RunLog(run_dir, self.config, self.state.iteration)
        metrics: dict[str, float] = {}
        with self._progress() as advance:
            while self.state.iteration < self.config.iterations and not self._stopped_by:
                try:
                    metrics = self.iterate(log)
                except FloatingPointError as error:
                    self._close_broken_run(log, error)
                    raise
                advance(metrics)
                interval = self.config.checkpoint_interval
                if interval and self.state.iteration % interval == 0:
                    self.save_checkpoint()
        log.close()
        if self.state.iteration != self._last_saved:
            self.save_checkpoint()
        self.save_policy(run_dir / "policy")
        write_report(run_dir)
        if self._stopped_by:
            raise RunStoppedError(
                f"stopped after iteration {self.state.iteration - 1}: "
                f"{'; '.join(self._stopped_by)}. A checkpoint, the policy and the report are in "
                f"{run_dir}"
            )
        return metrics or read_jsonl(run_dir / "metrics.jsonl")[-1]

    def _close_broken_run(self, log: RunLog, error: FloatingPointError) -> None:
        """Records the iteration that was not finished. There is no checkpoint of it: half of its
        steps were taken."""
        skipped = {"skipped_steps": float(self.state.skipped_in_a_row)}
        log.metrics(self.state.iteration, skipped, [f"stopped: {error}"])
        log.close()
        write_report(self.config.output_dir)

    def iterate(self, log: RunLog) -> dict[str, float]:
        """One PPO iteration; returns its metrics."""
        assert self.prompts is not None
        self._begin_iteration()
        clock = Clock()
        prompts = self.prompts.at(
            self.state.prompts_seen, self.config.rollout_batch_size, self.config.seed
        )
        rollout = self.engine.generate(prompts.token_ids, self.sampling)
        clock.lap("generate")
        scores = self.score(prompts, rollout)
        clock.lap("score")
        sequences = Sequences.pack(
            prompts.token_ids, rollout.tokens, self.pad_token_id, self.device
        )
        rewards, token_rewards = self.training_rewards(scores, rollout.lengths)
        experience, metrics = self.appraise(
            sequences, rewards, rollout.finish_reasons, token_rewards
        )
        clock.lap("appraise")
        metrics |= self.update(experience)
        clock.lap("update")
        metrics |= score_metrics(scores, rollout) | clock.metrics(sum(rollout.lengths))
        metrics |= rollout_health(rollout.tokens, scores.total, scores.monitors)

        iteration = self.state.iteration
        log.metrics(iteration, metrics, self._warnings(metrics))
        if iteration % self.config.log_interval == 0:
            log.samples(iteration, self._samples(prompts, rollout, scores, experience))
        self.state.prompts_seen += len(prompts)
        self._finish_iteration(metrics, len(prompts))
        return metrics

    def step(
        self,
        prompts: Sequence[str | Sequence[int]],
        responses: Sequence[str | Sequence[int]],
        scores: Sequence[float] | Tensor,
        finish_reasons: Sequence[str] | None = None,
    ) -> dict[str, float]:
        """One PPO update on responses of your own; returns its metrics.

        Args:
            prompts, responses: texts, or lists of token ids. The responses should be the current
                policy's: old logprobs are computed from it here.
            scores: [B], the reward of each response.
            finish_reasons: `stop` or `length` per response; by default, whether the last token is a
                stop token. The scores are taken without penalties for length or a missing EOS;
                normalisation and clipping are those of the config.

        Raises:
            ValueError: lengths disagree; a prompt or response is empty, too long for the context
                or outside the vocabulary; a score is not finite.
            RunStoppedError: a metric crossed a threshold of `stop_if`; the update is done.
        """
        prompt_ids = [self._token_ids(prompt) for prompt in prompts]
        response_ids = [self._token_ids(response, special_tokens=False) for response in responses]
        total = torch.as_tensor(scores, dtype=torch.float32, device=self.device)
        if total.shape != (len(prompt_ids),):
            raise ValueError(f"scores must be [{len(prompt_ids)}], got {list(total.shape)}")
        if not total.isfinite().all():
            raise ValueError(f"scores must be finite, got {total.tolist()}")
        self._check_responses(prompt_ids, response_ids)
        if finish_reasons is None:
            stop = set(self.stop_token_ids)
            finish_reasons = [FINISHED if r[-1] in stop else TRUNCATED for r in response_ids]
        if len(finish_reasons) != len(prompt_ids) or {*finish_reasons} - {FINISHED, TRUNCATED}:
            raise ValueError(
                f"finish_reasons must be {len(prompt_ids)} of stop or length, got {finish_reasons}"
            )
        self._begin_iteration()
        sequences = Sequences.pack(prompt_ids, response_ids, self.pad_token_id, self.device)
        rewards, _ = self.training_rewards(Scores(total, {}, {}), [len(r) for r in response_ids])
        experience, metrics = self.appraise(sequences, rewards, finish_reasons)
        metrics |= self.update(experience)
        metrics["reward"] = total.mean().item()
        metrics |= rollout_health(response_ids, total)
        self._warnings(metrics)
        self._finish_iteration(metrics, len(prompt_ids))
        if self._stopped_by:
            raise RunStoppedError(f"stopped: {'; '.join(self._stopped_by)}")
        return metrics

    def score(self, prompts: Prompts, rollout: Rollout) -> Scores:
        """Rewards of the responses' texts: their weighted sum, less the penalties."""
        config = self.now
        texts = self.completions(prompts, rollout)
        failures = Path(config.output_dir) / "failed_reward.json"
        terms, monitors = (
            {
                term.name: score(
                    term, prompts.prompts, texts, prompts.columns, failures, rollout.tokens
                )
                for term in group
            }
            for group in (self.rewards, self.monitors)
        )
        _, placed = place_rewards(
            self.rewards,
            [terms[term.name] for term in self.rewards],
            texts,
            prompts.token_ids,
            rollout.tokens,
            self.tokenizer,
        )
        by_token = None if placed is None else torch.tensor(placed, device=self.device)
        total = torch.zeros(len(texts), device=self.device)
        for term in self.rewards:
            total += term.weight * torch.tensor(terms[term.name].values, device=self.device)
        lengths = torch.tensor(rollout.lengths, device=self.device)
        if config.length_normalized_score:
            total = length_normalized(total, lengths)
            if by_token is not None:
                by_token = by_token / lengths.repeat_interleave(lengths)
        total = total - length_penalty(lengths, config.length_penalty, config.length_penalty_free)
        if config.missing_eos_penalty is not None:
            total = total - config.missing_eos_penalty * self._truncated(rollout.finish_reasons)
        return Scores(total, terms, monitors, by_token)

    def training_rewards(
        self, scores: Scores, lengths: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Scores normalised and clipped, as the config says: what advantages are made from.

        Returns:
            ([B] rewards of the last tokens, [N] rewards within the responses or None). Rewards
            within a response are scaled by the factor that its total is scaled by; what is added to
            the total, a mean taken away say, goes to the last token.
        """
        config, total = self.now, scores.total
        factor = torch.ones_like(total)
        if config.score_normalization == "running":
            total = self.score_scale(total)
            self.state.score_scale = asdict(self.score_scale)
            factor = factor / self.score_scale.deviation
        elif config.score_normalization == "batch":
            factor = factor * (total.var() + 1e-8).rsqrt() if len(total) > 1 else 0 * factor
            total = whiten_scores(total)
        if config.score_clip is not None:
            clipped = total.clamp(-config.score_clip, config.score_clip)
            factor = torch.where(clipped == total, factor, factor * clipped / total)
            total = clipped
        if scores.token_rewards is None:
            return total, None
        counts = torch.tensor(lengths, device=self.device)
        within = scores.token_rewards * factor.repeat_interleave(counts)
        paid = torch.stack([part.sum() for part in within.split(list(lengths))])
        return total - paid, within

    def completions(self, prompts: Prompts, rollout: Rollout) -> list[str]:
        """The responses as texts without special tokens: what stands behind the prompt's text."""
        return decode_completions(self.tokenizer, prompts.token_ids, rollout.tokens)

    @torch.no_grad()
    def appraise(
        self,
        sequences: Sequences,
        scores: Tensor,
        finish_reasons: Sequence[str],
        token_rewards: Tensor | None = None,
    ) -> tuple[Experience, dict[str, float]]:
        """Old logprobs, reference logprobs and values of the responses; then their advantages.

        Args:
            scores: [B], placed on each response's last token.
            token_rewards: [N], added where they stand (partial rewards).
        """
        config = self.now
        microbatches = sequences.split(config.microbatch_size)
        logprobs, values, final_values = (
            torch.cat(each) for each in zip(*map(self._evaluate, microbatches), strict=True)
        )
        exact = config.kl_estimator == "full" and self.state.kl_coef > 0
        ref_logprobs, exact_kl = self._reference_pass(microbatches, exact)
        if config.reference_policy == "rollout":
            ref_logprobs = logprobs
        result = self._advantages(
            sequences,
            scores,
            values,
            logprobs,
            ref_logprobs,
            exact_kl,
            final_values * self._truncated(finish_reasons),
            token_rewards,
        )
        experience = Experience(
            sequences, logprobs, values, result.advantages, result.returns, ref_logprobs
        )
        lengths = sequences.response_lengths.float()
        metrics = {
            "response_length": lengths.mean(),
            "value": values.mean(),
            "return": result.returns.mean(),
            "explained_variance": explained_variance(result.returns, values),
        }
        if ref_logprobs is not None:
            # k1, whatever the estimator in the reward: the unbiased one, and the one that targets
            # and published runs speak of.
            total_kl = sampled_kl(logprobs, ref_logprobs).sum()
            metrics["kl"] = total_kl / len(sequences)
            metrics["kl_per_token"] = total_kl / lengths.sum().clamp(min=1)
        found = to_floats(metrics)
        if ref_logprobs is not None:
            found["kl_coef"] = self.state.kl_coef
        return experience, found

    def _advantages(
        self,
        sequences: Sequences,
        scores: Tensor,
        values: Tensor,
        logprobs: Tensor,
        ref_logprobs: Tensor | None,
        exact_kl: Tensor | None,
        bootstrap: Tensor,
        token_rewards: Tensor | None,
    ) -> Advantages:
        """Shaped rewards and advantages of packed responses, by the config's kind of advantage.

        All kinds are GAE: Monte Carlo is λ = 1 (reward to go less the value), one-step is λ = 0,
        and the sequence's advantage is the Monte Carlo one of its first token, for every token.
        """
        config = self.now
        kl_coef = self.state.kl_coef if ref_logprobs is not None else 0.0
        if exact_kl is not None:
            penalty = -kl_coef * exact_kl
            token_rewards = penalty if token_rewards is None else token_rewards + penalty
            kl_coef = 0.0
        by_sequence = config.advantage == "sequence"
        # What is made of all tokens' advantages at once, below, is not whitened in the kernel.
        in_kernel = config.whiten_advantages == "full" and not by_sequence
        lam = {"sequence": 1.0, "monte_carlo": 1.0, "one_step": 0.0}.get(
            config.advantage, config.lam
        )
        result = compute_advantages(
            scores,
            values,
            logprobs,
            ref_logprobs,
            torch.ones_like(values, dtype=torch.bool),
            cu_seqlens=sequences.cu_seqlens,
            kl_coef=kl_coef,
            kl_estimator="k1" if exact_kl is not None else config.kl_estimator,
            gamma=config.gamma,
            lam=lam,
            whiten=in_kernel,
            bootstrap=bootstrap if config.bootstrap_truncated else None,
            token_rewards=token_rewards,
            backend=config.backend,
        )
        advantages = result.advantages
        if by_sequence:
            first = sequences.cu_seqlens[:-1].clamp(max=max(0, len(values) - 1))
            advantages = advantages[first].repeat_interleave(
                sequences.response_lengths, output_size=len(values)
            )
            if config.whiten_advantages == "full":
                advantages = whiten(advantages, backend=config.backend)
        if config.whiten_advantages == "variance":
            advantages = advantages * (advantages.var() + 1e-8).rsqrt()
        return result._replace(advantages=advantages)

    def update(self, experience: Experience) -> dict[str, float]:
        """Mini-epochs of clipped updates on one batch of experience; returns their mean metrics."""
        config, meter = self.now, Meter()
        stopped, before = False, replace(self.state)
        for _ in range(config.ppo_epochs):
            order = torch.randperm(len(experience)).to(self.device)
            epoch: list[float] = []
            for rows in order.tensor_split(min(config.minibatches, len(experience))):
                kl, stopped = self._optimizer_step(experience.select(rows), meter)
                epoch.append(kl)
                if stopped:
                    break
            policy_kl = sum(epoch) / len(epoch)
            stopped = stopped or (config.early_stop_check == "epoch" and self._too_far(policy_kl))
            if stopped:
                break
        metrics = meter.metrics()
        if not config.kl_loss_coef:
            del metrics["kl_loss"]  # a term that is not in the loss
        taken = meter.steps[: self.state.optimizer_step - before.optimizer_step]
        metrics |= config.scheduled_values()
        metrics["loss_spikes"] = float(sum(self._loss_spikes(step["loss"]) for step in taken))
        metrics["skipped_steps"] = float(self.state.skipped_steps - before.skipped_steps)
        if config.early_stop_kl is not None:
            metrics["early_stopped"] = float(stopped)
            metrics["optimizer_steps"] = float(self.state.optimizer_step - before.optimizer_step)
        if config.objective == "penalty":
            for name in [name for name in metrics if name in CLIP_METRICS]:
                del metrics[name]  # nothing is clipped
            metrics["policy_kl_coef"] = self.policy_kl.coef
            if not self._warming_up:
                self.policy_kl.update(policy_kl, len(experience))
                self.state.policy_kl_coef = self.policy_kl.coef
        return metrics

    @property
    def _warming_up(self) -> bool:
        """Whether this iteration trains the value function alone."""
        return self.state.iteration < self.config.value_warmup_iterations

    def _too_far(self, kl: float) -> bool:
        """Whether the KL to the rollout policy, nats per token, ends this iteration's update."""
        return self.now.early_stop_kl is not None and kl > self.now.early_stop_kl

    def _optimizer_step(self, minibatch: Experience, meter: Meter) -> tuple[float, bool]:
        """Accumulates the gradient of one minibatch over its microbatches and takes a step.

        Returns:
            (KL to the rollout policy before the step, nats per token; whether it was too far, and
            so no step was taken).
        """
        config = self.now
        warming_up = self._warming_up
        planned = self.state.iteration * config.steps_per_iteration + len(meter.steps)
        learning_rate = set_learning_rate(self.optimizer, planned, self.config)
        # The weights are those of the whole minibatch, so how it is split does not matter.
        minibatch.weights = token_weights(minibatch.sequences.response_lengths, config.aggregation)
        self.optimizer.zero_grad(set_to_none=True)
        loss, sums = torch.zeros((), device=self.device), None
        for micro in minibatch.split(config.microbatch_size):
            with autocast(self.device, self.autocast_dtype):
                hidden, values = self.model(micro.sequences, detach_values=warming_up)
                with torch.set_grad_enabled(not warming_up):
                    policy = self._policy_loss(hidden, micro)
                value = value_loss(
                    values,
                    micro.returns,
                    old_values=micro.values,
                    clip_ratio=config.value_clip,
                    weights=micro.weights,
                )
            part = config.vf_coef * value if warming_up else policy.loss + config.vf_coef * value
            part.backward()
            loss += part.detach()
            sums = policy.sums if sums is None else combine_sums(sums, policy.sums)
            meter.microbatch(policy.sums, value.detach())
        assert sums is not None
        if config.ptx_coef and not warming_up:
            ptx_loss = self._add_pretraining_gradient()
            loss += config.ptx_coef * ptx_loss
            meter.pretraining(ptx_loss)
        norms = self._clip_gradients()
        kl = sums[SUMS.index("approx_kl")] / sums[SUMS.index("tokens")].clamp(min=1)
        found = to_floats({**norms, "loss": loss, "kl": kl})
        meter.minibatch(
            **{name: found[name] for name in ("loss", *norms)}, learning_rate=learning_rate
        )
        if config.early_stop_check == "minibatch" and self._too_far(found["kl"]):
            return found["kl"], True
        if all(math.isfinite(found[name]) for name in ("loss", *norms)):
            self.optimizer.step()
            self.state.skipped_in_a_row = 0
        else:
            self._skip_step(minibatch, found)
        self.state.optimizer_step += 1
        return found["kl"], False

    def _policy_loss(self, hidden: Tensor, micro: Experience) -> PPOLoss:
        """The policy's loss from the hidden states that predict the response tokens."""
        config, head = self.now, self.model.head
        options: dict[str, Any] = {
            "clip_ratio": config.clip_range,
            "dual_clip": config.dual_clip,
            "ref_logprobs": micro.ref_logprobs,
            "kl_coef": config.kl_loss_coef,
            "kl_estimator": config.kl_loss_estimator,
            "entropy_coef": config.entropy_coef,
            "temperature": config.temperature,
            "weights": micro.weights,
            "logit_scale": head.logit_scale,
            "softcap": head.softcap,
            "backend": config.backend,
        }
        if config.objective == "penalty":
            return self._penalty_loss(hidden, micro, options)
        exact = bool(config.kl_loss_coef) and config.kl_loss_estimator == "full"
        with self.reference() if exact else contextlib.nullcontext() as reference:
            ref_hidden, ref_head = None, None
            if exact:
                assert reference is not None
                with torch.no_grad():
                    positions = micro.sequences.predicting_positions
                    ref_hidden = reference.hidden(micro.sequences, positions)
                ref_head = reference.head
            return self._loss_by_path(
                hidden, ref_hidden, ref_head, micro, micro.advantages, options
            )

    def _penalty_loss(self, hidden: Tensor, micro: Experience, options: dict[str, Any]) -> PPOLoss:
        """PPO-Penalty, −r·A + β(r − 1 − log r): Schulman et al. 2017, eq. 8, with KL(old, new) by
        its estimator on the rollout's tokens.

        It is, but for the constant β, an unclipped loss with advantage A − β and −β times k1 to the
        rollout policy, so it goes the same way as the other objective.
        """
        beta = self.policy_kl.coef
        options |= {"clip_ratio": None, "ref_logprobs": micro.logprobs}
        options |= {"kl_coef": -beta, "kl_estimator": "k1"}
        out = self._loss_by_path(hidden, None, None, micro, micro.advantages - beta, options)
        assert micro.weights is not None
        ratio = (out.logprobs - micro.logprobs).exp()
        constant = beta * micro.weights.sum()
        sums = out.sums.clone()
        sums[SUMS.index("loss")] -= constant
        sums[SUMS.index("policy_loss")] -= beta * (micro.weights * ratio).sum()
        return out._replace(loss=out.loss - constant, sums=sums)

    def _loss_by_path(
        self,
        hidden: Tensor,
        ref_hidden: Tensor | None,
        ref_head: Head | None,
        micro: Experience,
        advantages: Tensor,
        options: dict[str, Any],
    ) -> PPOLoss:
        """The loss from hidden states, or from all logits if the config asks for that."""
        head, tokens = self.model.head, micro.sequences.response_tokens
        if self.now.loss_path == "logits":
            if ref_head is not None and ref_hidden is not None:
                options["ref_logits"] = ref_head.logits(ref_hidden)
            # Nobody else reads these logits: their memory can hold the gradient.
            return ppo_loss(
                head.logits(hidden), tokens, micro.logprobs, advantages, inplace=True, **options
            )
        if ref_head is not None:
            options |= {"ref_hidden": ref_hidden, "ref_weight": ref_head.weight}
            options["ref_bias"] = ref_head.bias
        return linear_ppo_loss(
            hidden, head.weight, tokens, micro.logprobs, advantages, bias=head.bias, **options
        )

    def _add_pretraining_gradient(self) -> Tensor:
        """PPO-ptx: adds γ times the language-model loss's gradient; returns that loss, 0-d."""
        assert self.pretraining is not None
        config = self.now
        blocks = self.pretraining.at(self.state.ptx_seen, config.ptx_batch_size, config.seed)
        self.state.ptx_seen += len(blocks)
        total = torch.zeros((), device=self.device)
        for part in blocks.to(self.device).split(config.microbatch_size):
            with autocast(self.device, self.autocast_dtype):
                loss = self.model.language_model_loss(part, config.backend)
                loss = loss * (len(part) / len(blocks))
            (config.ptx_coef * loss).backward()
            total += loss.detach()
        return total

    def _clip_gradients(self) -> dict[str, Tensor]:
        """Scales gradients down to `max_grad_norm`; the norms before. A critic has its own."""
        groups = self.optimizer.param_groups
        parameters = [p for group in groups for p in group["params"]]
        clipped = {"grad_norm": parameters}
        if self.config.value_model == "critic":
            own = {id(p) for p in self.model.value_function.parameters()}
            clipped = {
                "grad_norm": [p for p in parameters if id(p) not in own],
                "value_grad_norm": [p for p in parameters if id(p) in own],
            }
        return {
            name: torch.nn.utils.clip_grad_norm_(group, self.config.max_grad_norm)
            for name, group in clipped.items()
        }

    # ------------------------------------------------------------------------------------- phases

    @torch.no_grad()
    def _evaluate(self, sequences: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        """(logprobs [N], values [N], values behind the last token [B]) of the policy."""
        with autocast(self.device, self.autocast_dtype):
            row, column = sequences.predicting_positions
            final_row, final_column = sequences.final_positions
            both = torch.cat([row, final_row]), torch.cat([column, final_column])
            hidden, values = self.model(sequences, both)
            logprobs, _ = self.model.token_stats(
                hidden[: len(row)], sequences, self.config.temperature, self.config.backend
            )
        return logprobs, values[: len(row)], values[len(row) :]

    @torch.no_grad()
    def _reference_pass(
        self, microbatches: Sequence[Sequences], exact: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        """([N] logprobs of the reference or None, [N] exact KL to it or None), nats."""
        if self._reference is None:
            return None, None
        logprobs, kl = [], []
        with autocast(self.device, self.autocast_dtype):
            # Before the reference takes the trunk's place: with LoRA they are one model.
            own = (
                [self.model.hidden(p, p.predicting_positions) for p in microbatches]
                if exact
                else []
            )
            with self.reference() as reference:
                assert reference is not None
                for i, part in enumerate(microbatches):
                    hidden = reference.hidden(part, part.predicting_positions)
                    part_logprobs, _ = reference.token_stats(
                        hidden, part, self.config.temperature, self.config.backend
                    )
                    logprobs.append(part_logprobs)
                    if exact:
                        kl.append(self._exact_kl(own[i], hidden, reference.head, part))
        return torch.cat(logprobs), torch.cat(kl) if exact else None

    def _exact_kl(
        self, hidden: Tensor, ref_hidden: Tensor, ref_head: Head, sequences: Sequences
    ) -> Tensor:
        """[N] fp32, nats: Σ_j p_j (log p_j − log q_j) of policy and reference at each token."""
        head = self.model.head
        unused = torch.zeros(len(hidden), device=hidden.device)
        return linear_ppo_loss(
            hidden,
            head.weight,
            sequences.response_tokens,
            unused,
            unused,
            bias=head.bias,
            kl_coef=1.0,
            kl_estimator="full",
            ref_hidden=ref_hidden,
            ref_weight=ref_head.weight,
            ref_bias=ref_head.bias,
            temperature=self.config.temperature,
            logit_scale=head.logit_scale,
            softcap=head.softcap,
            backend=self.config.backend,
        ).kl

    @contextlib.contextmanager
    def reference(self) -> Iterator[LanguageModel | None]:
        """The reference policy, or None where no KL needs one."""
        if self._reference is None:
            yield None
        else:
            with self._reference.loaded() as model:
                yield model

    def evaluate(self, prompts: Prompts, sampling: Sampling | None = None) -> dict[str, Any]:
        """Samples and scores responses to `prompts` without learning from them.

        Returns:
            dict: reward, each reward term and monitor, kl (nats per sequence), entropy (nats per
            token), response_length, eos_rate: means; `completions`, the texts; `scores`.
        """
        with _random_state_kept(self.device):
            torch.manual_seed(self.config.seed)
            rollout = self.engine.generate(prompts.token_ids, sampling or self.sampling)
        scores = self.score(prompts, rollout)
        sequences = Sequences.pack(
            prompts.token_ids, rollout.tokens, self.pad_token_id, self.device
        )
        entropy, kl = 0.0, 0.0
        for part in sequences.split(self.config.microbatch_size):
            with torch.no_grad(), autocast(self.device, self.autocast_dtype):
                hidden = self.model.hidden(part, part.predicting_positions)
                logprobs, part_entropy = self.model.token_stats(
                    hidden, part, self.config.temperature, self.config.backend
                )
            entropy += part_entropy.sum().item()
            ref_logprobs, _ = self._reference_pass([part])
            if ref_logprobs is not None:
                kl += sampled_kl(logprobs, ref_logprobs).sum().item()
        tokens = int(sequences.response_lengths.sum())
        return {
            **score_metrics(scores, rollout),
            "kl": kl / len(sequences),
            "entropy": entropy / max(tokens, 1),
            "response_length": tokens / len(sequences),
            "completions": self.completions(prompts, rollout),
            "scores": scores,
        }

    def self_check(self, prompts: Prompts) -> None:
        """Before the first step: the sampler's logprobs are the learner's, and KL to a fresh
        reference is 0. Otherwise the ratio of the first update would not be 1.

        Raises:
            RuntimeError: says which of the two fails, and by how much.
        """
        with _random_state_kept(self.device):
            few = prompts.select(range(min(4, len(prompts))))
            sampling = Sampling(
                max_new_tokens=min(8, self.sampling.max_new_tokens),
                temperature=self.sampling.temperature,
                top_k=self.sampling.top_k,
                top_p=self.sampling.top_p,
                stop_token_ids=self.sampling.stop_token_ids,
            )
            rollout = self.engine.generate(few.token_ids, sampling)
        sequences = Sequences.pack(few.token_ids, rollout.tokens, self.pad_token_id, self.device)
        logprobs, _, _ = self._evaluate(sequences)
        sampled = torch.cat(rollout.logprobs).to(self.device)
        # Sampler and learner run the same weights with other paddings, so they agree to the
        # rounding of the compute dtype summed over the layers: 2⁻²³ or 2⁻⁸ a step.
        full = self.autocast_dtype is None and self.config.param_dtype == "float32"
        tolerance = 1e-3 if full else 0.1
        self._compare("the sampler's logprobs", sampled, logprobs, tolerance)
        ref_logprobs, _ = self._reference_pass([sequences])
        if ref_logprobs is not None and self._reference is not None:
            fresh = self.state.optimizer_step == 0 and not self._reference.is_given
            if fresh:
                self._compare("the fresh reference's logprobs", ref_logprobs, logprobs, tolerance)

    def _compare(self, what: str, theirs: Tensor, ours: Tensor, tolerance: float) -> None:
        worst = (theirs - ours).abs().max().item() if ours.numel() else 0.0
        if not worst <= tolerance:
            raise RuntimeError(
                f"self-check: {what} differ from the policy's by up to {worst:.3g} nats (tolerance "
                f"{tolerance:g}), so the first update would not be on-policy. Look for dropout, "
                f"position ids under padding, a logit transform, or another model as the reference."
            )

    # ------------------------------------------------------------------------- saving and resuming

    def save_checkpoint(self) -> Path:
        """Writes a checkpoint of the run as it is now."""
        self._last_saved = self.state.iteration
        return checkpoint.save(
            self.config.output_dir,
            self.state.iteration,
            self.model,
            self.optimizer,
            asdict(self.state),
            reference=self._reference.state() if self._reference is not None else {},
            keep=self.config.checkpoint_limit,
        )

    def save_policy(self, directory: str | Path) -> None:
        """Writes the policy, its tokenizer and generation config; the value function beside it."""
        directory = Path(directory)
        self.model.save_policy(directory)
        self.tokenizer.save_pretrained(directory)
        self.model.save_value_function(directory.parent / "value_function.safetensors")

    def _resume(self, run_dir: Path) -> None:
        found = checkpoint.checkpoints(run_dir)
        if not found:
            self.console.print(f"no checkpoint in {run_dir}: starting from the beginning")
            return
        state, reference = checkpoint.load(found[-1], self.model, self.optimizer)
        self.state = RunState(**state)
        if self._reference is not None:
            self._reference.load_state(reference)
        if self.config.kl_controller == "fixed":
            self.state.kl_coef = self.config.kl_coef
        self.kl_controller.coef = self.state.kl_coef
        self.policy_kl.coef = self.state.policy_kl_coef
        self.score_scale = RunningScale(**self.state.score_scale)  # type: ignore[arg-type]
        self._loss_spikes = SpikeDetector(self.state.loss_history)
        self._last_saved = self.state.iteration
        self.console.print(f"resuming from {found[-1]}")

    # --------------------------------------------------------------------------------------- parts

    def _skip_step(self, minibatch: Experience, found: dict[str, float]) -> None:
        self.state.skipped_steps += 1
        self.state.skipped_in_a_row += 1
        wrong = [name for name, value in found.items() if not math.isfinite(value)]
        saved = save_batch(
            Path(self.config.output_dir)
            / "skipped"
            / f"step-{self.state.optimizer_step:06d}.safetensors",
            minibatch.tensors(),
            iteration=self.state.iteration,
            step=self.state.optimizer_step,
            non_finite="loss" if "loss" in wrong else "grad_norm",
            parameters=non_finite_gradients(self.model),
        )
        self.console.print(
            f"[yellow]optimiser step {self.state.optimizer_step}: "
            f"{', '.join(f'{name} {found[name]}' for name in wrong)}; skipped, batch in {saved}"
        )
        if self.state.skipped_in_a_row >= self.config.max_skipped_steps:
            raise FloatingPointError(
                f"{self.state.skipped_in_a_row} optimiser steps in a row had a non-finite loss or "
                f"gradient; lower the learning rate, or look for inf in the rewards or logits"
            )

    def _begin_iteration(self) -> None:
        """This iteration's options and reference."""
        iteration = self.state.iteration
        self.now = self.config.at(iteration)
        if self.now.kl_coef != self.config.kl_coef:  # it has a schedule
            self.state.kl_coef = self.now.kl_coef
        if iteration and iteration == self.config.value_warmup_iterations:
            self._loss_spikes = SpikeDetector()  # from here on it is another loss
        interval = self.config.reference_refresh
        if self._reference is not None and interval and iteration and iteration % interval == 0:
            self._reference.refresh()

    def _finish_iteration(self, metrics: dict[str, float], sequences: int) -> None:
        self.state.loss_history = self._loss_spikes.history
        if "kl" in metrics and self.config.kl_controller != "fixed" and not self._warming_up:
            self.kl_controller.update(metrics["kl"], sequences)
            self.state.kl_coef = self.kl_controller.coef
        self.state.iteration += 1

    def _warnings(self, metrics: dict[str, float]) -> list[str]:
        """Adds the KL's slope to the metrics; says which thresholds they cross."""
        if "kl" in metrics:
            self.state.kl_history = [*self.state.kl_history, metrics["kl"]][-SLOPE_WINDOW:]
            rise = slope(self.state.kl_history)
            if rise is not None:
                metrics["kl_slope"] = rise
        self._stopped_by = crossed(self.stop_if, metrics)
        warnings = crossed(self.warn_if, metrics) + self._absent_metrics(metrics)
        for sentence in warnings:
            self.console.print(f"[yellow]iteration {self.state.iteration}: {sentence}")
        return warnings + [f"stopped: {sentence}" for sentence in self._stopped_by]

    def _truncated(self, finish_reasons: Sequence[str]) -> Tensor:
        return torch.tensor(
            [float(reason == TRUNCATED) for reason in finish_reasons], device=self.device
        )

    def _token_ids(self, text: str | Sequence[int], special_tokens: bool = True) -> list[int]:
        if isinstance(text, str):
            return self.tokenizer(text, add_special_tokens=special_tokens)["input_ids"]
        return list(text)

    def _check_responses(self, prompts: list[list[int]], responses: list[list[int]]) -> None:
        if not prompts or len(prompts) != len(responses):
            raise ValueError(
                f"want as many responses as prompts, at least one: got {len(prompts)} prompts and "
                f"{len(responses)} responses"
            )
        vocabulary, context = self.model.head.weight.shape[0], self.context
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            if not response:
                raise ValueError(f"response {row} is empty")
            if context is not None and len(prompt) + len(response) > context:
                raise ValueError(
                    f"prompt and response {row} have {len(prompt) + len(response)} tokens; the "
                    f"model's context has {context}"
                )
            if prompt and not 0 <= min(*prompt, *response) <= max(*prompt, *response) < vocabulary:
                raise ValueError(f"prompt or response {row} has tokens outside [0, {vocabulary})")

    def _samples(
        self, prompts: Prompts, rollout: Rollout, scores: Scores, experience: Experience
    ) -> list[dict[str, Any]]:
        count = min(self.config.log_samples, len(prompts))
        texts = self.completions(prompts, rollout)
        token_kl = None
        if experience.ref_logprobs is not None:
            difference = sampled_kl(experience.logprobs, experience.ref_logprobs)
            token_kl = difference.split(experience.sequences.response_lengths.tolist())
        return [
            {
                "prompt": prompts.prompts[i],
                "completion": texts[i],
                "reward": scores.total[i].item(),
                "rewards": {name: values[i] for name, values in scores.terms.items()},
                "monitors": {name: values[i] for name, values in scores.monitors.items()},
                "kl": None if token_kl is None else token_kl[i].sum().item(),
                "tokens": len(rollout.tokens[i]),
                "finish_reason": rollout.finish_reasons[i],
            }
            for i in range(count)
        ]

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Any]:
        """A progress bar over the iterations, with the numbers that people watch."""
        columns = (
            TextColumn("PPO"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task(
                "ppo",
                total=self.config.iterations,
                completed=self.state.iteration,
                status="starting",
            )

            def advance(metrics: dict[str, float]) -> None:
                shown = [f"reward {metrics['reward']:.3f}"]
                shown += [f"KL {metrics['kl']:.2f}"] if "kl" in metrics else []
                shown += [f"entropy {metrics['entropy']:.2f}"]
                progress.update(task, advance=1, status="  ".join(shown))

            yield advance


# ------------------------------------------------------------------------------------------ helpers


def token_weights(lengths: Tensor, aggregation: str) -> Tensor:
    """[N] fp32 weights of packed response tokens, from their sequences' lengths [B]."""
    longest = int(lengths.max()) if lengths.numel() else 0
    mask = torch.arange(longest, device=lengths.device) < lengths.unsqueeze(1)
    return aggregation_weights(mask, aggregation)[mask]


def score_metrics(scores: Scores, rollout: Rollout) -> dict[str, float]:
    """Means of the rewards over a batch, and the share of responses that ended by themselves."""
    stopped = sum(reason != TRUNCATED for reason in rollout.finish_reasons)
    metrics = {
        "reward": scores.total.mean().item(),
        "reward_std": scores.total.std(correction=0).item(),
        "eos_rate": stopped / max(1, len(rollout.finish_reasons)),
    }
    for name, values in scores.terms.items():
        metrics[f"reward/{name}"] = sum(values) / len(values)
        if values.disagreement is not None:
            disagreement = sum(values.disagreement) / len(values)
            metrics["ensemble_disagreement"] = disagreement
    for name, values in scores.monitors.items():
        metrics[f"monitor/{name}"] = sum(values) / len(values)
    return metrics


@contextlib.contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    """Random draws inside leave no trace outside."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
