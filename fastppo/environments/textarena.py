"""Games of TextArena as environments.

prompts: textarena:GuessTheNumber-v0?size=200&seed=0    # `size` games, by seeds from `seed`
environment: textarena:GuessTheNumber-v0?max_turns=8    # options of the game's class

With `chat=true` among the options of the prompts the game's words are messages of a user, for
models with a chat template; else they are lines of a text.

The game's own reward is paid at its last turn. A game seeds Python's global generator when it
begins, and may draw from it later. Games of two players need another one, in a file of yours:

    from fastppo.environments.textarena import Game

    def environment():
        return Game("TicTacToe-v0", opponent=lambda text: "[4]")
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import textarena
from textarena import ObservationType

from fastppo.data.chat import is_chat
from fastppo.data.rows import DataError, Rows
from fastppo.rewards.addresses import Address, as_opening

PLAYER = 0
"""The seat of the policy."""


def load_prompts(address: Address) -> Rows:
    """A row a game: its seed, from which the game's own first words follow."""
    options = dict(address.options)
    size = options.pop("size", 1000)
    seed = options.pop("seed", 0)
    chat = options.pop("chat", False)
    if options:
        raise DataError(f"expected the options size, seed and chat, got {', '.join(options)}")
    prompt = [{"role": "user", "content": address.name}] if chat else address.name
    return [{"prompt": prompt, "seed": seed + game} for game in range(size)]


def load_environment(target: str) -> Callable[[], Game]:
    """What makes games of a name; the options are those of the game's class."""
    address = Address.of(target)
    make = functools.partial(Game, address.name, **address.options)
    make().reset(address.name)  # what cannot be played is known before a rollout
    return make


class Game:
    """A game in which the policy has the first seat.

    Args:
        name: in TextArena's registry.
        opponent: a function from a text to a text, for games of two.
        options: of the game's class.
    """

    def __init__(
        self, name: str, opponent: Callable[[str], str] | None = None, **options: Any
    ) -> None:
        # Without TextArena's wrappers, which repeat all that was said: the policy has read it.
        self.game = textarena.make(f"{name}-raw", **options)
        self.opponent = opponent

    def reset(self, prompt: Any, seed: int | None = None) -> Any:
        """Begins a game; the game's rules and first words, as a chat where `prompt` is one."""
        self.is_chat = is_chat(prompt)
        self.game.reset(num_players=1 if self.opponent is None else 2, seed=seed)
        self._play_opponent(done=False)
        rules = self._news()
        return as_opening(rules if self.is_chat else f"{rules}\n", prompt)

    def step(self, text: str) -> tuple[str, float, bool]:
        """The policy's move; the other player's is made at once."""
        done, _ = self.game.step(text)
        done = self._play_opponent(done=done)
        if not done:
            news = self._news()
            return news if self.is_chat else f"\n{news}\n", 0.0, False
        rewards, _ = self.game.close()
        return "", float(rewards[PLAYER]), True

    def _play_opponent(self, *, done: bool) -> bool:
        """Moves until it is the policy's turn or the game is over, which is returned."""
        while not done and self.game.state.current_player_id != PLAYER:
            assert self.opponent is not None
            done, _ = self.game.step(self.opponent(self._news()))
        return done

    def _news(self) -> str:
        """What the player whose turn it is has not read yet, without its own moves."""
        player, observations = self.game.get_observation()
        return "\n".join(
            message
            for sender, message, kind in observations
            if not (sender == player and kind is ObservationType.PLAYER_ACTION)
        )
