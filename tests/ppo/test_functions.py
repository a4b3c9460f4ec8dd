"""The user's functions in a run: `objective` and `advantage`."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import ROOT
from torch import Tensor

from fastppo.ppo.options.config import PPOConfig
from fastppo.run.log import read_jsonl
from fastppo.run.options import read_yaml
from runs import first_experience, first_prompts, make_trainer, weights_of

HEADER = "import torch\nfrom torch import Tensor\n\n\n"
CLIP = """def objective(logprobs, old_logprobs, advantages, mask):
    ratio = (logprobs - old_logprobs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
"""


def write(path: Path, text: str) -> str:
    path.write_text(HEADER + text, encoding="utf-8")
    return str(path)


def text_lengths(prompts: list[str], completions: list[str]) -> list[float]:
    return [len(completion) / 10 for completion in completions]


def metrics(folder: Path) -> list[dict[str, Any]]:
    return read_jsonl(folder / "run" / "metrics.jsonl")


def test_a_run_with_the_clip_as_a_function_is_the_built_in_run(tmp_path: Path) -> None:
    """From a file; metrics of three iterations agree to fp32 rounding."""
    runs = []
    for name in ("clip", f"{write(tmp_path / 'mine.py', CLIP)}:objective"):
        folder = tmp_path / name[-4:]
        options = {"objective": name, "iterations": 3, "kl_loss_coef": 0.1, "entropy_coef": 0.01}
        make_trainer(folder, **options).train()
        runs.append(metrics(folder))
    assert runs[0][-1]["clip_fraction"] > 0
    assert "ratio_above_positive" not in runs[1][-1]
    names = ("loss", "policy_loss", "grad_norm", "approx_kl", "clip_fraction", "entropy", "kl_loss")
    for built_in, own in zip(*runs, strict=True):
        assert {n: own[n] for n in names} == pytest.approx(
            {n: built_in[n] for n in names}, rel=1e-3, abs=1e-6
        )


def test_an_objective_may_name_the_scores(tmp_path: Path) -> None:
    """Of each token's response, before normalization."""
    seen: list[Tensor] = []

    def objective(
        logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, scores: Tensor
    ) -> Tensor:
        seen.append(scores)
        return -(logprobs - old_logprobs).exp() * advantages

    trainer = make_trainer(tmp_path, objective=objective, score_normalization="running")
    assert trainer.config.objective.endswith("<locals>.objective")
    prompts = first_prompts(trainer, 16)
    coefficients = trainer.begin_iteration()
    rollout = trainer.engine.generate(prompts.token_ids, trainer.parts.sampling)
    scores = trainer.score(prompts, rollout, coefficients)
    experience, _ = trainer.make_experience(prompts.token_ids, rollout, scores, coefficients)
    trainer.loss(experience.weighted("token-mean"), coefficients)
    by_response = seen[-1].split(experience.batch.generated_lengths.tolist())
    assert len({scores[0].item() for scores in by_response}) > 1
    for found, score in zip(by_response, scores.total, strict=True):
        assert (found == score).all()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("    return logprobs.mean()\n", "expected token_loss, a float tensor of shape [5]"),
        ("    return logprobs * advantages[:2]\n", "return logprobs * advantages[:2]"),
        ("    return logprobs * missing\n", "NameError"),
    ],
)
def test_a_wrong_objective_is_refused_before_the_models_load(
    body: str, says: str, tmp_path: Path
) -> None:
    text = "def mine(logprobs, old_logprobs, advantages, mask):\n" + body
    file = write(tmp_path / "mine.py", text)
    where = f"objective `mine` ({file}, line 5)"
    with pytest.raises((ValueError, RuntimeError), match=re.escape(where)) as error:
        make_trainer(tmp_path, objective=f"{file}:mine")
    assert says in str(error.value)


GAE = """def advantage(rewards, values, mask, *, cu_seqlens, gamma):
    advantages = torch.zeros_like(rewards)
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
        following = 0.0
        for t in reversed(range(start, end)):
            next_value = values[t + 1] if t + 1 < end else 0.0
            following = rewards[t] + gamma * next_value - values[t] + gamma * 0.95 * following
            advantages[t] = following
    return advantages, advantages + values
"""


def test_a_run_with_gae_as_a_function_is_the_built_in_run(tmp_path: Path) -> None:
    """Policy and value function learn the same, to fp32 rounding, while scores differ."""
    runs = []
    options = {"rewards": [text_lengths], "iterations": 3, "value_head": "gradient"}
    for name in ("gae", f"{write(tmp_path / 'mine.py', GAE)}:advantage"):
        folder = tmp_path / name[-3:]
        make_trainer(folder, advantage=name, **options).train()
        runs.append(metrics(folder))
    names = ("loss", "policy_loss", "value_loss", "grad_norm", "approx_kl", "explained_variance")
    for built_in, own in zip(*runs, strict=True):
        assert {n: own[n] for n in names} == pytest.approx(
            {n: built_in[n] for n in names}, rel=1e-3, abs=1e-5
        )


def test_advantages_alone_leave_the_value_function_the_rewards_to_go(tmp_path: Path) -> None:
    def advantage(rewards: Tensor, values: Tensor, mask: Tensor, **others: Any) -> Tensor:
        assert {"cu_seqlens", "old_logprobs", "samples_per_prompt"} <= others.keys()
        return torch.linspace(-1, 1, len(rewards))

    trainer = make_trainer(tmp_path, advantage=advantage, whiten_advantages=False)
    experience = first_experience(trainer)
    assert torch.equal(experience.advantages, torch.linspace(-1, 1, len(experience.advantages)))
    assert torch.equal(experience.returns, experience.monte_carlo_returns)


@pytest.mark.parametrize("whitening", [False, True])
def test_an_advantage_needs_no_rewards_that_differ(whitening: bool, tmp_path: Path) -> None:
    """Its source and its unit are its own: here a teacher's, in hundredths."""

    def advantage(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return torch.linspace(-1, 1, len(rewards)) / 100

    options = {
        "advantage": advantage,
        "whiten_advantages": whitening,
        "score_normalization": "none",
    }
    trainer = make_trainer(tmp_path, **options, rewards=[lambda prompts, completions: [1.0] * 16])
    advantages = first_experience(trainer).advantages
    wanted = torch.linspace(-1, 1, len(advantages)) / 100
    if whitening:
        wanted = wanted / wanted.std()
    torch.testing.assert_close(advantages, wanted, rtol=1e-3, atol=1e-6)


def test_an_advantage_gets_copies(tmp_path: Path) -> None:
    change = 0

    def advantage(
        rewards: Tensor, values: Tensor, mask: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor
    ) -> Tensor:
        for given in (rewards, values, old_logprobs, ref_logprobs):
            given += change
        return torch.linspace(-1, 1, len(rewards))

    seen = []
    options = {"advantage": advantage, "kl_loss_coef": 0.1}
    for change in (0, 1):
        experience = first_experience(make_trainer(tmp_path / str(change), **options))
        assert experience.ref_logprobs is not None
        seen.append((experience.old_values, experience.old_logprobs, experience.ref_logprobs))
    assert all(torch.equal(*pair) for pair in zip(*seen, strict=True))


@pytest.mark.parametrize("returns", [False, True])
def test_nan_of_an_advantage_is_blamed_on_it(returns: bool, tmp_path: Path) -> None:
    """It may occur in any iteration."""

    def advantage(rewards: Tensor, values: Tensor, mask: Tensor) -> Any:
        calls.append(rewards)
        broken = torch.full_like(rewards, torch.nan if len(calls) > 1 else 0.0)
        return (rewards, broken) if returns else broken

    calls: list[Tensor] = []
    trainer = make_trainer(tmp_path, advantage=advantage, value_head="gradient")
    name = "returns" if returns else "advantages"
    with pytest.raises(ValueError, match=rf"advantage\` \(.*: NaN or infinite {name} of"):
        trainer.train()


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda rewards, values, mask: rewards[:2], "expected advantages, a float tensor of shape"),
        (lambda rewards, values, mask: (rewards, None), "expected returns, a float tensor"),
        (lambda rewards, values: rewards, "too many positional arguments; expected (rewards, v"),
    ],
)
def test_a_wrong_advantage_is_refused(function: Any, says: str, tmp_path: Path) -> None:
    where = f"advantage `<lambda>` ({__file__}, line {function.__code__.co_firstlineno}): "
    with pytest.raises(ValueError, match=re.escape(where)) as error:
        make_trainer(tmp_path, advantage=function)
    assert says in str(error.value)


def test_a_wrong_objective_is_answered_with_every_argument(tmp_path: Path) -> None:
    def objective(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
        return old_logprobs - logprobs

    names = ("mask", "entropy", "ref_logprobs", "importance_weights", "cu_seqlens", "scores")
    with pytest.raises(ValueError, match="objective") as error:
        make_trainer(tmp_path, objective=objective, kl_loss_coef=0.1)
    for name in names:
        assert re.search(rf"\b{name}\b", str(error.value))


def test_a_run_resumes_with_the_same_objective_only(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.py", CLIP)
    options = {"objective": f"{file}:objective", "checkpoint_interval": 1}
    make_trainer(tmp_path, iterations=1, **options).train()
    make_trainer(tmp_path, iterations=2, resume=True, **options).train()
    write(tmp_path / "mine.py", CLIP.replace("0.8", "0.7"))
    with pytest.raises(ValueError, match="the content of objective was"):
        make_trainer(tmp_path, iterations=3, resume=True, **options).train()


def test_the_example_trains(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "objective.py"
    trainer = make_trainer(tmp_path, objective=f"{example}:dppo_tv")
    assert torch.isfinite(torch.tensor(list(trainer.train().values()))).all()
    assert metrics(tmp_path)[0]["approx_kl"] > 0


# ------------------------------------------------------------------------------------- the examples

OBJECTIVES = runpy.run_path(str(ROOT / "examples" / "objectives.py"))


@pytest.mark.parametrize(
    "name", ["clip_cov", "kl_cov", "geometric_mean_rejection", "k3_rejection", "vapo"]
)
def test_an_example_of_an_objective_trains(name: str, tmp_path: Path) -> None:
    objective = f"{ROOT / 'examples' / 'objectives.py'}:{name}"
    trainer = make_trainer(tmp_path, objective=objective)
    before = weights_of(trainer)
    trainer.train()
    assert not all(map(torch.equal, before, weights_of(trainer)))


def test_vapo_is_the_papers_loss() -> None:
    """Yue et al. 2025, section 4.4: the clip over all tokens and 0.1·NLL over positive ones."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        noise = torch.randn(4, 24, generator=generator, dtype=torch.float64)
        logprobs = (-noise[0].abs()).requires_grad_()
        old, advantages = logprobs.detach() + 0.3 * noise[1], noise[2]
        scores = noise[3, :3].sign().repeat_interleave(8)
        loss = OBJECTIVES["vapo"](logprobs, old, advantages, torch.ones(24).bool(), scores).mean()
        ratio = (logprobs - old).exp()
        clipped = ratio.clamp(1 - 0.2, 1 + 0.28)
        wanted = -torch.minimum(ratio * advantages, clipped * advantages).sum() / 24
        if (scores > 0).any():
            wanted = wanted - 0.1 * logprobs[scores > 0].mean()
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
        ours, theirs = (torch.autograd.grad(x, logprobs)[0] for x in (loss, wanted))
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_vapo_has_a_lambda_of_its_own_for_critic_and_policy(tmp_path: Path) -> None:
    options = read_yaml(ROOT / "examples" / "vapo.yaml", PPOConfig)
    for name in ("model", "prompts", "rewards", "output_dir"):
        del options[name]
    options |= {"rollout_batch_size": 32, "minibatches": 2, "value_warmup_iterations": 1}
    options["objective"] = str(ROOT / options["objective"])
    trainer = make_trainer(tmp_path, **{**options, "learning_rate": 1e-3, "iterations": 2})
    experience = first_experience(trainer)
    assert torch.equal(experience.returns, experience.monte_carlo_returns)
    trainer.train()
    assert metrics(tmp_path)[-1]["approx_kl"] > 0
