"""Builds the parts of a PPO run from its options: models, data, rewards, and the checks that they
fit one another.

`build` goes from what is cheap to refuse (types, rows, rewards) to what takes minutes to load. The
trainer, which has the algorithm, gets the parts as `RunComponents`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, set_seed

from fastppo.data import fingerprint
from fastppo.data.prompts import Prompts, encode_prompts
from fastppo.data.rows import Rows, load_rows
from fastppo.data.text import PretrainingText
from fastppo.data.world import World, join
from fastppo.environments.agents import Agent
from fastppo.environments.loading import load_environment
from fastppo.environments.turns import OneTurn, Turns
from fastppo.functional.scalars import describe
from fastppo.models.device import choose_device
from fastppo.models.kinds import check_block_size, check_room, check_stop_tokens
from fastppo.models.packing import choose_packing
from fastppo.models.policy import ActorCritic, LanguageModel
from fastppo.models.pretrained import (
    check_vocabulary,
    load_tokenizer,
    pad_token_id,
    stop_token_ids,
)
from fastppo.models.reference_policy import ReferencePolicy, frozen_copy
from fastppo.models.sharding import shard
from fastppo.ppo.curriculum import Curriculum
from fastppo.ppo.evaluation import Evaluation
from fastppo.ppo.optimizer import make_optimizer
from fastppo.ppo.options.config import ASYNC_NEEDS_ONE_TURN, PPOConfig
from fastppo.ppo.setup.preflight import (
    PromptRows,
    check_curriculum,
    check_encoding,
    check_terms,
    read_rows,
    try_terms,
)
from fastppo.ppo.setup.processes import check_processes
from fastppo.ppo.setup.run_models import ModelLoader, make_policy, make_reference, shortest_context
from fastppo.rewards.calling import CallOptions
from fastppo.rewards.ensemble import RewardEnsemble
from fastppo.rewards.loading import make_terms
from fastppo.rewards.reward import Reward, RewardTerm
from fastppo.rewards.scorer import Scorer
from fastppo.rollout import RolloutEngine, Sampling, as_engine
from fastppo.rollout.async_engine import AsyncEngine, CopyEngine
from fastppo.rollout.engines import make_engine
from fastppo.rollout.server import ServerEngine
from fastppo.rollout.sharing import SharedEngine
from fastppo.rollout.stopping import StopStrings
from fastppo.rollout.vllm import VLLMEngine


@dataclass(frozen=True, slots=True, eq=False)
class RunComponents:
    """The parts of a run; none is replaced while it goes on."""

    device: torch.device
    tokenizer: Any
    model: ActorCritic
    reference: ReferencePolicy | None
    """None where no KL needs a model."""
    optimizer: Any
    """A `fastppo.ppo.optimizer.Optimizer`."""
    engine: RolloutEngine
    sampling: Sampling
    episode_runner: OneTurn | Turns
    """Draws the responses: one turn each, or the turns of an environment."""
    prompts: Prompts | None
    curriculum: Curriculum
    pretraining: PretrainingText | None
    scorer: Scorer
    evaluation: Evaluation
    context: int | None
    """The longest sequence, tokens: the shortest context of policy, reference and critic."""
    fingerprints: dict[str, str]
    """Fingerprints of what a checkpoint does not hold, by name: models, data, rewards."""
    notes: list[str]
    """Sentences for the user where another engine or layout is used than the options name."""


def world_of(config: PPOConfig, world: World | None = None) -> World:
    """The processes of the run: `world` if it is given, else those that torchrun started.

    Raises:
        ValueError: they do not fit.
        TypeError: config or world is something else.
    """
    if not isinstance(config, PPOConfig):
        raise TypeError(f"config must be a PPOConfig, got {describe(config)}")
    if world is not None:
        if not isinstance(world, World):
            raise TypeError(f"world must be a World, got {describe(world)}")
        return world
    world = join(choose_device(config.device), shard_size=config.shard_size)
    check_processes(config, world.size)
    return world


def build(
    config: PPOConfig,
    *,
    model: PreTrainedModel | None = None,
    tokenizer: Any = None,
    prompts: Rows | None = None,
    rewards: Sequence[str | Reward] | None = None,
    monitor_rewards: Sequence[str | Reward] | None = None,
    reference: PreTrainedModel | None = None,
    environment: Callable[[], Any] | None = None,
    engine: Any = None,
    say: Callable[[str], None] = print,
    world: World | None = None,
) -> RunComponents:
    """The parts that the config names, or those that are passed in instead; see `PPOTrainer`.

    Args:
        say: takes a sentence for the user.
        world: the processes; the models are sharded over them after all checks.

    Raises:
        ValueError: they do not fit: a tokenizer larger than the vocabulary, a prompt longer than
            the context, a model whose logits FastPPO does not know how to form.
    """
    check_handed_over(config, model, tokenizer)
    check_types(
        modules={"model": model, "reference": reference},
        tokenizer=tokenizer,
        prompts=prompts,
        rewards={"rewards": rewards, "monitor_rewards": monitor_rewards},
        environment=environment,
    )
    set_seed(config.seed)
    world = world or World()
    device = world.device or choose_device(config.device)
    rows = read_rows(config, prompts)
    reward_terms = load_rewards(
        config,
        rewards=rewards,
        monitor_rewards=monitor_rewards,
        environment=environment,
        device=device,
    )
    check_terms(config, reward_terms.all, reward_terms.environment, rows)
    if model is None and tokenizer is None:
        check_encoding(config, rows)
    check_curriculum(config, rows)
    check_port(reward_terms.environment, world)
    call_options = CallOptions(config.reward_timeout, say)
    failure_file = Path(config.output_dir) / "failed_reward.json"
    world.on_main_rank(
        lambda: try_terms(config, reward_terms.all, rows, call_options, failure_file)
    )
    set_seed(config.seed)  # users' code may have drawn
    tokenizer = tokenizer or load_tokenizer(config.model)
    models = load_models(
        config, model=model, reference=reference, tokenizer=tokenizer, device=device
    )
    policy = models.policy
    # Sets policy.packing.
    packing_note = choose_packing(config.packing, policy, models.frozen_reference)
    chosen_engine, engine_note = choose_engine(
        config, engine, policy=policy, tokenizer=tokenizer, world=world, say=say
    )
    data = load_data(config, rows, tokenizer, models)
    curriculum = Curriculum(data.prompts or Prompts([], []), config, say=say, world=world)
    if world.size > 1:
        models.shard(world)
        chosen_engine = SharedEngine(chosen_engine, policy, world)
    scorer = Scorer(
        terms=reward_terms.trained,
        monitors=reward_terms.monitored,
        tokenizer=tokenizer,
        failure_file=failure_file,
        options=call_options,
        world=world,
    )
    episode_runner = make_episode_runner(
        config,
        reward_terms.environment,
        tokenizer,
        context=models.context,
        call_options=call_options,
        world=world,
    )
    set_seed(config.seed)  # what was drawn so far depends on the number of ranks
    return RunComponents(
        device=device,
        tokenizer=tokenizer,
        model=policy,
        reference=models.reference,
        optimizer=make_optimizer(policy, config),
        engine=chosen_engine,
        sampling=make_sampling(config, tokenizer, models.stop_token_ids),
        prompts=data.prompts,
        curriculum=curriculum,
        pretraining=data.pretraining,
        scorer=scorer,
        evaluation=Evaluation(
            data.held_out,
            scorer,
            interval=config.eval_interval,
            modes=config.eval_sampling,
            batch_size=config.rollout_batch_size,
        ),
        episode_runner=episode_runner,
        context=models.context,
        fingerprints={
            **models.fingerprints,
            **reward_terms.fingerprints,
            **data.fingerprints,
            **curriculum.fingerprints,
        },
        notes=[note for note in (packing_note, engine_note) if note],
    )


def check_handed_over(config: PPOConfig, model: PreTrainedModel | None, tokenizer: Any) -> None:
    """Raises ValueError where neither config nor caller gives a model and its tokenizer."""
    if model is None and not config.model:
        raise ValueError("model must be a directory or hub name, got nothing")
    if tokenizer is None and not config.model:
        raise ValueError("a model that is passed in needs its tokenizer passed in too")
    if model is not None and config.quantization != "none":
        raise ValueError(
            f"quantization={config.quantization}: a model that is passed in is not quantized"
        )


def check_types(
    *,
    modules: Mapping[str, Any],
    tokenizer: Any,
    prompts: Any,
    rewards: Mapping[str, Any],
    environment: Any,
) -> None:
    """Raises TypeError where an argument of `PPOTrainer` is of another type.

    Args:
        modules: model and reference by name.
        rewards: lists of rewards by name.
    """
    for name, module in modules.items():
        if module is not None and not (isinstance(module, nn.Module) and hasattr(module, "config")):
            raise TypeError(f"{name} must be a model of transformers, got {describe(module)}")
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise TypeError(f"tokenizer must be one of transformers, got {describe(tokenizer)}")
    if prompts is not None and not (
        _is_list(prompts) and all(isinstance(x, dict) for x in prompts)
    ):
        raise TypeError(f"prompts must be a list of rows, dicts each, got {describe(prompts)}")
    for name, listed in rewards.items():
        if listed is None:
            continue
        if not _is_list(listed) or not all(isinstance(x, str) or callable(x) for x in listed):
            raise TypeError(f"{name} must be a list of functions and names, got {describe(listed)}")
    if environment is not None and not (isinstance(environment, str) or callable(environment)):
        raise TypeError(f"environment must be a class or a name, got {describe(environment)}")


def _is_list(value: Any) -> bool:
    """Whether it is a list, a tuple or a `Dataset`."""
    is_sequence = isinstance(value, Sequence) or hasattr(value, "column_names")
    return is_sequence and not isinstance(value, str)


# -------------------------------------------------------------------------------------- the models


@dataclass(frozen=True, slots=True, eq=False)
class Models:
    """Policy and reference, with what is known of them."""

    policy: ActorCritic
    reference: ReferencePolicy | None
    stop_token_ids: tuple[int, ...]
    fingerprints: dict[str, str]
    """Fingerprints of the weights that the run starts from, by option."""

    @property
    def context(self) -> int | None:
        """The shortest context of policy, reference and critic, tokens; None if no config says."""
        return shortest_context(self.policy, self.reference)

    @property
    def frozen_reference(self) -> LanguageModel | None:
        """The reference's own model, where it has one."""
        return None if self.reference is None else self.reference.frozen

    def shard(self, world: World) -> None:
        """Shards both over the ranks."""
        for model in (self.policy, self.frozen_reference):
            if model is not None:
                shard(model, world)


def load_models(
    config: PPOConfig,
    *,
    model: PreTrainedModel | None,
    reference: PreTrainedModel | None,
    tokenizer: Any,
    device: torch.device,
) -> Models:
    """Policy, value function and reference, with their weights.

    Args:
        model, reference: models that were handed over, in place of those that the config names.

    Raises:
        ValueError: they cannot be loaded, or do not fit one another or the tokenizer.
    """
    loader = ModelLoader(config, device)
    causal_lm = model or loader.causal_lm(config.model, "model")
    causal_lm = causal_lm.to(device)  # type: ignore[arg-type]
    # Before `make_policy` puts adapters on it.
    model_fingerprint = fingerprint.of_model(causal_lm)
    stop_tokens = stop_token_ids(config.stop_token_ids, tokenizer, causal_lm)
    policy = make_policy(causal_lm, tokenizer, config, loader)
    check_tokens(policy, tokenizer, stop_tokens)
    ref_policy = make_reference(policy, tokenizer, config, loader, model=reference)
    fingerprints = {"model": model_fingerprint, "tokenizer": fingerprint.of_tokenizer(tokenizer)}
    if ref_policy is not None:
        fingerprints["reference_model"] = model_fingerprint
        if ref_policy.is_given and ref_policy.frozen is not None:
            fingerprints["reference_model"] = fingerprint.of_model(ref_policy.frozen.causal_lm)
    return Models(
        policy=policy,
        reference=ref_policy,
        stop_token_ids=stop_tokens,
        fingerprints=fingerprints,
    )


def check_tokens(policy: ActorCritic, tokenizer: Any, stop: Sequence[int]) -> None:
    """Raises ValueError if the tokenizer or the stop tokens reach beyond the model's vocabulary."""
    check_stop_tokens(stop, policy.head.vocabulary)
    check_vocabulary(tokenizer, policy.head.vocabulary)


def choose_engine(
    config: PPOConfig,
    engine: Any,
    *,
    policy: ActorCritic,
    tokenizer: Any,
    world: World,
    say: Callable[[str], None] = print,
) -> tuple[RolloutEngine, str | None]:
    """The rollout engine, and a sentence where it is not the one that the config names.

    Args:
        engine: one that was handed over.
        say: takes a sentence for the user.

    Raises:
        ValueError: `async_steps` with an engine that cannot draw beside an update.
    """
    note = None
    if engine is not None:
        chosen = as_engine(engine)
    elif config.rollout == "vllm":
        chosen = VLLMEngine(
            policy,
            tokenizer,
            batch_size=config.generate_batch_size,
            gpu_memory_utilization=config.vllm_gpu_memory_utilization,
            tensor_parallel_size=config.vllm_tensor_parallel_size,
            world=world,
        )
    elif config.rollout == "server":
        chosen = ServerEngine(
            config.rollout_urls,
            policy,
            Path(config.output_dir) / "rollout_weights",
            batch_size=config.generate_batch_size,
            say=say,
        )
    else:
        decoded = frozen_copy(policy) if config.async_steps else policy
        chosen, note = make_engine(
            config.rollout,
            decoded,
            tokenizer,
            pad_token_id(tokenizer, policy.causal_lm),
            batch_size=config.generate_batch_size,
            final_values=config.bootstrap_truncated,
            # transformers compiles the model, and FSDP gathers weights at other addresses.
            static_cache=policy.device.type == "cuda" and world.size == 1,
        )
        if config.async_steps:
            chosen = CopyEngine(chosen, decoded)
    if config.async_steps:
        if not (chosen.holds_weights and chosen.draws_by_row):
            raise ValueError(
                "async_steps=1 needs an engine with weights of its own that draws by row: "
                f"{note or type(chosen).__name__}"
            )
        return AsyncEngine(chosen), note
    return chosen, note


def make_sampling(config: PPOConfig, tokenizer: Any, stop: tuple[int, ...]) -> Sampling:
    """How tokens are drawn; raises ValueError for stop strings that cannot be used."""
    return Sampling(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        stop_token_ids=stop,
        stop_strings=StopStrings(tokenizer, config.stop_strings).strings,
    )


# ---------------------------------------------------------------------------------------- the data


@dataclass(frozen=True, slots=True, eq=False)
class Data:
    """The prompts and texts of a run, encoded."""

    prompts: Prompts | None
    held_out: Prompts | None
    """The prompts of evaluations."""
    pretraining: PretrainingText | None
    """The text of PPO-ptx."""

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of what is trained on, by option."""
        fingerprints: dict[str, str] = {}
        if self.prompts is not None:
            fingerprints["prompts"] = self.prompts.fingerprint()
        if self.pretraining is not None:
            blocks = self.pretraining.blocks
            fingerprints["ptx_data"] = fingerprint.of_weights([("blocks", blocks)])
        return fingerprints


def load_data(config: PPOConfig, rows: PromptRows, tokenizer: Any, models: Models) -> Data:
    """Prompts, held-out prompts and pretraining text, encoded.

    Raises:
        ValueError: `max_new_tokens` leaves no room for a prompt in the context, or a block of text
            is longer than it.
        DataError: a prompt that cannot be used; see `encode_prompts`.
    """
    context = models.context
    return Data(
        prompts=encode(config, rows.prompts, tokenizer, context=context, source=config.prompts),
        held_out=encode(
            config, rows.held_out, tokenizer, context=context, source=config.eval_prompts
        ),
        pretraining=load_pretraining(config, tokenizer, models.policy.context),
    )


def encode(
    config: PPOConfig, rows: Rows | None, tokenizer: Any, *, context: int | None, source: str
) -> Prompts | None:
    """Rows as prompts; raises as `load_data` does."""
    if rows is None:
        return None
    return encode_prompts(
        rows,
        tokenizer,
        column=config.prompt_column,
        max_prompt_tokens=check_room(context, config.max_new_tokens),
        source=source or "prompts",
    )


def load_pretraining(
    config: PPOConfig, tokenizer: Any, context: int | None
) -> PretrainingText | None:
    """The text of PPO-ptx, or None; raises as `load_data` does."""
    if not config.ptx_data:
        return None
    check_block_size(config.ptx_block_size, context)
    rows = load_rows(config.ptx_data, config.split)
    return PretrainingText(rows, tokenizer, config.ptx_block_size, source=config.ptx_data)


# ------------------------------------------------------------------------------------- the rewards


@dataclass(frozen=True, slots=True, eq=False)
class RewardTerms:
    """The rewards of a run."""

    trained: list[RewardTerm]
    """With their weights, an ensemble last."""
    monitored: list[RewardTerm]
    environment: RewardTerm | None
    """Makes the environments of multi-turn responses."""

    @property
    def all(self) -> list[RewardTerm]:
        """Trained and monitored ones."""
        return [*self.trained, *self.monitored]

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of what is trained on, by option."""
        fingerprints = {f"rewards/{term.name}": term.fingerprint for term in self.trained}
        if self.environment is not None:
            fingerprints["environment"] = self.environment.fingerprint
        return fingerprints


def load_rewards(
    config: PPOConfig,
    *,
    rewards: Sequence[str | Reward] | None,
    monitor_rewards: Sequence[str | Reward] | None,
    environment: Callable[[], Any] | None,
    device: torch.device,
) -> RewardTerms:
    """Rewards, monitored rewards and the environment.

    Args:
        rewards, monitor_rewards, environment: what was handed over in place of the config's.

    Raises:
        ValueError: one is not there; options of turns without an environment.
    """
    timeout = config.reward_timeout
    rewards = rewards or config.rewards
    weights = config.reward_weights
    ensemble_weight = 1.0
    if config.reward_ensemble and weights is not None and len(weights) == len(rewards) + 1:
        ensemble_weight = weights[-1]
        weights = weights[:-1]
    trained = make_terms(rewards, weights, device=device, timeout=timeout)
    if config.reward_ensemble:
        if any(term.name == "ensemble" for term in trained):
            raise ValueError(
                "a reward is called 'ensemble', which is the name of reward_ensemble: rename it"
            )
        trained.append(load_ensemble(config, ensemble_weight, device))
    monitored = make_terms(
        monitor_rewards or config.monitor_rewards, device=device, timeout=timeout
    )
    environment_term = load_environment(environment or config.environment)
    config.have_effect_only("max_turns", where=environment_term, needs="environment")
    if environment_term is not None and config.async_steps:
        raise ValueError(ASYNC_NEEDS_ONE_TURN)
    return RewardTerms(trained=trained, monitored=monitored, environment=environment_term)


def check_port(environment: RewardTerm | None, world: World) -> None:
    """Raises ValueError for agents that several processes would serve at one port."""
    agent = None if environment is None else environment.function
    if isinstance(agent, Agent) and agent.server.port and world.size > 1:
        raise ValueError(
            f"{world.size} processes: each serves the agents of its own rows, so their port must "
            f"be one that is free, got port={agent.server.port}"
        )


def load_ensemble(config: PPOConfig, weight: float, device: torch.device) -> RewardTerm:
    """The models of `reward_ensemble` as one reward."""
    ensemble = RewardEnsemble(
        config.reward_ensemble,
        config.reward_ensemble_by,
        device=device,
        timeout=config.reward_timeout,
    )
    members = fingerprint.of_text(" ".join(term.fingerprint for term in ensemble.terms))
    return RewardTerm("ensemble", ensemble, weight, members)


def make_episode_runner(
    config: PPOConfig,
    environment: RewardTerm | None,
    tokenizer: Any,
    *,
    context: int | None,
    call_options: CallOptions,
    world: World,
) -> OneTurn | Turns:
    """Draws the responses: one turn each, or the turns of an environment."""
    if environment is None:
        return OneTurn()
    return Turns(
        environment.function,
        tokenizer,
        max_turns=config.max_turns,
        context=context,
        options=call_options,
        failure_file=Path(config.output_dir) / "failed_episode.json",
        world=world,
    )
