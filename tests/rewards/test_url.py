"""A reward behind a URL: what is sent, what becomes of every answer that a server may give."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from fastppo.rewards import url
from fastppo.rewards.loading import load_reward, make_terms, reward_name
from fastppo.rewards.reward import RewardError, RewardTerm, Samples, score
from fastppo.rewards.url import RequestError, URLReward

PROMPTS = ["p1", "p2", "p3"]
COMPLETIONS = ["a", "bb", "ccc"]
SAMPLES = Samples(PROMPTS, COMPLETIONS)


class Server:
    """Answers each request as it is told to; remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], Any]] = []
        self.answer: Callable[[Any], tuple[int, bytes | Iterator[bytes]]] = self.lengths
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
                for part in [reply] if isinstance(reply, bytes) else reply:
                    self.wfile.write(part)

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


def test_what_is_sent_and_what_comes_back(server: Server) -> None:
    reward = URLReward(server.url, batch_size=2)
    assert reward(PROMPTS, COMPLETIONS, wanted=[1, 2, 3]) == [1, 2, 3]
    bodies = sorted((body for _, body in server.requests), key=lambda body: body["prompts"])
    assert bodies == [
        {"prompts": ["p1", "p2"], "completions": ["a", "bb"], "columns": {"wanted": [1, 2]}},
        {"prompts": ["p3"], "completions": ["ccc"], "columns": {"wanted": [3]}},
    ]
    assert server.requests[0][0]["Content-Type"] == "application/json"


def test_a_config_names_it_by_its_address() -> None:
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


def test_batches_are_asked_for_side_by_side(server: Server) -> None:
    together = threading.Barrier(3)  # each answer waits for the others

    def answer(body: Any) -> tuple[int, bytes]:
        together.wait(30)
        return Server.lengths(body)

    server.answer = answer
    assert URLReward(server.url, batch_size=1)(PROMPTS, COMPLETIONS) == [1, 2, 3]


@pytest.mark.parametrize("status", [408, 503])
def test_a_server_that_is_busy_is_asked_again(status: int, server: Server) -> None:
    answers = iter([(status, b""), (status, b"")])
    server.answer = lambda body: next(answers, None) or Server.lengths(body)
    assert URLReward(server.url)(PROMPTS, COMPLETIONS) == [1, 2, 3]
    assert len(server.requests) == 3


WRONG = {
    "a refusal": ((403, b""), "answered 403 Forbidden", 1),
    "a redirection": ((302, b""), "answered 302 Found", 1),
    "always busy": ((500, b""), "answered 500 Internal Server Error, 3 times", 3),
    "deep": ((200, b"[" * 100_000), "answered what is not JSON", 1),
    "a list": ((200, b"[1, 2, 3]"), "answered no list of rewards", 1),
    "too few": (
        (200, b'{"rewards": [1]}'),
        'answered 1 rewards; expected {"rewards": […]} with 3',
        1,
    ),
    "endless": ((200, b"1" * 2000), "answered more than 1000 bytes", 1),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_answer_is_an_error(
    wrong: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(url, "MAX_REPLY", 1000 if wrong == "endless" else 2**20)
    answer, says, count = WRONG[wrong]
    server.answer = lambda body: answer
    if wrong == "a redirection":
        server.headers = {"Location": server.url}
    with pytest.raises(RequestError, match=re.escape(says)):
        URLReward(server.url)(PROMPTS, COMPLETIONS)
    assert len(server.requests) == count


def test_a_server_that_hangs_or_is_not_there_is_waited_for_so_long_and_no_longer(
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


def test_a_reply_that_drips_is_given_up_when_its_time_is_over(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(url, "ATTEMPTS", 1)
    over = threading.Event()

    def drips(body: Any) -> tuple[int, Iterator[bytes]]:
        return 200, (b" " for _ in iter(lambda: over.wait(0.05), True))

    server.answer = drips
    with pytest.raises(RequestError, match=r"gave no reply within 0\.3 s"):
        URLReward(server.url, timeout=0.3)(PROMPTS, COMPLETIONS)
    over.set()


def test_a_request_that_fails_ends_in_the_sentence_of_the_server(server: Server) -> None:
    server.answer = lambda b: (403, b"") if "bb" in b["completions"] else Server.lengths(b)
    term = RewardTerm("judge", URLReward(server.url, batch_size=1))
    with pytest.raises(RewardError, match=r"reward 'judge' raised .*answered 403 Forbidden"):
        score(term, SAMPLES)


def test_a_token_goes_out_over_https_alone(server: Server, monkeypatch) -> None:
    monkeypatch.setenv(url.TOKEN, "secret")
    URLReward(server.url)(PROMPTS, COMPLETIONS)
    assert "Authorization" not in server.requests[0][0]
    assert URLReward("https://judge.example/x")._headers["Authorization"] == "Bearer secret"
