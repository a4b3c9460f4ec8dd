"""Agents written with the `openai` package, with the policy as their model."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from environments import Scripted, ScriptedTexts

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
SECOND = {"role": "user", "content": "w6"}


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "there are no messages"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "expected parts of type text"),
    ],
)
def test_a_request_without_text_is_refused(messages: list[Any], sentence: str) -> None:
    with pytest.raises(RewardError, match=rf"environment 'agent' raised Bad.*{sentence}"):
        _run(_asks({"messages": messages}), Scripted([[7, EOS]]), _prompts())


@pytest.mark.parametrize(
    "option", [{"n": 2}, {"tools": [{}]}, {"tool_choice": "required"}, {"logprobs": True}]
)
def test_unsupported_request_options_are_refused(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(RewardError, match=name):
        _run(_asks({"messages": [FIRST], **option}), Scripted([]), _prompts())


@pytest.mark.parametrize(
    ("second", "prompt"),
    [
        # A retry of an answered request.
        ([FIRST], [USER, 8, EOS, ASSISTANT]),
        # Another answer of the policy's than it wrote.
        (
            [FIRST, {**ANSWER, "content": "w8"}, FIRST],
            [USER, 8, EOS, ASSISTANT, 11, EOS, USER, 8, EOS, ASSISTANT],
        ),
        # Another conversation.
        ([SECOND], [USER, 9, EOS, ASSISTANT]),
    ],
)
def test_another_conversation_opens_a_row(second: list[Any], prompt: list[int]) -> None:
    agent = _asks({"messages": [FIRST]}, {"messages": second})
    prompts, rollout = _run(agent, Scripted([[7, EOS], [10, EOS]]), _prompts())
    assert prompts.token_ids == [prompt]
    assert rollout.tokens == [[10, EOS]]
    assert rollout.rewards == [[0.0, 1.0]]
    assert rollout.branches is not None
    ((branch,),) = rollout.branches
    assert branch.prompt_ids == [USER, 8, EOS, ASSISTANT]
    assert branch.rollout.tokens == [[7, EOS]]
    assert branch.rollout.finish_reasons == ["stop"]


def test_a_fork_keeps_the_tokens_of_the_common_prefix() -> None:
    agent = _asks(
        {"messages": [FIRST]},
        {"messages": [FIRST, ANSWER, FIRST]},
        {"messages": [FIRST, ANSWER, SECOND]},
        {"messages": [FIRST, ANSWER, FIRST, {**ANSWER, "content": "w5"}, SECOND]},
    )
    # Two pad tokens: decoding ignores them, so that encoding the answer would drop them.
    engine = Scripted([[0, 7, 0, EOS], [8, EOS], [9, EOS], [10, EOS]])
    prompts, rollout = _run(agent, engine, _prompts())
    opening = [USER, 8, EOS, ASSISTANT]
    after = [USER, 9, EOS, ASSISTANT]
    assert prompts.token_ids == [opening]
    assert rollout.tokens == [
        [0, 7, 0, EOS, USER, 8, EOS, ASSISTANT, 8, EOS, *after, 10, EOS],
    ]
    assert rollout.branches is not None
    ((fork,),) = rollout.branches
    assert fork.prompt_ids == [*opening, 0, 7, 0, EOS, *after]
    assert fork.rollout.tokens == [[9, EOS]]
    assert [asked[0] for asked in engine.asked] == [
        opening,
        [*opening, 0, 7, 0, EOS, *opening],
        fork.prompt_ids,
        [*prompts.token_ids[0], *rollout.tokens[0][:-2]],
    ]


def test_the_reward_goes_to_the_last_turn_of_any_row() -> None:
    # The first row would continue, but no turn is left.
    requests = [[FIRST], [SECOND], [FIRST, ANSWER, SECOND]]

    def agent(base_url: str, api_key: str) -> float:
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            for messages in requests:
                try:
                    client.chat.completions.create(model="any", messages=messages)
                except openai.BadRequestError:
                    return 1.0
        return 0.0

    engine = Scripted([[7, EOS], [10, EOS]])
    prompts, rollout = _run(Agent(agent), engine, _prompts(), max_turns=2)
    assert prompts.token_ids == [[USER, 9, EOS, ASSISTANT]]
    assert rollout.rewards == [[0.0, 1.0]]
    assert rollout.finish_reasons == ["turns"]


def _schema(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS_TEMPLATE = (
    "{% if tools %}T{{ tools | map(attribute='function.name') | join(',') }}\n{% endif %}"
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def _run_with_tools(agent: Any, *texts: str) -> tuple[list[str], Rollout]:
    """Return what the policy read before each turn, and the rollout."""
    return ScriptedTexts(*texts, template=TOOLS_TEMPLATE).run(agent, _prompts())


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_shown_and_their_calls_parsed(stream: bool) -> None:
    call = '<tool_call>{"name":  "add", "arguments": {"x": "1"}}</tool_call>'
    seen: list[Any] = []

    def agent(base_url: str, api_key: str) -> float:
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            ask = {"model": "any", "tools": [_schema("add")]}
            messages: list[Any] = [FIRST]
            if stream:
                chunk = next(
                    iter(client.chat.completions.create(messages=messages, stream=True, **ask))
                )
                delta = chunk.choices[0].delta
                function = delta.tool_calls[0].function
                seen.append((delta.content, function.name, function.arguments))
                return 1.0
            reply = client.chat.completions.create(messages=messages, **ask).choices[0]
            function = reply.message.tool_calls[0].function
            seen.append((reply.message.content, function.name, function.arguments))
            seen.append(reply.finish_reason)
            answer = {
                "role": "tool",
                "tool_call_id": reply.message.tool_calls[0].id,
                "content": "two",
            }
            reply = client.chat.completions.create(
                messages=[*messages, reply.message, answer], **ask
            ).choices[0]
            seen.append((reply.message.content, reply.message.tool_calls, reply.finish_reason))
        return 1.0

    read, rollout = _run_with_tools(agent, f"so {call}", "2")
    assert seen[0] == ("so", "add", '{"x": "1"}')
    assert rollout.branches == [[]]
    if not stream:
        assert seen[1:] == ["tool_calls", ("2", None, "stop")]
        # The call is read as it was sampled, with its two spaces.
        assert read == ["Tadd\nu:w5<eos>a:", f"Tadd\nu:w5<eos>a:so {call}<eos>t:two<eos>a:"]


STRICT_TEMPLATE = (
    "{% set ids = namespace(ok=true) %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' and m.tool_call_id | default('') | length != 9 %}"
    "{% set ids.ok = false %}{% endif %}"
    "{% for call in m.tool_calls | default([]) if call.id | default('') | length != 9 %}"
    "{% set ids.ok = false %}{% endfor %}"
    "{% endfor %}"
    "{% if not ids.ok %}{{ raise_exception('ids of calls have nine characters') }}{% endif %}"
) + TOOLS_TEMPLATE
"""As Mistral's, it demands the ids of calls."""


def test_a_chat_template_may_demand_ids_of_calls() -> None:
    def agent(base_url: str, api_key: str) -> float:
        messages: list[Any] = [FIRST]
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            for _ in range(3):
                reply = client.chat.completions.create(
                    model="any", messages=messages, tools=[_schema("add")]
                )
                message = reply.choices[0].message
                messages.append(message)
                for call in message.tool_calls or ():
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": "two"})
        return 1.0

    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    policy = ScriptedTexts(call, 2 * call, "2", template=STRICT_TEMPLATE)
    read, rollout = policy.run(agent, _prompts())
    assert read[2] == f"Tadd\nu:w5<eos>a:{call}<eos>t:two<eos>a:{2 * call}" + (
        "<eos>t:two<eos>t:two<eos>a:"
    )
    assert rollout.branches == [[]]


def test_a_call_that_cannot_be_parsed_is_answered_as_text() -> None:
    seen: list[Any] = []

    def agent(base_url: str, api_key: str) -> float:
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            reply = client.chat.completions.create(
                model="any", messages=[FIRST], tools=[_schema("add")]
            ).choices[0]
        seen.append((reply.message.content, reply.message.tool_calls, reply.finish_reason))
        return 1.0

    _, rollout = _run_with_tools(agent, "<tool_call>{</tool_call>")
    assert rollout.invalid == [1]
    assert seen == [("<tool_call>{</tool_call>", None, "stop")]


def test_other_tools_open_a_row() -> None:
    def agent(base_url: str, api_key: str) -> float:
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            messages: list[Any] = [FIRST]
            for name in ("add", "mul"):
                reply = client.chat.completions.create(
                    model="any", messages=messages, tools=[_schema(name)]
                )
                messages += [reply.choices[0].message, FIRST]
        return 1.0

    read, rollout = _run_with_tools(agent, "so", "2")
    assert rollout.invalid == [0]
    assert read == ["Tadd\nu:w5<eos>a:", "Tmul\nu:w5<eos>a:so<eos>u:w5<eos>a:"]
    assert rollout.branches is not None
    assert len(rollout.branches[0]) == 1


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


def test_concurrent_requests_of_a_session_are_answered_in_turn() -> None:
    answers: list[str] = []

    def agent(base_url: str, api_key: str) -> float:
        def ask(text: str) -> str:
            with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
                messages: Any = [{"role": "user", "content": text}]
                reply = client.chat.completions.create(model="any", messages=messages)
                return str(reply.choices[0].message.content)

        with ThreadPoolExecutor() as threads:
            answers.extend(threads.map(ask, ("w5", "w6", "w6")))
        return 1.0

    # The two equal requests are no retries, so each has an answer of its own.
    _, rollout = _run(Agent(agent), Scripted([[7, EOS], [8, EOS], [9, EOS]]), _prompts())
    assert sorted(answers) == [" w4", " w5", " w6"]
    assert rollout.branches is not None
    assert len(rollout.branches[0]) == 2


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
