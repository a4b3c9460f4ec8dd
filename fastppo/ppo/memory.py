"""What a run will need of memory, by part and phase, before anything is loaded.

The models are made as for training (`run_models`), but of their config.json: tensors have a shape,
a dtype and no memory (torch's FakeTensorMode). They go through one iteration: a rollout's first and
last step, the scores, the experience of one microbatch, the forward and backward pass of one and an
optimiser step. What lasts is counted by what holds it:

    policy weights     the frozen ones of adapters in the compute dtype, or in 4 bits
    value function     its head with the moments of its regression, and a critic
    reference          none with adapters
    reward models      those whose config can be read
    fp32 masters       of trained weights in bf16, where the optimiser has them
    optimiser states   AdamW's two moments
    gradients          in the update
    KV cache           in the rollout: its largest size
    activations        the most that operations of the phase hold at a time beside all that: what
                       autograd saves, chunks of logits, weights cast for autocast

so `activations` are what this architecture saves, with or without checkpointing and adapters, and
no formula. What is not seen: what a library borrows inside an operation, a CUDA context (about half
a GB), what the allocator holds in gaps. Prompts are taken to be of one length, and every response
to be as long as it may be.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fastppo_kernels.linear import accumulator_rows, chunk_rows
from fastppo_kernels.torch_rows import CHUNK_ELEMENTS
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode  # torch has no public name for it

from fastppo.data.batch import Batch, Layout
from fastppo.functional import scalars
from fastppo.models import quantized
from fastppo.models.cache import FixedCache, GrowingCache, has_fixed_cache
from fastppo.models.device import choose_device
from fastppo.models.policy import LanguageModel
from fastppo.models.pretrained import model_config
from fastppo.models.trunk import context_length, hidden_states, last_states
from fastppo.ppo.config import PPOConfig
from fastppo.ppo.eight_bit import empty_moments
from fastppo.ppo.optimizer import clip_gradients, make_optimizer
from fastppo.ppo.run_models import make_policy, make_reference
from fastppo.ppo.shapes import LiveBytes, ShapeLoader, bytes_of, materialize
from fastppo.ppo.value_regression import ROWS as ROWS_IN_FP64
from fastppo.ppo.value_regression import SOLVER_COPIES
from fastppo.rewards.loading import FUNCTION
from fastppo.rewards.model import BATCH_SIZE, sequence_scores
from fastppo.rollout.fixed_shapes import ROWS, TOKENS, bucket

GB = 1e9

DRAW_BUFFERS = 4
"""[B, V] fp32 of a decoding step: logits, scaled scores, probabilities, what the draw takes."""

DEFINITION_COPIES = 10
"""[n, V] fp32 that autograd over the definition holds at its peak: 7, and 10 with the full KL."""


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
    """In the order of an iteration."""
    memory: float | None
    """Bytes of the device, if they are known."""
    notes: list[str]
    """Sentences: what is assumed, and what could not be counted."""

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def verdict(self) -> str:
        """Whether it fits, in a sentence."""
        need = f"{self.peak.total / GB:.3g} GB at its peak, the {self.peak.name}"
        if self.memory is None:
            return f"needs {need}; --memory says of how many GB"
        fits = "fits" if self.peak.total <= self.memory else "does not fit"
        return f"{fits} {self.memory / GB:g} GB: {need}"


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
    scalars.at_least("prompt_tokens", prompt_tokens, 1)
    free = None
    if memory is not None:
        scalars.at_least("memory", memory, 0, strictly=True)
        device = torch.device("cuda" if config.device == "auto" else config.device)
        free = memory * GB
    else:
        device = choose_device(config.device)
        if device.type == "cuda":
            free = float(torch.cuda.mem_get_info(device)[0])
    context = getattr(model_config(config.model).get_text_config(), "max_position_embeddings", None)
    if context is not None and prompt_tokens + config.max_new_tokens > context:
        raise ValueError(
            f"prompts of {prompt_tokens} tokens and responses of {config.max_new_tokens} are "
            f"longer than the context of {context} tokens: give a smaller --prompt_tokens"
        )
    with warnings.catch_warnings():
        # Modules that are copied ask for addresses, which these tensors have not.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        run = PlannedRun(config, device, prompt_tokens)
        with FakeTensorMode(allow_non_fake_inputs=True), run.live:
            run.start()
            phases = run.rollout(), run.score(), run.experience(), run.update()
    at_once = run.sequences_at_once(config.rollout_batch_size // config.minibatches)
    notes = [
        f"{config.rollout_batch_size} sequences of {prompt_tokens} + {config.max_new_tokens} "
        f"tokens, {at_once} at a time in the update; GB are 10^9 bytes",
        *run.notes,
    ]
    return Plan([phase for phase in phases if phase is not None], free, notes)


def show(plan: Plan, console: Console) -> None:
    """Prints a plan as a table of parts and phases and whether it fits."""
    table = Table(title="GB at the peak of each phase", title_justify="left")
    table.add_column("part")
    for phase in plan.phases:
        table.add_column(phase.name, justify="right")
    for part in plan.phases[-1].parts:
        sizes = [phase.parts[part] for phase in plan.phases]
        if any(sizes):
            table.add_row(part, *(f"{size / GB:.3f}" for size in sizes))
    table.add_section()
    table.add_row("total", *(f"{phase.total / GB:.3f}" for phase in plan.phases))
    console.print(table)
    for sentence in (plan.verdict, *plan.notes):
        console.print(sentence, soft_wrap=True, highlight=False, markup=False)


# --------------------------------------------------------------------------------------- the phases


class PlannedRun:
    """A run's models without memory, and the phases of its iteration.

    Tensors say that they are on the CPU, whatever `device` is planned for: torch without CUDA has
    no autocast for it. Saved tensors are the same but for attention's row sums.
    """

    def __init__(self, config: PPOConfig, device: torch.device, prompt_tokens: int) -> None:
        self.config = config
        self.device = device
        self.prompt_tokens = prompt_tokens
        self.live = LiveBytes()
        self.notes: list[str] = []
        self.moments: list[Tensor] = []
        """Of the value head's regression, where there is one; a batch's are there in its update."""
        loader = ShapeLoader(config, device)
        causal_lm = loader.causal_lm(config.model, "model")
        self.policy = make_policy(causal_lm, None, config, loader)
        self.reference = make_reference(self.policy, None, config, loader)
        self.reward_models = self._reward_models()
        if config.async_steps and config.rollout == "decoder":
            self.notes.append(
                "not counted: async_steps decodes a copy of the policy, with its KV cache, beside "
                "the update"
            )
        # Their lengths are read, so they are made here, before tensors are fake.
        self.experience_layout = self._layout(config.rollout_batch_size)
        self.update_layout = self._layout(config.rollout_batch_size // config.minibatches)

    def _reward_models(self) -> list[Any]:
        models = []
        loader = ShapeLoader(self.config, self.device)
        loader.dtype = torch.float32
        specs = [
            *self.config.rewards,
            *self.config.monitor_rewards,
            *self.config.reward_ensemble,
        ]
        for spec in specs:
            if FUNCTION.match(spec) and not Path(spec).exists():
                continue
            try:
                model = loader.classifier(spec, "reward")
            except ValueError as error:
                self.notes.append(f"not counted: {error}")
                continue
            models.append(model.eval().requires_grad_(False))
        return models

    @property
    def frozen(self) -> LanguageModel | None:
        """The reference's own model, where it has one."""
        return None if self.reference is None else self.reference.frozen

    def start(self) -> None:
        """What stays for the whole run, as it is from the first step on."""
        materialize(self.policy)
        if self.frozen is not None:
            materialize(self.frozen)
        for model in self.reward_models:
            materialize(model)
        if self.config.fits_value_head:
            size = self.policy.value_function.head.in_features + 2
            self.moments = [torch.empty(size, size, dtype=torch.float64)]
        self.optimizer = make_optimizer(self.policy, self.config)
        self._hold_gradients()
        self._take_step()
        self.optimizer.zero_grad(set_to_none=True)

    def phase(self, name: str, transient: int, *, gradients: int = 0, cache: int = 0) -> Phase:
        """A phase in which so many bytes came and were held; of them gradients and KV cache."""
        policy = [*self.policy.causal_lm.parameters(), *self.policy.causal_lm.buffers()]
        value_function = self.policy.value_function
        values = [*value_function.parameters(), *value_function.buffers(), *self.moments]
        frozen = self.frozen
        reference = [] if frozen is None else [*frozen.parameters(), *frozen.buffers()]
        rewards = [x for model in self.reward_models for x in model.state_dict().values()]
        trained = {id(parameter) for parameter in self.policy.parameters()}
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
        saved, unpacked = self._four_bits()
        return Phase(
            name,
            {
                "policy weights": bytes_of(policy) - saved,
                "value function": bytes_of(values),
                "reference": bytes_of(reference),
                "reward models": bytes_of(rewards),
                "fp32 masters": bytes_of(p for p in stepped if id(p) not in trained),
                "optimiser states": self._state_bytes(stepped),
                "gradients": gradients,
                "KV cache": cache,
                "activations": transient - gradients - cache + unpacked,
            },
        )

    def _state_bytes(self, stepped: list[nn.Parameter]) -> int:
        if self.config.optimizer == "adamw8bit":
            return bytes_of(moment for p in stepped for moment in empty_moments(p))
        return bytes_of(
            state
            for states_of_weight in self.optimizer.state.values()
            for state in states_of_weight.values()
            if isinstance(state, Tensor)
        )

    def _four_bits(self) -> tuple[int, int]:
        """Bytes that frozen matrices of 4 bits save, and those of the largest in the dtype of its
        product, which is unpacked while it is used."""
        if self.config.quantization == "none":
            return 0, 0
        weights = [matrix.weight for matrix in quantized.matrices(self.policy.causal_lm)]
        saved = sum(w.numel() * w.itemsize - quantized.bytes_of(w.numel()) for w in weights)
        return saved, max(w.numel() * w.itemsize for w in weights)

    # ------------------------------------------------------------------------- what it goes through

    def rollout(self) -> Phase:
        """The prompts' pass, and the last step, when the cache is at its longest."""
        config = self.config
        trunk = self.policy.causal_lm.base_model
        rows = min(
            config.generate_batch_size or config.rollout_batch_size, config.rollout_batch_size
        )
        prompt = self.prompt_tokens
        length = prompt + config.max_new_tokens
        was_training = self.policy.training
        self.policy.eval()
        with torch.no_grad(), self.policy.autocast():
            with self.live.peak() as first:
                cache = self._cache(rows, length)
                self._draw(last_states(trunk, **token_ids(rows, 0, prompt), cache=cache))
            first_cache = cache_bytes(cache)
            del cache
            cache = self._cache(rows, length)
            last_states(trunk, **token_ids(rows, 0, length - 1), cache=cache)
            if isinstance(cache, FixedCache):
                cache.show(rows, cache.tokens)
            filled = cache_bytes(cache)
            with self.live.peak() as last:
                self._draw(last_states(trunk, **token_ids(rows, length - 1, length), cache=cache))
            full = cache_bytes(cache)
        self.policy.train(was_training)
        phases = [
            self.phase("rollout", first.bytes, cache=first_cache),
            self.phase("rollout", last.bytes + filled, cache=full),
        ]
        return max(phases, key=lambda phase: phase.total)

    def _cache(self, rows: int, tokens: int) -> GrowingCache | FixedCache:
        """Where the decoder keeps keys and values: on a GPU at fixed shapes, where it can."""
        model_options = self.policy.config
        dtype = self.policy.compute_dtype
        on_gpu = self.device.type == "cuda" and self.config.rollout == "decoder"
        if not on_gpu or not has_fixed_cache(model_options):
            return GrowingCache(model_options, dtype)
        cache = FixedCache(
            model_options,
            rows=bucket(rows, ROWS),
            tokens=bucket(tokens, TOKENS),
            dtype=dtype,
            device=torch.device("cpu"),
        )
        cache.begin()
        return cache

    def _draw(self, hidden: Tensor) -> None:
        torch.empty(DRAW_BUFFERS, len(hidden), self.policy.head.vocabulary, dtype=torch.float32)

    def score(self) -> Phase | None:
        """A batch of texts through each reward model."""
        rows = min(BATCH_SIZE, self.config.rollout_batch_size)
        length = self.prompt_tokens + self.config.max_new_tokens
        with torch.no_grad(), self.live.peak() as transient:
            for model in self.reward_models:
                ids = torch.zeros(
                    rows, min(context_length(model) or length, length), dtype=torch.int64
                )
                sequence_scores(model, ids, torch.ones_like(ids))
        return self.phase("score", transient.bytes) if self.reward_models else None

    def sequences_at_once(self, sequences: int) -> int:
        """Sequences of a microbatch, of so many that there are."""
        length = self.prompt_tokens + self.config.max_new_tokens
        return min(sequences, self.config.limits().count(length))

    def experience(self) -> Phase:
        """The policy's and the reference's pass over a microbatch."""
        config = self.config
        layout = without_values(self.experience_layout)
        with torch.no_grad(), self.live.peak() as transient:
            with self.policy.autocast():
                positions = torch.cat([layout.predicting, layout.final])
                hidden = self.policy(layout, positions).hidden
                predicting = hidden[: layout.predicting.shape[0]]
                self.logits(predicting, self.policy.head.weight)
            del hidden, predicting
            if self.reference is not None:
                with self.reference.loaded() as model, self.policy.autocast():
                    exact = config.kl_coef > 0 and config.kl_estimator == "full"
                    states = [model.hidden(layout) for _ in range(2 if exact else 1)]
                    self.logits(states[0], model.head.weight, buffers=len(states))
        return self.phase("experience", transient.bytes)

    def update(self) -> Phase:
        """One microbatch, on the gradients of those before it if there are any; then a step."""
        config = self.config
        minibatch = config.rollout_batch_size // config.minibatches
        rows = self.sequences_at_once(minibatch)
        layout = without_values(self.update_layout)
        exact_kl = config.kl_loss_coef > 0 and config.kl_loss_estimator == "full"
        # The reference's logits beside the policy's, or under a loss scale their gradient.
        buffers = 2 if exact_kl or config.precision == "fp16" else 1
        with self.live.peak() as transient:
            of_batch = [torch.empty_like(moments) for moments in self.moments]
            if rows < minibatch:
                self._hold_gradients()
            with self.policy.autocast():
                hidden, values, value_states = self.policy(layout)
                if exact_kl:
                    assert self.reference is not None
                    with torch.no_grad(), self.reference.loaded() as model:
                        ref_hidden = model.hidden(layout)
                        grad_hidden = self._loss_gradient(hidden, buffers=buffers)
                    del ref_hidden
                else:
                    grad_hidden = self._loss_gradient(hidden, buffers=buffers)
            if self.moments:
                size = len(self.moments[0])
                torch.empty(min(hidden.shape[0], ROWS_IN_FP64), size, dtype=torch.float64)
            torch.autograd.backward([hidden, values], [grad_hidden, torch.ones_like(values)])
            del hidden, values, value_states, grad_hidden
            if config.ptx_coef:
                length = config.ptx_block_size
                rows = min(config.limits().count(length), config.ptx_batch_size)
                ids = torch.zeros(rows, length, dtype=torch.int64)
                with self.policy.autocast():
                    text = hidden_states(self.policy.causal_lm.base_model, ids).flatten(0, 1)
                    # Its logits are formed twice, and their gradient beside them.
                    grad_text = self._loss_gradient(text, buffers=2)
                torch.autograd.backward(text, grad_text)
                del text, grad_text
            self._take_step()
            if self.moments:
                copies = [torch.empty_like(self.moments[0]) for _ in range(SOLVER_COPIES)]
                del copies
            del of_batch
        gradients = bytes_of(p.grad for p in self.policy.parameters() if p.grad is not None)
        return self.phase("update", transient.bytes, gradients=min(gradients, transient.bytes))

    def _loss_gradient(self, hidden: Tensor, *, buffers: int) -> Tensor:
        """Allocates what the loss on hidden states does, the head's gradient with it: there are
        gradients after its forward pass. Returns that of the hidden states."""
        weight = self.policy.head.weight
        logits = self.logits(hidden, weight, buffers=buffers, trained=weight.requires_grad)
        grad_hidden = torch.empty_like(hidden)
        if weight.requires_grad:
            is_one_chunk = hidden.shape[0] <= logits[0].shape[0]
            dtype = weight.dtype if is_one_chunk else torch.float32
            grad_weight = torch.empty_like(weight, dtype=dtype)
            del logits  # they go before dW is cast
            grad_weight = grad_weight.to(weight.dtype)
            if weight.grad is None:
                weight.grad = grad_weight.to(weight.grad_dtype or weight.dtype)
        return grad_hidden

    def logits(
        self, hidden: Tensor, weight: Tensor, *, buffers: int = 1, trained: bool | None = None
    ) -> list[Tensor]:
        """What the loss on hidden states, or its statistics, hold at once: a chunk of logits, the
        cast head, and what the definition makes of the logits where it is the backend.

        Args:
            buffers: chunks of logits: of policy and reference, or logits and their gradient.
            trained: whether the loss forms the head's gradient beside them; None for statistics.
        """
        dtype = hidden.dtype
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
        vocabulary = weight.shape[0]
        rows = chunk_rows(
            hidden.shape[0],
            vocabulary,
            self.device,
            width=hidden.shape[1],
            spared_rows=accumulator_rows(weight, dtype, buffers=buffers) if trained else 0,
        )
        tensors = [torch.empty(rows, vocabulary, dtype=dtype) for _ in range(buffers)]
        tensors.append(weight.to(dtype))
        # A GPU's kernels and a CPU's loops hold nothing beside the logits.
        if self.config.backend == "torch" or self.device.type not in ("cuda", "cpu"):
            shape = min(rows, max(1, CHUNK_ELEMENTS // vocabulary)), vocabulary
            copies = range(DEFINITION_COPIES)
            tensors += [torch.empty(shape, dtype=torch.float32) for _ in copies]
        return tensors

    def _take_step(self) -> None:
        clip_gradients(self.optimizer, self.policy, self.config)
        if self.config.optimizer == "adamw":  # torchao's step is compiled, and needs nothing more
            self.optimizer.step()

    def _hold_gradients(self) -> None:
        for parameter in self.policy.parameters():
            if parameter.requires_grad:
                # In fp32 where the optimiser has a master.
                dtype = parameter.grad_dtype or parameter.dtype
                parameter.grad = torch.empty_like(parameter, dtype=dtype)

    def _layout(self, sequences: int) -> Layout:
        """Of the microbatch that runs at once, of so many sequences that there are."""
        rows = self.sequences_at_once(sequences)
        prompts = [[0] * self.prompt_tokens] * rows
        responses = [[0] * self.config.max_new_tokens] * rows
        return Batch.of(prompts, responses).layout()


def without_values(layout: Layout) -> Layout:
    """The same shapes: under FakeTensorMode, in fake tensors."""
    return Layout(
        input_ids=torch.empty_like(layout.input_ids),
        predicting=torch.empty_like(layout.predicting),
        final=torch.empty_like(layout.final),
    )


def token_ids(rows: int, begin: int, end: int) -> dict[str, Any]:
    """The keywords of `last_states` for the tokens from `begin` on, without a mask."""
    return {
        "input_ids": torch.zeros(rows, end - begin, dtype=torch.int64),
        "attention_mask": None,
        "position_ids": torch.arange(begin, end).expand(rows, -1),
    }


def cache_bytes(cache: Any) -> int:
    """Of the tensors of a cache of transformers."""
    return bytes_of(
        x for layer in cache.layers for x in vars(layer).values() if isinstance(x, Tensor)
    )
