"""How the value head is trained: by the optimizer, in closed form, or with extra critic epochs.

`ValueHead` is not trained, and does nothing. `GradientHead` leaves the value function to the value
loss of the update. The head learns in units of σ, the deviation of the returns: its output is
multiplied by σ, and the loss divided by σ². When σ changes, the weights are rescaled so that the
values stay. Neither the clipping of the gradient nor Adam's step then depends on the scale of the
rewards. `ClosedFormHead` observes the states and returns of an epoch's microbatches and solves a
regression for the head after the update (`fastppo.ppo.value_regression`); it needs no value loss,
and nothing of it reaches the policy's trunk. `ClosedFormWithLoss` does the same where the trunk
learns by the value loss: that of a separate critic, or the policy's with `vf_coef`.
`ExtraCriticEpochs` trains a separate critic for some epochs before each update.

Source of the scale: van Hasselt et al. 2016 (PopArt, arXiv:1602.07714), here without the shift.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from fastppo_kernels.definition import wide
from torch import Tensor

from fastppo.data.microbatches import Limits
from fastppo.models.sharding import local_part
from fastppo.models.value import ValueFunction
from fastppo.ppo.coefficients import Coefficients
from fastppo.ppo.experience import Experience
from fastppo.ppo.metrics import to_floats
from fastppo.ppo.objective import value_loss
from fastppo.ppo.options.config import CRITIC_FREE, PPOConfig
from fastppo.ppo.out_of_memory import MicrobatchLimits
from fastppo.ppo.parts import Parts
from fastppo.ppo.value_regression import NEGLIGIBLE, ValueRegression

SCALE_DECAY = 0.8
"""Factor on a batch's weight in σ at each later update, as in the closed form."""


class ReturnMoments:
    """Moments of the returns of a run, for their variance."""

    def __init__(self) -> None:
        self.moments: Tensor | None = None
        """Count, sum and sum of squares of the returns so far, decayed, [3]; see `wide`."""

    def add(self, returns: Tensor) -> Tensor:
        """Add the returns of a batch, [N], and return their variance, 0-d.

        The variance of equal returns is their square.
        """
        returns = wide(returns)
        batch = torch.stack([torch.ones_like(returns), returns, returns.square()]).sum(1)
        self.moments = batch if self.moments is None else SCALE_DECAY * self.moments + batch
        count, total, squares = self.moments
        mean_square = squares / count
        variance = mean_square - (total / count).square()
        return torch.where(variance > NEGLIGIBLE * mean_square, variance, mean_square)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors for a checkpoint."""
        return {} if self.moments is None else {"return_moments": self.moments}

    def load_tensors(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """Restore what `tensors` returned, from among the tensors of a checkpoint."""
        if "return_moments" in tensors:
            self.moments = tensors["return_moments"].to(device)


@torch.no_grad()
def set_scale(value_function: ValueFunction, scale: Tensor) -> None:
    """Change σ, 0-d, and keep the values as they are."""
    before = value_function.scale.clone()
    value_function.scale.copy_(scale)
    for weight in value_function.head.parameters():
        local_part(weight).mul_(before / value_function.scale)


class ValueHead:
    """A value head that is not trained: advantages without a value function."""

    metrics: dict[str, float] = {}  # noqa: RUF012 (replaced, never changed)

    has_loss = False
    """Whether the value loss is a part of the update's loss."""

    def begin_update(self, experience: Experience, coefficients: Coefficients) -> None:
        """Start an update."""

    def begin_epoch(self, epoch: int) -> None:
        """Start an epoch of the update, counted from 0."""

    def begin_minibatch(self) -> None:
        """Start a minibatch."""

    def begin_attempt(self) -> None:
        """Start a pass over the minibatch. Another pass follows if memory runs out."""

    def loss(self, value: Tensor, coefficients: Coefficients) -> Tensor:
        """Return the term of the loss, 0-d, of the value loss in squared reward units."""
        return torch.zeros_like(value)

    def observe(self, states: Tensor, micro: Experience) -> None:
        """Observe a microbatch.

        Args:
            states: [n, H], inputs of the value head, any dtype.
            micro: returns and weights of the same tokens.
        """

    def begin_fit(self) -> dict[str, Tensor]:
        """Begin the fit at the end of an update, and return what `end_fit` has to know.

        Returns:
            0-d tensors on the device, so that the host reads them together with others.
        """
        return {}

    def end_fit(self, numbers: Mapping[str, float]) -> None:
        """Finish the fit.

        Args:
            numbers: those of `begin_fit`.
        """

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors for a checkpoint."""
        return {}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `tensors` returned."""


class GradientHead(ValueHead):
    """The optimizer trains the value head with the value loss of the update."""

    has_loss = True

    def __init__(self, parts: Parts) -> None:
        self.value_function = parts.model.value_function
        self.returns = ReturnMoments()

    def begin_update(self, experience: Experience, coefficients: Coefficients) -> None:
        """Set σ by the returns of the experience and of those before it."""
        if not experience.trained.value:
            return
        variance = self.returns.add(experience.returns)
        # Returns of 0 leave the scale as it is.
        scale = torch.where(variance > 0, variance.sqrt(), self.value_function.scale)
        set_scale(self.value_function, scale)

    def loss(self, value: Tensor, coefficients: Coefficients) -> Tensor:
        return coefficients.vf_coef * value / self.value_function.scale.square()

    def tensors(self) -> dict[str, Tensor]:
        moments = self.returns.tensors()
        return moments and moments | {"scale": self.value_function.scale}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        scale = self.value_function.scale
        self.returns.load_tensors(tensors, scale.device)
        if tensors:
            scale.copy_(tensors["scale"])


class ClosedFormHead(ValueHead):
    """Fits the value head to the returns after each update.

    It observes the update's last epoch, or each epoch if any may turn out to be the last.
    """

    def __init__(self, config: PPOConfig, parts: Parts) -> None:
        self.parts = parts
        self.regression = ValueRegression()
        self.first_epoch = 0 if config.early_stop_kl is not None else config.ppo_epochs - 1
        self._observes = False
        self._kept: Tensor | None = None

    def begin_epoch(self, epoch: int) -> None:
        self._observes = epoch >= self.first_epoch
        self.regression.begin_batch()

    def begin_minibatch(self) -> None:
        self._kept = self.regression.batch

    def begin_attempt(self) -> None:
        self.regression.batch = None if self._kept is None else self._kept.clone()

    def observe(self, states: Tensor, micro: Experience) -> None:
        if self._observes:
            assert micro.token_weights is not None
            self.regression.add(states, micro.monte_carlo_returns, micro.token_weights > 0)

    def begin_fit(self) -> dict[str, Tensor]:
        self._kept = None
        return self.regression.begin_fit(self.parts.world)

    def end_fit(self, numbers: Mapping[str, float]) -> None:
        if numbers:
            self.regression.end_fit(self.parts.model.value_function.head, numbers)
            self.metrics = self.regression.metrics

    def tensors(self) -> dict[str, Tensor]:
        return self.regression.tensors()

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        # A run that had a value loss before has moments of the returns, too.
        fitted = {name: tensor for name, tensor in tensors.items() if name != "return_moments"}
        self.regression.load_tensors(fitted, self.parts.model.value_function.head)
        self.metrics = self.regression.metrics


class ClosedFormWithLoss(ClosedFormHead):
    """Fits the head on a trunk that learns by the value loss."""

    has_loss = True

    def __init__(self, config: PPOConfig, parts: Parts) -> None:
        super().__init__(config, parts)
        # A critic that an optimizer trained before has a scale, and the regression has none.
        value_function = parts.model.value_function
        set_scale(value_function, torch.ones_like(value_function.scale))
        self.returns = ReturnMoments()
        self.variance = torch.ones((), device=parts.device)

    def begin_update(self, experience: Experience, coefficients: Coefficients) -> None:
        if experience.trained.value:
            variance = self.returns.add(experience.returns)
            self.variance = torch.where(variance > 0, variance, 1.0)

    def loss(self, value: Tensor, coefficients: Coefficients) -> Tensor:
        return coefficients.vf_coef * value / self.variance.to(value.dtype)

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | self.returns.tensors()

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        self.returns.load_tensors(tensors, self.variance.device)
        super().load_tensors(tensors)


class ExtraCriticEpochs(GradientHead):
    """Trains a separate critic for extra epochs before each update.

    Source: Hou et al. 2026 (SAO, arXiv:2607.07508), with twice as many passes as the policy.

    Args:
        epochs: extra epochs over each batch.
    """

    def __init__(
        self, config: PPOConfig, parts: Parts, limits: MicrobatchLimits, *, epochs: int
    ) -> None:
        super().__init__(parts)
        self.config = config
        self.parts = parts
        self.limits = limits
        self.epochs = epochs

    def begin_update(self, experience: Experience, coefficients: Coefficients) -> None:
        super().begin_update(experience, coefficients)
        for _ in range(self.epochs if experience.trained.value else 0):
            order = torch.randperm(len(experience))
            for minibatch in experience.minibatches(
                order, self.config.minibatches, self.config.aggregation
            ):
                self._step(minibatch, coefficients)

    def _step(self, minibatch: Experience, coefficients: Coefficients) -> None:
        """Take a step of the critic on a minibatch, at the current learning rate."""
        model = self.parts.model
        optimizer = self.parts.optimizer

        def accumulate(limits: Limits) -> None:
            optimizer.zero_grad()
            for micro in minibatch.microbatches(limits, self.parts.world):
                layout = model.layout(micro.batch)
                with model.autocast():
                    values = model.values(layout, layout.predicting)
                value, _ = value_loss(values, micro, coefficients)
                optimizer.backward(self.loss(value, coefficients))

        self.limits.fit(accumulate, self.config.limits(model.packing), len(minibatch.batch))
        norms = to_floats(optimizer.clip_gradients(self.config.max_grad_norm))
        optimizer.step({"loss": 0.0, **norms})


def make_value_head(config: PPOConfig, parts: Parts, limits: MicrobatchLimits) -> ValueHead:
    """Return how the options train the value head.

    Args:
        limits: the microbatch limits that fit in memory.
    """
    if config.advantage in CRITIC_FREE:
        return ValueHead()
    if config.fits_value_head:
        if config.trains_trunk_on_values:
            return ClosedFormWithLoss(config, parts)
        return ClosedFormHead(config, parts)
    if config.critic_only_epochs:
        return ExtraCriticEpochs(config, parts, limits, epochs=config.critic_only_epochs)
    return GradientHead(parts)
