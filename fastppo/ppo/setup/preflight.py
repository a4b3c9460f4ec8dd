"""Read and check the inputs of a run, before its models are loaded.

`fastppo check` and `fastppo train` both call `preflight`. It reads the rows, the configs and
tokenizers of the models, the rewards and the environment. It checks that all of these fit together,
calls each reward function once on a made-up response, and plays one made-up turn of the
environment. `fastppo.ppo.setup.build` then loads the weights, a matter of minutes.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

import torch
from transformers import PreTrainedModel

from fastppo.data import fingerprint
from fastppo.data.addresses import is_address, load_prompts
from fastppo.data.chat import check_chat_template, token_ids, with_template_variables
from fastppo.data.datasets import DataError, Rows, column_names, load_rows
from fastppo.data.prompts import Prompts, encode_prompts
from fastppo.data.text import PretrainingText
from fastppo.data.world import World
from fastppo.environments.agents import Agent
from fastppo.environments.loading import load_environment
from fastppo.environments.tools import Tools
from fastppo.environments.turns import POLICY, Turns, as_turns
from fastppo.models.pretrained import causal_lm_config, load_tokenizer, model_config
from fastppo.ppo.functions import load_functions
from fastppo.ppo.optimizer import check_optimizer
from fastppo.ppo.options.config import ASYNC_NEEDS_ONE_TURN, PPOConfig
from fastppo.rewards.calling import CallOptions, keywords_for
from fastppo.rewards.ensemble import RewardEnsemble
from fastppo.rewards.loading import URL, make_terms, match_function
from fastppo.rewards.model import check_reward_model
from fastppo.rewards.reward import Reward, RewardError, RewardTerm, check_signature, try_reward
from fastppo.rollout import FINISHED, Rollout, Sampling

AGENT_ARGUMENTS = ("base_url", "api_key", "prompt")
"""Arguments of an agent besides the columns of its row."""

EXPECTED = (
    "expected a class without arguments that has reset(prompt, **columns), which returns a text, "
    "messages or None, and step(text), which returns (observation, reward, done)"
)
"""Description of an environment in error messages."""

MADE_UP = "A made-up turn"
"""Text with which an environment is tried before the run."""


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
    def own_functions(self) -> dict[str, Callable[..., Any]]:
        """The functions that are not named, by option."""
        return {name: value for name, value in self.functions.items() if callable(value)}

    def named_in(self, config: PPOConfig) -> PPOConfig:
        """Return the config with the names of the functions."""
        names = {name: value for name, value in self.functions.items() if value is not None}
        for option, function in self.own_functions.items():
            name = getattr(function, "__qualname__", type(function).__qualname__)
            names[option] = f"{function.__module__}:{name}"
        return replace(config, **names)


@dataclass(frozen=True, slots=True, eq=False)
class RewardTerms:
    """Rewards of a run."""

    trained: list[RewardTerm]
    """With their weights, an ensemble last."""
    monitored: list[RewardTerm]
    environment: RewardTerm | None
    """Makes the environments of multi-turn responses."""

    @property
    def all(self) -> list[RewardTerm]:
        """Trained and monitored rewards."""
        return [*self.trained, *self.monitored]

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of rewards and environment, by option."""
        fingerprints = {f"rewards/{term.name}": term.fingerprint for term in self.trained}
        if self.environment is not None:
            fingerprints["environment"] = self.environment.fingerprint
        return fingerprints


@dataclass(frozen=True, slots=True)
class FirstTurn:
    """Start of an episode, from the made-up turn of an environment."""

    tokens: int
    """Number of tokens before the turn."""
    text: str
    """Text of these tokens."""
    answer: str
    """Observation after the turn; "" if the episode ended."""
    has_prompt: bool
    """Whether the episode begins with the text of the prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class RunInputs:
    """Tokenizer, prompts and rewards of a run."""

    tokenizer: Any
    context: int | None
    """Longest sequence, tokens: the shortest context of policy, reference and critic."""
    prompts: Prompts | None
    held_out: Prompts | None
    """Prompts of evaluations."""
    pretraining: PretrainingText | None
    """Text of PPO-ptx."""
    rewards: RewardTerms
    functions: dict[str, RewardTerm]
    """User-defined functions by option."""
    first_turn: FirstTurn | None = None
    """Of the environment, if one was tried."""

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of tokenizer, data, rewards, environment and functions, by option."""
        fingerprints = {"tokenizer": fingerprint.of_tokenizer(self.tokenizer)}
        if self.prompts is not None:
            fingerprints["prompts"] = self.prompts.fingerprint()
        if self.pretraining is not None:
            blocks = self.pretraining.blocks
            fingerprints["ptx_data"] = fingerprint.of_weights([("blocks", blocks)])
        fingerprints |= {name: term.fingerprint for name, term in self.functions.items()}
        return fingerprints | self.rewards.fingerprints


def preflight(
    config: PPOConfig,
    given: Given,
    *,
    device: torch.device | None = None,
    calls: CallOptions | None = None,
    world: World | None = None,
) -> RunInputs:
    """Read the inputs of a run, and check that they fit together.

    Args:
        device: device of the reward models; None checks them without loading their weights.
        calls: time limit and warnings of the rewards.
        world: the processes; the first one calls the rewards.

    Raises:
        ImportError: a package is missing.
        ValueError: an input does not exist, or does not fit the others.
        RewardError: a reward or the environment fails on the first prompt with a made-up response.
    """
    prompts = given.prompts
    if prompts is None and config.prompts:
        prompts = load_prompts(config.prompts, config.split)
    held_out = load_prompts(config.eval_prompts, config.split) if config.eval_prompts else None
    sources = {config.prompts or "prompts": prompts, config.eval_prompts: held_out}
    rows = {source: rows for source, rows in sources.items() if rows is not None}
    policy_context, context = read_contexts(config, given)
    check_packages(config)
    functions = load_functions(config, given.own_functions, has_ref=given.reference is not None)
    own_optimizer = functions.get("optimizer")
    check_optimizer(config, None if own_optimizer is None else own_optimizer.function)
    tokenizer = given.tokenizer or load_tokenizer(config.model)
    if config.chat_template_kwargs:
        tokenizer = with_template_variables(tokenizer, config.chat_template_kwargs)
    check_vocabularies(config, tokenizer)
    room = prompt_room(context, config.max_new_tokens)

    def encode(these: Rows | None, source: str) -> Prompts | None:
        if these is None:
            return None
        return encode_prompts(
            these, tokenizer, column=config.prompt_column, max_prompt_tokens=room, source=source
        )

    encoded = encode(prompts, config.prompts or "prompts")
    encoded_held_out = encode(held_out, config.eval_prompts)
    check_reward_models(config, given, rows)
    terms = load_rewards(config, given, device)
    for source, these in rows.items():
        check_columns(terms, source, column_names(these, config.prompt_column))
    inputs = RunInputs(
        tokenizer=tokenizer,
        context=context,
        prompts=encoded,
        held_out=encoded_held_out,
        pretraining=load_pretraining(config, tokenizer, policy_context),
        rewards=terms,
        functions=functions,
    )
    if prompts:
        first = prompts[0]
        calls = calls or CallOptions(config.reward_timeout)

        def try_functions() -> FirstTurn | None:
            try_rewards(config, terms, first, calls)
            return try_environment(config, inputs) if given.environment is None else None

        first_turn = (world or World()).on_main_rank(try_functions)
        inputs = replace(inputs, first_turn=first_turn)
    return inputs


def check_packages(config: PPOConfig) -> None:
    """Raise ImportError if the package of an option is not installed."""
    needed = {
        "vllm": ("rollout=vllm", config.rollout == "vllm"),
        "peft": ("lora_rank > 0", config.lora_rank > 0),
        "bitsandbytes": (f"quantization={config.quantization}", config.quantization != "none"),
        "wandb": ("report_to=wandb", "wandb" in config.report_to),
    }
    for package, (option, is_needed) in needed.items():
        if is_needed and importlib.util.find_spec(package) is None:
            raise ImportError(f"{option} needs {package}: pip install {package}")


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
    if config.critic_model and not config.critic_model.endswith(".safetensors"):
        configs.append(model_config(config.critic_model, "critic_model"))
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


def check_vocabularies(config: PPOConfig, tokenizer: Any) -> None:
    """Raise ValueError if reference or critic have another vocabulary than the policy."""
    policy_tokens = tokenizer.get_vocab()
    for option in ("reference_model", "critic_model"):
        name = getattr(config, option)
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
        ValueError: a block is longer than the context.
        DataError: the rows cannot be used.
    """
    if not config.ptx_data:
        return None
    if context is not None and config.ptx_block_size > context:
        raise ValueError(
            f"ptx_block_size={config.ptx_block_size} is longer than the context of {context} tokens"
        )
    rows = load_rows(config.ptx_data, config.split)
    return PretrainingText(rows, tokenizer, config.ptx_block_size, source=config.ptx_data)


# ------------------------------------------------------------------------------------- the rewards


def names_model(reward: str | Reward) -> TypeGuard[str]:
    """Return whether a reward is the name of a model, not a function or a URL."""
    return isinstance(reward, str) and not URL.match(reward) and match_function(reward) is None


def check_reward_models(config: PPOConfig, given: Given, rows: dict[str, Rows]) -> None:
    """Check configs and tokenizers of the reward models.

    Raises:
        ValueError: one is not a classifier with one label, or has no tokenizer.
        DataError: a prompt is a chat, and a reward model has no chat template.
    """
    rewards = (
        *(given.rewards or config.rewards),
        *config.reward_ensemble,
        *(given.monitor_rewards or config.monitor_rewards),
    )
    for name in rewards:
        if not names_model(name):
            continue
        check_reward_model(name)
        tokenizer = load_tokenizer(name, "reward")
        for source, these in rows.items():
            for number, row in enumerate(these, 1):
                if not isinstance(row[config.prompt_column], str):
                    where = f"reward {name}: {source}, row {number}"
                    check_chat_template(tokenizer.chat_template is not None, where)


def load_rewards(config: PPOConfig, given: Given, device: torch.device | None) -> RewardTerms:
    """Load rewards, monitored rewards and the environment.

    Args:
        device: device of the reward models; None leaves them out.

    Raises:
        ValueError: one does not exist; `max_turns` is set without an environment.
    """

    def load(rewards: Iterable[str | Reward], weights: Any = None) -> list[RewardTerm]:
        if device is None:
            return make_terms([reward for reward in rewards if not names_model(reward)])
        return make_terms([*rewards], weights, device=device, timeout=config.reward_timeout)

    rewards = given.rewards or config.rewards
    weights = config.reward_weights
    ensemble_weight = 1.0
    if config.reward_ensemble and weights is not None and len(weights) == len(rewards) + 1:
        ensemble_weight = weights[-1]
        weights = weights[:-1]
    trained = load(rewards, weights)
    if config.reward_ensemble and device is not None:
        trained.append(load_ensemble(config, ensemble_weight, device))
    names = [term.name for term in trained]
    if config.reward_ensemble and "ensemble" in names[: len(rewards)]:
        raise ValueError(
            "a reward is called 'ensemble', which is the name of reward_ensemble: rename it"
        )
    environment = load_environment(given.environment or config.environment)
    config.have_effect_only("max_turns", where=environment, needs="environment")
    if environment is not None and config.async_steps:
        raise ValueError(ASYNC_NEEDS_ONE_TURN)
    return RewardTerms(
        trained=trained,
        monitored=load(given.monitor_rewards or config.monitor_rewards),
        environment=environment,
    )


def load_ensemble(config: PPOConfig, weight: float, device: torch.device) -> RewardTerm:
    """Load the models of `reward_ensemble` as one reward."""
    ensemble = RewardEnsemble(
        config.reward_ensemble,
        config.reward_ensemble_by,
        device=device,
        timeout=config.reward_timeout,
    )
    members = fingerprint.of_text(" ".join(term.fingerprint for term in ensemble.terms))
    return RewardTerm("ensemble", ensemble, weight, members)


def check_columns(terms: RewardTerms, source: str, columns: Sequence[str]) -> None:
    """Check that rewards and environment can be called with the columns of the prompts.

    Args:
        source: names the prompts in an error.
        columns: without the prompt column.

    Raises:
        DataError: a reward needs a missing column.
        ValueError: a signature does not fit its call.
    """
    for term in terms.all:
        check_signature(term.name, inspect.signature(term.function), source, columns)
    if terms.environment is not None:
        check_environment(terms.environment.function, source, columns)


def check_environment(make: Any, source: str, columns: Sequence[str]) -> None:
    """Check that an environment or agent can be called with the columns of the prompts.

    Args:
        make: makes an environment, or is an `Agent`.
        source: names the prompts in an error.
        columns: without the prompt column.

    Raises:
        ValueError: a signature does not fit its call.
    """
    if isinstance(make, Agent):
        keywords = (*AGENT_ARGUMENTS, *columns)
        signature = inspect.signature(make.run)
        try:
            signature.bind(**keywords_for(make.run, dict.fromkeys(keywords)))
        except TypeError as error:
            raise ValueError(
                f"environment: the agent takes {signature}: {error}; with the columns of {source} "
                f"it is given {', '.join(keywords)}"
            ) from None
        return
    if inspect.isclass(make):
        missing = [name for name in ("reset", "step") if not hasattr(make, name)]
        if missing:
            raise ValueError(f"environment: {make.__name__} has no method {missing[0]}; {EXPECTED}")
    calls: dict[str, tuple[Any, list[Any]]] = {getattr(make, "__name__", "it"): (make, [])}
    if inspect.isclass(make):
        calls |= {
            name: (getattr(make, name), [None, ""])  # self, and the prompt or the text
            for name in ("reset", "step")
            if inspect.isfunction(getattr(make, name, None))
        }
    for name, (function, arguments) in calls.items():
        signature = inspect.signature(function)
        named = keywords_for(function, dict.fromkeys(columns)) if name == "reset" else {}
        try:
            signature.bind(*arguments, **named)
        except TypeError as error:
            if str(error).startswith("multiple values"):  # reset(self, seed), of Gymnasium
                error = TypeError("its first argument is the prompt, not a column")
            raise ValueError(
                f"environment: {name} takes {signature}: {error}; {EXPECTED}; the columns of "
                f"{source} are: {', '.join(columns) or 'none beside the prompt'}"
            ) from None


def try_rewards(
    config: PPOConfig, terms: RewardTerms, row: dict[str, Any], calls: CallOptions
) -> None:
    """Call each reward function of the options once, on a prompt with a made-up response.

    Models, URLs, and functions passed in Python are not called.

    Raises:
        RewardError: a function raised, or returned no valid rewards.
    """
    for term in terms.all:
        if term.is_named_function:
            try_reward(
                term,
                row,
                config.prompt_column,
                failure_file=failure_file(config),
                options=calls,
            )


class _MadeUpEngine:
    """Samples one made-up turn."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokens = token_ids(tokenizer, MADE_UP) or [0]

    def generate(self, prompts: Sequence[list[int]], sampling: Sampling) -> Rollout:
        return Rollout([self.tokens for _ in prompts], [FINISHED for _ in prompts])


def try_environment(config: PPOConfig, inputs: RunInputs) -> FirstTurn | None:
    """Play one made-up turn of the environment, on the first prompt.

    Agents are not called: they wait for a server.

    Raises:
        RewardError: the environment raised, or returned an invalid answer.
        DataError: the chat template does not accept an observation, or there is no room for a turn.
    """
    term = inputs.rewards.environment
    if term is None or isinstance(term.function, Agent) or inputs.prompts is None:
        return None
    turns = Turns(
        term.function,
        inputs.tokenizer,
        max_turns=1,
        context=inputs.context,
        options=CallOptions(config.reward_timeout),
        failure_file=episode_file(config),
    )
    engine: Any = _MadeUpEngine(inputs.tokenizer)
    try:
        prompts, rollout = turns.run(
            inputs.prompts.select([0]), engine, Sampling(config.max_new_tokens)
        )
    except RewardError as error:
        if isinstance(error.__cause__, DataError):
            raise error.__cause__ from None
        expected = "" if isinstance(term.function, Tools) else f": {EXPECTED}"
        raise RewardError(
            f"{error}; it was tried with a made-up turn, before anything is loaded{expected}"
        ) from error.__cause__
    finally:
        turns.close()
    assert rollout.turns is not None
    episode = rollout.turns[0]
    last = episode[-1]
    opening = itertools.takewhile(lambda turn: turn["role"] != POLICY, episode)
    prompt = str(as_turns(prompts.prompts[0], POLICY)[-1]["text"]).strip()
    return FirstTurn(
        tokens=len(prompts.token_ids[0]),
        text=inputs.tokenizer.decode(prompts.token_ids[0]),
        answer="" if last["role"] == POLICY else last["text"],
        has_prompt=any(prompt in str(turn["text"]) for turn in opening),
    )


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


def failure_file(config: PPOConfig) -> Path:
    """Return the path of the samples of a failed reward."""
    return Path(config.output_dir) / "failed_reward.json"


def episode_file(config: PPOConfig) -> Path:
    """Return the path of the episode of a failed environment."""
    return Path(config.output_dir) / "failed_episode.json"
