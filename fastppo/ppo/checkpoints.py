"""The checkpoints of a PPO run: when one is due, what it holds, which one a run goes on from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fastppo.data import fingerprint
from fastppo.data.files import written_whole
from fastppo.data.world import World
from fastppo.models.device import choose_device
from fastppo.models.policy import ActorCritic
from fastppo.models.pretrained import load_tokenizer
from fastppo.models.sharding import reshard, unsharded
from fastppo.ppo.options.config import IDENTITY, PPOConfig
from fastppo.ppo.setup.build import RunComponents
from fastppo.ppo.setup.run_models import ModelLoader, make_policy
from fastppo.ppo.state import RunState
from fastppo.run import checkpoint, identity, manifest, shards
from fastppo.run.checkpoint import Best
from fastppo.run.log import why_ended

LOWEST = "min:"
"""Before a metric of `checkpoint_best` whose lowest value is the best."""


OF_WEIGHTS = (
    "model",
    "param_dtype",
    "quantization",
    "lora_rank",
    "lora_alpha",
    "lora_target_modules",
)
"""Options that say what a policy's weights are."""


def export(
    model: ActorCritic, tokenizer: Any, directory: Path, value_function: Path | None = None
) -> None:
    """Writes a policy whose weights are whole.

    Args:
        value_function: the file that its value function is written to; None for none.
    """
    with written_whole(directory) as unfinished:
        model.save_policy(unfinished)
        tokenizer.save_pretrained(unfinished)
        if value_function is not None:
            model.save_value_function(unfinished / value_function.name)
            (unfinished / value_function.name).replace(value_function)
    files = [] if value_function is None else [value_function]
    manifest.permit(directory, *files)


def export_checkpoint(path: Path, directory: Path, device: str = "auto") -> None:
    """Writes the policy of a checkpoint, with its tokenizer, as a run writes its last one.

    Args:
        path: of the checkpoint.
        device: the model is loaded onto.

    Raises:
        ValueError: as `policy_of` does; or there is a model in the directory.
    """
    taken = (directory / "config.json", directory / manifest.FILE)
    if directory.is_file() or any(file.exists() for file in taken):
        raise ValueError(f"{directory} exists already: choose another directory")
    export(*policy_of(path, device), directory)


def policy_of(path: Path, device: str = "auto") -> tuple[ActorCritic, Any]:
    """(the policy of a checkpoint, its tokenizer).

    Args:
        device: the model is loaded onto.

    Raises:
        ValueError: it is no whole checkpoint, or the model that its run started from is another by
            now or was handed over.
    """
    if checkpoint.NAME.match(path.name) is None or not path.is_dir():
        known = ", ".join(map(str, checkpoint.checkpoints(path)))
        raise ValueError(
            f"{path} is no checkpoint: expected RUN/checkpoint-NUMBER"
            + (f", such as {known}" if known else "")
        )
    run = manifest.read(path)["run"]
    config = PPOConfig(device=device, **{name: run["options"][name] for name in OF_WEIGHTS})
    model = run["fingerprints"]["model"]
    if not config.model:
        raise ValueError(f"{path}: the run was given its model in Python: trainer.save_policy(…)")
    loader = ModelLoader(config, choose_device(device))
    causal_lm = loader.causal_lm(config.model, "model")
    if fingerprint.of_model(causal_lm) != model:
        raise ValueError(f"{path}: model {config.model} is not what it was when the run started")
    tokenizer = load_tokenizer(config.model)
    policy = make_policy(causal_lm, tokenizer, config, loader)
    checkpoint.load_policy(path, policy)
    return policy, tokenizer


class Checkpoints:
    """Writes and reads the checkpoints of one run.

    Args:
        components: what the run trains and reads.
        say: takes a sentence for the user.
        saved: called where one is written.
        world: the ranks, each of which writes its shards; the first does the rest.
    """

    def __init__(
        self,
        config: PPOConfig,
        state: RunState,
        components: RunComponents,
        *,
        say: Callable[[str], None],
        world: World | None = None,
        saved: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.state = state
        self.model = components.model
        self.optimizer = components.optimizer
        self.reference = components.reference
        self.engine = components.engine
        self.say = say
        self.saved = saved
        self.world = world or World()
        self.run_dir = Path(config.output_dir)
        self.identity = identity.of_run(config, components.fingerprints)
        self.newest: Path | None = None
        """The newest checkpoint that is known to be whole."""
        self._iteration: int | None = None
        """The iteration of the newest checkpoint."""
        self._best_metric: list[float] = []
        """The metric of `checkpoint_best` in the iterations since the newest checkpoint."""

    def after_iteration(self, metrics: Mapping[str, float], *, requested: bool = False) -> None:
        """Writes a checkpoint if one is due or is asked for.

        Raises:
            CheckpointError: it could not be written.
        """
        self._remember(metrics)
        interval = self.config.checkpoint_interval
        is_due = interval and self.state.iteration % interval == 0
        if requested or is_due:
            self.save()
        if requested:
            self.say(f"checkpoint {self.newest}")

    def save(self) -> Path:
        """Writes a checkpoint of the run as it is now; its path.

        Raises:
            CheckpointError: it could not be written.
        """
        path = checkpoint.path_of(self.run_dir, self.state.iteration)
        self.world.gather_results(self._writer(path))
        self.newest = path
        self._iteration = self.state.iteration
        self._best_metric = []
        self.saved()
        return path

    def finish(self) -> None:
        """Writes a last checkpoint, unless there is one of this iteration."""
        if self.state.iteration != self._iteration:
            self.save()

    def save_policy(self, tokenizer: Any, directory: Path) -> None:
        """Write the policy as transformers loads it, and the value function beside it."""
        with unsharded(self.model):
            value_function = directory.parent / "value_function.safetensors"
            self.world.on_main_rank(
                lambda: export(self.model, tokenizer, directory, value_function)
            )

    def save_best(self, tokenizer: Any, directory: Path) -> Path | None:
        """Writes the policy of the best checkpoint; the path of this, or None where none is kept.

        The model has the weights of the newest checkpoint, before and after it.
        """
        metric = self.config.checkpoint_best
        best = None
        if metric is not None:
            best = self.world.on_main_rank(lambda: self._whole_best(metric))
        if best is None or self.newest is None:
            return None
        checkpoint.load_policy(best, self.model)
        try:
            with unsharded(self.model):
                self.world.on_main_rank(lambda: export(self.model, tokenizer, directory))
        finally:
            checkpoint.load_policy(self.newest, self.model)
        return best

    def _whole_best(self, metric: str) -> Path | None:
        """The best checkpoint, every byte of which is as it was written."""
        best = checkpoint.best_of(self.run_dir, metric)
        if best is None:
            return None
        try:
            manifest.read(best)
        except manifest.DamagedError as error:
            self.say(f"no policy-best: {error}")
            return None
        return best

    def how_far(self) -> str:
        """What a run that was stopped says of itself."""
        done = self.state.iteration
        end = self.config.iterations
        return f" after {done} of {end} iterations; `--resume true` goes on from {self.newest}"

    def resume(self) -> bool:
        """Restores the newest whole checkpoint; whether there was one.

        Raises:
            DamagedError: there are checkpoints, and none is whole.
            ValueError: it is of another run or model, and `allow_config_change` is off.
        """
        newest = self.world.on_main_rank(self._newest)
        if newest is None:
            return False
        self._load(newest.path)
        self.world.on_main_rank(lambda: self._tidy(newest))
        self.newest = newest.path
        self._iteration = self.state.iteration
        reason = self.world.on_main_rank(lambda: why_ended(self.run_dir))
        ended = f", whose run had ended: {reason}" if reason else ""
        if self.state.iteration >= self.config.iterations:
            ended = ", whose run is at its end: a larger --iterations goes on"
        self.say(f"resuming from {newest.path}{ended}")
        return True

    def _load(self, path: Path) -> None:
        saved_state, saved_reference = checkpoint.load(path, self.model, self.optimizer)
        self.state.load_state_dict(saved_state)
        self.optimizer.load_loss_scale(saved_state.get("scaler", {}))
        self.engine.load_state_dict(saved_state["engine"])
        if self.state.value_regression is not None:
            self.state.value_regression.load_tensors(
                checkpoint.load_value_regression(path), self.model.value_function.head
            )
        if self.reference is not None:
            self.reference.load_state_dict(saved_reference)

    def _newest(self) -> manifest.Newest | None:
        checkpoint.remove_leftovers(self.run_dir)
        return checkpoint.resumable(
            self.run_dir,
            self.identity,
            essential=IDENTITY,
            allowed=self.config.allow_config_change,
            say=self.say,
        )

    def _tidy(self, newest: manifest.Newest) -> None:
        """Sets aside what is damaged, and removes what is not to be kept."""
        for path in newest.passed_over:
            self.say(f"{path.name} is set aside as {manifest.set_aside(path).name}")
        metric = self.config.checkpoint_best
        checkpoint.prune(self.run_dir, metric, never=newest.path)

    def _snapshot(self) -> checkpoint.Snapshot:
        regression = self.state.value_regression
        return checkpoint.snapshot(
            self.model,
            self.optimizer,
            {
                **self.state.state_dict(),
                "engine": self.engine.state_dict(),
                "scaler": self.optimizer.loss_scale_state(),
            },
            reference=self._reference_state(),
            value_regression=None if regression is None else regression.tensors(),
            in_shards=self.world.size > 1,
        )

    def _writer(self, path: Path) -> Callable[[], None]:
        """What writes this rank's shards, if there are several, and on the first rank the rest of
        the checkpoint."""
        snapshot = self._snapshot()
        best = self._best()
        temporary = self.world.on_main_rank(lambda: checkpoint.begin(path))
        sharded: dict[str, Any] | None = None
        if self.world.size > 1:
            reshard(self.model)
            sharded = shards.state_of(self.model, self.optimizer, self._reference_state())

        def write() -> None:
            if sharded is not None:
                try:
                    shards.write(sharded, temporary)
                except OSError as error:
                    raise checkpoint.failed(path, error) from error
            if self.world.is_main:
                checkpoint.finish(path, temporary, snapshot, run=self.identity, best=best)

        return write

    def _reference_state(self) -> dict[str, Tensor]:
        return self.reference.state_dict() if self.reference is not None else {}

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
            self.say(f"checkpoint_best={metric}: no iteration since the last checkpoint had it")
            return Best(metric, None)
        return Best(metric, sum(self._best_metric) / len(self._best_metric))
