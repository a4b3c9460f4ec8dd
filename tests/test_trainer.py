"""The trainer runs on every architecture, on-policy at first, the same however a batch is split."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import tiny
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from fastppo.batch import Experience
from fastppo.config import PPOConfig
from fastppo.data import DataError
from fastppo.optimizer import schedule
from fastppo.rewards import RewardError
from fastppo.rollout import Rollout
from fastppo.run_log import read_jsonl
from fastppo.trainer import PPOTrainer


@pytest.fixture(autouse=True)
def _no_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots take longer than the runs here; one test looks at them, and test_report.py."""
    if "records" not in request.node.name:
        monkeypatch.setattr("fastppo.trainer.write_report", lambda run_dir: None)


def make_trainer(tmp_path: Path, architecture: str = "llama", **options) -> PPOTrainer:
    parts = {"rewards": [tiny.count_w7], "prompts": tiny.PROMPTS, "tokenizer": tiny.tokenizer()}
    for name in (*parts, "reference", "engine", "monitor_rewards", "console"):
        if name in options:
            parts[name] = options.pop(name)
    return PPOTrainer(
        PPOConfig(**tiny.options(tmp_path, **options)), model=tiny.model(architecture), **parts
    )


def first_experience(trainer: PPOTrainer) -> Experience:
    """One rollout, appraised, before any update."""
    from fastppo.batch import Sequences

    assert trainer.prompts is not None
    prompts = trainer.prompts.at(0, trainer.config.rollout_batch_size, 0)
    rollout = trainer.engine.generate(prompts.token_ids, trainer.sampling)
    scores = trainer.score(prompts, rollout)
    sequences = Sequences.pack(prompts.token_ids, rollout.tokens, trainer.pad_token_id)
    return trainer.appraise(sequences, scores.total, rollout.finish_reasons)[0]


@pytest.mark.parametrize("architecture", tiny.TRAINED)
def test_a_run_ends_with_a_policy_that_plain_transformers_generates_from(
    architecture: str, tmp_path: Path
) -> None:
    start = tiny.saved_model(tmp_path / "sft", architecture)
    config = PPOConfig(**tiny.options(tmp_path), model=start)
    # AutoTokenizer gives a Qwen2 model Qwen2's own tokenizer whatever is saved beside it, so the
    # word tokenizer of these tests is passed in and loaded by its class.
    trainer = PPOTrainer(
        config, tokenizer=tiny.tokenizer(), prompts=tiny.PROMPTS, rewards=[tiny.count_w7]
    )
    metrics = trainer.train()
    assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values())

    run = tmp_path / "run"
    policy = AutoModelForCausalLM.from_pretrained(run / "policy")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(run / "policy")
    assert (run / "policy" / "generation_config.json").exists()
    assert (run / "value_function.safetensors").exists()
    assert not any("value_head" in name for name in policy.state_dict())
    for name, parameter in policy.state_dict().items():
        assert torch.equal(parameter, trainer.model.causal_lm.state_dict()[name]), name
    moved = AutoModelForCausalLM.from_pretrained(start).state_dict()
    assert any(not torch.equal(p, moved[name]) for name, p in policy.state_dict().items())
    output = policy.generate(**tokenizer("w1 w2", return_tensors="pt"), max_new_tokens=4)
    assert output.shape[1] > 2


def test_a_run_directory_holds_its_records(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, monitor_rewards=[lambda prompts, completions: [0.5] * 16])
    trainer.train()
    run = tmp_path / "run"
    records = read_jsonl(run / "metrics.jsonl")
    assert [record["iteration"] for record in records] == [0, 1]
    for name in (
        *("reward", "kl", "entropy", "value_loss", "explained_variance", "clip_fraction"),
        *("ratio_mean", "response_length", "eos_rate", "learning_rate", "tokens_per_second"),
        *("policy_loss", "approx_kl", "grad_norm", "kl_coef", "monitor/<lambda>"),
    ):
        assert name in records[0], name
    samples = read_jsonl(run / "samples.jsonl")
    assert samples[0].keys() >= {"prompt", "completion", "reward", "rewards", "kl", "tokens"}
    assert samples[0]["rewards"].keys() == {"count_w7"}
    assert samples[0]["monitors"] == {"<lambda>": 0.5}
    assert list((run / "tensorboard").iterdir())
    assert "<svg" in (run / "report.html").read_text()
    assert "learning_rate: 0.001" in (run / "config.yaml").read_text()
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-000002"]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "opt"])
def test_the_first_update_is_on_policy(architecture: str, tmp_path: Path) -> None:
    """Property 2: before the first step ratio = 1, and KL to a fresh reference is 0."""
    trainer = make_trainer(tmp_path, architecture, temperature=0.7)
    experience = first_experience(trainer)
    assert experience.ref_logprobs is not None
    # The same weights and tokens through two copies: equal but for fp32 rounding.
    torch.testing.assert_close(experience.ref_logprobs, experience.logprobs, rtol=0, atol=1e-5)
    trainer.config.ppo_epochs = trainer.config.minibatches = 1
    metrics = trainer.update(experience)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["clip_fraction"] == 0
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-7)


def test_the_self_check_sees_a_reference_that_is_not_fresh(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    assert trainer.prompts is not None
    with torch.no_grad(), trainer.reference() as reference:
        reference.head.weight.mul_(1.5)
    with pytest.raises(RuntimeError, match="fresh reference's logprobs differ"):
        trainer.self_check(trainer.prompts)


def test_the_self_check_sees_a_sampler_of_another_policy(tmp_path: Path) -> None:
    class Stale:
        def __init__(self, engine) -> None:
            self.engine = engine

        def generate(self, prompt_ids, sampling) -> Rollout:
            rollout = self.engine.generate(prompt_ids, sampling)
            rollout.logprobs = [logprobs - 0.5 for logprobs in rollout.logprobs]
            return rollout

    trainer = make_trainer(tmp_path)
    trainer.engine = Stale(trainer.engine)
    with pytest.raises(RuntimeError, match=r"the sampler's logprobs differ .* by up to 0\.5 nats"):
        trainer.train()


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_the_split_into_microbatches_does_not_matter(aggregation: str, tmp_path: Path) -> None:
    """Property 1, through the trainer: gradients of trunk, policy head and value head."""
    gradients = []
    for size in (16, 5, 1):
        trainer = make_trainer(
            tmp_path,
            microbatch_size=size,
            minibatches=1,
            ppo_epochs=1,
            aggregation=aggregation,
            entropy_coef=0.02,
            max_grad_norm=1e9,
        )
        torch.manual_seed(5)
        experience = first_experience(trainer)
        trainer.update(experience)
        gradients.append({n: p.grad.clone() for n, p in trainer.model.named_parameters()})
    scale = max(gradient.abs().max().item() for gradient in gradients[0].values())
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            # fp32 sums in another order
            torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-6 * scale)
    assert gradients[0]["value_function.head.weight"].abs().max() > 0


@pytest.mark.parametrize(
    "options",
    [
        {"loss_path": "logits"},
        {"loss_path": "linear"},
        {"gradient_checkpointing": True},
        {"generate_batch_size": 3},
    ],
    ids=lambda options: "=".join(map(str, next(iter(options.items())))),
)
def test_options_of_speed_and_memory_do_not_change_the_update(options, tmp_path: Path) -> None:
    updated = []
    for chosen in ({}, options):
        trainer = make_trainer(tmp_path, "gemma2", **chosen, kl_loss_coef=0.1)
        torch.manual_seed(5)
        chosen_experience = first_experience(make_trainer(tmp_path, "gemma2"))
        torch.manual_seed(6)
        trainer.update(chosen_experience)
        updated.append([p.detach().clone() for p in trainer.model.parameters()])
    for one, other in zip(*updated, strict=True):
        # Adam divides by the gradient's own size, so rounding shows at the scale of a step, 1e-3
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


def test_the_exact_kl_in_the_loss_pulls_towards_the_reference(tmp_path: Path) -> None:
    """Both paths agree, and with advantages of 0 the KL falls."""
    results = []
    for path in ("linear", "logits"):
        trainer = make_trainer(
            tmp_path,
            kl_loss_coef=1.0,
            kl_loss_estimator="full",
            loss_path=path,
            reference=tiny.model(seed=1),
            ppo_epochs=8,
        )
        torch.manual_seed(5)
        experience = first_experience(trainer)
        experience.advantages.zero_()
        torch.manual_seed(6)
        trainer.config.ppo_epochs = 1
        first = trainer.update(experience)["kl_loss"]
        trainer.config.ppo_epochs = 8
        trainer.update(experience)
        trainer.config.ppo_epochs = 1
        last = trainer.update(experience)["kl_loss"]
        assert last < 0.8 * first
        results.append((first, last))
    assert results[0] == pytest.approx(results[1], rel=1e-3)


def test_only_positions_that_predict_response_tokens_reach_the_heads(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    experience = first_experience(trainer)
    rows = []
    trainer.model.value_function.head.register_forward_hook(
        lambda m, args, out: rows.append(len(args[0]))
    )
    trainer.config.ppo_epochs = 1
    trainer.update(experience)
    assert sum(rows) == int(experience.sequences.response_lengths.sum())


def test_lora_needs_no_second_model_and_trains_adapters_alone(tmp_path: Path) -> None:
    start = tiny.saved_model(tmp_path / "sft")
    config = PPOConfig(**tiny.options(tmp_path, lora_rank=4), model=start)
    trainer = PPOTrainer(config, prompts=tiny.PROMPTS, rewards=[tiny.count_w7])
    assert trainer._reference is not None
    with trainer.reference() as reference:
        assert reference is trainer.model
    metrics = trainer.train()
    assert metrics["kl"] != 0
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "policy")
    original = AutoModelForCausalLM.from_pretrained(start)
    assert policy.state_dict().keys() == original.state_dict().keys()
    changed = {
        name
        for name, p in policy.state_dict().items()
        if not torch.equal(p, original.state_dict()[name])
    }
    assert changed
    assert all("proj" in name for name in changed)


def test_step_learns_from_responses_of_ones_own(tmp_path: Path) -> None:
    """Responses with a score above the rest become likelier; texts and ids both work."""
    trainer = make_trainer(tmp_path, prompts=None, rewards=[], learning_rate=3e-3, kl_coef=0.0)
    prompts = ["w1 w2", "w3", "w4 w5 w6", "w8"] * 2
    responses = ["w7 w7 <eos>"] * 4 + ["w9 w9 <eos>"] * 4
    scores = [1.0] * 4 + [0.0] * 4

    def likelihood(response: str) -> float:
        from fastppo.batch import Sequences

        ids = [trainer._token_ids(prompt) for prompt in prompts[:4]]
        sequences = Sequences.pack(ids, [trainer._token_ids(response)] * 4, 0)
        return trainer.model.response_logprobs(sequences).sum().item()

    before = likelihood("w7 w7 <eos>") - likelihood("w9 w9 <eos>")
    for _ in range(5):
        metrics = trainer.step(prompts, responses, scores)
    assert likelihood("w7 w7 <eos>") - likelihood("w9 w9 <eos>") > before + 1
    assert metrics["reward"] == 0.5
    assert trainer.state.iteration == 5
    assert trainer.step([[4, 5]] * 4, [[6, 1]] * 4, torch.ones(4))["response_length"] == 2


@pytest.mark.parametrize(
    ("prompts", "responses", "scores", "says"),
    [
        (["w1"], ["w2"], [1.0, 2.0], r"scores must be \[1\], got \[2\]"),
        (["w1"], ["w2"], [float("nan")], "scores must be finite"),
        (["w1"], [""], [1.0], "response 0 is empty"),
        ([""], ["w1"], [1.0], "prompt 0 is empty"),
        (["w1", "w2"], ["w2"], [1.0, 1.0], "2 prompts and 1 responses"),
        ([], [], [], "got 0 prompts and 0 responses"),
        (["w1 " * 60], ["w2 " * 9], [1.0], "69 tokens; the model's context has 64"),
        ([[4]], [[999]], [1.0], r"has tokens outside \[0, 43\)"),
    ],
)
def test_step_refuses_what_does_not_fit(prompts, responses, scores, says, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, prompts=None, rewards=[])
    with pytest.raises(ValueError, match=says):
        trainer.step(prompts, responses, scores)


def test_a_missing_eos_costs_its_penalty(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, missing_eos_penalty=2.0)
    assert trainer.prompts is not None
    rollout = Rollout([[5, 1], [5, 6]], ["stop", "length"], [])
    scores = trainer.score(trainer.prompts.select([0, 1]), rollout)
    assert scores.total.tolist() == [0.0, -2.0]


def test_weighted_rewards_add_up(tmp_path: Path) -> None:
    config = PPOConfig(**tiny.options(tmp_path, rewards=["a:b", "c:d"], reward_weights=[8.0, -0.5]))
    trainer = PPOTrainer(
        config,
        model=tiny.model(),
        tokenizer=tiny.tokenizer(),
        prompts=tiny.PROMPTS,
        rewards=[tiny.count_w7, lambda prompts, completions: [1.0] * len(prompts)],
    )
    assert trainer.prompts is not None
    rollout = Rollout([[10, 10, 1], [5, 6]], ["stop", "length"], [])
    assert trainer.score(trainer.prompts.select([0, 1]), rollout).total.tolist() == [1.5, -0.5]


def test_a_truncated_response_is_bootstrapped_from_its_last_value(tmp_path: Path) -> None:
    """With λ = 0 and no reward the last token's return is V_next: the last value or 0."""
    returns = {}
    for bootstrap in (False, True):
        trainer = make_trainer(
            tmp_path, bootstrap_truncated=bootstrap, lam=0.0, kl_coef=0.0, stop_token_ids=[1]
        )
        torch.nn.init.constant_(trainer.model.value_function.head.bias, 3.0)
        sequences = first_experience(trainer).sequences
        scores = torch.zeros(len(sequences))
        experience, _ = trainer.appraise(sequences, scores, ["length"] * len(sequences))
        last = sequences.cu_seqlens[1:] - 1
        returns[bootstrap] = experience.returns[last]
        stopped, _ = trainer.appraise(sequences, scores, ["stop"] * len(sequences))
        assert stopped.returns[last].abs().max() == 0
    assert returns[False].abs().max() == 0
    torch.testing.assert_close(returns[True], torch.full_like(returns[True], 3.0))


def test_the_kl_coefficient_moves_as_its_controller_says(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, kl_controller="adaptive", kl_coef=0.1, kl_target=6.0, kl_horizon=160.0
    )
    trainer._finish_iteration({"kl": 60.0}, 16)
    assert trainer.state.kl_coef == pytest.approx(0.1 * (1 + 0.2 * 16 / 160))
    trainer = make_trainer(tmp_path, kl_controller="penalty", kl_coef=0.1, kl_target=6.0)
    trainer._finish_iteration({"kl": 60.0}, 16)
    assert trainer.state.kl_coef == 0.2


def test_no_reference_is_held_where_no_kl_is_asked_for(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, kl_coef=0.0)
    assert trainer._reference is None
    assert "kl" not in trainer.train()


def test_a_non_finite_gradient_skips_the_step_and_at_last_stops_the_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    experience = first_experience(trainer)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    experience.advantages[0] = float("nan")
    trainer.config.ppo_epochs = trainer.config.minibatches = 1
    trainer.update(experience)
    assert trainer.state.skipped_steps == 1
    for old, parameter in zip(before, trainer.model.parameters(), strict=True):
        assert torch.equal(old, parameter)
    trainer.config.ppo_epochs = 9
    with pytest.raises(FloatingPointError, match="5 optimiser steps in a row"):
        trainer.update(experience)


def test_bf16_autocast_runs_and_stays_near_fp32(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, precision="bf16")
    exact = make_trainer(tmp_path)
    torch.manual_seed(5)
    experience = first_experience(exact)
    logprobs, _, _ = trainer._evaluate(experience.sequences)
    # bf16 keeps 8 bits: logits near 10 are off by a few hundredths
    assert (logprobs - experience.logprobs).abs().mean() < 0.1
    assert (logprobs - experience.logprobs).abs().max() > 0
    assert trainer.train()["grad_norm"] > 0


def test_a_reward_that_fails_stops_the_run_and_saves_the_sample(tmp_path: Path) -> None:
    def fails(prompts, completions):
        return [float("nan")] * len(prompts)

    trainer = make_trainer(tmp_path, rewards=[fails])
    with pytest.raises(RewardError, match=r"returned nan .*failed_reward\.json"):
        trainer.train()
    saved = json.loads((tmp_path / "run" / "failed_reward.json").read_text())
    assert len(saved["completions"]) == 1
    assert make_trainer(tmp_path, iterations=1).train()  # the directory is not taken


def test_what_does_not_fit_is_refused_at_the_start(tmp_path: Path) -> None:
    large = tiny.tokenizer()
    large.add_tokens([f"new{i}" for i in range(50)])
    with pytest.raises(ValueError, match="vocabulary mismatch: the tokenizer has 93 tokens"):
        make_trainer(tmp_path, tokenizer=large)
    with pytest.raises(DataError, match="row 2: the prompt has 60 tokens; at most 56"):
        make_trainer(tmp_path, prompts=[{"prompt": "w1"}, {"prompt": "w1 " * 60}])
    with pytest.raises(ValueError, match="max_new_tokens=64 leaves no room"):
        make_trainer(tmp_path, max_new_tokens=64)
    with pytest.raises(ValueError, match="needs prompts and at least one reward"):
        make_trainer(tmp_path, prompts=None).train()
    with pytest.raises(ValueError, match="model must be a directory or hub name"):
        PPOTrainer(PPOConfig(**tiny.options(tmp_path)))


def test_evaluation_leaves_no_trace(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    assert trainer.prompts is not None
    state = torch.get_rng_state()
    found = trainer.evaluate(trainer.prompts)
    assert torch.equal(torch.get_rng_state(), state)
    assert found["kl"] == pytest.approx(0, abs=1e-4)
    assert len(found["completions"]) == len(tiny.PROMPTS)
    assert 0 < found["entropy"] < torch.log(torch.tensor(43.0))


@pytest.mark.parametrize(
    ("name", "step", "expected"),
    [
        ("constant", 0, 0.1),
        ("constant", 9, 1.0),
        ("constant", 90, 1.0),
        ("linear", 55, 0.5),
        ("cosine", 55, 0.5),
        ("cosine", 100, 0.0),
    ],
)
def test_the_learning_rate_is_a_function_of_the_step(name, step, expected) -> None:
    assert schedule(name, step, warmup=10, total=100) == pytest.approx(expected)


def test_a_warm_up_longer_than_the_run_is_told(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    make_trainer(tmp_path, iterations=1, warmup_steps=99, console=console).train()
    assert "warmup_steps=99: the run has" in console.file.getvalue()


def test_a_run_is_not_written_over(tmp_path: Path) -> None:
    make_trainer(tmp_path, iterations=1).train()
    with pytest.raises(ValueError, match=r"holds a run already: go on with `resume: true`"):
        make_trainer(tmp_path, iterations=1).train()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file"):
        make_trainer(tmp_path, output_dir=str(tmp_path / "file")).train()


def test_a_reference_that_is_passed_in_may_be_another_model(tmp_path: Path) -> None:
    assert make_trainer(tmp_path, reference=tiny.model(seed=1)).train()["kl"] > 0.01


def _calls(monkeypatch: pytest.MonkeyPatch, name: str) -> list[dict]:
    """Keywords of every call of a function that the trainer or the model imports."""
    from fastppo import model, trainer

    module = trainer if hasattr(trainer, name) else model
    seen: list[dict] = []
    function = getattr(module, name)

    def recorded(*args, **keywords):
        seen.append(keywords)
        return function(*args, **keywords)

    monkeypatch.setattr(module, name, recorded)
    return seen


@pytest.mark.parametrize(
    ("option", "value", "function", "keyword", "arrives"),
    [
        ("clip_ratio", 0.13, "linear_ppo_loss", "clip_ratio", (0.13, 0.13)),
        ("clip_ratio_high", 0.28, "linear_ppo_loss", "clip_ratio", (0.2, 0.28)),
        ("dual_clip", 3.0, "linear_ppo_loss", "dual_clip", 3.0),
        ("entropy_coef", 0.03, "linear_ppo_loss", "entropy_coef", 0.03),
        ("temperature", 0.8, "linear_ppo_loss", "temperature", 0.8),
        ("temperature", 0.8, "linear_token_logprobs", "temperature", 0.8),
        ("kl_loss_coef", 0.2, "linear_ppo_loss", "kl_coef", 0.2),
        ("kl_loss_estimator", "k2", "linear_ppo_loss", "kl_estimator", "k2"),
        ("loss_path", "logits", "ppo_loss", "inplace", True),
        ("value_clip", 0.4, "value_loss", "clip_ratio", 0.4),
        ("gamma", 0.9, "compute_advantages", "gamma", 0.9),
        ("lam", 0.7, "compute_advantages", "lam", 0.7),
        ("kl_coef", 0.3, "compute_advantages", "kl_coef", 0.3),
        ("kl_estimator", "k3", "compute_advantages", "kl_estimator", "k3"),
        ("whiten_advantages", "none", "compute_advantages", "whiten", False),
        ("whiten_advantages", "variance", "compute_advantages", "whiten", False),
        ("backend", "torch", "compute_advantages", "backend", "torch"),
    ],
)
def test_an_option_reaches_the_maths(
    option, value, function, keyword, arrives, tmp_path: Path, monkeypatch
) -> None:
    seen = _calls(monkeypatch, function)
    needs = {"kl_loss_coef": 0.1} if option == "kl_loss_estimator" else {}
    make_trainer(tmp_path, iterations=1, **{option: value}, **needs).train()
    assert seen
    assert all(keywords[keyword] == arrives for keywords in seen)


def _update_gradients(tmp_path: Path, **options) -> dict[str, torch.Tensor]:
    trainer = make_trainer(
        tmp_path, **{"minibatches": 1, "ppo_epochs": 1, "max_grad_norm": 1e9, **options}
    )
    torch.manual_seed(5)
    experience = first_experience(trainer)
    trainer.update(experience)
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


def test_the_value_coefficient_scales_the_value_heads_gradient(tmp_path: Path) -> None:
    one = _update_gradients(tmp_path, vf_coef=0.5)["value_function.head.weight"]
    four = _update_gradients(tmp_path, vf_coef=2.0)["value_function.head.weight"]
    torch.testing.assert_close(four, 4 * one)


def test_the_aggregation_decides_the_loss(tmp_path: Path) -> None:
    """Sums over tokens are the mean's times the number of tokens."""
    mean = _update_gradients(tmp_path, aggregation="token-mean", vf_coef=0.0)
    total = _update_gradients(tmp_path, aggregation="token-sum", vf_coef=0.0)
    name = "causal_lm.lm_head.weight"
    trainer = make_trainer(tmp_path)
    torch.manual_seed(5)
    tokens = int(first_experience(trainer).sequences.response_lengths.sum())
    scale = total[name].abs().max().item()
    torch.testing.assert_close(total[name], tokens * mean[name], rtol=1e-4, atol=1e-6 * scale)


def test_gradients_are_clipped_to_the_norm_and_the_decay_is_on_matrices(tmp_path: Path) -> None:
    clipped = _update_gradients(tmp_path, max_grad_norm=0.01)
    norm = torch.stack([gradient.norm() for gradient in clipped.values()]).norm()
    assert norm.item() == pytest.approx(0.01, rel=1e-3)
    options = {"weight_decay": 0.1, "learning_rate": 1e-4, "value_learning_rate": 0.0}
    trainer = make_trainer(tmp_path, **options, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-6)
    matrices, vectors, head = trainer.optimizer.param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert (matrices["lr"], vectors["lr"], head["lr"]) == (1e-4, 1e-4, 0.0)
    assert all(p.dim() >= 2 for p in matrices["params"])
    assert (matrices["betas"], matrices["eps"]) == ((0.8, 0.9), 1e-6)


def test_prompt_and_completion_join_to_the_text_that_was_written(tmp_path: Path) -> None:
    """What a reward model reads is prompt + completion, the space between them included."""
    trainer = make_trainer(tmp_path)
    assert trainer.prompts is not None
    rollout = Rollout([[5, 6, 1], [1]], ["stop", "stop"], [])
    two = trainer.prompts.select([0, 1])
    assert trainer.completions(two, rollout) == [" w2 w3", ""]
    assert two.prompts[0] + " w2 w3" == "w0 w1 w2 w3"


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_logged_kl_is_k1_whatever_the_reward_uses(estimator: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, kl_estimator=estimator, reference=tiny.model(seed=1))
    experience = first_experience(trainer)
    scores = torch.zeros(len(experience))
    _, metrics = trainer.appraise(experience.sequences, scores, ["stop"] * len(experience))
    assert experience.ref_logprobs is not None
    expected = (experience.logprobs - experience.ref_logprobs).sum() / len(experience)
    assert metrics["kl"] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("kl_controller", "adaptve", "kl_controller must be one of fixed, adaptive, penalty"),
        ("precision", "fp16", "precision must be one of"),
        ("max_new_tokens", 4.5, "max_new_tokens must be an integer, got 4.5"),
        ("iterations", "many", "iterations must be an integer, got 'many'"),
        ("learning_rate", float("nan"), "learning_rate must be a finite number"),
        ("whiten_advantages", "yes", "whiten_advantages must be one of full, variance, none"),
        ("rewards", "a.py:f", "rewards must be a list"),
        ("adam_beta1", 2.0, r"adam_beta1 must be in \[0, 1\]"),
        ("generate_batch_size", -1, "generate_batch_size must be >= 1"),
        ("score_clip", -1.0, "score_clip must be > 0"),
        ("max_grad_norm", None, "max_grad_norm must be a finite number, got None"),
    ],
)
def test_a_wrong_option_is_refused_before_any_work(option, value, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        PPOConfig(**{option: value})


def test_a_moving_kl_coefficient_must_start_above_zero() -> None:
    with pytest.raises(ValueError, match="multiplies kl_coef"):
        PPOConfig(kl_controller="adaptive", kl_coef=0.0)
