"""Agents written with the `openai` package, with the policy as their model."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from environments import Scripted

from fastppo.data.prompts import Prompts
from fastppo.environments.agents import Agent
from fastppo.environments.loading import load_environment
from fastppo.environments.turns import Turns
from fastppo.models.policy import LanguageModel
from fastppo.rewards.reward import RewardError
from fastppo.rollout import Rollout, RolloutEngine, Sampling
from fastppo.rollout.decoder import DecoderEngine
from runs import make_trainer, records

openai = pytest.importorskip("openai", reason="the package openai is not installed")
pytest.importorskip("uvicorn", reason="the package uvicorn is not installed")

AGENTS = f"chat:{Path(__file__).parents[1] / 'helpers' / 'chat_agent.py'}"
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


def _run(
    agent: Any, engine: RolloutEngine, prompts: Prompts, **options: Any
) -> tuple[Prompts, Rollout]:
    episode_runner = _turns(agent, **options)
    try:
        return episode_runner.run(prompts, engine, SAMPLING)
    finally:
        episode_runner.close()


def test_tokens_and_logprobs_are_the_decoders() -> None:
    policy = LanguageModel(tiny.model())
    torch.manual_seed(3)
    sampling_ends = Sampling(max_new_tokens=4, stop_token_ids=tuple(range(3, 23)))
    episode_runner = _turns("listen")
    heard = sys.modules[episode_runner.environments.make.make.__module__].HEARD  # type: ignore[attr-defined]
    prompts, rollout = episode_runner.run(_prompts(6), DecoderEngine(policy), sampling_ends)
    episode_runner.close()

    assert rollout.sampler_logprobs is not None
    assert rollout.response_mask is not None
    for row, tokens in enumerate(rollout.tokens):
        ids = torch.tensor([prompts.token_ids[row] + tokens])
        with torch.no_grad():
            logprobs = policy.causal_lm(ids).logits.log_softmax(-1)[0, -len(tokens) - 1 : -1]
        expected = logprobs[torch.arange(len(tokens)), tokens][rollout.response_mask[row]]
        torch.testing.assert_close(rollout.sampler_logprobs[row], expected)

    assert rollout.turns is not None
    for row, turns in enumerate(rollout.turns):
        drawn = [turn["text"] for turn in turns if turn["role"] == "policy"]
        assert drawn == [text for text, _ in heard[f"n{row}"]]
        written = _tokenizer().decode(rollout.generated_tokens[row], skip_special_tokens=True)
        assert written.split() == " ".join(drawn).split()
        assert sum(rollout.rewards[row]) == len(drawn)
    assert "stop" in rollout.finish_reasons
    assert any(len(turns) == 6 for turns in rollout.turns)


def test_a_conversation_is_one_response() -> None:
    engine = Scripted([[7, EOS], [10, 10, EOS], [10, EOS]])
    prompts, rollout = _run("run", engine, _prompts())
    assert prompts.token_ids == [[USER, 8, EOS, ASSISTANT]]
    between = [[USER, 12, EOS, ASSISTANT], [USER, 13, EOS, ASSISTANT]]
    assert rollout.tokens == [[7, EOS, *between[0], 10, 10, EOS, *between[1], 10, EOS]]
    assert rollout.response_mask == [
        [True] * 2 + [False] * 4 + [True] * 3 + [False] * 4 + [True] * 2
    ]
    assert rollout.rewards == [[0.0] * 6 + [3 / 12]]
    assert rollout.finish_reasons == ["stop"]


def test_training_an_agent_raises_its_reward(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        tokenizer=_tokenizer(),
        environment=load_environment(f"{AGENTS}:run").function,
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
        # A truncated turn is answered, and the agent returns a reward.
        ("length", [[7, 7, 7, 7]], {"agent": "grade"}, [0.25, 0.25]),
        # Without another turn, n1 raises and n0 returns.
        ("turns", [[7, EOS], [8, EOS]], {"agent": "never_ends", "max_turns": 2}, [2.0, 0.0]),
        ("length", [[7, EOS]], {"agent": "never_ends", "context": 12}, [1.0, 0.0]),
    ],
)
def test_an_agent_returns_a_reward_after_a_truncated_response(
    reason: str, turns: list[list[int]], options: dict[str, Any], expected: list[float]
) -> None:
    _, rollout = _run(engine=Scripted(turns), prompts=_prompts(2), **options)
    assert rollout.finish_reasons == [reason] * 2
    assert rollout.rewards is not None
    assert [sum(row) for row in rollout.rewards] == expected


def _asks(*requests: Any) -> Any:
    """Return an agent that sends these requests."""

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
        ([[]], "there are no messages"),
        ([[{"role": "user", "content": [{"type": "image_url"}]}]], "expected parts of type text"),
    ],
)
def test_a_request_that_does_not_continue_the_conversation_is_refused(
    requests: list[Any], sentence: str
) -> None:
    agent = _asks(*({"messages": messages} for messages in requests))
    with pytest.raises(RewardError, match=rf"environment 'agent' raised Bad.*{sentence}"):
        _run(agent, Scripted([[7, EOS]]), _prompts())


@pytest.mark.parametrize("option", [{"n": 2}, {"tools": [{}]}])
def test_unsupported_request_options_are_refused(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(RewardError, match=f"{name} (is not supported|must be 1)"):
        _run(_asks({"messages": [FIRST], **option}), Scripted([]), _prompts())


def test_the_agent_of_the_page_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text("utf-8")
    names: dict[str, Any] = {}
    exec(page.split("```py\n")[1].split("```")[0], names)
    prompts = Prompts(["w5"], [[1]], {"answer": ["w4"]})
    _, rollout = _run(Agent(names["run"]), Scripted([[8, EOS], [7, EOS]]), prompts)
    assert rollout.rewards is not None
    assert sum(rollout.rewards[0]) == 0.5


def test_a_program_that_reads_openais_variables_can_be_trained() -> None:
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

    _, rollout = _run(Agent(start), Scripted([[7, EOS]]), _prompts())
    assert rollout.rewards == [[0.0, 1.0]]


def test_streaming_sends_the_answer_in_one_piece() -> None:
    def agent(base_url: str, api_key: str) -> float:
        request = {"stream": True, "stream_options": {"include_usage": True}}
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            stream = client.chat.completions.create(model="policy", messages=[FIRST], **request)
            *chunks, last = list(stream)
        choices = [chunk.choices[0] for chunk in chunks]
        text = "".join(choice.delta.content or "" for choice in choices)
        assert (last.usage.completion_tokens, last.usage.total_tokens) == (3, 7)
        return float((text.strip(), choices[-1].finish_reason) == ("w4 w5", "stop"))

    _, rollout = _run(Agent(agent), Scripted([[7, 8, EOS]]), _prompts())
    assert rollout.rewards == [[0.0, 0.0, 1.0]]


def test_concurrent_requests_of_a_session_are_refused() -> None:
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

    _, rollout = _run(Agent(agent), Slow([[7, EOS]]), _prompts())
    assert rollout.rewards == [[0.0, 1.0]]
    assert len(events) == 1
    assert "an earlier request of the session has no answer yet" in events[0]


def test_requests_need_a_key_and_the_server_stops_at_the_end() -> None:
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

    _run(Agent(agent), Scripted([[7, EOS]]), _prompts())
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
def test_an_error_in_an_agent_stops_the_run_and_names_the_line(agent: Any, sentence: str) -> None:
    with pytest.raises(RewardError, match=sentence):
        _run(Agent(agent), Scripted([]), _prompts())


def test_an_invalid_agent_is_refused() -> None:
    with pytest.raises(ValueError, match=r"agent .*nobody.* it has run"):
        load_environment(f"{AGENTS}:nobody")
    with pytest.raises(ValueError, match="unexpected keyword argument 'speed'"):
        load_environment(f"{AGENTS}:run?speed=3")
    with pytest.raises(ValueError, match="expected a port that is a number, got 'x'"):
        load_environment(f"{AGENTS}:run?port=x")
    term = load_environment(f"{AGENTS}:run?port=8123")
    assert term is not None
    term.function.check("prompts.jsonl", ["answer"])
    with pytest.raises(ValueError, match=r"2 processes: .* got port=8123"):
        term.function.check("prompts.jsonl", ["answer"], processes=2)


def test_a_missing_column_of_an_agent_is_refused_before_the_run(
    tmp_path: Path,
) -> None:
    sentence = r"agent takes .*'name'; .*api_key, prompt .*answer"
    with pytest.raises(ValueError, match=sentence):
        make_trainer(
            tmp_path,
            tokenizer=_tokenizer(),
            environment=load_environment(f"{AGENTS}:listen").function,
            prompts=[{"prompt": "w5", "answer": "w6"}],
        )
