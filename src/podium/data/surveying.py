# SPDX-License-Identifier: Apache-2.0
"""Reads the rows of a source before a run, the first or all, and reports what became of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from podium.data.chat import Dropped
from podium.data.documents import Document
from podium.data.examples import SourcesMaker
from podium.data.prompts import PromptTokenizer
from podium.data.results import MadeExample
from podium.data.rows import Row
from podium.data.skipping import SkipCounts, SkippedRow, SkipPolicy
from podium.data.sources import Source, open_source
from podium.data.tasks import Task, TaskReader
from podium.errors import BadRowError, DataError, counted
from podium.observe.row_progress import RowProgress
from podium.recipe.schema import DataSection, SourceSection

# How many bad rows are named, and how many documents are kept to look at their ends.
_NAMED, _KEPT_DOCUMENTS = 20, 2000

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class BadRows:
    """Rows of a source that cannot be used: the first by name, all by number."""

    num_read: int = 0
    num_bad: int = 0
    first: list[SkippedRow] = field(default_factory=list)


class SourceRows:
    """The first `limit` rows (None: all) of a source; those that cannot be used are counted in `bad`."""

    def __init__(
        self, section: SourceSection, key: str, limit: int | None, progress: RowProgress,
        look: Callable[[Row], object] = lambda row: None,
    ) -> None:  # fmt: skip
        """`look` is called with each row that can be used."""
        self._section, self._key, self._limit, self._progress = section, key, limit, progress
        self._look = look
        self.bad = BadRows()
        self._source: Source | None = None

    @property
    def note(self) -> str | None:
        """What reading changed in the rows."""
        return None if self._source is None else self._source.note

    def results(self, use: Callable[[Row], T]) -> Iterator[T]:
        """What `use` makes of each row that can be used."""
        for row in islice(self._rows(), self._limit):
            self.bad.num_read += 1
            try:
                result = use(row)
                self._look(row)
            except BadRowError as error:
                self.bad.num_bad += 1
                if len(self.bad.first) < _NAMED:
                    self.bad.first.append(SkippedRow.of(row, self._key, error))
                continue
            yield result

    def _rows(self) -> Iterator[Row]:
        self._source = source = open_source(self._section, self._key, keep_bad=True)
        for block in range(source.num_blocks):
            rows = source.read_block(block)
            for at, row in enumerate(rows):
                self._progress.show(self._key, self.bad.num_read, (block + at / len(rows)) / source.num_blocks)
                yield row


@dataclass(slots=True, kw_only=True)
class ExampleSurvey:
    """What became of the rows of a source with fixed data."""

    bad: BadRows
    dropped: Counter[Dropped] = field(default_factory=Counter)
    first: tuple[Document, ...] = ()
    whole: list[Document] = field(default_factory=list)  # documents that are not truncated, the first of them
    num_documents: int = 0
    num_tokens: int = 0
    num_trained: int = 0
    num_truncated: int = 0

    @classmethod
    def of(cls, rows: SourceRows, maker: SourcesMaker) -> ExampleSurvey:
        """Tokenizes all rows."""
        survey = cls(bad=rows.bad)
        for made in rows.results(lambda row: maker.make(0, row)):
            match made:
                case MadeExample():
                    survey._add(made)
                case Dropped():
                    survey.dropped[made] += 1
                case SkippedRow():
                    raise AssertionError("the maker of a survey skips nothing")
        return survey

    def _add(self, made: MadeExample) -> None:
        documents = made.example.documents
        self.first = self.first or documents
        self.num_documents += len(documents)
        self.num_tokens += sum(len(document.tokens) for document in documents)
        self.num_trained += sum(document.num_trained for document in documents)
        self.num_truncated += made.truncated
        if not made.truncated and len(self.whole) < _KEPT_DOCUMENTS:
            self.whole += documents


@dataclass(slots=True, kw_only=True)
class TaskSurvey:
    """What became of the rows of a source of prompts."""

    bad: BadRows
    first: Task | None = None
    num_tasks: int = 0
    num_prompts: int = 0  # tasks that have one; the environment makes that of the others
    num_tokens: int = 0
    shortest: int = 0
    longest: int = 0
    num_fitting: int = 0
    num_answered: int = 0

    @classmethod
    def of(cls, rows: SourceRows, reader: TaskReader, tokenizer: PromptTokenizer, *, room: int) -> TaskSurvey:
        """Tokenizes all prompts; one fits if it has at most `room` tokens."""
        survey = cls(bad=rows.bad)

        def use(row: Row) -> tuple[Task, int] | None:
            task = reader.read(0, row)
            return None if task is None else (task, len(task.encode(tokenizer)))

        for result in rows.results(use):
            if result is not None:
                survey._add(*result, room)
        return survey

    def _add(self, task: Task, length: int, room: int) -> None:
        self.first = self.first or task
        self.shortest = min(self.shortest, length) if self.num_tasks else length
        self.longest = max(self.longest, length)
        self.num_tasks += 1
        self.num_prompts += task.has_prompt
        self.num_tokens += length
        self.num_fitting += length <= room
        self.num_answered += task.reference is not None


def require_usable(surveyed: Sequence[tuple[str, BadRows]], data: DataSection) -> list[str]:
    """Raises a DataError about rows that would end the run. Returns lines about rows that the run would skip.
    `surveyed`: (key, rows) of each source."""
    with_bad = [(key, bad) for key, bad in surveyed if bad.num_bad]
    if not with_bad:
        return []
    total = sum(bad.num_bad for _, bad in with_bad)
    named = [row for _, bad in with_bad for row in bad.first][:_NAMED]
    lines = [f"  {row.problem}" for row in named]
    if total > len(named):
        lines.append(f"  and {total - len(named)} more")
    counts = ", ".join(f"{key}: {bad.num_bad} of {bad.num_read}" for key, bad in with_bad)
    if data.on_error == "fail":
        raise DataError(
            f"{counted(total, 'row')} cannot be used ({counts}):\n"
            + "\n".join(lines)
            + "\nFix or remove them, or set data.on_error to skip."
        )
    policy = SkipPolicy.of(data)
    for part in ("data.train", "data.heldout"):
        rows = [bad for key, bad in with_bad if key.startswith(part)]
        read = sum(bad.num_read for key, bad in surveyed if key.startswith(part))
        first = [row.problem for bad in rows for row in bad.first]
        policy.check(SkipCounts(read=read, skipped=sum(bad.num_bad for bad in rows), first=tuple(first[:_NAMED])), part)
    return [f"{counted(total, 'row')} cannot be used and would be skipped ({counts}):", *lines]
