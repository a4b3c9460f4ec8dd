"""An OpenEnv server with a game: guess a number from 0 to 4, three times.

python openenv_server.py PORT [SESSIONS [number]]

With `number`, an action is a number instead of a text.
"""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    """The policy's turn."""

    text: str


class Number(Action):
    """The policy's turn, as a number."""

    number: int


class Hint(Observation):
    """The game's answer."""

    says: str = ""


class Game(Environment):
    """Numbers are words, w0 to w4; the reward is 1 for the right one."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self.number, self.guesses = (seed or 0) % 5, 0
        return Hint(says="w30 w31")

    def step(self, action: Guess | Number, timeout_s: float | None = None, **_: Any) -> Hint:
        self.guesses += 1
        said = action.text.split()[-1:] if isinstance(action, Guess) else [f"w{action.number}"]
        is_right = said == [f"w{self.number}"]
        done = is_right or self.guesses == 3
        metadata = {"success": is_right}
        return Hint(says="w32", reward=float(is_right), done=done, metadata=metadata)

    @property
    def state(self) -> State:
        return State(step_count=self.guesses)


if __name__ == "__main__":
    sessions = int(sys.argv[2]) if len(sys.argv) > 2 else 64
    kind = Number if "number" in sys.argv else Guess
    app = create_fastapi_app(Game, kind, Hint, max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
