"""The length of the prompts that a plan assumes."""

from __future__ import annotations

from typing import NamedTuple

from fastppo.data.prompts import encode_prompts
from fastppo.plugins.adapters import load_prompts
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.setup.preflight import Given, choose_processor, read_tokenizer

ASSUMED = 512
"""Tokens of a prompt if there are none to read."""

READ = 2000
"""Rows that are tokenized, evenly spaced in a larger data set."""


class PromptLength(NamedTuple):
    """The length of the prompts of a plan."""

    tokens: int
    source: str
    """Sentence on where the number comes from; "" if the user gave it."""


def prompt_length(config: PPOConfig) -> PromptLength:
    """Return the length of the longest prompt, or `ASSUMED` if the prompts cannot be read."""
    if not config.prompts:
        return PromptLength(ASSUMED, f"prompts of {ASSUMED} tokens are assumed: give --prompts")
    try:
        return _longest(config)
    except (ValueError, ImportError, OSError) as error:  # a plan needs config.json alone
        return PromptLength(ASSUMED, f"prompts of {ASSUMED} tokens are assumed: {error}")


def _longest(config: PPOConfig) -> PromptLength:
    """Tokenize the prompts, with the tokens of their images.

    Raises:
        ValueError: the prompts or the tokenizer do not exist.
    """
    rows = load_prompts(config.prompts, config.split)
    given = Given()
    tokenizer = read_tokenizer(config, given)
    prompts = encode_prompts(
        rows[:: -(-len(rows) // READ)],
        tokenizer,
        column=config.prompt_column,
        max_prompt_tokens=2**31,
        source=config.prompts,
        processor=choose_processor(config, given, [rows], tokenizer),
    )
    lengths = list(map(len, prompts.token_ids))
    among = "" if len(lengths) == len(rows) else f", among {len(lengths)} of {len(rows)} rows"
    return PromptLength(
        max(lengths), f"the longest prompt of {config.prompts} has {max(lengths)} tokens{among}"
    )
