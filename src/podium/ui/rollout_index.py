# SPDX-License-Identifier: Apache-2.0
"""An index of all kept rollouts of a run in SQLite, for sorting and searching over all steps. A thread builds it file
by file, and no request waits for it: a page says how far it is.

The index is a cache. It is in the folder `.cache` beside the runs, or, where that cannot be written, in a temporary
folder that ends with the process. It may be removed at any time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.ui.answers import PageError
from podium.ui.apart import Apart
from podium.ui.rollout_reading import FOLDER, num_rows, stamp_of, step_files, summary_rows

_FORMAT = 1
_BUSY_S = 5.0
# Between looks into the folder, and how long nobody must have asked until the thread ends.
_LOOK_S, _UNUSED_S = 2.0, 60.0
_TABLES = """
CREATE TABLE IF NOT EXISTS files (step INTEGER PRIMARY KEY, stamp TEXT NOT NULL, rows INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS episodes (
  step INTEGER NOT NULL, grp INTEGER NOT NULL, sample INTEGER NOT NULL, source TEXT, row INTEGER, reward REAL,
  rewards TEXT NOT NULL, length INTEGER, ending TEXT, trained INTEGER, preview TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_step ON episodes (step, grp, sample);
CREATE INDEX IF NOT EXISTS by_reward ON episodes (reward);
CREATE INDEX IF NOT EXISTS by_length ON episodes (length);
"""
_COLUMNS = "step, grp, sample, source, row, reward, rewards, length, ending, trained, preview"
_ORDERS = {
    "step": "step, grp, sample", "-step": "step DESC, grp, sample", "group": "grp, step, sample",
    "reward": "reward, step, grp, sample", "-reward": "reward DESC, step, grp, sample",
    "length": "length, step, grp, sample", "-length": "length DESC, step, grp, sample",
}  # fmt: skip
SORTS = tuple(_ORDERS)
# So many new files are read in this process, more of them in one of their own, which is started again after a time.
_FEW_FILES, _LONGEST_PART_S = 10, 500.0
# Files whose rows are counted to estimate those of all.
_ASKED_FILES = 20
# Instructions of SQLite between looks at the clock.
_TICKS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFilter:
    """Which episodes, and in which order. None: no condition."""

    sort: str
    search: str = ""
    source: str | None = None
    group: int | None = None
    row: int | None = None
    first_step: int | None = None
    last_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRows:
    """One page of episodes. `is_whole`: the search saw every row; else `total` is how many it saw in its time."""

    rows: Sequence[Mapping[str, Any]]
    total: int
    is_whole: bool


class RolloutIndex:
    """The index of one run. Used by several threads; `close` ends its own."""

    def __init__(self, run: Path, cache: Path | None, apart: Apart) -> None:
        """`cache`: a folder for the file, which is made if need be; None: a temporary one."""
        self._run, self._apart = run, apart
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._file = self._place(cache)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing, self._looked = threading.Event(), threading.Event()
        self._asked_s = 0.0
        self._expected = 0  # rows of files that are not in the index yet

    def _place(self, cache: Path | None) -> Path:
        name = f"ui-rollouts-{hashlib.sha256(str(self._run.resolve()).encode()).hexdigest()[:16]}.sqlite"
        for folder in (cache, None):
            if folder is None:
                self._temporary = tempfile.TemporaryDirectory(prefix="podium-ui-")
                folder = Path(self._temporary.name)
            with contextlib.suppress(OSError, sqlite3.Error):
                folder.mkdir(parents=True, exist_ok=True)
                with _opened(folder / name):
                    return folder / name
        raise PageError(500, f"no index of {self._run / FOLDER} can be written, not even in a temporary folder.")

    def _opened(self) -> contextlib.AbstractContextManager[sqlite3.Connection]:
        return _opened(self._file)

    def wake(self, *, wait_s: float = 0.0) -> None:
        """Starts the thread if it is not there, and waits at most so long until it has looked at everything once."""
        with self._lock:
            self._asked_s = time.monotonic()
            if self._thread is None or not self._thread.is_alive():
                self._looked.clear()
                self._thread = threading.Thread(target=self._follow, name="podium-ui-index", daemon=True)
                self._thread.start()
        self._looked.wait(wait_s)

    def close(self) -> None:
        """Ends the thread after the file that it reads now."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=_BUSY_S)
        if self._temporary is not None:
            self._temporary.cleanup()

    def discard(self) -> None:
        """Ends the thread without waiting for it, and removes the file."""
        self._closing.set()
        for name in ("", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                self._file.with_name(self._file.name + name).unlink()
        if self._temporary is not None:
            self._temporary.cleanup()

    def progress(self) -> dict[str, int]:
        """Rows in the index, and rows that there are, as far as that is known."""
        with self._opened() as connection:
            done = connection.execute("SELECT COALESCE(SUM(rows), 0) FROM files").fetchone()[0]
        return {"done": done, "of": max(done, self._expected)}

    def _follow(self) -> None:
        while not self._closing.is_set() and time.monotonic() - self._asked_s < _UNUSED_S:
            with contextlib.suppress(sqlite3.Error, OSError):  # a full disk, another process: tried again
                with self._opened() as connection:
                    new, kept = _new_files(connection, self._run)
                self._expected = kept + _estimated_rows([path for _, path, _ in new])
                if len(new) <= _FEW_FILES:
                    update_index(self._run, self._file)
                else:
                    self._apart.call(update_index, self._run, self._file, most_s=_LONGEST_PART_S)
            self._looked.set()
            self._closing.wait(_LOOK_S)

    def page(self, wanted: RolloutFilter, *, page: int, size: int, most_s: float) -> FoundRows:
        """One page of what is indexed so far, within a time. A search that takes longer ends with what it found."""
        conditions, values = _conditions(wanted)
        where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
        until_s = time.monotonic() + most_s
        rows: list[tuple[Any, ...]] = []
        total, is_whole = 0, True
        with self._opened() as connection:
            connection.set_progress_handler(lambda: time.monotonic() > until_s, _TICKS)
            try:
                query = f"SELECT {_COLUMNS} FROM episodes {where} ORDER BY {_ORDERS[wanted.sort]} LIMIT ? OFFSET ?"
                rows.extend(connection.execute(query, (*values, size, (page - 1) * size)))
                if conditions:
                    total = connection.execute(f"SELECT COUNT(*) FROM episodes {where}", values).fetchone()[0]
                else:
                    total = connection.execute("SELECT COALESCE(SUM(rows), 0) FROM files").fetchone()[0]
            except sqlite3.OperationalError as error:
                if "interrupt" not in str(error):
                    raise
                total, is_whole = (page - 1) * size + len(rows), False
        return FoundRows(rows=[_row(row) for row in rows], total=total, is_whole=is_whole)

    def sources(self) -> list[str]:
        """Names of data sources, as far as the newest rows have them."""
        with self._opened() as connection:
            found = connection.execute(
                "SELECT DISTINCT source FROM (SELECT source FROM episodes ORDER BY step DESC LIMIT 5000)"
            )
            return sorted(name for (name,) in found if name is not None)


def _conditions(wanted: RolloutFilter) -> tuple[list[str], list[object]]:
    conditions: list[str] = []
    values: list[object] = []
    for condition, value in (
        ("source = ?", wanted.source), ("grp = ?", wanted.group), ("row = ?", wanted.row),
        ("step >= ?", wanted.first_step), ("step <= ?", wanted.last_step),
    ):  # fmt: skip
        if value is not None:
            conditions.append(condition)
            values.append(value)
    if wanted.search:
        conditions.append("preview LIKE ? ESCAPE '\\'")
        escaped = wanted.search.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        values.append(f"%{escaped}%")
    return conditions, values


def _row(row: Sequence[Any]) -> Mapping[str, Any]:
    step, group, sample, source, number, reward, rewards, length, ending, trained, preview = row
    return {
        "step": step, "group": group, "sample": sample, "source": source, "row": number, "reward": reward,
        "rewards": json.loads(rewards), "length": length, "ending": ending,
        "trained": None if trained is None else bool(trained), "preview": preview,
    }  # fmt: skip


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[sqlite3.Connection]:
    """A connection of its own for every use: threads share none. A file of another format is made again."""
    connection = sqlite3.connect(file, timeout=_BUSY_S)
    try:
        if connection.execute("PRAGMA user_version").fetchone()[0] != _FORMAT:
            connection.executescript("DROP TABLE IF EXISTS files; DROP TABLE IF EXISTS episodes;")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(_TABLES)
            connection.execute(f"PRAGMA user_version = {_FORMAT}")
        connection.execute("PRAGMA synchronous = OFF")
        yield connection
    finally:
        connection.close()


def _new_files(connection: sqlite3.Connection, run: Path) -> tuple[list[tuple[int, Path, str]], int]:
    """Step, file and stamp of files that are new or were replaced, and the rows of all others. Files that are gone are
    forgotten."""
    known = {step: (stamp, rows) for step, stamp, rows in connection.execute("SELECT step, stamp, rows FROM files")}
    files = step_files(run)
    stamps = {step: stamp for step, path in files.items() if (stamp := stamp_of(path)) is not None}
    for step in known.keys() - stamps.keys():
        _replace(connection, step, None, [])
    new = [(step, files[step], stamp) for step, stamp in stamps.items() if known.get(step, ("", 0))[0] != stamp]
    replaced = {step for step, _, _ in new}
    return new, sum(rows for step, (_, rows) in known.items() if step in stamps and step not in replaced)


def _estimated_rows(files: Sequence[Path]) -> int:
    """Rows of all files, from some of them."""
    some = files[:: max(1, len(files) // _ASKED_FILES)]
    return round(sum(map(num_rows, some)) / len(some) * len(files)) if some else 0


def update_index(run: Path, file: Path) -> None:
    """Takes in files that are new or were replaced, the newest first."""
    with _opened(file) as connection:
        new, _ = _new_files(connection, run)
        for step, path, stamp in reversed(new):
            try:
                episodes = summary_rows(path, step)
                _replace(connection, step, stamp, episodes)
            except (sqlite3.OperationalError, OSError):
                raise  # a full disk, another process: tried again
            except Exception:  # its own page says what is wrong with it
                _replace(connection, step, stamp, [])


def _replace(
    connection: sqlite3.Connection, step: int, stamp: str | None, episodes: Sequence[Mapping[str, Any]]
) -> None:
    with connection:
        connection.execute("DELETE FROM episodes WHERE step = ?", (step,))
        connection.execute("DELETE FROM files WHERE step = ?", (step,))
        if stamp is None:
            return
        connection.execute("INSERT INTO files VALUES (?, ?, ?)", (step, stamp, len(episodes)))
        connection.executemany(
            f"INSERT INTO episodes ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    step, each["group"], each["sample"], each["source"], each["row"], each["reward"],
                    json.dumps(each["rewards"]), each["length"], each["ending"],
                    None if each["trained"] is None else int(each["trained"]), each["preview"],
                )
                for each in episodes
            ],
        )  # fmt: skip
