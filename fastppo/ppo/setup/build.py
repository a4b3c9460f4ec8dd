"""Build the parts of a PPO run from its options: `preflight` first, then the models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from fastppo.data import fingerprint
from fastppo.data.world import World, join
from fastppo.environments.async_turns import AsyncTurns
from fastppo.environments.failures import DropFailures, RaiseFailures
from fastppo.environments.turns import Turns
from fastppo.models.device import choose_device
from fastppo.models.images import ImageEncoder, NoImages
from fastppo.models.multimodal import different_frozen, share_frozen
from fastppo.models.packing import choose_packing, trunks_of
from fastppo.models.policy import ActorCritic, LanguageModel
from fastppo.models.pretrained import check_vocabulary, pad_token_id, stop_token_ids
from fastppo.models.reference_policy import ReferencePolicy, frozen_copy
from fastppo.models.sharding import shard
from fastppo.plugins.calling import CallOptions
from fastppo.ppo.optimizer import make_optimizer
from fastppo.ppo.options.config import PPOConfig, check_processes
from fastppo.ppo.parts import Parts
from fastppo.ppo.setup.dry_run import episode_file, failure_file
from fastppo.ppo.setup.preflight import Given, RunInputs, preflight, replaced_prompts
from fastppo.ppo.setup.run_models import ModelLoader, make_policy, make_reference
from fastppo.ppo.setup.user_engine import make_user_engine
from fastppo.rewards.scorer import Scorer
from fastppo.rollout import RolloutEngine, Sampling, as_engine
from fastppo.rollout.async_engine import AsyncEngine, CopyEngine
from fastppo.rollout.engines import make_engine
from fastppo.rollout.generate import GenerateEngine
from fastppo.rollout.one_turn import OneTurn
from fastppo.rollout.server import ServerEngine
from fastppo.rollout.sharing import SharedEngine
from fastppo.rollout.stopping import StopStrings
from fastppo.rollout.vllm import VLLMEngine


def world_of(config: PPOConfig, world: World | None = None) -> World:
    """Return `world`, or the processes that torchrun started.

    Raises:
        ValueError: an option does not work with so many processes.
    """
    if world is not None:
        return world
    world = join(choose_device(config.device), shard_size=config.shard_size)
    check_processes(config, world.size)
    return world


def build(
    config: PPOConfig,
    given: Given,
    *,
    world: World | None = None,
) -> Parts:
    """Build the parts that the config names, or take those in `given`.

    Args:
        world: the processes, over which the models are sharded.

    Raises:
        ValueError: a part does not exist, or does not fit the others.
        RewardError: a reward fails on the first prompt.
    """
    set_seed(config.seed)
    world = world or World()
    device = world.device or choose_device(config.device)
    calls = CallOptions(config.reward_timeout)
    inputs = preflight(config, given, world=world)
    inputs = replace(inputs, rewards=inputs.rewards.loaded(device))
    set_seed(config.seed)  # the rewards may have drawn random numbers
    models = load_models(config, given, inputs.tokenizer, device)
    policy = models.policy
    images = read_images(models, inputs)
    # Sets policy.packing.
    packing_note = choose_packing(config.packing, policy, models.frozen_reference)
    functions = {name: term.function for name, term in inputs.functions.items()}
    engine = given.engine
    if engine is None and "rollout" in functions:
        engine = make_user_engine(
            config, functions["rollout"], policy=policy, tokenizer=inputs.tokenizer
        )
    engine, engine_note = choose_engine(
        config, engine, policy=policy, tokenizer=inputs.tokenizer, images=images, world=world
    )
    if inputs.processor is not None and isinstance(engine, GenerateEngine):
        raise ValueError(f"images in prompts need the decoder. {engine_note or ''}".strip())
    if world.size > 1:
        models.shard(world)
        engine = SharedEngine(engine, policy, world)
    scorer = Scorer(
        terms=inputs.rewards.trained,
        monitors=inputs.rewards.monitored,
        tokenizer=inputs.tokenizer,
        failure_file=failure_file(config),
        options=calls,
        world=world,
    )
    set_seed(config.seed)  # how many numbers were drawn depends on the number of ranks
    return Parts(
        device=device,
        world=world,
        tokenizer=inputs.tokenizer,
        model=policy,
        reference=models.reference,
        optimizer=make_optimizer(policy, config, functions.get("optimizer")),
        engine=engine,
        sampling=make_sampling(config, inputs.tokenizer, models.stop_token_ids),
        prompts=inputs.prompts,
        held_out=inputs.held_out,
        pretraining=inputs.pretraining,
        scorer=scorer,
        functions=functions,
        images=images,
        episode_runner=make_episode_runner(config, inputs, images, calls=calls, world=world),
        context=inputs.context,
        fingerprints=models.fingerprints | inputs.fingerprints,
        notes=[
            *[note for note in (packing_note, engine_note) if note],
            *replaced_prompts(config, inputs),
        ],
    )


# -------------------------------------------------------------------------------------- the models


@dataclass(frozen=True, slots=True, eq=False)
class Models:
    """Policy and reference."""

    policy: ActorCritic
    reference: ReferencePolicy | None
    stop_token_ids: tuple[int, ...]
    fingerprints: dict[str, str]
    """Fingerprints of the initial weights, by option."""

    @property
    def frozen_reference(self) -> LanguageModel | None:
        """The reference's own model, if it has one."""
        return None if self.reference is None else self.reference.frozen

    def shard(self, world: World) -> None:
        """Shard both over the ranks."""
        for model in (self.policy, self.frozen_reference):
            if model is not None:
                shard(model, world)


def load_models(config: PPOConfig, given: Given, tokenizer: Any, device: torch.device) -> Models:
    """Load policy, value function and reference, or take the models in `given`.

    Raises:
        ValueError: a model cannot be loaded, or does not fit the others or the tokenizer.
    """
    loader = ModelLoader(config, device)
    causal_lm = given.model or loader.causal_lm(config.model, "model")
    causal_lm = causal_lm.to(device)  # type: ignore[arg-type]
    # Before `make_policy` adds adapters to it.
    model_fingerprint = fingerprint.of_model(causal_lm)
    stop_tokens = stop_token_ids(config.stop_token_ids, tokenizer, causal_lm)
    policy = make_policy(causal_lm, config, loader)
    vocabulary = policy.head.vocabulary
    if any(not 0 <= token < vocabulary for token in stop_tokens):
        raise ValueError(f"stop_token_ids must be in [0, {vocabulary}), got {stop_tokens}")
    check_vocabulary(tokenizer, vocabulary)
    reference = make_reference(policy, tokenizer, config, loader, model=given.reference)
    fingerprints = {"model": model_fingerprint}
    if reference is not None:
        fingerprints["reference_model"] = model_fingerprint
        if reference.is_given and reference.frozen is not None:
            fingerprints["reference_model"] = fingerprint.of_model(reference.frozen.causal_lm)
    return Models(
        policy=policy,
        reference=reference,
        stop_token_ids=stop_tokens,
        fingerprints=fingerprints,
    )


def read_images(models: Models, inputs: RunInputs) -> NoImages:
    """Return what runs the vision tower, after a check of its output in the policy.

    Raises:
        ValueError: the model does not work with the output of its tower, or reference or critic
            are of another kind or have another tower.
    """
    if inputs.processor is None:
        return NoImages()
    encoder = ImageEncoder(models.policy, inputs.processor)
    for who, trunk in trunks_of(models.policy, models.frozen_reference):
        if type(trunk) is not type(encoder.trunk):
            raise ValueError(
                f"images: {who} is a {type(trunk).__name__}, and reads the output of the policy's "
                f"vision tower; expected a {type(encoder.trunk).__name__}"
            )
        different = different_frozen(trunk, encoder.trunk)
        if different is not None:
            raise ValueError(
                f"images: {who} reads the output of the policy's vision tower, and has another "
                f"tower or projector itself: {different} differs"
            )
        share_frozen(trunk, encoder.trunk)
    for prompts in (inputs.prompts, inputs.held_out):
        if prompts is not None:
            encoder.check(prompts)
    return encoder


def choose_engine(
    config: PPOConfig,
    engine: Any,
    *,
    policy: ActorCritic,
    tokenizer: Any,
    images: NoImages,
    world: World,
) -> tuple[RolloutEngine, str | None]:
    """Return the rollout engine, and a sentence if it is a fallback.

    Args:
        engine: the user's engine; None for a built-in one.

    Raises:
        ValueError: `async_steps` with an engine without asynchronous generation.
    """
    note = None
    options = config.engine_keywords
    if engine is not None:
        chosen = as_engine(engine)
    elif config.rollout == "vllm":
        chosen = VLLMEngine(
            policy,
            tokenizer,
            images=images,
            world=world,
            **options,
        )
    elif config.rollout == "server":
        chosen = ServerEngine(
            policy,
            Path(config.output_dir) / "rollout_weights",
            **options,
        )
    else:
        decoded = frozen_copy(policy) if config.async_steps else policy
        chosen, note = make_engine(
            config.rollout,
            decoded,
            tokenizer,
            pad_token_id(tokenizer, policy.causal_lm),
            **options,
            final_values=config.bootstrap_truncated,
            # transformers compiles the model, and FSDP gathers weights at other addresses.
            static_cache=policy.device.type == "cuda" and world.size == 1,
        )
        if config.async_steps:
            chosen = CopyEngine(chosen, decoded)
    if config.async_steps:
        if not (chosen.holds_weights and chosen.draws_by_row):
            raise ValueError(
                "async_steps=1 needs an engine with weights of its own that samples by row: "
                f"{note or type(chosen).__name__}"
            )
        return AsyncEngine(chosen), note
    return chosen, note


def make_sampling(config: PPOConfig, tokenizer: Any, stop: tuple[int, ...]) -> Sampling:
    """Return the sampling parameters.

    Raises:
        ValueError: a stop string cannot be used.
    """
    return Sampling(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        stop_token_ids=stop,
        stop_strings=StopStrings(tokenizer, config.stop_strings).strings,
    )


def make_episode_runner(
    config: PPOConfig, inputs: RunInputs, images: NoImages, *, calls: CallOptions, world: World
) -> OneTurn | Turns | AsyncTurns:
    """Return the runner of single-turn responses, or of an environment's turns."""
    if inputs.rewards.environment is None:
        return OneTurn(images)
    turns = Turns(
        inputs.rewards.environment.function,
        inputs.tokenizer,
        max_turns=config.max_turns,
        context=inputs.context,
        options=calls,
        failure_file=episode_file(config),
        world=world,
        failures=(
            DropFailures(config.samples_per_prompt)
            if config.environment_failure == "drop"
            else RaiseFailures()
        ),
    )
    return AsyncTurns(turns) if config.async_steps else turns
