"""A reward behind a URL: a reward server, or a judge that is a language model.

    POST  {"prompts": […], "completions": […], "columns": {name: […]}}
    reply {"rewards": […]}            one per completion, as a function would return them

Both are JSON. Batches of completions are sent side by side. A request that finds nobody, is too
late, or is answered with 408, 429 or 5xx is sent again, after a pause that doubles. A reply is data
and nothing else: it is bounded, redirections are not followed, and certificates are verified.
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
from urllib.parse import urlsplit

from fastppo.rewards.patience import in_thread

TIMEOUT = 60.0
"""Seconds for a request, unless others are given."""

MAX_REPLY = 16 * 2**20
"""Bytes of a reply: a million numbers with all their digits fit."""

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before a request is sent again."""

TOKEN = "FASTPPO_REWARD_TOKEN"
"""Environment variable with a bearer token, which is sent over https alone."""

AGAIN = (408, 429, 500, 502, 503, 504)
"""Answers after which a request is sent again."""


class RequestError(RuntimeError):
    """A reward server gave no rewards: says why."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:
        return None


class URLReward:
    """A reward that is asked for by HTTP.

    Args:
        url: https://…, or http://….
        batch_size: completions per request.
        concurrency: requests at a time.
        timeout: seconds for one request.
        retries: further requests after one that failed.

    Raises:
        ValueError: no such URL can be.
    """

    has_timeout = True
    """It keeps to its time by itself."""

    def __init__(
        self,
        url: str,
        *,
        batch_size: int = 32,
        concurrency: int = 8,
        timeout: float | None = None,
        retries: int = 2,
    ) -> None:
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname)
            usable = usable and (parts.port is None or parts.port > 0) and url.isascii()
            usable = usable and not any(character.isspace() for character in url)
            usable = usable and "@" not in parts.netloc  # a password; a token has its variable
        except ValueError:
            usable = False
        if not usable:
            raise ValueError(f"reward {url}: expected https://host/path, or http://")
        self.url, self.batch_size, self.concurrency = url, batch_size, concurrency
        self.timeout = TIMEOUT if timeout is None else timeout
        self.retries = retries
        # Without the query, which may hold what is nobody's business.
        self._shown = f"{parts.scheme}://{parts.netloc}{parts.path}"
        self.__name__ = parts.path.strip("/").rpartition("/")[2] or parts.hostname or url
        self._open = urllib.request.build_opener(_NoRedirect).open
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        token = os.environ.get(TOKEN)
        if token and parts.scheme == "https":
            self._headers["Authorization"] = f"Bearer {token}"

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[str], **columns: list[Any]
    ) -> list[Any]:
        """One reward per completion; a `RequestError` in place of each that the server gave none
        for."""
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
        with ThreadPoolExecutor(self.concurrency) as pool:
            return [reward for rewards in pool.map(self._rewards, batches) for reward in rewards]

    def _rewards(self, batch: dict[str, Any]) -> list[Any]:
        count = len(batch["completions"])
        try:
            reply = self._reply(json.dumps(batch, default=str).encode())
            return self._read(reply, count)
        except RequestError as error:
            return [error] * count

    def _read(self, reply: bytes, count: int) -> list[Any]:
        try:
            answer = json.loads(reply)
        except (ValueError, RecursionError):
            raise RequestError(f"at {self._shown} answered what is not JSON") from None
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        if not isinstance(rewards, list) or len(rewards) != count:
            found = f"{len(rewards)} rewards" if isinstance(rewards, list) else "no list of rewards"
            raise RequestError(
                f'at {self._shown} answered {found}; expected {{"rewards": […]}} with {count}'
            )
        return rewards

    def _reply(self, body: bytes) -> bytes:
        """The reply's bytes, after as many requests as it takes."""
        for attempt in range(self.retries + 1):
            try:
                return self._in_time(body)
            except urllib.error.HTTPError as error:
                with error:
                    wrong = f"answered {error.code} {error.reason}"
                    after = error.headers.get("Retry-After", "")
                if error.code not in AGAIN:
                    break
            except (OSError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", error)
                late = isinstance(reason, TimeoutError)
                wrong = f"gave no reply within {self.timeout:g} s" if late else f"failed: {reason}"
                after = ""
            if attempt < self.retries:
                time.sleep(_pause(attempt, after))
        times = f", {attempt + 1} times" if attempt else ""
        raise RequestError(f"at {self._shown} {wrong}{times}")

    def _in_time(self, body: bytes) -> bytes:
        """`_request`, which a server that sends its header byte by byte could draw out: the
        time-out of a socket is of one piece."""
        found = in_thread("request", lambda: self._request(body), self.timeout)
        if found is None:
            raise TimeoutError
        return found()

    def _request(self, body: bytes) -> bytes:
        request = urllib.request.Request(self.url, body, self._headers, method="POST")
        end = time.monotonic() + self.timeout
        found = bytearray()
        with self._open(request, timeout=self.timeout) as response:
            # Piece by piece, for a length may be a lie.
            while piece := response.read1(65536):
                found += piece
                if len(found) > MAX_REPLY:
                    raise RequestError(f"at {self._shown} answered more than {MAX_REPLY} bytes")
                if time.monotonic() > end:
                    raise TimeoutError
        return bytes(found)


def _pause(attempt: int, after: str) -> float:
    """Seconds before the next request: what the server asks for, or twice as long each time, with
    a random share, so that many clients do not come back at once."""
    if after.isdecimal():
        return min(float(after), LONGEST_PAUSE)
    return min(FIRST_PAUSE * 2**attempt, LONGEST_PAUSE) * (0.5 + random.Random().random() / 2)
