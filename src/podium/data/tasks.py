# SPDX-License-Identifier: Apache-2.0
"""Tasks of an on-policy program: rows read as tasks, endlessly, from a position that can be saved."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from podium.data.chat import load_map
from podium.data.chat_text import as_text
from podium.data.documents import Tokens
from podium.data.kinds import Message, named_values
from podium.data.masks import Tools
from podium.data.prompts import PromptParts, PromptTokenizer, completion_text, has_prompt, prompt_parts
from podium.data.rows import LinePlace, Row
from podium.data.skipping import RowSkipper, SkipCounts, SkippedRow, SkipPolicy, decode_counts, encode_counts
from podium.data.source_names import source_names
from podium.data.sources import first_row, open_source
from podium.data.stream import MixedStream, SourcePosition, StreamPosition
from podium.errors import BadRowError, DataError, counted
from podium.recipe import OnPolicyRecipe, SourceSection

# Columns that may hold a row's correct answer; the first one present counts. `answer` comes before `solution`: if a row
# has both, the solution is the derivation and the answer the result.
REFERENCE_COLUMNS = ("reference", "reward_model", "ground_truth", "answer", "solution", "target", "completion")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """A row as a task: the prompt, the correct answer, and everything that a reward may read. Picklable."""

    source: str  # the row's `data_source`, or the name of its file
    messages: tuple[Message, ...] | None  # one of messages and text; neither: an environment begins the episode
    text: str | None
    tools: Tools
    reference: str | None  # values that are not text in the data are JSON here
    row: Mapping[str, Any]  # all columns, after the source's `columns` and `map`
    place: str | LinePlace

    @property
    def where(self) -> str:
        """File and line for messages. Not a field: finding a line's number reads the file up to it."""
        return str(self.place)

    @property
    def prompt_text(self) -> str:
        """The prompt as readable text."""
        return as_text(self.messages) if self.messages is not None else self.text or ""

    @property
    def has_prompt(self) -> bool:
        """Whether the row has a prompt."""
        return self.messages is not None or self.text is not None

    def encode(self, tokenizer: PromptTokenizer) -> Tokens:
        """The chat with the generation prompt, or the text without an end token; nothing without a prompt."""
        if not self.has_prompt:
            return np.empty(0, np.int32)
        tokens = tokenizer.tokens(self.messages, self.text, self.tools, Row(self.row, self.place))
        if len(tokens) == 0:
            raise BadRowError(
                f"{self.where}: the prompt is empty, so there is nothing to begin an answer with. Take the row out, or "
                "drop it with the source's `map`."
            )
        return tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndexedTask:
    """A prompt of the run. Its index only grows, over epochs too: it permanently identifies the prompt's group and its
    random numbers."""

    prompt_index: int
    epoch: int  # of the task's source
    task: Task


class TaskReader:
    """Rows of the sources at `key` (`data.train`) as tasks: Podium's own, verl's, and TRL's prompt datasets."""

    def __init__(
        self, sections: Sequence[SourceSection], key: str, check: Callable[[Task], object] | None = None, *,
        needs_prompt: bool = True,
    ) -> None:  # fmt: skip
        """`check` may raise a BadRowError about a task. Without `needs_prompt`, a row may have no prompt."""
        self._check, self._needs_prompt = check, needs_prompt
        self._columns = [section.columns for section in sections]
        self._maps = [load_map(section, f"{key}.{index}") for index, section in enumerate(sections)]
        self._names = source_names(sections)

    def read(self, source: int, row: Row) -> Task | None:
        """The row's task; None if the source's `map` drops it. An invalid row raises a BadRowError that names it."""
        values = named_values(row, self._columns[source], self._maps[source])
        if values is None:
            return None
        task = self._task(source, values, row)
        if self._check is not None:
            self._check(task)
        return task

    def _task(self, source: int, values: Mapping[str, Any], row: Row) -> Task:
        if self._needs_prompt or has_prompt(values):
            parts = prompt_parts(values, self._columns[source], row)
        else:
            parts = PromptParts(messages=None, text=None, tools=None, reference=None)
        reference = _reference(values, row)
        name = values.get("data_source")
        return Task(
            source=str(name) if name is not None else self._names[source],
            messages=None if parts.messages is None else tuple(parts.messages),
            text=parts.text,
            tools=parts.tools,
            reference=parts.reference if reference is None else reference,
            row=dict(values),
            place=row.place,
        )


class TaskCursor:
    """An endless mix of tasks of several sources by weight, from a position that can be saved and restored exactly."""

    def __init__(
        self, sections: Sequence[SourceSection], key: str, *, seed: int, shuffle: bool, shuffle_rows: int,
        state: Mapping[str, Any] | None = None, policy: SkipPolicy | None = None,
        check: Callable[[Task], object] | None = None, needs_prompt: bool = True,
    ) -> None:  # fmt: skip
        """With the `state` of an earlier cursor it continues there: the same tasks under the same numbers. A task that
        `check` raises a BadRowError for is treated as `policy` says, like one that cannot be read."""
        self._key, policy = key, policy or SkipPolicy()
        self._next_index, position = (0, None) if state is None else _decoded(state)
        self._skipper = RowSkipper(policy, key, decode_counts({} if state is None else state.get("rows", {})))
        self._reader = TaskReader(sections, key, check, needs_prompt=needs_prompt)
        self._sources = [
            open_source(section, f"{key}.{index}", keep_bad=policy.skips) for index, section in enumerate(sections)
        ]
        self._stream = MixedStream(
            self._sources,
            [section.weight for section in sections],
            seed=seed, shuffle=shuffle, shuffle_rows=shuffle_rows,
            position=position,
        )  # fmt: skip

    @property
    def has_gone_through(self) -> bool:
        """Whether every row of every source has been read once."""
        return all(place.epoch > 0 for place in self._stream.position.sources)

    @property
    def num_skipped(self) -> int:
        """Rows that were skipped since the run began."""
        return self._skipper.counts.skipped

    @property
    def skipped_rows(self) -> Sequence[SkippedRow]:
        """Rows that this cursor skipped."""
        return self._skipper.rows

    @property
    def notes(self) -> list[str]:
        """What reading changed in the rows so far, for the user."""
        return [source.note for source in self._sources if source.note is not None]

    def state(self) -> dict[str, Any]:
        """The position as plain values, for a checkpoint."""
        stream = self._stream.position
        return {
            "next_index": self._next_index,
            "stream_draw": stream.draw,
            "sources": [[place.epoch, place.block, place.row] for place in stream.sources],
            "rows": encode_counts(self._skipper.counts),
        }

    def take(self, count: int) -> list[IndexedTask]:
        """The next `count` tasks. A row that `map` drops or that is skipped takes no number."""
        return [self._next() for _ in range(count)]

    def _next(self) -> IndexedTask:
        before = [place.epoch for place in self._stream.position.sources]
        while True:
            drawn = self._stream.draw()
            read = partial(self._reader.read, drawn.source, drawn.row)
            task = self._skipper.attempt(drawn.source, drawn.row, read, epoch=drawn.epoch)
            if task is not None:
                break
            # Two whole passes over every source without one task: there will never be one.
            after = self._stream.position.sources
            if all(now.epoch >= then + 2 for now, then in zip(after, before, strict=True)):
                raise _all_dropped(self._key, self._skipper.counts)
        self._next_index += 1
        return IndexedTask(prompt_index=self._next_index - 1, epoch=drawn.epoch, task=task)


def read_tasks(
    sections: Sequence[SourceSection], key: str, limit: int | None, *, skipper: RowSkipper | None = None,
    check: Callable[[Task], object] | None = None, needs_prompt: bool = True,
) -> list[Task]:  # fmt: skip
    """The first `limit` tasks (None: all) in file order: held-out prompts. `skipper` decides about rows that cannot be
    read, or that `check` raises a BadRowError for; without it they are errors."""
    skipper = skipper or RowSkipper(SkipPolicy(), key)
    tasks: list[Task] = []
    for task in tasks_in_order(sections, key, skipper, check, needs_prompt=needs_prompt):
        tasks.append(task)
        if len(tasks) == limit:
            break
    if not tasks:
        raise _all_dropped(key, skipper.counts)
    return tasks


def check_task_source(section: SourceSection, key: str, *, skips: bool = False, needs_prompt: bool = True) -> None:
    """Raises the error that a run would raise about the first row. Reads only the beginning, needs no tokenizer, uses
    no network for a hub id, and does not run a `map`. `skips`: a run that skips bad rows may begin with one."""
    row = first_row(section, key, keep_bad=skips)
    if row is None or section.map is not None:
        return
    try:
        TaskReader([section], key, needs_prompt=needs_prompt).read(0, row)
    except BadRowError as error:
        if not skips:
            raise BadRowError(f"{key}: {error}") from error


def prompt_room(recipe: OnPolicyRecipe) -> int:
    """The longest prompt, in tokens, that leaves room for an answer. The recipe is resolved."""
    longest = recipe.data.max_length
    assert longest is not None, "resolved before launch"
    return min(recipe.rollout.max_length or longest, longest) - recipe.rollout.max_new_tokens


def tasks_in_order(
    sections: Sequence[SourceSection], key: str, skipper: RowSkipper, check: Callable[[Task], object] | None, *,
    needs_prompt: bool,
) -> Iterator[Task]:  # fmt: skip
    """All tasks, source by source, as their files have them."""
    reader = TaskReader(sections, key, check, needs_prompt=needs_prompt)
    for index, section in enumerate(sections):
        source = open_source(section, f"{key}.{index}", keep_bad=skipper.skips)
        for block in range(source.num_blocks):
            for row in source.read_block(block):
                task = skipper.attempt(index, row, partial(reader.read, index, row))
                if task is not None:
                    yield task


def no_task(key: str) -> DataError:
    """The error for sources whose `map` drops every row."""
    return DataError(f"{key}: the sources' `map` drops every row, so there is no task. Let it return some rows.")


def _all_dropped(key: str, counts: SkipCounts) -> DataError:
    if counts.skipped:
        return DataError(
            f"{key}: there is no task: {counts.skipped} of {counted(counts.read, 'row')} cannot be used. The first: "
            f"{counts.first[0]}"
        )
    return no_task(key)


def _reference(values: Mapping[str, Any], row: Row) -> str | None:
    for name in REFERENCE_COLUMNS:
        value = values.get(name)
        match name:
            case "reward_model":
                value = value.get("ground_truth") if isinstance(value, Mapping) else None
            case "completion":
                return completion_text(value, row)
        if value is not None:
            return value if isinstance(value, str) else _as_json(value, name, row)
    return None


def _as_json(value: Any, name: str, row: Row) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise BadRowError(
            f"{row.where}: `{name}` is the reference and neither text nor JSON ({error}). Make it a string with the "
            "source's `map`."
        ) from error


def _decoded(state: Mapping[str, Any]) -> tuple[int, StreamPosition]:
    try:
        places = [tuple(operator.index(number) for number in place) for place in state["sources"]]
        return operator.index(state["next_index"]), StreamPosition(
            draw=operator.index(state["stream_draw"]),
            sources=tuple(SourcePosition(epoch=epoch, block=block, row=row) for epoch, block, row in places),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"the saved position in the tasks cannot be read ({type(error).__name__}: {error}). It was written by "
            "another version or is damaged; resume from another checkpoint."
        ) from error
