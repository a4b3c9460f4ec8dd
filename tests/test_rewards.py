"""Rewards: functions over text and models with their own tokenizer; failures say what was wrong."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from fastppo.rewards import RewardError, RewardModel, RewardTerm, load_reward, make_terms, score

PROMPTS, COMPLETIONS = ["w1 w2 ", "w3 "], ["w7 w7", "w4"]


def test_a_function_of_a_file(tmp_path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def brief(prompts, completions, **columns):\n    return [-len(c) for c in completions]\n"
    )
    assert load_reward(f"{path}:brief")(PROMPTS, COMPLETIONS) == [-5, -2]


def test_a_function_of_a_module() -> None:
    reward = load_reward("fastppo.demo_task:gold_reward")
    assert reward(
        ["tell me about the red fox ."], ["the fox is kind . it sings near the hill ."]
    ) == [1.0]


def test_columns_reach_the_function_that_names_them() -> None:
    def matches(prompts, completions, wanted):
        return [float(w in c) for w, c in zip(wanted, completions, strict=True)]

    term = RewardTerm("matches", matches)
    columns = {"wanted": ["w7", "w9"], "other": [1, 2]}
    assert score(term, PROMPTS, COMPLETIONS, columns) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("nowhere.py:f", "there is no file nowhere.py"),
        ("fastppo.nowhere:f", "no module"),
        ("fastppo.demo_task:absent", "no function 'absent' there; it has "),
    ],
)
def test_a_reward_that_is_not_there_is_refused(spec: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        load_reward(spec)


@pytest.mark.parametrize(
    ("returned", "says", "saved"),
    [
        ([1.0], "returned 1 values for 2 completions", 2),
        ([1.0, float("nan")], "returned nan for completion 1", 1),
        ([float("inf"), 0.0], "returned inf for completion 0", 1),
        ([1.0, None], "returned None for completion 1", 1),
        ([1.0, "2"], "returned '2' for completion 1", 1),
        (1.0, "returned float; want a list of 2 floats", 2),
    ],
)
def test_a_wrong_return_is_refused_and_the_sample_saved(returned, says, saved, tmp_path) -> None:
    term = RewardTerm("broken", lambda prompts, completions: returned)
    with pytest.raises(RewardError, match=says):
        score(term, PROMPTS, COMPLETIONS, {}, tmp_path / "failed.json")
    record = json.loads((tmp_path / "failed.json").read_text())
    assert len(record["completions"]) == saved
    assert record["reward"] == "broken"


def test_an_exception_names_the_reward_and_saves_the_samples(tmp_path) -> None:
    def fails(prompts, completions):
        raise KeyError("no such key")

    with pytest.raises(RewardError, match=r"'fails' raised KeyError\('no such key'\)") as caught:
        score(RewardTerm("fails", fails), PROMPTS, COMPLETIONS, {}, tmp_path / "failed.json")
    assert isinstance(caught.value.__cause__, KeyError)
    assert json.loads((tmp_path / "failed.json").read_text())["prompts"] == PROMPTS


def test_tensors_and_arrays_count_as_lists() -> None:
    term = RewardTerm("tensor", lambda prompts, completions: torch.tensor([1.0, 2.0]))
    assert score(term, PROMPTS, COMPLETIONS) == [1.0, 2.0]


def test_two_rewards_of_one_name_stay_apart() -> None:
    terms = make_terms([tiny.count_w7, tiny.count_w7], [1.0, 0.5])
    assert [(t.name, t.weight) for t in terms] == [("count_w7", 1.0), ("count_w7_2", 0.5)]
    with pytest.raises(ValueError, match="got 2 rewards and 1 reward_weights"):
        make_terms([tiny.count_w7, tiny.count_w7], [1.0])


def _saved_reward_model(directory, *, pad_is_eos: bool = False, labels: int = 1) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tiny.VOCABULARY),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=labels,
        pad_token_id=1 if pad_is_eos else 0,
        eos_token_id=1,
        bos_token_id=None,
        max_position_embeddings=32,
    )
    LlamaForSequenceClassification(config).save_pretrained(directory)
    tiny.tokenizer(pad_is_eos=pad_is_eos, chat=True).save_pretrained(directory)
    return str(directory)


def test_a_reward_model_scores_text_with_its_own_tokenizer(tmp_path) -> None:
    reward = RewardModel(_saved_reward_model(tmp_path), batch_size=1)
    ids = torch.tensor([[4, 5, 10, 10]])
    own = reward.model(input_ids=ids).logits.item()
    assert reward(PROMPTS, COMPLETIONS)[0] == pytest.approx(own, abs=1e-6)


def test_batching_and_padding_do_not_change_a_score(tmp_path) -> None:
    directory = _saved_reward_model(tmp_path)
    one = RewardModel(directory, batch_size=1)(PROMPTS, COMPLETIONS)
    two = RewardModel(directory, batch_size=2)(PROMPTS, COMPLETIONS)
    assert one == pytest.approx(two, abs=1e-5)


def test_a_text_that_ends_in_the_pad_token_is_scored_at_its_last_token(tmp_path) -> None:
    """pad = eos: transformers would read the score one token early."""
    reward = RewardModel(_saved_reward_model(tmp_path, pad_is_eos=True), batch_size=2)
    with_eos = reward(["w1 ", "w1 "], ["w2 <eos>", "w2"])
    trunk = reward.model.base_model(input_ids=torch.tensor([[4, 5, 1]])).last_hidden_state
    assert with_eos[0] == pytest.approx(reward.model.score(trunk[0, -1]).item(), abs=1e-5)
    assert with_eos[0] != pytest.approx(with_eos[1], abs=1e-4)


def test_a_long_text_loses_its_beginning(tmp_path) -> None:
    reward = RewardModel(_saved_reward_model(tmp_path), max_length=3)
    assert reward._tokens("w1 w2", " w3 w4 w5") == reward._tokens("", "w3 w4 w5")


def test_chat_prompts_go_through_the_reward_tokenizers_template(tmp_path) -> None:
    reward = RewardModel(_saved_reward_model(tmp_path))
    prompt = [{"role": "user", "content": "w9"}]
    assert reward._text(prompt, "w8").split() == ["w1", "w9", "w2", "w8"]


def test_a_classifier_of_several_labels_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="has 3 labels; want 1"):
        RewardModel(_saved_reward_model(tmp_path, labels=3))


@pytest.mark.parametrize(
    "source",
    [
        "def f(prompts, completions): return [len(c) for c in completions]",
        "def f(completions, prompts): return [len(c) for c in completions]",
        "def f(completions, **kwargs): return [len(c) for c in completions]",
        "def f(*, completions): return [len(c) for c in completions]",
        "def f(p, c): return [len(x) for x in c]",
        "def f(p, c, /): return [len(x) for x in c]",
        "def f(*args): return [len(x) for x in args[1]]",
        "def f(**kw): return [len(x) for x in kw['completions']]",
        "def f(p, c, **columns): return [len(x) for x in c]",
        "def f(prompts, completions, wanted): return [len(c) for c in completions]",
    ],
)
def test_any_sensible_signature_is_called_right(source: str) -> None:
    names: dict = {}
    exec(source, names)
    columns = {"wanted": ["a", "b"]}
    assert score(RewardTerm("f", names["f"]), PROMPTS, COMPLETIONS, columns) == [5.0, 2.0]


def test_a_chat_template_that_writes_bos_is_not_given_another(tmp_path) -> None:
    reward = RewardModel(_saved_reward_model(tmp_path))
    calls = []
    tokenizer = reward.tokenizer
    reward.tokenizer = lambda text, add_special_tokens: (
        calls.append(add_special_tokens) or tokenizer(text)
    )
    reward.tokenizer.apply_chat_template = tokenizer.apply_chat_template
    reward._tokens([{"role": "user", "content": "w9"}], "w8")
    reward._tokens("w9", " w8")
    assert calls == [False, True]


def test_the_reward_model_reads_what_it_was_trained_on(tmp_path) -> None:
    """The same ids for prompt + completion in both stages."""
    from fastppo import reward_model

    tokenizer = tiny.tokenizer()
    seen = []
    row = {"prompt": "w1 w2", "chosen": " w7", "rejected": " w8"}
    texts = [row["prompt"] + row[side] for side in ("chosen", "rejected")]
    reward = RewardModel(_saved_reward_model(tmp_path))
    for side, text in zip(("chosen", "rejected"), texts, strict=True):
        seen.append(reward._tokens(row["prompt"], row[side]) == tokenizer(text)["input_ids"])
    assert all(seen)
    assert "joined as they are" in reward_model.train_reward_model.__doc__
