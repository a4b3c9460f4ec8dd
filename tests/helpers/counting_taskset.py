"""An environment of verifiers 0.4 with its own harness: three attempts at a sum."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult

TRIES = 3

__all__ = ["Chat", "Counting", "Sums"]


class SumData(vf.TaskData):
    """A question and its answer."""

    answer: str


class SumConfig(vf.TaskConfig):
    """Options of the task."""

    is_ill: bool = False


class Sum(vf.Task[SumData, vf.State, SumConfig]):
    """Reward a right answer, minus an eighth per attempt."""

    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        """Return 1 if any attempt is right."""
        if self.config.is_ill:
            raise ValueError("the judge is ill")
        said = [message.content.strip() for message in trace.assistant_messages]
        return float(self.data.answer in said)

    @vf.reward(weight=-0.125)
    async def tries(self, trace: vf.Trace) -> float:
        """Return the number of attempts."""
        return float(trace.num_turns)


class SumsConfig(vf.TasksetConfig):
    """Options of the tasks."""

    task: SumConfig = SumConfig()


class Sums(vf.Taskset[Sum, SumsConfig]):
    """An infinite taskset."""

    INFINITE = True

    def load(self) -> Iterator[Sum]:
        """Yield 0 + 1, 1 + 1 and so on."""
        for number in itertools.count():
            answer = str(number + 1)
            data = SumData(prompt=f"{number} + 1?", system_prompt="Count.", answer=answer)
            yield Sum(data, self.config.task)


class CountingConfig(vf.EnvConfig):
    """The agent."""

    agent: vf.AgentConfig = vf.AgentConfig()


class Counting(vf.Env[CountingConfig]):
    """Ask again until the answer is right or the attempts are used."""

    async def run(self, task: Any, agents: Any) -> None:
        """Run an episode."""
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(TRIES - 1):
                if segment.terminated or segment.last_reply == task.data.answer:
                    return
                segment = await interaction.turn("no, again")


class Chat(vf.Harness[vf.HarnessConfig]):
    """Call the model in this process."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
    ) -> ProgramResult:
        """Send one request."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message.model_dump(exclude_none=True) for message in prompt]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return ProgramResult(exit_code=0, stdout="", stderr="")
