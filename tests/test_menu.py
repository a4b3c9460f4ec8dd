"""PPO's menu: each choice does what it says, in closed form or in a run that shows it."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rich.console import Console
from test_trainer import first_experience, make_trainer
from transformers import AutoConfig, AutoModelForSequenceClassification

from fastppo.batch import Experience, Sequences
from fastppo.config import PPOConfig, Schedule
from fastppo.monitor import load_batch
from fastppo.reward_processing import RunningScale
from fastppo.rollout import Rollout
from fastppo.run_log import read_jsonl
from fastppo.trainer import PPOTrainer, RunStoppedError, Scores
from fastppo.value_function import BranchValue, SharedValue


@pytest.fixture(autouse=True)
def _no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastppo.trainer.write_report", lambda run_dir: None)


def _perturb(trainer: PPOTrainer, scale: float = 0.05) -> None:
    """Moves the policy away from its rollout and its reference."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.model.causal_lm.parameters():
            parameter.add_(scale * torch.randn_like(parameter) * parameter.std())


def _records(trainer: PPOTrainer) -> list[dict[str, Any]]:
    return read_jsonl(Path(trainer.config.output_dir) / "metrics.jsonl")


def _sequences(trainer: PPOTrainer, lengths: tuple[int, ...] = (5, 3, 1)) -> Sequences:
    generator = torch.Generator().manual_seed(3)
    prompts = [[4, 5, 6]] * len(lengths)
    responses = [torch.randint(3, 40, (n,), generator=generator).tolist() for n in lengths]
    return Sequences.pack(prompts, responses, trainer.pad_token_id)


# ------------------------------------------------------------------------------------- objective


def test_the_penalty_objective_is_the_papers(tmp_path: Path) -> None:
    """Schulman et al. 2017, eq. 8: −r·A + β·KL(old, new), by its estimator r − 1 − log r."""
    trainer = make_trainer(tmp_path, objective="penalty", policy_kl_coef=0.7, kl_coef=0.0)
    experience = first_experience(trainer)
    experience.weights = torch.full_like(experience.advantages, 1 / len(experience.advantages))
    _perturb(trainer, 0.3)
    hidden = trainer.model(experience.sequences)[0].detach().requires_grad_()
    loss = trainer._policy_loss(hidden, experience).loss
    (found,) = torch.autograd.grad(loss, hidden)

    logits = hidden @ trainer.model.head.weight.T
    logprobs = logits.log_softmax(-1).gather(1, experience.sequences.response_tokens[:, None])[:, 0]
    log_ratio = logprobs - experience.logprobs
    ratio = log_ratio.exp()
    assert (ratio - 1).abs().max() > 0.3, "the clip of the other objective would act"
    written = -ratio * experience.advantages + 0.7 * (ratio - 1 - log_ratio)
    (wanted,) = torch.autograd.grad((written * experience.weights).sum(), hidden)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("rate", "factor"), [(3e-2, 2.0), (1e-7, 0.5)])
def test_the_penaltys_coefficient_doubles_or_halves(
    rate: float, factor: float, tmp_path: Path
) -> None:
    trainer = make_trainer(
        tmp_path, objective="penalty", policy_kl_coef=0.3, learning_rate=rate, iterations=1
    )
    metrics = trainer.train()
    assert metrics["policy_kl_coef"] == 0.3
    assert trainer.state.policy_kl_coef == pytest.approx(0.3 * factor)


# --------------------------------------------------------------------------- KL to the reference


def test_the_exact_kl_in_the_reward(tmp_path: Path) -> None:
    """The return of the first token is the score less β times the summed exact KL."""
    trainer = make_trainer(
        tmp_path, kl_estimator="full", kl_coef=0.4, lam=1.0, whiten_advantages="none"
    )
    _perturb(trainer)
    sequences = _sequences(trainer)
    scores = torch.tensor([1.0, -2.0, 0.5])
    experience, _ = trainer.appraise(sequences, scores, ["stop"] * 3)
    with torch.no_grad(), trainer.reference() as reference:
        positions = sequences.predicting_positions
        p = (trainer.model.hidden(sequences, positions) @ trainer.model.head.weight.T).log_softmax(
            1
        )
        q = (reference.hidden(sequences, positions) @ reference.head.weight.T).log_softmax(1)
    kl = (p.exp() * (p - q)).sum(1)
    assert kl.min() > 0
    wanted = scores - 0.4 * torch.stack([part.sum() for part in kl.split([5, 3, 1])])
    first = sequences.cu_seqlens[:-1]
    torch.testing.assert_close(experience.returns[first], wanted, rtol=1e-4, atol=1e-5)


def test_a_kl_in_reward_and_loss_at_once(tmp_path: Path) -> None:
    metrics = make_trainer(tmp_path, kl_coef=0.1, kl_loss_coef=0.1).train()
    assert {"kl", "kl_coef", "kl_loss"} <= metrics.keys()


def test_the_adaptive_coefficient_follows_its_formula_in_a_run(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        kl_controller="adaptive",
        kl_coef=0.1,
        kl_target=0.01,
        kl_horizon=100,
        iterations=3,
    )
    trainer.train()
    expected = 0.1
    for record in _records(trainer):
        assert record["kl_coef"] == pytest.approx(expected, rel=1e-9)
        expected *= 1 + min(max(record["kl"] / 0.01 - 1, -0.2), 0.2) * 16 / 100
    assert expected != 0.1


# ------------------------------------------------------------------------------------ early stop


def test_early_stop_before_a_minibatch_leaves_the_step_out(tmp_path: Path) -> None:
    """The first minibatch is on-policy (KL 0) and is taken; the second finds the policy moved."""
    trainer = make_trainer(
        tmp_path, early_stop_kl=1e-4, early_stop_check="minibatch", learning_rate=3e-2, iterations=1
    )
    metrics = trainer.train()
    assert metrics["early_stopped"] == 1
    assert trainer.state.optimizer_step == 1


def test_early_stop_after_an_epoch_ends_the_update_there(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, early_stop_kl=1e-4, learning_rate=3e-2, iterations=1, ppo_epochs=4
    )
    assert trainer.train()["early_stopped"] == 1
    assert trainer.state.optimizer_step == 2  # the minibatches of one epoch


def test_a_policy_that_stays_near_is_not_stopped(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, early_stop_kl=1.0, learning_rate=1e-6, iterations=1)
    metrics = trainer.train()
    assert metrics["early_stopped"] == 0
    assert metrics["optimizer_steps"] == 4


def test_an_early_stop_does_not_delay_the_learning_rate(tmp_path: Path) -> None:
    """The schedule is a function of the iteration; steps that were not taken count as passed."""
    stopped = make_trainer(
        tmp_path / "a", early_stop_kl=1e-9, learning_rate=1e-3, lr_schedule="linear", iterations=3
    )
    whole = make_trainer(tmp_path / "b", learning_rate=1e-3, lr_schedule="linear", iterations=3)
    for trainer in (stopped, whole):
        trainer.train()
    last = stopped.optimizer.param_groups[0]["lr"]
    assert last == pytest.approx(1e-3 * (1 - 9 / 12))  # second of the last iteration's four steps
    assert whole.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * (1 - 11 / 12))


# ------------------------------------------------------------------------------------- reference


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_after_a_refresh_the_kl_is_zero(lora_rank: int, tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, lora_rank=lora_rank, reference_refresh=2, iterations=4, learning_rate=1e-2
    )
    trainer.train()
    kl = [abs(record["kl"]) for record in _records(trainer)]
    assert kl[0] < 1e-4
    assert kl[1] > 1e-3
    assert kl[2] < 1e-4
    assert kl[3] > 1e-3


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_refreshed_reference_survives_a_resume(lora_rank: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "lora_rank": lora_rank,
        "reference_refresh": 2,
        "learning_rate": 1e-2,
        "checkpoint_interval": 3,
        "kl_coef": 0.5,
    }
    whole = make_trainer(tmp_path / "whole", iterations=5, **options)
    whole.train()
    make_trainer(tmp_path / "cut", iterations=3, **options).train()
    resumed = make_trainer(tmp_path / "cut", iterations=5, resume=True, **options)
    resumed.train()
    for old, new in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_the_rollout_policy_as_the_reference_of_the_loss(tmp_path: Path) -> None:
    """No second model; the loss is that of a KL to the rollout's own logprobs."""
    trainer = make_trainer(
        tmp_path, reference_policy="rollout", kl_coef=0.0, kl_loss_coef=0.5, kl_loss_estimator="k3"
    )
    assert trainer._reference is None
    experience = first_experience(trainer)
    assert torch.equal(experience.ref_logprobs, experience.logprobs)
    experience.weights = torch.full_like(experience.advantages, 1 / len(experience.advantages))
    experience.advantages.zero_()
    _perturb(trainer)
    loss = trainer._policy_loss(trainer.model(experience.sequences)[0], experience).loss
    d = trainer.model.response_logprobs(experience.sequences) - experience.logprobs
    torch.testing.assert_close(loss, 0.5 * ((-d).exp() - 1 + d).mean(), rtol=1e-4, atol=1e-6)
    assert trainer.train()["kl"] == 0


def test_a_reference_that_waits_on_the_cpu_is_the_same_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_trainer(tmp_path / "a", kl_loss_coef=0.1, kl_loss_estimator="full")
    offloaded = make_trainer(
        tmp_path / "b", kl_loss_coef=0.1, kl_loss_estimator="full", reference_offload=True
    )
    moves: list[str] = []
    frozen = offloaded._reference._frozen
    monkeypatch.setattr(frozen, "to", lambda device: moves.append(str(device)))
    monkeypatch.setattr(offloaded._reference.policy.__class__, "device", torch.device("meta"))
    with offloaded.reference():
        assert moves == ["meta"]
    assert moves == ["meta", "cpu"]
    monkeypatch.undo()
    plain.train()
    offloaded.train()
    for one, other in zip(plain.model.parameters(), offloaded.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_reference_by_name(tmp_path: Path) -> None:
    other = tiny.saved_model(tmp_path / "other", "qwen2")
    trainer = make_trainer(tmp_path, reference_model=other)
    assert trainer.train()["kl"] != 0
    with trainer.reference() as reference:
        assert reference.config.model_type == "qwen2"


# ------------------------------------------------------------------------------------ advantages


def _appraised(tmp_path: Path, kind: str, **options) -> tuple[Experience, list[Any], list[float]]:
    """(experience, values by sequence, scores) with values that differ by token and no KL."""
    options = {"kl_coef": 0.0, "whiten_advantages": "none", **options}
    trainer = make_trainer(tmp_path, advantage=kind, **options)
    torch.manual_seed(0)
    torch.nn.init.normal_(trainer.model.value_function.head.weight)
    sequences = _sequences(trainer)
    scores = [1.0, -2.0, 0.5]
    experience, _ = trainer.appraise(sequences, torch.tensor(scores), ["stop"] * 3)
    return experience, list(experience.values.split([5, 3, 1])), scores


def test_sequence_advantages_are_reward_less_value_of_the_prompt(tmp_path: Path) -> None:
    experience, values, scores = _appraised(tmp_path, "sequence")
    wanted = [(r - v[0]).expand(len(v)) for r, v in zip(scores, values, strict=True)]
    torch.testing.assert_close(experience.advantages, torch.cat(wanted))


def test_monte_carlo_advantages_are_reward_to_go_less_value(tmp_path: Path) -> None:
    experience, values, scores = _appraised(tmp_path, "monte_carlo", gamma=0.9)
    wanted = [
        r * 0.9 ** torch.arange(len(v) - 1, -1, -1) - v for r, v in zip(scores, values, strict=True)
    ]
    torch.testing.assert_close(experience.advantages, torch.cat(wanted))


def test_one_step_advantages_bootstrap_from_the_next_value(tmp_path: Path) -> None:
    experience, values, scores = _appraised(tmp_path, "one_step", gamma=0.9)
    wanted = [
        torch.cat([0.9 * v[1:], torch.tensor([r])]) - v for r, v in zip(scores, values, strict=True)
    ]
    torch.testing.assert_close(experience.advantages, torch.cat(wanted))


@pytest.mark.parametrize("kind", ["gae", "sequence"])
def test_whitening_on_off_and_variance_only(kind: str, tmp_path: Path) -> None:
    raw, full, variance = (
        _appraised(tmp_path, kind, whiten_advantages=how)[0].advantages
        for how in ("none", "full", "variance")
    )
    assert raw.mean().abs() > 0.01
    torch.testing.assert_close(full, (raw - raw.mean()) / raw.std())
    torch.testing.assert_close(variance, raw / raw.std())


# ---------------------------------------------------------------------------------------- values


def _value_gradients(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    """Gradients of the value loss alone."""
    sequences = _sequences(trainer)
    torch.nn.init.ones_(trainer.model.value_function.head.weight)
    trainer.model.zero_grad()
    _, values = trainer.model(sequences)
    values.square().sum().backward()
    return {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}


def test_a_shared_head_trains_the_trunk_and_a_detached_one_does_not(tmp_path: Path) -> None:
    shared = _value_gradients(make_trainer(tmp_path, value_model="shared"))
    assert any(name.startswith("causal_lm.") for name in shared)
    detached = _value_gradients(make_trainer(tmp_path, value_model="detached"))
    assert detached.keys() == {"value_function.head.weight", "value_function.head.bias"}


@pytest.mark.parametrize("architecture", tiny.TRAINED)
def test_a_branch_starts_as_the_trunks_last_layers_and_trains_its_own(
    architecture: str, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, architecture, value_model="branch", value_branch_layers=1)
    assert isinstance(trainer.model.value_function, BranchValue)
    sequences = _sequences(trainer)
    hidden = trainer.model(sequences)[0]
    torch.nn.init.ones_(trainer.model.value_function.head.weight)
    values = trainer.model(sequences)[1]
    torch.testing.assert_close(values, hidden.sum(1), rtol=1e-4, atol=1e-4)
    gradients = _value_gradients(trainer)
    branch = [n for n in gradients if n.startswith("value_function.layers.0.")]
    own, below = ([n for n in gradients if f"layers.{i}." in n or f".h.{i}." in n] for i in (1, 0))
    assert branch
    assert not [n for n in own if n.startswith("causal_lm")], "the policy's last layer is its own"
    assert [n for n in below if n.startswith("causal_lm")], "what lies below is shared"


def test_a_branch_is_right_with_gradient_checkpointing(tmp_path: Path) -> None:
    plain, saving = (
        make_trainer(tmp_path, value_model="branch", gradient_checkpointing=how)
        for how in (False, True)
    )
    one, other = _value_gradients(plain), _value_gradients(saving)
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-7)


def test_a_branch_longer_than_the_trunk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"value_branch_layers must be in \[1, 2\], got 3"):
        make_trainer(tmp_path, value_model="branch", value_branch_layers=3)


def test_a_critic_has_a_trunk_of_its_own(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, value_model="critic")
    gradients = _value_gradients(trainer)
    assert gradients
    assert all(name.startswith("value_function.") for name in gradients)
    ours, theirs = trainer.model.causal_lm.base_model, trainer.model.value_function.trunk
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, its)
        assert mine.data_ptr() != its.data_ptr()
    metrics = trainer.train()
    assert metrics["value_grad_norm"] > 0


def _reward_model(directory: Path, **tokenizer_options) -> str:
    torch.manual_seed(7)
    config = AutoConfig.for_model(**tiny.CONFIGS["llama"]().to_dict() | {"num_labels": 1})
    model = AutoModelForSequenceClassification.from_config(config)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(directory)
    tiny.tokenizer(**tokenizer_options).save_pretrained(directory)
    return str(directory)


def test_a_critic_may_start_as_the_reward_model(tmp_path: Path) -> None:
    """Its value of the state before the last token is the reward model's score of that text."""
    name = _reward_model(tmp_path / "rm")
    model = AutoModelForSequenceClassification.from_pretrained(name).eval()
    model.config.score_mean = 0.7  # what FastPPO's reward models subtract
    model.save_pretrained(name)
    trainer = make_trainer(tmp_path, value_model="critic", critic_model=name)
    sequences = _sequences(trainer, (5,))
    with torch.no_grad():
        _, values = trainer.model(sequences)
        score = model(input_ids=sequences.input_ids[:, :-1]).logits[0, 0] - 0.7
    torch.testing.assert_close(values[-1], score)


def test_a_critic_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    name = _reward_model(tmp_path / "rm")
    other = tiny.tokenizer()
    other.add_tokens(["new"])
    other.save_pretrained(name)
    with pytest.raises(ValueError, match="another vocabulary"):
        make_trainer(tmp_path, value_model="critic", critic_model=name)


@pytest.mark.parametrize("value_model", ["shared", "detached", "branch", "critic"])
def test_warm_up_trains_the_values_and_leaves_the_policy(value_model: str, tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, value_model=value_model, value_warmup_iterations=2, iterations=2, weight_decay=0.1
    )
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    changed = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed
    assert all(name.startswith("value_function.") for name in changed)
    trainer.config.iterations = 3
    trainer.config.resume = True
    trainer.train()
    after = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert any(name.startswith("causal_lm.") for name in after)


@pytest.mark.parametrize("value_model", ["shared", "detached", "branch", "critic"])
def test_each_value_function_learns(value_model: str, tmp_path: Path) -> None:
    """On fixed responses the value loss falls well below that of no opinion."""
    trainer = make_trainer(
        tmp_path, value_model=value_model, value_warmup_iterations=99, kl_coef=0.0
    )
    trainer.config.value_learning_rate = None
    for group in trainer.optimizer.param_groups:
        group["peak_lr"] = 1e-2
    sequences = _sequences(trainer, (4, 4, 4, 4))
    scores = torch.tensor([1.0, -1.0, 2.0, 0.0])
    losses = []
    for _ in range(12):
        experience, _ = trainer.appraise(sequences, scores, ["stop"] * 4)
        losses.append(trainer.update(experience)["value_loss"])
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("value_model", ["branch", "critic"])
def test_a_value_function_of_its_own_is_saved_and_resumed(value_model: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"value_model": value_model, "checkpoint_interval": 1}
    whole = make_trainer(tmp_path / "whole", iterations=3, **options)
    whole.train()
    make_trainer(tmp_path / "cut", iterations=2, **options).train()
    resumed = make_trainer(tmp_path / "cut", iterations=3, resume=True, **options)
    resumed.train()
    for old, new in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(old, new)
    fresh = make_trainer(tmp_path / "fresh", **options)
    fresh.model.load_value_function(tmp_path / "cut" / "run" / "value_function.safetensors")
    saved = fresh.model.value_function.state_dict()
    for name, value in resumed.model.value_function.state_dict().items():
        assert torch.equal(saved[name], value)


def test_the_value_function_is_no_part_of_the_saved_policy(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    make_trainer(tmp_path, value_model="branch").train()
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "policy")
    assert policy.state_dict().keys() == tiny.model().state_dict().keys()


# ---------------------------------------------------------------------------- PPO-ptx, schedules


def _text(path: Path) -> str:
    lines = [f'{{"text": "{" ".join(["w1", "w2", "w3", "w4"] * 6)}"}}\n'] * 8
    path.write_text("".join(lines))
    return str(path)


def test_ptx_adds_its_gradient_in_the_same_step(tmp_path: Path) -> None:
    data = _text(tmp_path / "text.jsonl")
    gradients = {}
    for coef in (0.0, 2.5):
        more = {"ptx_coef": coef, "ptx_data": data, "ptx_block_size": 12} if coef else {}
        trainer = make_trainer(tmp_path, max_grad_norm=1e9, ppo_epochs=1, minibatches=1, **more)
        torch.manual_seed(0)
        trainer.update(first_experience(trainer))
        gradients[coef] = {n: p.grad.clone() for n, p in trainer.model.causal_lm.named_parameters()}
    fresh = tiny.model().eval()
    blocks = trainer.pretraining.at(0, trainer.config.ptx_batch_size, trainer.config.seed)
    fresh(input_ids=blocks, labels=blocks).loss.backward()
    for name, parameter in fresh.named_parameters():
        wanted = gradients[0.0][name] + 2.5 * parameter.grad
        torch.testing.assert_close(gradients[2.5][name], wanted, rtol=1e-3, atol=1e-5)


def test_ptx_lowers_the_held_out_language_model_loss(tmp_path: Path) -> None:
    data = _text(tmp_path / "text.jsonl")
    held_out = torch.tensor([[4, 5, 6, 7] * 5])
    losses = []
    for more in ({}, {"ptx_coef": 1.0, "ptx_data": data, "ptx_block_size": 12}):
        trainer = make_trainer(tmp_path / str(len(more)), iterations=4, learning_rate=3e-3, **more)
        metrics = trainer.train()
        assert ("ptx_loss" in metrics) == bool(more)
        with torch.no_grad():
            losses.append(trainer.model.language_model_loss(held_out).item())
    assert losses[1] < losses[0] - 1.0


def test_ptx_visits_its_text_in_order_across_a_resume(tmp_path: Path) -> None:
    data = _text(tmp_path / "text.jsonl")
    options: dict[str, Any] = {"ptx_coef": 1.0, "ptx_data": data, "ptx_block_size": 12}
    options |= {"ptx_batch_size": 3, "checkpoint_interval": 1}
    whole = make_trainer(tmp_path / "whole", iterations=3, **options)
    whole.train()
    make_trainer(tmp_path / "cut", iterations=2, **options).train()
    resumed = make_trainer(tmp_path / "cut", iterations=3, resume=True, **options)
    resumed.train()
    for old, new in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_an_entropy_bonus_keeps_the_policy_wider(tmp_path: Path) -> None:
    entropy = {}
    for coef in (0.0, 0.3):
        trainer = make_trainer(
            tmp_path / str(coef), entropy_coef=coef, iterations=12, learning_rate=1e-2, kl_coef=0.0
        )
        entropy[coef] = trainer.train()["entropy"]
    assert entropy[0.3] > entropy[0.0] + 0.05


def test_schedules_in_closed_form() -> None:
    linear, cosine = Schedule("vf_coef", "linear", 0.1), Schedule("vf_coef", "cosine", 0.1)
    assert [linear.value(0.5, x) for x in (0, 0.25, 1)] == pytest.approx([0.5, 0.4, 0.1])
    half = 0.1 + 0.4 * 0.5 * (1 + math.cos(math.pi / 4))
    assert [cosine.value(0.5, x) for x in (0, 0.25, 0.5, 1)] == pytest.approx([0.5, half, 0.3, 0.1])
    assert Schedule("vf_coef", "constant", 0.1).value(0.5, 0.7) == 0.5


def test_a_schedule_moves_its_coefficient_over_the_run(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        iterations=3,
        entropy_coef=0.3,
        kl_coef=0.2,
        schedules=["entropy_coef=linear:0", "kl_coef=cosine:0.1", "clip_ratio = linear : 0.1"],
    )
    seen: list[tuple[float, float]] = []
    original = trainer._policy_loss

    def spied(hidden, micro):
        seen.append((trainer.now.entropy_coef, trainer.now.clip_ratio))
        return original(hidden, micro)

    trainer._policy_loss = spied
    trainer.train()
    entropy, clip = (sorted({pair[i] for pair in seen}) for i in (0, 1))
    assert entropy == pytest.approx([0.0, 0.15, 0.3])
    assert clip == pytest.approx([0.1, 0.15, 0.2])
    assert all(b == pytest.approx(0.1 + a / 3) for a, b in seen), "they move together"
    assert [r["kl_coef"] for r in _records(trainer)] == pytest.approx([0.2, 0.15, 0.1])
    recorded = [r["schedule/entropy_coef"] for r in _records(trainer)]
    assert recorded == pytest.approx([0.3, 0.15, 0.0])


# --------------------------------------------------------------------------- what does not combine


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"objective": "penalty", "kl_loss_coef": 0.1}, "kl_loss_coef must be 0"),
        ({"objective": "penalty", "ppo_epochs": 1, "minibatches": 1}, "minibatches must be > 1"),
        ({"early_stop_kl": 0.1, "ppo_epochs": 1, "minibatches": 1}, "minibatches must be > 1"),
        ({"objective": "penalty", "clip_ratio": 0.1}, "clip_ratio has an effect only with"),
        (
            {"objective": "penalty", "schedules": ["clip_ratio=linear:0.1"]},
            "clip_ratio has an effect only with objective=clip",
        ),
        ({"policy_kl_target": 0.1}, "effect only with objective=penalty"),
        ({"early_stop_check": "minibatch"}, "effect only with early_stop_kl"),
        ({"value_branch_layers": 1}, "effect only with value_model=branch"),
        ({"length_penalty_free": 1}, "effect only with length_penalty > 0"),
        ({"reward_ensemble_std_coef": 2.0}, "effect only with reward_ensemble_by=lcb"),
        ({"kl_estimator": "k3", "kl_coef": 0}, "effect only with kl_coef > 0"),
        ({"kl_loss_estimator": "k2"}, "effect only with kl_loss_coef > 0"),
        ({"kl_target": 2.0}, "effect only with a kl_controller that moves"),
        ({"lam": 0.9, "advantage": "one_step"}, "effect only with advantage=gae"),
        ({"lora_alpha": 16.0}, "effect only with lora_rank > 0"),
        ({"ptx_block_size": 16}, "effect only with ptx_data"),
        ({"reference_refresh": 1}, "kl_coef must be 0"),
        ({"reference_offload": True, "lora_rank": 4}, "nothing to keep on the CPU"),
        ({"value_warmup_iterations": 2, "vf_coef": 0}, "vf_coef must be > 0"),
        ({"dual_clip": 3.0, "schedules": ["dual_clip=linear:0.5"]}, "dual_clip must be > 1"),
        ({"schedules": ["clip_ratio=linear:-0.5"]}, r"clip_ratio must be in \[0, 1\], got -0.5"),
        ({"clip_ratio": 2}, r"clip_ratio must be in \[0, 1\], got 2"),
        ({"clip_ratio_high": -1}, "clip_ratio_high must be >= 0, got -1"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\], got 0"),
        ({"objective": "penalty", "dual_clip": 3.0}, "dual_clip must be none"),
        ({"reference_policy": "rollout"}, "kl_coef must be 0"),
        (
            {"reference_policy": "rollout", "kl_coef": 0, "kl_loss_estimator": "full"},
            "kl_loss_estimator must be k1, k2 or k3",
        ),
        (
            {"reference_policy": "rollout", "kl_coef": 0, "reference_refresh": 3},
            "reference_policy=rollout holds no model",
        ),
        ({"reference_model": "x", "reference_refresh": 3}, "give one of them"),
        ({"reference_offload": True, "kl_coef": 0}, "need a reference"),
        ({"critic_model": "x"}, "critic_model needs value_model=critic"),
        ({"advantage": "sequence", "bootstrap_truncated": True}, "complete returns"),
        ({"ptx_coef": 1.0}, "ptx_coef > 0 needs ptx_data"),
        ({"ptx_data": "x"}, "want both or neither"),
        ({"reward_ensemble": ["rm"]}, "at least two"),
        (
            {"schedules": ["kl_coef=linear:0"], "kl_controller": "adaptive"},
            "want one of them",
        ),
        ({"schedules": ["kl_coef=linear:0", "kl_coef=linear:1"]}, "one name twice"),
        ({"schedules": ["kl_coef=quadratic:0"]}, "must be one of constant, linear, cosine"),
        ({"schedules": ["gamma=linear:0"]}, "the name must be one of"),
        ({"schedules": ["kl_coef=linear:-1"]}, "kl_coef must be >= 0, got -1.0"),
        ({"schedules": ["dual_clip=linear:2"]}, "dual_clip has no value to start from"),
        ({"schedules": ["kl_coef"]}, "want name=linear:final"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        PPOConfig(**options)


def test_the_default_value_function_is_a_head_on_the_shared_trunk(tmp_path: Path) -> None:
    assert type(make_trainer(tmp_path).model.value_function) is SharedValue


@pytest.mark.parametrize("value_model", ["branch", "critic"])
def test_with_lora_a_value_function_of_its_own_trains_adapters_of_its_own(
    value_model: str, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, lora_rank=2, value_model=value_model)
    trained = [n for n, p in trainer.model.named_parameters() if p.requires_grad]
    own = [n for n in trained if n.startswith("value_function.") and ".head." not in n]
    assert own
    assert all("lora" in name for name in own)
    assert trainer.train()["value_loss"] > 0


# --------------------------------------------------------------------------------------- rewards


def _scores(trainer: PPOTrainer, responses: list[list[int]], reasons: list[str] | None = None):
    prompts = trainer.prompts.select(range(len(responses)))
    rollout = Rollout(responses, reasons or ["stop"] * len(responses), [])
    return trainer.score(prompts, rollout), rollout


def test_length_costs_and_normalised_scores_in_closed_form(tmp_path: Path) -> None:
    responses = [[10, 10, 10, 1], [10, 1]]  # three w7 and one, each with its EOS
    plain, _ = _scores(make_trainer(tmp_path), responses)
    assert plain.total.tolist() == [3 / 8, 1 / 8]
    charged, _ = _scores(
        make_trainer(tmp_path, length_penalty=0.5, length_penalty_free=3), responses
    )
    assert charged.total.tolist() == [3 / 8 - 0.5, 1 / 8]
    normal, _ = _scores(make_trainer(tmp_path, length_normalized_score=True), responses)
    assert normal.total.tolist() == [3 / 32, 1 / 16]


def test_a_length_penalty_shortens(tmp_path: Path) -> None:
    lengths = {}
    for coef in (0.0, 0.3):
        trainer = make_trainer(
            tmp_path / str(coef),
            length_penalty=coef,
            iterations=15,
            learning_rate=3e-3,
            kl_coef=0.0,
            max_new_tokens=16,
            rollout_batch_size=32,
        )
        lengths[coef] = trainer.train()["response_length"]
    assert lengths[0.3] < 0.7 * lengths[0.0]


def test_running_scaling_divides_by_the_deviation_of_the_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, score_normalization="running", score_clip=1.2)
    first, second = torch.tensor([1.0, 3.0, 5.0]), torch.tensor([100.0, 0.0])
    found, _ = trainer.training_rewards(Scores(first, {}, {}), [1, 1, 1])
    torch.testing.assert_close(found, (first / first.std(correction=0)).clamp(-1.2, 1.2))
    found, _ = trainer.training_rewards(Scores(second, {}, {}), [1, 1])
    both = torch.cat([first, second]).std(correction=0)
    torch.testing.assert_close(found, (second / both).clamp(-1.2, 1.2))


def test_running_scaling_survives_a_resume(tmp_path: Path) -> None:
    options: dict[str, Any] = {"score_normalization": "running", "checkpoint_interval": 1}
    whole = make_trainer(tmp_path / "whole", iterations=3, **options)
    whole.train()
    make_trainer(tmp_path / "cut", iterations=2, **options).train()
    resumed = make_trainer(tmp_path / "cut", iterations=3, resume=True, **options)
    resumed.train()
    assert resumed.state.score_scale == whole.state.score_scale
    for old, new in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_batch_whitening_and_clipping(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, score_normalization="batch", score_clip=1.0)
    scores = torch.tensor([0.0, 1.0, 5.0])
    found, _ = trainer.training_rewards(Scores(scores, {}, {}), [1, 1, 1])
    torch.testing.assert_close(found, ((scores - 2.0) / scores.std()).clamp(-1, 1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"score_normalization": "running"},
        {"score_normalization": "batch"},
        {"score_clip": 0.3},
        {"length_normalized_score": True, "length_penalty": 0.1},
    ],
)
def test_parts_of_a_reward_add_up_to_its_total(options: dict[str, Any], tmp_path: Path) -> None:
    def parts(prompts, completions, completion_ids):
        return [[0.1 * i for i in range(len(ids))] for ids in completion_ids[:-1]] + [2.0]

    trainer = make_trainer(tmp_path, rewards=[parts], **options)
    scores, rollout = _scores(trainer, [[10, 11, 1], [12, 1], [5, 6, 7, 1]])
    whole, _ = trainer.training_rewards(scores._replace(token_rewards=None), rollout.lengths)
    trainer.score_scale = RunningScale()
    last, within = trainer.training_rewards(scores, rollout.lengths)
    paid = torch.stack([part.sum() for part in within.split(rollout.lengths)])
    torch.testing.assert_close(last + paid, whole)
    assert within[-4:].abs().max() == 0, "one number is paid at the end"


def test_a_step_is_paid_where_it_ends(tmp_path: Path) -> None:
    """Reward to go falls by a step's value at the token behind it."""

    def by_word(prompts, completions):
        return [[(len(text), 1.0), (4, 0.5)] for text in completions]

    trainer = make_trainer(
        tmp_path, rewards=[by_word], kl_coef=0.0, advantage="monte_carlo", whiten_advantages="none"
    )
    scores, rollout = _scores(trainer, [[4, 5, 6, 1]])  # " w1 w2 w3": w2 covers character 4
    assert scores.total.tolist() == [1.5]
    rewards, within = trainer.training_rewards(scores, rollout.lengths)
    prompt = trainer.prompts.token_ids[:1]
    sequences = Sequences.pack(prompt, rollout.tokens, trainer.pad_token_id)
    experience, _ = trainer.appraise(sequences, rewards, ["stop"], within)
    assert experience.returns.tolist() == [1.5, 1.5, 1.0, 0.0]


@pytest.mark.parametrize(("by", "wanted"), [("mean", 2.0), ("min", 1.0), ("lcb", 2.0 - 0.5)])
def test_an_ensemble_is_one_reward(by: str, wanted: float, tmp_path: Path) -> None:
    (tmp_path / "many.py").write_text(
        "def one(prompts, completions):\n    return [1.0] * len(prompts)\n"
        "def three(prompts, completions):\n    return [3.0] * len(prompts)\n"
    )
    trainer = make_trainer(
        tmp_path,
        rewards=[tiny.count_w7],
        reward_ensemble=[f"{tmp_path}/many.py:one", f"{tmp_path}/many.py:three"],
        reward_ensemble_by=by,
        reward_ensemble_weight=10.0,
        **({"reward_ensemble_std_coef": 0.5} if by == "lcb" else {}),
    )
    scores, _ = _scores(trainer, [[10, 1], [5, 1]])
    assert scores.total.tolist() == [1 / 8 + 10 * wanted, 10 * wanted]
    assert trainer.train()["ensemble_disagreement"] == 1.0


def test_evaluation_does_not_move_the_running_scale(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, score_normalization="running")
    trainer.evaluate(trainer.prompts.select(range(4)))
    assert trainer.score_scale == RunningScale()


# -------------------------------------------------------------------------------------- watching


def test_a_run_watches_its_health(tmp_path: Path) -> None:
    metrics = make_trainer(
        tmp_path, iterations=2, monitor_rewards=[tiny.count_w7], max_new_tokens=24
    ).train()
    watched = {"length_correlation", "distinct_1", "distinct_2", "unique_responses", "kl_slope"}
    watched |= {"correlation/count_w7", "loss_spikes", "skipped_steps", "eos_rate", "grad_norm"}
    watched |= {f"ratio_{side}_{sign}" for side in ("above", "below") for sign in ("positive",)}
    assert watched <= metrics.keys()
    assert metrics["correlation/count_w7"] == pytest.approx(1.0), "it is the trained reward itself"


def test_a_crossed_threshold_warns_in_the_terminal_and_in_the_records(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    trainer = make_trainer(
        tmp_path, warn_if=["entropy > 1", "kl > 1e6", "klx > 3"], console=console, iterations=3
    )
    trainer.train()
    records = _records(trainer)
    for record in records:
        assert any(sentence.startswith("entropy = 3.") for sentence in record["warnings"])
        assert not any("1e+06" in sentence for sentence in record["warnings"])
    assert "no metric 'klx'" in records[2]["warnings"][-1]
    assert "iteration 0: entropy = 3." in console.file.getvalue()


def test_a_hard_threshold_stops_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, stop_if=["entropy > 1"], iterations=5)
    with pytest.raises(RunStoppedError, match=r"after iteration 0: entropy = 3\.\d+ > 1"):
        trainer.train()
    run = tmp_path / "run"
    assert (run / "checkpoint-000001").is_dir()
    assert (run / "policy" / "config.json").is_file()
    assert _records(trainer)[0]["warnings"][0].startswith("stopped: entropy")
    resumed = make_trainer(tmp_path, resume=True, iterations=2)
    assert resumed.train()
    assert [record["iteration"] for record in _records(resumed)] == [0, 1]


def test_the_batch_of_a_skipped_step_is_saved(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, ppo_epochs=1, minibatches=1, max_skipped_steps=2)
    experience = first_experience(trainer)
    experience.advantages[0] = float("nan")
    metrics = trainer.update(experience)
    assert metrics["skipped_steps"] == 1
    tensors, record = load_batch(tmp_path / "run" / "skipped" / "step-000000.safetensors")
    assert record["non_finite"] == "loss"
    assert "causal_lm.lm_head.weight" in record["parameters"]
    assert tensors["advantages"].isnan().sum() == 1
    assert {"input_ids", "logprobs", "returns", "response_lengths"} <= tensors.keys()
    with pytest.raises(FloatingPointError, match="2 optimiser steps in a row"):
        trainer.update(experience)


def test_a_threshold_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stop_if must read like `kl > 20`.*got 'kl over 9'"):
        PPOConfig(stop_if=["kl over 9"])


def test_the_histories_survive_a_resume(tmp_path: Path) -> None:
    whole = make_trainer(tmp_path / "whole", iterations=4, checkpoint_interval=1)
    whole.train()
    make_trainer(tmp_path / "cut", iterations=2, checkpoint_interval=1).train()
    resumed = make_trainer(tmp_path / "cut", iterations=4, checkpoint_interval=1, resume=True)
    resumed.train()
    assert resumed.state == whole.state
    assert [r["kl_slope"] for r in _records(resumed)[1:]] == [
        r["kl_slope"] for r in _records(whole)[1:]
    ]


# ------------------------------------------------------------------------------- what must not mix


def test_the_exact_kl_wants_the_same_logit_transform(tmp_path: Path) -> None:
    other = tiny.saved_model(tmp_path / "other", "gemma2")
    with pytest.raises(ValueError, match=r"exact KL .* soft-cap"):
        make_trainer(tmp_path, reference_model=other, kl_estimator="full")
    make_trainer(tmp_path, reference_model=other)  # k1 reads each model's own logprobs


def test_a_reference_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    name = tiny.saved_model(tmp_path / "other")
    other = tiny.tokenizer()
    other.add_tokens(["new"])
    other.save_pretrained(name)
    with pytest.raises(ValueError, match=r"reference_model .* another vocabulary"):
        make_trainer(tmp_path, reference_model=name)


def test_a_reward_may_not_take_the_ensembles_name(tmp_path: Path) -> None:
    def ensemble(prompts, completions):
        return [0.0] * len(prompts)

    (tmp_path / "many.py").write_text("def one(prompts, completions):\n    return [1.0]\n")
    with pytest.raises(ValueError, match="a reward is called 'ensemble'"):
        make_trainer(tmp_path, rewards=[ensemble], reward_ensemble=[f"{tmp_path}/many.py:one"] * 2)


def test_a_critic_with_a_short_context_shortens_the_prompts(tmp_path: Path) -> None:
    short = tiny.model("gpt2")
    short.config.n_positions = 9
    short.transformer.wpe = torch.nn.Embedding(9, 32)
    short.save_pretrained(tmp_path / "short")
    tiny.tokenizer().save_pretrained(tmp_path / "short")
    options = {"value_model": "critic", "critic_model": str(tmp_path / "short")}
    with pytest.raises(ValueError, match="the prompt has 2 tokens; at most 1"):
        make_trainer(tmp_path, **options)
    make_trainer(tmp_path, max_new_tokens=7, iterations=1, **options).train()


@pytest.mark.parametrize("value_model", ["shared", "critic"])
def test_warm_up_leaves_the_coefficients_of_the_kl_alone(value_model: str, tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        value_model=value_model,
        value_warmup_iterations=2,
        iterations=2,
        objective="penalty",
        kl_controller="penalty",
    )
    trainer.train()
    assert trainer.state.kl_coef == trainer.config.kl_coef
    assert trainer.state.policy_kl_coef == trainer.config.policy_kl_coef


def test_the_penaltys_logged_losses_are_the_papers(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        objective="penalty",
        policy_kl_coef=50.0,
        vf_coef=0.0,
        learning_rate=1e-9,
        minibatches=1,
        whiten_advantages="none",
    )
    experience = first_experience(trainer)
    metrics = trainer.update(experience)
    mean = -experience.advantages.mean().item()  # on-policy, so the ratio is 1 and the KL 0
    assert metrics["policy_loss"] == pytest.approx(mean, abs=1e-4)
    assert metrics["loss"] == pytest.approx(mean, abs=1e-3)
    assert "clip_fraction" not in metrics


def test_a_run_that_breaks_leaves_its_record(tmp_path: Path) -> None:
    def reward(prompts, completions):
        return [1e30 * (i + 1) for i in range(len(prompts))]  # squares overflow in the value loss

    trainer = make_trainer(
        tmp_path, rewards=[reward], max_skipped_steps=2, whiten_advantages="none", kl_coef=0.0
    )
    with pytest.raises(FloatingPointError, match="2 optimiser steps in a row"):
        trainer.train()
    (record,) = _records(trainer)
    assert record["skipped_steps"] == 2
    assert record["warnings"][0].startswith("stopped: 2 optimiser steps")


def test_step_watches_too(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, prompts=None, stop_if=["unique_responses < 0.9"])
    with pytest.raises(RunStoppedError, match=r"unique_responses = 0\.5 < 0\.9"):
        trainer.step(["w1", "w2"], ["w3 <eos>", "w3 <eos>"], [1.0, 0.0])
