"""The length of the prompts that a plan assumes."""

from __future__ import annotations

from typing import NamedTuple

from fastppo.data.chat import encode_prompt, with_template_variables
from fastppo.models.pretrained import load_tokenizer
from fastppo.plugins.adapters import load_prompts
from fastppo.ppo.options.config import PPOConfig

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
    """Tokenize the prompts.

    Raises:
        ValueError: the prompts or the tokenizer do not exist.
    """
    rows = load_prompts(config.prompts, config.split)
    tokenizer = load_tokenizer(config.model)
    if config.chat_template_kwargs:
        tokenizer = with_template_variables(tokenizer, config.chat_template_kwargs)
    lengths = [
        len(encode_prompt(row.get(config.prompt_column), tokenizer, config.prompts))
        for row in rows[:: -(-len(rows) // READ)]
    ]
    among = "" if len(lengths) == len(rows) else f", among {len(lengths)} of {len(rows)} rows"
    return PromptLength(
        max(lengths), f"the longest prompt of {config.prompts} has {max(lengths)} tokens{among}"
    )
