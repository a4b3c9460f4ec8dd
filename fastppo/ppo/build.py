"""The parts of a PPO run, made from its options: models, data, rewards, and checks between them.

The trainer is the algorithm; what it runs on is put together here. Nothing here changes during a
run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from fastppo.data import fingerprint
from fastppo.data.prompts import Prompts, encode_prompts
from fastppo.data.rows import DataError, Rows, load_rows
from fastppo.data.text import PretrainingText
from fastppo.data.world import World, join
from fastppo.models import quantized
from fastppo.models.adapters import add_adapters
from fastppo.models.device import cast_frozen, choose_device, compute_dtype
from fastppo.models.from_files import Files, is_empty, open_files
from fastppo.models.packing import choose_packing
from fastppo.models.policy import ActorCritic, LanguageModel
from fastppo.models.pretrained import (
    check_vocabulary,
    is_sequence_classifier,
    load_causal_lm,
    load_tokenizer,
    model_config,
    pad_token_id,
    stop_token_ids,
)
from fastppo.models.reference_policy import ReferencePolicy
from fastppo.models.sharding import is_sharded, shard, unsharded
from fastppo.models.trunk import checkpoint_activations, context_length, prepare, take_mark_of
from fastppo.models.value import (
    CriticValue,
    DetachedValue,
    SharedValue,
    ValueFunction,
    critic_of_policy,
    critic_of_reward_model,
)
from fastppo.ppo.config import PPOConfig
from fastppo.ppo.curriculum import Curriculum
from fastppo.ppo.evaluation import Evaluation
from fastppo.ppo.optimizer import make_optimizer
from fastppo.rewards.calling import CallOptions
from fastppo.rewards.ensemble import RewardEnsemble
from fastppo.rewards.environment import OneTurn, Turns
from fastppo.rewards.loading import load_environment, make_terms
from fastppo.rewards.reward import Reward, RewardTerm, lacking_columns
from fastppo.rewards.scorer import Scorer
from fastppo.rollout import RolloutEngine, Sampling, as_engine
from fastppo.rollout.engines import make_engine
from fastppo.rollout.sharing import SharedEngine
from fastppo.rollout.stopping import StopStrings
from fastppo.rollout.vllm import VLLMEngine


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What a run is made of."""

    device: torch.device
    tokenizer: Any
    model: ActorCritic
    reference: ReferencePolicy | None
    """None where no KL needs a model."""
    optimizer: Any
    """`fastppo.ppo.master_weights.MasterWeights` over an optimiser of torch's interface."""
    engine: RolloutEngine
    sampling: Sampling
    turns: OneTurn | Turns
    prompts: Prompts | None
    curriculum: Curriculum
    pretraining: PretrainingText | None
    scorer: Scorer
    evaluation: Evaluation
    context: int | None
    """Tokens that a sequence may have: the least of policy, reference and critic, if any says."""
    fingerprints: dict[str, str]
    """Of what is read and not saved in a checkpoint, by name."""
    notes: list[str]
    """Sentences on what is not as the options ask for it."""

    @property
    def of_callbacks(self) -> dict[str, Any]:
        """What a callback is given, by transformers' names."""
        return {
            "model": self.model.causal_lm,
            "processing_class": self.tokenizer,
            "optimizer": self.optimizer,
        }


def world_of(config: PPOConfig) -> World:
    """The processes that torchrun started for the run; raises ValueError where they do not fit."""
    world = join(choose_device(config.device), shard_size=config.shard_size)
    check_ranks(config, world)
    return world


def check_ranks(config: PPOConfig, world: World) -> None:
    """Raises ValueError for options that so many processes do not have."""
    if world.size % config.vllm_tensor_parallel_size:
        raise ValueError(
            f"vllm_tensor_parallel_size must divide the number of processes, which torchrun "
            f"starts: got {config.vllm_tensor_parallel_size} and {world.size}"
        )
    if world.size == 1:
        return
    for wrong, sentence in (
        (
            config.optimizer == "adamw8bit",
            "optimizer=adamw8bit has no moments that are sharded; use optimizer=adamw",
        ),
        (
            config.precision == "fp16",
            "precision=fp16 has a loss scale that follows one process's gradients; use bf16",
        ),
        (
            config.quantization != "none",
            f"quantization={config.quantization} has matrices that are not sharded; use none",
        ),
    ):
        if wrong:
            raise ValueError(f"{world.size} processes: {sentence}")


def check_defaults(config: PPOConfig, *names: str) -> None:
    """Raises ValueError for options of turns where nothing answers them."""
    for name in names:
        if getattr(config, name) != getattr(PPOConfig(), name):
            raise ValueError(f"{name} has an effect only with environment")


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
) -> Parts:
    """The parts that the config names, or those that are given instead; see `PPOTrainer`.

    Args:
        say: takes a sentence for the user.
        world: of the ranks over which the models are sharded, after all checks.

    Raises:
        ValueError: they do not fit: a tokenizer larger than the vocabulary, a prompt longer than
            the context, a model whose logits FastPPO does not know how to form.
    """
    if model is None and not config.model:
        raise ValueError("model must be a directory or hub name, got nothing")
    if tokenizer is None and not config.model:
        raise ValueError("a model that is passed in needs its tokenizer passed in too")
    world = world or World()
    device = world.device or choose_device(config.device)
    tokenizer = tokenizer or load_tokenizer(config.model)
    if model is not None and config.quantization != "none":
        raise ValueError(
            f"quantization={config.quantization}: a model that is passed in stays as it is"
        )
    files = None if model is not None else _files(config, world)
    how = config, device
    if files is None:
        causal_lm = model or _load_model(config.model, *how, quantization=config.quantization)
        causal_lm = causal_lm.to(device)  # type: ignore[arg-type]
    else:
        causal_lm = files.lm
    if files is None:
        weights = fingerprint.of_weights(causal_lm.named_parameters())  # before they get adapters
    else:
        weights = world.first(lambda: fingerprint.of_weights(files.weights()))
    stop = stop_token_ids(config.stop_token_ids, tokenizer, causal_lm)
    policy = _actor_critic(causal_lm, tokenizer, *how)
    _check_tokens(policy, tokenizer, stop)
    ref_policy = _reference_policy(policy, reference, tokenizer, *how)
    of_reference = _fingerprint_of_reference(ref_policy, weights)  # before it is sharded
    context = _shortest_context(policy, ref_policy)
    frozen = ref_policy.frozen if ref_policy is not None else None
    copied = frozen if files is not None and ref_policy and not ref_policy.is_given else None
    with ExitStack() as whole:
        if files is not None:
            for each in (policy, copied):
                if each is not None:
                    fill = functools.partial(files.fill, each, each.causal_lm, device)
                    _shard(each, world, config, fill)
            whole.enter_context(unsharded(policy))
            trunk = policy.causal_lm.base_model
            prepare(trunk)
            policy.check_heads()
            if copied is not None:  # the same weights
                take_mark_of(trunk, copied.causal_lm.base_model)
        compared = None if copied else frozen
        with ref_policy.loaded() if ref_policy and compared else nullcontext():  # on one device
            packing_note = choose_packing(config.packing, policy, compared)
        chosen, engine_note = _engine(engine, policy, tokenizer, config, world)
    of_prompts = config.prompts, config.split
    found_prompts = _load_prompts(prompts, tokenizer, context, config, *of_prompts)
    curriculum = Curriculum(found_prompts or Prompts([], []), config, say, world)
    held_out = _load_prompts(None, tokenizer, context, config, config.eval_prompts, config.split)
    pretraining = _load_pretraining(tokenizer, policy.context, config)
    terms = _load_rewards(rewards or config.rewards, config, device)
    term = load_environment(environment or config.environment)
    if term is None:
        check_defaults(config, "max_turns", "max_response_tokens")
    if world.size > 1:
        for each in (policy, frozen):
            if each is not None and not is_sharded(each):
                _shard(each, world, config)
        chosen = SharedEngine(chosen, policy, world)
    failures = Path(config.output_dir)
    calls = CallOptions(config.reward_timeout, config.reward_failure == "drop", say)
    scorer = functools.partial(
        Scorer,
        tokenizer=tokenizer,
        failure_file=failures / "failed_reward.json",
        options=calls,
        world=world,
    )
    monitors = _load_monitors(monitor_rewards or config.monitor_rewards, config, device)
    _check_columns([*terms, *monitors], found_prompts, config.prompts)
    _check_columns([*terms, *monitors], held_out, config.eval_prompts)
    return Parts(
        device=device,
        tokenizer=tokenizer,
        model=policy,
        reference=ref_policy,
        optimizer=make_optimizer(policy, config),
        engine=chosen,
        sampling=Sampling(
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            stop_token_ids=stop,
            # Refused here, whichever engine looks for them.
            stop_strings=StopStrings(tokenizer, config.stop_strings).strings,
        ),
        prompts=found_prompts,
        curriculum=curriculum,
        pretraining=pretraining,
        scorer=scorer(terms, monitors),
        evaluation=Evaluation(
            held_out,
            scorer(terms, monitors),
            config.eval_interval,
            config.eval_sampling,
            config.rollout_batch_size,
        ),
        turns=OneTurn()
        if term is None
        else Turns(
            term.function,
            tokenizer,
            max_turns=config.max_turns,
            max_tokens=config.max_response_tokens,
            context=context,
            options=calls,
            failure_file=failures / "failed_episode.json",
            world=world,
        ),
        context=context,
        fingerprints={"model": weights}
        | of_reference
        | _fingerprints(found_prompts, pretraining, terms, term)
        | curriculum.fingerprints,
        notes=[note for note in (packing_note, engine_note) if note],
    )


def _fingerprint_of_reference(reference: ReferencePolicy | None, weights: str) -> dict[str, str]:
    """Of the reference that is held, by option. `weights`: the model's, from which it starts."""
    if reference is None:
        return {}
    given = reference.frozen if reference.is_given else None
    if given is not None:
        weights = fingerprint.of_weights(given.causal_lm.named_parameters())
    return {"reference_model": weights}


def _fingerprints(
    prompts: Prompts | None,
    pretraining: PretrainingText | None,
    terms: Sequence[RewardTerm],
    environment: RewardTerm | None,
) -> dict[str, str]:
    """Of what the run reads beside its models, by option."""
    found = {f"rewards/{term.name}": term.fingerprint for term in terms}
    if environment is not None:
        found["environment"] = environment.fingerprint
    if prompts is not None:
        found["prompts"] = prompts.fingerprint()
    if pretraining is not None:
        found["ptx_data"] = fingerprint.of_weights([("blocks", pretraining.blocks)])
    return found


def _engine(
    given: Any, policy: ActorCritic, tokenizer: Any, config: PPOConfig, world: World
) -> tuple[RolloutEngine, str | None]:
    """The rollout engine, and a sentence where it is not the one that the config names."""
    if given is not None:
        return as_engine(given), None
    if config.rollout == "vllm":
        engine = VLLMEngine(
            policy,
            tokenizer,
            batch_size=config.generate_batch_size,
            gpu_memory_utilization=config.vllm_gpu_memory_utilization,
            tensor_parallel_size=config.vllm_tensor_parallel_size,
            world=world,
        )
        return engine, None
    return make_engine(
        config.rollout,
        policy,
        tokenizer,
        pad_token_id(tokenizer, policy.causal_lm),
        batch_size=config.generate_batch_size,
        final_values=config.bootstrap_truncated,
        # A CUDA graph reads weights where they were, and gathered ones are elsewhere each time.
        fixed_shapes=False if world.size > 1 else None,
    )


# -------------------------------------------------------------------------------------- the models


def _files(config: PPOConfig, world: World) -> Files | None:
    """The files from which each of several ranks reads its shards of the policy; None where the
    model is loaded whole: by one process, from the hub, or where more is made of it than a copy."""
    changed = config.lora_rank or config.quantization != "none"
    plain = config.value_model in ("shared", "detached") and not changed
    if world.size == 1 or not plain or not Path(config.model).is_dir():
        return None
    return open_files(config.model, getattr(torch, config.param_dtype), config.attn_implementation)


def _shard(
    model: LanguageModel, world: World, config: PPOConfig, fill: Callable[[], None] | None = None
) -> None:
    shard(model, world, fill=fill)


def _load_model(
    name: str,
    config: PPOConfig,
    device: torch.device,
    what: str = "model",
    quantization: str = "none",
) -> PreTrainedModel:
    """A causal LM in the run's dtype and attention implementation; `what` is the option."""
    dtype, how = getattr(torch, config.param_dtype), None
    theirs = getattr(model_config(name, what), "quantization_config", None)
    if what == "model" and quantization == "none" and theirs is not None:
        raise ValueError(
            f"model {name} is quantized already, which quantization=none does not train; pass its "
            "whole weights, and quantization=nf4 or fp4 with LoRA"
        )
    if quantization != "none":
        of_products = compute_dtype(config.precision, device) or dtype
        how = quantized.quantization_config(quantization, of_products)
    model = load_causal_lm(
        name,
        dtype=dtype,
        attn_implementation=config.attn_implementation,
        device=device,
        what=what,
        quantization=how,
    )
    if how is not None:
        quantized.settle(model)
    return model


def _actor_critic(
    causal_lm: PreTrainedModel, tokenizer: Any, config: PPOConfig, device: torch.device
) -> ActorCritic:
    """Policy and value function on `causal_lm`, which gets its adapters here.

    Args:
        device: of the run, which a model without weights is not on.

    Raises:
        ValueError: the heads do not give the model's own logits; the value function does not fit.
    """
    peft = None
    if config.lora_rank > 0:
        peft = add_adapters(
            causal_lm, config.lora_rank, config.lora_alpha, config.lora_target_modules
        )
    if config.gradient_checkpointing:
        checkpoint_activations(causal_lm)
    value_function = _value_function(causal_lm, tokenizer, config, device)
    dtype = compute_dtype(config.precision, device)
    model = ActorCritic(causal_lm, peft, value_function, dtype)
    if not is_empty(model):
        model.check_heads()
    if peft is not None:
        cast_frozen(causal_lm.base_model, dtype)
    model.set_training(config.gradient_checkpointing)
    if config.precision == "fp16":
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.dtype != torch.float32:
                raise ValueError(
                    "precision=fp16 scales gradients of fp32 weights, so what is trained must be "
                    f"float32, got {name} in {parameter.dtype}"
                )
    return model


def _value_function(
    causal_lm: PreTrainedModel, tokenizer: Any, config: PPOConfig, device: torch.device
) -> ValueFunction:
    trunk: Any = causal_lm.base_model
    width = causal_lm.get_output_embeddings().weight.shape[1]
    if config.value_model == "shared":
        return SharedValue(trunk, width)
    if config.value_model == "detached":
        return DetachedValue(trunk, width)
    name = config.critic_model
    if name is None:
        return critic_of_policy(causal_lm)
    _check_same_vocabulary("critic_model", name, tokenizer)
    if is_sequence_classifier(model_config(name, "critic_model")):
        dtype = getattr(torch, config.param_dtype)
        critic = critic_of_reward_model(name, dtype=dtype, device=device)
    else:
        other = _load_model(name, config, device, "critic_model")
        critic = CriticValue(other.base_model, other.get_output_embeddings().weight.shape[1])
    if config.gradient_checkpointing:
        checkpoint_activations(critic.trunk)
    return critic


def _check_same_vocabulary(option: str, name: str, tokenizer: Any) -> None:
    """Critic and reference read the policy's tokens, so a token must mean the same to them."""
    theirs, ours = load_tokenizer(name, option).get_vocab(), tokenizer.get_vocab()
    if theirs != ours:
        raise ValueError(
            f"{option} {name}: its tokenizer has another vocabulary ({len(theirs)} tokens) "
            f"than the policy's ({len(ours)}), so it cannot read the policy's tokens"
        )


def _reference_policy(
    policy: ActorCritic,
    given: PreTrainedModel | None,
    tokenizer: Any,
    config: PPOConfig,
    device: torch.device,
) -> ReferencePolicy | None:
    """The reference policy, or None where no KL needs a model.

    Args:
        given: a model that the trainer was handed; otherwise `reference_model`, or the policy.

    Raises:
        ValueError: the reference's vocabulary, or its logits, do not fit the policy's.
    """
    if given is None and config.reference_model is not None:
        _check_same_vocabulary("reference_model", config.reference_model, tokenizer)
        given = _load_model(config.reference_model, config, device, "reference_model")
    if given is not None and config.reference_refresh:
        raise ValueError("reference_refresh replaces the reference; pass in none")
    # The trunk without its adapters costs nothing, so its KL is always logged.
    free = policy.peft is not None
    if given is None and not config.wants_reference and not free:
        return None
    if given is None:
        return ReferencePolicy(policy)
    given = given.to(device)  # type: ignore[arg-type]
    reference = LanguageModel(given, compute_dtype=policy.compute_dtype)
    reference.check_heads()
    theirs, ours = reference.head, policy.head
    if theirs.vocabulary < len(tokenizer):
        raise ValueError(
            f"the reference has a vocabulary of {theirs.vocabulary} tokens and the policy's "
            f"tokenizer {len(tokenizer)}: it cannot read the policy's tokens"
        )
    same = theirs.transform == ours.transform and theirs.vocabulary == ours.vocabulary
    if "full" in (config.kl_estimator, config.kl_loss_estimator) and not same:
        raise ValueError(
            "the exact KL (full) needs a reference with the policy's vocabulary and logit "
            f"transform: expected {ours.vocabulary} tokens, scale {ours.logit_scale:g} and "
            f"soft-cap {ours.softcap}, got {theirs.vocabulary}, {theirs.logit_scale:g} and "
            f"{theirs.softcap}. Use k1, k2 or k3"
        )
    return ReferencePolicy(policy, reference)


def _shortest_context(policy: ActorCritic, reference: ReferencePolicy | None) -> int | None:
    limits = [policy.context, reference.context if reference is not None else None]
    if isinstance(policy.value_function, CriticValue):
        limits.append(context_length(policy.value_function.trunk))
    return min((limit for limit in limits if limit is not None), default=None)


def _check_tokens(model: ActorCritic, tokenizer: Any, stop: Sequence[int]) -> None:
    """Raises ValueError if the tokenizer or the stop tokens reach beyond the model's vocabulary."""
    rows = model.head.vocabulary
    if any(not 0 <= token < rows for token in stop):
        raise ValueError(f"stop_token_ids must be in [0, {rows}), got {tuple(stop)}")
    check_vocabulary(tokenizer, rows)


# ---------------------------------------------------------------------------------------- the data


def _load_prompts(
    rows: Rows | None,
    tokenizer: Any,
    context: int | None,
    config: PPOConfig,
    name: str,
    split: str,
) -> Prompts | None:
    """The prompts of `rows` or of that name, encoded; None if there are none.

    Raises:
        ValueError: `max_new_tokens` leaves no room for a prompt in the context.
        DataError: a prompt that cannot be used; see `encode_prompts`.
    """
    if rows is None and not name:
        return None
    room = (context or 2**31) - config.max_new_tokens
    if room < 1:
        raise ValueError(
            f"max_new_tokens={config.max_new_tokens} leaves no room for a prompt in the "
            f"context of {context} tokens"
        )
    return encode_prompts(
        load_rows(name, split) if rows is None else rows,
        tokenizer,
        column=config.prompt_column,
        max_prompt_tokens=room,
        source=name or "prompts",
    )


def _load_pretraining(
    tokenizer: Any, context: int | None, config: PPOConfig
) -> PretrainingText | None:
    """The text of PPO-ptx, or None."""
    if not config.ptx_data:
        return None
    if context is not None and config.ptx_block_size > context:
        raise ValueError(
            f"ptx_block_size={config.ptx_block_size} is longer than the context of {context} tokens"
        )
    rows = load_rows(config.ptx_data, config.split)
    return PretrainingText(rows, tokenizer, config.ptx_block_size, source=config.ptx_data)


# ------------------------------------------------------------------------------------- the rewards


def _load_rewards(
    rewards: Sequence[str | Reward], config: PPOConfig, device: torch.device
) -> list[RewardTerm]:
    """What is trained on: rewards under their names with their weights, an ensemble last."""
    options = _reward_model_options(config, device)
    weights = config.reward_weights
    ensemble_weight = 1.0
    if weights is not None and config.reward_ensemble and len(weights) == len(rewards) + 1:
        ensemble_weight = weights[-1]
        weights = weights[:-1]
    terms = make_terms(rewards, weights, **options)
    if config.reward_ensemble:
        ensemble = RewardEnsemble(
            config.reward_ensemble,
            config.reward_ensemble_by,
            drop=config.reward_failure == "drop",
            **options,
        )
        if any(term.name == "ensemble" for term in terms):
            raise ValueError(
                "a reward is called 'ensemble', which is the name of reward_ensemble: rename it"
            )
        members = fingerprint.of_text(" ".join(term.fingerprint for term in ensemble.terms))
        terms.append(RewardTerm("ensemble", ensemble, ensemble_weight, members))
    return terms


def _check_columns(terms: Sequence[RewardTerm], prompts: Prompts | None, source: str) -> None:
    """Raises DataError where a reward needs a column that the prompts do not have."""
    if prompts is None:
        return
    for term in terms:
        if lacking := lacking_columns(term.function, prompts.columns):
            has = ", ".join(prompts.columns) or "none beside the prompt"
            raise DataError(
                f"reward {term.name} needs the column {lacking[0]!r}; the columns of "
                f"{source or 'prompts'} are: {has}"
            )


def _load_monitors(
    rewards: Sequence[str | Reward], config: PPOConfig, device: torch.device
) -> list[RewardTerm]:
    """What is watched and not trained on."""
    return make_terms(rewards, **_reward_model_options(config, device))


def _reward_model_options(config: PPOConfig, device: torch.device) -> dict[str, Any]:
    return {
        "device": device,
        "batch_size": config.reward_batch_size,
        "timeout": config.reward_timeout,
    }
