"""Episodes of several rows: an agent with two sub-agents and a compaction trains unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from fastppo.environments.loading import load_environment
from fastppo.ppo.rows import Rows
from fastppo.ppo.trainer import PPOTrainer
from fastppo.rollout import Rollout
from fastppo.rollout.decoder import DecoderEngine
from runs import ONE_STEP, Watched, make_trainer, records

pytest.importorskip("openai", reason="the package openai is not installed")
pytest.importorskip("uvicorn", reason="the package uvicorn is not installed")

AGENT = f"chat:{Path(__file__).parents[1] / 'helpers' / 'chat_agent.py'}:research"
CALL = '<tool_call>{"name":"search","arguments":{"q":"%s"}}</tool_call>'
CALLS = range(26, 40)
"""Words of the tiny tokenizer that are replaced by tool calls, so that a random policy makes some.
"""
TEMPLATE = (
    "{% if tools %}w25 {% endif %}{% for m in messages %}{{ m['role'] | replace('user', 'w20')"
    " | replace('assistant', 'w21') | replace('system', 'w22') | replace('tool', 'w23') }}"
    " {{ m['content'] }} <eos> {% endfor %}{% if add_generation_prompt %}w21{% endif %}"
)
ROWS, TURNS = 4, 8
"""Per episode: the agent, two sub-agents, the compacted conversation."""


def _tokenizer() -> Any:
    tokenizer = tiny.tokenizer()
    vocabulary = {
        CALL % word if word.startswith("w") and int(word[1:]) in CALLS else word: number
        for word, number in tiny.VOCABULARY.items()
    }
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = type(tokenizer)(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _trainer(directory: Path, **options: Any) -> PPOTrainer:
    environment = load_environment(AGENT)
    assert environment is not None
    return make_trainer(
        directory,
        tokenizer=_tokenizer(),
        environment=environment.function,
        rewards=None,
        prompts=[{"prompt": f"w{i}"} for i in range(4)],
        stop_token_ids=list(range(len(tiny.VOCABULARY))),
        **{"iterations": 1, "rollout_batch_size": 8, "max_turns": TURNS, **ONE_STEP, **options},
    )


class Seen(NamedTuple):
    """What a run sampled, and the gradient of its update."""

    turns: list[list[int]]
    """The whole conversation after each turn."""
    rows: Rows
    totals: list[float]
    gradient: list[Tensor]


def _gradients(trainer: PPOTrainer) -> list[Tensor]:
    """Return a list that the next optimizer step fills with the gradients."""
    gradients: list[Tensor] = []
    step = trainer.optimizer.step

    def recording(*arguments: Any, **options: Any) -> Any:
        parameters = trainer.model.causal_lm.parameters()
        gradients.extend(p.grad.clone() for p in parameters if p.grad is not None)
        return step(*arguments, **options)

    trainer.optimizer.step = recording  # type: ignore[method-assign]
    return gradients


def _train(directory: Path, **options: Any) -> tuple[PPOTrainer, Seen]:
    trainer = _trainer(directory, **options)
    turns: list[list[int]] = []

    def look(rollout: Rollout, prompt_ids: list[list[int]], sampling: Any) -> None:
        turns.extend(
            [*ids, *tokens] for ids, tokens in zip(prompt_ids, rollout.tokens, strict=True)
        )

    assert isinstance(trainer.engine, DecoderEngine)
    trainer.engine = Watched(trainer.engine, look)
    run = trainer.parts.episode_runner.run
    seen: list[tuple[Any, Rollout]] = []

    def running(*arguments: Any) -> Any:
        seen.append(run(*arguments))
        return seen[-1]

    trainer.parts.episode_runner.run = running  # type: ignore[assignment,method-assign]
    gradients = _gradients(trainer)
    trainer.train()
    ((prompts, rollout),) = seen
    assert rollout.rewards is not None
    totals = [sum(rewards) for rewards in rollout.rewards]
    turns = turns[-8 * TURNS :]  # before them come those of the self-check
    return trainer, Seen(turns, Rows.of(prompts.token_ids, rollout), totals, gradients)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"aggregation": "seq-mean-token-mean"},
        {"aggregation": "seq-mean-token-sum", "microbatch_size": 3},
        {"advantage": "group", "samples_per_prompt": 4, "vf_coef": 0.0},
    ],
)
def test_an_agent_with_sub_agents_and_a_compaction_trains(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    trainer, seen = _train(tmp_path / "train", **options)
    rows = seen.rows
    assert rows.episodes is not None
    assert rows.episodes.tolist() == [episode for episode in range(8) for _ in range(ROWS)]
    (line,) = records(trainer)
    assert (line["rows"], line["turns"]) == (ROWS, TURNS)
    assert line["reward"] == pytest.approx(sum(seen.totals) / 8)
    assert 0 < line["reward"] < 1

    # No token is encoded again: each conversation, as the engine read and wrote it, is the start of
    # a row, and the mask has the sampled tokens.
    assert rows.rollout.response_mask is not None
    whole = [[*ids, *row] for ids, row in zip(rows.prompt_ids, rows.rollout.tokens, strict=True)]
    assert len(seen.turns) == 8 * TURNS
    assert all(any(row[: len(turn)] == turn for row in whole) for turn in seen.turns)
    assert sum(map(sum, rows.rollout.response_mask)) == 8 * TURNS  # a turn is one token
    for row, mask, ids in zip(whole, rows.rollout.response_mask, rows.prompt_ids, strict=True):
        ends = [len(ids) + i + 1 for i, is_sampled in enumerate(mask) if is_sampled]
        assert all(row[:end] in seen.turns for end in ends)

    other = _trainer(tmp_path / "step", **options)
    gradient = _gradients(other)
    other.step(
        rows.prompt_ids,
        rows.rollout.tokens,
        seen.totals,
        rows.rollout.finish_reasons,
        masks=rows.rollout.response_mask,
        episodes=rows.episodes.tolist(),
    )
    assert len(seen.gradient) == len(gradient) > 0
    scale = max(float(grad.abs().max()) for grad in gradient)
    assert scale > 0
    for trained, stepped in zip(seen.gradient, gradient, strict=True):
        # fp32: old logprobs and values are the sampler's in the one, recomputed in the other.
        torch.testing.assert_close(trained, stepped, rtol=1e-4, atol=1e-5 * scale)


def test_calls_are_parsed_while_training(tmp_path: Path) -> None:
    trainer, _ = _train(tmp_path, iterations=1)
    samples = (Path(trainer.config.output_dir) / "samples.jsonl").read_text()
    assert '"role": "tool"' in samples


@pytest.mark.parametrize(
    ("scores", "episodes", "word"),
    [
        ([1.0] * 3, [0, 0, 1], "scores"),
        ([1.0] * 2, [0, 1, 0], "adjacent"),
        ([1.0], [0], "episodes"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    tmp_path: Path, scores: list[float], episodes: list[int], word: str
) -> None:
    with pytest.raises(ValueError, match=word):
        _trainer(tmp_path).step([[4], [5], [6]], [[7], [8], [9]], scores, episodes=episodes)
