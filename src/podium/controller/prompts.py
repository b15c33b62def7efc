# SPDX-License-Identifier: Apache-2.0
"""Takes prompts for the steps of a run in order, from a saved position. Skips and counts prompts that are too long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podium.data.prompts import PromptTokenizer
from podium.data.skipping import SkippedRow, SkipPolicy
from podium.data.tasks import IndexedTask, Task, TaskCursor, prompt_room
from podium.errors import DataError
from podium.recipe import OnPolicyRecipe

# After this many consecutive prompts that are too long, the data is assumed to have no others.
_PATIENCE = 10_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ahead:
    """Prompts taken before their step (or the error that was raised), with state and metrics from before."""

    result: list[IndexedTask] | Exception
    state: dict[str, Any]
    metrics: dict[str, float]
    num_skipped: int  # rows that this process had skipped


class PromptSource:
    """Supplies prompts. Checks only their lengths; generators tokenize for themselves."""

    def __init__(self, recipe: OnPolicyRecipe, tokenizer: PromptTokenizer, state: Mapping[str, Any] | None) -> None:
        data = recipe.data
        self._tokenizer = tokenizer
        self._cursor = TaskCursor(
            data.train, "data.train", seed=recipe.run.seed, shuffle=data.shuffle, shuffle_rows=data.shuffle_rows,
            state=None if state is None else state["cursor"], policy=SkipPolicy.of(data), check=self._measure,
            needs_prompt=recipe.needs_prompts,
        )  # fmt: skip
        self._length = 0  # of the prompt that was read last
        self._skips, self._num_named = data.on_error == "skip", 0
        self._overlong = data.overlong
        self._room = prompt_room(recipe)
        self._new_tokens = recipe.rollout.max_new_tokens
        self._left_out = 0 if state is None else int(state["left_out"])
        self._epoch = 0
        self._has_taken = state is not None
        # Prompts after the position that steps before it have used already; a run with stale groups leaves some.
        self._done: frozenset[int] = frozenset(() if state is None else state.get("done", ()))
        self._ahead: _Ahead | None = None
        self._ready: list[IndexedTask] = []  # of those taken ahead, when some of them were taken

    def take(self, count: int) -> list[IndexedTask]:
        """Returns the next prompts that leave room for an answer."""
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            if isinstance(ahead.result, Exception):
                raise ahead.result
            self._ready += ahead.result
        taken, self._ready = self._ready[:count], self._ready[count:]
        return taken + self._next_prompts(count - len(taken))

    def take_ahead(self, count: int) -> None:
        """Takes the next prompts early, while workers are busy. State and metrics do not change yet. `take` raises an
        error in a prompt later, so that it does not fail the current step."""
        if self._ahead is None and not self._ready:
            state, metrics, num_skipped = self.state(), self.metrics(), len(self._cursor.skipped_rows)
            try:
                result: list[IndexedTask] | Exception = self._next_prompts(count)
            except Exception as error:  # a source's `map` is the user's code
                result = error
            self._ahead = _Ahead(result=result, state=state, metrics=metrics, num_skipped=num_skipped)

    def _measure(self, task: Task) -> None:
        self._length = len(task.encode(self._tokenizer))

    def _next_prompts(self, count: int) -> list[IndexedTask]:
        taken: list[IndexedTask] = []
        in_a_row = 0
        while len(taken) < count:
            prompt = self._cursor.take(1)[0]
            length = self._length
            if prompt.prompt_index in self._done:
                self._done -= {prompt.prompt_index}
                continue
            if length <= self._room:
                taken.append(prompt)
                self._epoch, in_a_row, self._has_taken = prompt.epoch, 0, True
                continue
            self._left_out, in_a_row = self._left_out + 1, in_a_row + 1
            problem = (
                f"a prompt of {length} tokens leaves no room for rollout.max_new_tokens {self._new_tokens} within "
                f"{self._room + self._new_tokens} (data.max_length, rollout.max_length or the model's context)"
            )
            if self._overlong == "error":
                raise DataError(
                    f"{prompt.task.where}: {problem}. Lower rollout.max_new_tokens, or set data.overlong to drop."
                )
            if in_a_row >= _PATIENCE or (not self._has_taken and self._cursor.has_gone_through):
                raise DataError(
                    f"data.train: all prompts are too long: of {in_a_row} in a row, the last ({prompt.task.where}) is "
                    f"like the others: {problem}. Lower rollout.max_new_tokens or raise data.max_length."
                )
        return taken

    def metrics(self) -> dict[str, float]:
        """Number of prompts skipped as too long, and the epoch."""
        if self._ahead is not None:
            return self._ahead.metrics
        skipped = {"prompts/skipped": float(self._cursor.num_skipped)} if self._skips else {}
        return {"prompts/too_long": float(self._left_out), "epoch": float(self._epoch), **skipped}

    @property
    def notes(self) -> list[str]:
        """What reading changed in the rows so far, for the user."""
        return self._cursor.notes

    def take_skipped(self) -> Sequence[SkippedRow]:
        """The rows that were skipped since the last call, without those of prompts taken ahead."""
        rows = self._cursor.skipped_rows
        end = len(rows) if self._ahead is None else self._ahead.num_skipped
        begin, self._num_named = self._num_named, end
        return rows[begin:end]

    def state(self) -> dict[str, Any]:
        """Position of the next prompts, including those taken ahead. Not while only some of those were taken."""
        if self._ahead is not None:
            return self._ahead.state
        assert not self._ready, f"{len(self._ready)} prompts were taken ahead and are not taken yet"
        done = {"done": sorted(self._done)} if self._done else {}
        return {"cursor": self._cursor.state(), "left_out": self._left_out, **done}
