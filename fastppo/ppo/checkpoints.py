"""Checkpoints of a PPO run: writing, pruning, resuming and exporting them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastppo.data import fingerprint
from fastppo.data.files import written_whole
from fastppo.models.device import choose_device
from fastppo.models.images import NoImages
from fastppo.models.multimodal import save_processor_files
from fastppo.models.policy import ActorCritic
from fastppo.models.pretrained import load_tokenizer
from fastppo.models.sharding import unsharded
from fastppo.ppo.algorithm import PPO
from fastppo.ppo.options.config import IDENTITY, PPOConfig
from fastppo.ppo.setup.run_models import ModelLoader, make_policy
from fastppo.run import checkpoint, identity, manifest
from fastppo.run.checkpoint import Best
from fastppo.run.log import why_ended

LOWEST = "min:"
"""Prefix of a `checkpoint_best` metric to minimize."""

OF_WEIGHTS = (
    "model",
    "param_dtype",
    "quantization",
    "lora_rank",
    "lora_alpha",
    "lora_target_modules",
)
"""Options that determine the policy's weights."""


def export(
    model: ActorCritic,
    tokenizer: Any,
    directory: Path,
    value_function: Path | None = None,
    images: NoImages | None = None,
) -> None:
    """Write an unsharded policy, its tokenizer, and its processor of images if it has one.

    Args:
        images: the run's, which has a processor that was passed in.
        value_function: file for the value function; None for none.
    """
    with written_whole(directory) as unfinished:
        model.save_policy(unfinished)
        tokenizer.save_pretrained(unfinished)
        save_processor_files(model.causal_lm, unfinished)
        if images is not None:
            images.save(unfinished)
        if value_function is not None:
            model.save_value_function(unfinished / value_function.name)
            (unfinished / value_function.name).replace(value_function)
    files = [] if value_function is None else [value_function]
    manifest.permit(directory, *files)


def export_checkpoint(path: Path, directory: Path, device: str = "auto") -> None:
    """Write the policy of a checkpoint with its tokenizer, as transformers loads it.

    Args:
        path: checkpoint.
        directory: directory to write; it must not contain a model.
        device: device to load the model on.

    Raises:
        ValueError: the checkpoint cannot be loaded, or the directory contains a model.
    """
    taken = (directory / "config.json", directory / manifest.FILE)
    if directory.is_file() or any(file.exists() for file in taken):
        raise ValueError(f"{directory} exists already: choose another directory")
    export(*policy_of(path, device), directory)


def policy_of(path: Path, device: str = "auto") -> tuple[ActorCritic, Any]:
    """Load the policy of a checkpoint and its tokenizer.

    Args:
        device: device to load the model on.

    Raises:
        ValueError: the path is not an intact checkpoint, or the run's initial model has changed or
            was passed in from Python.
    """
    if checkpoint.NAME.match(path.name) is None or not path.is_dir():
        known = ", ".join(map(str, checkpoint.checkpoints(path)))
        raise ValueError(
            f"{path} is not a checkpoint: expected RUN/checkpoint-NUMBER"
            + (f", such as {known}" if known else "")
        )
    run = manifest.read(path)["run"]
    options = {name: run["options"][name] for name in OF_WEIGHTS}
    if not options["model"]:
        raise ValueError(
            f"{path}: the run's model was passed in from Python: use trainer.save_policy(…)"
        )
    name = found_from(path.parent, options["model"])
    config = PPOConfig(device=device, **options | {"model": name})
    loader = ModelLoader(config, choose_device(device))
    try:
        causal_lm = loader.causal_lm(name, "model")
    except ValueError as error:
        raise ValueError(
            f"{error}. The name is the option `model` of the run that wrote {path}; a relative "
            "path is tried from the working directory, from the run's directory and from the "
            "folders above it"
        ) from error
    if fingerprint.of_model(causal_lm) != run["fingerprints"]["model"]:
        raise ValueError(
            f"{path}: model {name}, the option `model` of the run, has changed since the run "
            "started"
        )
    tokenizer = load_tokenizer(name)
    policy = make_policy(causal_lm, config, loader)
    checkpoint.load_policy(path, policy)
    return policy, tokenizer


def found_from(run_dir: Path, name: str) -> str:
    """Return a path in a run's options as it is found from here.

    A relative path was relative to the working directory of the training. It is tried from this
    working directory, from the run's directory, and from the folders above it.

    Args:
        name: path or hub name. It is returned unchanged if no such path exists.
    """
    run_dir = run_dir.resolve()
    for folder in (Path(), run_dir, *run_dir.parents):
        if (folder / name).exists():
            return str(folder / name)
    return name


class Checkpoints:
    """Writes and reads the checkpoints of a run.

    With several processes, each writes its shards, and the main one everything else.

    Args:
        ppo: the algorithm with the parts and the state of the run.
        saved: called after each checkpoint.
    """

    def __init__(self, ppo: PPO, *, saved: Callable[[], None] = lambda: None) -> None:
        self.ppo = ppo
        self.config = ppo.config
        self.state = ppo.state
        self.saved = saved
        self.world = ppo.world
        self.run_dir = Path(self.config.output_dir)
        self.identity = identity.of_run(self.config, ppo.parts.fingerprints)
        self.essential = identity.essential_options(self.config, IDENTITY, ppo.parts.passed)
        self.newest: Path | None = None
        """The newest intact checkpoint."""
        self._iteration: int | None = None
        """The iteration of the newest checkpoint."""
        self._best_metric: list[float] = []
        """Values of the `checkpoint_best` metric since the newest checkpoint."""

    def after_iteration(self, metrics: Mapping[str, float], *, requested: bool = False) -> None:
        """Write a checkpoint if it is due or requested.

        Raises:
            CheckpointError: it could not be written.
        """
        self._remember(metrics)
        interval = self.config.checkpoint_interval
        is_due = interval and self.state.iteration % interval == 0
        if requested or is_due:
            self.save()
        if requested:
            self.ppo.say(f"checkpoint {self.newest}")

    def save(self) -> Path:
        """Write a checkpoint and return its path.

        Raises:
            CheckpointError: it could not be written.
        """
        path = checkpoint.path_of(self.run_dir, self.state.iteration)
        checkpoint.write(
            path,
            self.ppo.model,
            self.ppo.optimizer,
            {
                **self.state.state_dict(),
                "engine": self.ppo.engine.state_dict(),
                "scaler": self.ppo.optimizer.loss_scale_state(),
            },
            world=self.world,
            run=self.identity,
            best=self._best(),
            reference=None if self.ppo.reference is None else self.ppo.reference.state_dict(),
            value_regression=self.ppo.value_head.tensors(),
        )
        self.newest = path
        self._iteration = self.state.iteration
        self._best_metric = []
        self.saved()
        return path

    def finish(self) -> None:
        """Write a checkpoint unless this iteration has one."""
        if self.state.iteration != self._iteration:
            self.save()

    def save_policy(self, tokenizer: Any, directory: Path) -> None:
        """Write the policy as transformers loads it, and the value function next to it."""
        images = self.ppo.parts.images
        with unsharded(self.ppo.model):
            value_function = directory.parent / "value_function.safetensors"
            self.world.on_main_rank(
                lambda: export(self.ppo.model, tokenizer, directory, value_function, images)
            )

    def save_best(self, tokenizer: Any, directory: Path) -> Path | None:
        """Write the policy of the best checkpoint and return the checkpoint, or None without one.

        Before and after, the model has the weights of the newest checkpoint.
        """
        metric = self.config.checkpoint_best
        best = None
        if metric is not None:
            best = self.world.on_main_rank(lambda: self._whole_best(metric))
        if best is None or self.newest is None:
            return None
        checkpoint.load_policy(best, self.ppo.model)
        try:
            with unsharded(self.ppo.model):
                images = self.ppo.parts.images
                self.world.on_main_rank(
                    lambda: export(self.ppo.model, tokenizer, directory, images=images)
                )
        finally:
            checkpoint.load_policy(self.newest, self.ppo.model)
        return best

    def _whole_best(self, metric: str) -> Path | None:
        """Return the best checkpoint if it is intact."""
        best = checkpoint.best_of(self.run_dir, metric)
        if best is None:
            return None
        try:
            manifest.read(best)
        except manifest.DamagedError as error:
            self.ppo.say(f"no policy-best: {error}")
            return None
        return best

    def how_far(self, *, is_user_code: bool = False) -> str:
        """Return the end of a stopped run's message.

        Args:
            is_user_code: whether a user's file failed. A run with a changed file resumes only by
                force.
        """
        done = self.state.iteration
        end = self.config.iterations
        flag = "`--resume true`"
        if is_user_code:
            flag += ", or `--resume force` once its file has changed,"
        return f" after {done} of {end} iterations; {flag} continues from {self.newest}"

    def resume(self) -> bool:
        """Restore the newest intact checkpoint and return whether there was one.

        Raises:
            DamagedError: all checkpoints are damaged.
            ValueError: the checkpoint is of another run or model, without `resume: force`.
        """
        newest = self.world.on_main_rank(self._newest)
        if newest is None:
            return False
        self._check_optimizer(newest)
        self._load(newest.path)
        metric = self.config.checkpoint_best
        self.world.on_main_rank(lambda: checkpoint.tidy(newest, metric))
        self.newest = newest.path
        self._iteration = self.state.iteration
        reason = self.world.on_main_rank(lambda: why_ended(self.run_dir))
        ended = f"; the run had ended: {reason}" if reason else ""
        if self.state.iteration >= self.config.iterations:
            ended = "; the run is complete, a larger --iterations continues it"
        self.ppo.say(f"resuming from {newest.path}{ended}")
        return True

    def _check_optimizer(self, newest: manifest.Newest) -> None:
        """Raise ValueError if the checkpoint has the state of another optimizer."""
        before = newest.owner["run"]["options"]
        for name in ("optimizer", "optimizer_options"):
            if before[name] != getattr(self.config, name):
                raise ValueError(
                    f"{newest.path}: {name} was {before[name]}, got "
                    f"{getattr(self.config, name)}. A resumed run keeps its optimizer; a new run "
                    "can start from its policy"
                )

    def _load(self, path: Path) -> None:
        saved_state, saved_reference = checkpoint.load(path, self.ppo.model, self.ppo.optimizer)
        self.state.load_state_dict(saved_state)
        self.ppo.optimizer.load_loss_scale(saved_state["scaler"])
        self.ppo.engine.load_state_dict(saved_state["engine"])
        self.ppo.value_head.load_tensors(checkpoint.load_value_regression(path))
        if self.ppo.reference is not None:
            self.ppo.reference.load_state_dict(saved_reference)

    def _newest(self) -> manifest.Newest | None:
        return checkpoint.resumable(
            self.run_dir,
            self.identity,
            essential=self.essential,
            allowed=self.config.resume == "force",
        )

    def _remember(self, metrics: Mapping[str, float]) -> None:
        metric = self.config.checkpoint_best
        if metric is None:
            return
        value = metrics.get(metric.removeprefix(LOWEST))
        if value is not None and math.isfinite(value):
            self._best_metric.append(-value if metric.startswith(LOWEST) else value)

    def _best(self) -> Best | None:
        metric = self.config.checkpoint_best
        if metric is None:
            return None
        if not self._best_metric:
            self.ppo.say(
                f"checkpoint_best={metric}: absent from all iterations since the last checkpoint"
            )
            return Best(metric, None)
        return Best(metric, sum(self._best_metric) / len(self._best_metric))
