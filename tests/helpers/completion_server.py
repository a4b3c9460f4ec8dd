"""A server of a tiny model with the parts of vLLM's protocol that `rollout=server` uses.

It decodes with FastPPO's decoder, one request at a time, and loads weights from directories, as
vLLM does. `/log` returns the paths of all requests. An address with a given status answers it with
text instead of JSON: 302 redirects to `/log`, and 0 ends the server.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import tiny
import torch
from transformers import AutoModelForCausalLM

from fastppo.models.policy import LanguageModel
from fastppo.rollout import Sampling
from fastppo.rollout.decoder import DecoderEngine


class State:
    """The server's weights and log."""

    def __init__(self, model: str, changes: dict[str, Any]) -> None:
        self.base = model
        self.changes = changes
        self.policy = LanguageModel(AutoModelForCausalLM.from_pretrained(model))
        self.adapters: dict[str, str] = {}
        self.version = "default"
        self.log: list[str] = []
        self.lock = threading.Lock()

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """Answer a request; raise KeyError for status 404."""
        self.log.append(path)
        if path == "/log":
            return self.log
        if path == "/v1/models":
            return {"data": [{"id": name} for name in (self.base, *self.adapters)]}
        if path == "/weight_info":
            return {"weight_version": self.version}
        if path == "/collective_rpc":
            directory = body["kwargs"]["weights_path"]
            self.policy = LanguageModel(AutoModelForCausalLM.from_pretrained(directory))
            return {"results": [None]}
        if path == "/reset_prefix_cache":
            return {"success": self.changes.get("success", True)}
        if path == "/update_weight_version":
            self.version = body["new_version"]
            return {}
        if path == "/v1/load_lora_adapter":
            self.adapters[body["lora_name"]] = body["lora_path"]
            return None
        if path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
            return None
        if path == "/v1/completions":
            return {"choices": [self.complete(body)]}
        raise KeyError(path)

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        policy = self.policy
        if body["model"] != self.base:
            from peft import PeftModel

            base = AutoModelForCausalLM.from_pretrained(self.base)
            adapted = PeftModel.from_pretrained(base, self.adapters[body["model"]])
            policy = LanguageModel(adapted.merge_and_unload())
        sampling = Sampling(
            max_new_tokens=body["max_tokens"],
            temperature=body["temperature"],
            stop_token_ids=tuple(body["stop_token_ids"]),
            seed=body["seed"],
        )
        rollout = DecoderEngine(policy).generate([body["prompt"]], sampling)
        assert rollout.sampler_logprobs is not None
        return {
            "prompt_token_ids": body["prompt"],
            "token_ids": rollout.tokens[0],
            "logprobs": {"token_logprobs": rollout.sampler_logprobs[0].tolist()},
            "finish_reason": rollout.finish_reasons[0],
            **self.changes,
        }


def serve(
    port: int, model: str, statuses: dict[str, int], changes: dict[str, Any], key: str | None
) -> None:
    """Serve on a local port until killed.

    Args:
        statuses: by address; see above.
        changes: replace fields of its responses.
        key: required in requests.
    """
    torch.set_num_threads(1)
    state = State(model, changes)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.respond({})

        def do_POST(self) -> None:
            self.respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def respond(self, body: dict[str, Any]) -> None:
            status = statuses.get(self.path, 200)
            if key and self.command == "POST" and self.headers["Authorization"] != f"Bearer {key}":
                status = statuses[self.path] = 401
            if status == 0:
                os._exit(1)
            content = b"a sentence"
            try:
                with state.lock:
                    answer = state.answer(self.path, body)
                if self.path not in statuses:
                    content = json.dumps(answer).encode()
            except KeyError as error:
                content = json.dumps({"error": {"message": str(error)}}).encode()
                status = 404
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "/log")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def serve_vllm(port: int, model: str) -> None:
    """Replace this process with vLLM's own server."""
    os.environ |= {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
    }
    arguments = f"""
        -m vllm.entrypoints.openai.api_server --model {model} --port {port} --dtype float32
        --enforce-eager --max-model-len {tiny.CONTEXT} --logprobs-mode processed_logprobs
        --enable-lora --max-lora-rank 8
    """
    os.execv(sys.executable, [sys.executable, *arguments.split()])
