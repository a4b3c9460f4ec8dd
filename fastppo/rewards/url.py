"""A reward behind a URL: a reward server, or a judge that is a language model.

    POST  {"prompts": […], "completions": […], "columns": {name: […]}}
    reply {"rewards": […]}            one per completion, as a function would return them

Both are JSON. Batches of completions are sent side by side. A request that is refused, too late, or
answered with 408, 429 or 5xx is sent again, after a pause that doubles. A reply is data and nothing
else: its size is bounded, redirections are not followed, and certificates are verified.
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
"""Seconds for a request, unless others are given."""

ATTEMPTS = 3
"""Requests before a server is given up."""

CONCURRENCY = 8
"""Requests at a time."""

MAX_REPLY = 16 * 2**20
"""Bytes of a reply: a million numbers with all their digits fit."""

PART = 2**16
"""Bytes of a reply that are read at a time."""

FIRST_PAUSE = 0.5
"""Seconds before a request is sent again for the first time."""

LONGEST_PAUSE = 30.0
"""Seconds between two requests at most."""

TOKEN = "FASTPPO_REWARD_TOKEN"
"""Environment variable with a bearer token, which is sent over https alone."""

BUSY = (408, 429, 500, 502, 503, 504)
"""Statuses after which a request is sent again."""


class RequestError(RuntimeError):
    """A reward server gave no rewards; the message says why."""


class URLReward:
    """A reward from a server, by HTTP.

    Args:
        url: https://…, or http://….
        batch_size: completions per request.
        timeout: seconds for one request.

    Raises:
        ValueError: no such URL can exist.
    """

    has_timeout = True
    """It limits the time of its own requests, so nobody else has to limit that of its calls."""

    def __init__(self, url: str, *, batch_size: int = 32, timeout: float | None = None) -> None:
        self.url = url
        self.batch_size = batch_size
        self.timeout = TIMEOUT if timeout is None else timeout
        parts = _parse(url)
        # Without the query, which may hold a secret.
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
        """One reward per completion.

        Raises:
            RequestError: the server gave none.
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

    def _rewards(self, batch: dict[str, Any]) -> list[Any]:
        """The rewards of one request's completions."""
        count = len(batch["completions"])
        try:
            answer = json.loads(self._reply(json.dumps(batch, default=str).encode()))
        except (ValueError, RecursionError):
            raise RequestError(f"{self._address} answered what is not JSON") from None
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        if not isinstance(rewards, list) or len(rewards) != count:
            got = f"{len(rewards)} rewards" if isinstance(rewards, list) else "no list of rewards"
            raise RequestError(
                f'{self._address} answered {got}; expected {{"rewards": […]}} with {count}'
            )
        return rewards

    def _reply(self, body: bytes) -> bytes:
        """The reply's bytes, after as many requests as it takes."""
        for attempt in range(1, ATTEMPTS + 1):
            retry_after = ""
            try:
                return self._request(body)
            except urllib.error.HTTPError as error:
                with error:
                    failure = f"answered {error.code} {error.reason}"
                    retry_after = error.headers.get("Retry-After", "")
                if error.code not in BUSY:
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

    def _request(self, body: bytes) -> bytes:
        request = urllib.request.Request(self.url, body, self._headers, method="POST")
        reply = bytearray()
        with self._open(request, timeout=self.timeout) as response:
            # The socket's limit is between two bytes, and this one that of the whole body.
            end = time.monotonic() + self.timeout
            while part := response.read1(PART):
                reply += part
                if len(reply) > MAX_REPLY:
                    raise RequestError(f"{self._address} answered more than {MAX_REPLY} bytes")
                if time.monotonic() > end:
                    raise TimeoutError
        return bytes(reply)


def _parse(url: str) -> SplitResult:
    """The URL in parts.

    Raises:
        ValueError: it is no address of a server, or holds a password.
    """
    parts = urlsplit(url)
    has_password = "@" in parts.netloc  # a token has its variable
    if parts.scheme not in ("http", "https") or not parts.hostname or has_password:
        raise ValueError(f"reward {url}: expected https://host/path, or http://")
    return parts


def address_name(url: str) -> str:
    """The last part of the path, or the host."""
    parts = _parse(url)
    return parts.path.strip("/").rpartition("/")[2] or parts.hostname or url


def _pause(attempt: int, retry_after: str) -> float:
    """Seconds before the next request: what the server asks for, or twice as long each time, with
    a random share, so that many clients do not come back at once."""
    if retry_after.isdecimal():
        return min(float(retry_after), LONGEST_PAUSE)
    longest = min(FIRST_PAUSE * 2 ** (attempt - 1), LONGEST_PAUSE)
    return longest * random.Random().uniform(0.5, 1)
