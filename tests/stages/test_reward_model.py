"""The reward model: loss, metrics, initialization, zero-mean scores, resume."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from stage_runs import PAIRS, classifier, interrupted, reward_config, reward_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
)

from fastppo.rewards.model import RewardModel, sequence_scores
from fastppo.run.log import read_jsonl
from fastppo.stages.reward_model import (
    accuracy,
    bradley_terry_loss,
    calibration_error,
    head_std,
    load_classifier,
    log_loss,
)


def _score(model: Any, text: str) -> torch.Tensor:
    ids = torch.tensor([tiny.tokenizer()(text)["input_ids"]])
    return sequence_scores(model, ids, torch.ones_like(ids))[0]


# ---------------------------------------------------------------------------------------- the loss


def test_the_loss_with_margin_and_centering_in_closed_form() -> None:
    chosen = torch.tensor([2.0, -1.0], requires_grad=True)
    rejected = torch.tensor([1.0, 0.5], requires_grad=True)
    margin = torch.tensor([0.25, 0.0])
    loss = bradley_terry_loss(chosen, rejected, margin, center_coef=0.1)
    pairs = [
        math.log1p(math.exp(-(2.0 - 1.0 - 0.25))) + 0.1 * 3.0**2,
        math.log1p(math.exp(1.5)) + 0.1 * 0.5**2,
    ]
    assert loss.item() == pytest.approx(sum(pairs) / 2, rel=1e-6)
    loss.backward()
    # d/ds_c = −σ(−(s_c − s_r − m)) + 2·coef·(s_c + s_r); for s_r the first sign is positive
    for i, (wrong, total) in enumerate([(0.75, 3.0), (-1.5, -0.5)]):
        sigma = 1 / (1 + math.exp(wrong))
        assert chosen.grad[i].item() == pytest.approx((-sigma + 0.2 * total) / 2, rel=1e-5)
        assert rejected.grad[i].item() == pytest.approx((sigma + 0.2 * total) / 2, rel=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_trained_loss_does_not_depend_on_the_batch_size(
    architecture: str, tmp_path: Path
) -> None:
    """With margin and centering, and batches of 1, and of 2 and 1; a list of six pairs has the
    weight of one pair."""
    rows = [
        {"prompt": "w1", "completions": [" w2", " w3 w4", " w5", " w6 w7 w8"]},
        {"prompt": "w9", "chosen": " w2", "rejected": " w3", "margin": 0.5},
        {"prompt": "w10", "chosen": " w2", "rejected": " w3"},
    ]
    model = classifier(tmp_path, architecture)
    losses = []
    with torch.no_grad():
        for prompt, pairs, margin in (
            ("w1", list(itertools.combinations(rows[0]["completions"], 2)), 0.0),
            ("w9", [(" w2", " w3")], 0.5),
            ("w10", [(" w2", " w3")], 0.0),
        ):
            scores = [[_score(model, prompt + text) for text in pair] for pair in pairs]
            both = torch.tensor(scores)
            losses.append(bradley_terry_loss(both[:, 0], both[:, 1], margin, center_coef=0.3))
    expected = sum(losses).item() / 3
    for size, accumulation in ((1, 3), (2, 2)):
        config = reward_config(
            tmp_path,
            batch_size=size,
            gradient_accumulation=accumulation,
            center_coef=0.3,
            output_dir=str(tmp_path / str(size)),
        )
        reward_model(config, tmp_path, rows, model=copy.deepcopy(model))
        (record,) = read_jsonl(tmp_path / str(size) / "metrics.jsonl")
        assert record["loss"] == pytest.approx(expected, rel=1e-5)


# ------------------------------------------------------------------------------------- the metrics


@pytest.mark.parametrize(
    ("probabilities", "error"),
    [
        ([0.75, 0.75, 0.75, 0.25], 0.0),  # confidence 3/4, correct three times of four
        ([0.95, 0.05], 0.45),  # confident, correct half the time
        ([0.95, 0.95, 0.65, 0.35], (2 * 0.05 + 2 * 0.15) / 4),
    ],
)
def test_calibration_error_in_closed_form(probabilities: list[float], error: float) -> None:
    logits = [math.log(p / (1 - p)) for p in probabilities]
    difference = torch.tensor(logits, dtype=torch.float64)
    assert calibration_error(difference) == pytest.approx(error, abs=1e-12)


def test_ties_count_one_half() -> None:
    assert accuracy(torch.tensor([1.0, -1.0, 0.0, 2.0])) == 2.5 / 4


def test_the_log_loss_is_exact_far_from_zero() -> None:
    """σ rounds to 0 or 1 in fp32."""
    assert log_loss(torch.tensor([100.0])) == pytest.approx(math.exp(-100), rel=1e-6)
    assert log_loss(torch.tensor([-100.0])) == pytest.approx(100)
    assert log_loss(torch.tensor([0.0])) == pytest.approx(math.log(2))


# --------------------------------------------------------------------------------------- the model


def test_a_new_head_is_small_and_an_existing_one_is_kept(tmp_path: Path) -> None:
    model = classifier(tmp_path)
    assert head_std(32) == pytest.approx(33**-0.5)
    # the standard deviation of 32 draws is within 40 % with probability 0.999
    assert model.score.weight.std().item() == pytest.approx(33**-0.5, rel=0.4)
    model.save_pretrained(tmp_path / "rm")
    again = load_classifier(str(tmp_path / "rm"))
    assert torch.equal(again.score.weight, model.score.weight)


def test_a_classifier_needs_one_label_and_weights(tmp_path: Path) -> None:
    config = tiny.CONFIGS["llama"]()
    config.num_labels = 3
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(tmp_path / "three")
    with pytest.raises(ValueError, match="1 label, got 3"):
        load_classifier(str(tmp_path / "three"))
    with pytest.raises(ValueError, match=r"config\.json"):
        load_classifier(str(tmp_path))


def test_a_masked_lm_may_lack_the_pooler(tmp_path) -> None:
    config = BertConfig(
        vocab_size=43, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(tmp_path)
    assert load_classifier(str(tmp_path)).config.num_labels == 1
    with pytest.raises(ValueError, match="BertForSequenceClassification"):
        load_classifier(
            tiny.without_weight(str(tmp_path), "bert.embeddings.word_embeddings.weight")
        )


def test_it_learns_preferences_and_serves_as_a_reward(tmp_path: Path) -> None:
    config = reward_config(
        tmp_path, model=tiny.saved_model(tmp_path / "sft"), epochs=6, eval_share=0.2, batch_size=4
    )
    result = reward_model(config, tmp_path)
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    accuracies = [record["eval_accuracy"] for record in records if "eval_accuracy" in record]
    assert accuracies[0] < 0.9
    assert accuracies[-1] == result["accuracy"] == 1.0
    assert result["log_loss"] < 0.1 < records[0]["eval_log_loss"]
    assert result["calibration_error"] < 0.1 < records[0]["eval_calibration_error"]

    reward = RewardModel(str(tmp_path / "run"))
    liked, not_liked = reward(["w3", "w3"], [" w21 w7", " w21 w8"])
    assert liked > not_liked + 1


# ----------------------------------------------------------------------------------- normalization


def test_the_best_completions_score_zero_on_average(tmp_path: Path) -> None:
    """In `RewardModel`; transformers loads the same model with uncentered scores."""
    result = reward_model(reward_config(tmp_path, epochs=2), tmp_path)
    run = str(tmp_path / "run")
    prompts = [row["prompt"] for row in PAIRS]
    chosen = [row["chosen"] for row in PAIRS]
    scores = torch.tensor(RewardModel(run)(prompts, chosen))
    assert scores.mean().item() == pytest.approx(0, abs=1e-5)
    assert scores.std(correction=0).item() == pytest.approx(result["score_std"], rel=1e-4)
    assert abs(result["score_mean"]) > 0.05

    model = AutoModelForSequenceClassification.from_pretrained(run)
    assert model.config.score_mean == pytest.approx(result["score_mean"])
    assert model.config.score_max_length is None
    tokenizer = AutoTokenizer.from_pretrained(run)
    texts = [p + c for p, c in zip(prompts, chosen, strict=True)]
    with torch.no_grad():
        own = model(**tokenizer(texts, return_tensors="pt", padding=True)).logits.squeeze(-1)
    torch.testing.assert_close(own - model.config.score_mean, scores, rtol=0, atol=1e-5)


def test_further_training_updates_the_mean(tmp_path: Path) -> None:
    first = reward_model(reward_config(tmp_path), tmp_path)
    more = str(tmp_path / "more")
    second = reward_model(
        reward_config(tmp_path, model=str(tmp_path / "run"), output_dir=more), tmp_path
    )
    assert first["score_mean"] != second["score_mean"]
    assert RewardModel(more).score_mean == pytest.approx(second["score_mean"])


# ---------------------------------------------------------------------------------------- the run


def test_a_resumed_lora_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint_interval": 2, "lora_rank": 4}
    options["model"] = tiny.saved_model(tmp_path / "sft")
    reward_model(reward_config(tmp_path, **options, output_dir=str(tmp_path / "whole")), tmp_path)
    with interrupted(after=3):
        reward_model(reward_config(tmp_path, **options), tmp_path)
    reward_model(reward_config(tmp_path, **options, resume=True), tmp_path)
    uninterrupted, resumed = (
        AutoModelForSequenceClassification.from_pretrained(tmp_path / name)
        for name in ("whole", "run")
    )
    torch.testing.assert_close(resumed.state_dict(), uninterrupted.state_dict(), rtol=0, atol=0)
    assert uninterrupted.config.score_mean == resumed.config.score_mean


def test_lora_trains_adapters_and_head_and_saves_a_plain_model(tmp_path: Path) -> None:
    model = classifier(tmp_path, "gpt2")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    reward_model(reward_config(tmp_path, lora_rank=4), tmp_path, model=model)
    after = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run").state_dict()
    assert after.keys() == before.keys()
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert "score.weight" in moved
    assert len(moved) > 1
    assert not any("wte" in name or "wpe" in name or "ln_" in name for name in moved)
