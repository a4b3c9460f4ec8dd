"""Environments for tests, with the tiny models' words."""

from __future__ import annotations

import random
from typing import Any

import tiny

from fastppo.data.prompts import Prompts
from fastppo.environments.agents import Agent
from fastppo.environments.turns import Turns
from fastppo.rollout import Rollout, RolloutEngine, Sampling

PROMPTS = [
    {"prompt": f"w{a} w{b}", "total": f"w{a + b}"}
    for a in (2, 3, 4)
    for b in (2, 3)
    for _ in (0, 1)
]

OPTIONS: dict[str, Any] = {
    "stop_token_ids": list(range(3, 23)),  # w0 … w19: a turn ends with one of them
    "max_new_tokens": 4,
    "max_turns": 2,
    "rollout_batch_size": 16,
}


class Calculator:
    """A two-turn environment.

    A first turn that ends with w1 earns 0.5, and the observation contains the total. A second turn
    that ends with the total earns 0.5.
    """

    def reset(self, prompt: str, total: str) -> None:
        self.total, self.turns = total, 0

    def step(self, text: str) -> tuple[str | None, float, bool]:
        self.turns += 1
        wanted = "w1" if self.turns == 1 else self.total
        reward = 0.5 * (text.split()[-1] == wanted)
        return f"{random.choice(['w38', 'w39'])} {self.total}", reward, self.turns == 2


class Exact(Calculator):
    """A deterministic `Calculator`."""

    def step(self, text: str) -> tuple[str | None, float, bool]:
        _, reward, done = super().step(text)
        return f"w38 {self.total}", reward, done


class Scripted(RolloutEngine):
    """Return the same turns for every prompt, and record the prompts."""

    def __init__(self, turns: list[list[int]], stop: tuple[int, ...] = (1,)) -> None:
        self.turns, self.stop = turns, stop
        self.asked: list[list[list[int]]] = []

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        turn = self.turns[len(self.asked)]
        self.asked.append([list(ids) for ids in prompt_ids])
        reason = "stop" if turn[-1] in self.stop else "length"
        count = len(prompt_ids)
        return Rollout([list(turn) for _ in range(count)], [reason] * count)


class ScriptedTexts(Scripted):
    """Write texts, encoded by a tokenizer with a token per byte."""

    def __init__(self, *texts: str, template: str) -> None:
        self.tokenizer = tiny.byte_tokenizer()
        self.tokenizer.chat_template = template
        super().__init__([[*self.tokenizer(text)["input_ids"], 0] for text in texts], stop=(0,))

    def run(self, agent: Any, prompts: Prompts, max_turns: int = 8) -> tuple[list[str], Rollout]:
        """Return what the policy read before each of an agent's turns, and the rollout."""
        runner = Turns(Agent(agent), self.tokenizer, max_turns=max_turns)
        sampling = Sampling(max_new_tokens=200, stop_token_ids=(0,))
        try:
            _, rollout = runner.run(prompts, self, sampling)
        finally:
            runner.close()
        return [self.tokenizer.decode(asked[0]) for asked in self.asked], rollout
