"""PPO-ptx: the language-modeling loss on pretraining text, in addition to PPO's loss.

Source: Ouyang et al. 2022 (InstructGPT), section 3.5.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastppo.data.batch import on_device
from fastppo.data.text import PretrainingText
from fastppo.ppo.coefficients import Coefficients
from fastppo.ppo.metrics import LossSums
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.parts import Parts
from fastppo.ppo.state import RunState
from fastppo.ppo.trained import Trained


class NoPretraining:
    """A run without pretraining text."""

    def add_gradient(
        self, sums: LossSums, coefficients: Coefficients, trained: Trained
    ) -> LossSums:
        """Add the gradient of this step's text, and return the sums with its loss.

        Args:
            sums: of the minibatch.
        """
        return sums


class Pretraining(NoPretraining):
    """Adds γ (`ptx_coef`) times the gradient of the next blocks of text to each optimizer step."""

    def __init__(
        self, config: PPOConfig, parts: Parts, state: RunState, text: PretrainingText
    ) -> None:
        self.config = config
        self.parts = parts
        self.state = state
        self.text = text

    def add_gradient(
        self, sums: LossSums, coefficients: Coefficients, trained: Trained
    ) -> LossSums:
        if not coefficients.ptx_coef or not trained.policy:
            return sums
        config = self.config
        blocks = self.text.at(self.state.ptx_seen, config.ptx_batch_size, config.seed)
        self.state.ptx_seen += len(blocks)
        ptx_loss = self._backward(blocks, coefficients.ptx_coef)
        loss = sums.loss + coefficients.ptx_coef * ptx_loss
        return sums._replace(loss=loss, ptx_loss=ptx_loss)

    def _backward(self, blocks: Tensor, coef: float) -> Tensor:
        """Accumulate the gradient of blocks of text, [n, T] int64, split over the ranks.

        Returns:
            The language-modeling loss, 0-d.
        """
        model = self.parts.model
        world = self.parts.world
        rows = world.local_rows(len(blocks))
        size = self.config.limits().count(blocks.shape[1])
        own = on_device(blocks[rows.start : rows.stop], model.device).split(size) if rows else ()
        blocks_per_rank = math.ceil(len(blocks) / world.size)
        losses = []
        for i in range(math.ceil(blocks_per_rank / size)):
            if i < len(own):
                part = own[i]
                share = len(part) / len(blocks)
            else:
                # A rank without blocks left runs one with weight 0, because collectives wait for
                # all ranks.
                part = on_device(blocks[:1], model.device)
                share = 0.0
            with model.autocast():
                loss = model.language_model_loss(part, self.config.backend)
                loss = loss * share
            self.parts.optimizer.backward(coef * loss)
            losses.append(loss.detach())
        total = torch.zeros((), device=model.device)
        for loss in world.cat(torch.stack(losses), [len(losses)] * world.size):
            total = total + loss
        return total


def make_pretraining(config: PPOConfig, parts: Parts, state: RunState) -> NoPretraining:
    """Return the pretraining that the options ask for."""
    if parts.pretraining is None:
        return NoPretraining()
    return Pretraining(config, parts, state, parts.pretraining)
