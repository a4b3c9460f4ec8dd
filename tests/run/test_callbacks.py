"""Callbacks work as in transformers' Trainer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainingArguments,
)

from fastppo.data.world import World
from fastppo.ppo.checkpoints import export_checkpoint
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.trainer import PPOTrainer
from fastppo.run.callbacks import Arguments, Callbacks
from runs import make_trainer, records


class Listener(TrainerCallback):
    """Records its events; sets the flag `asks[event]` at the first of these events."""

    def __init__(self, **asks: str) -> None:
        self.heard: list[tuple[str, int, dict[str, Any]]] = []
        self.asks = asks

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_") or name == "on_init_end":
            return object.__getattribute__(self, name)

        def method(args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
            self.heard.append((name, state.global_step, kwargs))
            flag = self.asks.pop(name, None)
            if flag:
                setattr(control, flag, True)

        return method

    @property
    def events(self) -> list[tuple[str, int]]:
        return [(name.removeprefix("on_"), step) for name, step, _ in self.heard]


def test_events_come_in_the_order_of_transformers(tmp_path: Path) -> None:
    listener = Listener()
    trainer = make_trainer(tmp_path, callbacks=[listener], checkpoint_interval=1)
    trainer.train()
    assert listener.events == [
        ("train_begin", 0),
        ("step_begin", 0),
        ("log", 1),
        ("samples", 1),
        ("step_end", 1),
        ("save", 1),
        ("step_begin", 1),
        ("log", 2),
        ("samples", 2),
        ("step_end", 2),
        ("save", 2),
        ("policy_saved", 2),
        ("run_end", 2),
        ("train_end", 2),
    ]
    for _, _, given in listener.heard:
        assert isinstance(given["model"], PreTrainedModel)
        assert given["processing_class"] is trainer.tokenizer
        assert given["optimizer"] is trainer.optimizer


def test_evaluation_metrics_have_the_names_of_transformers(tmp_path: Path) -> None:
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text("\n".join(map(json.dumps, tiny.PROMPTS[:4])))
    listener = Listener(on_step_begin="should_evaluate")
    trainer = make_trainer(
        tmp_path, callbacks=[listener], eval_prompts=str(held_out), eval_interval=100
    )
    trainer.train()
    evaluations = [
        (step, given["metrics"]) for name, step, given in listener.heard if "eval" in name
    ]
    first, second = records(trainer)
    assert "eval/reward" not in second
    ((step, metrics),) = evaluations  # requested once, never due
    assert step == 1
    assert metrics == {
        name.replace("eval/", "eval_", 1): value
        for name, value in first.items()
        if name.startswith("eval/")
    }
    assert metrics["eval_reward"] == first["eval/reward"]


def test_a_callback_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(
        tmp_path, callbacks=[Listener(on_step_end="should_training_stop")], iterations=5
    )
    metrics = trainer.train()
    assert "1 of 5 iterations: a callback" in capsys.readouterr().err
    assert metrics["reward"] == records(trainer)[-1]["reward"]
    assert len(records(trainer)) == 1
    for name in ("policy/config.json", "report.html", "checkpoint-000001"):
        assert (tmp_path / "run" / name).exists()
    resumed = make_trainer(tmp_path, iterations=2, resume=True)
    resumed.train()
    assert [line["iteration"] for line in records(resumed)] == [0, 1]


def test_a_callback_ends_the_run_before_its_first_iteration(tmp_path: Path) -> None:
    """The run's checkpoint can be exported and resumed."""
    stops = Listener(on_train_begin="should_training_stop")
    model = tiny.saved_model(tmp_path / "model")
    config = PPOConfig(**tiny.options(tmp_path, model=model, iterations=2))
    parts = {"prompts": tiny.PROMPTS, "rewards": [tiny.count_w7]}
    assert PPOTrainer(config, **parts, callbacks=[stops]).train() == {}
    assert not (tmp_path / "run" / "policy").exists()
    export_checkpoint(tmp_path / "run" / "checkpoint-000000", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert PPOTrainer(replace(config, resume=True), **parts).train()["reward"] >= 0


def test_a_callback_requests_a_checkpoint(tmp_path: Path) -> None:
    listener = Listener(on_log="should_save")
    make_trainer(tmp_path, callbacks=[listener], iterations=3).train()
    actual = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert actual == ["checkpoint-000001", "checkpoint-000003"]
    assert [step for name, step in listener.events if name == "save"] == [1, 3]


def test_callbacks_of_transformers_work(tmp_path: Path, capsys) -> None:
    make_trainer(tmp_path, callbacks=[PrinterCallback], iterations=1).train()
    assert "'reward':" in capsys.readouterr().out


def test_an_error_of_a_callback_ends_the_run(tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        closed = False

        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise KeyError("mine")

        def close(self) -> None:
            self.closed = True

    fails = Fails()
    with pytest.raises(KeyError, match="mine"):
        make_trainer(tmp_path, callbacks=[fails]).train()
    assert fails.closed


def test_other_objects_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"TrainerCallback.* list"):
        make_trainer(tmp_path, callbacks=[[]])


def test_arguments_are_the_options_and_the_defaults_of_transformers() -> None:
    arguments = Arguments(PPOConfig(learning_rate=3e-6), run_name="mine")
    assert arguments.learning_rate == 3e-6
    assert arguments.run_name == "mine"
    assert arguments.hub_token is None  # only in TrainingArguments
    assert arguments.logging_first_step == TrainingArguments.logging_first_step
    assert arguments.to_dict() == PPOConfig(learning_rate=3e-6).to_dict()
    assert json.loads(arguments.to_json_string()) == arguments.to_dict()
    assert arguments.to_sanitized_dict()["warn_if"] == str(arguments.to_dict()["warn_if"])
    assert arguments.should_log
    second = Arguments(PPOConfig(), World(rank=1, size=2))
    assert (second.world_size, second.process_index) == (2, 1)
    assert not second.should_save
    with pytest.raises(AttributeError):
        arguments.no_such_option  # noqa: B018


def test_a_request_of_one_rank_holds_for_all() -> None:
    """The other rank of the world requests a stop."""

    class Two(World):
        def gather_results(self, work: Any, name: str = "") -> list[Any]:
            return [work(), [True, False, False]]

    listener = Listener()
    callbacks = Callbacks([listener], PPOConfig(), Two(rank=1, size=1))
    callbacks.begin(0)
    assert callbacks.stop
    assert not callbacks.take("should_save")
    assert not callbacks.state.is_world_process_zero
