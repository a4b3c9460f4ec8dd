"""Read the inputs of a run and check that they fit together, before its models are loaded.

`fastppo check` and `fastppo train` both call `preflight`. It reads the rows, the configs and
tokenizers of the models, the rewards and the environment. Each of them checks the columns of the
prompts itself, and `dry_run` tries them once. `fastppo.ppo.setup.build` then loads the weights, a
matter of minutes.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedModel

from fastppo.data import fingerprint
from fastppo.data.chat import with_template_variables
from fastppo.data.datasets import Rows, load_rows
from fastppo.data.images import have_images
from fastppo.data.prompts import Prompts, encode_prompts
from fastppo.data.text import PretrainingText, block_tokens
from fastppo.data.world import World
from fastppo.models.images import load_processor
from fastppo.models.multimodal import is_multimodal
from fastppo.models.pretrained import causal_lm_config, load_tokenizer, model_config
from fastppo.plugins.adapters import is_address, load_prompts
from fastppo.plugins.loading import Plugin
from fastppo.ppo.functions import load_functions
from fastppo.ppo.optimizer import check_optimizer
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.setup.dry_run import FirstTurn, dry_run
from fastppo.ppo.setup.run_rewards import RewardTerms, load_rewards
from fastppo.ppo.setup.user_engine import check_user_engine
from fastppo.rewards.reward import Reward
from fastppo.run.trackers import load_tracker


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """Parts of a run passed to `PPOTrainer` instead of being named by options."""

    model: PreTrainedModel | None = None
    tokenizer: Any = None
    prompts: Rows | None = None
    rewards: Sequence[str | Reward] | None = None
    monitor_rewards: Sequence[str | Reward] | None = None
    reference: PreTrainedModel | None = None
    environment: Callable[[], Any] | None = None
    engine: Any = None
    functions: Mapping[str, Any] = field(default_factory=dict)
    """Functions or names of `objective`, `advantage` and `optimizer`; None for the config's."""

    @property
    def text_tokenizer(self) -> Any:
        """The tokenizer, also of a processor."""
        return getattr(self.tokenizer, "tokenizer", self.tokenizer)

    @property
    def user_functions(self) -> dict[str, Callable[..., Any]]:
        """The functions that are not named, by option."""
        return {name: value for name, value in self.functions.items() if callable(value)}

    def named_in(self, config: PPOConfig) -> PPOConfig:
        """Return the config with the names of the functions."""
        names = {name: value for name, value in self.functions.items() if value is not None}
        for option, function in self.user_functions.items():
            name = getattr(function, "__qualname__", type(function).__qualname__)
            names[option] = f"{function.__module__}:{name}"
        return replace(config, **names)


@dataclass(frozen=True, slots=True, eq=False)
class RunInputs:
    """Tokenizer, prompts and rewards of a run."""

    tokenizer: Any
    processor: Any
    """Processor of a vision-language model; None if no prompt has images."""
    context: int | None
    """Longest sequence, tokens: the shortest context of policy, reference and critic."""
    prompts: Prompts | None
    held_out: Prompts | None
    """Prompts of evaluations."""
    pretraining: PretrainingText | None
    """Text of PPO-ptx."""
    rewards: RewardTerms
    functions: dict[str, Plugin]
    """User-defined functions by option."""
    first_turn: FirstTurn | None = None
    """First turn of the environment, if it was tried."""

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of tokenizer, data, rewards, environment and functions, by option.

        A run may resume with another engine, which samples from the same policy.
        """
        fingerprints = {"tokenizer": fingerprint.of_tokenizer(self.tokenizer)}
        if self.prompts is not None:
            fingerprints["prompts"] = self.prompts.fingerprint()
        if self.pretraining is not None:
            blocks = self.pretraining.blocks
            fingerprints["ptx_data"] = fingerprint.of_weights([("blocks", blocks)])
        functions = {name: term for name, term in self.functions.items() if name != "rollout"}
        fingerprints |= {name: term.fingerprint for name, term in functions.items()}
        return fingerprints | self.rewards.fingerprints


def preflight(config: PPOConfig, given: Given, *, world: World | None = None) -> RunInputs:
    """Read the inputs of a run, and check that they fit together.

    Args:
        world: the processes; the first one tries the rewards and the environment.

    Raises:
        ImportError: a package is missing.
        ValueError: an input does not exist, or does not fit the others.
        RewardError: a reward or the environment fails on the first prompt with a made-up response.
    """
    world = world or World()
    rows = given.prompts
    if rows is None and config.prompts:
        rows = load_prompts(config.prompts, config.split)
    held_out_rows = load_prompts(config.eval_prompts, config.split) if config.eval_prompts else None
    policy_context, context = read_contexts(config, given)
    check_packages(config)
    functions = load_functions(config, given.user_functions, has_ref=given.reference is not None)
    if "rollout" in functions and given.engine is None:
        check_user_engine(config, functions["rollout"].function)
    user_optimizer = functions.get("optimizer")
    check_optimizer(config, None if user_optimizer is None else user_optimizer.function)
    tokenizer = read_tokenizer(config, given)
    check_vocabularies(config, tokenizer)
    processor = choose_processor(config, given, [rows, held_out_rows], tokenizer)
    room = prompt_room(context, config.max_new_tokens)
    rewards = load_rewards(config, given.rewards, given.monitor_rewards, given.environment)

    def encode(these: Rows | None, source: str) -> Prompts | None:
        if these is None:
            return None
        prompts = encode_prompts(
            these,
            tokenizer,
            column=config.prompt_column,
            max_prompt_tokens=room,
            source=source,
            processor=processor,
        )
        rewards.check(source, prompts, world.size)
        return prompts

    prompts = encode(rows, config.prompts or "prompts")
    held_out = encode(held_out_rows, config.eval_prompts)
    pretraining = load_pretraining(config, tokenizer, policy_context)
    first_turn = None
    if prompts is not None:
        environment = rewards.environment if given.environment is None else None
        maker = None if environment is None else environment.function
        first_turn = world.on_main_rank(
            lambda: dry_run(
                config, prompts, rewards.all, maker, tokenizer=tokenizer, context=context
            )
        )
    return RunInputs(
        tokenizer=tokenizer,
        processor=processor,
        context=context,
        prompts=prompts,
        held_out=held_out,
        pretraining=pretraining,
        rewards=rewards,
        functions=functions,
        first_turn=first_turn,
    )


def check_packages(config: PPOConfig) -> None:
    """Raise ImportError if the package of an option is not installed."""
    needed = {
        "vllm": ("rollout=vllm", config.rollout == "vllm"),
        "peft": ("lora_rank > 0", config.lora_rank > 0),
        "bitsandbytes": (f"quantization={config.quantization}", config.quantization != "none"),
    }
    for package, (option, is_needed) in needed.items():
        if is_needed and importlib.util.find_spec(package) is None:
            raise ImportError(f"{option} needs {package}: pip install {package}")
    for name in config.report_to:
        load_tracker(name)


# -------------------------------------------------------------------------------------- the models


def read_contexts(config: PPOConfig, given: Given) -> tuple[int | None, int | None]:
    """Read the models' configs; return (the policy's context, the shortest context), in tokens.

    Raises:
        ValueError: a model does not exist, or is not a causal LM.
    """
    if given.model is None and not config.model:
        raise ValueError("model must be a directory or hub name, got nothing")
    if given.tokenizer is None and not config.model:
        raise ValueError("a model that is passed in needs its tokenizer passed in too")
    if given.model is not None and config.quantization != "none":
        raise ValueError(
            f"quantization={config.quantization}: a model that is passed in is not quantized"
        )
    configs = [causal_lm_config(config.model) if given.model is None else given.model.config]
    if given.reference is not None:
        configs.append(given.reference.config)
    elif config.reference_model:
        configs.append(causal_lm_config(config.reference_model, "reference_model"))
    critic = config.initial_critic
    if critic and not critic.endswith(".safetensors"):
        configs.append(model_config(critic, "critic_model"))
    contexts = [context_of(each) for each in configs]
    return contexts[0], min((known for known in contexts if known is not None), default=None)


def context_of(model_config: Any) -> int | None:
    """Return the context of a transformers config, tokens; None if it names none."""
    return getattr(model_config.get_text_config(), "max_position_embeddings", None)


def prompt_room(context: int | None, max_new_tokens: int) -> int:
    """Return the longest prompt, tokens.

    Raises:
        ValueError: a response fills the context.
    """
    if context is not None and max_new_tokens >= context:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} leaves no room for a prompt in the context of "
            f"{context} tokens"
        )
    return (context or 2**31) - max_new_tokens


def read_tokenizer(config: PPOConfig, given: Given) -> Any:
    """Return the tokenizer of a run, with its chat template, which may be a given processor's.

    Raises:
        ValueError: there is no tokenizer, or its template does not read a variable.
    """
    tokenizer = given.text_tokenizer or load_tokenizer(config.model)
    if tokenizer.chat_template is None and given.tokenizer is not None:
        tokenizer.chat_template = getattr(given.tokenizer, "chat_template", None)
    if config.chat_template_kwargs:
        tokenizer = with_template_variables(tokenizer, config.chat_template_kwargs)
    return tokenizer


def choose_processor(
    config: PPOConfig, given: Given, rows: Sequence[Rows | None], tokenizer: Any
) -> Any:
    """Return the processor of a vision-language model; None if no prompt has images.

    A model of text passes columns of images on to the rewards.

    Args:
        rows: prompts and held-out prompts.

    Raises:
        ValueError: an option does not work with images, or the processor cannot be loaded.
    """
    model = given.model.config if given.model is not None else model_config(config.model)
    column = config.prompt_column
    if not is_multimodal(model) or not any(have_images(x, column) for x in rows if x is not None):
        return None
    if config.environment or given.environment is not None:
        raise ValueError("environment: images in prompts are for single turns")
    if config.rollout in ("generate", "server"):
        raise ValueError(
            f"rollout={config.rollout} takes no images in prompts: use rollout=decoder or vllm"
        )
    if config.async_steps:
        raise ValueError("async_steps=1 takes no images in prompts")
    if given.tokenizer is not None and given.text_tokenizer is not given.tokenizer:
        processor = copy.copy(given.tokenizer)
        processor.tokenizer = tokenizer
        processor.chat_template = tokenizer.chat_template  # it is saved with the policy
    else:
        name = config.model or given.model.name_or_path  # type: ignore[union-attr]
        processor = load_processor(name or "", tokenizer, model)
    return processor


def check_vocabularies(config: PPOConfig, tokenizer: Any) -> None:
    """Raise ValueError if reference or critic have another vocabulary than the policy."""
    policy_tokens = tokenizer.get_vocab()
    names = {"reference_model": config.reference_model, "critic_model": config.initial_critic}
    for option, name in names.items():
        if not name or name.endswith(".safetensors"):
            continue
        tokens = load_tokenizer(name, option).get_vocab()
        if tokens != policy_tokens:
            raise ValueError(
                f"{option} {name}: its tokenizer has another vocabulary ({len(tokens)} tokens) "
                f"than the policy's ({len(policy_tokens)})"
            )


def load_pretraining(
    config: PPOConfig, tokenizer: Any, context: int | None
) -> PretrainingText | None:
    """Load the text of PPO-ptx.

    Args:
        context: of the policy, tokens.

    Raises:
        DataError: the rows cannot be used.
    """
    if not config.is_used("ptx_coef"):
        return None
    rows = load_rows(config.ptx_data, config.split)
    return PretrainingText(rows, tokenizer, block_tokens(context), source=config.ptx_data)


def replaced_prompts(config: PPOConfig, inputs: RunInputs) -> list[str]:
    """Return a warning if the environment replaces the prompts of a data set, else nothing."""
    turn = inputs.first_turn
    from_addresses = is_address(config.prompts) or is_address(str(config.environment))
    if turn is None or turn.has_prompt or from_addresses or not config.prompts:
        return []
    return [
        f"the policy does not see the prompts of {config.prompts}: the environment's reset returns "
        "another text in their place; a reset that returns None keeps the prompt"
    ]
