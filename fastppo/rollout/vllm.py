"""Generate with vLLM in the learner's process.

vLLM starts with the model's config and tokenizer and with dummy weights. The policy's weights are
copied from memory at the start and after every update, and the prefix cache of the old weights is
emptied. During an update on a GPU the engine sleeps: its weights and KV cache are freed until the
next handover.

With several ranks, each rank has an engine for its rows, or `tensor_parallel_size` neighboring
ranks share one (vLLM's `external_launcher`). Weights are handed over one by one: all ranks gather a
tensor, load it and free it before the next.

vLLM's logprobs differ from the policy's by rounding, more in bf16, so the trainer recomputes them
(`old_logprobs`). Tested with vLLM 0.32.
"""

from __future__ import annotations

import difflib
import logging
import os
import random
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from fastppo.data.images import ImagePrompt
from fastppo.data.world import World
from fastppo.models.adapters import full_state, merged_state
from fastppo.models.images import NoImages
from fastppo.models.multimodal import save_processor_files
from fastppo.models.policy import LanguageModel
from fastppo.models.sharding import full_tensor
from fastppo.rollout import (
    FINISHED,
    TRUNCATED,
    Rollout,
    RolloutEngine,
    RolloutError,
    Sampling,
)
from fastppo.rollout.prompts import check_prompts

INSTALL = 'pip install -e ".[vllm]"'
CPU_CACHE_BYTES = 2**30
"""Bytes of the KV cache on a CPU; by default vLLM takes a share of the machine's memory."""
FIXED = ("model", "tokenizer", "load_format", "generation_config", "logprobs_mode")
"""Options of vLLM that the engine sets itself."""
QUANTIZING = frozenset({"quantization", "quantization_config", "kv_cache_dtype"})
"""Options of vLLM after which it computes in fewer bits than the learner."""
SLEEP_LEVEL = 2
"""vLLM's sleep level: 2 frees the weights, 1 would keep them on the CPU."""


class VLLMEngine(RolloutEngine):
    """Sample with vLLM. A process can have only one such engine.

    Args:
        policy: the policy with the architecture, the dtype and the first weights.
        tokenizer: the policy's tokenizer, needed for stop strings.
        images: saves the processor with which vLLM reads images in prompts.
        batch_size: maximum number of responses decoded at once; None is vLLM's default.
        gpu_memory_utilization: share of the GPU's memory for vLLM's weights and KV cache.
        tensor_parallel_size: number of neighboring ranks that share one engine.
        world: the ranks.
        options: further keywords of `vllm.LLM`, which override ours.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: `vllm.LLM` does not take an option.
    """

    same_weights = False
    holds_weights = True

    def __init__(
        self,
        policy: LanguageModel,
        tokenizer: Any,
        *,
        images: NoImages | None = None,
        batch_size: int | None = None,
        gpu_memory_utilization: float = 0.3,
        tensor_parallel_size: int = 1,
        world: World | None = None,
        **options: Any,
    ) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # needed to copy weights in memory
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        try:
            import vllm
        except ImportError as error:
            raise ImportError(f"rollout=vllm needs vLLM 0.32: {INSTALL}") from error
        known = {member.name for member in fields(vllm.EngineArgs)} - set(FIXED)
        for name in options:
            if name not in known:
                similar = difflib.get_close_matches(name, known)
                raise ValueError(
                    f"engine_options: vLLM takes batch_size, gpu_memory_utilization, "
                    f"tensor_parallel_size and the fields of vllm.EngineArgs, got {name!r}"
                    + (f"; similar: {', '.join(similar)}" if similar else "")
                )
        self._sampling_params = vllm.SamplingParams
        self.is_quantized = not QUANTIZING.isdisjoint(options)
        self._asleep = False
        self._on_gpu = policy.device.type == "cuda"
        settings: dict[str, Any] = {
            "dtype": policy.compute_dtype or policy.causal_lm.dtype,
            "max_model_len": policy.context,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
        }
        if "mm_device_do_normalize" in known:
            # Else mean and deviation of the pixels are buffers, which dummy weights overwrite.
            settings["mm_device_do_normalize"] = False
        if self._on_gpu:
            settings |= {
                "enable_sleep_mode": True,
                "gpu_memory_utilization": gpu_memory_utilization,
            }
        else:
            settings |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE_BYTES}
        if batch_size is not None:
            settings["max_num_seqs"] = batch_size
        processes = 1 if world is None else world.size
        if processes % tensor_parallel_size:
            raise ValueError(
                f"tensor_parallel_size={tensor_parallel_size} must divide the number of processes "
                f"that torchrun starts, got {processes}"
            )
        self.ranks_together = tensor_parallel_size
        if processes > 1:
            settings["distributed_executor_backend"] = "external_launcher"
            settings["tensor_parallel_size"] = tensor_parallel_size
        with tempfile.TemporaryDirectory() as directory, _process_state_restored(policy.device):
            _save_all_but_weights(policy, tokenizer, Path(directory))
            if images is not None:
                images.save(Path(directory))
            self.llm: Any = vllm.LLM(
                model=directory,
                load_format="dummy",
                generation_config="vllm",  # ignores the model's generation config
                logprobs_mode="processed_logprobs",
                **(settings | options),
            )
        # vLLM warns at every handover that rotary tables received no weights; they have none.
        reload_logger = "vllm.model_executor.model_loader.reload.layerwise"
        logging.getLogger(reload_logger).setLevel(logging.ERROR)
        self.weights_changed(policy)

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        """Generate one response per prompt. `logprobs` are None if sampling is restricted.

        Logprobs of greedy tokens are at temperature 1.

        Raises:
            ValueError: a prompt is empty.
            RolloutError: a logprob is not finite.
            RuntimeError: the engine was released and has no weights.
        """
        check_prompts(prompt_ids)
        if self._asleep:
            raise RuntimeError(
                "vLLM was released and has no weights: call weights_changed(policy) first"
            )
        if not prompt_ids:
            return Rollout([], [], [], [])
        options = sampling_options(sampling)
        # With one seed per response, a response does not depend on the rest of the batch.
        seeds = torch.randint(2**31, (len(prompt_ids),)).tolist()
        outputs = self.llm.generate(
            [as_prompt(prompt) for prompt in prompt_ids],
            [self._sampling_params(seed=seed, **options) for seed in seeds],
            use_tqdm=False,
        )
        responses = [output.outputs[0] for output in outputs]
        logprobs = [_logprobs(response) for response in responses]
        if not all(values.isfinite().all() for values in logprobs):
            raise RolloutError(
                "vLLM returned logprobs that are not finite; if engine_options has a "
                "speculative_config or a quantization, try without it"
            )
        return as_rollout(
            tokens=[list(response.token_ids) for response in responses],
            finish_reasons=[response.finish_reason for response in responses],
            sampler_logprobs=logprobs,
            sampling=sampling,
        )

    @torch.no_grad()
    def weights_changed(self, policy: LanguageModel) -> None:
        """Copy the policy's weights, with merged adapters, and empty vLLM's caches."""
        weights = _weights(policy)
        try:
            if self._asleep:
                self.llm.wake_up(tags=["weights"])
            # `model.load_weights` fails where kernels have repacked the weights, as on CPUs; this
            # call restores the layout of the files first.
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        finally:
            for _ in weights:  # even after an error, since the other ranks need this one to gather
                pass
        if self._asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache: are requests in flight?")
        # Its workers forget what the vision tower returned, its scheduler would count on it.
        self.llm.llm_engine.reset_encoder_cache()

    def release(self) -> None:
        """Free weights and KV cache until the next handover. Does nothing on a CPU."""
        if self._on_gpu and not self._asleep:
            self.llm.sleep(level=SLEEP_LEVEL)
            self._asleep = True


def as_prompt(prompt: Sequence[int]) -> dict[str, Any]:
    """Return a prompt as vLLM takes it. vLLM expands the placeholders of images itself."""
    if not isinstance(prompt, ImagePrompt) or not prompt.images.sources:
        return {"prompt_token_ids": list(prompt)}
    return {
        "prompt_token_ids": prompt.unexpanded,
        "multi_modal_data": {"image": prompt.images.open()},
    }


def sampling_options(sampling: Sampling) -> dict[str, Any]:
    """Return the keywords of `vllm.SamplingParams`, without the seed."""
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_k": 0 if sampling.greedy else sampling.top_k,
        "top_p": 1.0 if sampling.greedy else sampling.top_p,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,  # the model's own EOS is in `stop_token_ids` if it is to stop
        "stop": list(sampling.stop_strings),
        "detokenize": bool(sampling.stop_strings),
        "logprobs": 0,  # only of the sampled token
    }


def as_rollout(
    *,
    tokens: list[list[int]],
    finish_reasons: list[str],
    sampler_logprobs: list[Tensor],
    sampling: Sampling,
) -> Rollout:
    """Build a rollout from vLLM's outputs. `logprobs` are None if sampling is restricted.

    Raises:
        RolloutError: a finish reason is neither stop nor length.
    """
    for reason in finish_reasons:
        if reason not in (FINISHED, TRUNCATED):
            raise RolloutError(f"vLLM ended a response with {reason!r}; expected stop or length")
    # vLLM's logprobs are under softmax(z/T) unless sampling changed the distribution.
    is_plain = not sampling.is_restricted and (not sampling.greedy or sampling.temperature == 1)
    return Rollout(
        tokens=tokens,
        finish_reasons=finish_reasons,
        sampler_logprobs=sampler_logprobs,
        logprobs=sampler_logprobs if is_plain else None,
    )


def _logprobs(response: Any) -> Tensor:
    """Return the logprobs of a response's tokens, [length] fp32, in nats."""
    steps = zip(response.token_ids, response.logprobs, strict=True)
    return torch.tensor([step[token].logprob for token, step in steps], dtype=torch.float32)


def _weights(policy: LanguageModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the full weights under the names they have in a checkpoint of transformers."""
    model = policy.causal_lm
    state = full_state(model) if policy.peft is None else merged_state(model)
    for name, value in revert_weight_conversion(model, state).items():
        yield name, full_tensor(value)


def _save_all_but_weights(policy: LanguageModel, tokenizer: Any, directory: Path) -> None:
    config = deepcopy(policy.config)
    config.architectures = [type(policy.causal_lm).__name__]
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    save_processor_files(policy.causal_lm, directory)


@contextmanager
def _process_state_restored(device: torch.device) -> Iterator[None]:
    """Undo vLLM's seeding of all generators and, on a CPU, its patch of `torch.set_num_threads`."""
    set_num_threads = torch.set_num_threads
    threads = torch.get_num_threads()
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    devices: Iterable[torch.device] = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
