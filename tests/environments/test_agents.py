"""Agents of the `openai` package, unchanged, whose model is the policy that is trained."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import tiny
import torch
from environments import Scripted

from fastppo.data.prompts import Prompts
from fastppo.data.world import World
from fastppo.environments.agents import Agent
from fastppo.environments.loading import load_environment
from fastppo.environments.turns import Turns
from fastppo.models.policy import LanguageModel
from fastppo.ppo.setup.build import check_port
from fastppo.rewards.calling import CallOptions
from fastppo.rewards.reward import RewardError
from fastppo.rollout import Rollout, RolloutEngine, Sampling
from fastppo.rollout.decoder import DecoderEngine
from runs import make_trainer, records

openai = pytest.importorskip("openai", reason="the package openai is not installed")
pytest.importorskip("uvicorn", reason="the package uvicorn is not installed")

AGENTS = f"chat:{Path(__file__).parents[1] / 'chat_agent.py'}"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] | replace('user', 'w20') | replace('assistant', 'w21')"
    " | replace('system', 'w22') }} {{ m['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}w21{% endif %}"
)
USER, ASSISTANT, EOS = 23, 24, 1
SAMPLING = Sampling(max_new_tokens=4, stop_token_ids=(EOS,))


def _tokenizer() -> Any:
    tokenizer = tiny.tokenizer(chat=True)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _prompts(count: int = 1) -> Prompts:
    texts = [f"w{5 + i}" for i in range(count)]
    return Prompts(texts, [[1]] * count, {"name": [f"n{i}" for i in range(count)]})


def _turns(agent: Any, **options: Any) -> Turns:
    term = load_environment(f"{AGENTS}:{agent}" if isinstance(agent, str) else agent)
    assert term is not None
    return Turns(term.function, _tokenizer(), **{"max_turns": 8, **options})


def _play(
    agent: Any, engine: RolloutEngine, prompts: Prompts, **options: Any
) -> tuple[Prompts, Rollout]:
    episode_runner = _turns(agent, **options)
    try:
        return episode_runner.run(prompts, engine, SAMPLING)
    finally:
        episode_runner.close()


def test_ids_and_logprobs_are_those_of_the_decoder_and_texts_those_of_the_ids() -> None:
    policy = LanguageModel(tiny.model())
    torch.manual_seed(3)
    sampling_ends = Sampling(max_new_tokens=4, stop_token_ids=tuple(range(3, 23)))
    episode_runner = _turns("listen")
    heard = sys.modules[episode_runner.environments.make.run.__module__].HEARD  # type: ignore[attr-defined]
    prompts, rollout = episode_runner.run(_prompts(6), DecoderEngine(policy), sampling_ends)
    episode_runner.close()

    assert rollout.sampler_logprobs is not None
    assert rollout.written is not None
    for row, tokens in enumerate(rollout.tokens):
        ids = torch.tensor([prompts.token_ids[row] + tokens])
        with torch.no_grad():
            logprobs = policy.causal_lm(ids).logits.log_softmax(-1)[0, -len(tokens) - 1 : -1]
        expected = logprobs[torch.arange(len(tokens)), tokens][rollout.written[row]]
        torch.testing.assert_close(rollout.sampler_logprobs[row], expected)

    assert rollout.turns is not None
    for row, turns in enumerate(rollout.turns):
        drawn = [turn["text"] for turn in turns if turn["role"] == "policy"]
        assert drawn == [text for text, _ in heard[f"n{row}"]]
        written = _tokenizer().decode(rollout.written_tokens[row], skip_special_tokens=True)
        assert written.split() == " ".join(drawn).split()
        assert sum(rollout.rewards[row]) == len(drawn)
    assert "stop" in rollout.finish_reasons
    assert any(len(turns) == 6 for turns in rollout.turns)


def test_a_conversation_is_one_response_in_which_its_messages_stand_between_the_turns() -> None:
    engine = Scripted([[7, EOS], [10, 10, EOS], [10, EOS]])
    prompts, rollout = _play("play", engine, _prompts())
    assert prompts.token_ids == [[USER, 8, EOS, ASSISTANT]]
    between = [[USER, 12, EOS, ASSISTANT], [USER, 13, EOS, ASSISTANT]]
    assert rollout.tokens == [[7, EOS, *between[0], 10, 10, EOS, *between[1], 10, EOS]]
    assert rollout.written == [[True] * 2 + [False] * 4 + [True] * 3 + [False] * 4 + [True] * 2]
    assert rollout.rewards == [[0.0] * 6 + [3 / 12]]
    assert rollout.finish_reasons == ["stop"]


def test_an_agent_is_trained_as_it_is(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        tokenizer=_tokenizer(),
        environment=load_environment(f"{AGENTS}:play").function,
        rewards=None,
        prompts=[{"prompt": f"w{i}"} for i in range(4)],
        iterations=8,
        max_new_tokens=4,
        stop_token_ids=list(range(3, 23)),
        learning_rate=1e-2,
        kl_coef=0.0,
    )
    trainer.train()
    rewards = [line["reward"] for line in records(trainer)]
    assert sum(rewards[-2:]) > 3 * sum(rewards[:2])


@pytest.mark.parametrize(
    ("reason", "turns", "options", "expected"),
    [
        # A turn that is cut off is answered, and the agent is asked what it is worth.
        ("length", [[7, 7, 7, 7]], {"agent": "grade"}, [0.25, 0.25]),
        ("stop", [[7, EOS]], {"agent": "grade"}, [1.0, 1.0]),
        # n1 raises where there is no further turn, n0 returns.
        ("turns", [[7, EOS], [8, EOS]], {"agent": "never_ends", "max_turns": 2}, [2.0, 0.0]),
        ("length", [[7, EOS]], {"agent": "never_ends", "context": 12}, [1.0, 0.0]),
        ("length", [[7, EOS], [7, 7, 7, 7]], {"agent": "never_ends"}, [2.0, 0.0]),
    ],
)
def test_an_agent_whose_response_is_cut_off_still_says_what_it_is_worth(
    reason: str, turns: list[list[int]], options: dict[str, Any], expected: list[float]
) -> None:
    _, rollout = _play(engine=Scripted(turns), prompts=_prompts(2), **options)
    assert rollout.finish_reasons == [reason] * 2
    assert rollout.rewards is not None
    assert [sum(row) for row in rollout.rewards] == expected


def _asks(*requests: Any) -> Any:
    """An agent that sends these requests, whatever is answered."""

    def agent(base_url: str, api_key: str) -> float:
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            for request in requests:
                client.chat.completions.create(**{"model": "any", **request})
        return 1.0

    return Agent(agent)


FIRST = {"role": "user", "content": "w5"}
ANSWER = {"role": "assistant", "content": "w4"}


@pytest.mark.parametrize(
    ("requests", "sentence"),
    [
        (
            [[FIRST], [{"role": "user", "content": "w6"}, ANSWER, FIRST]],
            "message 1 differs from",
        ),
        ([[FIRST], [FIRST, {**ANSWER, "content": "w8"}, FIRST]], "expected 'assistant: +w4', got"),
        ([[FIRST], [FIRST]], "got 1 messages, and the conversation has 2"),
        ([[]], "there are no messages"),
        ([[{"role": "user", "content": [{"type": "image_url"}]}]], "expected parts of type text"),
        ([[{"role": "user", "content": {"text": "w5"}}]], "content of a user message must be text"),
    ],
)
def test_a_request_that_does_not_go_on_with_the_conversation_is_told(
    requests: list[Any], sentence: str
) -> None:
    agent = _asks(*({"messages": messages} for messages in requests))
    with pytest.raises(RewardError, match=rf"environment 'agent' raised Bad.*{sentence}"):
        _play(agent, Scripted([[7, EOS]]), _prompts())


@pytest.mark.parametrize(
    "option",
    [
        {"n": 2},
        {"logprobs": True},
        {"tools": [{}]},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_what_a_request_cannot_ask_for_is_told(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(RewardError, match=f"{name} (is not supported|must be 1)"):
        _play(_asks({"messages": [FIRST], **option}), Scripted([]), _prompts())


@pytest.mark.parametrize(("turns", "reward"), [([7], 1.0), ([8, 7], 0.5), ([8, 8], 0.0)])
def test_the_agent_of_the_page_plays(turns: list[int], reward: float) -> None:
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text("utf-8")
    names: dict[str, Any] = {}
    exec(page.split("```py\n")[1].split("```")[0], names)
    prompts = Prompts(["w5"], [[1]], {"answer": ["w4"]})
    _, rollout = _play(Agent(names["play"]), Scripted([[turn, EOS] for turn in turns]), prompts)
    assert rollout.rewards is not None
    assert sum(rollout.rewards[0]) == reward


def test_a_program_that_reads_openais_variables_is_an_agent() -> None:
    program = """
from openai import OpenAI
reply = OpenAI().chat.completions.create(model="any", messages=[{"role": "user", "content": "w5"}])
print(reply.choices[0].message.content)
"""

    def start(base_url: str, api_key: str) -> float:
        variables = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        done = subprocess.run(
            [sys.executable, "-c", program], env=variables, capture_output=True, check=True
        )
        return float(done.stdout.split() == [b"w4"])

    _, rollout = _play(Agent(start), Scripted([[7, EOS]]), _prompts())
    assert rollout.rewards == [[0.0, 1.0]]


def test_an_agent_that_streams_gets_the_answer_in_one_piece() -> None:
    def agent(base_url: str, api_key: str) -> float:
        request = {"stream": True, "stream_options": {"include_usage": True}}
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            stream = client.chat.completions.create(model="policy", messages=[FIRST], **request)
            *chunks, last = list(stream)
        choices = [chunk.choices[0] for chunk in chunks]
        text = "".join(choice.delta.content or "" for choice in choices)
        assert last.usage.completion_tokens == 3
        return float((text.strip(), choices[-1].finish_reason) == ("w4 w5", "stop"))

    _, rollout = _play(Agent(agent), Scripted([[7, 8, EOS]]), _prompts())
    assert rollout.rewards == [[0.0, 0.0, 1.0]]


@pytest.mark.parametrize("turn", [[7, EOS], [7, 7, 7, 7]])
def test_an_answer_says_how_many_tokens_were_read_and_written(turn: list[int]) -> None:
    """Whether it was cut off or not."""
    seen = []

    def agent(base_url: str, api_key: str) -> float:
        request = {"messages": [FIRST], "response_format": {"type": "text"}}
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            seen.append(client.chat.completions.create(model="policy", **request).usage)
        return 1.0

    prompts, _ = _play(Agent(agent), Scripted([turn]), _prompts())
    (usage,) = seen
    read = len(prompts.token_ids[0])
    assert (usage.prompt_tokens, usage.completion_tokens) == (read, len(turn))
    assert usage.total_tokens == read + len(turn)


def test_an_agent_that_did_not_wait_for_its_answer_is_paid_what_it_returned() -> None:
    returned = threading.Event()

    def agent(base_url: str, api_key: str) -> float:
        with (
            openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=0.5) as client,
            pytest.raises(openai.APITimeoutError),
        ):
            client.chat.completions.create(model="policy", messages=[FIRST])
        returned.set()
        return 0.5

    class Slow(Scripted):
        def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
            returned.wait()
            time.sleep(0.2)
            return super().generate(prompt_ids, sampling)

    _, rollout = _play(Agent(agent), Slow([[7, 7, 7, 7]]), _prompts())
    assert rollout.rewards == [[0.0, 0.0, 0.0, 0.5]]


def test_a_request_that_never_ends_does_not_keep_the_server() -> None:
    sockets = []
    said: list[str] = []

    def agent(base_url: str, api_key: str) -> float:
        host = urlsplit(base_url)
        left_open = socket.create_connection((host.hostname, host.port))
        sockets.append(left_open)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {api_key}\r\n"
        left_open.sendall(f"{head}Host: {host.hostname}\r\nContent-Length: 9\r\n\r\n".encode())
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            client.chat.completions.create(model="policy", messages=[FIRST])
        return 1.0

    options = CallOptions(30, said.append)
    _play(Agent(agent), Scripted([[7, EOS]]), _prompts(), options=options)
    sockets[0].close()
    assert not said


def test_requests_of_a_session_come_one_after_the_other() -> None:
    events = []

    def agent(base_url: str, api_key: str) -> float:
        def ask(text: str) -> None:
            with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
                try:
                    client.chat.completions.create(
                        model="any", messages=[{"role": "user", "content": text}]
                    )
                except openai.BadRequestError as error:
                    events.append(error.message)

        threads = [threading.Thread(target=ask, args=(text,)) for text in ("w5", "w6")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return 1.0

    class Slow(Scripted):
        def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
            while not events:
                time.sleep(0.01)
            return super().generate(prompt_ids, sampling)

    _, rollout = _play(Agent(agent), Slow([[7, EOS]]), _prompts())
    assert rollout.rewards == [[0.0, 1.0]]
    assert len(events) == 1
    assert "an earlier request of the session has no answer yet" in events[0]


def test_without_the_key_of_a_session_nothing_is_answered_and_afterwards_nothing_listens() -> None:
    seen = []

    def agent(base_url: str, api_key: str) -> float:
        for key in ("", "wrong"):
            request = urllib.request.Request(f"{base_url}/models")
            request.add_header("Authorization", f"Bearer {key}")
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(request)
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            assert [model.id for model in client.models.list()] == ["policy"]
            client.chat.completions.create(model="policy", messages=[FIRST])
        seen.append(base_url)
        return 1.0

    _play(Agent(agent), Scripted([[7, EOS]]), _prompts())
    (base_url,) = seen
    assert base_url.startswith("http://127.0.0.1:")
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{base_url}/models")


@pytest.mark.parametrize(
    ("agent", "sentence"),
    [
        (lambda: 1.0, "1.0 was returned without a request"),
        (lambda: 1 / 0, r"raised ZeroDivisionError.* in reset \(.*test_chat.py"),
    ],
)
def test_an_agent_that_fails_stops_the_run_with_its_line(agent: Any, sentence: str) -> None:
    with pytest.raises(RewardError, match=sentence):
        _play(Agent(agent), Scripted([]), _prompts())


def test_an_agent_that_is_late_stops_the_run() -> None:
    ended = threading.Event()
    with pytest.raises(RewardError, match=r"did not return within 0\.2 s in reset"):
        _play(Agent(ended.wait), Scripted([]), _prompts(), options=CallOptions(0.2))
    ended.set()


def test_an_address_without_such_an_agent_is_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"agent .*no function 'nobody' there; it has play"):
        load_environment(f"{AGENTS}:nobody")
    with pytest.raises(ValueError, match="unexpected keyword argument 'speed'"):
        load_environment(f"{AGENTS}:play?speed=3")
    with pytest.raises(ValueError, match="expected a port that is a number, got 'x'"):
        load_environment(f"{AGENTS}:play?port=x")
    with pytest.raises(ValueError, match=r"2 processes: .* got port=8123"):
        check_port(load_environment(f"{AGENTS}:play?port=8123"), World(size=2))


def test_an_agent_that_needs_a_column_which_is_not_there_is_refused_before_the_run(
    tmp_path: Path,
) -> None:
    sentence = r"agent takes .*: missing a required argument: 'name'; .*api_key, prompt, answer$"
    with pytest.raises(ValueError, match=sentence):
        make_trainer(
            tmp_path,
            tokenizer=_tokenizer(),
            environment=load_environment(f"{AGENTS}:listen").function,
            prompts=[{"prompt": "w5", "answer": "w6"}],
        )
