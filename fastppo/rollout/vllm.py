"""vLLM in the learner's process: its speed at decoding, on a copy of the policy's weights.

vLLM is given the model's config and tokenizer; the weights are handed over from memory, in place,
at the start and after every update. Each time the KV cache of prompts is emptied, for it was
computed with the old weights. During an update on a GPU the engine sleeps: its weights and cache
are freed, and come back with the handover.

Of several processes each has an engine for its own rows, or `tensor_parallel_size` neighbours have
one together (`external_launcher`: vLLM joins the processes that are there). The weights are handed
over name by name: every process gathers one, hands it on and frees it before the next.

Its kernels are not the learner's, so its logprobs differ from the policy's by rounding, more in
bf16: the trainer recomputes them (`old_logprobs`). Written for and tested with vLLM 0.32.
"""

from __future__ import annotations

import logging
import os
import random
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from fastppo.data.world import World
from fastppo.models.adapters import full_state, merged_state
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
"""KV cache on a CPU, where vLLM would take a share of the machine's memory."""
SLEEP = 2
"""The level at which weights are freed, not kept on the CPU: new ones are handed over."""


class VLLMEngine(RolloutEngine):
    """`generate(prompt_ids, sampling)` with vLLM.

    One engine per process: vLLM holds a process group and sets environment variables.

    Args:
        policy: gives architecture, dtype and the first weights.
        tokenizer: decodes responses where stop strings end them.
        batch_size: most responses decoded at once; None leaves it to vLLM.
        gpu_memory_utilization: share of the GPU's memory for vLLM's weights and KV cache.
        tensor_parallel_size: processes, neighbours, that share each layer of one engine.
        world: the processes.
        options: more keywords of `vllm.LLM`, which win.

    Raises:
        ImportError: vLLM is not installed.
    """

    same_weights = False
    holds_weights = True

    def __init__(
        self,
        policy: LanguageModel,
        tokenizer: Any,
        *,
        batch_size: int | None = None,
        gpu_memory_utilization: float = 0.3,
        tensor_parallel_size: int = 1,
        world: World | None = None,
        **options: Any,
    ) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are handed over in memory
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        try:
            import vllm
        except ImportError as error:
            raise ImportError(f"rollout=vllm needs vLLM 0.32: {INSTALL}") from error
        self._sampling_params = vllm.SamplingParams
        self._asleep = False
        self._on_gpu = policy.device.type == "cuda"
        settings: dict[str, Any] = {
            "enforce_eager": True,
            "kv_cache_memory_bytes": CPU_CACHE_BYTES,
        }
        if self._on_gpu:
            settings = {
                "enable_sleep_mode": True,
                "gpu_memory_utilization": gpu_memory_utilization,
            }
        if batch_size is not None:
            settings["max_num_seqs"] = batch_size
        processes = 1 if world is None else world.size
        if processes % tensor_parallel_size:
            raise ValueError(
                f"tensor_parallel_size={tensor_parallel_size} must divide the number of processes "
                f"of `world`, which torchrun starts, got {processes}"
            )
        self.ranks_together = tensor_parallel_size
        if processes > 1:
            settings["distributed_executor_backend"] = "external_launcher"
            settings["tensor_parallel_size"] = tensor_parallel_size
        with tempfile.TemporaryDirectory() as directory, _process_state_restored(policy.device):
            _save_all_but_weights(policy, tokenizer, Path(directory))
            self.llm: Any = vllm.LLM(
                model=directory,
                load_format="dummy",
                generation_config="vllm",  # `Sampling` is all that decides
                dtype=policy.compute_dtype or policy.causal_lm.dtype,
                max_model_len=policy.context,
                enable_prefix_caching=True,
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,
                **(settings | options),
            )
        # At each handover it warns that rotary tables got no weights, which they do not have.
        reload_logger = "vllm.model_executor.model_loader.reload.layerwise"
        logging.getLogger(reload_logger).setLevel(logging.ERROR)
        self.weights_changed(policy)

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        """Draws one response per prompt. `logprobs` are None where sampling is restricted.

        Of greedy tokens vLLM gives the logprobs at temperature 1.

        Raises:
            ValueError: a prompt is empty.
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
        # A seed per response: its draws do not depend on what else is in the batch.
        seeds = torch.randint(2**31, (len(prompt_ids),)).tolist()
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompt_ids],
            [self._sampling_params(seed=seed, **options) for seed in seeds],
            use_tqdm=False,
        )
        responses = [output.outputs[0] for output in outputs]
        return as_rollout(
            tokens=[list(response.token_ids) for response in responses],
            finish_reasons=[response.finish_reason for response in responses],
            sampler_logprobs=[_logprobs(response) for response in responses],
            sampling=sampling,
        )

    @torch.no_grad()
    def weights_changed(self, policy: LanguageModel) -> None:
        """Hands the policy's weights over, adapters merged, and empties the prefix cache."""
        weights = _weights(policy)
        try:
            if self._asleep:
                self.llm.wake_up(tags=["weights"])
            # Not `model.load_weights`: kernels may hold weights in a layout of their own, as those
            # for CPUs do, and this call goes back to the layout of the files first.
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        finally:
            for _ in weights:  # after an error too: other processes gather the rest with this one
                pass
        if self._asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache: are there requests in flight?")

    def release(self) -> None:
        """Frees weights and KV cache until the next handover; on a CPU nothing happens."""
        if self._on_gpu and not self._asleep:
            self.llm.sleep(level=SLEEP)
            self._asleep = True


def sampling_options(sampling: Sampling) -> dict[str, Any]:
    """The keywords of `vllm.SamplingParams`, all but the seed."""
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_k": 0 if sampling.greedy else sampling.top_k,
        "top_p": 1.0 if sampling.greedy else sampling.top_p,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,  # stop tokens are those above, no more
        "stop": list(sampling.stop_strings),
        "detokenize": bool(sampling.stop_strings),
        "logprobs": 0,  # of the drawn token alone
    }


def as_rollout(
    *,
    tokens: list[list[int]],
    finish_reasons: list[str],
    sampler_logprobs: list[Tensor],
    sampling: Sampling,
) -> Rollout:
    """What vLLM drew as `sampling` says. `logprobs` are None where sampling is restricted.

    Raises:
        RolloutError: a response ended for another reason than stop or length.
    """
    for reason in finish_reasons:
        if reason not in (FINISHED, TRUNCATED):
            raise RolloutError(f"vLLM ended a response with {reason!r}; expected stop or length")
    # Those of softmax(z/T) over the whole vocabulary, unless sampling changed it.
    is_plain = not sampling.is_restricted and (not sampling.greedy or sampling.temperature == 1)
    return Rollout(
        tokens=tokens,
        finish_reasons=finish_reasons,
        sampler_logprobs=sampler_logprobs,
        logprobs=sampler_logprobs if is_plain else None,
    )


def _logprobs(response: Any) -> Tensor:
    """[length] fp32, nats, of the drawn tokens."""
    steps = zip(response.token_ids, response.logprobs, strict=True)
    return torch.tensor([step[token].logprob for token, step in steps], dtype=torch.float32)


def _weights(policy: LanguageModel) -> Iterator[tuple[str, Tensor]]:
    """The policy's weights under the names that its files would have, whole, one after another."""
    model = policy.causal_lm
    state = full_state(model) if policy.peft is None else merged_state(model)
    for name, value in revert_weight_conversion(model, state).items():
        yield name, full_tensor(value)


def _save_all_but_weights(policy: LanguageModel, tokenizer: Any, directory: Path) -> None:
    config = deepcopy(policy.config)
    config.architectures = [type(policy.causal_lm).__name__]
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@contextmanager
def _process_state_restored(device: torch.device) -> Iterator[None]:
    """vLLM seeds every generator of the process; on a CPU it also takes `torch.set_num_threads`
    away from the learner."""
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
