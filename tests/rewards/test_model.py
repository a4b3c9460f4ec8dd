"""Reward models: own tokenizer, truncation, and the score at the last token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoModelForSequenceClassification

from fastppo.rewards.loading import load_reward
from fastppo.rewards.model import RewardModel, sequence_scores

PROMPTS = ["w1 w2 ", "w3 "]
COMPLETIONS = ["w7 w7", "w4"]


def test_a_reward_model_scores_text_with_its_own_tokenizer(tmp_path) -> None:
    reward = RewardModel(tiny.saved_reward_model(tmp_path), batch_size=1)
    ids = torch.tensor([[4, 5, 10, 10]])
    own = reward.model(input_ids=ids).logits.item()
    assert reward(PROMPTS, COMPLETIONS)[0] == pytest.approx(own, abs=1e-6)


def test_a_long_text_is_truncated_from_the_left(tmp_path) -> None:
    reward = RewardModel(tiny.saved_reward_model(tmp_path))
    reward.max_length = 3
    assert reward(["w1 w2"], [" w3 w4 w5"]) == reward([""], ["w3 w4 w5"])
    assert reward(["<eos> w1 w2 w3"], [" w4"]) == reward(["<eos> w3"], [" w4"]), "but not its BOS"


def test_chat_prompts_go_through_the_reward_tokenizers_template(tmp_path) -> None:
    reward = RewardModel(tiny.saved_reward_model(tmp_path))
    prompt = [{"role": "user", "content": "w9"}]
    assert reward([prompt], [" w8"]) == reward(["w1 w9 w2 "], ["w8"])


def test_texts_are_limited_by_the_context_and_score_max_length(tmp_path) -> None:
    name = tiny.saved_reward_model(tmp_path)
    assert RewardModel(name).max_length == tiny.CONTEXT
    model = AutoModelForSequenceClassification.from_pretrained(name)
    for longest, wanted in ((6, 6), (999, tiny.CONTEXT)):
        model.config.score_max_length = longest
        model.save_pretrained(name)
        assert RewardModel(name).max_length == wanted


def test_the_mean_of_the_config_is_subtracted(tmp_path) -> None:
    name = tiny.saved_reward_model(tmp_path)
    plain = RewardModel(name)(PROMPTS, COMPLETIONS)
    model = AutoModelForSequenceClassification.from_pretrained(name)
    model.config.score_mean = 0.25
    model.save_pretrained(name)
    assert RewardModel(name)(PROMPTS, COMPLETIONS) == pytest.approx([x - 0.25 for x in plain])


def test_scores_are_read_at_the_last_token_of_each_row(tmp_path) -> None:
    model = RewardModel(tiny.saved_reward_model(tmp_path)).model
    ids = torch.tensor([[4, 5, 10, 0], [7, 8, 9, 11], [12, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    scores = sequence_scores(model, ids, mask)
    alone = [
        model(input_ids=row[:n][None]).logits.item() for row, n in zip(ids, (3, 4, 1), strict=True)
    ]
    torch.testing.assert_close(scores, torch.tensor(alone), rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------------------- invalid


def _without_its_head(path: Path) -> str:
    """Its scores would be random."""
    return tiny.without_weight(tiny.saved_reward_model(path), "score.weight")


@pytest.mark.parametrize(
    ("save", "says"),
    [
        (tiny.saved_model, "is a LlamaForCausalLM with 2 labels; expected a sequence"),
        (partial(tiny.saved_reward_model, labels=3), "3 labels; expected a sequence classifier"),
        (_without_its_head, r"reward .* lacks weights of LlamaForSeq.*: score\.weight"),
    ],
)
def test_other_models_are_refused(save: Callable[[Path], str], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        load_reward(save(tmp_path))
