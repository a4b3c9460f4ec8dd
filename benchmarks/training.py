"""Define the case of one PPO update of a model.

The model has random weights and the widths of a real model, with fewer layers. An update computes
old and reference logprobs, values and advantages of a batch of responses, then runs forward,
backward and an optimizer step over all microbatches. The learning rate is too small to change a
weight, so every call sees the same model, and losses, entropy and gradient norm have an fp64 truth.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.case import Case, Inputs, Outputs, Provider, Truth
from benchmarks.peers import CLIP_RATIO, GAMMA, KL_COEF, LAM
from benchmarks.sequences import eager_whiten, loop_gae
from benchmarks.shapes import Model, Training

ENTROPY_COEF = 0.01
VF_COEF = 0.5
LEARNING_RATE = 1e-12
"""Learning rate, about the size of an AdamW step: less than half a unit in the last place of any
weight above 1e-5.
"""

ADAM_TENSORS = 7  # weight, gradient and two moments read; weight and moments written
EXTRA_TOKENS = 3
"""Number of special tokens: padding, end and unknown."""


def make_config(model: Model, layers: int, context: int) -> Any:
    """Return a transformers config with the model's widths."""
    from transformers import AutoConfig

    common = {"vocab_size": model.vocab, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    if model.family == "gpt2":
        return AutoConfig.for_model(
            "gpt2",
            n_embd=model.hidden,
            n_inner=model.intermediate,
            n_layer=layers,
            n_head=model.heads,
            n_positions=context,
            **common,
        )
    return AutoConfig.for_model(
        model.family,
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        max_position_embeddings=context,
        **common,
    )


def make_model(config: Any, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def make_tokenizer(vocab: int) -> Any:
    """Return a tokenizer with one token per word: t3, t4, …"""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    words |= {f"t{i}": i for i in range(EXTRA_TOKENS, vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


@functools.cache
def parameter_counts(shape: Training) -> tuple[int, int]:
    """Return the numbers of weights in the trunk and in the whole model."""
    model = make_model(make_config(shape.model, shape.layers, 64), torch.device("meta"))
    total = sum(p.numel() for p in model.parameters())
    tables = {
        layer.weight for layer in (model.get_input_embeddings(), model.get_output_embeddings())
    }
    return total - sum(table.numel() for table in tables), total


class Lab:
    """Model and trainer of a case, made for the first provider and freed at the end."""

    def __init__(self, shape: Training) -> None:
        self.shape = shape
        self.device = torch.device("cpu")
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.close()

    def close(self) -> None:
        if self.folder is not None:
            self.folder.cleanup()
        self.folder = None
        self.model: Any = None
        self.reference: Any = None
        self.value_head: Any = None
        self.optimizer: Any = None
        self.exact: Any = None
        """Copy of the model in fp64."""
        self._trainer: Any = None

    def open(self, device: torch.device) -> None:
        if self.model is not None:
            return
        self.device = device
        self.folder = tempfile.TemporaryDirectory()
        context = self.shape.prompt + self.shape.response
        config = make_config(self.shape.model, self.shape.layers, context)
        self.model = make_model(config, device).eval()
        self.reference = copy.deepcopy(self.model).requires_grad_(False)
        self.value_head = torch.nn.Linear(self.shape.model.hidden, 1, device=device)
        torch.nn.init.zeros_(self.value_head.weight)
        torch.nn.init.zeros_(self.value_head.bias)
        parameters = [*self.model.parameters(), *self.value_head.parameters()]
        self.optimizer = torch.optim.AdamW(
            parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True
        )

    @property
    def trainer(self) -> Any:
        from rich.console import Console

        from fastppo.ppo.options.config import PPOConfig
        from fastppo.ppo.trainer import PPOTrainer

        if self._trainer is None:
            assert self.folder is not None
            shape = self.shape
            config = PPOConfig(
                device=str(self.device),
                rollout_batch_size=shape.batch,
                max_new_tokens=shape.response,
                microbatch_size=shape.microbatch,
                ppo_epochs=1,
                minibatches=1,
                kl_coef=KL_COEF,
                entropy_coef=ENTROPY_COEF,
                clip_ratio=CLIP_RATIO,
                vf_coef=VF_COEF,
                value_head="gradient",  # like the other provider's
                gamma=GAMMA,
                lam=LAM,
                learning_rate=LEARNING_RATE,
                stop_token_ids=[],
                output_dir=str(Path(self.folder.name) / "run"),
            )
            self._trainer = PPOTrainer(
                config,
                model=self.model,
                reference=self.reference,
                tokenizer=make_tokenizer(shape.model.vocab),
                prompts=[{"prompt": text} for text in prompts_of(shape)],
                rewards=[length_reward],
                console=Console(quiet=True),
            )
        return self._trainer

    def exact_model(self) -> Any:
        if self.exact is None:
            self.exact = copy.deepcopy(self.model).double()
        return self.exact

    def autocast(self) -> Any:
        """Return FastPPO's autocast: bf16 matrix products on a GPU, fp32 on a CPU."""
        return torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda")

    def drop_gradients(self) -> None:
        """Free all gradients, so that each call starts with the same memory."""
        self.model.zero_grad(set_to_none=True)
        self.value_head.zero_grad(set_to_none=True)
        if self._trainer is not None:
            self._trainer.model.zero_grad(set_to_none=True)


def prompt_texts(batch: int, length: int, vocab: int) -> list[str]:
    """Return random prompts of exactly `length` tokens of `make_tokenizer`."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(EXTRA_TOKENS, vocab, (batch, length), generator=generator)
    return [" ".join(f"t{i}" for i in row) for row in ids.tolist()]


def prompts_of(shape: Training) -> list[str]:
    return prompt_texts(shape.batch, shape.prompt, shape.model.vocab)


def length_reward(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """Return a cheap reward with different values for different responses."""
    return [len(completion) % 16 / 8 - 1 for completion in completions]


# ---------------------------------------------------------------------------- the update, by hand


class _Forward(NamedTuple):
    logits: Tensor
    hidden: Tensor


def _forward(model: Any, ids: Tensor, prompt: int) -> _Forward:
    """Return logits and last hidden states [B, R, ·] of the positions before response tokens."""
    keep = ids.shape[1] - prompt + 1
    out = model(input_ids=ids, output_hidden_states=True, use_cache=False, logits_to_keep=keep)
    return _Forward(out.logits[:, :-1], out.hidden_states[-1][:, prompt - 1 : -1])


def _stats(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits, -1)
    logprobs = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return logprobs, -(log_p.exp() * log_p).sum(-1)


class _Learner(NamedTuple):
    """Models and dtype of the hand-written update."""

    model: Any
    reference: Any
    value_head: Any
    dtype: torch.dtype
    """Dtype of softmax, values and losses."""


def _make_experience(
    learner: _Learner, parts: list[Tensor], prompt: int, scores: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return old logprobs, values, whitened advantages and returns, each [B, R]."""
    logprobs = []
    ref_logprobs = []
    values = []
    with torch.no_grad():
        for ids in parts:
            tokens = ids[:, prompt:]
            out = _forward(learner.model, ids, prompt)
            logprobs.append(_stats(out.logits.to(learner.dtype), tokens)[0])
            values.append(learner.value_head(out.hidden.to(learner.dtype)).squeeze(-1))
            ref = _forward(learner.reference, ids, prompt).logits.to(learner.dtype)
            ref_logprobs.append(_stats(ref, tokens)[0])
        old = torch.cat(logprobs)
        value = torch.cat(values)
        rewards = -KL_COEF * (old - torch.cat(ref_logprobs))
        rewards[:, -1] += scores
        mask = torch.ones_like(old, dtype=torch.bool)
        advantages, returns = loop_gae(rewards, value, mask)
        return old, value, eager_whiten(advantages, mask), returns


def _update(
    learner: _Learner, ids: Tensor, prompt: int, microbatch: int, scores: Tensor
) -> dict[str, Tensor]:
    """Run a PPO update as tutorials write it, with values in units of the returns' deviation.

    Gradients stay in the parameters.
    """
    parts = list(ids.split(microbatch))
    old, _, advantages, returns = _make_experience(learner, parts, prompt, scores)
    n = old.numel()
    scale = returns.std(correction=0)
    sums: dict[str, Tensor] = {}
    for part, old_part, advantage, target in zip(
        parts,
        old.split(microbatch),
        advantages.split(microbatch),
        returns.split(microbatch),
        strict=True,
    ):
        out = _forward(learner.model, part, prompt)
        logprobs, entropy = _stats(out.logits.to(learner.dtype), part[:, prompt:])
        ratio = torch.exp(logprobs - old_part)
        clipped = ratio.clamp(1 - CLIP_RATIO, 1 + CLIP_RATIO)
        policy = -torch.minimum(ratio * advantage, clipped * advantage).sum() / n
        values = scale * learner.value_head(out.hidden.to(learner.dtype)).squeeze(-1)
        value = 0.5 * ((values - target) ** 2).sum() / n
        (policy - ENTROPY_COEF * entropy.sum() / n + VF_COEF * value / scale**2).backward()
        metrics = {"policy_loss": policy, "value_loss": value, "entropy": entropy.sum() / n}
        for name, x in metrics.items():
            sums[name] = sums.get(name, torch.zeros_like(x)) + x.detach()
    return {**sums, "old_logprobs": old, "advantages": advantages}


def _parameters(learner: _Learner) -> list[Tensor]:
    return [*learner.model.parameters(), *learner.value_head.parameters()]


def _eager_update(lab: Lab, ids: Tensor, scores: Tensor) -> Outputs:
    learner = _Learner(lab.model, lab.reference, lab.value_head, torch.float32)
    with lab.autocast():
        metrics = _update(learner, ids, lab.shape.prompt, lab.shape.microbatch, scores)
    metrics["grad_norm"] = torch.nn.utils.clip_grad_norm_(_parameters(learner), 1.0)
    lab.optimizer.step()
    return metrics


REPORTED = ("policy_loss", "value_loss", "entropy", "grad_norm")
"""Metrics of an update that are checked."""

UPDATE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Tolerance relative to each metric, and for the policy loss to the mean |advantage|, by dtype of
the matrix products. bf16: 2⁻⁹ per product, over several layers, the worst of four metrics."""


def _exact_update(lab: Lab, inputs: Inputs) -> dict[str, Truth]:
    lab.open(inputs["scores"].device)
    exact = lab.exact_model()
    head = copy.deepcopy(lab.value_head).double()
    learner = _Learner(exact, exact, head, torch.float64)
    ids = torch.cat([inputs["prompts"], inputs["responses"]], 1)
    prompt = lab.shape.prompt
    microbatch = lab.shape.microbatch
    metrics = _update(learner, ids, prompt, microbatch, inputs["scores"].double())
    norms = [p.grad.norm() for p in _parameters(learner) if p.grad is not None]
    metrics["grad_norm"] = torch.stack(norms).norm()
    lab.exact = None  # frees its gradients
    scale = {name: metrics[name].abs().item() for name in REPORTED}
    scale["policy_loss"] = metrics["advantages"].abs().mean().item()
    return {name: Truth(metrics[name], scale[name]) for name in REPORTED}


# ------------------------------------------------------------------------------------------ cases


def _update_work(shape: Training) -> tuple[int, int]:
    """Return bytes and FLOP of an update."""
    trunk, total = parameter_counts(shape)
    tokens = shape.batch * (shape.prompt + shape.response)
    head = shape.model.vocab * shape.model.hidden
    responses = shape.batch * shape.response
    # Forward passes of policy and reference, then forward and backward (twice a forward): 5.
    flop = 5 * 2 * (trunk * tokens + head * responses)
    return ADAM_TENSORS * 4 * total, flop


def update_case(shape: Training, dtype: torch.dtype) -> Case:
    """Return the case. `dtype` belongs to the matrix products: bf16 means autocast.

    Compiling a training step takes too long for a set, and TRL's PPOTrainer has no separate update:
    see `trl_iteration`.
    """
    lab = Lab(shape)
    bytes_moved, flop = _update_work(shape)

    def draw(seed: int, device: torch.device) -> Inputs:
        generator = torch.Generator().manual_seed(seed)

        def ids(length: int) -> Tensor:
            size = (shape.batch, length)
            return torch.randint(EXTRA_TOKENS, shape.model.vocab, size, generator=generator)

        drawn = {"prompts": ids(shape.prompt), "responses": ids(shape.response)}
        drawn["scores"] = torch.randn(shape.batch, generator=generator)
        return {name: x.to(device) for name, x in drawn.items()}

    def ours(inputs: Inputs) -> Outputs:
        lab.open(inputs["scores"].device)
        lab.trainer.value_head.returns.moments = None  # the scale is that of these returns alone
        metrics = lab.trainer.step(
            inputs["prompts"].tolist(), inputs["responses"].tolist(), inputs["scores"]
        )
        lab.drop_gradients()
        return {name: torch.tensor(metrics[name], dtype=torch.float64) for name in REPORTED}

    def eager(inputs: Inputs) -> Outputs:
        lab.open(inputs["scores"].device)
        ids = torch.cat([inputs["prompts"], inputs["responses"]], 1)
        metrics = _eager_update(lab, ids, inputs["scores"])
        lab.drop_gradients()
        return {name: metrics[name] for name in REPORTED}

    return Case(
        "PPO update",
        str(shape),
        dtype,
        bytes_moved=bytes_moved,
        flop=flop,
        bytes_and_flop="AdamW's seven tensors; five forward passes' worth of products: policy and "
        "reference, forward, backward; the lm-head on response tokens alone",
        draw=draw,
        truth=lambda inputs: _exact_update(lab, inputs),
        providers=(
            Provider("FastPPO", ours),
            Provider("eager PyTorch", eager),
        ),
        tolerance=UPDATE_TOLERANCE[dtype],
        release=lab.close,
    )


class _NoLog:
    """Log that discards everything, since logging is not measured."""

    def metrics(self, *arguments: Any) -> None: ...

    def samples(self, *arguments: Any) -> None: ...


def iterate(trainer: Any) -> dict[str, Any]:
    """Run an iteration of a `PPOTrainer` without its log and return the metrics."""
    from fastppo.ppo.training_run import TrainingRun

    run = TrainingRun(trainer, trainer.evaluation, trainer.checkpoints, trainer.callbacks)
    return run.iteration(_NoLog())
