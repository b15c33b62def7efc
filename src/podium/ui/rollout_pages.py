# SPDX-License-Identifier: Apache-2.0
"""Pages of the table of rollouts: those of one step straight from its file, those of all steps from the index."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podium.ui.answers import PageError, Query
from podium.ui.apart import Apart
from podium.ui.rollout_columns import SORTS, RolloutFilter
from podium.ui.rollout_groups import read_group
from podium.ui.rollout_index import RolloutIndex
from podium.ui.rollout_reading import FOLDER, StepFiles, summary_rows, texts_of

_SIZE, _MOST_SIZE, _MOST_PAGES = 50, 500, 1_000_000
# Characters of a search, and the number of an episode or token.
_MOST_SEARCH, _MOST_NUMBER = 1000, 1 << 31
# How long a request waits for a small index, and searches in a large one.
_WAIT_S, _SEARCH_S = 0.5, 1.5
Json = dict[str, Any]


class RunRollouts:
    """The kept rollouts of one run."""

    def __init__(self, run: Path, cache: Path | None, apart: Apart) -> None:
        self._run, self._cache, self._apart = run, cache, apart
        self._lock = threading.Lock()
        self._index: RolloutIndex | None = None
        self._files = StepFiles(run)

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
        )
        common = {"page": number, "size": size, "steps": [next(iter(files)), next(reversed(files))] if files else []}
        if step is not None:
            return common | self._of_step(files, step, wanted, number, size)
        if not files:
            return common | {"total": 0, "rows": [], "sources": [], "index": {"done": 0, "of": 0}}
        try:
            return common | self._of_index(wanted, number, size)
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
            known = [row for row in rows if row[field] is not None]
            known.sort(key=lambda row: row[field], reverse=wanted.sort.startswith("-"))
            rows = known + [row for row in rows if row[field] is None]
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
