"""Options of `fastppo generate`, importable without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fastppo.ppo.options.rewards import TurnOptions
from fastppo.ppo.options.rollout import check_stop_strings
from fastppo.run.options import option


@dataclass(kw_only=True, frozen=True)
class GenerateConfig(TurnOptions):
    """Options of `fastppo generate`. Lengths are in tokens."""

    models: Sequence[str] = option(
        [], "Required. One or more policies: directories, checkpoints or hub names"
    )
    prompt: str | None = option(None, "One prompt, a string; this or prompts is required")
    prompts: str | None = option(
        None, "Prompts: .jsonl, .parquet, a save_to_disk directory or a hub name"
    )
    prompt_column: str = option("prompt", "Column of the prompt: a string or chat messages")
    split: str = option("train", "Split of a datasets directory or hub dataset")
    num_prompts: int = option(8, "Number of prompts, from the top of the file", minimum=1)
    rewards: Sequence[str] = option([], "file.py:function, module:function, or a reward model")
    num_samples: int = option(1, "Number of completions per prompt and policy", minimum=1)
    max_new_tokens: int = option(128, "Maximum length of a completion in tokens", minimum=1)
    temperature: float = option(1.0, "Sampling temperature; 0 is greedy", minimum=0)
    top_k: int = option(0, "Top-k sampling; 0 disables it", minimum=0)
    top_p: float = option(1.0, "Top-p (nucleus) sampling; 1 disables it", above=0, maximum=1)
    stop_token_ids: Sequence[int] | None = option(
        None, "Token ids that end a completion; default: the EOS tokens of the model", minimum=0
    )
    stop_strings: Sequence[str] = option([], "Strings that end a completion")
    seed: int = option(
        0, "Seed of sampling, the same for each policy", minimum=0, maximum=2**32 - 1
    )
    device: str = option("auto", "auto (a CUDA GPU if there is one), cpu, cuda, cuda:1, …, mps")
    param_dtype: Literal["float32", "bfloat16"] = option(
        "float32", "Dtype of the weights; checkpoints keep the dtype of their run"
    )

    def check(self) -> None:
        check_stop_strings(self.stop_strings)
        if self.prompt is not None and self.prompts is not None:
            raise ValueError("expected prompt or prompts, got both")
