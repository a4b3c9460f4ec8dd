"""Multi-turn episodes: tokens, limits and errors."""

from __future__ import annotations

import asyncio
import functools
import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import tiny
from environments import Scripted

from fastppo.activity import Activity, during, shown_by
from fastppo.data.prompts import Prompts
from fastppo.environments.episodes import as_turns
from fastppo.environments.loading import load_environment
from fastppo.environments.maker import EnvironmentMaker
from fastppo.environments.turns import Turns
from fastppo.models.policy import LanguageModel
from fastppo.rewards.reward import RewardError
from fastppo.rollout import FINISHED, Rollout, RolloutEngine, RolloutError, Sampling
from fastppo.rollout.decoder import DecoderEngine
from fastppo.rollout.one_turn import OneTurn


class Echo:
    """Repeat the policy's turn, for a number of turns."""

    turns = 2
    reward = 0.5

    def reset(self, prompt: Any, **columns: Any) -> Any:
        self.turns_heard: list[str] = []
        return None

    def step(self, text: str) -> Any:
        self.turns_heard.append(text)
        return f"{text} w9", self.reward, len(self.turns_heard) == self.turns


def _prompts(count: int = 2) -> Prompts:
    texts = [f"w1 w{i + 2}" for i in range(count)]
    ids = [tiny.tokenizer()(text)["input_ids"] for text in texts]
    return Prompts(texts, ids, {"name": [f"n{i}" for i in range(count)]})


def _run(
    make: Any, turns: list[list[int]], prompts: Prompts | None = None, **options: Any
) -> tuple[Prompts, Rollout, Scripted]:
    options = {"max_turns": 4, **options}
    engine = Scripted(turns)
    episode_runner = Turns(make, tiny.tokenizer(), **options)
    sampling = Sampling(max_new_tokens=4, stop_token_ids=(1,))
    return *episode_runner.run(prompts or _prompts(), engine, sampling), engine


def test_observations_are_between_the_turns() -> None:
    prompts, rollout, engine = _run(Echo, [[7, 1], [8, 9, 1]])
    assert engine.asked == [
        [[4, 5], [4, 6]],
        [[4, 5, 7, 1, 7, 12], [4, 6, 7, 1, 7, 12]],  # the first turn is w4, and w9 is 12
    ]
    assert rollout.tokens == [[7, 1, 7, 12, 8, 9, 1]] * 2
    assert rollout.response_mask == [[True] * 2 + [False] * 2 + [True] * 3] * 2
    assert rollout.rewards == [[0.0, 0.5, 0.0, 0.0, 0.5]] * 2
    assert rollout.turns is not None
    assert [(turn["role"], turn.get("reward")) for turn in rollout.turns[0]] == [
        ("prompt", None),
        ("policy", 0.5),
        ("environment", None),
        ("policy", 0.5),
    ]
    assert rollout.finish_reasons == ["stop"] * 2
    assert rollout.truncated == [False] * 2
    assert prompts.prompts == _prompts().prompts


def test_waiting_for_environments_is_not_shown_as_generating_tokens() -> None:
    activity, seen = Activity(clock=lambda: 0.0), []

    class Slow(Echo):
        def step(self, text: str) -> Any:
            seen.append(str(activity))
            return super().step(text)

    with shown_by(activity), during("generating"):
        _run(Slow, [[7, 1], [8, 9, 1]])
    assert seen[::2] == [f"generating, turn {turn}, environment Slow, 0 s" for turn in (1, 2)]


def test_a_chat_has_its_templates_text_between_two_turns() -> None:
    """The sampled stop token is not repeated."""
    template = (
        "{% for m in messages %}{{ m['role'] | replace('user', 'w20') | replace('assistant', 'w21')"
        " | replace('tool', 'w22') }} {{ m['content'] }} <eos> {% endfor %}"
        "{% if add_generation_prompt %}w21{% endif %}"
    )

    class Tool(Echo):
        def step(self, text: str) -> Any:
            super().step(text)
            if len(self.turns_heard) == 1:
                return [{"role": "tool", "content": "w9"}], 0.0, False
            return "w10", 0.0, len(self.turns_heard) == 3

    tokenizer = tiny.tokenizer(chat=True)
    tokenizer.chat_template = template
    engine = Scripted([[7, 1], [8], [9, 1]], stop=(1, 8))
    first = [23, 8, 1, 24]
    prompts = Prompts([[{"role": "user", "content": "w5"}]], [first], {})
    episode_runner = Turns(Tool, tokenizer, max_turns=4)
    _, rollout = episode_runner.run(
        prompts, engine, Sampling(max_new_tokens=4, stop_token_ids=(1,))
    )
    then = [25, 12, 1, 24]  # <eos> was drawn; then the tool's message and w21
    after = [1, 23, 13, 1, 24]  # the second turn ended without it
    assert rollout.tokens == [[7, 1, *then, 8, *after, 9, 1]]
    assert engine.asked[2] == [[*first, 7, 1, *then, 8, *after]]
    # The conversation as a whole is what the template makes of its messages.
    messages = [
        *({"role": "user", "content": "w5"}, {"role": "assistant", "content": "w4"}),
        *({"role": "tool", "content": "w9"}, {"role": "assistant", "content": "w5"}),
        {"role": "user", "content": "w10"},
    ]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert engine.asked[2] == [ids]


@pytest.mark.parametrize(("keeps", "per_episode"), [(False, 100), (True, 23)])
def test_an_episode_of_eight_turns_computes_only_what_is_new(
    keeps: bool, per_episode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn is one token, and an observation two. So turn t has 3t − 1 tokens before it, of which
    all but three, or two in the first turn, are in the cache."""

    class Observer(Echo):
        turns = 8

        def step(self, text: str) -> Any:
            _, reward, done = super().step(text)
            return "w9 w10", reward, done

    engine = DecoderEngine(LanguageModel(tiny.model()))
    if not keeps:
        monkeypatch.setattr(engine, "conversations", nullcontext)
    computed = []
    engine.policy.causal_lm.base_model.register_forward_pre_hook(
        lambda module, args, keywords: computed.append(keywords["input_ids"].numel()),
        with_kwargs=True,
    )
    sampling = Sampling(4, stop_token_ids=tuple(tiny.VOCABULARY.values()), seed=1)
    runner = Turns(Observer, tiny.tokenizer(), max_turns=8)
    _, rollout = runner.run(_prompts(2), engine, sampling)
    assert [sum(mask) for mask in rollout.response_mask] == [8, 8]
    assert sum(computed) == 2 * per_episode
    assert engine.kept is None


def test_a_template_that_strips_thoughts_leaves_sampled_tokens() -> None:
    """Like Qwen3's, it drops the thought of every turn before the latest user message."""
    template = (
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% set text = m['content'] %}"
        "{% if m['role'] == 'assistant' and loop.index0 < ns.last %}"
        "{% set text = text.split('w31')[-1] | trim %}{% endif %}"
        "{{ {'user': 'w20', 'assistant': 'w21'}[m['role']] }} {{ text }} <eos> {% endfor %}"
        "{% if add_generation_prompt %}w21{% endif %}"
    )

    class Twice(Echo):
        turns = 3

        def step(self, text: str) -> Any:
            _, reward, done = super().step(text)
            return "w9", reward, done

    tokenizer = tiny.tokenizer(chat=True)
    tokenizer.chat_template = template
    thought = tokenizer("w30 w8 w31", add_special_tokens=False)["input_ids"]
    turns = [[*thought, 7, 1], [*thought, 8, 1], [*thought, 9, 1]]
    engine = Scripted(turns)
    opening = [{"role": "user", "content": "w5"}]
    first = tokenizer.apply_chat_template(opening, add_generation_prompt=True, return_dict=False)
    _, rollout = Turns(Twice, tokenizer, max_turns=4).run(
        Prompts([opening], [first], {}), engine, Sampling(max_new_tokens=8, stop_token_ids=(1,))
    )
    between = tokenizer("w20 w9 <eos> w21", add_special_tokens=False)["input_ids"]
    response = [*turns[0], *between, *turns[1], *between, *turns[2]]
    assert rollout.tokens == [response]
    assert rollout.generated_tokens == [[*turns[0], *turns[1], *turns[2]]]
    assert engine.asked[2] == [[*first, *turns[0], *between, *turns[1], *between]]
    # Rendered again, the conversation would have lost both thoughts.
    messages = [*opening]
    for answer in ("w30 w8 w31 w4", "w30 w8 w31 w5"):
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": "w9"})
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert len(ids) == len(engine.asked[2][0]) - 2 * len(thought)


@pytest.mark.parametrize("from_reset", [True, False])
def test_turns_start_with_the_system_message(from_reset: bool) -> None:
    messages = [{"role": "system", "content": "w8"}, {"role": "user", "content": "w5"}]

    class Game(Echo):
        def reset(self, prompt: Any) -> Any:
            self.turns_heard = []
            return messages if from_reset else None

    tokenizer = tiny.tokenizer(chat=True)
    prompts = Prompts(["w1"] if from_reset else [messages], [[4]], {})
    episode_runner = Turns(Game, tokenizer, max_turns=1)
    engine = Scripted([[7, 1]], stop=(1,))
    _, rollout = episode_runner.run(
        prompts, engine, Sampling(max_new_tokens=4, stop_token_ids=(1,))
    )
    assert rollout.turns is not None
    roles = [turn["role"] for turn in rollout.turns[0]]
    assert roles == ["system", "user", "policy", "environment"]
    assert rollout.turns[0][0]["text"] == "w8"


def test_reset_may_return_the_first_observation() -> None:
    class Opening(Echo):
        turns = 1

        def reset(self, prompt: str) -> str:
            self.turns_heard = []
            return f"{prompt} w30"

    prompts, _, engine = _run(Opening, [[7, 1]])
    assert engine.asked[0] == prompts.token_ids == [[4, 5, 33], [4, 6, 33]]
    assert prompts.prompts == _prompts().prompts


@pytest.mark.parametrize(
    ("options", "turns", "reason", "length"),
    [
        ({"max_turns": 2}, [[7, 1], [7, 1]], "turns", 8),
        ({}, [[7, 1], [7, 7, 7, 7]], "length", 8),
        # Another turn of four has no room after the first answer, which ends the response.
        ({"context": 9}, [[7, 1]], "length", 4),
    ],
)
def test_limits_end_an_episode(options, turns, reason, length) -> None:
    class Endless(Echo):
        turns = 99

    _, rollout, engine = _run(Endless, turns, **options)
    assert rollout.finish_reasons == [reason] * 2
    assert rollout.truncated == [True] * 2
    assert rollout.lengths == [length] * 2
    assert len(engine.asked) == len(turns)


def test_coroutines_run_concurrently() -> None:
    """All steps start before any of them ends."""
    begun: list[int] = []

    class Waiting(Echo):
        async def step(self, text: str) -> Any:
            begun.append(1)
            while len(begun) % 3:
                await asyncio.sleep(0.001)
            return Echo.step(self, text)

    prompts = _prompts(3)
    _, rollout, _ = _run(Waiting, [[7, 1], [8, 1]], prompts)
    assert rollout.rewards == [[0.0, 0.5, 0.0, 0.5]] * 3


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, r"returned None in step; expected \(observation, reward, done\)"),
        (("w1", 1.0, True, "won"), "returned 'won' in step; expected a dict"),
        (("w1", 1.0, True, {"invalid": "no"}), "returned invalid='no' in step; expected a bool"),
        (("w1", 1.0, True, {"outcome": 1}), "returned outcome=1 in step; expected a text"),
        (("w1", "much", False), "returned the reward 'much' in step; expected a number"),
        (("w1", math.nan, False), "returned the reward nan in step"),
        (("w1", 1.0, "no"), "returned done='no' in step; expected a bool"),
        ((None, 1.0, False), "returned the observation None in step; expected a text or chat"),
    ],
)
def test_an_invalid_answer_stops_the_run_and_saves_the_episode(
    returned, says, tmp_path: Path
) -> None:
    class Wrong(Echo):
        def step(self, text: str) -> Any:
            return super().step(text) if not self.turns_heard else returned

    saved = tmp_path / "failed_episode.json"
    with pytest.raises(RewardError, match=f"environment 'Wrong' {says}"):
        _run(Wrong, [[7, 1], [8, 1]], failure_file=saved)
    record = json.loads(saved.read_text())
    assert record["turns"] == [
        {"role": "prompt", "text": "w1 w2"},
        {"role": "policy", "text": " w4", "reward": 0.5},
        {"role": "environment", "text": " w4 w9"},
        {"role": "policy", "text": " w5", "reward": 0.0},
    ]
    assert record["prompt"] == "w1 w2"
    assert record["columns"] == {"name": "n0"}
    assert record["conversation"].split() == ["w1", "w2", "w4", "<eos>", "w4", "w9", "w5", "<eos>"]


@pytest.mark.parametrize("is_async", [False, True])
def test_environments_are_closed_once(is_async: bool) -> None:
    closed: list[Any] = []

    class Server(Echo):
        turns = 1

        def close(self) -> None:
            closed.append(self)

    class AsyncServer(Echo):
        turns = 1

        async def close(self) -> None:
            await asyncio.sleep(0)
            closed.append(self)

    make = AsyncServer if is_async else Server
    episode_runner = Turns(make, tiny.tokenizer(), max_turns=2)
    sampling = Sampling(max_new_tokens=4, stop_token_ids=(1,))
    episode_runner.close()
    assert closed == []
    for count in (2, 3):
        episode_runner.run(_prompts(count), Scripted([[7, 1]]), sampling)
    episode_runner.close()
    episode_runner.close()
    assert len({*map(id, closed)}) == len(closed) == 3
    episode_runner.run(_prompts(1), Scripted([[7, 1]]), sampling)
    episode_runner.close()
    assert len({*map(id, closed)}) == 4, "after them come new ones"


@pytest.mark.parametrize(
    ("observation", "says"),
    [
        ([{"role": "user", "content": "w3"}], "it must be a text because the prompt is one"),
        ("", "it has no tokens"),
    ],
)
def test_an_invalid_observation_is_refused(observation, says) -> None:
    class Odd(Echo):
        def step(self, text: str) -> Any:
            return observation, 0.0, False

    with pytest.raises(RewardError, match=f"an observation: .*{says}"):
        _run(Odd, [[7, 1]])


def test_an_episode_without_room_is_saved(tmp_path: Path) -> None:
    failed = tmp_path / "failed_episode.json"
    says = r"an episode begins with 2 tokens, .*episode saved to .*failed_episode.json"
    with pytest.raises(RewardError, match=says):
        _run(Echo, [[7, 1]], context=5, failure_file=failed)
    assert json.loads(failed.read_text())["prompt"] == "w1 w2"


def test_texts_that_no_tokenizer_takes_are_replaced() -> None:
    """Lone surrogates, which an environment may have from a policy's JSON."""

    class Broken(Echo):
        def reset(self, prompt: str) -> str:
            self.turns_heard = []
            return "w3 \ud83d"

        def step(self, text: str) -> Any:
            super().step(text)
            return "w9 \ud83d", 0.0, len(self.turns_heard) == 2

    _, _, engine = _run(Broken, [[7, 1], [7, 1]])
    tokenizer = tiny.tokenizer()
    opening, observation = (tokenizer(f"{word} ?")["input_ids"] for word in ("w3", "w9"))
    assert [asked[0] for asked in engine.asked] == [opening, [*opening, 7, 1, *observation]]


@pytest.mark.parametrize("opening", ["", "  "])
def test_an_empty_text_of_reset_is_refused(opening: str) -> None:
    class Empty(Echo):
        def reset(self, prompt: Any) -> str:
            return opening

    with pytest.raises(RewardError, match="what reset returned: the prompt is empty"):
        _run(Empty, [[7, 1]])


def test_a_text_of_reset_is_a_user_message_after_a_chat() -> None:
    """After the system message, as an observation would be."""
    chat = [{"role": "system", "content": "w8"}, {"role": "user", "content": "w5"}]

    class Opening(Echo):
        turns = 1

        def reset(self, prompt: Any) -> str:
            self.turns_heard = []
            return "w30"

    tokenizer = tiny.tokenizer(chat=True)
    engine = Scripted([[7, 1]], stop=(1,))
    sampling = Sampling(max_new_tokens=4, stop_token_ids=(1,))
    Turns(Opening, tokenizer, max_turns=1).run(Prompts([chat], [[4]], {}), engine, sampling)
    messages = [chat[0], {"role": "user", "content": "w30"}]
    wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert engine.asked[0] == [wanted]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "w1"}, {"type": "text", "text": " w2"}], "w1 w2"),
        ([{"type": "image"}, {"type": "image", "text": None}], "[image][image]"),
        (None, ""),
        ("w1", "w1"),
    ],
)
def test_turns_have_texts(content: Any, text: str) -> None:
    """Of messages with parts, and of those without content, such as calls of tools."""
    assert as_turns([{"role": "user", "content": content}], "x") == [{"role": "user", "text": text}]


def test_a_partial_of_a_class_has_the_name_of_the_class() -> None:
    assert EnvironmentMaker(functools.partial(Echo)).__name__ == "Echo"


def test_an_environment_is_loaded_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("class Mine:\n    pass\n")
    term = load_environment(f"{path}:Mine")
    assert term is not None
    assert type(term.function()).__name__ == "Mine"
    changed = tmp_path / "other.py"
    changed.write_text("class Mine:\n    x = 1\n")
    other = load_environment(f"{changed}:Mine")
    assert other is not None
    assert other.fingerprint != term.fingerprint
    assert load_environment("") is None
    with pytest.raises(ValueError, match=r"environment .*: no function 'Yours' there; it has Mine"):
        load_environment(f"{path}:Yours")
    with pytest.raises(ValueError, match=r"environment mine: "):
        load_environment("mine")


@pytest.mark.parametrize("has_environment", [False, True])
def test_an_empty_response_is_refused(has_environment: bool) -> None:
    """No token would carry its reward."""

    class SecondIsEmpty(RolloutEngine):
        def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
            return Rollout([[7, 1], [], [1]], [FINISHED] * 3)

    episode_runner = Turns(Echo, tiny.tokenizer(), max_turns=2) if has_environment else OneTurn()
    with pytest.raises(RolloutError, match=r"response 1 of 3 .* is empty: an engine must"):
        episode_runner.run(_prompts(3), SecondIsEmpty(), Sampling(4))
