# SPDX-License-Identifier: Apache-2.0
"""An OpenEnv server: the model reads a number from 0 to 3, and the number says which move is right.

python examples/openenv/server.py --port 8010
"""

from __future__ import annotations

import argparse
import random
from typing import Any, Literal

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import Field

MOVES = ("left", "down", "right", "up")
NUM_SIGNS = 2  # of one episode


class Move(Action):
    """Goes one step."""

    move: Literal["left", "down", "right", "up"] = Field(description="where to go")


class Sign(Observation):
    """The number of the next right move."""

    number: int


class Signs(Environment[Move, Sign, State]):
    """Rewards each right move with 0.5."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Sign:
        self._dice = random.Random(seed)
        self._state = State(episode_id=episode_id, step_count=0, right=0)
        return self._next(reward=0.0, done=False)

    def step(self, action: Move, timeout_s: float | None = None, **options: Any) -> Sign:
        is_right = action.move == MOVES[self._number]
        self._state.step_count += 1
        self._state.right += int(is_right)
        return self._next(reward=0.5 * is_right, done=self._state.step_count == NUM_SIGNS)

    @property
    def state(self) -> State:
        return self._state

    def _next(self, *, reward: float, done: bool) -> Sign:
        self._number = self._dice.randrange(len(MOVES))
        return Sign(number=self._number, reward=reward, done=done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8010)
    parser.add_argument("--sessions", type=int, default=64, help="episodes at the same time")
    arguments = parser.parse_args()
    app = create_fastapi_app(Signs, Move, Sign, max_concurrent_envs=arguments.sessions)
    uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
