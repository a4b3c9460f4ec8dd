"""The trainer shared by SFT and the reward model.

Both are thin layers on `transformers.Trainer`. The loss of a stage is a sum over items (completion
tokens in SFT, prompts in the reward model), divided by the number of items of the whole optimizer
step, so it does not depend on the split into batches. Autocast is applied here rather than by
Trainer, because the losses call trunk and head separately.

With several processes, each holds a shard of every weight and processes a share of each batch, as
in PPO (`fastppo.models.sharding`). Every process runs its own Trainer with the same batches,
metrics and decisions; the first one writes. Trainer's own FSDP would call `forward`, which the
losses bypass, and needs GPUs.
"""

from __future__ import annotations

import functools
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
from rich.console import Console
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from fastppo.data.files import UNFINISHED, written_whole
from fastppo.data.world import World, join, torchrun_hidden
from fastppo.models.adapters import full_state
from fastppo.models.device import autocast, busy_cpu
from fastppo.models.sharding import full_tensor, reshard_for_update, shard_as_it_is, sharded_like
from fastppo.run import manifest
from fastppo.run.checkpoint import CHECKPOINTS_KEPT, checkpoints, failed, resumable
from fastppo.run.console import lasting_console
from fastppo.run.directory import check_no_run, run_lock
from fastppo.run.identity import of_run
from fastppo.run.progress import progress, say
from fastppo.run.signals import listening
from fastppo.stages.callbacks import Interruptions, ProgressBar, Records
from fastppo.stages.data import StageData
from fastppo.stages.options import IDENTITY, SupervisedConfig
from fastppo.stopped import Stopped

# ----------------------------------------------------------------------------------- the directory


@contextmanager
def stage_world(config: SupervisedConfig) -> Iterator[World]:
    """Join the processes of torchrun and lock the run directory within this block.

    Raises:
        ValueError: the directory holds a run, and `resume` is off; or another run is using it.
    """
    world = join(config.torch_device)
    with (
        lasting_console(),
        torchrun_hidden(),
        world.with_timeout(),
        run_lock(config.output_dir, world),
    ):
        if not config.resume:
            world.on_main_rank(lambda: check_no_run(config.output_dir))
        yield world


def save_model(run_dir: str, model: Any, tokenizer: Any) -> None:
    """Save an unsharded model with its tokenizer."""
    with written_whole(Path(run_dir)) as directory:
        model.save_pretrained(directory, state_dict=full_state(model))
        tokenizer.save_pretrained(directory)
    manifest.permit(Path(run_dir))


# ----------------------------------------------------------------------------------- the training


class SupervisedTrainer(Trainer, ABC):
    """`Trainer` with a loss per item, defined by `items`, `loss_sum` and `measure`.

    Args:
        model: model to train and checkpoint; only the adapters of a PEFT model.
        root: module called by `loss_sum`, which several processes shard.
        trunk: transformer within `root`.
        data: examples, the input of `collate`.
        world: processes that share the rows of each batch.
    """

    title: str
    entries: Sequence[str] = ()
    """Methods of the root, other than `forward`, that run a forward pass."""

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
        """Unsharded weights during a checkpoint of several processes."""
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
        # The loss is already divided by the items of the whole step, so Trainer must not divide by
        # gradient_accumulation. Older releases of transformers read the first attribute, newer
        # ones the second.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True

    @abstractmethod
    def items(self, batch: dict[str, Tensor]) -> float:
        """Return the number of items of a batch, the divisor of its loss."""

    @abstractmethod
    def loss_sum(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the sum of the losses of all items, 0-d."""

    @abstractmethod
    def measure(self, rows: list[Any]) -> dict[str, float]:
        """Return metrics of held-out rows."""

    @abstractmethod
    def without_items(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the batch without items, for a process without a row of it.

        Sharded models need every process in each pass.
        """

    def own_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        """Collate this process's rows of a batch."""
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
        # The value, which is logged, is that of all rows; the gradient that of this process's rows.
        return loss + (self.world.sum(loss.detach()) - loss.detach())

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Shard the model, then create the optimizer.

        Trainer calls this after loading the weights of a checkpoint and before its optimizer.
        """
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
        """Return held-out metrics over items; Trainer's own are a mean of means over batches."""
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
        """Yield this process's share of each batch, in order, on the device."""
        size = self.config.batch_size
        for start in range(0, len(rows), size):
            batch = self.own_rows(rows[start : start + size])
            yield {name: value.to(self.args.device) for name, value in batch.items()}

    def run(self, console: Console) -> dict[str, float]:
        """Train, starting from the newest intact checkpoint if `resume` is on.

        Returns:
            dict: `loss`, the mean over the last tenth of the steps, and the held-out metrics at the
            end.

        Raises:
            Stopped: a signal stopped the run, after a checkpoint.
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
            try:
                self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            except UnpicklingError as error:  # torch.load with weights_only=True
                raise ValueError(f"{checkpoint} holds objects other than tensors") from error
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
            next_run = f"`--resume true` continues from {written[-1]}"
        progress = f"{self.state.global_step} of {self.state.max_steps} steps"
        return Stopped(signum, f" after {progress}; {next_run}")

    def _last_evaluation(self) -> dict[str, float]:
        """Return held-out metrics at the end of the run; evaluate if that has not been done."""
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
        """Return the newest intact checkpoint of this run; None if there is none."""
        newest = resumable(
            self.config.output_dir,
            self.identity,
            essential=IDENTITY,
            allowed=self.config.resume == "force",
            say=self.say,
        )
        if newest is None:
            return None
        for path in newest.passed_over:
            self.say(f"renamed {path.name} to {manifest.set_aside(path).name}")
        self.say(f"resuming from {newest.path}")
        return newest.path

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Write a checkpoint with a manifest; with several processes the first writes it,
        unsharded."""
        if self.world.size == 1:
            self._write_checkpoint(*args, **kwargs)
            return
        reshard_for_update(self.root)
        optimizer: Any = self.optimizer
        self._weights = self._unsharded_on_main(cast(Any, self.model).state_dict())
        states = self._unsharded_on_main(optimizer.state_dict())
        optimizer.state_dict = lambda: states
        try:
            self.world.on_main_rank(lambda: self._write_checkpoint(*args, **kwargs))
        finally:
            del optimizer.state_dict
            self._weights = None

    def _unsharded_on_main(self, value: Any) -> Any:
        """Unshard the tensors of a state dict to the CPU of the first process; None elsewhere."""
        if isinstance(value, dict):
            return {name: self._unsharded_on_main(entry) for name, entry in value.items()}
        if isinstance(value, list):
            return [self._unsharded_on_main(entry) for entry in value]
        if not isinstance(value, Tensor):
            return value
        value = full_tensor(value)
        return value.cpu() if self.world.is_main else None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model of a checkpoint."""
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
    """Shard the tensors of an optimizer state like the weights."""
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
    """Trainer's arguments with the device of this process; Trainer uses the first GPU."""

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
        # `constant` in transformers has no warm-up.
        lr_scheduler_type=config.lr_schedule.replace("constant", "constant_with_warmup"),
        warmup_steps=config.warmup,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        logging_steps=1,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # `Records` raises for a NaN
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
        torch.cuda.set_device(world.device)  # TrainingArguments has set the first GPU
    return arguments
