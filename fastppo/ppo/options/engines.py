"""The keys of `engine_options` for each built-in engine of `rollout`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastppo.run.options import Options, option


@dataclass(kw_only=True, frozen=True)
class EngineOptions(Options):
    """Options of the decoder and of Hugging Face `generate`."""

    batch_size: int | None = option(
        None, "Sequences generated at once; default: the whole rollout batch", minimum=1
    )


@dataclass(kw_only=True, frozen=True)
class VLLMOptions(EngineOptions):
    """Options of vLLM in this process, besides those of `vllm.LLM`."""

    gpu_memory_utilization: float = option(
        0.3, "Share of the GPU's memory for vLLM's weights and KV cache", above=0, maximum=1
    )
    tensor_parallel_size: int = option(
        1, "Neighboring processes that share one engine by tensor parallelism", minimum=1
    )


@dataclass(kw_only=True, frozen=True)
class ServerOptions(EngineOptions):
    """Options of vLLM servers. `batch_size` is the number of simultaneous requests."""

    urls: Sequence[str] = option([], "Required. Servers, such as http://localhost:8000")
    quantized: bool = option(
        False, "Whether they compute in fewer bits than the learner, such as with fp8 weights"
    )

    def check(self) -> None:
        if not self.urls:
            raise ValueError("urls is missing, such as {urls: [http://localhost:8000]}")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"urls: expected http://host:port, got {url}")


ENGINES: dict[str, type[EngineOptions]] = {
    "decoder": EngineOptions,
    "generate": EngineOptions,
    "vllm": VLLMOptions,
    "server": ServerOptions,
}
"""Options of the built-in engines by name."""
