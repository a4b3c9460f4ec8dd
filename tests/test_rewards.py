"""Rewards: functions over text and models with their own tokenizer; failures say what was wrong."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from fastppo.advantages import compute_advantages
from fastppo.rewards import (
    RewardEnsemble,
    RewardError,
    RewardModel,
    RewardTerm,
    Scored,
    load_reward,
    make_terms,
    place_rewards,
    score,
    token_rewards,
)

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
        ("reward.py", r"which function\? Want reward\.py:function"),
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


def test_a_text_without_a_token_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="has no token for ''"):
        RewardModel(_saved_reward_model(tmp_path))([""], [""])


def test_a_long_text_loses_its_beginning(tmp_path) -> None:
    reward = RewardModel(_saved_reward_model(tmp_path), max_length=3)
    assert reward._tokens("w1 w2", " w3 w4 w5") == reward._tokens("", "w3 w4 w5")


def test_chat_prompts_go_through_the_reward_tokenizers_template(tmp_path) -> None:
    reward = RewardModel(_saved_reward_model(tmp_path))
    prompt = [{"role": "user", "content": "w9"}]
    assert reward._text(prompt, "w8").split() == ["w1", "w9", "w2", "w8"]


def test_a_classifier_of_several_labels_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="with 3 labels; want a sequence classifier with 1"):
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


# ------------------------------------------------------------------------ rewards within a response

IDS = [[10, 10, 1], [7, 1]]
"""The responses of COMPLETIONS with their EOS: 3 and 2 tokens."""


def _scored(returned, **more) -> Scored:
    term = RewardTerm("steps", lambda prompts, completions: returned)
    return score(term, PROMPTS, COMPLETIONS, completion_ids=IDS, **more)


def test_a_batch_may_hold_numbers_tokens_and_steps() -> None:
    tokens = _scored([[0.5, 0.25, 1.0], 3.0])
    assert tokens == [1.75, 3.0] == tokens.values
    assert tokens.partial == [[0.5, 0.25, 1.0], None]
    assert tokens.whole == [0.0, 3.0]
    steps = _scored([[(2, 0.5), (5, -1)], [0.0, 2.0]])
    assert steps == [-0.5, 2.0]
    assert steps.partial == [[(2, 0.5), (5, -1.0)], [0.0, 2.0]]
    assert steps.whole == [0.0, 0.0]


def test_plain_numbers_have_no_parts() -> None:
    scored = _scored([1.0, 2])
    assert (scored.partial, scored.whole, scored.disagreement) == (None, [1.0, 2.0], None)


def test_arrays_within_a_completion_count_as_lists() -> None:
    assert _scored([torch.ones(3), np.float32(0.5)]).partial == [[1.0, 1.0, 1.0], None]
    assert _scored([[(np.int64(2), np.float64(0.5))], 0.0]).partial == [[(2, 0.5)], None]


def test_a_reward_that_wraps_another_keeps_its_parts() -> None:
    wrapped = _scored(Scored([3.0, 1.0], [[(1, 3.0)], None], [0.5, 0.0]))
    assert (wrapped.values, wrapped.partial) == ([3.0, 1.0], [[(1, 3.0)], None])
    assert wrapped.disagreement == [0.5, 0.0]


def test_a_completion_without_steps_has_no_reward() -> None:
    """A reward that found no step in a text returns an empty list."""
    scored = _scored([[], [(1, 2.0)]])
    assert (scored.values, scored.partial) == ([0.0, 2.0], [[], [(1, 2.0)]])


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ([0.0, [1.0] * 3], "3 numbers for completion 1, which has 2 response tokens; want one per"),
        ([0.0, [1.0, float("nan")]], "nan for token 1 of completion 1; want a finite number"),
        ([0.0, [1.0, "x"]], "'x' for token 1 of completion 1; want a finite number"),
        ([0.0, [(1, 1.0), 2.0]], r"numbers beside \(end, value\) pairs for completion 1"),
        ([0.0, [(0, 1.0)]], r"\(0, 1.0\) for a step of completion 1; want .* whole number from 1"),
        ([0.0, [(1.5, 1.0)]], r"\(1.5, 1.0\) for a step of completion 1"),
        ([0.0, [(True, 1.0)]], r"\(True, 1.0\) for a step of completion 1"),
        ([0.0, [(1, 1.0, 2.0)]], r"\(1, 1.0, 2.0\) for a step of completion 1"),
        ([0.0, [(1, float("inf"))]], "inf for the step of completion 1 that ends at 1"),
        ([0.0, [(1, 3e38), (2, 3e38)]], "in total for completion 1"),
    ],
)
def test_wrong_parts_are_refused_with_their_row(returned, says, tmp_path) -> None:
    with pytest.raises(RewardError, match=f"reward 'steps' .*{says}"):
        _scored(returned, failure_file=tmp_path / "failed.json")
    record = json.loads((tmp_path / "failed.json").read_text())
    assert record["completions"] == COMPLETIONS[1:]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(prompts, completions, completion_ids): return [len(i) for i in completion_ids]", 3),
        ("def f(completions, *, completion_ids=()): return [len(i) for i in completion_ids]", 3),
        ("def f(p, c, completion_ids): return [len(i) for i in completion_ids]", 3),
        ("def f(completions, **columns): return ['completion_ids' in columns] * 2", 0),
    ],
)
def test_a_reward_that_names_completion_ids_gets_them(source: str, expected: int) -> None:
    """They are no column, so `**columns` alone does not ask for them."""
    names: dict = {}
    exec(source, names)
    scored = score(
        RewardTerm("f", names["f"]), PROMPTS, COMPLETIONS, {"wanted": ["a", "b"]}, None, IDS
    )
    assert scored[0] == expected


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte, so a character may be several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": 0} | {character: i + 1 for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


BYTES = _byte_tokenizer()


def _placed(partial, completion: str, prompt: str = "a prompt: ") -> list[float]:
    ids = [*BYTES(completion)["input_ids"], BYTES.eos_token_id]
    return token_rewards(partial, completion, BYTES(prompt)["input_ids"], ids, BYTES)


def test_a_step_is_rewarded_on_the_token_that_ends_it() -> None:
    assert _placed([(2, 1.0), (5, 0.5)], "ab cd") == [0, 1.0, 0, 0, 0.5, 0]


def test_a_character_of_several_tokens_counts_from_its_last() -> None:
    """é is two bytes and € three; half of one decodes to U+FFFD."""
    assert _placed([(1, 1.0)], "é!") == [0, 1.0, 0, 0]
    assert _placed([(2, 1.0), (3, 0.5)], "x€!") == [0, 0, 0, 1.0, 0.5, 0]


def test_a_broken_character_of_the_response_itself_counts_when_it_is_written() -> None:
    """A response may hold bytes that are no character; its text then has U+FFFD too."""
    response = [BYTES("é")["input_ids"][0], *BYTES("ab")["input_ids"]]
    text = BYTES.decode(response)
    assert text == "\ufffdab"
    assert token_rewards([(1, 1.0), (2, 2.0)], text, BYTES("p")["input_ids"], response, BYTES) == [
        1.0,
        2.0,
        0.0,
    ]


def test_an_end_beyond_the_text_is_the_last_token() -> None:
    assert _placed([(99, 1.0), (3, 0.25)], "abc") == [0, 0, 0.25, 1.0]


def test_steps_that_end_on_one_token_add_up() -> None:
    assert _placed([(3, 1.0), (3, 0.5), (1, 2.0)], "abc") == [2.0, 0, 1.5, 0]


def test_a_word_that_loses_its_space_when_decoded_alone_is_placed_behind_its_prompt() -> None:
    """The offsets are those of the completion, which begins with the space."""
    tokenizer = tiny.tokenizer()
    prompt, response = tokenizer("w1 w2")["input_ids"], tokenizer("w7 w8 <eos>")["input_ids"]
    completion = " w7 w8"
    assert token_rewards(
        [(3, 1.0), (4, 0.5), (6, 2.0)], completion, prompt, response, tokenizer
    ) == [
        1.0,
        2.5,
        0.0,
    ]


def test_rewards_by_token_and_none_pass_through() -> None:
    assert token_rewards([1, 2.0], "ab", [5], [3, 4], BYTES) == [1.0, 2.0]
    assert token_rewards(None, "ab", [5], [3, 4], BYTES) == [0.0, 0.0]
    assert token_rewards([], "ab", [5], [3, 4], BYTES) == [0.0, 0.0]


def test_token_rewards_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="got 1 token rewards for 2 response tokens"):
        token_rewards([1.0], "ab", [5], [3, 4], BYTES)
    with pytest.raises(ValueError, match="character offset >= 1, got 0"):
        _placed([(0, 1.0)], "ab")
    with pytest.raises(ValueError, match="completion must be the text of response_ids"):
        token_rewards([(1, 1.0)], "other", [5], BYTES("ab")["input_ids"], BYTES)
    with pytest.raises(ValueError, match="a response of 0 tokens"):
        token_rewards([(1, 1.0)], "", [5], [], BYTES)


def test_placed_rewards_add_up_and_teach_only_what_came_before_them() -> None:
    """With γ = λ = 1 and no value function a token's advantage is all reward from it on."""
    texts = ["ab cd", "xy"]
    prompts = [BYTES("p: ")["input_ids"]] * 2
    responses = [[*BYTES(text)["input_ids"], BYTES.eos_token_id] for text in texts]
    terms = [
        RewardTerm("steps", lambda p, c: [[(2, 1.0), (5, -3.0)], 4.0], 0.5),
        RewardTerm("tokens", lambda p, c: [0.25, [1.0, 0.0, 0.0]], 2.0),
    ]
    scored = [score(term, ["p: "] * 2, texts, completion_ids=responses) for term in terms]
    scores, tokens = place_rewards(terms, scored, texts, prompts, responses, BYTES)
    assert scores == [0.5, 2.0]
    assert tokens == [0, 0.5, 0, 0, -1.5, 0, 2.0, 0, 0]
    zeros = torch.zeros(9)
    found = compute_advantages(
        torch.tensor(scores),
        zeros,
        zeros,
        None,
        torch.ones(9, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, 6, 9]),
        token_rewards=torch.tensor(tokens),
        lam=1.0,
        whiten=False,
    ).advantages
    assert found.tolist() == [-0.5, -0.5, -1.0, -1.0, -1.0, 0.5, 4.0, 2.0, 2.0]
    totals = [0.5 * scored[0][i] + 2.0 * scored[1][i] for i in range(2)]
    assert [found[0].item(), found[6].item()] == totals


def test_without_parts_nothing_is_placed_on_tokens() -> None:
    term = RewardTerm("plain", lambda p, c: [1.0, 2.0], 0.5)
    scored = [score(term, PROMPTS, COMPLETIONS)]
    placed = place_rewards([term], scored, COMPLETIONS, [[5], [5]], IDS, BYTES)
    assert placed == ([0.5, 1.0], None)


@given(
    st.text(st.sampled_from("a b.é€🙂"), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(1, 20), st.integers(-3, 3)), max_size=5),
)
def test_placement_agrees_with_counting_bytes_and_keeps_the_sum(completion, steps) -> None:
    expected = [0.0] * (len(completion.encode()) + 1)
    for end, value in steps:
        inside = end <= len(completion)
        expected[len(completion[:end].encode()) - 1 if inside else -1] += value
    found = _placed([(end, float(value)) for end, value in steps], completion)
    assert found == expected


# --------------------------------------------------------------------------------------- ensembles


def _constant(name: str, values: list[float]):
    def reward(prompts, completions):
        return values

    reward.__name__ = name
    return reward


MEMBERS = [_constant("a", [1.0, 2.0]), _constant("b", [3.0, 2.0]), _constant("c", [8.0, 2.0])]
"""Completion 0: mean 4, deviation √((9 + 1 + 16)/3). Completion 1: they agree."""
DEVIATION = (26 / 3) ** 0.5


@pytest.mark.parametrize(
    ("by", "expected"), [("mean", 4.0), ("min", 1.0), ("lcb", 4.0 - 0.5 * DEVIATION)]
)
def test_an_ensemble_combines_its_members(by: str, expected: float) -> None:
    terms = make_terms([RewardEnsemble(MEMBERS, by=by, std_coef=0.5)])
    scored = score(terms[0], PROMPTS, COMPLETIONS)
    assert terms[0].name == "ensemble"
    assert scored == pytest.approx([expected, 2.0], rel=1e-12)
    assert scored.disagreement == pytest.approx([DEVIATION, 0.0], rel=1e-12)


def test_members_get_the_columns_and_token_ids_that_they_name() -> None:
    def matches(prompts, completions, wanted):
        return [float(w in c) for w, c in zip(wanted, completions, strict=True)]

    def lengths(completions, completion_ids):
        return [len(ids) for ids in completion_ids]

    ensemble = RewardEnsemble([matches, lengths], by="min")
    columns = {"wanted": ["w7", "w9"], "other": [1, 2]}
    scored = score(RewardTerm("e", ensemble), PROMPTS, COMPLETIONS, columns, completion_ids=IDS)
    assert scored == [1.0, 0.0]


def test_a_failing_member_is_named_and_its_sample_saved(tmp_path) -> None:
    ensemble = RewardEnsemble([MEMBERS[0], _constant("broken", [1.0, float("nan")])])
    with pytest.raises(RewardError, match="'ensemble/broken' returned nan for completion 1"):
        score(make_terms([ensemble])[0], PROMPTS, COMPLETIONS, {}, tmp_path / "failed.json")
    record = json.loads((tmp_path / "failed.json").read_text())
    assert (record["reward"], record["completions"]) == ("ensemble/broken", COMPLETIONS[1:])


def test_a_member_that_raises_is_named_with_its_cause() -> None:
    def fails(prompts, completions):
        raise KeyError("no such key")

    with pytest.raises(RewardError, match=r"'e/fails' raised KeyError") as caught:
        score(RewardTerm("e", RewardEnsemble([fails])), PROMPTS, COMPLETIONS)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_member_with_parts_is_refused() -> None:
    ensemble = RewardEnsemble([_constant("steps", [1.0, [(1, 1.0)]])])
    with pytest.raises(RewardError, match="'e/steps' returned rewards by token or step for compl"):
        score(RewardTerm("e", ensemble), PROMPTS, COMPLETIONS)


def test_an_ensemble_of_saved_models_takes_their_options(tmp_path) -> None:
    directory = _saved_reward_model(tmp_path)
    alone = RewardModel(directory)(PROMPTS, COMPLETIONS)
    scored = score(
        RewardTerm("e", RewardEnsemble([directory, directory], by="lcb", batch_size=1)),
        PROMPTS,
        COMPLETIONS,
    )
    assert scored == pytest.approx(alone, abs=1e-5)  # two of a kind agree
    assert scored.disagreement == [0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"members": []}, "must have at least one member, got none"),
        ({"members": MEMBERS, "by": "median"}, "by must be one of mean, min, lcb, got 'median'"),
        ({"members": MEMBERS, "std_coef": -1.0}, "std_coef must be >= 0, got -1.0"),
        ({"members": ["nowhere.py:f"]}, "there is no file nowhere.py"),
    ],
)
def test_an_ensemble_that_cannot_be_is_refused(options, says) -> None:
    with pytest.raises(ValueError, match=says):
        RewardEnsemble(**options)
