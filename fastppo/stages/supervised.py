"""The training loop shared by SFT and the reward model.

The loss of a stage is a sum over items (completion tokens in SFT, prompts in the reward model),
divided by the number of items of the whole optimizer step, so it does not depend on the split into
batches. Optimizer and checkpoints are those of PPO (`fastppo.run`).

Order of the rows and learning rate are those of transformers' `Trainer` with the same options, so
that runs can be compared: epoch e visits the rows in the order of `torch.randperm` with the seed
`seed` + e, and the learning rate of the first step is 0 if there is a warm-up.

With several processes, each holds a shard of every weight and processes a share of each batch, as
in PPO (`fastppo.models.sharding`). All processes compute the same metrics and take the same
decisions; the first one writes the records.
"""

from __future__ import annotations

import functools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from fastppo.data.batch import on_device
from fastppo.data.files import written_whole
from fastppo.data.world import World, join
from fastppo.models.adapters import full_state
from fastppo.models.device import autocast, busy_cpu, device_name
from fastppo.models.multimodal import save_processor_files
from fastppo.models.sharding import reshard_for_update, shard_around
from fastppo.run import checkpoint, manifest
from fastppo.run.console import lasting_console
from fastppo.run.directory import check_no_run, run_lock
from fastppo.run.identity import essential_options, of_run
from fastppo.run.log import SharedLog, read_jsonl
from fastppo.run.optimizer import Optimizer, schedule
from fastppo.run.progress import progress, say
from fastppo.run.signals import StopRequest, listening
from fastppo.stages.data import StageData
from fastppo.stages.options import IDENTITY, SupervisedConfig
from fastppo.stopped import Stopped

logger = logging.getLogger(__name__)

ADAM: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "fused": True}
"""Options of AdamW: those of transformers' `Trainer`."""

# ----------------------------------------------------------------------------------- the directory


@contextmanager
def stage_world(config: SupervisedConfig) -> Iterator[World]:
    """Join the processes of torchrun and lock the run directory within this block.

    Raises:
        ValueError: the directory holds a run, and `resume` is off; or another run is using it.
    """
    world = join(config.torch_device)
    with lasting_console(), world.with_timeout(), run_lock(config.output_dir, world):
        if not config.resume:
            world.on_main_rank(lambda: check_no_run(config.output_dir))
        yield world


def save_model(run_dir: str, model: Any, tokenizer: Any) -> None:
    """Save an unsharded model with its tokenizer."""
    with written_whole(Path(run_dir)) as directory:
        model.save_pretrained(directory, state_dict=full_state(model))
        tokenizer.save_pretrained(directory)
        save_processor_files(model, directory)
    manifest.permit(Path(run_dir))


# ----------------------------------------------------------------------------------- the training


class SupervisedTrainer(ABC):
    """A training loop with a loss per item, defined by `items`, `loss_sum` and `measure`.

    Args:
        data: examples, the input of `collate`.
        root: module called by `loss_sum`. Its trainable weights are trained; several processes
            shard it.
        trunk: transformer within `root`.
        collate: returns the batch of a list of examples.
        world: processes that share the rows of each batch.
    """

    title: str
    passes: Sequence[str] = ()
    """Methods of the root, other than `forward`, that run a forward pass."""

    def __init__(
        self,
        config: SupervisedConfig,
        data: StageData,
        *,
        root: nn.Module,
        trunk: Any,
        collate: Callable[[list[Any]], dict[str, Tensor]],
        world: World | None = None,
    ) -> None:
        self.config = config
        self.data = data
        self.root = root
        self.collate = collate
        self.world = world or World()
        self.device = self.world.device or config.torch_device
        self.identity = of_run(config, data.fingerprints)
        if self.world.size > 1:
            shard_around(root, trunk, self.world, self.passes)
        self.optimizer = _adamw(root, config)
        batches = math.ceil(len(data.train) / config.batch_size)
        self.steps_per_epoch = math.ceil(batches / config.gradient_accumulation)
        self.steps = math.ceil(config.epochs * self.steps_per_epoch)

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

    def run(self, console: Console) -> dict[str, float]:
        """Train, starting from the newest intact checkpoint if `resume` is on.

        Returns:
            dict: `loss`, the mean over the last tenth of the steps, and the held-out metrics at the
            end.

        Raises:
            Stopped: a signal stopped the run, after a checkpoint.
            CheckpointError: a checkpoint could not be written.
            FloatingPointError: the loss or its gradient is not finite.
        """
        for sentence in busy_cpu(self.device):
            say(console, sentence, "yellow")
        done = self._resume() if self.config.resume else 0
        with (
            closing(self._open_log(done)) as log,
            progress(self.title, console, total=self.steps, completed=done) as show,
            listening(self.world) as request,
        ):
            if done == 0 and self.data.held_out:
                log.metrics(0, self.evaluate() | {"epoch": 0.0})
            for step, batches in self._steps(done):
                metrics = self.step(step, batches)
                log.metrics(step, metrics)
                if not math.isfinite(metrics["loss"] + metrics["grad_norm"]):
                    raise FloatingPointError(
                        f"the loss is {metrics['loss']:g} and its gradient norm "
                        f"{metrics['grad_norm']:g} at step {step}; lower learning_rate"
                    )
                if self.data.held_out and (step % self.steps_per_epoch == 0 or step == self.steps):
                    log.metrics(step, self.evaluate() | {"epoch": metrics["epoch"]})
                show(completed=step, status=f"loss {metrics['loss']:.3f}")
                self._save_if_due(step, request)
        return self._result()

    def step(self, step: int, batches: list[dict[str, Tensor]]) -> dict[str, float]:
        """Take optimizer step number `step` on the batches, and return its metrics."""
        self.root.train()
        items = sum(self.world.gather(sum(self.items(batch) for batch in batches)))
        loss = torch.zeros((), device=self.device)
        for batch in batches:
            with autocast(self.device, self.config.compute_dtype):
                total = self.loss_sum(self._on_device(batch))
            self.optimizer.backward(total / items)
            loss += total.detach() / items
        rate = self.learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norms = self.optimizer.clip_gradients(self.config.max_grad_norm)
        # The host waits for a GPU here, once per step.
        read = torch.stack([self.world.sum(loss), norms["grad_norm"]]).tolist()
        numbers = dict(zip(("loss", "grad_norm"), read, strict=True))
        self.optimizer.step(numbers)
        self.optimizer.zero_grad()
        return {**numbers, "learning_rate": rate, "epoch": self._epochs_at(step)}

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of optimizer step number `step`, which counts from 1."""
        before = step - 1
        warmup = math.ceil(self.steps * self.config.warmup)
        if before < warmup:
            return self.config.learning_rate * before / warmup
        factor = schedule(self.config.lr_schedule, before, warmup, self.steps)
        return self.config.learning_rate * factor

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return the metrics of the held-out rows, with the prefix `eval_`."""
        self.root.eval()
        with autocast(self.device, self.config.compute_dtype):
            metrics = self.measure(self.data.held_out)
        if self.world.size > 1:
            reshard_for_update(self.root)
        return {f"eval_{name}": value for name, value in metrics.items()}

    def batches(self, rows: list[Any]) -> Iterator[dict[str, Tensor]]:
        """Yield this process's share of each batch of rows, in order, on the device."""
        size = self.config.batch_size
        for start in range(0, len(rows), size):
            yield self._on_device(self._local_batch(rows[start : start + size]))

    def _steps(self, done: int) -> Iterator[tuple[int, list[dict[str, Tensor]]]]:
        """Yield (step, this process's batches) of all optimizer steps after `done`."""
        size = self.config.batch_size
        rows_per_step = size * self.config.gradient_accumulation
        order: list[int] = []
        for step in range(done, self.steps):
            epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
            if not order or step_of_epoch == 0:
                generator = torch.Generator().manual_seed(self.config.seed + epoch)
                order = torch.randperm(len(self.data.train), generator=generator).tolist()
            start = step_of_epoch * rows_per_step
            rows = [self.data.train[row] for row in order[start : start + rows_per_step]]
            batches = [rows[i : i + size] for i in range(0, len(rows), size)]
            yield step + 1, [self._local_batch(batch) for batch in batches]

    def _epochs_at(self, step: int) -> float:
        """Return the number of epochs after a step, by its batches."""
        epochs, steps = divmod(step, self.steps_per_epoch)
        batches = math.ceil(len(self.data.train) / self.config.batch_size)
        return epochs + steps * self.config.gradient_accumulation / batches

    def _local_batch(self, rows: list[Any]) -> dict[str, Tensor]:
        """Collate this process's rows of a batch."""
        local = self.world.local_rows(len(rows))
        if not local:
            return self.without_items(self.collate(rows[:1]))
        return self.collate(rows[local.start : local.stop])

    def _on_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: on_device(value, self.device) for name, value in batch.items()}

    # --------------------------------------------------------------------- records and checkpoints

    def _open_log(self, done: int) -> SharedLog:
        return SharedLog(
            self.world,
            self.config.output_dir,
            self.config,
            index="step",
            first=done + 1 if done else 0,
            device=device_name(self.device),
        )

    def _resume(self) -> int:
        """Restore the newest intact checkpoint, and return the number of its steps."""
        newest = self.world.on_main_rank(
            lambda: checkpoint.resumable(
                self.config.output_dir,
                self.identity,
                essential=essential_options(self.config, IDENTITY),
                allowed=self.config.resume == "force",
            )
        )
        if newest is None:
            return 0
        state, _ = checkpoint.load(newest.path, self.root, self.optimizer)
        self.world.on_main_rank(lambda: checkpoint.tidy(newest))
        logger.info(f"resuming from {newest.path}")
        return int(state["step"])

    def _save_if_due(self, step: int, request: StopRequest) -> None:
        """Write a checkpoint if it is due or requested, and stop the run on request.

        Raises:
            Stopped: a signal requests it, and steps are left.
        """
        requested = request.checkpoint_wanted()
        signum = request.stop if step < self.steps else None
        interval = self.config.checkpoint_interval
        is_due = interval and (step % interval == 0 or step == self.steps)
        path = checkpoint.path_of(self.config.output_dir, step)
        if requested or signum is not None or is_due:
            checkpoint.write(
                path,
                self.root,
                self.optimizer,
                {"step": step},
                world=self.world,
                run=self.identity,
            )
        if signum is not None:
            raise Stopped(
                signum,
                f" after {step} of {self.steps} steps; `--resume true` continues from {path}",
            )

    def _result(self) -> dict[str, float]:
        """Return the mean loss of the last tenth of the steps, and the last held-out metrics."""
        path = Path(self.config.output_dir) / "metrics.jsonl"
        records = self.world.on_main_rank(lambda: read_jsonl(path))
        losses = [record["loss"] for record in records if "loss" in record]
        tail = losses[-max(1, len(losses) // 10) :]
        held_out = {n: value for n, value in records[-1].items() if n.startswith("eval_")}
        return {"loss": sum(tail) / len(tail), **held_out}


def _adamw(model: nn.Module, config: SupervisedConfig) -> Optimizer:
    """Return AdamW over the trainable weights, with weight decay on the matrices."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": [w for w in trained if w.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [w for w in trained if w.dim() < 2], "weight_decay": 0.0},
    ]
    make = functools.partial(torch.optim.AdamW, lr=config.learning_rate, **ADAM)
    return Optimizer(make, [group for group in groups if group["params"]])
