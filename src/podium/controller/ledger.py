# SPDX-License-Identifier: Apache-2.0
"""Records every episode and every group in one SQLite file: what became of it, and the step that consumed it, exactly
once."""

from __future__ import annotations

import sqlite3
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from podium.data.trajectories import TrajectoryId
from podium.disk import disk_fault
from podium.errors import RunFolderError

LEDGER_FILE = "episodes.sqlite"
"""In the folder of a run."""
# Rows that wait in memory for a disk that can be written again. They cannot be dropped.
_MOST_WAITING = 1_000_000
_SCHEMA = """
CREATE TABLE IF NOT EXISTS episodes (
  prompt_index INTEGER NOT NULL, sample INTEGER NOT NULL, branch INTEGER NOT NULL, attempt INTEGER NOT NULL,
  step INTEGER NOT NULL, source TEXT NOT NULL, state TEXT NOT NULL, finish TEXT NOT NULL,
  version INTEGER NOT NULL, tokens INTEGER NOT NULL, reward REAL,
  PRIMARY KEY (prompt_index, sample, branch, attempt)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_step ON episodes (step);
CREATE TABLE IF NOT EXISTS groups (
  prompt_index INTEGER PRIMARY KEY, step INTEGER NOT NULL, attempts INTEGER NOT NULL,
  admitted_version INTEGER NOT NULL, oldest_version INTEGER NOT NULL, newest_version INTEGER NOT NULL,
  trained_version INTEGER, void TEXT
);
CREATE TABLE IF NOT EXISTS open_groups (
  prompt_index INTEGER PRIMARY KEY, step INTEGER NOT NULL, state TEXT NOT NULL, attempts INTEGER NOT NULL,
  admitted_version INTEGER NOT NULL, oldest_version INTEGER NOT NULL, newest_version INTEGER NOT NULL
);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRecord:
    """The ledger's row for one episode. State: `consumed` by an update, or the reason for leaving it out: `failed`,
    `dropped` (its group had a failure), `uninformative` (all rewards of its group were equal), `surplus` (the step had
    enough others, or its reward was too low, or it was truncated and masked)."""

    id: TrajectoryId
    step: int
    source: str
    state: str
    finish: str
    version: int
    tokens: int
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """The ledger's row for one group: its way through the schedule. Versions are -1 where it has no tokens."""

    prompt_index: int
    step: int  # that trained on it, or for which it was replaced
    attempts: int
    admitted_version: int  # of the worker that it was first given to
    oldest_version: int  # among its tokens
    newest_version: int
    trained_version: int | None  # of the weights that the update began with; None: it was not trained
    void: str | None  # why it was not trained


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGroupRecord:
    """The ledger's row for one group that is on its way: as of the last committed step, or of a stop."""

    prompt_index: int
    step: int  # the last committed one
    state: str  # offered, running, complete, graded or claimed; void: the next step collects it
    attempts: int
    admitted_version: int
    oldest_version: int  # among the tokens of episodes that have ended or moved
    newest_version: int


class Ledger:
    """Writes the rows of a step together when the step closes, in a separate thread. Only one thread may use it at a
    time: closing the file while another thread uses it would end the process. Rows that the disk does not take wait in
    memory, in the order of their steps."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._using = threading.Lock()
        self._waiting: deque[_StepRows] = deque()
        self._is_retried = False  # whether the first of those was tried before
        self.fault: str | None = None  # of the disk, since when rows wait
        try:
            self._file = _opened(path)
        except sqlite3.DatabaseError as error:
            fault = disk_fault(error)
            if fault is not None:
                raise RunFolderError(f"{path} cannot be written: {fault}. Make room, or repair the disk.") from error
            raise RunFolderError(
                f"{path} is not a ledger that can be read ({error}). Move it away to go on without the record of past "
                "episodes."
            ) from error
        self._place = _place_of(path)

    @property
    def path(self) -> Path:
        """The database file."""
        return self._path

    def close_step(
        self, records: Iterable[EpisodeRecord], groups: Iterable[GroupRecord] = (),
        open_groups: Iterable[OpenGroupRecord] = (),
    ) -> None:  # fmt: skip
        """Writes the rows in one transaction. A duplicate id is an error, so no episode counts twice. A fault of the
        disk is not: `fault` tells it, and the rows are written with the next call. `open_groups`: all that are on their
        way now; they replace those of the last call."""
        rows = [(*each.id, each.step, each.source, each.state, each.finish, each.version, each.tokens, each.reward)
                for each in records]  # fmt: skip
        is_open = [astuple(each) for each in open_groups]
        self._waiting.append(_StepRows(rows, [astuple(each) for each in groups], is_open))
        self.write_waiting()

    def write_waiting(self) -> None:
        """Writes the rows that wait, step by step."""
        with self._using:
            try:
                self._reopen_if_removed()
                while self._waiting:
                    if not (self._is_retried and self._has(self._waiting[0])):
                        self._write(self._waiting[0])
                    self._waiting.popleft()
                    self._is_retried = False
                self.fault = None
            except (sqlite3.OperationalError, OSError) as error:
                fault = disk_fault(error)
                if fault is None:
                    raise
                self.fault, self._is_retried = fault, bool(self._waiting)
        num_rows = sum(len(each.episodes) for each in self._waiting)
        if num_rows > _MOST_WAITING:
            raise RunFolderError(
                f"{self._path} cannot be written: {self.fault}. The rows of {num_rows} episodes wait in memory, and "
                "there is no room for more. Make room, or repair the disk, and continue from the newest checkpoint."
            )

    def _write(self, step: _StepRows) -> None:
        try:
            with self._file:
                self._file.executemany("INSERT INTO episodes VALUES (?,?,?,?,?,?,?,?,?,?,?)", step.episodes)
                self._file.executemany("INSERT INTO groups VALUES (?,?,?,?,?,?,?,?)", step.groups)
                self._file.execute("DELETE FROM open_groups")
                self._file.executemany("INSERT INTO open_groups VALUES (?,?,?,?,?,?,?)", step.open_groups)
        except sqlite3.IntegrityError as error:
            self._waiting.popleft()
            raise RunFolderError(
                f"an episode of step {step.episodes[0][4]} is in the ledger already ({error}), so it would count "
                "twice. This is a defect of Podium: please report it with the run folder."
            ) from error

    def _has(self, step: _StepRows) -> bool:
        """Whether a transaction that failed has nevertheless written its rows: all of them, or none."""
        if not step.episodes:
            return False
        where = "prompt_index = ? AND sample = ? AND branch = ? AND attempt = ? AND step = ?"
        return self._file.execute(f"SELECT 1 FROM episodes WHERE {where}", step.episodes[0][:5]).fetchone() is not None

    def _reopen_if_removed(self) -> None:
        """Writes a file that somebody removed again: it lives as long as it is open."""
        if self._place is None or _place_of(self._path) == self._place:
            return
        new = _opened(self._path)
        try:
            if new.execute("SELECT COUNT(*) FROM episodes").fetchone()[0] == 0:
                self._file.backup(new)
        except BaseException:
            new.close()
            raise
        self._file.close()
        self._file, self._place = new, _place_of(self._path)

    def rewind(self, step: int) -> int:
        """Deletes episodes and groups after `step`, whose weights are gone. Returns the number of deleted episodes.
        Groups that were on their way then are offered again, and stay until a step is closed."""
        with self._using, self._file:
            self._file.execute("DELETE FROM open_groups WHERE step > ?", (step,))
            self._file.execute("DELETE FROM groups WHERE step > ?", (step,))
            return self._file.execute("DELETE FROM episodes WHERE step > ?", (step,)).rowcount

    def newest_step(self) -> int:
        """The last step that has episodes; 0 if there is none."""
        with self._using:
            step: int | None = self._file.execute("SELECT MAX(step) FROM episodes").fetchone()[0]
        return step or 0

    def count(self, state: str | None = None) -> int:
        """Number of episodes in one state, or in all. Rows that wait are not counted."""
        where = "" if state is None else " WHERE state = ?"
        with self._using:
            count: int = self._file.execute(
                f"SELECT COUNT(*) FROM episodes{where}", () if state is None else (state,)
            ).fetchone()[0]
        return count

    def close(self) -> None:
        """Closes the database."""
        with self._using:
            self._file.close()


class _StepRows(NamedTuple):
    """Rows of all tables for one step."""

    episodes: list[tuple[Any, ...]]
    groups: list[tuple[Any, ...]]
    open_groups: list[tuple[Any, ...]]


def _opened(path: Path) -> sqlite3.Connection:
    file = sqlite3.connect(path, check_same_thread=False)
    try:
        file.execute("PRAGMA journal_mode=WAL")
        file.execute("PRAGMA synchronous=NORMAL")
        file.executescript(_SCHEMA)
    except BaseException:
        file.close()
        raise
    return file


def _place_of(path: Path) -> tuple[int, int] | None:
    """Device and inode of a file; None if it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
