"""Agents written with the `openai` package."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI, BadRequestError, OpenAI

ASKED = ("w9", "w10")
"""Questions after the prompt."""


def run(base_url: str, api_key: str, prompt: str) -> float:
    """Ask three times. The reward is the share of w7 among the words of the answers."""
    answers = []
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": "user", "content": prompt}]
        for question in (*ASKED, None):
            reply = client.chat.completions.create(model="policy", messages=messages)
            message = reply.choices[0].message
            answers += message.content.split()
            messages += [message, {"role": "user", "content": question}]
    return answers.count("w7") / 12


HEARD: dict[str, list[tuple[str, str]]] = {}
"""Answers and finish reasons of `listen`, by prompt."""


async def listen(base_url: str, api_key: str, prompt: str, name: str) -> float:
    """Ask with the async client, and strip the answers. The reward is their number."""
    HEARD[name] = []
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
        for question in (*ASKED, None):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            content = reply.choices[0].message.content
            HEARD[name].append((content, reply.choices[0].finish_reason))
            messages.append({"role": "assistant", "content": content.strip()})
            messages.append({"role": "user", "content": question})
    return float(len(HEARD[name]))


def never_ends(base_url: str, api_key: str, prompt: str, name: str) -> float:
    """Ask until refused. Then n1 raises, and others return the number of answers."""
    count = 0
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": "user", "content": prompt}]
        while True:
            try:
                reply = client.chat.completions.create(model="policy", messages=messages)
            except BadRequestError:
                if name == "n1":
                    raise
                return float(count)
            count += 1
            messages += [reply.choices[0].message, {"role": "user", "content": "w9"}]


def grade(base_url: str, api_key: str, prompt: str) -> float:
    """Ask once, and score the finish reason."""
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": "user", "content": prompt}]
        reply = client.chat.completions.create(model="policy", messages=messages)
    return {"stop": 1.0, "length": 0.25}[reply.choices[0].finish_reason]


SEARCH = {
    "type": "function",
    "function": {"name": "search", "parameters": {"type": "object", "properties": {}}},
}


def research(base_url: str, api_key: str, prompt: str) -> float:
    """Ask two sub-agents, each in a conversation of its own, and then compact the history.

    A sub-agent answers each call of the tool, or the user asks it. The reward is 1 for about half
    of the final answers.
    """
    with OpenAI(base_url=base_url, api_key=api_key) as client:

        def ask(messages: list[Any], **options: Any) -> Any:
            reply = client.chat.completions.create(model="policy", messages=messages, **options)
            messages.append(reply.choices[0].message)
            return reply.choices[0].message

        main: list[Any] = [{"role": "user", "content": prompt}]
        for question in ASKED:
            message = ask(main, tools=[SEARCH])
            helper: list[Any] = [
                {"role": "system", "content": "w12"},
                {"role": "user", "content": question},
            ]
            ask(helper)
            helper.append({"role": "user", "content": "w11"})
            found = ask(helper).content
            main += [
                {"role": "tool", "tool_call_id": call.id, "content": found}
                for call in message.tool_calls or ()
            ] or [{"role": "user", "content": found}]
        ask(main, tools=[SEARCH])
        compacted = [{"role": "user", "content": f"{prompt} w13 {found}"}]
        answer = ask(compacted, tools=[SEARCH])
        return float((answer.content or "").strip() < "w3")
