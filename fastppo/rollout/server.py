"""Generate on vLLM servers, through the OpenAI completions API with token ids.

    POST /v1/completions  {"prompt": [3, 14], "return_token_ids": true, "logprobs": 0, "seed": …}
    answer                {"choices": [{"token_ids": […], "logprobs": {"token_logprobs": […]}}]}

Prompts are sent and responses read as token ids, so no text is tokenized twice. Each response has
its own seed, so up to rounding it depends neither on the other requests nor on the server.

Weights are handed over through a directory that the servers share: the whole policy, loaded by
`reload_weights`, or only its LoRA adapters, loaded under a new name. Each handover has a version,
and servers report the version they hold. A restarted server gets the weights again before the next
request.

Requests are sent in rounds. Unanswered requests are sent again in the next round, after waiting for
servers that are unavailable. If a server stays unavailable, or requests are unanswered after the
last round, the engine raises `RolloutError`: the run drops the iteration and ends with a
checkpoint.

Sources: vLLM 0.32, `vllm/entrypoints/openai/completion/protocol.py`, `entrypoints/rl/online/` and
`entrypoints/serve/lora/` (VLLM_SERVER_DEV_MODE, VLLM_ALLOW_RUNTIME_LORA_UPDATING).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import secrets
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastppo.activity import begin_count, count
from fastppo.data.web import make_opener
from fastppo.functional.scalars import describe
from fastppo.models.policy import LanguageModel
from fastppo.rollout import Rollout, RolloutEngine, RolloutError, Sampling
from fastppo.rollout.prompts import check_prompts
from fastppo.rollout.vllm import as_rollout, sampling_options

logger = logging.getLogger(__name__)

START_TIMEOUT = 600.0
"""Seconds to wait for an unavailable server, which may be starting."""
ANSWER_TIMEOUT = 3600.0
"""Seconds to wait for responses, or for a server to load weights."""
STATUS_TIMEOUT = 60.0
"""Seconds to wait for a server's status."""
RETRY_INTERVAL = 2.0
"""Seconds between two attempts to reach a server, and between two rounds."""
MAX_ROUNDS = 5
CONCURRENCY = 256
"""Simultaneous requests without a `batch_size`."""
API_KEY = "VLLM_API_KEY"
"""Environment variable with the servers' API key; the name is vLLM's."""
RETRIED_STATUSES = (408, 429)
"""HTTP statuses below 500 after which a request is sent again."""
SHOWN_CHARACTERS = 500
"""Characters of a server's error message to show."""

CLOSED = "the rollout engine was closed"
RESTARTED = "the server was restarted and no longer has the weights"

NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
"""Sampling options for which a server may use the defaults of the model's generation config."""


class Handover(NamedTuple):
    """A version of the weights on disk."""

    version: int
    name: str
    """Unique among all runs."""
    directory: Path
    is_lora: bool
    """Whether the directory holds only adapters."""


class Response(NamedTuple):
    """A server's answer to one request."""

    tokens: list[int]
    finish_reason: str
    logprobs: Tensor
    """Logprobs of the tokens, [length] fp32, in nats."""


class ServerEngine(RolloutEngine):
    """Sample from vLLM servers.

    Args:
        policy: the policy with the first weights.
        directory: the directory for weights; all servers must see it under the same path.
        urls: the servers' addresses, http://host:port. Each server takes an equal share of a batch.
        batch_size: number of simultaneous requests.
        quantized: whether the servers compute in fewer bits than the learner.
    """

    holds_weights = True
    draws_by_row = True

    def __init__(
        self,
        policy: LanguageModel,
        directory: Path,
        *,
        urls: Sequence[str],
        batch_size: int | None = None,
        quantized: bool = False,
    ) -> None:
        self.servers = [Server(url) for url in urls]
        self.is_quantized = quantized
        self.vocabulary = policy.head.vocabulary
        self.directory = directory.resolve()
        self.concurrency = batch_size or CONCURRENCY
        self.name = secrets.token_hex(4)
        """Prefix of the names of this process's handovers."""
        self.version = 0
        self.handover: Handover | None = None
        self._closing = threading.Event()
        """Set to end the calls of `generate` in progress."""
        self.weights_changed(policy)

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        """Generate one response per prompt. `logprobs` are None if sampling is restricted.

        Raises:
            RolloutError: a server stays unavailable, refuses the weights or a request, or returns
                an invalid response; or the engine was closed meanwhile.
            ValueError: a prompt is empty.
        """
        check_prompts(prompt_ids)
        assert self.handover is not None
        try:
            responses = self._complete(_requests(prompt_ids, sampling), self.handover)
            self._check(responses, sampling.max_new_tokens)
        except ValueError as error:
            raise RolloutError(str(error)) from error
        rollout = as_rollout(
            tokens=[response.tokens for response in responses],
            finish_reasons=[response.finish_reason for response in responses],
            sampler_logprobs=[response.logprobs for response in responses],
            sampling=sampling,
        )
        return replace(rollout, versions=[self.handover.version] * len(responses))

    def _check(self, responses: Sequence[Response], longest: int) -> None:
        """Raise ValueError for a response that training cannot use."""
        for row, response in enumerate(responses):
            tokens = response.tokens
            in_vocabulary = all(0 <= token < self.vocabulary for token in tokens)
            if not 0 < len(tokens) <= longest or not in_vocabulary:
                raise ValueError(
                    f"response {row} must be 1 to {longest} token ids in [0, {self.vocabulary}), "
                    f"got {describe(tokens)}"
                )
            if len(response.logprobs) != len(tokens) or not response.logprobs.isfinite().all():
                raise ValueError(f"response {row} must have one finite logprob per token")

    def _complete(self, requests: list[dict[str, Any]], handover: Handover) -> list[Response]:
        """Send the requests in rounds until all are answered; raise as `generate`."""
        closing = self._closing
        responses: dict[int, Response] = {}
        failure = ""

        def ask(row: int) -> Response | _UnavailableError:
            if closing.is_set():
                raise RolloutError(CLOSED)
            try:
                return self._server_of(row).complete(requests[row], handover)
            except _UnavailableError as error:
                return error

        begin_count(len(requests))
        for number in range(MAX_ROUNDS):
            if number:
                _pause(closing)
            for server in self.servers:
                server.update(handover, closing)
            open_rows = [row for row in range(len(requests)) if row not in responses]
            with ThreadPoolExecutor(self.concurrency) as pool:
                for row, answer in zip(open_rows, pool.map(ask, open_rows), strict=True):
                    if isinstance(answer, _UnavailableError):
                        failure = f"{self._server_of(row).url}: {answer}"
                    else:
                        responses[row] = answer
                        count()
            # A server that was restarted during the round may have answered with other weights.
            for server in self.servers:
                if not server.is_current(handover):
                    failure = f"{server.url}: {RESTARTED}"
                    for row in range(len(requests)):
                        if self._server_of(row) is server:
                            responses.pop(row, None)
            if len(responses) == len(requests):
                return [responses[row] for row in range(len(requests))]
        missing = len(requests) - len(responses)
        raise RolloutError(
            f"no answer to {missing} of {len(requests)} requests in {MAX_ROUNDS} rounds; the last "
            f"failure: {failure}"
        )

    def _server_of(self, row: int) -> Server:
        return self.servers[row % len(self.servers)]

    @torch.no_grad()
    def weights_changed(self, policy: Any) -> None:
        """Write the weights to the shared directory and delete older ones.

        Servers load them before their next request, so an update does not wait for servers.
        """
        self.version += 1
        name = f"{self.name}-{self.version:06}"
        handover = Handover(
            self.version, name, self.directory / name, is_lora=policy.peft is not None
        )
        if handover.is_lora:
            # Otherwise PEFT asks the hub whether the vocabulary is that of the base model.
            policy.peft.save_pretrained(handover.directory, save_embedding_layers=False)
        else:
            policy.save_policy(handover.directory)
        # The first handover keeps older files, since another run may still use the directory.
        if self.handover is not None:
            for directory in self.directory.iterdir():
                if directory != handover.directory:
                    shutil.rmtree(directory, ignore_errors=True)
        self.handover = handover

    def close(self) -> None:
        """Make calls of `generate` in other threads raise instead of waiting for servers."""
        self._closing.set()
        self._closing = threading.Event()

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # The next handover delivers the same weights under the same version.
        self.version = state.get("version", 1) - 1


class Server:
    """A vLLM server.

    Args:
        url: http://host:port.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._open = make_opener().open
        self._base_model = ""
        self._adapter_name = ""
        """Adapters of this run in the server."""

    def update(self, handover: Handover, closing: threading.Event) -> None:
        """Load the weights into the server if needed, and wait for it if it is unavailable.

        Args:
            closing: an event that ends the wait.

        Raises:
            RolloutError: the server stays unavailable, or `closing` was set.
            ValueError: the server refuses the weights.
        """
        until = time.monotonic() + START_TIMEOUT
        is_told = False
        while True:
            try:
                if not self._has(handover):
                    self._load(handover)
                return
            except _UnavailableError as error:
                if time.monotonic() > until:
                    raise RolloutError(
                        f"waited {START_TIMEOUT:g} s for {self.url}: {error}"
                    ) from error
                if not is_told:
                    logger.info(f"waiting for {self.url}: {error}")
                    is_told = True
            _pause(closing)

    def is_current(self, handover: Handover) -> bool:
        """Return whether the server is available and has the weights."""
        try:
            return self._has(handover)
        except _UnavailableError:
            return False

    def complete(self, request: dict[str, Any], handover: Handover) -> Response:
        """Answer a request.

        Raises:
            _UnavailableError: the server does not answer, or lost the adapters when it restarted.
            ValueError: the server refuses the request, or returns no token ids.
        """
        model = handover.name if handover.is_lora else self._base_model
        try:
            choices = self._ask("/v1/completions", "choices", {**request, "model": model})
        except ValueError as error:
            if self.is_current(handover):
                raise
            raise _UnavailableError(RESTARTED) from error
        try:
            return _response(choices[0])
        except (LookupError, TypeError) as error:
            raise ValueError(
                f"{self.url} does not answer as vLLM does, with token ids and logprobs "
                f"({type(error).__name__}: {error})"
            ) from error

    def _has(self, handover: Handover) -> bool:
        models = [model["id"] for model in self._ask("/v1/models", "data")]
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
                # A server that was restarted has no adapters.
                with contextlib.suppress(ValueError):
                    self._send("/v1/unload_lora_adapter", {"lora_name": self._adapter_name})
            self._adapter_name = handover.name
            return
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        self._send("/collective_rpc", body)
        # The cache holds keys and values of the old weights.
        if not self._ask("/reset_prefix_cache", "success", {}):
            raise ValueError(
                f"{self.url} did not empty its prefix cache: does it serve other clients?"
            )
        self._send("/update_weight_version", {"new_version": handover.name})

    def _ask(self, path: str, name: str, body: dict[str, Any] | None = None) -> Any:
        """Return one field of the JSON object that the server answers; raise as `_send`."""
        content = self._send(path, body)
        try:
            return json.loads(content)[name]
        except (ValueError, TypeError, LookupError) as error:
            raise ValueError(
                f"{self.url}{path} answered no JSON object with {name!r}: expected a vLLM server"
            ) from error

    def _send(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Send a GET, or a POST with a body, and return the answer.

        Raises:
            _UnavailableError: no answer, or a status >= 500 or in `RETRIED_STATUSES`.
            ValueError: another status than 200.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data)
        request.add_header("Content-Type", "application/json")
        if key := os.environ.get(API_KEY):
            request.add_header("Authorization", f"Bearer {key}")
        timeout = STATUS_TIMEOUT if body is None else ANSWER_TIMEOUT
        try:
            with self._open(request, timeout=timeout) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode(errors="replace")[:SHOWN_CHARACTERS]
            if error.code >= 500 or error.code in RETRIED_STATUSES:
                raise _UnavailableError(f"{path} answered {error.code}: {text}") from error
            hint = ""
            if error.code == 404:
                hint = (
                    "; start it with VLLM_SERVER_DEV_MODE=1, for LoRA with "
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"
                )
            raise ValueError(f"{self.url}{path} answered {error.code}: {text}{hint}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise _UnavailableError(f"no answer ({reason})") from error


class _UnavailableError(Exception):
    """Raised when a server does not answer or reports an internal error."""


def _pause(closing: threading.Event) -> None:
    """Wait before another attempt; raise RolloutError if the engine is closed meanwhile."""
    if closing.wait(RETRY_INTERVAL):
        raise RolloutError(CLOSED)


def _requests(prompt_ids: list[list[int]], sampling: Sampling) -> list[dict[str, Any]]:
    """Return the request of each prompt, without the model's name."""
    options = sampling_options(sampling)
    del options["detokenize"]  # not an option of servers
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


def _response(choice: dict[str, Any]) -> Response:
    logprobs = choice["logprobs"]["token_logprobs"]
    return Response(
        tokens=list(choice["token_ids"]),
        finish_reason=choice["finish_reason"],
        logprobs=torch.tensor(logprobs, dtype=torch.float32),
    )
