"""What a run will need of memory, by part and phase, before anything is loaded.

The models are made of their config.json, with tensors that have a shape, a dtype and no memory
(torch's FakeTensorMode), and go through one iteration: a rollout's prefill and last step, the
scores, the experience of one microbatch, the forward and backward pass of one and an optimiser
step. Every storage that an operation returns is written down when it comes and when it goes, so
what autograd saves of an architecture, with or without checkpointing, adapters or autocast, is what
it saves, and not a formula. The parts of a peak, for parameters of b bytes (4 in fp32, 2 in bf16):

    policy weights     b · parameters; with adapters the frozen ones (their matrices in the compute
                       dtype, or 4 bits with quantization) and theirs
    value function     the same of its head (4 bytes each), its layers or its critic
    fp32 masters       4 · trained parameters, where the optimiser has them
    gradients          4 · trained parameters, in the update
    optimiser states   8 · trained parameters: AdamW's two moments; 2 with adamw8bit
    reference          b · parameters (its matrices in the compute dtype); none with adapters
    reward models      4 · parameters, of those whose config can be read
    KV cache           2 · b' · layers · heads of keys · head width · tokens · sequences, for b' of
                       the compute dtype, with room for 64 tokens more; on a GPU it has its size
                       from the start, tokens and sequences in whole buckets
    cast weights       2 · parameters in matrix products, for fp32 weights under bf16 autocast
    logits of the loss the chunk of `fastppo_kernels.linear.chunk_rows`, and what the row pass holds
    dW of the loss     4 · V · H while it is accumulated; in the weight's dtype with one chunk
    activations        all else

What it does not see: what a library borrows inside an operation, a CUDA context (about half a GB),
what the allocator holds in gaps, and an evaluation of more sequences than a batch. Prompts are
taken to be of one length, and every response to be as long as it may be.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fastppo_kernels.linear import accumulator_rows, chunk_rows
from fastppo_kernels.torch_rows import ROW_CHUNK_ELEMENTS, ROW_CHUNK_THREADS
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from fastppo.data.batch import Batch, Layout
from fastppo.functional import arguments
from fastppo.models import quantized
from fastppo.models.adapters import add_adapters
from fastppo.models.cache import FixedCache, GrowingCache, has_fixed_cache
from fastppo.models.device import cast_frozen, choose_device, compute_dtype
from fastppo.models.policy import ActorCritic, LanguageModel
from fastppo.models.pretrained import is_sequence_classifier, model_config
from fastppo.models.trunk import (
    checkpoint_activations,
    context_length,
    hidden_states,
    last_states,
)
from fastppo.models.value import (
    CriticValue,
    DetachedValue,
    SharedValue,
    ValueFunction,
    critic_of_policy,
)
from fastppo.ppo.config import PPOConfig
from fastppo.ppo.eight_bit import empty_moments
from fastppo.ppo.optimizer import clip_gradients, make_optimizer
from fastppo.rewards.loading import FUNCTION
from fastppo.rewards.model import sequence_scores
from fastppo.rollout.fixed_shapes import ROWS, TOKENS, bucket

ACTIVATIONS = "activations"
PARTS = (
    *("policy weights", "value function", "fp32 masters", "gradients", "optimiser states"),
    *("reference", "reward models", "KV cache", "cast weights"),
    *("logits of the loss", "dW of the loss", ACTIVATIONS),
)

GB = 1e9

DRAW_BUFFERS = 4
"""[B, V] fp32 of a decoding step: logits, scaled scores, probabilities, what the draw takes."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Bytes of each part at the moment when a phase needs most."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run needs."""

    phases: list[Phase]
    """Of the run as its options are, in the order of an iteration."""
    other_update: Phase
    """The update with gradient_checkpointing the other way."""
    checkpointing: bool
    """Whether the options have it."""
    device: torch.device
    """What it is planned for; it need not be there."""
    memory: float | None
    """Bytes of the device, if they are known."""
    notes: list[str]
    """Sentences: what is assumed, and what could not be counted."""

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def unit(self) -> tuple[str, float]:
        """(name, bytes) of what the peak is a readable number of."""
        return ("GB", GB) if self.peak.total >= GB else ("MB", GB / 1000)

    @property
    def verdict(self) -> str:
        """Whether it fits, in a sentence."""
        unit, size = self.unit
        need = f"{self.peak.total / size:.1f} {unit} at its peak, the {self.peak.name}"
        if self.memory is None:
            return f"needs {need}; --memory says of how many GB"
        fits = "fits" if self.peak.total <= self.memory else "does not fit"
        return f"{fits} {self.memory / GB:g} GB: {need}"


# ------------------------------------------------------------------------------------- the counting


class Ledger(TorchDispatchMode):
    """Writes down storages as they come and go, and to which part each belongs."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[int, weakref.ref]] = {}
        self._events: list[tuple[int, int]] = []  # (number of a storage, ± bytes)
        self._parts: list[str] = []  # by the storage's number
        self._phases: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        part = ACTIVATIONS
        if func is torch.ops.aten._to_copy.default and self._part_of(args[0]) in PARTS[:2]:
            part = "cast weights"
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._note(x, part)
        return out

    def _note(self, x: Tensor, part: str) -> None:
        if x.device.type == "meta":
            return
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._live:
            return
        number = len(self._parts)
        self._parts.append(part)
        self._events.append((number, size))

        def gone(_: Any) -> None:
            del self._live[key]
            self._events.append((number, -size))

        self._live[key] = number, weakref.ref(storage, gone)

    def _part_of(self, x: Tensor) -> str | None:
        found = self._live.get(x.untyped_storage()._cdata)
        return None if found is None else self._parts[found[0]]

    def assign(self, part: str, tensors: Any) -> None:
        """These tensors, whenever they came, belong to a part."""
        for x in tree_leaves(tensors):
            if isinstance(x, Tensor) and (found := self._live.get(x.untyped_storage()._cdata)):
                self._parts[found[0]] = part

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens in the block counts for the phase; a phase may have several blocks."""
        begin = len(self._events)
        yield
        self._phases.append((name, begin, len(self._events)))

    def peaks(self) -> list[Phase]:
        """Each phase at its peak."""
        highest: dict[str, dict[str, int]] = {}
        held = dict.fromkeys(PARTS, 0)
        ends = iter(self._phases)
        name, begin, end = next(ends, ("", 0, 0))
        for i in range(len(self._events) + 1):
            higher = sum(held.values()) > sum(highest.get(name, {}).values())
            if begin <= i <= end and higher:
                highest[name] = dict(held)
            if i == end:
                name, begin, end = next(ends, ("", 0, -1))
            if i < len(self._events):
                number, size = self._events[i]
                held[self._parts[number]] += size
        return [Phase(name, parts) for name, parts in highest.items()]


# -------------------------------------------------------------------------------- what a loss holds


class _LinearLoss(torch.autograd.Function):
    """Allocates what the linear loss does, and computes nothing: its gradients are there after the
    forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, run: _Run, buffers: int) -> Tensor:
        chunk = run.logits(hidden, weight, buffers=buffers, trained=weight.requires_grad)
        step = run.chunk(hidden, weight, buffers=buffers, trained=weight.requires_grad)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        if weight.requires_grad:
            dtype = weight.dtype if hidden.shape[0] <= step else torch.float32
            wide = torch.empty_like(weight, dtype=dtype)
            run.ledger.assign("dW of the loss", wide)
            del chunk  # the logits go before dW is cast
            grad_weight = wide.to(weight.dtype)
            run.ledger.assign("dW of the loss", grad_weight)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return hidden.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *by: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.saved_tensors, None, None)


# --------------------------------------------------------------------------------------- the phases


class _Run:
    """A run's models without memory, and the phases of its iteration.

    Models are made on the meta device; the phases run under FakeTensorMode and the ledger, where
    tensors say that they are on the CPU, whatever `device` is planned for: torch without CUDA has
    no autocast for it. Saved tensors are the same but for attention's row sums.
    """

    def __init__(self, config: PPOConfig, device: torch.device, ledger: Ledger) -> None:
        self.config, self.device, self.ledger = config, device, ledger
        self.notes: list[str] = []
        self.model = self._actor_critic()
        self.frozen = self._frozen()
        self.reward_models = self._reward_models()

    def start(self) -> None:
        """What stays for the whole run, as it is from the first step on."""
        self._move(self.model, "cpu", "policy weights")
        self.ledger.assign("value function", [*self.model.value_function.parameters()])
        if self.frozen is not None:
            self._move(self.frozen, "cpu", "reference")
        for model in self.reward_models:
            self._move(model, "cpu", "reward models")
        self.optimizer = make_optimizer(self.model, self.config)
        self._hold_gradients()
        self._take_step()
        self.optimizer.zero_grad(set_to_none=True)
        trained = {id(p) for p in self.model.parameters()}
        masters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.ledger.assign("fp32 masters", [p for p in masters if id(p) not in trained])
        self.ledger.assign("optimiser states", list(self.optimizer.state.values()))
        if self.config.optimizer == "adamw8bit":
            self.moments = [
                empty_moments(p) for group in self.optimizer.param_groups for p in group["params"]
            ]
            self.ledger.assign("optimiser states", self.moments)

    # ------------------------------------------------------------------------------ what it is of

    def _causal_lm(self, name: str, what: str) -> Any:
        config, choice = model_config(name, what), self.config.attn_implementation
        # flash-attn saves what SDPA saves, and cannot be called without a GPU.
        attention = None if choice == "auto" or choice.startswith("flash") else choice
        dtype = getattr(torch, self.config.param_dtype)
        with torch.device("meta"):
            how = {"dtype": dtype, "attn_implementation": attention}
            return AutoModelForCausalLM.from_config(config, **how)

    def _classifier(self, config: Any, dtype: torch.dtype) -> Any:
        with torch.device("meta"):
            return AutoModelForSequenceClassification.from_config(config, dtype=dtype)

    def _move(self, model: nn.Module, device: str, part: str = ACTIVATIONS) -> None:
        """Gives a model other tensors: on the CPU they count, to a part, and on `meta` they do not.

        Module.to cannot do it where tensors are fake.
        """
        moved: dict[Tensor, Tensor] = {}  # tied weights are one
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, x in tensors.items():
                    if x is None:
                        continue
                    if x not in moved:
                        moved[x] = torch.empty(x.shape, dtype=x.dtype, device=device)
                        if isinstance(x, nn.Parameter):
                            moved[x] = nn.Parameter(moved[x], x.requires_grad)
                    tensors[name] = moved[x]  # type: ignore[assignment]
        self.ledger.assign(part, list(moved.values()))

    def _actor_critic(self) -> ActorCritic:
        config = self.config
        causal_lm, peft = self._causal_lm(config.model, "model"), None
        if config.lora_rank > 0:
            peft = add_adapters(
                causal_lm,
                rank=config.lora_rank,
                alpha=config.lora_alpha,
                target_modules=config.lora_target_modules,
            )
        dtype = compute_dtype(config.precision, self.device)
        with _fake_tensors():
            self._move(causal_lm, "meta")
            value_function = self._value_function(causal_lm)
            model = ActorCritic(causal_lm, peft, value_function, dtype)
        if peft is not None:
            cast_frozen(causal_lm.base_model, dtype)
        model.set_training(config.gradient_checkpointing)
        checkpoint_activations(causal_lm)  # in training mode only
        if isinstance(value_function, CriticValue):
            checkpoint_activations(value_function.trunk)
        return model

    def _value_function(self, causal_lm: Any) -> ValueFunction:
        config, trunk = self.config, causal_lm.base_model
        width = causal_lm.get_output_embeddings().weight.shape[1]
        if config.value_model == "shared":
            return SharedValue(trunk, width)
        if config.value_model == "detached":
            return DetachedValue(trunk, width)
        if config.critic_model is None:
            return critic_of_policy(causal_lm)
        other = model_config(config.critic_model, "critic_model")
        if is_sequence_classifier(other):
            critic = self._classifier(other, getattr(torch, config.param_dtype))
        else:
            critic = self._causal_lm(config.critic_model, "critic_model")
        trunk = critic.base_model
        return CriticValue(trunk, trunk.get_input_embeddings().weight.shape[1])

    def _frozen(self) -> LanguageModel | None:
        """The reference, if it is a model of its own."""
        config = self.config
        if config.reference_model is not None:
            causal_lm = self._causal_lm(config.reference_model, "reference_model")
        elif config.wants_reference and self.model.peft is None:
            causal_lm = copy.deepcopy(self.model.causal_lm)
        else:
            return None
        with _fake_tensors():
            frozen = LanguageModel(causal_lm, compute_dtype=self.model.compute_dtype)
        frozen.requires_grad_(False)
        cast_frozen(causal_lm.base_model, frozen.compute_dtype)
        return frozen

    @contextmanager
    def _reference(self) -> Iterator[LanguageModel | None]:
        """The reference on the device; None where no KL needs one."""
        if self.frozen is None and self.model.peft is not None:
            with self.model.adapters_off() as model:
                yield model
            return
        yield self.frozen

    def _reward_models(self) -> list[Any]:
        found = []
        config = self.config
        for spec in (*config.rewards, *config.monitor_rewards, *config.reward_ensemble):
            if FUNCTION.match(spec) and not Path(spec).exists():
                continue
            try:
                reward = model_config(spec, "reward")
            except ValueError as error:
                self.notes.append(f"not counted: {error}")
                continue
            found.append(self._classifier(reward, torch.float32).eval().requires_grad_(False))
        return found

    def in_four_bits(self, phases: list[Phase]) -> list[Phase]:
        """The phases with frozen matrices in 4 bits, where `quantization` has them so: they went
        through in the dtype of their products, of which then the largest is held at a time."""
        if self.config.quantization == "none":
            return phases
        held = [each.weight for each in quantized.matrices(self.model.causal_lm)]
        saved = sum(w.numel() * w.itemsize - quantized.bytes_of(w.numel()) for w in held)
        largest = max(w.numel() * w.itemsize for w in held)
        change = {"policy weights": -saved, "cast weights": largest}
        return [
            Phase(each.name, {part: n + change.get(part, 0) for part, n in each.parts.items()})
            for each in phases
        ]

    # ------------------------------------------------------------------------- what it goes through

    def rollout(self, prompt: int) -> None:
        """The prompts' pass, then the last step, when the cache is at its longest."""
        config, trunk = self.config, self.model.causal_lm.base_model
        rows = config.rollout_batch_size
        rows = min(config.generate_batch_size or rows, rows)
        was_training = self.model.training
        self.model.eval()
        with torch.no_grad(), self.model.autocast():
            with self.ledger.phase("rollout"):
                cache = self._cache(rows, prompt + config.max_new_tokens)
                states = last_states(trunk, **_tokens(rows, 0, prompt), cache=cache)
                self.ledger.assign("KV cache", _cached(cache))
                self._draw(states)
            del states, cache
            # Between the two the cache grows, a token a step.
            longest = prompt + config.max_new_tokens - 1
            cache = self._cache(rows, prompt + config.max_new_tokens)
            last_states(trunk, **_tokens(rows, 0, longest), cache=cache)
            self.ledger.assign("KV cache", _cached(cache))
            if isinstance(cache, FixedCache):
                cache.show(rows, cache.tokens)
            with self.ledger.phase("rollout"):
                states = last_states(trunk, **_tokens(rows, longest, longest + 1), cache=cache)
                self.ledger.assign("KV cache", _cached(cache))
                self._draw(states)
        self.model.train(was_training)

    def _cache(self, rows: int, tokens: int) -> GrowingCache | FixedCache:
        """Where the decoder keeps keys and values: on a GPU at fixed shapes, where it can."""
        config, dtype = self.model.config, self.model.compute_dtype
        graphs = self.device.type == "cuda" and self.config.rollout == "decoder"
        if not graphs or not has_fixed_cache(config):
            return GrowingCache(config, dtype)
        cache = FixedCache(
            config,
            rows=bucket(rows, ROWS),
            tokens=bucket(tokens, TOKENS),
            dtype=dtype,
            device=torch.device("cpu"),
        )
        cache.begin()
        return cache

    def _draw(self, hidden: Tensor) -> None:
        shape = (DRAW_BUFFERS, hidden.shape[0], self.model.head.vocabulary)
        self.ledger.assign("logits of the loss", torch.empty(shape, dtype=torch.float32))

    def score(self, length: int) -> None:
        """A batch of texts through each reward model."""
        config = self.config
        rows = min(config.reward_batch_size, config.rollout_batch_size)
        for model in self.reward_models:
            tokens = min(filter(None, (context_length(model), length)))
            with torch.no_grad(), self.ledger.phase("score"):
                ids = _ids(rows, tokens)
                sequence_scores(model, ids, torch.ones_like(ids))

    def rows_at_once(self, prompt: int, rows: int) -> int:
        """Sequences of a microbatch, of so many that there are."""
        limits = self.config.limits()
        return min(rows, limits.count(prompt + self.config.max_new_tokens))

    def experience(self, prompt: int) -> None:
        """The policy's and the reference's pass over a microbatch."""
        config = self.config
        rows = self.rows_at_once(prompt, config.rollout_batch_size)
        layout = self._layout(rows, prompt)
        with torch.no_grad(), self.ledger.phase("experience"):
            with self.model.autocast():
                positions = torch.cat([layout.predicting, layout.final])
                hidden, _ = self.model(layout, positions)
                self.logits(hidden[: layout.predicting.shape[0]], self.model.head.weight, spare=1)
            del hidden
            with self._reference() as model, self.model.autocast():
                if model is not None:
                    exact = config.kl_coef > 0 and config.kl_estimator == "full"
                    states = [model.hidden(layout) for _ in range(1 + exact)]
                    self.logits(states[0], model.head.weight, buffers=1 + exact, spare=1)

    def update(self, prompt: int, *, name: str, checkpointing: bool) -> None:
        """One microbatch, on the gradients of those before it if there are any; then a step."""
        config = self.config
        self.model.set_training(checkpointing)
        with self.ledger.phase(name):
            minibatch = config.rollout_batch_size // config.minibatches
            rows = self.rows_at_once(prompt, minibatch)
            if rows < minibatch:
                self._hold_gradients()
            layout = self._layout(rows, prompt)
            with self.model.autocast():
                hidden, values = self.model(layout)
                loss = self._policy_loss(hidden, layout) + values.sum()
            del hidden, values
            loss.backward()
            del loss
            if config.ptx_coef:
                self._pretraining_text()
            self._take_step()
        self.optimizer.zero_grad(set_to_none=True)

    def _policy_loss(self, hidden: Tensor, layout: Layout) -> Tensor:
        """The exact KL in the loss has the reference's logits beside the policy's."""
        if not self.config.kl_loss_coef or self.config.kl_loss_estimator != "full":
            return self._loss(hidden)
        with self._reference() as model:
            assert model is not None
            with torch.no_grad():
                ref_hidden = model.hidden(layout)
            return self._loss(hidden, ref_hidden)

    def _pretraining_text(self) -> None:
        """PPO-ptx: the loss forms its logits twice, and their gradient beside them."""
        config = self.config
        rows = min(config.limits().count(config.ptx_block_size), config.ptx_batch_size)
        with self.model.autocast():
            trunk = self.model.causal_lm.base_model
            states = hidden_states(trunk, _ids(rows, config.ptx_block_size))
            loss = self._loss(states[:, :-1].flatten(0, 1), states)
        loss.backward()

    def _loss(self, hidden: Tensor, second: Tensor | None = None) -> Tensor:
        """The loss on hidden states; with a second buffer of logits if there are second ones, or if
        a loss scale lets their gradient be formed beside them."""
        head = self.model.head
        twice = self.config.precision == "fp16" or second is not None
        return _LinearLoss.apply(hidden, head.weight, self, 2 if twice else 1)

    def chunk(self, hidden: Tensor, weight: Tensor, *, buffers: int, trained: bool) -> int:
        """Rows of logits that the linear loss, or its statistics, hold at once."""
        (rows, width), vocabulary = hidden.shape, weight.shape[0]
        spared = accumulator_rows(weight, self._gemm_dtype(hidden), buffers=buffers)
        return chunk_rows(
            rows, vocabulary, self.device, width=width, spared_rows=spared if trained else 0
        )

    def _gemm_dtype(self, hidden: Tensor) -> torch.dtype:
        autocast = torch.is_autocast_enabled("cpu")
        return torch.get_autocast_dtype("cpu") if autocast else hidden.dtype

    def logits(
        self,
        hidden: Tensor,
        weight: Tensor,
        *,
        buffers: int = 1,
        spare: int = 0,
        trained: bool = False,
    ) -> list[Tensor]:
        """The chunks of logits that a linear loss, or its statistics, hold at once.

        Args:
            buffers: models whose logits are formed.
            spare: further buffers of the row pass.
            trained: the head's gradient is formed beside them.
        """
        dtype = self._gemm_dtype(hidden)
        held = self.chunk(hidden, weight, buffers=buffers, trained=trained)
        found = [torch.empty(held, weight.shape[0], dtype=dtype) for _ in range(buffers)]
        cast = weight.to(dtype)
        narrow = dtype != torch.float32
        found += self.scratch(found[0], held, buffers=2 + (spare or narrow))
        self.ledger.assign("logits of the loss", found)
        return [*found, cast]

    def scratch(self, logits: Tensor, rows: int, *, buffers: int) -> list[Tensor]:
        """What the torch backend's row pass writes into; the Triton kernels need none."""
        kind = self.device.type
        if kind != "cpu" and self.config.backend != "torch":
            return []
        budget = ROW_CHUNK_ELEMENTS.get(kind, ROW_CHUNK_ELEMENTS["cuda"])
        if kind == "cpu":
            budget *= min(torch.get_num_threads(), ROW_CHUNK_THREADS)
        vocabulary = logits.shape[-1]
        shape = min(rows, max(1, budget // vocabulary)), vocabulary
        found = [torch.empty(shape, dtype=torch.float32) for _ in range(buffers)]
        self.ledger.assign("logits of the loss", found)
        return found

    def _take_step(self) -> None:
        self.ledger.assign("gradients", [p.grad for p in self.model.parameters()])
        clip_gradients(self.optimizer, self.model, self.config)
        if self.config.optimizer == "adamw":  # torchao's step is compiled, and needs nothing more
            self.optimizer.step()

    def _hold_gradients(self) -> None:
        for p in self.model.parameters():
            if p.requires_grad:
                # In fp32 where the optimiser has a master.
                p.grad = torch.empty_like(p, dtype=p.grad_dtype or p.dtype)
        self.ledger.assign("gradients", [p.grad for p in self.model.parameters()])

    def _layout(self, rows: int, prompt: int) -> Layout:
        with _disable_current_modes():  # its lengths are read
            batch = Batch.of([[0] * prompt] * rows, [[0] * self.config.max_new_tokens] * rows)
            layout = batch.layout()
        return tree_map_only(Tensor, torch.empty_like, layout)


def _fake_tensors() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def _ids(rows: int, length: int) -> Tensor:
    return torch.zeros(rows, length, dtype=torch.int64)


def _tokens(rows: int, begin: int, end: int) -> dict[str, Any]:
    """The keywords of `last_states` for the tokens from `begin` on, without a mask."""
    return {
        "input_ids": _ids(rows, end - begin),
        "attention_mask": None,
        "position_ids": torch.arange(begin, end).expand(rows, -1),
    }


def _cached(cache: Any) -> list[Any]:
    """The tensors of a cache of transformers."""
    return [value for layer in cache.layers for value in vars(layer).values()]


def make_plan(config: PPOConfig, prompt_tokens: int, memory: float | None = None) -> Plan:
    """What a run with these options needs.

    Args:
        config: `device: cuda` may be planned for where there is none; auto is a GPU if there is one
            or if a memory is given.
        prompt_tokens: of every prompt.
        memory: of the device, GB; by default what is free on a GPU that is there.

    Raises:
        ValueError: a config cannot be read; sequences are longer than the model's context.
    """
    arguments.at_least("prompt_tokens", prompt_tokens, 1)
    device, free = _planned_device(config.device, memory)
    context = getattr(model_config(config.model).get_text_config(), "max_position_embeddings", None)
    length = prompt_tokens + config.max_new_tokens
    if context is not None and length > context:
        raise ValueError(
            f"prompts of {prompt_tokens} tokens and responses of {config.max_new_tokens} are "
            f"longer than the context of {context} tokens: give a smaller --prompt_tokens"
        )
    ledger, now = Ledger(), config.gradient_checkpointing
    with warnings.catch_warnings():
        # Modules that are copied ask for addresses, which these tensors have not.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        run = _Run(config, device, ledger)
        with _fake_tensors(), ledger:
            run.start()
            run.rollout(prompt_tokens)
            run.score(length)
            run.experience(prompt_tokens)
            run.update(prompt_tokens, name="update", checkpointing=now)
            run.update(prompt_tokens, name="other", checkpointing=not now)
    *phases, other = run.in_four_bits(ledger.peaks())
    at_once = run.rows_at_once(prompt_tokens, config.rollout_batch_size // config.minibatches)
    notes = [
        f"{config.rollout_batch_size} sequences of {prompt_tokens} + {config.max_new_tokens} "
        f"tokens, {at_once} at a time in the update; GB are 10^9 bytes",
        *run.notes,
    ]
    return Plan(phases, other, now, device, free, notes)


def _planned_device(name: str, memory: float | None) -> tuple[torch.device, float | None]:
    """(the device, its bytes if they are known)."""
    if memory is not None:
        arguments.at_least("memory", memory, 0, strictly=True)
        return torch.device("cuda" if name == "auto" else name), memory * GB
    device = choose_device(name)
    return device, float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None


def show(plan: Plan, console: Console) -> None:
    """Prints a plan as a table of parts and phases and whether it fits."""
    unit, size = plan.unit
    table = Table(title=f"{unit} at the peak of each phase", title_justify="left")
    table.add_column("part")
    now = plan.checkpointing
    phases = [*plan.phases, plan.other_update]
    for phase in phases[:-1]:
        table.add_column(phase.name, justify="right")
    table.add_column(f"update, {'no ' if now else ''}checkpointing", justify="right")
    for part in PARTS:
        held = [phase.parts[part] for phase in phases]
        if any(held):
            table.add_row(part, *(f"{each / size:.2f}" for each in held))
    table.add_section()
    table.add_row("total", *(f"{phase.total / size:.2f}" for phase in phases))
    console.print(table)
    for sentence in (plan.verdict, *plan.notes):
        console.print(sentence, soft_wrap=True, highlight=False, markup=False)
