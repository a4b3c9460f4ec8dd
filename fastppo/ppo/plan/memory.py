"""Estimate the memory of one process of a run by phase and part, without loading a model.

The models are built as for training (`run_models`), from their config.json, on fake tensors: shape,
dtype and no memory (`shapes`). Several processes hold a shard each of policy, value function,
reference, optimizer states and gradients, with trained weights in fp32. The parts of a phase:

    policy weights     with adapters, frozen weights in the dtype of the products, or in 4 bits
    dequantized        the largest 4-bit matrix, while in use
    value function     the head, the moments of its regression, and a critic
    reference          none with adapters
    reward models      whole in each process; only those with a readable config
    fp32 masters       of trained bf16 weights, in one process; shards are fp32 themselves
    optimizer states   AdamW's two moments
    gathered           unsharded weights: the whole policy in a rollout (with vLLM, when it is
                       saved, and in a rollout the largest tensor); in an update the lm-head
                       and two layers, with their gradients
    gradients          in the update
    KV cache           at its longest; none with vLLM servers
    vLLM               vLLM's share of the device, instead of a KV cache
    logits             in an update, a chunk of the loss's and the lm-head's gradient; in a rollout,
                       the buffers of a sampling step
    spare buffers      kept by the CPU kernels: as many as a loss has of a chunk's logits
    activations        everything else: tensors saved by autograd, weights cast by autocast

Activations are counted by running the model on fake tensors, so they follow its architecture,
checkpointing and adapters. Forward passes that score or read the policies need less than an update
and are left out.

Not counted: buffers inside a library's operation, the CUDA context (about half a GB), fragmentation
of the allocator. All prompts have one length, and all responses the maximum.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fastppo_kernels.linear import accumulator_rows, chunk_rows
from fastppo_kernels.torch_backend import CHUNK_ELEMENTS
from torch import Tensor, nn

from fastppo.data.batch import Batch
from fastppo.data.text import block_tokens
from fastppo.models import quantized
from fastppo.models.cache import GROWTH, GrowingCache
from fastppo.models.sharding import HALVES
from fastppo.models.trunk import hidden_states, last_states, layers_of, trunk_of
from fastppo.plugins.loading import FUNCTION
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.options.engines import ENGINES
from fastppo.ppo.plan.shapes import LiveBytes, ShapeLoader, bytes_of, materialize
from fastppo.ppo.setup.run_models import make_policy, make_reference

DRAW_BUFFERS = 4
"""Number of [B, V] fp32 buffers of a sampling step: logits, scores, probabilities, random
numbers."""

DEFINITION_COPIES = 10
"""Number of [n, V] fp32 buffers at the peak of autograd over the definition: 7, or 10 with full
KL."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Bytes of each part at the peak of a phase."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Run:
    """Run to plan.

    Attributes:
        device: the device's type; the machine need not have one.
        prompt_tokens: length of every prompt.
        context: longest sequence of the model, tokens; None if its config names none.
        processes: processes of torchrun.
        memory: bytes of the device's memory; None if unknown.
    """

    config: PPOConfig
    device: torch.device
    prompt_tokens: int
    context: int | None = None
    processes: int = 1
    memory: float | None = None

    @property
    def shards(self) -> int:
        """Number of processes that share one copy of the weights."""
        return self.config.shard_size or self.processes

    @property
    def is_sharded(self) -> bool:
        """Whether weights are sharded: with several processes, even if each holds a whole copy."""
        return self.processes > 1

    @property
    def response_tokens(self) -> int:
        """Longest response in tokens.

        With an environment, as many turns as fit into the context; observations count as prompt.
        """
        turns = self.config.max_turns if self.config.environment else 1
        tokens = turns * self.config.max_new_tokens
        return tokens if self.context is None else min(tokens, self.context - self.prompt_tokens)

    @property
    def tokens(self) -> int:
        """Longest sequence in tokens."""
        return self.prompt_tokens + self.response_tokens

    def share(self, sequences: int) -> int:
        """Return the largest number of the sequences in one process."""
        return -(-sequences // self.processes)

    @property
    def minibatch(self) -> int:
        """Number of sequences of an optimizer step."""
        return self.share(self.config.rollout_batch_size // self.config.minibatches)

    @property
    def microbatch(self) -> int:
        """Number of sequences of a forward and backward pass."""
        return min(self.minibatch, self.config.limits().count(self.tokens))

    @property
    def generated_at_once(self) -> int:
        """Number of sequences generated at once."""
        rows = self.share(self.config.rollout_batch_size)
        return min(self.config.generated_at_once, rows)


def phases_of(run: Run) -> tuple[list[Phase], list[str]]:
    """Return the phases of a run in order, and notes on what is not counted.

    Raises:
        ValueError: a config cannot be read.
    """
    with warnings.catch_warnings():
        # Copying a module reads the addresses of its tensors, and fake tensors have none.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        process = Process(run)
        loading = process.loading()
        with process.live:
            materialize(process.policy)
            phases = [process.rollout(), process.update()]
    if not run.is_sharded:
        return phases, process.notes
    saving = [process.saving()] if run.config.rollout == "vllm" else []
    return [loading, *phases, *saving], process.notes


class Process:
    """Models of one process on fake tensors, and the phases of its run.

    Tensors are on the CPU whatever the device, since torch without CUDA has no autocast for it.
    The saved tensors are the same except for attention's row sums.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.config = run.config
        self.live = LiveBytes()
        self.notes: list[str] = []
        loader = ShapeLoader(run.config, run.device)
        causal_lm = loader.causal_lm(run.config.model, "model")
        self.policy = make_policy(causal_lm, run.config, loader)
        self.dtype = self.policy.compute_dtype or loader.dtype
        reference = make_reference(self.policy, None, run.config, loader)
        self.reference = None if reference is None else reference.frozen
        # Copies of the policy share its vision tower.
        self.shared_with_reference = shared_bytes(self.policy.causal_lm, self.reference)
        self.shared_with_critic = shared_bytes(self.policy.causal_lm, self.policy.value_function)
        self.reward_models: list[nn.Module] = []
        loader.dtype = torch.float32
        terms = (*run.config.rewards, *run.config.monitor_rewards, *run.config.reward_ensemble)
        for spec in terms:
            if FUNCTION.match(spec) and not Path(spec).exists():
                continue
            try:
                self.reward_models.append(loader.classifier(spec, "reward"))
            except ValueError as error:
                self.notes.append(f"not counted: {error}")
        if run.config.async_steps and run.config.rollout == "decoder":
            self.notes.append(
                "not counted: with async_steps, a copy of the policy and its KV cache during the "
                "update"
            )
        if run.config.rollout not in ENGINES:
            self.notes.append(f"not counted: rollout={run.config.rollout}")
        if run.config.optimizer != "adamw":
            self.notes.append(f"optimizer={run.config.optimizer} is counted as AdamW")
        # These are real tensors, since their lengths are read.
        prompts = [[0] * run.prompt_tokens] * run.microbatch
        self.layout = Batch.of(prompts, [[0] * run.response_tokens] * run.microbatch).layout()

    def loading(self) -> Phase:
        """Return the phase of loading: each process loads whole models before it shards them."""
        return Phase("loading", self.weights(shards=1, fp32=False))

    def rollout(self) -> Phase:
        """Return the rollout: the pass over the prompts, or the step with the longest cache."""
        run = self.run
        rows = run.generated_at_once
        parts = self.lasting()
        if run.is_sharded:
            sizes = [bytes_of([tensor]) for tensor in tensors_of(self.policy)]
            # vLLM holds a copy of the weights and receives new ones tensor by tensor.
            parts["gathered"] = max(sizes) if self.config.rollout == "vllm" else sum(sizes)
        parts |= self.of_vllm()
        if not self.config.holds_cache:
            return Phase("rollout", parts)
        self.policy.eval()
        before = self.live.bytes
        with torch.no_grad(), self.policy.autocast(), self.live.peak() as peak:
            cache = GrowingCache(self.policy.config, self.policy.compute_dtype)
            ids = torch.zeros(rows, run.prompt_tokens, dtype=torch.int64)
            positions = torch.arange(run.prompt_tokens).expand(rows, -1)
            trunk = trunk_of(self.policy.causal_lm)
            last_states(trunk, ids, attention_mask=None, position_ids=positions, cache=cache)
            at_prompts = reserved_bytes(cache)
            casts = self.live.bytes - before - at_prompts  # of weights, for the whole rollout
        prompts_pass = peak.bytes - at_prompts
        longest = cache_bytes(cache, rows, run.tokens - 1 + GROWTH)
        parts |= {
            "KV cache": longest,
            "logits": DRAW_BUFFERS * rows * self.policy.head.vocabulary * 4,
            "activations": max(casts, prompts_pass + at_prompts - longest),
        }
        return Phase("rollout", parts)

    def update(self) -> Phase:
        """Return the update: one microbatch, in its loss or in its backward pass.

        Gradients of earlier microbatches exist if there are any.
        """
        config = self.config
        trained = trained_of(self.policy)
        has_gradients = self.run.is_sharded or self.run.microbatch < self.run.minibatch
        if has_gradients:
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
        parts = self.lasting()
        # The moments of the batch, and those before a minibatch that may have to be repeated.
        parts["value function"] += self.regression_bytes * min(2, config.minibatches)
        if self.run.is_sharded:
            parts["gathered"] = self.gathered()
        self.policy.set_training(config.gradient_checkpointing)
        before = self.live.bytes
        with self.live.peak() as peak:
            with self.policy.autocast():
                hidden, values, _ = self.policy(self.layout)
                held = self.live.bytes - before
                logits = self.loss_bytes(hidden, buffers=self.loss_buffers)
            torch.autograd.backward([hidden, values], [hidden.detach(), values.detach()])
            del hidden, values
        at_loss = [(held, logits, self.loss_buffers)]
        if config.is_used("ptx_coef"):
            at_loss.append((*self.read_text(), 2))
        new_gradients = (
            0 if has_gradients else bytes_of(p.grad for p in trained if p.grad is not None)
        )
        backward = {
            "gradients": self.gradient_bytes,
            "activations": max(0, peak.bytes - new_gradients),
        }
        moments = [Phase("update", parts | backward)]
        for held, logits, buffers in at_loss:
            loss = {
                "gradients": self.gradient_bytes if has_gradients else 0,
                "logits": logits,
                "activations": held,
                "spare buffers": self.spare_bytes(in_use=buffers),
            }
            moments.append(Phase("update", parts | loss))
        return max(moments, key=lambda phase: phase.total)

    def saving(self) -> Phase:
        """Return the end of the run, when each process gathers the policy to save it.

        With the decoder, the rollout needs more.
        """
        gathered = {"gathered": bytes_of(tensors_of(self.policy))}
        return Phase("saving", self.lasting() | gathered | self.of_vllm())

    def read_text(self) -> tuple[int, int]:
        """Return (activations, logits) in bytes at the loss of a PPO-ptx microbatch.

        This loss computes its logits twice, and needs a gradient buffer of their size.
        """
        ids = torch.zeros(self.rows_of_text(), block_tokens(self.run.context), dtype=torch.int64)
        before = self.live.bytes
        with self.policy.autocast():
            text = hidden_states(trunk_of(self.policy.causal_lm), ids).flatten(0, 1)
            return self.live.bytes - before, self.loss_bytes(text, buffers=2)

    def rows_of_text(self) -> int:
        """Return the sequences of a PPO-ptx microbatch."""
        fitting = self.config.limits().count(block_tokens(self.run.context))
        return min(fitting, self.run.share(self.config.ptx_batch_size))

    @property
    def loss_buffers(self) -> int:
        """Number of buffers of logits in the PPO loss.

        A second buffer holds the reference's logits, or the gradient of recomputed logits: with a
        loss scale, and for an objective that autograd differentiates.
        """
        config = self.config
        exact_kl = config.is_used("kl_loss_coef") and config.kl_loss_estimator == "full"
        is_function = config.objective == "penalty" or "objective" in config.user_functions
        return 2 if exact_kl or is_function or config.precision == "fp16" else 1

    def loss_bytes(self, hidden: Tensor, *, buffers: int) -> int:
        """Return the bytes of the loss on hidden states.

        Chunks of logits, the lm-head's cast and gradient, and the buffers of `backend=torch`.

        Args:
            buffers: [n, V] buffers of a chunk.
        """
        weight = self.policy.head.weight
        vocabulary = len(weight)
        trained = weight.requires_grad
        rows = self.rows_of_chunk(len(hidden), buffers=buffers)
        size = buffers * rows * vocabulary * self.dtype.itemsize
        size += hidden.numel() * hidden.itemsize  # their gradient
        if self.dtype != weight.dtype:
            size += weight.numel() * self.dtype.itemsize
        if trained:
            size += weight.numel() * (weight.itemsize if rows == len(hidden) else 4)
        if self.config.backend == "torch":  # kernels need no more than the logits
            rows = min(rows, max(1, CHUNK_ELEMENTS // vocabulary))
            size += DEFINITION_COPIES * rows * vocabulary * 4
        return size

    def rows_of_chunk(self, tokens: int, *, buffers: int) -> int:
        weight = self.policy.head.weight
        vocabulary, width = weight.shape
        trained = weight.requires_grad
        spared = accumulator_rows(weight, self.dtype, buffers=buffers) if trained else 0
        return chunk_rows(tokens, vocabulary, self.run.device, width=width, spared_rows=spared)

    # ---------------------------------------------------------------------------------- the parts

    def of_vllm(self) -> dict[str, int]:
        """Return vLLM's share of the device, in bytes, if it is in the process."""
        if self.config.rollout != "vllm":
            return {}
        share = self.config.engine_keywords["gpu_memory_utilization"]
        return {"vLLM": int(share * (self.run.memory or 0))}

    def lasting(self) -> dict[str, int]:
        """Return the parts that last for the whole run, in bytes."""
        trained = trained_of(self.policy)
        states = 8 * count(trained)
        masters = 4 * count(p for p in trained if p.dtype in HALVES)
        if self.run.is_sharded:
            masters = 0
        parts = {"fp32 masters": masters, "optimizer states": states // self.run.shards}
        parts["spare buffers"] = self.spare_bytes()
        return self.weights(self.run.shards, fp32=self.run.is_sharded) | parts

    def spare_bytes(self, *, in_use: int = 0) -> int:
        """Return the bytes of the buffers of logits that the CPU's kernels keep between calls.

        in_use: bytes of the buffers that a loss is using.
        """
        if self.run.device.type != "cpu" or self.config.backend == "torch":
            return 0
        tokens = self.run.microbatch * self.config.max_new_tokens
        buffers = self.loss_buffers
        if self.config.is_used("ptx_coef"):
            tokens = max(tokens, self.rows_of_text() * block_tokens(self.run.context))
            buffers = 2
        rows = self.rows_of_chunk(tokens, buffers=buffers)
        return (buffers - in_use) * rows * len(self.policy.head.weight) * self.dtype.itemsize

    def weights(self, shards: int, *, fp32: bool) -> dict[str, int]:
        """Return the bytes of the weights of every model.

        Args:
            fp32: whether trained weights are fp32, whatever the model's dtype.
        """

        def held(model: nn.Module) -> int:
            size = bytes_of(tensors_of(model))
            if fp32:
                size += 2 * count(p for p in trained_of(model) if p.dtype in HALVES)
            return size

        policy = held(self.policy.causal_lm)
        dequantized = 0
        if self.config.quantization != "none":
            for matrix in quantized.matrices(self.policy.causal_lm):
                size = bytes_of([matrix.weight])
                policy += quantized.bytes_of(matrix.weight.numel()) - size
                dequantized = max(dequantized, size)
        reference = 0
        if self.reference is not None:
            reference = held(self.reference) - self.shared_with_reference
        value_function = held(self.policy.value_function) - self.shared_with_critic
        return {
            "policy weights": policy // shards,
            "dequantized": dequantized,
            "value function": value_function // shards + self.regression_bytes,
            "reference": reference // shards,
            "reward models": sum(map(held, self.reward_models)),
        }

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients, in fp32."""
        return 4 * count(trained_of(self.policy)) // self.run.shards

    @property
    def regression_bytes(self) -> int:
        """Bytes of the moments of the value head's regression."""
        size = self.policy.value_function.head.in_features + 2
        return 8 * size * size if self.config.fits_value_head else 0

    def gathered(self) -> int:
        """Return the bytes of the lm-head and the two largest layers, with their gradients."""
        model = self.policy.causal_lm
        layers = [bytes_with_gradients(layer) for layer in layers_of(trunk_of(model))]
        return bytes_with_gradients(model.get_output_embeddings()) + sum(sorted(layers)[-2:])


def reserved_bytes(cache: Any) -> int:
    """Return the bytes of a transformers cache, reserved ones included."""
    tensors = [x for layer in cache.layers for x in vars(layer).values() if isinstance(x, Tensor)]
    return bytes_of(tensors)


def cache_bytes(cache: Any, rows: int, tokens: int) -> int:
    """Return the bytes of a cache for `tokens` tokens of `rows` sequences."""
    size = 0
    for layer in cache.layers:
        window = getattr(layer, "sliding_window", None)
        kept = tokens if window is None else min(tokens, window)
        for states in (layer.keys, layer.values):
            if states is not None:  # a layer may share another's
                of_token = states.shape[1] * states.shape[3] * states.itemsize
                size += rows * kept * of_token
    return size


def shared_bytes(policy: nn.Module, model: nn.Module | None) -> int:
    """Return the bytes of a model's weights that are also the policy's."""
    if model is None:
        return 0
    weights = {id(p) for p in policy.parameters()}
    return bytes_of(p for p in model.parameters() if id(p) in weights)


def bytes_with_gradients(model: nn.Module) -> int:
    """Return the bytes of the weights and of the gradients of trained ones."""
    return bytes_of(model.parameters()) + bytes_of(trained_of(model))


def trained_of(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters."""
    return [p for p in model.parameters() if p.requires_grad]


def tensors_of(model: nn.Module) -> list[Tensor]:
    """Return parameters and buffers."""
    return [*model.parameters(), *model.buffers()]


def count(tensors: Iterable[Tensor]) -> int:
    """Return the number of elements."""
    return sum(tensor.numel() for tensor in tensors)
