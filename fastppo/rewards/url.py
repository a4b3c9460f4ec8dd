"""A reward behind a URL: a reward server, or an LLM judge.

    POST     {"prompts": […], "completions": […], "columns": {name: […]}}
    response {"rewards": […]}            one per completion, as a reward function returns them

Both are JSON. Batches of completions are sent in parallel. A request that fails, times out, or gets
status 408, 429 or 5xx is retried with exponential backoff. Redirects are not followed.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import SplitResult, urlsplit

from fastppo.data.web import make_opener

TIMEOUT = 60.0
"""Default time limit of a request, in seconds."""

CONNECTION_TIMEOUT = 5.0
"""Time limit of the connection before a run, in seconds."""

ATTEMPTS = 3
"""Requests before a server is given up."""

CONCURRENCY = 8
"""Concurrent requests."""

FIRST_PAUSE = 0.5
"""Seconds before the first retry. The pause doubles with each retry."""

LONGEST_PAUSE = 30.0
"""Upper bound of a pause, in seconds."""

TOKEN = "FASTPPO_REWARD_TOKEN"
"""Environment variable with a bearer token. It is sent over https only."""

RETRIED_STATUSES = (408, 429, 500, 502, 503, 504)


class RequestError(RuntimeError):
    """A reward server returned no rewards."""


class URLReward:
    """A reward server.

    Args:
        url: https://… or http://….
        batch_size: completions per request.
        timeout: seconds per request.

    Raises:
        ValueError: the URL is invalid.
    """

    has_timeout = True
    """Each request has its own time limit, so `score` sets none."""

    def __init__(self, url: str, *, batch_size: int = 32, timeout: float | None = None) -> None:
        self.url = url
        self.batch_size = batch_size
        self.timeout = TIMEOUT if timeout is None else timeout
        parts = _parse(url)
        # For messages: the query may hold a secret.
        self._address = f"{parts.scheme}://{parts.netloc}{parts.path}"
        self.__name__ = address_name(url)
        self._open = make_opener().open
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        token = os.environ.get(TOKEN)
        if token and parts.scheme == "https":
            self._headers["Authorization"] = f"Bearer {token}"

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[str], **columns: list[Any]
    ) -> list[Any]:
        """Return one reward per completion.

        Raises:
            RequestError: the server returned no rewards.
        """
        batches = []
        for start in range(0, len(completions), self.batch_size):
            rows = slice(start, start + self.batch_size)
            batches.append(
                {
                    "prompts": prompts[rows],
                    "completions": completions[rows],
                    "columns": {name: column[rows] for name, column in columns.items()},
                }
            )
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            return [reward for rewards in pool.map(self._rewards, batches) for reward in rewards]

    def connect(self) -> None:
        """Check that the server answers at all, without a completion to score.

        Raises:
            RequestError: it does not answer within `CONNECTION_TIMEOUT`.
        """
        request = urllib.request.Request(self.url, headers=self._headers, method="HEAD")
        try:
            with self._open(request, timeout=min(self.timeout, CONNECTION_TIMEOUT)):
                pass
        except urllib.error.HTTPError as error:  # any status is an answer
            error.close()
        except http.client.HTTPException:  # it hung up on a method that it does not know
            pass
        except OSError as error:
            reason = getattr(error, "reason", error)
            seconds = f"{min(self.timeout, CONNECTION_TIMEOUT):g} s"
            why = f"within {seconds}" if isinstance(reason, TimeoutError) else f"({reason})"
            raise RequestError(f"{self._address} does not answer {why}") from error

    def _rewards(self, batch: dict[str, Any]) -> list[Any]:
        """Return the rewards of one request."""
        count = len(batch["completions"])
        response = self._post(json.dumps(batch, default=str).encode())
        try:
            answer = json.loads(response)
        except ValueError:
            raise RequestError(f"{self._address} answered what is not JSON") from None
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        if not isinstance(rewards, list) or len(rewards) != count:
            got = f"{len(rewards)} rewards" if isinstance(rewards, list) else "no list of rewards"
            raise RequestError(
                f'{self._address} answered {got}; expected {{"rewards": […]}} with {count}'
            )
        return rewards

    def _post(self, body: bytes) -> bytes:
        """Send a request, with retries."""
        request = urllib.request.Request(self.url, body, self._headers, method="POST")
        for attempt in range(1, ATTEMPTS + 1):
            retry_after = ""
            try:
                with self._open(request, timeout=self.timeout) as response:
                    reply: bytes = response.read()
                    return reply
            except urllib.error.HTTPError as error:
                with error:
                    failure = f"answered {error.code} {error.reason}"
                    retry_after = error.headers.get("Retry-After", "")
                if error.code not in RETRIED_STATUSES:
                    break
            except (OSError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", error)
                failure = f"failed: {reason}"
                if isinstance(reason, TimeoutError):
                    failure = f"gave no reply within {self.timeout:g} s"
            if attempt < ATTEMPTS:
                time.sleep(_pause(attempt, retry_after))
        times = f", {attempt} times" if attempt > 1 else ""
        raise RequestError(f"{self._address} {failure}{times}")


def _parse(url: str) -> SplitResult:
    """Split a URL. Raises ValueError if it is invalid or contains a password."""
    parts = urlsplit(url)
    has_password = "@" in parts.netloc  # tokens go into an environment variable
    if parts.scheme not in ("http", "https") or not parts.hostname or has_password:
        raise ValueError(f"reward {url}: expected https://host/path, or http://")
    return parts


def address_name(url: str) -> str:
    """Return the last part of the path, or the host."""
    parts = _parse(url)
    return parts.path.strip("/").rpartition("/")[2] or parts.hostname or url


def _pause(attempt: int, retry_after: str) -> float:
    """Return the seconds before a retry: the server's choice, or exponential with jitter."""
    if retry_after.isdecimal():
        return min(float(retry_after), LONGEST_PAUSE)
    longest = min(FIRST_PAUSE * 2 ** (attempt - 1), LONGEST_PAUSE)
    return longest * random.Random().uniform(0.5, 1)
