"""Games of TextArena as environments.

prompts: textarena:GuessTheNumber-v0?size=200&seed=0    # `size` games, with consecutive seeds
environment: textarena:GuessTheNumber-v0?max_turns=8    # options of the game's class

With the prompt option `chat=true`, the game's texts are user messages, for models with a chat
template. Otherwise they are lines of a text.

The reward is the game's own, at its last turn. A game seeds Python's global random generator.
Two-player games need an opponent, in a file of your own:

    from fastppo.environments.textarena import Game

    def environment():
        return Game("TicTacToe-v0", opponent=lambda text: "[4]")
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fastppo.data.chat import is_chat
from fastppo.data.datasets import Rows
from fastppo.environments.pool import as_opening
from fastppo.plugins.adapters import Adapter, Address, seeded_prompts

PLAYER = 0
"""The seat of the policy."""


def load_prompts(target: str) -> Rows:
    """Return one row per game, with its seed."""
    return seeded_prompts(Address.of(target))


def load_environment(target: str) -> Callable[[], Game]:
    """Return a function that creates games."""
    address = Address.of(target)
    make = functools.partial(Game, address.name, **address.options)
    make().reset(address.name)  # raises for an invalid game before the first rollout
    return make


class Game:
    """A game with the policy as the first player.

    Args:
        name: name in TextArena's registry.
        opponent: function from an observation to a move, for two-player games.
        options: options of the game's class.
    """

    def __init__(
        self, name: str, opponent: Callable[[str], str] | None = None, **options: Any
    ) -> None:
        import textarena

        # Raw: TextArena's wrappers repeat the whole conversation in each observation.
        self.game = textarena.make(f"{name}-raw", **options)
        self.opponent = opponent

    def reset(self, prompt: Any, seed: int | None = None) -> Any:
        """Start a game. Return its rules and first observation."""
        self.is_chat = is_chat(prompt)
        self.game.reset(num_players=1 if self.opponent is None else 2, seed=seed)
        self._play_opponent(done=False)
        rules = self._observe()
        return as_opening(rules if self.is_chat else f"{rules}\n", prompt)

    def step(self, text: str) -> tuple[str, float, bool]:
        """Make the policy's move, and the opponent's."""
        done, _ = self.game.step(text)
        done = self._play_opponent(done=done)
        if not done:
            observation = self._observe()
            return observation if self.is_chat else f"\n{observation}\n", 0.0, False
        rewards, _ = self.game.close()
        return "", float(rewards[PLAYER]), True

    def _play_opponent(self, *, done: bool) -> bool:
        """Let the opponent move until the policy's turn. Return whether the game is over."""
        while not done and self.game.state.current_player_id != PLAYER:
            assert self.opponent is not None
            done, _ = self.game.step(self.opponent(self._observe()))
        return done

    def _observe(self) -> str:
        """Return the current player's new messages, without its own moves."""
        from textarena import ObservationType

        player, observations = self.game.get_observation()
        return "\n".join(
            message
            for sender, message, kind in observations
            if not (sender == player and kind is ObservationType.PLAYER_ACTION)
        )


ADAPTER = Adapter(requirement="textarena", prompts=load_prompts, environment=load_environment)
