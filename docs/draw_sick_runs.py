"""Healthy and sick runs, with the metrics that tell them apart.

    python docs/draw_sick_runs.py runs/sick

Runs PPO on a toy with one fault planted in each run and draws docs/does-not-learn.svg and
docs/negative-kl.svg from the records. The toy: a small model with random weights that is paid for
the share of twelve words that its response has. A run that is there already is not run again.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fastppo import PPOConfig, PPOTrainer
from fastppo.rollout import Rollout, Sampling
from fastppo.rollout.generate import GenerateEngine
from fastppo.run.log import RunLog, read_jsonl
from fastppo.run.report import write_report

WORDS = {word: i for i, word in enumerate(["<pad>", "<eos>", *(f"w{i}" for i in range(30))])}
PROMPTS = [{"prompt": f"w{i} w{(7 * i + 1) % 30}"} for i in range(30)]
LENGTH = 12


WANTED = {f"w{i}" for i in range(LENGTH)}


def share_of_wanted(prompts: list[str], completions: list[str]) -> list[float]:
    """How many of twelve words are there, each once: saying one over and over pays little."""
    return [len(WANTED & set(text.split())) / LENGTH for text in completions]


def the_same_for_all(prompts: list[str], completions: list[str]) -> list[float]:
    return [0.5] * len(completions)


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel(WORDS, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = LlamaConfig(
        vocab_size=len(WORDS), num_attention_heads=4, max_position_embeddings=64, **shape, **ids
    )
    causal_lm = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in causal_lm.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)  # logits that differ
    return causal_lm


class OldWeights:
    """An engine that nobody tells of updates: it draws from the first policy for ever."""

    def __init__(self, causal_lm: LlamaForCausalLM) -> None:
        self.engine = GenerateEngine(copy.deepcopy(causal_lm), 0)

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        return self.engine.generate(prompt_ids, sampling)


def step_by_step(trainer: PPOTrainer) -> None:
    """A loop of its own around `PPOTrainer.step` that leaves the padding after the end in its
    responses. (`train` compares the sampler's logprobs at the start, and refuses such an engine.)
    """
    engine = GenerateEngine(trainer.model.causal_lm, 0)
    log = RunLog(trainer.config.output_dir, trainer.config)
    for iteration in range(trainer.config.iterations):
        prompts = trainer.prompts.at(32 * iteration, 32, 0)
        found = engine.generate(prompts.token_ids, trainer.sampling)
        texts = trainer.completions(prompts, found)
        padded = [ids + [0] * (LENGTH - len(ids)) for ids in found.tokens]
        scores = share_of_wanted(prompts.prompts, texts)
        log.metrics(iteration, trainer.step(prompts.token_ids, padded, scores))
    log.close()
    write_report(trainer.config.output_dir)


class Case(NamedTuple):
    label: str
    colour: str
    options: Mapping[str, Any] = MappingProxyType({})
    reward: Any = share_of_wanted
    engine: Any = None
    train: Callable[[PPOTrainer], Any] = PPOTrainer.train


HEALTHY = Case("healthy", "#1f5fa8")
DOES_NOT_LEARN = (
    HEALTHY,
    Case("rate a thousand times too low", "#999999", {"learning_rate": 2e-6}),
    Case("rate fifty times too high", "#c8553d", {"learning_rate": 0.1}),
    Case("one reward for all", "#8a5a9e", reward=the_same_for_all),
    Case("β a hundred times too high", "#3a8d5d", {"kl_coef": 0.5}),
)
NEGATIVE_KL = (
    HEALTHY,
    Case("the sampler keeps its first weights", "#c8553d", engine=OldWeights),
    Case("tokens after the end are counted", "#8a5a9e", train=step_by_step),
)


def run(directory: Path, case: Case, iterations: int) -> list[dict[str, Any]]:
    """The records of a case, run if they are not there."""
    output = directory / case.label.replace(" ", "-")
    if not (output / "report.html").exists():
        config = PPOConfig(
            **{
                "output_dir": str(output),
                "iterations": iterations,
                "rollout_batch_size": 32,
                "microbatch_size": 32,
                "max_new_tokens": LENGTH,
                "learning_rate": 2e-3,
                "kl_coef": 0.005,  # for a reward between 0 and 1
                "minibatches": 2,
                "device": "cpu",
                "checkpoint_interval": 0,
                "warn_if": [],
                **case.options,
            }
        )
        causal_lm = model()
        trainer = PPOTrainer(
            config,
            model=causal_lm,
            tokenizer=tokenizer(),
            prompts=PROMPTS,
            rewards=[case.reward],
            engine=None if case.engine is None else case.engine(causal_lm),
            console=Console(quiet=True),
        )
        case.train(trainer)
    return read_jsonl(output / "metrics.jsonl")


def draw(
    path: Path,
    cases: tuple[Case, ...],
    panels: tuple[tuple[str, str], ...],
    directory: Path,
    iterations: int,
) -> None:
    """A panel for each (metric, title), a line for each case."""
    plt.rcParams.update({"font.size": 10, "font.family": "sans-serif", "svg.hashsalt": "fastppo"})
    rows = -(-len(panels) // 3)
    figure, grid = plt.subplots(rows, 3, figsize=(10, 2.7 * rows + 0.5), squeeze=False)
    axes, unused = grid.flat[: len(panels)], grid.flat[len(panels) :]
    for axis in unused:
        axis.set_axis_off()
    for case in cases:
        records = run(directory, case, iterations)
        for axis, (metric, _) in zip(axes, panels, strict=True):
            points = [(r["iteration"], r[metric]) for r in records if metric in r]
            wide = 2.6 if case is HEALTHY else 1.5
            if points:
                axis.plot(*zip(*points, strict=True), color=case.colour, linewidth=wide)
    for axis, (_, title) in zip(axes, panels, strict=True):
        axis.set_title(title, loc="left", fontweight="bold", fontsize=10)
        axis.set_xlabel("iteration")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.axhline(0, color="#999999", linewidth=0.8)
    lines = [plt.Line2D([], [], color=case.colour, linewidth=2) for case in cases]
    labels = [case.label for case in cases]
    if len(unused):
        figure.tight_layout()
        unused[0].legend(lines, labels, loc="center", frameon=False)
    else:
        figure.tight_layout(rect=(0, 0.09, 1, 1))
        figure.legend(lines, labels, loc="lower center", ncols=len(cases), frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where the runs go")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw(
        options.out / "does-not-learn.svg",
        DOES_NOT_LEARN,
        (
            ("reward", "reward"),
            ("kl", "kl, nats"),
            ("clip_fraction", "clip_fraction"),
            ("entropy", "entropy, nats per token"),
            ("reward_std", "reward_std"),
        ),
        options.directory,
        options.iterations,
    )
    draw(
        options.out / "negative-kl.svg",
        NEGATIVE_KL,
        (("kl", "kl, nats"), ("mismatch/mean", "mismatch/mean, nats"), ("reward", "reward")),
        options.directory,
        options.iterations,
    )
