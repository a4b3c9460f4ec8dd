"""FastPPO's loss in TRL's GRPOTrainer against TRL's own: loss, gradients, metrics, in fp32.

Tolerance: 1e-6 of the largest number, for sums of hundreds of terms in another order.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from allocations import allocations
from packaging.version import Version
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig

import fastppo

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl", reason="TRL is not installed: pip install trl==1.12.*")
accelerate = pytest.importorskip("accelerate")
adapter = pytest.importorskip("fastppo.integrations.trl")

pytestmark = pytest.mark.filterwarnings("default")  # TRL's own warnings

HAS_FUSED_HEAD = Version(trl.__version__) >= Version("1.15")
"""Whether TRL computes statistics without full logits, and so refuses adapters on the head."""

B = 6
PROMPT = 5
T = 7
VOCABULARY = len(tiny.VOCABULARY)


def trainer(kind: type, folder: Path, model: Any = "llama", **options: Any) -> Any:
    peft_config = options.pop("peft_config", None)
    config = trl.GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=B,
        num_generations=2,
        max_completion_length=T + 2,
        bf16=options.pop("bf16", False),
        gradient_checkpointing=False,
        report_to="none",
        **options,
    )
    grpo = kind(
        # By path, from which TRL makes the reference policy too.
        model=tiny.saved_model(folder / model, model) if isinstance(model, str) else model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["w1 w2"] * 8}),
        processing_class=tiny.tokenizer(),
        peft_config=peft_config,
    )
    grpo.current_gradient_accumulation_steps = 2
    grpo.model.train()
    return grpo


def inputs_of(
    theirs: Any, *, old: bool = True, tool: bool = False, masked_rows: int = 0
) -> dict[str, Tensor]:
    """Return left-padded prompts, right-padded completions and off-policy logprobs."""
    g = torch.Generator().manual_seed(0)
    prompt_mask = (torch.arange(PROMPT) >= torch.randint(0, 4, (B, 1), generator=g)).long()
    lengths = torch.tensor([[7], [3], [1], [5], [7], [4]])
    completion_mask = (torch.arange(T) < lengths).long()
    inputs = {
        "prompt_ids": torch.randint(3, VOCABULARY, (B, PROMPT), generator=g) * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": torch.randint(3, VOCABULARY, (B, T), generator=g) * completion_mask,
        "completion_mask": completion_mask,
        "advantages": torch.randn(B, generator=g),
        "num_items_in_batch": torch.tensor(2 * int(lengths.sum())),
        "importance_sampling_ratio": torch.rand(B, T, generator=g) + 0.5,
    }
    if tool:
        inputs["tool_mask"] = (torch.rand(B, T, generator=g) < 0.7).long()
    if masked_rows:
        inputs["tool_mask"] = (torch.arange(B) >= masked_rows).long().unsqueeze(1).expand(B, T)
    with torch.no_grad():
        logps, _, _ = trl.GRPOTrainer._get_per_token_logps_and_entropies(
            theirs,
            theirs.model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([prompt_mask, completion_mask], dim=1),
            T,
        )
    if old:
        inputs["old_per_token_logps"] = logps + 0.3 * torch.randn(B, T, generator=g)
    inputs["ref_per_token_logps"] = logps + 0.3 * torch.randn(B, T, generator=g)
    return inputs


def results(grpo: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, list[Tensor], dict[str, float]]:
    """(loss, gradients, metrics)."""
    grpo.model.zero_grad()
    grpo.log({})  # clears the metrics
    loss = grpo.compute_loss(grpo.model, inputs)
    loss.backward()
    gradients = [p.grad for p in grpo.model.parameters() if p.requires_grad]
    grpo.log({})
    return loss.detach(), gradients, grpo.state.log_history[-1]


def assert_agree(
    folder: Path, is_fused: bool, *, inputs: dict[str, Any] | None = None, **options: Any
) -> None:
    vllm = options.pop("vllm", False)
    options = {"use_bias_correction_kl": False} | options
    both = [trainer(kind, folder, **options) for kind in (trl.GRPOTrainer, adapter.GRPOTrainer)]
    for (name, theirs), (_, ours) in zip(
        both[0].model.named_parameters(), both[1].model.named_parameters(), strict=True
    ):
        if "lora_B" in name:  # zero at first
            torch.nn.init.normal_(theirs, std=0.3)
        ours.data.copy_(theirs.data)
    for grpo in both:
        grpo.use_vllm = vllm  # its import alone would need vLLM
    batch = inputs_of(both[0], **(inputs or {}))
    assert adapter._is_fused(both[1], batch) == is_fused
    (loss, gradients, metrics), (our_loss, ours, reported) = (results(grpo, batch) for grpo in both)
    torch.testing.assert_close(our_loss, loss, rtol=1e-6, atol=1e-6)
    largest = max(float(g.abs().max()) for g in gradients)
    assert largest > 0
    assert len(ours) == len(gradients)
    for mine, wanted in zip(ours, gradients, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-6 * max(1.0, largest))
    assert reported == pytest.approx(metrics, abs=1e-6)


@pytest.mark.parametrize("version", ["1.11.3", "1.17.0", "2.0.0"])
def test_an_untested_version_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl, "__version__", version)
    with pytest.raises(ImportError, match=rf"TRL {version}"):
        importlib.reload(adapter)


def test_a_batch_without_tokens_has_no_clip_shares(tmp_path: Path) -> None:
    """Masked tools' outputs and `mask_truncated_completions` can leave no token."""
    assert_agree(tmp_path, True, inputs={"masked_rows": B - 1}, loss_type="bnpo")
    ours = trainer(adapter.GRPOTrainer, tmp_path, use_bias_correction_kl=False)
    loss, _, metrics = results(ours, inputs_of(ours, masked_rows=B))
    assert loss == 0
    assert "clip_ratio/low_min" not in metrics


@pytest.mark.parametrize("loss_type", adapter.CLIPPED)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_clipped_losses_equal_trls(loss_type: str, beta: float, tmp_path: Path) -> None:
    assert_agree(tmp_path, True, loss_type=loss_type, beta=beta, temperature=0.7, epsilon_high=0.28)


@pytest.mark.parametrize("loss_type", ["cispo", "sapo"])
def test_cispo_and_sapo_equal_trls(loss_type: str, tmp_path: Path) -> None:
    """For CISPO, TRL bounds the ratio itself."""
    assert_agree(tmp_path, True, loss_type=loss_type, beta=0.1, temperature=0.7, epsilon_high=1.2)


@pytest.mark.parametrize(
    ("objective", "options"),
    [
        ("gspo", {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 0.05}),
        ("sapo", {"loss_type": "sapo"}),
    ],
)
def test_losses_from_logits_equal_trls(
    objective: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """`fastppo.ppo_loss` of the model's logits, without the adapter, also with TRL 1.16."""
    theirs = trainer(trl.GRPOTrainer, tmp_path, beta=0.0, **options)
    batch = inputs_of(theirs)
    loss, gradients, _ = results(theirs, batch)
    mask = batch["completion_mask"].bool()
    logits = theirs.model(
        input_ids=torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
        attention_mask=torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
    ).logits[:, PROMPT - 1 : -1]
    ours = fastppo.ppo_loss(
        logits,
        batch["completion_ids"],
        batch["old_per_token_logps"],
        batch["advantages"].unsqueeze(1).expand_as(mask),
        mask,
        objective=objective,
        clip_ratio=0.05,
        temperature=theirs.temperature,
        aggregation="seq-mean-token-mean",
        denominator=2.0 * B,
    ).loss
    torch.testing.assert_close(ours.detach(), loss, rtol=1e-6, atol=1e-6)
    parameters = [p for p in theirs.model.parameters() if p.requires_grad]
    largest = max(float(g.abs().max()) for g in gradients)
    assert largest > 0
    for mine, wanted in zip(torch.autograd.grad(ours, parameters), gradients, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-6 * max(1.0, largest))


@pytest.mark.parametrize(
    ("options", "inputs"),
    [({"delta": 1.3}, {}), ({"vllm": True, "beta": 0.1}, {}), ({}, {"tool": True})],
    ids=["delta", "importance-weights", "tool-mask"],
)
def test_options_of_a_clipped_loss_equal_trls(
    options: dict[str, Any], inputs: dict[str, Any], tmp_path: Path
) -> None:
    assert_agree(tmp_path, True, inputs=inputs, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "cispo", "epsilon_high": 0.9},
        {"cast_lm_head_to_fp32": True},
        {"inputs": {"old": False}},
        {"importance_sampling_level": "sequence"},
        {"beta": 0.1, "use_bias_correction_kl": True},
        {"entropy_coef": 0.05},
        {"top_entropy_quantile": 0.5},
        {"off_policy_mask_threshold": 0.01},
        {"delta": 1.1},
    ],
    ids=lambda options: "-".join(options),
)
def test_other_losses_equal_trls(options: dict[str, Any], tmp_path: Path) -> None:
    assert_agree(tmp_path, False, **options)


@pytest.mark.parametrize("model", ["qwen2", "gemma2", "cohere", "phi"])
def test_tied_capped_scaled_and_biased_heads_equal_the_models(model: str, tmp_path: Path) -> None:
    assert_agree(tmp_path, True, model=model, beta=0.1)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_adapters_on_the_head_get_their_gradient(dora: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "lm_head"]
    lora = peft.LoraConfig(r=2, target_modules=targets, lora_alpha=8, use_dora=dora)
    if HAS_FUSED_HEAD:
        with pytest.raises(ValueError, match="lm_head"):
            trainer(adapter.GRPOTrainer, tmp_path, peft_config=lora)
        return
    assert_agree(tmp_path, True, peft_config=lora)


def test_a_head_with_dropout_uses_trls_path(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], lora_dropout=0.5)
    if HAS_FUSED_HEAD:
        with pytest.raises(ValueError, match="lm_head"):
            trainer(adapter.GRPOTrainer, tmp_path, peft_config=lora)
        return
    both = [
        trainer(kind, tmp_path, peft_config=lora) for kind in (trl.GRPOTrainer, adapter.GRPOTrainer)
    ]
    both[1].model.load_state_dict(both[0].model.state_dict())
    with pytest.raises(TypeError, match="lora_dropout"):
        adapter._head_of(both[1].model)
    batch = inputs_of(both[0])
    losses = []
    for grpo in both:
        torch.manual_seed(0)  # of the dropout
        losses.append(grpo.compute_loss(grpo.model, batch))
    assert torch.equal(*losses)


@pytest.mark.parametrize("old", [True, False], ids=["loss", "statistics"])
def test_mixed_precision_reaches_the_trunk(old: bool, tmp_path: Path) -> None:
    """The same loss as TRL's within bf16's rounding, from products in bf16 of weights in fp32."""
    losses = []
    seen = []
    for kind in (trl.GRPOTrainer, adapter.GRPOTrainer):
        grpo = trainer(kind, tmp_path, bf16=True, use_cpu=True)
        model = grpo.accelerator.prepare_model(grpo.model)
        batch = inputs_of(grpo, old=old)
        layer = model.model.layers[0].self_attn.q_proj
        layer.register_forward_hook(lambda m, i, out: seen.append((m.weight.dtype, out.dtype)))
        grpo._get_per_token_logps_and_entropies(
            model, batch["completion_ids"], batch["completion_mask"], T - 1
        )
        losses.append(grpo.compute_loss(model, batch))
    assert set(seen) == {(torch.float32, torch.bfloat16)}
    assert len(seen) == 4
    torch.testing.assert_close(*losses, rtol=0, atol=2**-8)


def test_a_wrapper_that_rounds_uses_trls_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2 in bf16 casts the inputs and outputs of its forward pass."""
    distributed = torch.distributed
    theirs, ours = (trainer(kind, tmp_path) for kind in (trl.GRPOTrainer, adapter.GRPOTrainer))
    batch = inputs_of(theirs)
    accelerator = ours.accelerator
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, mixed_precision_policy="bf16"
    )
    monkeypatch.setattr(type(accelerator), "is_fsdp2", property(lambda self: True))
    monkeypatch.setattr(accelerator.state, "fsdp_plugin", plugin, raising=False)
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        for grpo in (theirs, ours):
            fully_shard(grpo.model, mp_policy=plugin.mixed_precision_policy)
        (loss, gradients, metrics), (our_loss, others, reported) = (
            results(grpo, batch) for grpo in (theirs, ours)
        )
        assert torch.equal(our_loss, loss)
        for mine, wanted in zip(others, gradients, strict=True):
            assert torch.equal(mine.to_local(), wanted.to_local())
        assert reported == metrics
    finally:
        distributed.destroy_process_group()


def test_logprobs_and_entropies_equal_trls(tmp_path: Path) -> None:
    theirs, ours = (
        trainer(kind, tmp_path, temperature=0.7) for kind in (trl.GRPOTrainer, adapter.GRPOTrainer)
    )
    ids = torch.randint(3, VOCABULARY, (B, PROMPT + T))
    operands = (ids, torch.ones_like(ids), T)
    with torch.no_grad():
        wanted = theirs._get_per_token_logps_and_entropies(
            theirs.model, *operands, batch_size=4, compute_entropy=True
        )
        our_statistics = ours._get_per_token_logps_and_entropies(
            ours.model, *operands, batch_size=4, compute_entropy=True
        )
    torch.testing.assert_close(our_statistics[:2], wanted[:2], rtol=0, atol=2e-6)
    assert our_statistics[2] is wanted[2] is None


@pytest.mark.parametrize("old", [True, False], ids=["loss", "statistics"])
def test_fewer_copies_of_the_logits_are_stored(old: bool, tmp_path: Path) -> None:
    """Measure the bytes that the loss and its gradient allocate when logits dominate."""
    vocabulary = 20_000
    peaks = {}
    logits_bytes = B * T * vocabulary * 4
    for kind in (trl.GRPOTrainer, adapter.GRPOTrainer):
        config = tiny.CONFIGS["llama"]().to_dict() | {"vocab_size": vocabulary, "hidden_size": 8}
        model = tiny.model_of(LlamaConfig(**config | {"architectures": None}))
        grpo = trainer(kind, tmp_path, model=model)
        batch = inputs_of(grpo, old=old)
        peaks[kind] = allocations(lambda m=grpo, b=batch: m.compute_loss(m.model, b).backward())[1]
    # Statistics recompute the logits of each chunk; here there is one chunk.
    bound = (3 if old else 5) * logits_bytes
    assert peaks[adapter.GRPOTrainer] < bound
    if not HAS_FUSED_HEAD:
        assert bound < peaks[trl.GRPOTrainer]
