"""Classes with tools as methods."""

from __future__ import annotations

import asyncio
import json
import logging
import runpy
from pathlib import Path
from typing import Any

import pytest
import tiny
from environments import Scripted

from fastppo.data.chat import with_text
from fastppo.data.datasets import DataError
from fastppo.data.prompts import Prompts
from fastppo.environments.loading import load_environment
from fastppo.environments.tools import ToolCall, ToolFormat, Tools, ToolTurn
from fastppo.environments.turns import Turns
from fastppo.ppo.metrics import turn_metrics
from fastppo.ppo.options.config import PPOConfig
from fastppo.rewards.reward import RewardError
from fastppo.rollout import Rollout, Sampling

EOS = 0

PLAIN = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STRICT = (
    "{% set turns = namespace(count=0) %}{% for m in messages %}"
    "{% if m['role'] == 'tool' %}"
    "{% if m.get('tool_call_id') | string | length != 9 %}{{ raise_exception('id') }}{% endif %}"
    "<tool {{ m['tool_call_id'] }}>{{ m['content'] }}"
    "{% elif m.get('tool_calls') %}"
    "{% for call in m['tool_calls'] %}"
    "{% if call.get('id') | string | length != 9 %}{{ raise_exception('id') }}{% endif %}"
    "<{{ call['function']['name'] }} {{ call['id'] }}>"
    "{% endfor %}{{ eos_token }}"
    "{% else %}"
    "{% if (m['role'] == 'user') == turns.count % 2 %}{{ raise_exception('order') }}{% endif %}"
    "{% set turns.count = turns.count + 1 %}"
    "<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)
"""As Mistral's: it demands ids of calls, and the texts of user and assistant to alternate."""
SHOWS_TOOLS = "{% for t in tools or [] %}<has {{ t['function']['name'] }}>{% endfor %}"
WITH_TOOLS = SHOWS_TOOLS + PLAIN


class Shop:
    """As TRL's `environment_factory` takes it."""

    def reset(self, **row: Any) -> str | None:
        self.asked: list[str] = []
        self.wanted = row["item"]
        return f" Buy {self.wanted}."

    def price(self, item: str, count: int = 1) -> float:
        """The price of an item.

        Args:
            item: its name
            count: how many
        """
        self.asked.append(item)
        if item == "none":
            raise KeyError(item)
        return 2.5 * count

    def get_reward(self) -> float:
        return float(self.wanted in self.asked)

    def _hidden(self) -> None:
        pass


def _call(arguments: str, name: str = "price") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def _run(
    make: Any,
    turns: list[str],
    *,
    template: str = PLAIN,
    response_template: Any = None,
    max_turns: int = 4,
    count: int = 1,
    columns: dict[str, list[Any]] | None = None,
) -> tuple[Rollout, list[str]]:
    """Return the episodes, and the first one's context before each turn."""
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = template
    if response_template is not None:
        tokenizer.response_template = response_template
    term = load_environment(make)
    assert term is not None
    ids = [[*tokenizer(turn)["input_ids"], EOS] for turn in turns]
    engine = Scripted(ids, stop=(EOS,))
    episode_runner = Turns(term.function, tokenizer, max_turns=max_turns)
    messages = [{"role": "user", "content": "Hello."}]
    columns = columns or {"item": ["tea"] * count}
    prompts = Prompts([messages] * count, [[1]] * count, columns)
    sampling = Sampling(max_new_tokens=200, stop_token_ids=(EOS,))
    _, rollout = episode_runner.run(prompts, engine, sampling)
    return rollout, [tokenizer.decode(asked[0]) for asked in engine.asked]


def test_methods_are_called_and_answered_by_messages() -> None:
    two = _call('{"item": "tea"}') + _call('{"item": "jam", "count": 2}')
    rollout, read = _run(Shop, [two, "It is 2.5."], template=WITH_TOOLS)
    opening = "<has price><user>Hello. Buy tea.<eos><assistant>"
    answers = "<tool>2.5<eos><tool>5.0<eos><assistant>"
    assert read == [opening, f"{opening}{two}<eos>{answers}"]

    tokenizer = tiny.byte_tokenizer()
    (mask,) = rollout.response_mask or ()
    theirs = [token for token, own in zip(rollout.tokens[0], mask, strict=True) if not own]
    assert tokenizer.decode(theirs) == answers
    assert rollout.calls == [["answered", "answered"]]
    assert rollout.finish_reasons == ["stop"]
    (rewards,) = rollout.rewards or ()
    assert (rewards[-1], sum(rewards)) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("said", "outcome", "sentence"),
    [
        (_call("{}", name="_hidden"), "unknown", "Tool _hidden not found."),
        ("<tool_call>[1]</tool_call>", "malformed", "A call must be an object with a name"),
        (_call("[1]"), "malformed", "The arguments of a call must be an object"),
        (_call('{"thing": 1}'), "malformed", "missing a required argument: 'item'"),
        (_call('{"item": "none"}'), "raised", "'none'"),
    ],
)
def test_a_failed_call_is_answered_with_its_error_and_counted(
    said: str, outcome: str, sentence: str
) -> None:
    rollout, read = _run(Shop, [said, "I do not know."])
    assert rollout.calls == [[outcome]]
    answer = read[1].split("<tool>")[-1]
    assert answer.startswith("{'error': ")
    assert sentence in answer
    metrics = turn_metrics(rollout)
    wanted = dict.fromkeys(("answered", "unknown", "malformed", "raised"), 0.0) | {outcome: 1.0}
    assert {name: metrics[f"tools/{name}"] for name in wanted} == wanted


def test_a_lone_surrogate_in_an_argument_is_replaced() -> None:
    """JSON has a form for it, and no tokenizer takes it."""

    class Echo(Shop):
        def echo(self, item: str) -> str:
            """Says it.

            Args:
                item: what
            """
            return item

    rollout, read = _run(Echo, [_call('{"item": "a\\ud800"}', name="echo"), "So."])
    assert rollout.calls == [["answered"]]
    assert read[1].endswith("<tool>a?<eos><assistant>")


def test_exceptions_in_stop_on_stop_the_run() -> None:
    class Strict(Shop):
        stop_on = (KeyError,)

    with pytest.raises(RewardError, match=r"'Strict' raised KeyError\('none'\) in step .*in price"):
        _run(Strict, [_call('{"item": "none"}')])


def test_an_episode_without_further_turns_gets_the_reward() -> None:
    rollout, _ = _run(Shop, [_call('{"item": "tea"}')], max_turns=1)
    assert rollout.rewards is not None
    assert sum(rollout.rewards[0]) == 1.0


def test_a_text_is_appended_as_a_part_to_a_message_of_parts() -> None:
    part, more = {"type": "text", "text": "w1"}, {"type": "text", "text": " w2"}
    assert with_text([part], " w2") == [part, more]
    assert with_text(None, "w2") == "w2"
    assert with_text("w1", " w2") == "w1 w2"


def test_a_column_may_be_named_prompt() -> None:
    heard = []

    class Asked(Shop):
        def reset(self, prompt: Any, **columns: Any) -> str:
            heard.append((prompt, columns))
            return super().reset(**columns)

    _run(Asked, ["Yes."], columns={"prompt": ["another"], "item": ["tea"]})
    assert heard[-1] == ([{"role": "user", "content": "Hello."}], {"item": "tea"})


def test_a_reset_that_returns_no_text_is_an_error() -> None:
    class Tuple(Shop):
        def reset(self, **row: Any) -> Any:
            return "Hello.", {}

    with pytest.raises(RewardError, match="reset must return a text or None, got tuple"):
        _run(Tuple, ["So."])


def test_coroutine_tools_run_concurrently() -> None:
    begun: list[str] = []

    class Slow(Shop):
        async def weigh(self, item: str) -> str:
            """The weight.

            Args:
                item: its name
            """
            begun.append(item)
            while len(begun) < 3:
                await asyncio.sleep(0.001)
            raise OSError("no scales")

    rollout, read = _run(Slow, [_call('{"item": "tea"}', name="weigh"), "So."], count=3)
    assert rollout.calls == [["raised"]] * 3
    assert "<tool>{'error': 'no scales'}" in read[1]


def test_a_system_message_describes_tools_that_the_chat_template_ignores(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "fastppo"):
        _, read = _run(Shop, ["No."])
    system, user = read[0].split("<eos>")[:2]
    assert system.startswith("<system>")
    assert '{"name": "price", "description": "The price of an item."' in system
    assert user == "<user>Hello. Buy tea."
    assert [sentence.partition(": ")[2][:26] for sentence in caplog.messages] == [
        "the chat template ignores ",
        "the tokenizer has no respo",
    ]


def test_calls_are_parsed_by_the_tokenizers_response_template(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Arguments that are no JSON have the types of the tool's schema."""
    template = {
        "start_anchor": "<assistant>",
        "fields": {
            "tool_calls": {
                "open_pattern": r"@(?P<name>\w+)",
                "close": ";",
                "repeats": True,
                "content": "kv-lines",
                "content_args": {"line_sep": ",", "kv_sep": "="},
                "transform": {
                    "type": "function",
                    "function": {"name": "{name}", "arguments": "{content}"},
                },
            },
            "content": {"content": "text"},
        },
    }
    turns = ["@price item=tea,count=3;", "So."]
    with caplog.at_level(logging.INFO, "fastppo"):
        rollout, read = _run(Shop, turns, template=WITH_TOOLS, response_template=template)
    assert rollout.calls == [["answered"]]
    assert "<tool>7.5<eos>" in read[1]
    assert caplog.messages == []


def test_a_chat_template_may_demand_ids_and_separate_calls() -> None:
    template = SHOWS_TOOLS + STRICT
    two = _call('{"item": "tea"}') + _call('{"item": "jam"}')
    rollout, read = _run(Shop, [two, "<tool_call>?", "So."], template=template)
    assert rollout.calls == [["answered", "answered", "malformed"]]
    first, second, third = (text.removeprefix("<has price>") for text in read)
    assert first == "<user>Hello. Buy tea.<eos>"
    assert second == f"{first}{two}<eos><tool call00000>2.5<tool call00001>2.5"
    assert third.startswith(f"{second}<tool_call>?<eos><tool call00000>{{'error': ")


@pytest.mark.parametrize(
    ("written", "strict", "plain"),
    [("ab12cd34e", "ab12cd34e", "ab12cd34e"), ("price:1", "call00000", "price:1")],
)
def test_an_answer_has_the_id_that_the_policy_wrote(written: str, strict: str, plain: str) -> None:
    call = _call(f'{{"item": "tea"}}, "id": "{written}"')
    template = PLAIN.replace("m['content'] }}", "m['content'] }}{{ m.get('tool_call_id') or '' }}")
    _, read = _run(Shop, [call, "So."], template=template)
    assert read[1].endswith(f"<tool>2.5{plain}<eos><assistant>")
    _, read = _run(Shop, [call, call, "So."], template=SHOWS_TOOLS + STRICT)
    assert read[2] == f"{read[1]}{call}<eos><tool {strict}>2.5"


ANSWERS_BEFORE_TEXT = """
{%- for m in messages -%}
  {%- if m['role'] != 'tool' -%}
    <{{ m['role'] }}>
    {%- if m.get('tool_calls') -%}
      <call>
      {%- for answer in messages[loop.index:] if answer['role'] == 'tool' -%}
        <tool>{{ answer['content'] }}
      {%- endfor -%}
    {%- endif -%}
    {{ m['content'] }}
  {%- endif -%}
{%- endfor -%}"""
"""As Gemma 4's, it writes answers into the message with the calls."""

NAMES_FROM_CALLS = """
{%- set last = namespace(call=none) -%}
{%- for m in messages -%}
  {%- if m['role'] == 'tool' -%}
    {%- if not last.call -%}{{ raise_exception('no call') }}{%- endif -%}
    <{{ last.call['function']['name'] }}>{{ m['content'] }}{{ eos_token }}
  {%- else -%}
    {%- set last.call = (m.get('tool_calls') or [none])[0] -%}
    <{{ m['role'] }}>
    {%- if last.call -%}<to {{ last.call['function']['name'] }}>{%- endif -%}
    {{ m['content'] }}{{ eos_token }} {# as a line feed after the stop token #}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<assistant>{%- endif -%}"""
"""As gpt-oss's, it takes the name of an answer's tool from the call before it."""


def test_a_chat_template_may_read_the_calls_of_the_answered_turn() -> None:
    turns = [_call('{"item": "tea"}'), _call("{}", name="nothing"), "<tool_call>?", "So."]
    rollout, read = _run(Shop, turns, template=SHOWS_TOOLS + NAMES_FROM_CALLS)
    assert rollout.calls == [["answered", "unknown", "malformed"]]
    answers = [
        text.removeprefix(f"{before}{turn}<eos>")
        for before, text, turn in zip(read, read[1:], turns, strict=False)
    ]
    assert answers[0] == " <price>2.5<eos><assistant>"
    assert answers[1] == " <nothing>{'error': 'Tool nothing not found.'}<eos><assistant>"
    assert answers[2].startswith(" <unknown>{'error': ")


def test_a_chat_template_that_writes_answers_into_the_turn_before_is_refused() -> None:
    for _ in range(2):  # what was found out about the template does not change the answer
        with pytest.raises(DataError, match=r"'Shop': .* ignores messages of the role tool"):
            _run(Shop, [], template=ANSWERS_BEFORE_TEXT)


def test_the_error_of_a_chat_template_is_that_of_plain_texts() -> None:
    template = STRICT.replace("'tool'", "'no tool'").replace("'id'", "'no id'")
    with pytest.raises(DataError, match="'Shop': the chat template rejects the messages: order"):
        _run(Shop, [], template=template)


def test_a_chat_template_without_tool_messages_is_refused() -> None:
    template = PLAIN.replace("{% for m in messages %}", "{% for m in messages[:2] %}")
    with pytest.raises(DataError, match="'Shop': the chat template ignores messages of the role"):
        _run(Shop, [], template=template)


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("price(self, item: str): ...", "has no docstring"),
        ("price(self, item: 'Item'):\n        'The price.'", "name 'Item' is not defined"),
        ("price(self, item: str, /):\n        'The price.'", "by name, .* no item: str"),
    ],
)
def test_an_invalid_tool_is_refused(method: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"class Mine:\n    def reset(self, **row): ...\n    def {method}\n")
    config = PPOConfig(prompts=str(tmp_path / "prompts.jsonl"), environment=f"{file}:Mine")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "item": "tea"}\n')
    with pytest.raises(ValueError, match=rf"environment .*:Mine: tool 'price': .*{sentence}"):
        load_environment(config.environment)


def test_the_demonstrations_of_the_page_are_read_as_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tools.md").read_text("utf-8")
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = WITH_TOOLS
    tokenizer.save_pretrained(tmp_path / "my-base-model")
    (tmp_path / "shop.py").write_text(page.split("```python\n")[1].split("```")[0])
    code = page.split("```py\n# demonstrations.py\n")[1].split("```")[0]
    (tmp_path / "demonstrations.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    runpy.run_path("demonstrations.py")
    lines = Path("demonstrations.jsonl").read_text().splitlines()
    calls, answers = [json.loads(line) for line in lines[::2]], [json.loads(x) for x in lines[1::2]]
    shop = runpy.run_path("shop.py")["Shop"]
    form = ToolFormat(tokenizer, Tools(shop).schemas, where="demonstrations")
    for row, item in zip(calls, ("tea", "jam"), strict=True):
        assert (
            row["prompt"]
            == f"<has price><user>What is it? The customer wants {item}.<eos><assistant>"
        )
        turn = form.parse([], [], row["completion"])
        assert turn.calls == [ToolCall("price", {"item": item})]
    # The next turn is read after the call and its answer, as in an episode.
    assert (
        answers[0]["prompt"]
        == f"{calls[0]['prompt']}{calls[0]['completion']}<eos><tool>2.5<eos><assistant>"
    )
    assert form.parse([], [], answers[0]["completion"]) == ToolTurn([], text="It costs 2.5.")
