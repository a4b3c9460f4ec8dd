"""A class of TRL's `environment_factory`: the same turns give the same conversation, mask and
reward as in GRPOTrainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from environments import Scripted
from tokenizers import AddedToken

from fastppo.data.prompts import Prompts
from fastppo.environments.loading import load_environment
from fastppo.environments.turns import Turns
from fastppo.rollout import Sampling

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl", "1.16", reason="expected pip install trl==1.16.*")
templates = pytest.importorskip("trl.chat_template_utils")

pytestmark = pytest.mark.filterwarnings("default")  # TRL's own warnings

PROMPT = [{"role": "user", "content": "Hello."}]

TURNS = [
    '<tool_call>\n{"name": "price", "arguments": {"item": "tea"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "price", "arguments": {"item": "none"}}\n</tool_call><|im_end|>',
    '<tool_call>\n{"name": "cost", "arguments": {}}\n</tool_call><|im_end|>',
    "It is 2.5.<|im_end|>",
]


class Shop:
    """An environment as TRL's documentation writes them."""

    def __init__(self) -> None:
        self.reward = 0.0

    def reset(self, **kwargs: Any) -> str | None:
        self.reward = 0.0
        return f" Buy {kwargs['item']}."

    def price(self, item: str) -> float:
        """
        The price of an item.

        Args:
            item: Its name.

        Returns:
            The price.
        """
        if item == "none":
            raise ValueError("sold out")
        self.reward += 0.5
        return 2.5

    def get_reward(self) -> float:
        return self.reward


def _tokenizer() -> Any:
    """Return a byte tokenizer with Qwen3's chat template and TRL's response template."""
    tokenizer = tiny.byte_tokenizer()
    special = [AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")]
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.pad_token = "<eos>"
    tokenizer.chat_template = templates.qwen3_chat_template
    return templates.add_response_schema(tokenizer)


def test_the_same_turns_give_the_same_episode(tmp_path: Path, monkeypatch: Any) -> None:
    tokenizer = _tokenizer()
    ids = [tokenizer(turn)["input_ids"] for turn in TURNS]
    theirs = _run_by_trl(tokenizer, ids, tmp_path, monkeypatch)

    term = load_environment(Shop)
    assert term is not None
    stop = tokenizer.eos_token_id
    episode_runner = Turns(term.function, tokenizer, max_turns=4)
    sampling = Sampling(max_new_tokens=400, stop_token_ids=(stop,))
    prompts = Prompts([PROMPT], [[1]], {"item": ["tea"]})
    prompts, rollout = episode_runner.run(prompts, Scripted(ids, stop=(stop,)), sampling)

    assert prompts.token_ids[0] == theirs["prompt_ids"]
    assert rollout.tokens[0] == theirs["completion_ids"]
    assert rollout.response_mask is not None
    assert [int(written) for written in rollout.response_mask[0]] == theirs["tool_mask"]
    assert rollout.rewards is not None
    assert sum(rollout.rewards[0]) == theirs["reward"] == 0.5
    assert rollout.calls == [["answered", "raised", "unknown"]]


def _run_by_trl(tokenizer: Any, ids: Any, folder: Path, monkeypatch: Any) -> dict[str, Any]:
    """Run the turns in a training step of GRPOTrainer."""
    seen: dict[str, Any] = {}
    turns = iter(ids)

    class Trainer(trl.GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            turn = next(turns)
            return [list(turn) for _ in prompt_ids], None

        def _generate(self, prompts: Any) -> Any:
            made = super()._generate(prompts)
            names = ("prompt_ids", "completion_ids", "tool_mask")
            seen.update({name: list(rows[0]) for name, rows in zip(names, made, strict=False)})
            return made

        def _calculate_rewards(self, *arguments: Any) -> Any:
            rewards = super()._calculate_rewards(*arguments)
            seen["reward"] = rewards[0].sum().item()
            return rewards

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    config = tiny.CONFIGS["qwen3"]()
    config.vocab_size = len(tokenizer)
    config.max_position_embeddings = 4096
    rows = [{"prompt": PROMPT, "item": "tea"}] * 2
    trainer = Trainer(
        model=tiny.model_of(config),
        args=trl.GRPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=2000,
            max_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
        ),
        processing_class=tokenizer,
        environment_factory=Shop,
        train_dataset=datasets.Dataset.from_list(rows),
    )
    trainer.train()
    return seen
