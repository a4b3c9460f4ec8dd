"""`rollout: file.py:Engine`, with the engine of docs/your-own-objective.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tiny
from processes import ROOT

from fastppo.ppo.options.config import PPOConfig
from fastppo.rollout import Rollout, RolloutEngine
from fastppo.rollout.generate import GenerateEngine
from runs import make_trainer, records


@pytest.fixture
def engine(tmp_path: Path) -> str:
    """The name of the engine on the page."""
    page = (ROOT / "docs" / "your-own-objective.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(# engine\.py\n.*?)```", page, re.S)
    file = tmp_path / "engine.py"
    file.write_text(code)
    return f"{file}:Engine"


def test_a_run_trains_on_the_responses_of_the_users_engine(engine: str, tmp_path: Path) -> None:
    options = {"engine_options": {"cache_implementation": "dynamic"}, "iterations": 2}
    trainer = make_trainer(tmp_path, rollout=engine, **options)
    trainer.train()
    assert type(trainer.engine).__name__ == "Engine"
    assert isinstance(trainer.engine, RolloutEngine)
    for record in records(trainer):
        assert record["grad_norm"] > 0
        assert record["mismatch/worst"] < 1e-4  # fp32, the same weights


def test_a_run_resumes_with_another_engine(engine: str, tmp_path: Path) -> None:
    make_trainer(tmp_path, rollout=engine, iterations=1).train()
    resumed = make_trainer(tmp_path, rollout="generate", iterations=2, resume=True)
    resumed.train()
    assert isinstance(resumed.engine, GenerateEngine)


def test_an_object_that_only_generates_is_an_engine(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from fastppo.rollout.generate import GenerateEngine\n\n\n"
        "class Alone:\n"
        "    def __init__(self, policy, pad):\n"
        "        self.generate = GenerateEngine(policy.causal_lm, pad).generate\n\n\n"
        "def engine(policy, tokenizer):\n"
        "    return Alone(policy, tokenizer.pad_token_id)\n"
    )
    trainer = make_trainer(tmp_path, rollout=f"{file}:engine", iterations=1)
    assert not trainer.engine.same_weights
    assert trainer.train()["grad_norm"] > 0


def test_an_engine_passed_to_the_trainer_wins(engine: str, tmp_path: Path) -> None:
    given = GenerateEngine(tiny.model(), 0)
    assert make_trainer(tmp_path, rollout=engine, engine=given).engine is given


@pytest.mark.parametrize(
    ("code", "options", "names"),
    [
        ("def engine(policy, tokenizer): ...", {"batch_size": 2}, "engine_options: .*batch_size"),
        ("def engine(policy): ...", {}, "engine_options: .*too many positional arguments"),
        ("def engine(policy, tokenizer): return 1", {}, "rollout=.*must have generate"),
        ("def engine(policy, tokenizer): return 1 / 0", {}, r"rollout=.*line 1"),
        ("other = 1", {}, "rollout .*no function 'engine'"),
    ],
)
def test_an_engine_that_cannot_be_made_is_refused(
    code: str, options: dict[str, Any], names: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(code)
    with pytest.raises(ValueError, match=names):
        make_trainer(tmp_path, rollout=f"{file}:engine", engine_options=options)


def test_an_engine_without_logprobs_fails_the_self_check(tmp_path: Path) -> None:
    class Bare(RolloutEngine):
        def generate(self, prompt_ids: list[list[int]], sampling: Any) -> Rollout:
            return Rollout([[5] for _ in prompt_ids], ["stop" for _ in prompt_ids])

    with pytest.raises(RuntimeError, match=r"self-check: .*Rollout\.sampler_logprobs"):
        make_trainer(tmp_path, engine=Bare()).train()


def test_the_name_of_an_engine_is_an_option() -> None:
    config = PPOConfig(rollout="package.module:Engine", engine_options={"anything": 1})
    assert config.engine_keywords == {"anything": 1}
    assert not config.holds_cache
