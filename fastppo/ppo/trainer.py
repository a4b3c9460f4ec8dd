"""`PPOTrainer`: PPO for a model, prompts and rewards.

The algorithm is in `fastppo.ppo.algorithm`. This class builds its parts from the options and what
is passed in. `train()` runs the iterations, with records and checkpoints around them
(`fastppo.ppo.training_run`). `step()` updates on responses generated and scored elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from fastppo.data.datasets import Rows
from fastppo.data.prompts import Prompts
from fastppo.data.world import World
from fastppo.ppo.algorithm import PPO
from fastppo.ppo.checkpoints import Checkpoints
from fastppo.ppo.evaluation import Evaluation, evaluate_policy
from fastppo.ppo.given_responses import TokenRows, given_responses
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.out_of_memory import explain_out_of_memory
from fastppo.ppo.reporter import Reporter
from fastppo.ppo.setup.build import build, world_of
from fastppo.ppo.setup.checks import check_can_train
from fastppo.ppo.setup.preflight import Given
from fastppo.ppo.training_run import TrainingRun
from fastppo.rewards.reward import Reward
from fastppo.rewards.scorer import Scorer
from fastppo.rollout import RolloutEngine, Sampling
from fastppo.run.callbacks import Callbacks
from fastppo.run.progress import console_of_first, show_messages
from fastppo.run.watch import rollout_health


class PPOTrainer(PPO):
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
        config = given.named_in(config)
        world = world_of(config, world)
        reporter = Reporter(console_of_first(world, console))
        show_messages(reporter.console)
        with explain_out_of_memory("loading", config):
            parts = build(config, given, world=world)
        reporter.notes += parts.notes
        super().__init__(config, parts, reporter)
        self.callbacks = Callbacks(
            callbacks,
            config,
            world=world,
            model=self.model.causal_lm,
            processing_class=parts.tokenizer,
            optimizer=self.optimizer,
        )
        self.checkpoints = Checkpoints(self, saved=self.callbacks.saved)
        self.evaluation = Evaluation(self, parts.held_out)

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
        return TrainingRun(self, self.evaluation, self.checkpoints, self.callbacks).run()

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
        episodes: Sequence[int] | None = None,
    ) -> dict[str, float]:
        """Make one PPO update on given responses, and return its metrics.

        Args:
            prompts, responses: texts or token ids; prompts may be chat messages.
            scores: [B], or one per episode. They are normalized and clipped as configured; no
                length or EOS penalty applies.
            finish_reasons: `stop` or `length`. The default is `stop` if the last token is a stop
                token.
            masks: per token, True if the policy generated it. The model reads the other tokens,
                such as a tool's output, but does not learn from them.
            token_rewards: per token, a reward in addition to the score, scaled like it. A reward at
                a token outside the mask moves to the last token before it inside the mask.
            old_logprobs: per token, the logprob under the policy that generated it, nats of
                softmax(z/T). The default is the current model's.
            values: per token, the value of the state before it. The default is the current model's.
            episodes: [B], the episode of each row, for agents with several conversations per
                episode. The rows of an episode are adjacent and weigh as one sequence; each ends
                with the episode's score. By default every row is an episode.

        Raises:
            ValueError: lengths disagree; a prompt or response is empty, too long for the context
                or outside the vocabulary; a prompt has images; a number is not finite; a mask is
                not bool or has no True; without masks, tokens follow a stop token, as padding does.
            RunStoppedError: a metric crossed a threshold of `stop_if`, after the update.
        """
        given = given_responses(
            prompts,
            responses,
            scores,
            finish_reasons=finish_reasons,
            tokenizer=self.tokenizer,
            stop_token_ids=self.parts.sampling.stop_token_ids,
            vocabulary=self.model.head.vocabulary,
            context=self.parts.context,
            masks=masks,
            token_rewards=token_rewards,
            old_logprobs=old_logprobs,
            values=values,
            episodes=episodes,
        )
        coefficients = self.begin_iteration()
        experience, metrics = self.make_experience(
            given.prompt_ids, given.rollout, given.scores, coefficients, given=given.policy
        )
        with self.engine_released():
            metrics |= self.update(experience, coefficients)
        self.state.coefficient_control.update(metrics, len(experience), experience.trained)
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
        return evaluate_policy(self, prompts, sampling or self.parts.sampling, scorer)

    def save_checkpoint(self) -> Path:
        """Write a checkpoint and return its path."""
        return self.checkpoints.save()

    def save_policy(self, directory: str | Path) -> None:
        """Write the policy with its tokenizer and generation config, and the value function."""
        self.checkpoints.save_policy(self.tokenizer, Path(directory))
