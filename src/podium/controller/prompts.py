# SPDX-License-Identifier: Apache-2.0
"""Prompts for the steps of a run: drawn in order, too long ones left out and counted, from a position that is saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podium.data.tasks import DrawnTask, PromptEncoder, TaskCursor
from podium.errors import DataError
from podium.recipe import Recipe

# Prompts in a row that are too long, after which the data is taken to have no others.
_PATIENCE = 10_000


class PromptSource:
    """Only lengths are looked at here; generators tokenize for themselves."""

    def __init__(self, recipe: Recipe, encoder: PromptEncoder, state: Mapping[str, Any] | None) -> None:
        data = recipe.data
        assert data.max_length is not None
        self._cursor = (
            TaskCursor(
                data.train, "data.train", seed=recipe.run.seed, shuffle=data.shuffle, shuffle_rows=data.shuffle_rows
            )
            if state is None
            else TaskCursor.restore(
                state["cursor"], data.train, "data.train", seed=recipe.run.seed, shuffle=data.shuffle,
                shuffle_rows=data.shuffle_rows,
            )
        )  # fmt: skip
        self._encoder, self._overlong = encoder, data.overlong
        self._room = min(recipe.rollout.max_length or data.max_length, data.max_length) - recipe.rollout.max_new_tokens
        self._new_tokens = recipe.rollout.max_new_tokens
        self._left_out = 0 if state is None else int(state["left_out"])
        self._epoch = 0
        self._ahead: tuple[list[DrawnTask], dict[str, Any]] | None = None

    def take(self, count: int) -> list[DrawnTask]:
        """The next prompts that leave room for an answer."""
        if self._ahead is not None:
            (ready, _), self._ahead = self._ahead, None
            assert len(ready) == count, f"{len(ready)} prompts were drawn ahead and {count} are taken"
            return ready
        return self._drawn(count)

    def draw_ahead(self, count: int) -> None:
        """Draws the next prompts already, while others work; the state stays that of before."""
        if self._ahead is None:
            before = self.state()
            self._ahead = (self._drawn(count), before)

    def _drawn(self, count: int) -> list[DrawnTask]:
        taken: list[DrawnTask] = []
        in_a_row = 0
        while len(taken) < count:
            drawn = self._cursor.take(1)[0]
            length = len(self._encoder.encode(drawn.task))
            if length <= self._room:
                taken.append(drawn)
                self._epoch, in_a_row = drawn.epoch, 0
                continue
            self._left_out, in_a_row = self._left_out + 1, in_a_row + 1
            told = (
                f"a prompt of {length} tokens leaves no room for rollout.max_new_tokens {self._new_tokens} within "
                f"{self._room + self._new_tokens} (data.max_length, rollout.max_length or the model's context)"
            )
            if self._overlong == "error":
                raise DataError(
                    f"{drawn.task.where}: {told}. Lower rollout.max_new_tokens, or set data.overlong to drop."
                )
            once_through = drawn.epoch > 0 and self._left_out == in_a_row  # no prompt was ever taken
            if in_a_row >= _PATIENCE or once_through:
                raise DataError(
                    f"data.train: all prompts are too long: of {in_a_row} in a row, the last ({drawn.task.where}) is "
                    f"like the others: {told}. Lower rollout.max_new_tokens or raise data.max_length."
                )
        return taken

    def metrics(self) -> dict[str, float]:
        return {"prompts/too_long": float(self._left_out), "epoch": float(self._epoch)}

    def state(self) -> dict[str, Any]:
        """Where the next prompts come from, those drawn ahead first."""
        if self._ahead is not None:
            return self._ahead[1]
        return {"cursor": self._cursor.state(), "left_out": self._left_out}
