"""Names on the Hugging Face Hub, with a local server in its place."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from fastppo.data.datasets import DataError, load_rows
from fastppo.models.pretrained import model_config

CONFIG = json.dumps({"model_type": "llama", "vocab_size": 77}).encode()
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """A hub with the config of one model. Names with `silent` get no answer."""

    requests: list[str]

    def do_HEAD(self) -> None:
        self.requests.append(self.path)
        if "silent" in self.path:
            self.close_connection = True
            return
        found = self.path == "/owner/model/resolve/main/config.json"
        self.send_response(200 if found else 404)
        self.send_header("Content-Length", str(len(CONFIG) if found else 0))
        if found:
            self.send_header("ETag", '"of-config"')
            self.send_header("X-Repo-Commit", COMMIT)
        else:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(CONFIG)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing."""


@pytest.fixture
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Paths that the hub was asked for."""
    server = HTTPServer(("127.0.0.1", 0), Hub)
    Hub.requests = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    url = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield Hub.requests
    server.shutdown()
    server.server_close()


def test_a_hub_without_an_answer_is_reported_after_two_requests(requests: list[str]) -> None:
    with pytest.raises(ValueError, match=r"model my/silent: .*http"):
        model_config("my/silent")
    assert len(requests) == 2
    with pytest.raises(DataError, match=r"my/silent: .*http"):
        load_rows("my/silent")
    assert len(requests) == 4


def test_a_model_is_downloaded_once(requests: list[str]) -> None:
    assert model_config("owner/model").vocab_size == 77
    first = len(requests)
    assert model_config("owner/model").vocab_size == 77
    assert len(requests) - first < first, "a cached model is not looked for"
    with pytest.raises(ValueError, match="reward owner/none: "):
        model_config("owner/none", "reward")
