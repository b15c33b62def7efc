# SPDX-License-Identifier: Apache-2.0
"""Pages of the table of rollouts: those of one step straight from its file, those of all steps from the index."""

from __future__ import annotations

import itertools
import math
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from podium.ui.answers import PageError, Query
from podium.ui.apart import Apart
from podium.ui.rollout_columns import SORTS, RolloutFilter
from podium.ui.rollout_groups import read_group
from podium.ui.rollout_index import RolloutIndex
from podium.ui.rollout_reading import FOLDER, StepFiles, num_rows, summary_rows, texts_of

_SIZE, _MOST_SIZE, _MOST_PAGES = 50, 500, 1_000_000
# Characters of a search, and the number of an episode or token.
_MOST_SEARCH, _MOST_NUMBER = 1000, 1 << 31
# How long a request waits for a small index, and searches in a large one.
_WAIT_S, _SEARCH_S = 0.5, 1.5
# Files whose rows are kept for the next request.
_MOST_RECENT = 8
_NEWEST = RolloutFilter(sort="-step")
Json = dict[str, Any]


class _RecentFiles:
    """Rows, and numbers of rows, of files that were read a moment ago. Files are known by their inodes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: OrderedDict[tuple[str, int], list[Json]] = OrderedDict()
        self._counts: dict[tuple[str, int], int] = {}

    def rows(self, path: Path, step: int, inode: int) -> list[Json]:
        """All rows of a file, by group and sample. None of a file that cannot be read: its own page says why."""
        key = path.name, inode
        with self._lock:
            if key not in self._rows:
                try:
                    rows = summary_rows(path, step)
                except PageError:
                    rows = []
                self._rows[key] = sorted(rows, key=lambda row: (row["group"], row["sample"]))
                self._counts[key] = len(rows)
                while len(self._rows) > _MOST_RECENT:
                    self._rows.popitem(last=False)
            return self._rows[key]

    def count(self, path: Path, inode: int) -> int:
        """How many rows a file has."""
        key = path.name, inode
        with self._lock:
            if key not in self._counts:
                self._counts[key] = num_rows(path)
            return self._counts[key]


class RunRollouts:
    """The kept rollouts of one run."""

    def __init__(self, run: Path, cache: Path | None, apart: Apart) -> None:
        self._run, self._cache, self._apart = run, cache, apart
        self._lock = threading.Lock()
        self._index: RolloutIndex | None = None
        self._files, self._recent = StepFiles(run), _RecentFiles()

    @property
    def are_there(self) -> bool:
        """Whether the run has any."""
        return bool(self._files.look())

    def close(self) -> None:
        """Ends the thread that builds the index."""
        if self._index is not None:
            self._index.close()

    def page(self, query: Query) -> Json:
        """One page of rows, with the first and last step, and how far the index is."""
        files = self._files.look()
        sort = query.text("sort", "step")
        if sort not in SORTS:
            raise PageError(400, f"sort={sort!r} in the address is none of {', '.join(SORTS)}.")
        number = query.whole("page", 1, least=1, most=_MOST_PAGES)
        size = query.whole("size", _SIZE, least=1, most=_MOST_SIZE)
        step = query.optional_whole("step")
        if len(query.text("q")) > _MOST_SEARCH:
            raise PageError(414, f"the text to search for has more than {_MOST_SEARCH} characters. Take a part of it.")
        wanted = RolloutFilter(
            sort=sort,
            search=query.text("q"),
            source=query.values.get("source"),
            group=query.optional_whole("group"),
            row=query.optional_whole("row"),
            first_step=query.optional_whole("from"),
            last_step=query.optional_whole("to"),
            changed_since=query.optional_whole("changed"),
        )
        if step is not None and wanted.changed_since is not None:  # needs other steps, too
            step, wanted = None, replace(wanted, first_step=step, last_step=step)
        common = {"page": number, "size": size, "steps": [next(iter(files)), next(reversed(files))] if files else []}
        if step is not None:
            return common | self._of_step(files, step, wanted, number, size)
        if not files:
            return common | {"total": 0, "rows": [], "sources": [], "index": {"done": 0, "of": 0}}
        try:
            newest = self._newest(files, wanted, size) if number == 1 and wanted == _NEWEST else None
            return common | (newest or self._of_index(wanted, number, size))
        except sqlite3.DatabaseError as error:
            if "locked" in str(error):
                raise PageError(503, f"another process writes the index of {self._run}. Reload the page.") from error
        try:  # it was removed or damaged: it is a cache, and made again
            self._forget_index()
            return common | self._of_index(wanted, number, size)
        except sqlite3.DatabaseError as error:
            raise PageError(500, f"the index of {self._run / FOLDER} cannot be read: {error}.") from error

    def _of_index(self, wanted: RolloutFilter, number: int, size: int) -> Json:
        with self._lock:
            if self._index is None:
                self._index = RolloutIndex(self._run, self._cache, self._apart, self._files)
            index = self._index
        index.wake(wait_s=_WAIT_S)
        found = index.page(wanted, page=number, size=size, most_s=_SEARCH_S)
        return {
            "total": found.total,
            "is_whole": found.is_whole,
            "rows": found.rows,
            "sources": index.sources(),
            "index": index.progress(),
        }

    def _newest(self, files: Mapping[int, Path], wanted: RolloutFilter, size: int) -> Json | None:
        """The first page of the newest: what a page asks for while a run goes on. Files that are newer than the index
        are not taken in: of those that are shown the rows are read, of others how many they are. None: the index is
        not there, or there is more than newer files that it does not have."""
        index = self._index
        indexed = {} if index is None else index.indexed()
        if index is None or not indexed:
            return None
        steps = list(files)
        new = list(itertools.takewhile(lambda step: step not in indexed, reversed(steps)))
        older = steps[: len(steps) - len(new)]
        if len(older) != len(indexed) or any(
            step not in indexed or not indexed[step][0].startswith(f"{self._files.inode(files[step])}-")
            for step in older
        ):  # some were removed or replaced, or are not indexed yet
            return None
        rows: list[Json] = []
        for step in new:
            if len(rows) >= size:
                break
            rows += self._recent.rows(files[step], step, self._files.inode(files[step]))
        found = index.page(wanted, page=1, size=size, most_s=_SEARCH_S) if len(rows) < size else None
        shown = [*rows, *(found.rows if found is not None else ())][:size]
        counts = (self._recent.count(files[step], self._files.inode(files[step])) for step in new)
        total = sum(counts) + sum(known for _, known in indexed.values())
        sources = {row["source"] for row in shown if row["source"] is not None} | set(index.sources())
        return {
            "total": total,
            "is_whole": True,
            "rows": shown,
            "sources": sorted(sources),
            "index": {"done": total, "of": total},
        }

    def _forget_index(self) -> None:
        with self._lock:
            if self._index is not None:
                self._index.discard()
                self._index = None

    def _of_step(self, files: Mapping[int, Path], step: int, wanted: RolloutFilter, number: int, size: int) -> Json:
        """Reads one file. A search sees the whole text of every message."""
        rows = summary_rows(self._file(files, step), step, texts=bool(wanted.search))
        sources = sorted({row["source"] for row in rows if row["source"] is not None})
        for name, value in (("source", wanted.source), ("group", wanted.group), ("row", wanted.row)):
            if value is not None:
                rows = [row for row in rows if row[name] == value]
        if wanted.search:
            needle = wanted.search.casefold()
            rows = [row for row in rows if any(needle in text.casefold() for text in texts_of(row.pop("messages")))]
        field = wanted.sort.removeprefix("-")
        rows.sort(key=lambda row: (row["group"], row["sample"]))
        if field in ("reward", "length"):
            known = [row for row in rows if row[field] is not None and not math.isnan(row[field])]
            known.sort(key=lambda row: row[field], reverse=wanted.sort.startswith("-"))
            rows = known + [row for row in rows if row[field] is None or math.isnan(row[field])]
        begin = (number - 1) * size
        return {
            "total": len(rows),
            "is_whole": True,
            "rows": rows[begin : begin + size],
            "sources": sources,
            "index": {"done": len(rows), "of": len(rows)},
        }

    def group(self, step: int, group: int, query: Query) -> Json:
        """The episodes of one group, or one of them; of long ones a part."""
        return read_group(
            self._file(self._files.look(), step),
            group,
            sample=query.optional_whole("sample"),
            first_episode=query.whole("episode", 0, least=0, most=_MOST_NUMBER),
            first_token=query.whole("token", 0, least=0, most=_MOST_NUMBER),
        )

    def _file(self, files: Mapping[int, Path], step: int) -> Path:
        if step in files:
            return files[step]
        if not files:
            raise PageError(
                404, f"{self._run} keeps no rollouts. A run keeps them in its folder {FOLDER} if run.rollouts says so."
            )
        raise PageError(
            404, f"{self._run} keeps no rollouts of step {step}: it has those from step {min(files)} to {max(files)}."
        )
