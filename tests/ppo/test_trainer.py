"""The trainer runs on every architecture, on-policy at first, the same however a batch is split."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import waits
from rich.console import Console
from tiny import random_batch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from fastppo.data.batch import Batch
from fastppo.data.chat import token_ids
from fastppo.data.microbatches import split
from fastppo.data.rows import DataError
from fastppo.ppo.critic import train_critic
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.state import MOST_SKIPPED, RunStoppedError
from fastppo.ppo.trainer import PPOTrainer
from fastppo.run.log import read_jsonl
from fastppo.run.report.report import write_report
from runs import (
    Watched,
    experience_of,
    first_experience,
    make_trainer,
    one_step,
    perturb,
    records,
    tensors_of,
    update_gradients,
    weights_of,
)

# ------------------------------------------------------------------------------------------- a run


@pytest.mark.parametrize("architecture", tiny.TRAINED)
def test_transformers_loads_the_trained_policy(architecture: str, tmp_path: Path) -> None:
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
    trained = trainer.model.causal_lm.state_dict()
    torch.testing.assert_close(policy.state_dict(), trained, rtol=0, atol=0)
    before = AutoModelForCausalLM.from_pretrained(start).state_dict()
    assert any(not torch.equal(p, before[name]) for name, p in policy.state_dict().items())
    output = policy.generate(**tokenizer("w1 w2", return_tensors="pt"), max_new_tokens=4)
    assert output.shape[1] > 2


def test_the_run_directory_has_its_records(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, monitor_rewards=[tiny.count_w7], max_new_tokens=24)
    trainer.train()
    run = tmp_path / "run"
    lines = read_jsonl(run / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == [0, 1]
    logged = """
        reward kl entropy value_loss explained_variance clip_fraction ratio_mean response_length
        eos_rate learning_rate tokens_per_second policy_loss approx_kl grad_norm kl_coef
        monitor/count_w7 seconds/generate seconds/score seconds/experience seconds/update
        length_correlation distinct_1 distinct_2 unique_responses correlation/count_w7
        skipped_steps ratio_above_positive ratio_below_positive
    """
    assert {*logged.split()} <= lines[0].keys()
    assert lines[0]["correlation/count_w7"] == pytest.approx(1.0), "it is the trained reward itself"
    samples = read_jsonl(run / "samples.jsonl")
    assert samples[0].keys() >= {"prompt", "completion", "reward", "rewards", "kl", "tokens"}
    assert samples[0]["rewards"].keys() == samples[0]["monitors"].keys() == {"count_w7"}
    assert list((run / "tensorboard").iterdir())
    assert "learning_rate: 0.001" in (run / "config.yaml").read_text()
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-000002"]
    with pytest.raises(ValueError, match=r"holds a run already: resume it with `resume: true`"):
        make_trainer(tmp_path, iterations=1).train()


def test_a_failed_run_leaves_its_record(tmp_path: Path) -> None:
    def reward(prompts, completions):
        with torch.no_grad():
            trainer.model.value_function.head.bias.fill_(torch.nan)
        return tiny.count_w7(prompts, completions)

    trainer = make_trainer(tmp_path, rewards=[reward], ppo_epochs=MOST_SKIPPED)
    with pytest.raises(FloatingPointError, match=f"{MOST_SKIPPED} optimizer steps in a row"):
        trainer.train()
    (record,) = records(trainer)
    assert record["skipped_steps"] == MOST_SKIPPED
    assert record["warnings"][0].startswith(f"stopped: {MOST_SKIPPED} optimizer steps")


def test_lora_trains_only_adapters_without_a_second_model(tmp_path: Path) -> None:
    start = tiny.saved_model(tmp_path / "sft")
    config = PPOConfig(**tiny.options(tmp_path, lora_rank=4), model=start)
    trainer = PPOTrainer(config, prompts=tiny.PROMPTS, rewards=[tiny.count_w7])
    assert trainer.reference is not None
    with trainer.reference.loaded() as reference:
        assert reference is trainer.model
    metrics = trainer.train()
    assert metrics["kl"] != 0
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "policy").state_dict()
    original = AutoModelForCausalLM.from_pretrained(start).state_dict()
    assert policy.keys() == original.keys()
    changed = {name for name, p in policy.items() if not torch.equal(p, original[name])}
    assert changed
    assert all("proj" in name for name in changed)


def test_samples_per_prompt_are_adjacent_rows(tmp_path: Path) -> None:
    """`rollout_batch_size` counts responses; the place in the data counts prompts."""
    trainer = make_trainer(tmp_path, samples_per_prompt=4, iterations=1)
    batches: list[list[list[int]]] = []
    trainer.engine = Watched(trainer.engine, lambda rollout, ids, _: batches.append(ids))
    trainer.train()
    rows = batches[-1]
    assert len(rows) == 16
    assert all(rows[i] == rows[i - i % 4] for i in range(16))
    assert len({*map(tuple, rows)}) == 4
    assert trainer.state.prompts_seen == 4


def test_the_engine_is_released_before_an_update_and_gets_the_new_weights(
    tmp_path: Path,
) -> None:
    trainer = make_trainer(tmp_path, iterations=2)
    calls: list[tuple[str, Tensor]] = []

    class Recorded(Watched):
        def release(self) -> None:
            calls.append(("release", trainer.model.head.weight.detach().clone()))

        def weights_changed(self, policy: Any) -> None:
            assert all(p.grad is None for p in policy.parameters())
            calls.append(("weights_changed", policy.head.weight.detach().clone()))

    trainer.engine = Recorded(trainer.engine, lambda *_: None)
    trainer.train()
    assert [name for name, _ in calls] == ["release", "weights_changed"] * 2
    weights = [weight for _, weight in calls]
    assert not torch.equal(weights[0], weights[1])
    assert torch.equal(weights[1], weights[2])


# ------------------------------------------------------------------------------------ the algorithm


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "opt"])
def test_the_first_update_is_on_policy(architecture: str, tmp_path: Path) -> None:
    """Property 2: before the first step ratio = 1, and KL to a fresh reference is 0."""
    trainer = make_trainer(tmp_path, architecture, temperature=0.7)
    experience = first_experience(trainer)
    assert experience.ref_logprobs is not None
    # The same weights and tokens through two copies: equal but for fp32 rounding.
    torch.testing.assert_close(experience.ref_logprobs, experience.old_logprobs, rtol=0, atol=1e-5)
    metrics = trainer.update(experience, one_step(trainer))
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["clip_fraction"] == 0
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_the_split_into_microbatches_does_not_matter(aggregation: str, tmp_path: Path) -> None:
    """Property 1, through the trainer: gradients of trunk, policy head and value head, by number
    of sequences, by tokens and packed."""
    gradients, shares = [], []
    for options in (
        {"microbatch_size": 16},
        {"microbatch_size": 5},
        {"microbatch_tokens": 30},
        {"microbatch_tokens": 30, "packing": "on"},
        {"microbatch_tokens": 1},
    ):
        trainer = make_trainer(
            tmp_path,
            aggregation=aggregation,
            entropy_coef=0.02,
            max_grad_norm=1e9,
            value_head="gradient",
            **options,
        )
        torch.manual_seed(5)
        # Of responses that end early, at different lengths.
        stops = make_trainer(tmp_path, stop_token_ids=[*range(1, 12)])
        metrics = trainer.update(first_experience(stops), one_step(trainer))
        gradients.append({n: p.grad.clone() for n, p in trainer.model.named_parameters()})
        shares.append(metrics["useful_share"])
    scale = max(gradient.abs().max().item() for gradient in gradients[0].values())
    for other in gradients[1:]:
        # fp32 sums in another order
        torch.testing.assert_close(other, gradients[0], rtol=1e-4, atol=1e-6 * scale)
    assert gradients[0]["value_function.head.weight"].abs().max() > 0
    together, _, budgeted, packed, alone = shares
    assert together < budgeted < packed == alone == 1


@pytest.mark.parametrize("options", [{"microbatch_tokens": 40}, {"microbatch_size": 3}])
@pytest.mark.parametrize("packing", ["off", "on"])
@pytest.mark.parametrize("estimator", ["k1", "full"])
def test_microbatches_do_not_change_the_experience(
    options, packing: str, estimator: str, tmp_path: Path
) -> None:
    """Logprobs, values and the reference's come back in the order of the batch."""
    experiences = []
    for more in ({"microbatch_size": 16}, options | {"packing": packing}):
        trainer = make_trainer(tmp_path, kl_estimator=estimator, value_model="critic", **more)
        torch.manual_seed(1)
        torch.nn.init.normal_(trainer.model.value_function.head.weight)
        batch = random_batch((7, 2, 5, 1, 6, 3, 4, 8))
        experience, _ = experience_of(trainer, batch, torch.arange(8.0))
        experiences.append(tensors_of(experience))
    whole, parts = experiences
    for name in ("old_logprobs", "old_values", "advantages", "returns", "ref_logprobs"):
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "packing"),
    [
        *((name, "off") for name in ("llama", "mistral-window", "qwen3", "gpt2")),
        *((name, "on") for name in ("llama", "mistral-window")),
    ],
)
def test_a_microbatch_does_not_synchronize(architecture: str, packing: str, tmp_path: Path) -> None:
    """No `.item()`, `nonzero`, boolean index or `.tolist()` of what would be on a GPU: ten
    microbatches wait no more often than one."""
    experience = first_experience(make_trainer(tmp_path))
    counts = []
    for size in (16, 2):
        trainer = make_trainer(
            tmp_path, architecture, microbatch_size=size, minibatches=1, packing=packing
        )
        if architecture == "mistral-window":  # rows within the window; packed, any will do
            trainer.model.config.sliding_window = 64
        with waits.counted() as seen:
            trainer.update(experience, one_step(trainer))
        counts.append(seen.total())
    assert counts[0] == counts[1]
    assert counts[0] > 0, "the sums of a step are read once"


def test_an_optimizer_step_synchronizes_once(tmp_path: Path) -> None:
    experience = first_experience(make_trainer(tmp_path))
    trainer = make_trainer(tmp_path)
    counts = []
    for steps in (1, 3):
        with waits.counted() as seen:
            trainer.update(experience, one_step(trainer, ppo_epochs=steps))
        counts.append(seen["tolist"])
    assert counts == [1 + 1, 3 + 1], "and once at the update's end"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("packing", ["off", "on"])
def test_torch_detects_no_synchronization_in_a_microbatch(packing: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, device="cuda", packing=packing, microbatch_size=4)
    experience = first_experience(trainer)
    options = one_step(trainer)
    trainer.update(experience, options)  # kernels are compiled and memory is allocated
    minibatch = experience.weighted(options.aggregation)
    with waits.refused_by_torch():
        for micro in minibatch.microbatches(options.limits(trainer.model.packing)):
            loss = trainer.loss(micro, options).loss
            loss.backward()


def test_only_response_positions_reach_the_heads(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    experience = first_experience(trainer)
    rows = []
    trainer.model.value_function.head.register_forward_hook(
        lambda module, args, output: rows.append(len(args[0]))
    )
    trainer.update(experience, replace(trainer.config, ppo_epochs=1))
    assert sum(rows) == experience.batch.response_count
    assert sum(rows) < experience.batch.layout().input_ids.numel()


def test_token_sum_is_token_mean_times_the_tokens(tmp_path: Path) -> None:
    """Sums over tokens are the mean's times the number of tokens."""
    mean = update_gradients(tmp_path, aggregation="token-mean", vf_coef=0.0)
    total = update_gradients(tmp_path, aggregation="token-sum", vf_coef=0.0)
    name = "causal_lm.lm_head.weight"
    trainer = make_trainer(tmp_path)
    torch.manual_seed(5)
    tokens = first_experience(trainer).batch.response_count
    scale = total[name].abs().max().item()
    torch.testing.assert_close(total[name], tokens * mean[name], rtol=1e-4, atol=1e-6 * scale)


def test_ptx_adds_its_gradient_in_the_same_step(tmp_path: Path) -> None:
    data = tiny.saved_text(tmp_path / "text.jsonl")
    gradients = {}
    for coef in (0.0, 2.5):
        more = {"ptx_coef": coef, "ptx_data": data, "ptx_block_size": 12} if coef else {}
        more["microbatch_size"] = 3  # of the 8 blocks, so the parts are unequal
        trainer = make_trainer(tmp_path, max_grad_norm=1e9, **more)
        torch.manual_seed(0)
        trainer.update(first_experience(trainer), one_step(trainer))
        gradients[coef] = {n: p.grad.clone() for n, p in trainer.model.causal_lm.named_parameters()}
    fresh = tiny.model().eval()
    blocks = trainer.parts.pretraining.at(0, trainer.config.ptx_batch_size, trainer.config.seed)
    fresh(input_ids=blocks, labels=blocks).loss.backward()
    for name, parameter in fresh.named_parameters():
        wanted = gradients[0.0][name] + 2.5 * parameter.grad
        torch.testing.assert_close(gradients[2.5][name], wanted, rtol=1e-3, atol=1e-5)


# --------------------------------------------------------------------------------------- early stop


def test_early_stop_kl_ends_the_update(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, early_stop_kl=1e-4, learning_rate=3e-2, iterations=1, ppo_epochs=4
    )
    assert trainer.train()["early_stopped"] == 1
    assert trainer.state.optimizer_step == 2  # the minibatches of one epoch


# ----------------------------------------------------------------------- the reference, the values


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_after_a_refresh_the_kl_is_zero(lora_rank: int, tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, lora_rank=lora_rank, reference_refresh=2, iterations=4, learning_rate=1e-2
    )
    trainer.train()
    kl = [abs(record["kl"]) for record in records(trainer)]
    assert kl[0] < 1e-4
    assert kl[1] > 1e-3
    assert kl[2] < 1e-4
    assert kl[3] > 1e-3


@pytest.mark.parametrize(
    "value_function",
    [
        {"value_model": "shared"},
        {"value_model": "detached"},
        {"value_model": "critic"},
        {"value_model": "critic", "value_head": "closed_form", "value_epochs": 3},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_warm_up_trains_only_the_value_function(
    value_function: dict[str, Any], tmp_path: Path
) -> None:
    options = value_function | {"value_warmup_iterations": 2, "weight_decay": 0.1}
    options |= {"rewards": [tiny.every_other]}
    trainer = make_trainer(tmp_path, iterations=2, **options)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    changed = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed
    assert all(name.startswith("value_function.") for name in changed)
    longer = make_trainer(tmp_path, iterations=3, resume=True, **options)
    longer.train()
    after = {n for n, p in longer.model.named_parameters() if not torch.equal(p, before[n])}
    assert any(name.startswith("causal_lm.") for name in after)


def test_a_critic_can_start_from_an_earlier_one(tmp_path: Path) -> None:
    earlier = make_trainer(tmp_path, value_model="critic")
    assert earlier.train()["value_grad_norm"] > 0
    saved = str(tmp_path / "run" / "value_function.safetensors")
    options = {"value_model": "critic", "critic_model": saved}
    actual = make_trainer(tmp_path / "next", **options).model.value_function.state_dict()
    torch.testing.assert_close(actual, earlier.model.value_function.state_dict(), rtol=0, atol=0)
    make_trainer(tmp_path / "shared").train()
    options["critic_model"] = str(tmp_path / "shared" / "run" / "value_function.safetensors")
    with pytest.raises(ValueError, match="does not fit the policy"):
        make_trainer(tmp_path / "wrong", **options)


def test_critic_frozen_freezes_attention(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, value_model="critic", critic_frozen="attention")
    before = {n: p.clone() for n, p in trainer.model.value_function.trunk.named_parameters()}
    trainer.train()
    after = dict(trainer.model.value_function.trunk.named_parameters())
    moved = {name for name, value in before.items() if not torch.equal(after[name], value)}
    assert any(".mlp." in name for name in moved)
    assert not any(".self_attn." in name for name in moved)


def test_value_epochs_train_only_the_critic(tmp_path: Path) -> None:
    """And within an update they come before those with the policy: its first value loss is less."""
    losses = []
    for epochs in (1, 5):
        options = {"ppo_epochs": 1, "minibatches": 1, "value_epochs": epochs}
        options |= {"value_model": "critic", "value_learning_rate": 1e-3}
        trainer = make_trainer(tmp_path, **options)
        experience = first_experience(trainer)
        losses.append(trainer.update(experience, trainer.config)["value_loss"])
    assert losses[1] < 0.9 * losses[0]
    before = [p.detach().clone() for p in trainer.model.causal_lm.parameters()]
    train_critic(
        experience,
        trainer.config,
        model=trainer.model,
        optimizer=trainer.optimizer,
        microbatch_limits=trainer.microbatch_limits,
        world=trainer.world,
    )
    torch.testing.assert_close(before, [*trainer.model.causal_lm.parameters()], rtol=0, atol=0)


# -------------------------------------------------------------------------------------- the rewards


def test_scores_are_normalized_and_clipped(tmp_path: Path) -> None:
    """Without a KL and with λ = 1 the return is what was paid."""
    options = {"kl_coef": 0.0, "lam": 1.0, "score_normalization": "running", "score_clip": 1.2}
    trainer = make_trainer(tmp_path, **options)
    batch = random_batch((1, 1, 1))
    first, second = torch.tensor([1.0, 3.0, 5.0]), torch.tensor([100.0, 0.0, 9.0])
    for scores, seen in ((first, first), (second, torch.cat([first, second]))):
        experience, _ = experience_of(trainer, batch, scores)
        scaled = (scores / seen.std(correction=0)).clamp(-1.2, 1.2)
        torch.testing.assert_close(experience.returns, scaled)


def test_a_missing_reward_column_is_refused(tmp_path: Path) -> None:
    def of_answers(prompts, completions, answer, weight=1.0, **columns):
        return [0.0 for _ in answer]

    with pytest.raises(DataError, match=r"reward of_answers needs the column 'answer'; .*: wanted"):
        make_trainer(tmp_path, rewards=[of_answers])
    rows = [{**row, "answer": "x"} for row in tiny.PROMPTS]
    make_trainer(tmp_path, rewards=[of_answers], prompts=rows)


# ----------------------------------------------------------------------------------------- watching


def test_a_crossed_threshold_warns_on_the_console_and_in_the_records(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    trainer = make_trainer(
        tmp_path, warn_if=["entropy > 1", "kl > 1e6", "klx > 3"], console=console, iterations=3
    )
    trainer.reporter.notes.append("rollout=decoder does not decode it")
    trainer.train()
    lines = records(trainer)
    for line in lines:
        assert any(sentence.startswith("entropy = 3.") for sentence in line["warnings"])
        assert not any("1e+06" in sentence for sentence in line["warnings"])
    assert "no metric 'klx'" in lines[2]["warnings"][-1]
    terminal = console.file.getvalue()
    assert terminal.count("entropy = 3.") == terminal.count("iteration 1: entropy = 3.") == 1
    assert terminal.count("rollout=decoder does not decode it") == 1, "what is noted is said once"
    assert "rollout=decoder does not decode it" in lines[0]["warnings"]


def test_a_run_prints_a_summary_before_the_first_iteration(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    trainer = make_trainer(tmp_path, console=console, iterations=2, monitor_rewards=[tiny.count_w7])
    trainer.train()
    text = console.file.getvalue()
    lines = text[: text.index("PPO 1/2")].splitlines()
    count = sum(p.numel() for p in trainer.model.parameters())
    for line in (
        f"model    LlamaForCausalLM: {count:,} parameters with the value function, "
        f"{count - 33:,} trained",
        "prompts  24 of those that were passed in",
        "rewards  count_w7; monitored: count_w7",
        "run      iterations 1 to 2, 16 responses of at most 8 tokens each",
        f"writes   {tmp_path / 'run'}",
    ):
        assert line in lines


def test_stop_if_stops_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, stop_if=["entropy > 1"], iterations=5)
    with pytest.raises(RunStoppedError, match=r"after 1 iteration: entropy = 3\.\d+ > 1"):
        trainer.train()
    run = tmp_path / "run"
    assert (run / "checkpoint-000001").is_dir()
    assert (run / "policy" / "config.json").is_file()
    assert records(trainer)[0]["warnings"][-1].startswith("stopped: entropy")
    assert "Ended after 1 of 5 iterations: entropy" in write_report(run).read_text()
    resumed = make_trainer(tmp_path, resume=True, iterations=2)
    assert resumed.train()
    assert [record["iteration"] for record in records(resumed)] == [0, 1]


# ------------------------------------------------------------------------ responses that are given

GIVEN = [[4, 5], [6]], [[7, 8, 1], [9, 1]], [1.0, 0.0]


def test_step_trains_on_given_responses(tmp_path: Path) -> None:
    """Responses with a score above the rest become likelier; texts and ids both work."""
    trainer = make_trainer(tmp_path, prompts=None, rewards=[], learning_rate=3e-3, kl_coef=0.0)
    prompts = ["w1 w2", "w3", "w4 w5 w6", "w8"] * 2
    responses = ["w7 w7 <eos>"] * 4 + ["w9 w9 <eos>"] * 4
    scores = [1.0] * 4 + [0.0] * 4

    def likelihood(response: str) -> float:
        ids = [token_ids(trainer.tokenizer, prompt) for prompt in prompts[:4]]
        batch = Batch.of(ids, [token_ids(trainer.tokenizer, response)] * 4)
        return trainer.model.response_logprobs(batch).sum().item()

    before = likelihood("w7 w7 <eos>") - likelihood("w9 w9 <eos>")
    for _ in range(5):
        metrics = trainer.step(prompts, responses, scores)
    assert likelihood("w7 w7 <eos>") - likelihood("w9 w9 <eos>") > before + 1
    assert metrics["reward"] == 0.5
    assert trainer.state.iteration == 5
    assert trainer.step([[4, 5]] * 4, [[6, 1]] * 4, torch.ones(4))["response_length"] == 2


def _stepped(tmp_path: Path, name: str, *given: Any, **more: Any) -> tuple[Any, dict[str, float]]:
    """The policy's and the value function's weights after a step, in one vector; its metrics."""
    options = {"prompts": None, "rewards": [], "kl_coef": 0.1, "entropy_coef": 0.01, "lam": 0.9}
    trainer = make_trainer(tmp_path / name, **options)
    torch.manual_seed(3)
    metrics = trainer.step(*given, **more)
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]), metrics


def test_a_gap_before_the_response_belongs_to_the_prompt(tmp_path: Path) -> None:
    """The bits of a step on longer prompts."""
    prompts, responses, scores = GIVEN
    gaps = [[20, 21], [22]]
    filled = [gap + response for gap, response in zip(gaps, responses, strict=True)]
    masks = [[False, False, True, True, True], torch.tensor([False, True, True])]
    weights, metrics = _stepped(tmp_path, "gap", prompts, filled, scores, masks=masks)
    longer = [prompt + gap for prompt, gap in zip(prompts, gaps, strict=True)]
    wanted, of_longer = _stepped(tmp_path, "cut", longer, responses, scores)
    assert torch.equal(weights, wanted)
    assert metrics == of_longer


def test_a_gap_after_the_response_changes_nothing(tmp_path: Path) -> None:
    """It is fp32's rounding in rows of another width."""
    prompts, responses, scores = GIVEN
    filled = [[7, 8, 1, 20, 21], [9, 1, 22]]
    masks = [[True] * 3 + [False] * 2, [True, True, False]]
    reasons = ["stop", "stop"]
    weights, metrics = _stepped(tmp_path, "gap", prompts, filled, scores, reasons, masks=masks)
    wanted, of_shorter = _stepped(tmp_path, "cut", prompts, responses, scores, reasons)
    torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-6)
    assert metrics.keys() == of_shorter.keys()
    for name in metrics.keys() - {"useful_share"}:
        assert metrics[name] == pytest.approx(of_shorter[name], abs=2e-6), name


def test_a_multi_turn_response_has_the_gradient_of_its_turns(tmp_path: Path) -> None:
    """A response of two turns is, once its advantages are made, two responses: the second to all
    that stands before it."""
    options = {"kl_loss_coef": 0.2, "entropy_coef": 0.01, "learning_rate": 1e-30}
    trainer = make_trainer(tmp_path, **options, max_grad_norm=1e9)
    mask = [True] * 3 + [False] * 2 + [True] * 2
    turns = Batch.of([[4, 5]], [[7, 8, 1, 20, 21, 9, 1]], response_mask=[mask])
    apart = Batch.of([[4, 5], [4, 5, 7, 8, 1, 20, 21]], [[7, 8, 1], [9, 1]])
    assert turns.response_tokens.tolist() == apart.response_tokens.tolist() == [7, 8, 1, 9, 1]
    experience, _ = experience_of(trainer, turns, torch.ones(1))
    perturb(trainer)
    gradients = []
    for batch in (turns, apart):
        torch.manual_seed(5)
        metrics = trainer.update(replace(experience, batch=batch), one_step(trainer))
        gradients.append([p.grad.clone() for p in trainer.model.causal_lm.parameters()])
        assert metrics["entropy"] > 0
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    # The KL of the metrics and of the reward is that of the policy's five tokens alone.
    now = trainer.model.evaluate_plan(split(apart, trainer.config.limits())).logprobs
    again, metrics = experience_of(trainer, turns, torch.ones(1))
    kl = (now - experience.old_logprobs).sum().item()
    assert metrics["kl"] == pytest.approx(kl, rel=1e-4)
    assert metrics["response_length"] == 5
    assert abs(kl) > 1e-3
    assert again.returns.shape == (5,)


def test_given_old_logprobs_and_values_are_used(tmp_path: Path) -> None:
    """They take the place of the pass that would make them, each by itself or both: with those of
    the policy itself the step is the same."""
    trainer = make_trainer(tmp_path, prompts=None, rewards=[])
    own = trainer.model.evaluate_plan(split(Batch.of(*GIVEN[:2]), trainer.config.limits()))
    logprobs, values = own.logprobs.split([3, 2]), own.values.split([3, 2])
    wanted, _ = _stepped(tmp_path, "made", *GIVEN)
    for name, more in {
        "both": {"old_logprobs": logprobs, "values": values},
        "logprobs": {"old_logprobs": logprobs},
        "values": {"values": values},
    }.items():
        assert torch.equal(_stepped(tmp_path, name, *GIVEN, **more)[0], wanted), name
    lower = [part - 0.1 for part in logprobs]
    _, metrics = _stepped(tmp_path, "lower", *GIVEN, old_logprobs=lower)
    assert metrics["ratio_max"] > 1.1, "of another policy the ratio is not 1 at first"


# ---------------------------------------------------------------------------- looking at the policy


def test_evaluate_uses_the_current_policy(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, monitor_rewards=[tiny.count_w7])
    prompts = trainer.parts.prompts.select(range(5))
    perturb(trainer)
    result = trainer.evaluate(prompts)
    assert len(result["completions"]) == 5
    assert result["reward"] == pytest.approx(result["scores"].total.mean().item())
    assert result["monitor/count_w7"] == pytest.approx(result["reward"])
    assert result["kl"] != 0
    assert 0 <= result["eos_rate"] <= 1
    assert result["response_length"] <= trainer.config.max_new_tokens
    again = trainer.evaluate(prompts)
    assert again["completions"] == result["completions"], "the same seed draws the same"


def test_masked_responses_change_no_weight(tmp_path: Path) -> None:
    """A run that masks its truncated responses learns from the finished ones alone."""
    changed = {}
    runs = {"mask": ("mask", 0.0), "same": ("mask", 9.0), "learn": ("learn", 0.0)}
    for name, (truncated, reward) in runs.items():

        def pay(prompts: list[str], completions: list[str], reward: float = reward) -> list[float]:
            shares = tiny.count_w7(prompts, completions)
            long = [len(completion.split()) == 8 for completion in completions]
            return [reward if cut else x for x, cut in zip(shares, long, strict=True)]

        trainer = make_trainer(
            tmp_path / name,
            rewards=[pay],
            truncated=truncated,
            max_new_tokens=8,
            rollout_batch_size=32,
            value_head="gradient",
            iterations=2,
        )
        trainer.train()
        lines = records(trainer)
        assert 0 < lines[0]["eos_rate"] < 1
        changed[name] = weights_of(trainer)
    pairs = zip(changed["mask"], changed["same"], strict=True)
    assert all(torch.equal(*pair) for pair in pairs), "their rewards do not matter"
    pairs = zip(changed["mask"], changed["learn"], strict=True)
    assert not all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize(
    "options",
    [
        {"kl_loss_coef": 0.1, "kl_coef": 0.0, "value_head": "gradient"},
        {"value_model": "critic", "value_epochs": 4},
    ],
    ids=["kl in the loss", "critic"],
)
def test_a_batch_without_a_finished_response_moves_nothing(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Nor do the momentum and the weight decay of the batch before it."""
    trainer = make_trainer(tmp_path, truncated="mask", minibatches=2, weight_decay=0.1, **options)
    given = [[4, 5]] * 4, [[6, 1], [7, 1], [8, 1], [9, 1]], [0.0, 1.0, 2.0, 3.0]
    weights = [weights_of(trainer)]
    for reason in ("stop", "length"):
        trainer.step(*given, finish_reasons=[reason] * 4)
        weights.append(weights_of(trainer))
    assert not all(map(torch.equal, weights[0], weights[1]))
    assert all(map(torch.equal, weights[1], weights[2]))


def test_a_batch_without_a_finished_response_has_no_gradient(tmp_path: Path) -> None:
    options = {"truncated": "mask", "stop_token_ids": [], "max_new_tokens": 4, "iterations": 1}
    trainer = make_trainer(tmp_path, **options)
    before = weights_of(trainer)
    trainer.train()
    assert records(trainer)[0]["eos_rate"] == 0
    assert all(map(torch.equal, before, weights_of(trainer)))
