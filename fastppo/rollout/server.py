"""Servers that decode for the learner, by OpenAI's completions with token ids: vLLM's.

    POST /v1/completions  {"prompt": [3, 14], "return_token_ids": true, "logprobs": 0, "seed": …}
    answer                {"choices": [{"token_ids": […], "logprobs": {"token_logprobs": […]}}]}

Prompts go out as token ids, and the ids and logprobs of the answer are taken as they are: nothing
is encoded a second time. Each response has a seed of its own, so that it does not depend on which
others are decoded beside it, nor on which server it went to.

Weights are handed over through a directory that the servers see too: the policy whole, which a
server reads in place of its own (`reload_weights`), or, where the policy has LoRA adapters, these
alone, which are loaded under a new name. A handover has a number, its version, and a server says
which it has; one that says another, because it was started again, is handed the weights anew before
it is asked for responses.

A server that does not answer is waited for. Where it stays away, nothing of the iteration is kept,
and the run ends with a checkpoint.

Sources: vLLM 0.32, `vllm/entrypoints/openai/completion/protocol.py`, `entrypoints/rl/online/` and
`entrypoints/serve/lora/` (VLLM_SERVER_DEV_MODE, VLLM_ALLOW_RUNTIME_LORA_UPDATING).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastppo.models.policy import LanguageModel
from fastppo.rollout import FINISHED, TRUNCATED, Rollout, RolloutEngine, RolloutError, Sampling
from fastppo.rollout.prompts import check_prompts
from fastppo.rollout.vllm import sampling_options

WAIT = 600.0
"""Seconds that a server which does not answer is waited for: as long as it takes to start one."""

PAUSE = 2.0
"""Seconds between two attempts to reach a server."""

LONGEST_ANSWER = 3600.0
"""Seconds for one answer, responses or the loading of weights."""
LONGEST_CHECK = 60.0
"""Seconds for what a server says of itself."""

CONCURRENCY = 256
"""Requests at a time where no `batch_size` says how many."""

TOKEN = "VLLM_API_KEY"
"""Environment variable with the servers' key, by vLLM's own name."""

STARTING = (502, 503, 504)
"""Statuses of a server that is not there yet, from it or from what stands before it."""

NOT_FOUND = (
    "; start it with VLLM_SERVER_DEV_MODE=1, for LoRA with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and "
    "--enable-lora"
)
"""Ends the sentence on an address that a server does not have."""

NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
"""Options that a server may have defaults for, from the model's generation config."""


class Handover(NamedTuple):
    """Weights that servers are to have."""

    version: int
    """Counts handovers."""
    name: str
    """That no other handover has, of this run or another."""
    directory: Path
    is_lora: bool
    """Whether it has adapters alone."""


class ServerEngine(RolloutEngine):
    """`generate(prompt_ids, sampling)` by servers.

    Args:
        urls: of servers, http://host:port, which share the responses of a batch.
        policy: gives the first weights.
        directory: where weights are handed over; every server sees it under the same path.
        batch_size: requests at a time.
        say: shows a sentence to the user.
    """

    holds_weights = True
    draws_by_row = True

    def __init__(
        self,
        urls: Sequence[str],
        policy: LanguageModel,
        directory: Path,
        *,
        batch_size: int | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.servers = [Server(url, say) for url in urls]
        self.directory = directory.resolve()
        self.concurrency = batch_size or CONCURRENCY
        self.name = secrets.token_hex(4)
        """Of this process's handovers, before their version."""
        self.version = 0
        self.handover: Handover | None = None
        self.weights_changed(policy)

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        """Draws one response per prompt. `logprobs` are None where sampling is restricted.

        Raises:
            RolloutError: a server does not answer any more.
            ValueError: a prompt is empty, or a server refuses the weights or a request.
        """
        check_prompts(prompt_ids)
        assert self.handover is not None
        handover = self.handover
        requests = _requests(prompt_ids, sampling)
        servers = [self.servers[row % len(self.servers)] for row in range(len(requests))]
        choices: list[dict[str, Any]] = []
        while not choices and requests:
            for server in self.servers:
                server.take(handover)
            with ThreadPoolExecutor(self.concurrency) as pool:
                drawn = pool.map(Server.complete, servers, requests, [handover] * len(requests))
                choices = list(drawn)
            # One that was started again meanwhile may have answered with other weights.
            if not all(server.has(handover) for server in self.servers):
                choices = []
        logprobs = [_logprobs(choice) for choice in choices]
        # Those of softmax(z/T) over the whole vocabulary, unless sampling changed it.
        is_plain = not sampling.is_restricted and (not sampling.greedy or sampling.temperature == 1)
        return Rollout(
            tokens=[list(choice["token_ids"]) for choice in choices],
            finish_reasons=[_finish_reason(choice["finish_reason"]) for choice in choices],
            sampler_logprobs=logprobs,
            logprobs=logprobs if is_plain else None,
            versions=[handover.version] * len(choices),
        )

    @torch.no_grad()
    def weights_changed(self, policy: Any) -> None:
        """Writes the weights where the servers find them, in place of those before. The servers are
        told when they are asked next: one that is away at the end of an update does not end it."""
        self.version += 1
        name = f"{self.name}-{self.version:06}"
        handover = Handover(
            self.version, name, self.directory / name, is_lora=policy.peft is not None
        )
        if handover.is_lora:
            # Else PEFT asks the hub whether the vocabulary is still that of the base model.
            policy.peft.save_pretrained(handover.directory, save_embedding_layers=False)
        else:
            policy.save_policy(handover.directory)
        # Not by the first: before a run has its directory to itself another may be in it.
        if self.handover is not None:
            for directory in self.directory.iterdir():
                if directory != handover.directory:
                    shutil.rmtree(directory, ignore_errors=True)
        self.handover = handover

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # The handover after it has the number that these weights had.
        self.version = state.get("version", 1) - 1


class Server:
    """One server.

    Args:
        url: http://host:port.
        say: shows a sentence to the user.
    """

    def __init__(self, url: str, say: Callable[[str], None]) -> None:
        self.url = url.rstrip("/")
        self.say = say
        self._taking = threading.Lock()
        self._base_model = ""
        self._adapters = ""
        """The name of those that it has of us."""

    def take(self, handover: Handover) -> None:
        """Has the server take the weights, unless it has them; waits for one that is away.

        Raises:
            RolloutError: it stays away.
            ValueError: it refuses them.
        """
        with self._taking:
            until = time.monotonic() + WAIT
            is_told = False
            while True:
                try:
                    if not self._has(handover):
                        self._load(handover)
                    return
                except _AwayError as error:
                    if time.monotonic() > until:
                        raise RolloutError(
                            f"{self.url} has not answered for {WAIT:g} s: {error}"
                        ) from error
                    if not is_told:
                        self.say(f"{self.url} does not answer ({error}): waiting for it")
                        is_told = True
                    time.sleep(PAUSE)

    def has(self, handover: Handover) -> bool:
        """Whether it has the weights, and answers."""
        try:
            return self._has(handover)
        except _AwayError:
            return False

    def complete(self, request: dict[str, Any], handover: Handover) -> dict[str, Any]:
        """The choice that answers a request.

        Raises:
            RolloutError, ValueError: as `take`; it refuses the request, or gives no token ids.
        """
        while True:
            model = handover.name if handover.is_lora else self._base_model
            try:
                answer = self._ask("/v1/completions", {**request, "model": model})
            except _AwayError:
                self.take(handover)
                continue
            except ValueError:
                if self.has(handover):
                    raise
                self.take(handover)  # started again, without the adapters
                continue
            (choice,) = answer["choices"]
            if choice.get("token_ids") is None or choice.get("logprobs") is None:
                raise ValueError(
                    f"{self.url} gives no token ids and logprobs: expected vLLM, or a server that "
                    "has its `return_token_ids`"
                )
            if choice.get("prompt_token_ids", request["prompt"]) != request["prompt"]:
                raise ValueError(f"{self.url} read another prompt than it was given")
            return choice

    def _has(self, handover: Handover) -> bool:
        models = [model["id"] for model in self._ask("/v1/models")["data"]]
        if handover.is_lora:
            return handover.name in models
        self._base_model = models[0]
        return self._ask("/weight_info")["weight_version"] == handover.name

    def _load(self, handover: Handover) -> None:
        path = str(handover.directory)
        if handover.is_lora:
            body: dict[str, Any] = {"lora_name": handover.name, "lora_path": path}
            self._ask("/v1/load_lora_adapter", body)
            if self._adapters:
                self._forget(self._adapters)
            self._adapters = handover.name
            return
        self._ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        # Keys and values in it are of the old weights.
        if not self._ask("/reset_prefix_cache", {})["success"]:
            raise ValueError(f"{self.url} did not empty its prefix cache: who else does it serve?")
        self._ask("/update_weight_version", {"new_version": handover.name})

    def _forget(self, name: str) -> None:
        with contextlib.suppress(ValueError):  # it was started again, and has none of that name
            self._ask("/v1/unload_lora_adapter", {"lora_name": name})

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """What the server answers to a GET, or to a POST of a body; None to an empty answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data)
        request.add_header("Content-Type", "application/json")
        if key := os.environ.get(TOKEN):
            request.add_header("Authorization", f"Bearer {key}")
        timeout = LONGEST_CHECK if body is None else LONGEST_ANSWER
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode(errors="replace")
            if error.code in STARTING:
                raise _AwayError(f"status {error.code}") from error
            hint = NOT_FOUND if error.code == 404 else ""
            raise ValueError(f"{self.url}{path} answered {error.code}: {text}{hint}") from error
        except (OSError, http.client.HTTPException) as error:
            raise _AwayError(str(getattr(error, "reason", error))) from error
        try:
            return json.loads(content)
        except ValueError:  # a sentence, or nothing
            return None


class _AwayError(Exception):
    """A server does not answer."""


def _requests(prompt_ids: list[list[int]], sampling: Sampling) -> list[dict[str, Any]]:
    """A request for each prompt, without the model."""
    options = sampling_options(sampling)
    del options["detokenize"]  # of the engine in the process alone
    generator = torch.Generator().manual_seed(sampling.drawn_seed())
    seeds = torch.randint(2**31, (len(prompt_ids),), generator=generator).tolist()
    return [
        {
            **options,
            **NEUTRAL,
            "prompt": list(prompt),
            "seed": seed,
            "return_token_ids": True,
        }
        for prompt, seed in zip(prompt_ids, seeds, strict=True)
    ]


def _logprobs(choice: dict[str, Any]) -> Tensor:
    """[length] fp32, nats, of the drawn tokens."""
    return torch.tensor(choice["logprobs"]["token_logprobs"], dtype=torch.float32)


def _finish_reason(reason: str) -> str:
    if reason not in (FINISHED, TRUNCATED):
        raise RuntimeError(f"a server ended a response with {reason!r}; expected stop or length")
    return reason
