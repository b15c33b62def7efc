# SPDX-License-Identifier: Apache-2.0
"""An index of all kept rollouts of a run, for sorting and searching over all steps. A thread builds it file by file,
and no request waits for it: a page says how far it is.

The index is a cache, an SQLite file. It is in the folder `.cache` beside the runs, or, where that cannot be written, in
a temporary folder that ends with the process. It may be removed at any time."""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.ui.answers import PageError
from podium.ui.apart import Apart
from podium.ui.rollout_blocks import (
    Block,
    add_block,
    blocks_of,
    num_rows_of,
    opened,
    read_rows,
    remove_block,
    source_names,
    version_of,
)  # fmt: skip
from podium.ui.rollout_columns import EpisodeColumns, RolloutFilter
from podium.ui.rollout_reading import FOLDER, StepFiles, num_rows, stamp_of, summary_table

_ENDING_S = 5.0
# Between looks into the folder, at least and as many times as the look took, and how long nobody must have asked until
# the thread ends.
_LOOK_S, _LOOK_TIMES, _UNUSED_S = 2.0, 20.0, 60.0
# Files whose names and inodes are known are compared again after so many times what comparing all of them took.
_COMPARE_TIMES = 500.0
# So many new files are read in this process, more of them in one of their own, which is started again after a time.
_FEW_FILES, _LONGEST_PART_S = 10, 500.0
# Files are committed together until so many seconds have passed: the page sees them then.
_COMMIT_S = 1.0
# Files whose rows are counted to estimate those of all.
_ASKED_FILES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRows:
    """One page of episodes. `is_whole`: the search saw every row; else `total` is how many it found in its time, and
    the next request for the same text continues it."""

    rows: Sequence[Mapping[str, Any]]
    total: int
    is_whole: bool


class RolloutIndex:
    """The index of one run. Used by several threads; `close` ends its own."""

    def __init__(self, run: Path, cache: Path | None, apart: Apart, files: StepFiles | None = None) -> None:
        """`cache`: a folder for the file, which is made if need be; None: a temporary one."""
        self._run, self._apart = run, apart
        self._folder = _IndexedFolder(files or StepFiles(run))
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._file = self._place(cache)
        self._lock, self._columns_lock = threading.Lock(), threading.Lock()
        self._columns = EpisodeColumns()
        self._thread: threading.Thread | None = None
        self._closing, self._looked, self._asked = threading.Event(), threading.Event(), threading.Event()
        self._is_idle = False  # the thread waits until somebody asks
        self._expected = 0  # rows of files that are not in the index yet

    def _place(self, cache: Path | None) -> Path:
        name = f"ui-rollouts-{hashlib.sha256(str(self._run.resolve()).encode()).hexdigest()[:16]}.sqlite"
        for folder in (cache, None):
            if folder is None:
                self._temporary = tempfile.TemporaryDirectory(prefix="podium-ui-")
                folder = Path(self._temporary.name)
            with contextlib.suppress(OSError, sqlite3.Error):
                folder.mkdir(parents=True, exist_ok=True)
                with opened(folder / name):
                    return folder / name
        raise PageError(500, f"no index of {self._run / FOLDER} can be written, not even in a temporary folder.")

    def wake(self, *, wait_s: float = 0.0) -> None:
        """Lets the thread look into the folder, and waits at most so long until it has. One that has just looked does
        so again a little later, and nobody waits for that."""
        with self._lock:
            is_new = self._thread is None or not self._thread.is_alive()
            if is_new or self._is_idle:
                self._looked.clear()
                self._is_idle = False
            self._asked.set()
            if is_new:
                self._thread = threading.Thread(target=self._follow, name="podium-ui-index", daemon=True)
                self._thread.start()
        self._looked.wait(wait_s)

    def close(self) -> None:
        """Ends the thread after the files that it reads now."""
        self._closing.set()
        self._asked.set()
        if self._thread is not None:
            self._thread.join(timeout=_ENDING_S)
        if self._temporary is not None:
            self._temporary.cleanup()

    def discard(self) -> None:
        """Ends the thread without waiting for it, and removes the file."""
        self._closing.set()
        self._asked.set()
        for name in ("", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                self._file.with_name(self._file.name + name).unlink()
        if self._temporary is not None:
            self._temporary.cleanup()

    def progress(self) -> dict[str, int]:
        """Rows in the index, and rows that there are, as far as that is known."""
        with opened(self._file) as connection:
            done = num_rows_of(connection)
        return {"done": done, "of": max(done, self._expected)}

    def _follow(self) -> None:
        """Takes in new files whenever somebody asks, until nobody has for a minute, or `close`."""
        while self._is_asked():
            begin_s, look_s = time.monotonic(), 0.0
            with contextlib.suppress(sqlite3.Error, OSError):  # a full disk, another process: tried again
                with opened(self._file) as connection:
                    changes = self._folder.changes(connection)
                    self._expected = changes.num_kept + _estimated_rows([path for _, path, _ in changes.new])
                    if len(changes.new) <= _FEW_FILES:
                        self._folder.take_in(connection, changes)
                        look_s = time.monotonic() - begin_s
                if len(changes.new) > _FEW_FILES:
                    self._apart.call(update_index, self._run, self._file, most_s=_LONGEST_PART_S)
            self._looked.set()
            self._closing.wait(max(_LOOK_S, _LOOK_TIMES * look_s))
        with self._columns_lock:
            self._columns.forget()

    def _is_asked(self) -> bool:
        """Waits until somebody asks."""
        with self._lock:
            self._is_idle = not self._asked.is_set()
        is_asked = self._asked.wait(_UNUSED_S)
        with self._lock:
            is_asked |= self._asked.is_set()
            self._asked.clear()
            self._is_idle = False
            if not is_asked:
                self._thread = None
        return is_asked and not self._closing.is_set()

    def page(self, wanted: RolloutFilter, *, page: int, size: int, most_s: float) -> FoundRows:
        """One page of what is indexed so far. A search that takes longer than a time ends with what it found. Raises an
        error of SQLite also where the contents of the file are damaged."""
        until_s, begin = time.monotonic() + most_s, (page - 1) * size
        with opened(self._file) as connection:
            connection.execute("BEGIN")  # all of this as of one moment
            try:
                with self._columns_lock:
                    found = self._columns.select(connection, wanted, begin=begin, end=begin + size, until_s=until_s)
                rows = _rows(connection, found.rows)
            except (LookupError, TypeError, ValueError, OSError) as error:
                raise sqlite3.DatabaseError(f"a block cannot be read ({error})") from error
        return FoundRows(rows=rows, total=found.total, is_whole=found.is_whole)

    def indexed(self) -> Mapping[int, tuple[str, int]]:
        """Stamp and number of rows of every step that is indexed."""
        return self._folder.rows

    def sources(self) -> list[str]:
        """Names of data sources."""
        with opened(self._file) as connection:
            return sorted(source_names(connection).values())


def _rows(connection: sqlite3.Connection, places: Sequence[tuple[Block, int]]) -> list[Mapping[str, Any]]:
    """Rows as the page shows them. Each block is read once."""
    by_block: dict[Block, list[int]] = {}
    for block, place in places:
        by_block.setdefault(block, []).append(place)
    sources = source_names(connection)
    rows = {
        (block, place): {**row, "source": sources.get(row["source"])}
        for block, wanted in by_block.items()
        for place, row in zip(wanted, read_rows(connection, block, wanted), strict=True)
    }
    return [rows[each] for each in places]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changes:
    """Of a folder since it was indexed."""

    new: Sequence[tuple[int, Path, str]]  # step, file and stamp, of files that are new or were replaced
    gone: Sequence[int]  # steps without a file
    num_kept: int  # rows of all others


class _IndexedFolder:
    """The files of a run beside what the index has of them. What did not change since the last look costs nothing."""

    def __init__(self, files: StepFiles) -> None:
        self._files = files
        self._version: tuple[int, int] | None = None
        self._rows: dict[int, tuple[str, int]] = {}  # by step, of the index: stamp, rows
        self._stamps: dict[int, tuple[int, str]] = {}  # by step, of the files: inode, stamp
        self._compare_s = 0.0

    @property
    def rows(self) -> Mapping[int, tuple[str, int]]:
        """Stamp and number of rows of every step in the index, as of the last look. It is not changed any more."""
        return self._rows

    def changes(self, connection: sqlite3.Connection) -> _Changes:
        """Of the folder since it was indexed."""
        version = version_of(connection)
        if version != self._version:
            self._rows = {each.step: (each.stamp, each.rows) for each in blocks_of(connection)}
            self._version = version
        files, began_s = self._files.look(), time.monotonic()
        known = self._stamps if began_s < self._compare_s else {}
        self._stamps = {}
        for step, path in files.items():
            inode = self._files.inode(path)
            before = known.get(step)
            if before is not None and before[0] == inode:
                self._stamps[step] = before
            elif (stamp := stamp_of(path)) is not None:
                self._stamps[step] = inode, stamp
        ended_s = time.monotonic()
        if not known:
            self._compare_s = ended_s + _COMPARE_TIMES * (ended_s - began_s)
        new = [
            (step, files[step], stamp)
            for step, (_, stamp) in self._stamps.items()
            if step not in self._rows or self._rows[step][0] != stamp
        ]
        replaced = {step for step, _, _ in new}
        kept = sum(rows for step, (_, rows) in self._rows.items() if step in self._stamps and step not in replaced)
        return _Changes(new=new, gone=sorted(self._rows.keys() - self._stamps.keys()), num_kept=kept)

    def take_in(self, connection: sqlite3.Connection, changes: _Changes) -> None:
        """As `_take_in`, and remembers what the index has then."""
        rows = _take_in(connection, changes)
        kept = {step: known for step, known in self._rows.items() if step not in changes.gone}
        self._rows = kept | {step: (stamp, rows[step]) for step, _, stamp in changes.new}
        self._version = version_of(connection)


def _estimated_rows(files: Sequence[Path]) -> int:
    """Rows of all files, from some of them."""
    some = files[:: max(1, len(files) // _ASKED_FILES)]
    return round(sum(map(num_rows, some)) / len(some) * len(files)) if some else 0


def update_index(run: Path, file: Path) -> None:
    """Takes in all files that are new or were replaced."""
    with opened(file) as connection:
        _take_in(connection, _IndexedFolder(StepFiles(run)).changes(connection))


def _take_in(connection: sqlite3.Connection, changes: _Changes) -> dict[int, int]:
    """The newest files first, many in one transaction. Returns the rows of each step."""
    rows: dict[int, int] = {}
    for step in changes.gone:
        remove_block(connection, step)
    connection.commit()
    began_s = time.monotonic()
    for step, path, stamp in reversed(changes.new):
        try:
            table = summary_table(path)
        except PageError:  # its own page says what is wrong with it
            table = None
        add_block(connection, step, stamp, table)
        rows[step] = 0 if table is None else table.num_rows
        if time.monotonic() - began_s >= _COMMIT_S:
            connection.commit()
            began_s = time.monotonic()
    connection.commit()
    return rows
