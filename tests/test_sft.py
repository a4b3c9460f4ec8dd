"""Stage 1: which tokens carry the loss, that it is their mean, and that a run can go on."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from fastppo.data import DataError, encode_prompts
from fastppo.options import read_yaml
from fastppo.run_log import read_jsonl
from fastppo.sft import IGNORED, SFTConfig, encode_demonstrations, train_sft
from fastppo.supervised import Records, newest_checkpoint, split_by_prompt

EOS = 1
UNMARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}w0 {{ m['content'] }} <eos> w39 "
    "{% else %}w1 {{ m['content'] }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}w0 {% endif %}"
)
MARKED = UNMARKED.replace(
    "{{ m['content'] }} <eos>", "{% generation %}{{ m['content'] }} <eos>{% endgeneration %}", 1
)
ROWS = [{"prompt": f"w{i} w{i + 1}", "completion": "w7" + " w8" * (i % 3)} for i in range(8)]


def _tokenizer(template: str | None = None) -> Any:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def _turns(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


def _encode(rows: list[dict], tokenizer: Any = None, max_length: int | None = None) -> list[dict]:
    return encode_demonstrations(rows, tokenizer or _tokenizer(), max_length).examples


def _texts(example: dict[str, list[int]]) -> tuple[str, str]:
    """(all tokens, those with a loss), decoded."""
    tokenizer = tiny.tokenizer()
    assert len(example["input_ids"]) == len(example["labels"])
    for token, label in zip(example["input_ids"], example["labels"], strict=True):
        assert label in (IGNORED, token)
    learned = [label for label in example["labels"] if label != IGNORED]
    return tokenizer.decode(example["input_ids"]), tokenizer.decode(learned)


def _config(tmp_path: Path, **more: Any) -> SFTConfig:
    options = {"batch_size": 4, "gradient_accumulation": 1, "learning_rate": 5e-3, "epochs": 1}
    options |= {"device": "cpu", "eval_share": 0, "log_interval": 1, "checkpoint_interval": 0}
    return SFTConfig(**{**options, "output_dir": str(tmp_path / "run"), **more})


def _train(config: SFTConfig, model: Any = None, rows: Any = ROWS, **more: Any) -> dict[str, float]:
    return train_sft(
        config,
        model=model or tiny.model(),
        tokenizer=more.pop("tokenizer", None) or _tokenizer(),
        rows=rows,
        console=more.pop("console", None) or Console(file=io.StringIO()),
        **more,
    )


# ---------------------------------------------------------------------------------------- the rows


def test_the_loss_is_on_the_completion_and_its_eos() -> None:
    (example,) = _encode([{"prompt": "w1 w2", "completion": " w7 w8"}])
    assert _texts(example) == ("w1 w2 w7 w8 <eos>", "w7 w8 <eos>")


def test_plain_text_has_the_loss_on_every_token_that_something_predicts() -> None:
    (example,) = _encode([{"text": "w1 w2 w3"}])
    assert _texts(example) == ("w1 w2 w3 <eos>", "w2 w3 <eos>")


def test_an_eos_that_is_there_is_not_doubled() -> None:
    rows = [{"text": "w1 w2 <eos>"}, {"prompt": "w1", "completion": "w2 <eos>"}]
    assert [example["input_ids"] for example in _encode(rows)] == [[4, 5, EOS]] * 2


@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["marked", "unmarked"])
def test_a_chat_has_the_loss_on_the_assistants_turns_alone(template: str) -> None:
    """The w39 that the template writes behind each EOS is not the assistant's."""
    row = {"messages": _turns("w10", "w11 w12", "w13", "w14")}
    (example,) = _encode([row], _tokenizer(template))
    assert _texts(example) == (
        "w1 w10 w0 w11 w12 <eos> w39 w1 w13 w0 w14 <eos> w39",
        "w11 w12 <eos> w14 <eos>",
    )


@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["marked", "unmarked"])
@pytest.mark.parametrize("completion", ["w14", [{"role": "assistant", "content": "w14"}]])
def test_behind_a_prompt_of_messages_the_loss_is_on_the_completion_alone(
    template: str, completion: Any
) -> None:
    """The assistant's earlier turn belongs to the prompt; the prompt's ids are those of PPO."""
    tokenizer = _tokenizer(template)
    row = {"prompt": _turns("w10", "w11", "w13"), "completion": completion}
    (example,) = _encode([row], tokenizer)
    assert _texts(example)[1] == "w14 <eos>"
    prompt = encode_prompts([row], tokenizer, max_prompt_tokens=64).token_ids[0]
    assert example["input_ids"][: len(prompt)] == prompt
    assert example["labels"][: len(prompt)] == [IGNORED] * len(prompt)


def test_a_template_that_writes_no_eos_is_given_one() -> None:
    (example,) = _encode(
        [{"messages": _turns("w10", "w11")}], _tokenizer(UNMARKED.replace("<eos>", ""))
    )
    assert _texts(example)[1] == "w11 w39 <eos>"


def test_a_template_that_rewrites_earlier_turns_is_refused_unless_it_has_marks() -> None:
    """As templates do that strip the reasoning of all turns but the last."""
    rewriting = UNMARKED.replace("m['content'] }} <eos>", "m['content'] if loop.last }} <eos>")
    rows = [{"messages": _turns("w10", "w11")}, {"messages": _turns("w10", "w11", "w13", "w14")}]
    with pytest.raises(DataError, match=r"data, row 2: the chat template renders the first 1 mess"):
        _encode(rows, _tokenizer(rewriting))
    marks = MARKED.replace("m['content'] }} <eos>", "m['content'] if loop.last }} <eos>")
    assert _texts(_encode(rows, _tokenizer(marks))[1])[1] == "<eos> w14 <eos>"


def test_long_rows_are_cut_and_rows_without_a_loss_dropped_and_both_are_counted() -> None:
    rows = [
        {"prompt": "w1", "completion": "w2"},
        {"prompt": "w1 w2", "completion": "w3 w4 w5"},
        {"prompt": "w1 w2 w3 w4 w5", "completion": "w6"},
    ]
    found = encode_demonstrations(rows, _tokenizer(), max_length=4)
    assert [_texts(example)[1] for example in found.examples] == ["w2 <eos>", "w3 w4"]
    assert (found.truncated, found.dropped) == (2, 1)
    assert found.prompts == ["w1", "w1 w2"]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "w1"}, "want messages, prompt and completion, or text; got question"),
        ({"prompt": "w1"}, "want messages, prompt and completion, or text; got prompt"),
        ({"prompt": "w1", "completion": 3}, "a string with a string as its completion"),
        ({"prompt": " ", "completion": "w1"}, "the prompt is empty"),
        ({"text": ""}, "text must be a non-empty string"),
        ({"messages": "w1"}, "messages must be a list"),
        ({"messages": _turns("w1")}, "no turn of the assistant, got user"),
        ({"messages": _turns("w1", "w2")[1:]}, "the assistant speaks first"),
        ({"prompt": _turns("w1"), "completion": _turns("w2")}, "begin with the assistant's"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(row: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=f"data, row 2: .*{says}"):
        _encode([ROWS[0], row], _tokenizer(UNMARKED))


def test_messages_without_a_chat_template_are_refused() -> None:
    with pytest.raises(DataError, match="row 1: chat messages, but the tokenizer has no chat temp"):
        _encode([{"messages": _turns("w1", "w2")}])


def test_held_out_rows_share_no_prompt_with_the_others() -> None:
    rows = [{"prompt": f"w{i % 10}", "n": i} for i in range(40)]
    split = split_by_prompt(rows, [row["prompt"] for row in rows], 0.2, seed=0)
    assert len(split.held_out) == 8  # two prompts of four rows
    assert len(split.train) == 32
    assert not {r["prompt"] for r in split.train} & {r["prompt"] for r in split.held_out}
    assert split == split_by_prompt(rows, [row["prompt"] for row in rows], 0.2, seed=0)
    assert split != split_by_prompt(rows, [row["prompt"] for row in rows], 0.2, seed=1)
    with pytest.raises(DataError, match="2 rows of 1 prompts cannot be split"):
        split_by_prompt([1, 2], ["w1", "w1"], 0.1, seed=0)


# ------------------------------------------------------------------------------------ the training


def _mean_cross_entropy(model: Any, rows: list[dict[str, str]]) -> float:
    """From the model's own logits, row by row: Σ −logprob over Σ tokens."""
    model.eval()  # a new model has dropout on
    total, count = 0.0, 0
    for example in _encode(rows):
        ids = torch.tensor([example["input_ids"]])
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits[0].double().log_softmax(-1)
        for i, label in enumerate(example["labels"]):
            if label != IGNORED:
                total -= logprobs[i - 1, label].item()
                count += 1
    return total / count


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "granite"])
def test_the_loss_is_the_mean_over_tokens_of_the_models_own_logits(
    architecture: str, tmp_path: Path
) -> None:
    """One step over all rows in four uneven batches, held-out loss before it included."""
    model = tiny.model(architecture)
    expected = _mean_cross_entropy(model, ROWS)
    config = _config(tmp_path, batch_size=2, gradient_accumulation=4)
    _train(config, model, eval_rows=ROWS)
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert records[0]["step"] == 0
    # fp32 through two layers; a mean of means over batches is off by 1e-2 here
    assert records[0]["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert records[1]["loss"] == pytest.approx(expected, rel=1e-5)


def test_how_a_step_is_cut_into_batches_does_not_matter(tmp_path: Path) -> None:
    """Adam's first step is the gradient's sign, so the second and third are what is compared."""
    states = []
    for batch_size in (8, 1):
        model = tiny.model()
        _train(
            _config(
                tmp_path,
                batch_size=batch_size,
                gradient_accumulation=8 // batch_size,
                epochs=3,
                warmup=0,
                learning_rate=1e-3,
                output_dir=str(tmp_path / str(batch_size)),
            ),
            model,
        )
        states.append(model.state_dict())
    for name, value in states[0].items():
        # fp32 sums in another order; a mean of means moves weights by 1e-3, the learning rate
        torch.testing.assert_close(states[1][name], value, rtol=0, atol=5e-5, msg=name)


def test_it_learns_its_demonstrations_and_to_stop(tmp_path: Path) -> None:
    rows = [{"prompt": f"w{i} w{j}", "completion": f"w{i} w30"} for i in range(8) for j in range(6)]
    config = _config(tmp_path, batch_size=8, epochs=12, eval_share=0.1, learning_rate=1e-2)
    result = _train(config, rows=rows)
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    held_out = [record["eval_loss"] for record in records if "eval_loss" in record]
    assert len(held_out) == 13  # before the first epoch and after each
    assert held_out[0] > 2
    assert held_out[-1] == result["eval_loss"] < 0.5
    assert result["loss"] < 0.5

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    output = model.generate(
        **tokenizer("w3 w5", return_tensors="pt"), max_new_tokens=8, do_sample=False
    )
    assert tokenizer.decode(output[0]) == "w3 w5 w3 w30 <eos>"


def test_the_saved_model_stops_at_the_tokenizers_eos(tmp_path: Path) -> None:
    """A base model's generation config often names another token than its chat template ends on."""
    model = tiny.model()
    model.generation_config.eos_token_id = 5
    _train(_config(tmp_path), model)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert saved.generation_config.eos_token_id == [5, EOS]


def test_a_run_leaves_its_records(tmp_path: Path) -> None:
    config = _config(tmp_path, epochs=2)
    _train(config)
    run = tmp_path / "run"
    assert SFTConfig(**read_yaml(run / "config.yaml", SFTConfig)) == config
    records = read_jsonl(run / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert {"loss", "grad_norm", "learning_rate", "epoch"} <= records[0].keys()
    assert list((run / "tensorboard").glob("events*"))
    with pytest.raises(ValueError, match="holds a run already: go on with `resume: true`"):
        _train(config)


class _Interrupt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_resumed_run_ends_in_the_same_bits(lora_rank: int, tmp_path: Path) -> None:
    """Stopped one step behind a checkpoint: that step is taken, and written, a second time."""
    options = {"epochs": 4, "checkpoint_interval": 3, "lora_rank": lora_rank}
    _train(_config(tmp_path, **options, output_dir=str(tmp_path / "whole")))
    with pytest.raises(KeyboardInterrupt):
        _train(_config(tmp_path, **options), callbacks=[_Interrupt(4)])
    assert newest_checkpoint(tmp_path / "run").name == "checkpoint-3"
    printed = io.StringIO()
    _train(_config(tmp_path, **options, resume=True), console=Console(file=printed, width=200))
    assert f"resuming from {tmp_path / 'run' / 'checkpoint-3'}" in printed.getvalue()
    saved = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("whole", "run")
    ]
    for name, value in saved[0].items():
        assert torch.equal(value, saved[1][name]), name
    records = [read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("whole", "run")]
    assert [r["loss"] for r in records[0]] == [r["loss"] for r in records[1]]
    assert [r["step"] for r in records[1]] == list(range(1, 9))


def test_a_checkpoint_that_was_not_finished_is_passed_over(tmp_path: Path) -> None:
    for step in (90, 100, 110):
        (tmp_path / f"checkpoint-{step}").mkdir()
    for step in (90, 100):
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    assert newest_checkpoint(tmp_path).name == "checkpoint-100"
    assert newest_checkpoint(tmp_path / "nowhere") is None


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_lora_trains_adapters_and_saves_a_plain_model(architecture: str, tmp_path: Path) -> None:
    model = tiny.model(architecture)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _train(_config(tmp_path, lora_rank=4, epochs=4), model)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run").state_dict()
    assert after.keys() == before.keys()
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert moved
    assert not any("embed" in name or "wte" in name or "lm_head" in name for name in moved)


def test_gradient_checkpointing_changes_nothing_but_memory(tmp_path: Path) -> None:
    losses = [
        _train(_config(tmp_path, gradient_checkpointing=on, output_dir=str(tmp_path / str(on))))
        for on in (False, True)
    ]
    assert losses[0]["loss"] == pytest.approx(losses[1]["loss"], rel=1e-6)


def test_bf16_weights_are_saved_as_such(tmp_path: Path) -> None:
    directory = tiny.saved_model(tmp_path / "base")
    config = _config(tmp_path, model=directory, param_dtype="bfloat16", precision="bf16")
    result = train_sft(config, rows=ROWS, console=Console(file=io.StringIO()))
    assert math.isfinite(result["loss"])
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run", dtype="auto")
    assert saved.dtype == torch.bfloat16


def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path: Path) -> None:
    records = Records(tmp_path)
    state = SimpleNamespace(global_step=7)
    records.on_train_begin(None, SimpleNamespace(global_step=0), None)
    with pytest.raises(FloatingPointError, match="the loss is nan at step 7"):
        records.on_log(None, state, None, logs={"loss": math.nan})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert math.isnan(json.loads(line)["loss"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_length": 65}, "max_length=65 is beyond the model's context of 64"),
        ({"device": "cuda:1"}, "choose a GPU with CUDA_VISIBLE_DEVICES=1"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=says):
        _train(_config(tmp_path, **options))


def test_another_models_tokenizer_is_refused(tmp_path: Path) -> None:
    tokenizer = _tokenizer()
    tokenizer.add_tokens(["w99"])
    with pytest.raises(ValueError, match="the tokenizer has 44 tokens and the model 43"):
        _train(_config(tmp_path), tokenizer=tokenizer)


def test_a_tokenizer_without_eos_is_refused() -> None:
    tokenizer = _tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no EOS token"):
        _encode(ROWS, tokenizer)
