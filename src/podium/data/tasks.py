# SPDX-License-Identifier: Apache-2.0
"""Tasks of an on-policy program: rows read as tasks, endlessly, from a position that can be saved."""

from __future__ import annotations

import json
import operator
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podium.data.chat import load_map
from podium.data.documents import Tokens
from podium.data.files import format_of
from podium.data.kinds import Message, named_values
from podium.data.masks import Tools
from podium.data.prompts import PromptTokenizer, as_text, completion_text, prompt_parts
from podium.data.rows import LinePlace, Row
from podium.data.sources import first_row, open_source
from podium.data.storage import is_glob
from podium.data.stream import MixedStream, SourcePosition, StreamPosition
from podium.errors import DataError
from podium.recipe import OnPolicyRecipe, SourceSection

# Columns that may hold a row's correct answer; the first one present counts. `answer` comes before `solution`: if a row
# has both, the solution is the derivation and the answer the result.
REFERENCE_COLUMNS = ("reference", "reward_model", "ground_truth", "answer", "solution", "target", "completion")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """A row as a task: the prompt, the correct answer, and everything that a reward may read. Picklable."""

    source: str  # the row's `data_source`, or the name of its file
    messages: tuple[Message, ...] | None  # exactly one of messages and text
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
        if self.messages is not None:
            return as_text(self.messages)
        assert self.text is not None
        return self.text

    def encode(self, tokenizer: PromptTokenizer) -> Tokens:
        """The chat with the generation prompt, or the text without an end token."""
        tokens = tokenizer.tokens(self.messages, self.text, self.tools, Row(self.row, self.place))
        if len(tokens) == 0:
            raise DataError(
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

    def __init__(self, sections: Sequence[SourceSection], key: str) -> None:
        self._columns = [section.columns for section in sections]
        self._maps = [load_map(section, f"{key}.{index}") for index, section in enumerate(sections)]
        self._names = _source_names(sections)

    def read(self, source: int, row: Row) -> Task | None:
        """The row's task; None if the source's `map` drops it. An invalid row raises a DataError that names it."""
        values = named_values(row, self._columns[source], self._maps[source])
        return None if values is None else self._task(source, values, row)

    def _task(self, source: int, values: Mapping[str, Any], row: Row) -> Task:
        parts = prompt_parts(values, self._columns[source], row)
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
        state: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """With the `state` of an earlier cursor it continues there: the same tasks under the same numbers."""
        self._key = key
        self._next_index, position = (0, None) if state is None else _decoded(state)
        self._reader = TaskReader(sections, key)
        self._stream = MixedStream(
            [open_source(section, f"{key}.{index}") for index, section in enumerate(sections)],
            [section.weight for section in sections],
            seed=seed, shuffle=shuffle, shuffle_rows=shuffle_rows,
            position=position,
        )  # fmt: skip

    @property
    def has_gone_through(self) -> bool:
        """Whether every row of every source has been read once."""
        return all(place.epoch > 0 for place in self._stream.position.sources)

    def state(self) -> dict[str, Any]:
        """The position as plain values, for a checkpoint."""
        stream = self._stream.position
        return {
            "next_index": self._next_index,
            "stream_draw": stream.draw,
            "sources": [[place.epoch, place.block, place.row] for place in stream.sources],
        }

    def take(self, count: int) -> list[IndexedTask]:
        """The next `count` tasks. A row that `map` drops takes no number."""
        return [self._next() for _ in range(count)]

    def _next(self) -> IndexedTask:
        before = [place.epoch for place in self._stream.position.sources]
        while True:
            drawn = self._stream.draw()
            task = self._reader.read(drawn.source, drawn.row)
            if task is not None:
                break
            # Two whole passes over every source without one task: there will never be one.
            after = self._stream.position.sources
            if all(now.epoch >= then + 2 for now, then in zip(after, before, strict=True)):
                raise _all_dropped(self._key)
        self._next_index += 1
        return IndexedTask(prompt_index=self._next_index - 1, epoch=drawn.epoch, task=task)


def read_tasks(sections: Sequence[SourceSection], key: str, limit: int | None) -> list[Task]:
    """The first `limit` tasks (None: all) in file order: held-out prompts."""
    tasks: list[Task] = []
    for task in tasks_in_order(sections, key):
        tasks.append(task)
        if len(tasks) == limit:
            break
    if not tasks:
        raise _all_dropped(key)
    return tasks


def check_task_source(section: SourceSection, key: str) -> None:
    """Raises the error that a run would raise about the first row. Reads only the beginning, needs no tokenizer, uses
    no network for a hub id, and does not run a `map`."""
    row = first_row(section, key)
    if row is None or section.map is not None:
        return
    try:
        TaskReader([section], key).read(0, row)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error


def prompt_room(recipe: OnPolicyRecipe) -> int:
    """The longest prompt, in tokens, that leaves room for an answer. The recipe is resolved."""
    longest = recipe.data.max_length
    assert longest is not None, "resolved before launch"
    return min(recipe.rollout.max_length or longest, longest) - recipe.rollout.max_new_tokens


def tasks_in_order(sections: Sequence[SourceSection], key: str) -> Iterator[Task]:
    """All tasks, source by source, as their files have them."""
    reader = TaskReader(sections, key)
    for index, section in enumerate(sections):
        source = open_source(section, f"{key}.{index}")
        for block in range(source.num_blocks):
            for row in source.read_block(block):
                task = reader.read(index, row)
                if task is not None:
                    yield task


def _all_dropped(key: str) -> DataError:
    return DataError(f"{key}: the sources' `map` drops every row, so there is no task. Let it return some rows.")


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
        raise DataError(
            f"{row.where}: `{name}` is the reference and neither text nor JSON ({error}). Make it a string with the "
            "source's `map`."
        ) from error


def _source_names(sections: Sequence[SourceSection]) -> list[str]:
    """File names without folder and suffix; sources that would share one also get the folder."""
    names = [_folder_and_name(section.path) for section in sections]
    counts = Counter(name for _, name in names)
    return [f"{folder}/{name}" if counts[name] > 1 and folder else name for folder, name in names]


def _folder_and_name(path: str) -> tuple[str, str]:
    parts = [part for part in path.split("/") if part] or [path]
    while len(parts) > 1 and is_glob(parts[-1]):  # data/math/*.parquet is math
        parts.pop()
    folder, last = parts[-2] if len(parts) > 1 else "", parts[-1]
    return folder, os.path.splitext(last.removesuffix(".gz"))[0] if format_of(last) is not None else last


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
