"""Responses that are given are checked before anything is learned from them."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from tokenizers import processors

from fastppo.data.chat import encode_prompt
from fastppo.ppo.given_responses import GivenResponses, given_responses

GIVEN = [[4, 5], [6]], [[7, 8, 1], [9, 1]]
ONE = [[4]], [[5]]


def _given(
    prompts: Any, responses: Any, scores: Any = None, *, tokenizer: Any = None, **more: Any
) -> GivenResponses:
    options = {"finish_reasons": None, "vocabulary": 43, "context": 64, "stop_token_ids": [1]}
    return given_responses(
        prompts,
        responses,
        [1.0] * len(prompts) if scores is None else scores,
        tokenizer=tiny.tokenizer() if tokenizer is None else tokenizer,
        **{**options, **more},
    )


@pytest.mark.parametrize("scores", [[1, 2.5], (1.0, 2.5), torch.tensor([1.0, 2.5]).double()])
def test_scores_become_fp32_on_the_cpu(scores) -> None:
    checked = _given(*GIVEN, scores).scores.total
    assert checked.tolist() == [1.0, 2.5]
    assert (checked.dtype, checked.device.type) == (torch.float32, "cpu")


def test_prompts_are_encoded_as_in_a_run() -> None:
    """With the tokenizer's special tokens, but for an EOS at the end; chat messages by its
    template."""
    tokenizer = tiny.tokenizer(chat=True)
    ending = processors.TemplateProcessing("$A <eos>", special_tokens=[("<eos>", 1)])
    tokenizer.backend_tokenizer.post_processor = ending
    chat = [{"role": "user", "content": "w1 w2"}]
    given = _given(["w1 w2", chat, [4, 5, 1]], ["w7 <eos>"] * 3, tokenizer=tokenizer)
    assert given.prompt_ids == [[4, 5], encode_prompt(chat, tokenizer, "the chat"), [4, 5, 1]]
    assert given.rollout.tokens == [[10, 1]] * 3


def test_images_are_refused() -> None:
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "w1"}]}]
    with pytest.raises(ValueError, match=r"^prompt 0: .*image"):
        _given([chat], ["w7 <eos>"], tokenizer=tiny.tokenizer(chat=True))


def test_a_response_without_a_stop_token_is_truncated() -> None:
    given = _given(["w1", "w2"], ["w3 w4", "w3 <eos>"])
    assert given.rollout.truncated == [True, False]


def test_masked_responses_may_contain_stop_tokens() -> None:
    """And none ends a response where the run has no stop tokens."""
    turns = [[7, 1, 20, 8, 1], [9, 1, 0, 0, 0]]
    masks = [[True, True, False, True, True], [True, True, False, False, False]]
    given = _given(GIVEN[0], turns, masks=masks)
    assert given.rollout.generated_tokens == [[7, 1, 8, 1], [9, 1]]
    assert _given(GIVEN[0], turns, stop_token_ids=[]).rollout.tokens == turns


def test_per_token_values_are_selected_by_the_mask() -> None:
    """A reward of another token is paid at the policy's last one before it."""
    given = _given(
        [[4, 5], [6]],
        [[7, 20, 8, 1], [9, 1]],
        masks=[[True, False, True, True], [True, True]],
        token_rewards=[[0.25, 0.5, 0.0, 0.0], torch.tensor([0.0, 2.0])],
        old_logprobs=[[-1.0, float("nan"), -2.0, -3.0], torch.tensor([-4.0, -5.0])],
        values=[[0.1, 0.0, 0.2, 0.3], [0.4, 0.5]],
    )
    assert given.scores.within is not None
    assert given.scores.within.tolist() == [0.75, 0.0, 0.0, 0.0, 2.0]
    assert given.scores.total.tolist() == [1.75, 3.0]
    assert given.policy.logprobs is not None
    assert given.policy.logprobs.tolist() == [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert given.policy.values is not None
    assert given.policy.values.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


@pytest.mark.parametrize(
    ("given", "more", "says"),
    [
        (([[4], [5]], [[6], []]), {}, "response 1 is empty"),
        (([[43]], [[4]]), {}, r"prompt or response 0 has tokens outside \[0, 43\)"),
        (([[4]], [[43]]), {}, r"prompt or response 0 has tokens outside \[0, 43\)"),
        (([[4]], [[-1]]), {}, r"prompt or response 0 has tokens outside \[0, 43\)"),
        (([""], ["w1"]), {}, "prompt 0: the prompt is empty"),
        (([[4.5]], ["w1"]), {}, r"prompt 0 must be a text or token ids, got \[4.5\]"),
        ((["w1", "w2"], ["w2"]), {}, "2 prompts and 1 responses"),
        (
            (["w1", "w2"], ["w3 <eos>", "w3 <eos> <pad> <pad>"]),
            {},
            "responses: response 1 continues .*2 of 4: cut it",
        ),
        (([[4]], [[7, 1, 1]]), {}, "response 0 .* token 2 of 3: .* pass masks"),
        (([], []), {}, "at least one, got 0 prompts and 0 responses"),
        ((["w1 " * 60], ["w2 " * 9]), {}, "69 tokens; the model's context has 64"),
        (ONE, {"finish_reasons": []}, r"finish_reasons must be 1 of stop or length, got \[\]"),
        (ONE, {"finish_reasons": ["eos"]}, r"finish_reasons must be 1 of .*, got \['eos'\]"),
        (GIVEN, {"scores": [1.0]}, r"scores must be \[2\], got \[1\]"),
        (GIVEN, {"scores": [[1.0], [2.0]]}, r"scores must be \[2\], got \[2, 1\]"),
        (GIVEN, {"scores": [1.0, float("nan")]}, r"scores must be finite, got \[1.0, nan\]"),
        (GIVEN, {"masks": [[True]]}, "masks must be one list per response, got 1 for 2"),
        (GIVEN, {"masks": [[True] * 2, [True] * 2]}, "masks of response 0 .* expected 3, got 2"),
        (GIVEN, {"masks": [[1] * 3, [1] * 2]}, "masks of response 0 must be bool, got"),
        (GIVEN, {"masks": [[True] * 3, [False] * 2]}, "masks of response 1 has no True"),
        (GIVEN, {"token_rewards": [[0.0] * 3, [0.0, 1e300]]}, "token_rewards of response 1 must"),
        (GIVEN, {"old_logprobs": [[-1.0] * 3, [-1.0, float("nan")]]}, "old_logprobs of response 1"),
        (GIVEN, {"values": torch.zeros(2, 3)}, "values of response 1 .* expected 2, got 3"),
    ],
)
def test_invalid_input_is_refused(given: Any, more: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        _given(*given, **more)
