"""Rewards behind a URL: requests, retries and invalid answers."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from fastppo.rewards import url
from fastppo.rewards.loading import load_reward, make_terms, reward_name
from fastppo.rewards.reward import Samples
from fastppo.rewards.url import RequestError, URLReward

PROMPTS = ["p1", "p2", "p3"]
COMPLETIONS = ["a", "bb", "ccc"]
SAMPLES = Samples(PROMPTS, COMPLETIONS)


class Server:
    """Answer each request with `answer`, and record the requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], Any]] = []
        self.answer: Callable[[Any], tuple[int, bytes]] = self.lengths
        self.headers: dict[str, str] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append((dict(self.headers), body))
                status, reply = outer.answer(body)
                self.send_response(status)
                for name, value in outer.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/judge"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    @staticmethod
    def lengths(body: Any) -> tuple[int, bytes]:
        return 200, json.dumps({"rewards": [len(c) for c in body["completions"]]}).encode()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(url, "FIRST_PAUSE", 0.001)
    monkeypatch.delenv("http_proxy", raising=False)
    one = Server()
    yield one
    one.http.shutdown()
    one.http.server_close()


def test_a_request_and_its_answer(server: Server) -> None:
    reward = URLReward(server.url, batch_size=2)
    assert reward(PROMPTS, COMPLETIONS, wanted=[1, 2, 3]) == [1, 2, 3]
    bodies = sorted((body for _, body in server.requests), key=lambda body: body["prompts"])
    assert bodies == [
        {"prompts": ["p1", "p2"], "completions": ["a", "bb"], "columns": {"wanted": [1, 2]}},
        {"prompts": ["p3"], "completions": ["ccc"], "columns": {"wanted": [3]}},
    ]
    assert server.requests[0][0]["Content-Type"] == "application/json"


def test_a_config_names_a_server_by_its_url() -> None:
    address = "https://judge.example:8000/v1/helpful?key=secret"
    assert isinstance(load_reward(address), URLReward)
    assert reward_name(address) == "helpful"
    assert reward_name("http://judge.example") == "judge.example"
    one, other = make_terms([address, address.replace("v1", "v2")])
    assert one.fingerprint != other.fingerprint
    assert load_reward(address, timeout=5).timeout == 5
    for wrong in ("https://", "http://:80", "http://a:b@c"):
        with pytest.raises(ValueError, match="expected https://host/path"):
            load_reward(wrong)


def test_batches_are_sent_in_parallel(server: Server) -> None:
    together = threading.Barrier(3)  # each answer waits for the other requests

    def answer(body: Any) -> tuple[int, bytes]:
        together.wait(30)
        return Server.lengths(body)

    server.answer = answer
    assert URLReward(server.url, batch_size=1)(PROMPTS, COMPLETIONS) == [1, 2, 3]


def test_a_busy_server_is_retried(server: Server) -> None:
    answers = iter([(408, b""), (503, b"")])
    server.answer = lambda body: next(answers, None) or Server.lengths(body)
    assert URLReward(server.url)(PROMPTS, COMPLETIONS) == [1, 2, 3]
    assert len(server.requests) == 3


WRONG = {
    "a refusal": ((403, b""), "answered 403 Forbidden", 1),
    "a redirection": ((302, b""), "answered 302 Found", 1),
    "always busy": ((500, b""), "answered 500 Internal Server Error, 3 times", 3),
    "not JSON": ((200, b"["), "answered what is not JSON", 1),
    "too few": (
        (200, b'{"rewards": [1]}'),
        'answered 1 rewards; expected {"rewards": […]} with 3',
        1,
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_an_invalid_answer_is_an_error(wrong: str, server: Server) -> None:
    answer, says, count = WRONG[wrong]
    server.answer = lambda body: answer
    if wrong == "a redirection":
        server.headers = {"Location": server.url}
    with pytest.raises(RequestError, match=re.escape(says)):
        URLReward(server.url)(PROMPTS, COMPLETIONS)
    assert len(server.requests) == count


def test_a_server_that_hangs_or_is_gone_is_given_up_after_the_time_limit(
    server: Server,
) -> None:
    release = threading.Event()

    def hangs(body: Any) -> tuple[int, bytes]:
        release.wait(60)
        return 200, b""

    server.answer = hangs
    reward = URLReward(server.url, timeout=0.05)
    with pytest.raises(RequestError, match=r"gave no reply within 0\.05 s, 3 times"):
        reward(PROMPTS, COMPLETIONS)
    release.set()
    server.http.shutdown()
    server.http.server_close()
    with pytest.raises(RequestError, match="refused, 3 times"):
        URLReward(server.url, timeout=5)(PROMPTS, COMPLETIONS)


def test_a_reply_that_is_cut_off_is_requested_again(server: Server) -> None:
    status, whole = server.lengths({"completions": COMPLETIONS})

    def cut_at_first(body: Any) -> tuple[int, bytes]:
        server.headers = {"Content-Length": str(len(whole)), "Connection": "close"}
        return status, whole[: 5 if len(server.requests) == 1 else None]

    server.answer = cut_at_first
    assert URLReward(server.url)(PROMPTS, COMPLETIONS) == [1, 2, 3]
    assert len(server.requests) == 2


def test_the_token_is_sent_over_https_only(server: Server, monkeypatch) -> None:
    monkeypatch.setenv(url.TOKEN, "secret")
    URLReward(server.url)(PROMPTS, COMPLETIONS)
    assert "Authorization" not in server.requests[0][0]
    assert URLReward("https://judge.example/x")._headers["Authorization"] == "Bearer secret"


def test_a_connection_is_tried_with_a_time_limit(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    URLReward(server.url).connect()  # the server does not know HEAD, which is an answer too
    assert server.requests == []
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/judge?key=secret"
        monkeypatch.setattr(url, "CONNECTION_TIMEOUT", 0.05)
        with pytest.raises(RequestError, match=r"0\.05 s"):
            URLReward(address).connect()
    with pytest.raises(RequestError, match="judge does not answer") as caught:
        URLReward(address).connect()
    assert "secret" not in str(caught.value)
