"""Servers that decode for the learner, by OpenAI's completions with token ids: vLLM's.

    POST /v1/completions  {"prompt": [3, 14], "return_token_ids": true, "logprobs": 0, "seed": …}
    answer                {"choices": [{"token_ids": […], "logprobs": {"token_logprobs": […]}}]}

Prompts go out as token ids, and the ids and logprobs of the answer are taken as they are: nothing
is encoded a second time. Each response has a seed of its own, so that, but for rounding, it does
not depend on which others are decoded beside it, nor on which server it went to.

Weights are handed over through a directory that the servers see too: the policy whole, which a
server reads in place of its own (`reload_weights`), or, where the policy has LoRA adapters, these
alone, which are loaded under a new name. A handover has a number, its version, and a server says
which it has; one that says another, because it was started again, is handed the weights anew before
it is asked for responses.

Requests go out in rounds. One that was not answered is sent again in the next, before which a
server that is away is waited for. Where it stays away, or after the last round, nothing of the
iteration is kept, and the run ends with a checkpoint.

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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastppo.data.web import make_opener
from fastppo.models.policy import LanguageModel
from fastppo.rollout import Rollout, RolloutEngine, RolloutError, Sampling, check_rollout
from fastppo.rollout.prompts import check_prompts
from fastppo.rollout.vllm import as_rollout, sampling_options

WAIT = 600.0
"""Seconds that a server which does not answer is waited for: as long as it takes to start one."""

PAUSE = 2.0
"""Seconds between two attempts to reach a server, and between two rounds of requests."""

ROUNDS = 5
"""Rounds in which the requests of a batch are sent."""

LONGEST_ANSWER = 3600.0
"""Seconds for one answer, responses or the loading of weights."""
LONGEST_CHECK = 60.0
"""Seconds for what a server says of itself."""

CONCURRENCY = 256
"""Requests at a time where no `batch_size` says how many."""

TOKEN = "VLLM_API_KEY"
"""Environment variable with the servers' key, by vLLM's own name."""

BUSY = (408, 429)
"""Statuses below 500 that ask for the same request later."""

LONGEST_REFUSAL = 500
"""Characters that are shown of what a server says is wrong."""

NOT_FOUND = (
    "; start it with VLLM_SERVER_DEV_MODE=1, for LoRA with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and "
    "--enable-lora"
)
"""Ends the sentence on an address that a server does not have."""

CLOSED = "the rollout engine was closed"
"""The error of a call of `generate` that is under way when the engine is closed."""

GONE = "it no longer has the weights"
"""Said of a server that was restarted or does not answer."""

NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
"""Options that a server may have defaults for, from the model's generation config."""


class Handover(NamedTuple):
    """Weights that servers are to have."""

    version: int
    """Counts handovers."""
    name: str
    """Unique among the handovers of all runs."""
    directory: Path
    is_lora: bool
    """Whether it holds adapters only."""


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
        self.vocabulary = policy.head.vocabulary
        self.directory = directory.resolve()
        self.concurrency = batch_size or CONCURRENCY
        self.name = secrets.token_hex(4)
        """Prefix of the names of this process's handovers."""
        self.version = 0
        self.handover: Handover | None = None
        self._closing = threading.Event()
        """Set where those calls of `generate` are to end that go on now."""
        self.weights_changed(policy)

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        """Draws one response per prompt. `logprobs` are None where sampling is restricted.

        Raises:
            RolloutError: a server does not answer any more, refuses the weights or a request, or
                answers what cannot be trained on; or the engine was closed meanwhile.
            ValueError: a prompt is empty.
        """
        check_prompts(prompt_ids)
        assert self.handover is not None
        try:
            choices = self._complete(_requests(prompt_ids, sampling), self.handover)
            with _protocol("a server of rollout_urls"):
                rollout = as_rollout(
                    tokens=[list(choice["token_ids"]) for choice in choices],
                    finish_reasons=[choice["finish_reason"] for choice in choices],
                    sampler_logprobs=[_logprobs(choice) for choice in choices],
                    sampling=sampling,
                )
            check_rollout(rollout, self.vocabulary, sampling.max_new_tokens)
        except ValueError as error:
            raise RolloutError(str(error)) from error
        return replace(rollout, versions=[self.handover.version] * len(choices))

    def _complete(self, requests: list[dict[str, Any]], handover: Handover) -> list[dict[str, Any]]:
        """The choices that answer the requests; raises as `generate`."""
        closing = self._closing
        choices: dict[int, dict[str, Any]] = {}
        failure = ""

        def ask(row: int) -> dict[str, Any] | _AwayError:
            if closing.is_set():
                raise RolloutError(CLOSED)
            try:
                return self._server_of(row).complete(requests[row], handover)
            except _AwayError as error:
                return error

        for number in range(ROUNDS):
            if number:
                _pause(closing)
            for server in self.servers:
                server.take(handover, closing)
            open_rows = [row for row in range(len(requests)) if row not in choices]
            with ThreadPoolExecutor(self.concurrency) as pool:
                for row, answer in zip(open_rows, pool.map(ask, open_rows), strict=True):
                    if isinstance(answer, _AwayError):
                        failure = f"{self._server_of(row).url}: {answer}"
                    else:
                        choices[row] = answer
            # One that was started again meanwhile may have answered with other weights.
            for server in self.servers:
                if not server.has(handover):
                    failure = f"{server.url}: {GONE}"
                    for row in range(len(requests)):
                        if self._server_of(row) is server:
                            choices.pop(row, None)
            if len(choices) == len(requests):
                return [choices[row] for row in range(len(requests))]
        missing = len(requests) - len(choices)
        raise RolloutError(
            f"no answer to {missing} of {len(requests)} requests in {ROUNDS} rounds; the last "
            f"failure: {failure}"
        )

    def _server_of(self, row: int) -> Server:
        return self.servers[row % len(self.servers)]

    @torch.no_grad()
    def weights_changed(self, policy: Any) -> None:
        """Writes the weights to the shared directory and deletes the previous ones. Servers load
        them before their next request, so one that is down at the end of an update ends no run."""
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

    def close(self) -> None:
        """Makes a call of `generate` in another thread stop waiting for servers and raise."""
        self._closing.set()
        self._closing = threading.Event()

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
        self._open = make_opener().open
        self._base_model = ""
        self._adapter_name = ""
        """Name of the adapters that this run has loaded into the server."""

    def take(self, handover: Handover, closing: threading.Event) -> None:
        """Has the server take the weights, unless it has them; waits for one that is away.

        Args:
            closing: set where it is to be waited for no longer.

        Raises:
            RolloutError: it stays away, or is waited for no longer.
            ValueError: it refuses the weights.
        """
        until = time.monotonic() + WAIT
        is_told = False
        while True:
            try:
                if not self._has(handover):
                    self._load(handover)
                return
            except _AwayError as error:
                if time.monotonic() > until:
                    raise RolloutError(f"waited {WAIT:g} s for {self.url}: {error}") from error
                if not is_told:
                    self.say(f"waiting for {self.url}: {error}")
                    is_told = True
            _pause(closing)

    def has(self, handover: Handover) -> bool:
        """Whether it has the weights, and answers."""
        try:
            return self._has(handover)
        except _AwayError:
            return False

    def complete(self, request: dict[str, Any], handover: Handover) -> dict[str, Any]:
        """The choice that answers a request.

        Raises:
            _AwayError: it does not answer, or was started again and has not the adapters.
            ValueError: it refuses the request, or gives no token ids.
        """
        model = handover.name if handover.is_lora else self._base_model
        try:
            choices = self._ask("/v1/completions", "choices", {**request, "model": model})
        except ValueError as error:
            if self.has(handover):
                raise
            raise _AwayError(GONE) from error
        with _protocol(self.url):
            choice = choices[0]
            has_tokens = None not in (choice.get("token_ids"), choice.get("logprobs"))
        if not has_tokens:
            raise ValueError(
                f"{self.url} gives no token ids and logprobs: expected vLLM, or a server that has "
                "its `return_token_ids`"
            )
        if choice.get("prompt_token_ids", request["prompt"]) != request["prompt"]:
            raise ValueError(f"{self.url} read another prompt than it was given")
        return choice

    def _has(self, handover: Handover) -> bool:
        data = self._ask("/v1/models", "data")
        with _protocol(self.url):
            models = [model["id"] for model in data]
            self._base_model = models[0]
        if handover.is_lora:
            return handover.name in models
        return self._ask("/weight_info", "weight_version") == handover.name

    def _load(self, handover: Handover) -> None:
        path = str(handover.directory)
        if handover.is_lora:
            body: dict[str, Any] = {"lora_name": handover.name, "lora_path": path}
            self._send("/v1/load_lora_adapter", body)
            if self._adapter_name:
                self._forget(self._adapter_name)
            self._adapter_name = handover.name
            return
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        self._send("/collective_rpc", body)
        # Keys and values in it are of the old weights.
        if not self._ask("/reset_prefix_cache", "success", {}):
            raise ValueError(f"{self.url} did not empty its prefix cache: who else does it serve?")
        self._send("/update_weight_version", {"new_version": handover.name})

    def _forget(self, name: str) -> None:
        with contextlib.suppress(ValueError):  # it was started again, and has none of that name
            self._send("/v1/unload_lora_adapter", {"lora_name": name})

    def _ask(self, path: str, name: str, body: dict[str, Any] | None = None) -> Any:
        """A value of the object that the server answers; raises as `_send`, and ValueError where it
        answers none that has it."""
        content = self._send(path, body)
        try:
            return json.loads(content)[name]
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise ValueError(
                f"{self.url}{path} answered no JSON object with {name!r}: expected vLLM's server"
            ) from error

    def _send(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """What the server answers to a GET, or to a POST of a body.

        Raises:
            _AwayError: it does not answer, or with a status of `BUSY`, or of 500 or above.
            ValueError: it answers with another status than 200.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data)
        request.add_header("Content-Type", "application/json")
        if key := os.environ.get(TOKEN):
            request.add_header("Authorization", f"Bearer {key}")
        timeout = LONGEST_CHECK if body is None else LONGEST_ANSWER
        try:
            with self._open(request, timeout=timeout) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode(errors="replace")[:LONGEST_REFUSAL]
            if error.code >= 500 or error.code in BUSY:  # or of what stands before the server
                raise _AwayError(f"{path} answered {error.code}: {text}") from error
            hint = NOT_FOUND if error.code == 404 else ""
            raise ValueError(f"{self.url}{path} answered {error.code}: {text}{hint}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise _AwayError(f"no answer ({reason})") from error


class _AwayError(Exception):
    """A server does not answer, or not as one that works."""


@contextlib.contextmanager
def _protocol(server: str) -> Iterator[None]:
    """Raises ValueError where what a server answered is not in the form of vLLM's."""
    try:
        yield
    except (AttributeError, LookupError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{server} does not answer as vLLM does ({reason})") from error


def _pause(closing: threading.Event) -> None:
    """Waits before another attempt; raises RolloutError where the engine is closed meanwhile."""
    if closing.wait(PAUSE):
        raise RolloutError(CLOSED)


def _requests(prompt_ids: list[list[int]], sampling: Sampling) -> list[dict[str, Any]]:
    """A request for each prompt, without the model."""
    options = sampling_options(sampling)
    del options["detokenize"]  # of the engine in the process alone
    generator = torch.Generator().manual_seed(sampling.drawn_seed())
    first, rows = sampling.place or (0, len(prompt_ids))
    seeds = torch.randint(2**31, (rows,), generator=generator)[first : first + len(prompt_ids)]
    return [
        {
            **options,
            **NEUTRAL,
            "prompt": list(prompt),
            "seed": seed,
            "return_token_ids": True,
        }
        for prompt, seed in zip(prompt_ids, seeds.tolist(), strict=True)
    ]


def _logprobs(choice: dict[str, Any]) -> Tensor:
    """[length] fp32, nats, of the drawn tokens."""
    return torch.tensor(choice["logprobs"]["token_logprobs"], dtype=torch.float32)
