"""What SFT and the reward model share: data, the trainer, checkpoints.

Both are a thin layer over `transformers.Trainer`. A stage's loss is a sum over items (completion
tokens in SFT, prompts in the reward model) divided by the items of the whole optimiser step, so it
does not depend on how a step is cut into batches. Matrix products run under autocast here and not
by Trainer's own means, because the losses call trunk and head separately.

Several processes share the rows of each batch and hold a shard of every weight, as in PPO
(`fastppo.models.sharding`); the gradient is that of the whole batch. Each process's Trainer is
unaware of the others: all make the same batches, metrics and decisions, and the first writes.
Trainer's own FSDP2 shards the model that it is given, whose `forward` no loss here calls, and only
on GPUs.
"""

from __future__ import annotations

import functools
import json
import random
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from rich.console import Console
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from fastppo.data import fingerprint
from fastppo.data.files import UNFINISHED, written_whole
from fastppo.data.rows import DataError, Rows, load_rows
from fastppo.data.world import World, join, torchrun_hidden
from fastppo.models.adapters import full_state
from fastppo.models.device import autocast, busy_cpu
from fastppo.models.sharding import full_tensor, reshard_for_update, shard_as_it_is, sharded_like
from fastppo.models.trunk import context_length
from fastppo.run import manifest
from fastppo.run.checkpoint import CHECKPOINTS_KEPT, checkpoints, failed, resumable
from fastppo.run.console import lasting_console
from fastppo.run.directory import check_no_run
from fastppo.run.identity import of_run
from fastppo.run.lock import run_lock
from fastppo.run.progress import progress, say
from fastppo.run.signals import listening
from fastppo.stages.callbacks import Interruptions, ProgressBar, Records
from fastppo.stages.options import IDENTITY, SupervisedConfig
from fastppo.stopped import Stopped

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
    held_keys: set[str] = set()
    wanted = max(1, round(share * len(rows)))
    held_rows = 0
    for key in order:
        if held_rows >= wanted:
            break
        held_keys.add(key)
        held_rows += counts[key]
    if held_rows == len(rows):
        raise DataError(
            f"{len(rows)} rows of {len(order)} prompts cannot be split by prompt with "
            f"eval_share={share:g}; give more prompts, a file of eval_data, or eval_share=0"
        )
    train = [row for row, key in zip(rows, keys, strict=True) if key not in held_keys]
    held_out = [row for row, key in zip(rows, keys, strict=True) if key in held_keys]
    return Split(train, held_out)


def row_limit(model: Any, max_length: int | None) -> int | None:
    """The longest row, tokens: `max_length`, or the model's context.

    Raises:
        ValueError: `max_length` is beyond the context.
    """
    context = context_length(model)
    if max_length is not None and context is not None and max_length > context:
        raise ValueError(f"max_length={max_length} is beyond the model's context of {context}")
    return context if max_length is None else max_length


class Encoded(Protocol):
    """The encoded rows of a stage: `Demonstrations` or `Comparisons`."""

    @property
    def examples(self) -> list[Any]:
        """One for each row that can be trained on."""

    @property
    def prompts(self) -> list[Any]:
        """What each example answers: those of one prompt are held out together."""


@dataclass(slots=True)
class StageData:
    """Encoded rows of a stage, with fingerprints of what they were made from."""

    train: list[Any]
    held_out: list[Any]
    fingerprints: dict[str, str]


def load_data(
    config: SupervisedConfig,
    rows: Rows | None,
    eval_rows: Rows | None,
    encode: Callable[[Rows, str], Encoded],
) -> StageData:
    """The rows that are given, or those of the config's files, encoded and split.

    Args:
        encode: of rows and the name of their source.

    Raises:
        DataError: a row cannot be used.
    """
    rows = load_rows(config.data, config.split) if rows is None else rows
    data = encode(rows, config.data or "data")
    fingerprints = {
        "data": fingerprint.of_rows(rows),
        "tokens": fingerprint.of_rows(data.examples),
    }
    if eval_rows is None and config.eval_data is not None:
        eval_rows = load_rows(config.eval_data, config.split)
    if eval_rows is None:
        split = split_by_prompt(data.examples, data.prompts, config.eval_share, config.seed)
        return StageData(split.train, split.held_out, fingerprints)
    held_out = encode(eval_rows, config.eval_data or "eval_data").examples
    return StageData(data.examples, held_out, fingerprints)


# ----------------------------------------------------------------------------------- the directory


@contextmanager
def stage_world(config: SupervisedConfig) -> Iterator[World]:
    """The processes that torchrun started, which hold the run directory while the block runs."""
    world = join(config.torch_device)
    with (
        lasting_console(),
        torchrun_hidden(),
        world.with_timeout(),
        run_lock(config.output_dir, world),
    ):
        yield world


def open_run(config: SupervisedConfig, world: World | None = None) -> Path:
    """The run directory.

    Raises:
        ValueError: it holds a run already, and `resume` is off.
    """
    run_dir = Path(config.output_dir)

    def create() -> None:
        if not config.resume:
            check_no_run(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)

    (world or World()).on_main_rank(create)
    return run_dir


def save_model(run_dir: Path, model: Any, tokenizer: Any) -> None:
    """Saves the trained model, whose tensors are whole, with its tokenizer."""
    with written_whole(run_dir) as directory:
        model.save_pretrained(directory, state_dict=full_state(model))
        tokenizer.save_pretrained(directory)
    manifest.permit(run_dir)


# ----------------------------------------------------------------------------------- the training


class SupervisedTrainer(Trainer, ABC):
    """`Trainer` with a loss per item; a stage gives `items`, `loss_sum` and `measure`.

    Args:
        model: what is trained and put into checkpoints; of a PEFT model only the adapters.
        root: the module that several processes shard; `loss_sum` runs it.
        trunk: the transformer in it.
        data: encoded, as `collate` takes it.
        world: the processes that share the rows of each batch.
    """

    title: str
    entries: Sequence[str] = ()
    """Methods of the root that run a pass, beside `forward`."""

    def __init__(
        self,
        config: SupervisedConfig,
        model: Any,
        data: StageData,
        *,
        root: nn.Module,
        trunk: Any,
        collate: Callable[[list[Any]], dict[str, Tensor]],
        callbacks: list[TrainerCallback] | None = None,
        world: World | None = None,
    ) -> None:
        self.config = config
        self.root = root
        self.trunk = trunk
        self.world = world or World()
        self.collate = collate
        self._weights: dict[str, Tensor] | None = None
        """Unsharded weights, while the first of several processes writes a checkpoint."""
        self.identity = of_run(config, data.fingerprints)
        self.say: Callable[[str], None] = print
        super().__init__(
            model=model,
            args=_training_arguments(config, self.world, evaluate=bool(data.held_out)),
            train_dataset=data.train,
            eval_dataset=data.held_out or None,
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
        """How many items of the batch have a loss, by which its sum is divided."""

    @abstractmethod
    def loss_sum(self, batch: dict[str, Tensor]) -> Tensor:
        """The sum of the items' losses, 0-d."""

    @abstractmethod
    def measure(self, rows: list[Any]) -> dict[str, float]:
        """Metrics of held-out rows."""

    @abstractmethod
    def without_items(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch with no item that has a loss: what a process runs that has no row of a batch,
        because sharded models need every process in each pass."""

    def own_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        """This process's rows of a batch, collated."""
        own = self.world.local_rows(len(rows))
        if not own:
            return self.without_items(self.collate(rows[:1]))
        return self.collate(rows[own.start : own.stop])

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
        """Trainer's, over shards: after a checkpoint's weights are loaded, before its states."""
        if self.world.size > 1:
            shard_as_it_is(self.root, self.trunk, self.world, self.entries)
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.world.size > 1:
            optimizer.register_load_state_dict_pre_hook(_sharded_states)
        return optimizer

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
            reshard_for_update(self.root)
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
        """Trains, from the newest complete checkpoint if `resume` is on.

        Returns:
            dict: `loss`, the mean of the last tenth of the logged ones; the last held-out metrics.

        Raises:
            Stopped: a signal asked for it; a checkpoint is written first.
            CheckpointError: a checkpoint could not be written.
        """
        self.say = functools.partial(say, console)
        for sentence in busy_cpu(self.args.device):
            self.say(sentence, "yellow")
        checkpoint = self.world.on_main_rank(self._find_checkpoint) if self.config.resume else None
        self.args.eval_on_start = bool(self.eval_dataset) and checkpoint is None
        with progress(self.title, console) as show, listening(self.world) as request:
            self.add_callback(ProgressBar(show))
            self.add_callback(Interruptions(request))
            self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        if request.stop and self.state.global_step < self.state.max_steps:
            raise self._stopped(request.stop)
        records = self.state.log_history
        losses = [record["loss"] for record in records if "loss" in record]
        tail = losses[-max(1, len(losses) // 10) :]
        result = {"loss": sum(tail) / max(1, len(tail))}
        if self.eval_dataset:
            result |= self._last_evaluation()
        return result

    def _stopped(self, signum: int) -> Stopped:
        written = self.world.on_main_rank(lambda: checkpoints(self.config.output_dir))
        next_run = "no checkpoint was written"
        if written:
            next_run = f"`--resume true` goes on from {written[-1]}"
        progress = f"{self.state.global_step} of {self.state.max_steps} steps"
        return Stopped(signum, f" after {progress}; {next_run}")

    def _last_evaluation(self) -> dict[str, float]:
        """Held-out metrics at the end of the run, measured now if they were not."""
        metrics: dict[str, float] = {}
        step = None
        for record in self.state.log_history:
            if any(name.startswith("eval_") for name in record):
                metrics = record
                step = record["step"]
        if step != self.state.global_step:
            metrics = self.evaluate()
        return {name: value for name, value in metrics.items() if name.startswith("eval_")}

    def _find_checkpoint(self) -> Path | None:
        """The newest complete checkpoint, if there is one and it is of this run."""
        newest = resumable(
            self.config.output_dir,
            self.identity,
            essential=IDENTITY,
            allowed=self.config.allow_config_change,
            say=self.say,
        )
        if newest is None:
            return None
        for path in newest.passed_over:
            self.say(f"{path.name} is set aside as {manifest.set_aside(path).name}")
        self.say(f"resuming from {newest.path}")
        return newest.path

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Trainer's, with a manifest, without which it does not count; then the oldest are deleted.
        Of several processes the first writes it, unsharded."""
        if self.world.size == 1:
            self._write_checkpoint(*args, **kwargs)
            return
        reshard_for_update(self.root)
        optimizer: Any = self.optimizer
        self._weights = self._on_the_first(cast(Any, self.model).state_dict())
        states = self._on_the_first(optimizer.state_dict())
        optimizer.state_dict = lambda: states
        try:
            self.world.on_main_rank(lambda: self._write_checkpoint(*args, **kwargs))
        finally:
            del optimizer.state_dict
            self._weights = None

    def _on_the_first(self, value: Any) -> Any:
        """A state dict with its tensors unsharded, on the first process's CPU and nowhere else."""
        if isinstance(value, dict):
            return {name: self._on_the_first(entry) for name, entry in value.items()}
        if isinstance(value, list):
            return [self._on_the_first(entry) for entry in value]
        if not isinstance(value, Tensor):
            return value
        value = full_tensor(value)
        return value.cpu() if self.world.is_main else None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights that a checkpoint holds."""
        model: Any = self.model
        model.save_pretrained(output_dir or self.args.output_dir, state_dict=self._weights)

    def _write_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        run_dir = Path(self.config.output_dir)
        path = run_dir / f"checkpoint-{self.state.global_step}"
        unfinished = run_dir / UNFINISHED
        shutil.rmtree(unfinished, ignore_errors=True)  # left by a run that was killed
        self.args.output_dir = str(unfinished)
        try:
            super()._save_checkpoint(*args, **kwargs)
            written = unfinished / path.name
            manifest.write(written, {"run": self.identity})
            shutil.rmtree(path, ignore_errors=True)
            written.rename(path)
            manifest.sync(run_dir)
        except (OSError, SafetensorError, RuntimeError) as error:  # torch.save raises the last
            raise failed(path, error) from error
        finally:
            self.args.output_dir = str(run_dir)
            shutil.rmtree(unfinished, ignore_errors=True)
        for old in checkpoints(run_dir)[:-CHECKPOINTS_KEPT]:
            shutil.rmtree(old, ignore_errors=True)


def _sharded_states(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """An optimiser's state with unsharded tensors, sharded as its weights are."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    states = {
        index: {
            name: sharded_like(value, weights[index]) if isinstance(value, Tensor) else value
            for name, value in entry.items()
        }
        for index, entry in state["state"].items()
    }
    return {**state, "state": states}


class RankArguments(TrainingArguments):
    """Trainer's arguments with the process's own device: Trainer would take the first GPU."""

    own_device: torch.device | None = None

    @property
    def device(self) -> torch.device:
        return super().device if self.own_device is None else self.own_device

    @property
    def n_gpu(self) -> int:
        """At most 1: with more, Trainer would split each batch over all GPUs."""
        return min(1, super().n_gpu)


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
        logging_nan_inf_filter=False,  # `Records` raises for a loss that is not a number
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
    if not on_cpu and world.device is not None:
        arguments.own_device = world.device
        torch.cuda.set_device(world.device)  # making the arguments has set the first
    return arguments
