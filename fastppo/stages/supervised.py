"""What stages 1 and 2 have in common: options, records, checkpoints and the shape of their loss.

Both are a thin layer over `transformers.Trainer`. A stage's loss is a sum over items (completion
tokens in SFT, prompts in the reward model) divided by the items of the whole optimiser step, so it
does not depend on how a step is cut into batches. Matrix products run under autocast here and not
by Trainer's own means, because the losses call trunk and head apart.

Several processes share the rows of each batch and hold a shard of every weight, as in PPO
(`fastppo.models.sharding`); the gradient is that of the whole batch. Trainer takes each of them for
the only one: all make the same batches, metrics and decisions, and the first writes. Its own FSDP2
shards the model that it is given, whose `forward` no loss here calls, and only on GPUs.
"""

from __future__ import annotations

import functools
import json
import math
import random
import re
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from rich.console import Console
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from fastppo.data.rows import DataError
from fastppo.data.world import World, hidden, join
from fastppo.models.device import autocast, choose_device, compute_dtype, device_name
from fastppo.models.pretrained import UNFINISHED
from fastppo.models.sharding import like, settle, shard_as_it_is, whole
from fastppo.models.trunk import context_length
from fastppo.run import manifest
from fastppo.run.checkpoint import CHECKPOINTS_KEPT, CheckpointError
from fastppo.run.identity import check_same_run, of_run
from fastppo.run.lock import held
from fastppo.run.log import SharedLog, check_no_run, progress, read_jsonl, say
from fastppo.run.options import Options, WeightOptions, option
from fastppo.run.signals import Stopped, StopRequest, listening


@dataclass(kw_only=True, frozen=True)
class DataOptions(Options):
    """Model and data."""

    model: str = option("", "Required. Directory or hub name of the model to start from")
    data: str = option(
        "", "Required. Rows: .jsonl, .parquet, a save_to_disk directory or a hub name"
    )
    split: str = option("train", "Split of a datasets directory or hub dataset")
    eval_data: str | None = option(
        None, "Held-out rows in the same form; none given means a share of the data"
    )
    eval_share: float = option(
        0.05, "Share of the rows held out, by prompt; 0 holds none out", minimum=0, maximum=0.9
    )
    max_length: int | None = option(
        None, "Longest row, tokens; none given means the model's context", minimum=2
    )


@dataclass(kw_only=True, frozen=True)
class StepOptions(Options):
    """Optimizer."""

    epochs: float = option(1.0, "Passes over the data", above=0)
    batch_size: int = option(16, "Rows per forward and backward pass", minimum=1)
    gradient_accumulation: int = option(
        4, "Batches per optimiser step; the loss is the mean over all of them", minimum=1
    )
    learning_rate: float = option(2e-5, "Peak learning rate of AdamW", above=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = option(
        "cosine", "Learning rate after warm-up: constant, or decay to 0 over the run"
    )
    warmup: float = option(
        0.03, "Linear warm-up, share of the optimiser steps", minimum=0, maximum=0.9
    )
    weight_decay: float = option(0.0, "AdamW's weight decay, on matrices", minimum=0)
    max_grad_norm: float = option(1.0, "Gradients are scaled down to this norm", above=0)


@dataclass(kw_only=True, frozen=True)
class StageOptions(Options):
    """Run."""

    output_dir: str = option("runs/stage", "Run directory; the model is saved in it")
    seed: int = option(
        0, "Seed of shuffling, splitting and initialisation", minimum=0, maximum=2**32 - 1
    )
    device: str = option("auto", "auto (a GPU if there is one), cpu or cuda")
    checkpoint_interval: int = option(
        500, "Optimiser steps between checkpoints; 0 writes none", minimum=0
    )
    resume: bool = option(False, "Go on from the newest whole checkpoint of output_dir")
    allow_config_change: bool = option(
        False, "Resume although options, model or data make it another run"
    )


@dataclass(kw_only=True, frozen=True)
class SupervisedConfig(DataOptions, WeightOptions, StepOptions, StageOptions):
    """Options that SFT and the reward model share. Lengths are in tokens."""

    def check(self) -> None:
        if self.precision == "fp16":
            raise ValueError(
                "precision=fp16 needs the loss scale that `fastppo train` has: this stage takes "
                "bf16 or fp32"
            )

    @property
    def torch_device(self) -> torch.device:
        """Raises ValueError for a GPU with an index: `transformers.Trainer` takes the first one."""
        kind, _, index = self.device.partition(":")
        if kind == "cuda" and index not in ("", "0"):
            raise ValueError(
                f"device must be auto, cpu or cuda, got {self.device}; choose a GPU with "
                f"CUDA_VISIBLE_DEVICES={index}"
            )
        return choose_device(self.device)

    @property
    def compute_dtype(self) -> torch.dtype | None:
        return compute_dtype(self.precision, self.torch_device)


IDENTITY = (
    *("param_dtype", "lora_rank", "lora_alpha", "lora_target_modules"),
    *(
        "split",
        "eval_data",
        "eval_share",
        "max_length",
        "seed",
        "batch_size",
        "gradient_accumulation",
    ),
    "center_coef",
)
"""Options that say which run it is, as for PPO; model and data are known by their content."""

NAME = re.compile(r"^checkpoint-(\d+)$")
"""Of a checkpoint of `transformers.Trainer`, by its step."""


# ---------------------------------------------------------------------------------------- the data


class Split(NamedTuple):
    """Rows to train on and rows held out."""

    train: list[Any]
    held_out: list[Any]


def split_by_prompt(rows: Sequence[Any], prompts: Sequence[Any], share: float, seed: int) -> Split:
    """Holds out all rows of some prompts, so that no prompt is on both sides.

    Args:
        rows, prompts: of one length; prompts are strings or chat messages.
        share: of the rows, in [0, 1). Prompts are drawn in a shuffled order until it is reached.

    Raises:
        DataError: nothing would be left to train on.
    """
    if share == 0:
        return Split(list(rows), [])
    keys = [json.dumps(prompt, sort_keys=True, default=str) for prompt in prompts]
    counts = Counter(keys)
    order = sorted(counts)
    random.Random(seed).shuffle(order)
    held: set[str] = set()
    wanted, taken = max(1, round(share * len(rows))), 0
    for key in order:
        if taken >= wanted:
            break
        held.add(key)
        taken += counts[key]
    if taken == len(rows):
        raise DataError(
            f"{len(rows)} rows of {len(order)} prompts cannot be split by prompt with "
            f"eval_share={share:g}; give more prompts, a file of eval_data, or eval_share=0"
        )
    train = [row for row, key in zip(rows, keys, strict=True) if key not in held]
    return Split(train, [row for row, key in zip(rows, keys, strict=True) if key in held])


def row_limit(model: Any, max_length: int | None) -> int | None:
    """The longest row, tokens: what is asked for, within what the model takes.

    Raises:
        ValueError: more is asked for than the model takes.
    """
    context = context_length(model)
    if max_length is not None and context is not None and max_length > context:
        raise ValueError(f"max_length={max_length} is beyond the model's context of {context}")
    return context if max_length is None else max_length


# ----------------------------------------------------------------------------------- the training


class SupervisedTrainer(Trainer, ABC):
    """`Trainer` with a loss per item; a stage gives `items`, `loss_sum` and `measure`.

    Args:
        model: what is trained and put into checkpoints; a PEFT model has its adapters saved alone.
        rows, eval_rows: encoded, as `collate` takes them.
        fingerprints: of the model and the data, by name.
        world: the processes that share the rows of each batch.
    """

    title: str
    root: nn.Module
    """What several processes shard; the passes of `loss_sum` are its own."""
    trunk: Any
    entries: Sequence[str] = ()
    """Methods of the root that run a pass and are not `forward`."""

    def __init__(
        self,
        config: SupervisedConfig,
        model: Any,
        rows: list[Any],
        eval_rows: list[Any],
        collate: Callable[[list[Any]], dict[str, Tensor]],
        callbacks: list[TrainerCallback] | None = None,
        fingerprints: Mapping[str, str] | None = None,
        world: World | None = None,
    ) -> None:
        self.config = config
        self.world = world or World()
        self.collate = collate
        self._unfinished: Path | None = None
        self._weights: dict[str, Tensor] | None = None
        """The whole weights, while the first of several processes writes a checkpoint."""
        self.identity = of_run(config, fingerprints or {})
        self.say: Callable[[str], None] = print
        super().__init__(
            model=model,
            args=_training_arguments(config, self.world, evaluate=bool(eval_rows)),
            train_dataset=rows,
            eval_dataset=eval_rows or None,
            data_collator=self.own_rows,
            callbacks=[Records(config, self.world), *(callbacks or [])],
        )
        self.remove_callback(PrinterCallback)
        # The loss is divided by the items of all batches of the step: Trainer must not divide
        # again. Older releases of transformers read the first name, newer ones the second.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True

    @abstractmethod
    def items(self, batch: dict[str, Tensor]) -> float:
        """What the loss is a mean over."""

    @abstractmethod
    def loss_sum(self, batch: dict[str, Tensor]) -> Tensor:
        """The sum of the items' losses, 0-d."""

    @abstractmethod
    def measure(self, rows: list[Any]) -> dict[str, float]:
        """Metrics of held-out rows."""

    @abstractmethod
    def without_items(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """A batch of whose loss nothing is left: of a process that has no row of a batch, and has
        to run all the same, for the others wait."""

    def own_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        """This process's rows of a batch, collated."""
        own = self.world.own(len(rows))
        return self.collate(rows[own.start : own.stop]) if own else self._filler(rows)

    def _filler(self, rows: list[Any]) -> dict[str, Tensor]:
        return self.without_items(self.collate(rows[:1]))

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, _ = super().get_batch_samples(*args, **kwargs)
        count = sum(self.items(batch) for batch in batches)
        return batches, torch.tensor(sum(self.world.gather(float(count))), device=self.args.device)

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        with autocast(self.args.device, self.config.compute_dtype):
            total = self.loss_sum(inputs)
        loss = total / (self.items(inputs) if num_items_in_batch is None else num_items_in_batch)
        if self.world.size == 1:
            return loss
        # Its value is the whole batch's, for the log; its gradient that of this process's rows.
        return loss + (self.world.sum(loss.detach()) - loss.detach())

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, over shards. It comes after a checkpoint's weights and before its states."""
        if self.world.size == 1:
            return super().create_optimizer(*args, **kwargs)
        shard_as_it_is(self.root, self.trunk, self.world, self.entries)
        optimizer = super().create_optimizer(*args, **kwargs)
        optimizer.register_load_state_dict_pre_hook(_sharded_states)
        return optimizer

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        norm = super()._get_grad_norm(*args, **kwargs)
        return whole(norm) if isinstance(norm, Tensor) else norm

    @torch.no_grad()
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Held-out metrics over items, where Trainer's own are a mean of means over batches."""
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        assert self.model is not None
        self.model.eval()
        with autocast(self.args.device, self.config.compute_dtype):
            measured = self.measure(rows)  # type: ignore[arg-type]
        if self.world.size > 1:
            settle(self.root)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in measured.items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def batches(self, rows: list[Any]) -> Iterator[dict[str, Tensor]]:
        """Collated batches of rows, in order, on the device: of each this process's share."""
        size = self.config.batch_size
        for start in range(0, len(rows), size):
            batch = self.own_rows(rows[start : start + size])
            yield {name: value.to(self.args.device) for name, value in batch.items()}

    def run(self, console: Console) -> dict[str, float]:
        """Trains, from the newest whole checkpoint where `resume` says so.

        Returns:
            dict: `loss`, the mean of the last tenth of the logged ones; the last held-out metrics.

        Raises:
            Stopped: a signal asked for it; a checkpoint is written first.
            CheckpointError: a checkpoint could not be written.
        """
        self.say = functools.partial(say, console)
        newest = self.world.first(self._resume_from) if self.config.resume else None
        self.args.eval_on_start = bool(self.eval_dataset) and newest is None
        with progress(self.title, console) as show, listening(self.world) as stop_request:
            self.add_callback(ProgressBar(show))
            self.add_callback(Interruptions(stop_request))
            self.train(resume_from_checkpoint=None if newest is None else str(newest))
        if stop_request.stop and self.state.global_step < self.state.max_steps:
            done, end = self.state.global_step, self.state.max_steps
            newest = self.world.first(lambda: newest_checkpoint(self.config.output_dir))
            next_run = f"`--resume true` goes on from {newest}"
            if newest is None:
                next_run = "no checkpoint was written"
            how_far = f" after {done} of {end} steps; {next_run}"
            raise Stopped(stop_request.stop, how_far)
        records = self.state.log_history
        losses = [record["loss"] for record in records if "loss" in record]
        tail = losses[-max(1, len(losses) // 10) :]
        result = {"loss": sum(tail) / max(1, len(tail))}
        if self.eval_dataset:
            last = [r for r in records if any(key.startswith("eval_") for key in r)][-1:]
            if not last or last[0]["step"] != self.state.global_step:
                last = [self.evaluate()]
            result |= {key: value for key, value in last[0].items() if key.startswith("eval_")}
        return result

    def _resume_from(self) -> Path | None:
        """The newest whole checkpoint, if there is one and it is of this run."""
        run_dir = Path(self.config.output_dir)
        found = manifest.newest(checkpoints(run_dir))
        if found is None:
            self.say(f"no checkpoint in {run_dir}: starting from the beginning")
            return None
        for reason in found.reasons:
            self.say(f"passed over {reason}")
        before, allowed = found.about["run"], self.config.allow_config_change
        for sentence in check_same_run(found.path, before, self.identity, IDENTITY, allowed):
            self.say(sentence)
        for path in found.passed_over:
            self.say(f"{path.name} is set aside as {manifest.set_aside(path).name}")
        self.say(f"resuming from {found.path}")
        return found.path

    def _get_output_dir(self, *args: Any, **kwargs: Any) -> str:
        """Where Trainer writes a checkpoint: a name that is not one, until all of it is there."""
        return str(self._unfinished or super()._get_output_dir(*args, **kwargs))

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Trainer's, with a manifest, without which it does not count; then the oldest ones go. Of
        several processes the first writes it, whole."""
        if self.world.size == 1:
            self._write_checkpoint(*args, **kwargs)
            return
        settle(self.root)
        optimizer: Any = self.optimizer
        self._weights = tree_map(self._on_the_first, cast(Any, self.model).state_dict())
        states = tree_map(self._on_the_first, optimizer.state_dict())
        optimizer.state_dict = lambda: states
        try:
            self.world.first(lambda: self._write_checkpoint(*args, **kwargs))
        finally:
            del optimizer.state_dict
            self._weights = None

    def _on_the_first(self, value: Any) -> Any:
        """A tensor whole, on the first process's CPU and nowhere else."""
        if not isinstance(value, Tensor):
            return value
        value = whole(value)
        return value.cpu() if self.world.is_main else None

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, self._weights if state_dict is None else state_dict)

    def _write_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        run_dir = Path(self.config.output_dir)
        path = run_dir / f"checkpoint-{self.state.global_step}"
        shutil.rmtree(run_dir / UNFINISHED, ignore_errors=True)  # of a run that was killed
        self._unfinished = run_dir / UNFINISHED
        try:
            super()._save_checkpoint(*args, **kwargs)
            written = self._unfinished / path.name
            manifest.write(written, self.state.global_step, {"run": self.identity})
            shutil.rmtree(path, ignore_errors=True)
            written.rename(path)
            manifest.sync(run_dir)
        except (OSError, SafetensorError, RuntimeError) as error:  # torch.save's is the last
            older = newest_checkpoint(run_dir)
            stays = "there is none yet" if older is None else f"the newest is {older}"
            sentence = f"checkpoint {path} could not be written: {error}; {stays}"
            raise CheckpointError(sentence) from error
        finally:
            shutil.rmtree(self._unfinished, ignore_errors=True)
            self._unfinished = None
        for old in checkpoints(run_dir)[:-CHECKPOINTS_KEPT]:
            shutil.rmtree(old, ignore_errors=True)


def _sharded_states(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """An optimiser's state with whole tensors, as its weights are held."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    states = {
        index: {
            name: like(value, weights[index]) if isinstance(value, Tensor) else value
            for name, value in entry.items()
        }
        for index, entry in state["state"].items()
    }
    return {**state, "state": states}


class RankArguments(TrainingArguments):
    """Trainer's arguments on a GPU that is not the first."""

    own_device: torch.device | None = None

    @property
    def device(self) -> torch.device:
        return super().device if self.own_device is None else self.own_device


def _training_arguments(
    config: SupervisedConfig, world: World, *, evaluate: bool
) -> TrainingArguments:
    on_cpu = config.torch_device.type == "cpu"
    arguments = RankArguments(
        output_dir=config.output_dir,
        num_train_epochs=config.epochs,
        per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.gradient_accumulation,
        learning_rate=config.learning_rate,
        # transformers' `constant` has no warm-up.
        lr_scheduler_type=config.lr_schedule.replace("constant", "constant_with_warmup"),
        warmup_steps=config.warmup,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        logging_steps=1,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # a loss that is not a number is to be seen
        eval_strategy="epoch" if evaluate else "no",
        save_strategy="steps" if config.checkpoint_interval else "no",
        save_steps=config.checkpoint_interval or 500,
        report_to="none",
        seed=config.seed,
        use_cpu=on_cpu,
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=not on_cpu,
    )
    if not on_cpu:
        arguments._n_gpu = 1  # else Trainer spreads each batch over all GPUs by DataParallel
        if world.device is not None:
            arguments.own_device = world.device
            torch.cuda.set_device(world.device)  # making the arguments has set the first
    return arguments


def checkpoints(run_dir: str | Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    found = [path for path in Path(run_dir).glob("checkpoint-*") if NAME.match(path.name)]
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def newest_checkpoint(run_dir: str | Path) -> Path | None:
    """The newest whole checkpoint, None if there is none."""
    try:
        found = manifest.newest(checkpoints(run_dir))
    except manifest.DamagedError:
        return None
    return None if found is None else found.path


# ------------------------------------------------------------------------------------- the records


def open_run(config: SupervisedConfig, world: World | None = None) -> Path:
    """The run directory.

    Raises:
        ValueError: it holds a run already, and `resume` is off.
    """
    run_dir = Path(config.output_dir)

    def open_it() -> None:
        if not config.resume:
            check_no_run(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)

    (world or World()).first(open_it)
    return run_dir


Train = TypeVar("Train", bound=Callable[..., dict[str, float]])


def holding_its_directory(train: Train) -> Train:
    """A stage that holds its run directory from before it loads anything to its end; it is given
    the processes that torchrun started."""

    @functools.wraps(train)
    def holding(config: SupervisedConfig, **parts: Any) -> dict[str, float]:
        world = join(config.torch_device)
        with hidden(), world.answering(), held(config.output_dir, world):
            return train(config, world=world, **parts)

    return cast(Train, holding)


class Records(TrainerCallback):
    """Trainer's log as the records of a run directory, by optimiser step.

    Raises:
        FloatingPointError: a loss is not a finite number.
    """

    def __init__(self, config: SupervisedConfig, world: World | None = None) -> None:
        self.config = config
        self.world = world or World()
        self._log: SharedLog | None = None
        self._written: set[tuple[int, frozenset[str]]] = set()
        """(step, names) of the records: Trainer logs the last ones again after a resume."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        first = state.global_step + 1 if state.global_step else 0
        run_dir = Path(self.config.output_dir)
        device = device_name(args.device)
        about: dict[str, Any] = {"index": "step", "first": first, "device": device}
        self._log = SharedLog(self.world, run_dir, self.config, **about)
        for record in self.world.first(lambda: read_jsonl(run_dir / "metrics.jsonl")):
            self._written.add((record.pop("step"), frozenset(record)))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "train_runtime" in logs:
            return  # Trainer's summary of the run
        assert self._log is not None
        numbers = {name: float(value) for name, value in logs.items()}
        key = state.global_step, frozenset(numbers)
        if key not in self._written:
            self._written.add(key)
            self._log.metrics(state.global_step, numbers)
        if not math.isfinite(numbers.get("loss", 0.0)):
            raise FloatingPointError(
                f"the loss is {numbers['loss']} at step {state.global_step}; lower learning_rate"
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self._log is not None
        self._log.close()


class Interruptions(TrainerCallback):
    """A checkpoint, and an end after the step at hand, on request."""

    def __init__(self, stop_request: StopRequest) -> None:
        self.stop_request = stop_request

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.stop_request.checkpoint_wanted() or self.stop_request.stop:
            control.should_save = True
        if self.stop_request.stop:
            control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.stop_request.stop and not float(state.epoch).is_integer():
            control.should_evaluate = False  # an epoch that is cut short has no held-out metrics


class ProgressBar(TrainerCallback):
    """Shows Trainer's steps; `show` is what `fastppo.run.log.progress` gives."""

    def __init__(self, show: Callable[..., None]) -> None:
        self.show = show

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.show(completed=state.global_step, total=state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.show(status=f"loss {float(logs['loss']):.3f}")
