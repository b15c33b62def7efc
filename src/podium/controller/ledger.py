# SPDX-License-Identifier: Apache-2.0
"""Records every episode and every group in one SQLite file: what became of it, and the step that consumed it, exactly
once."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path

from podium.data.trajectories import TrajectoryId
from podium.errors import RunFolderError

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


class Ledger:
    """Writes the rows of a step together when the step closes, in a separate thread. Only one thread may use it at a
    time: closing the file while another thread uses it would end the process."""

    def __init__(self, path: Path) -> None:
        self._using = threading.Lock()
        try:
            self._file = sqlite3.connect(path, check_same_thread=False)
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute("PRAGMA synchronous=NORMAL")
            self._file.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            raise RunFolderError(
                f"{path} is not a ledger that can be read ({error}). Move it away to go on without the record of past "
                "episodes."
            ) from error

    def close_step(self, records: Iterable[EpisodeRecord], groups: Iterable[GroupRecord] = ()) -> None:
        """Writes the rows in one transaction. A duplicate id is an error, so no episode counts twice."""
        rows = [(*each.id, each.step, each.source, each.state, each.finish, each.version, each.tokens, each.reward)
                for each in records]  # fmt: skip
        try:
            with self._using, self._file:
                self._file.executemany("INSERT INTO episodes VALUES (?,?,?,?,?,?,?,?,?,?,?)", rows)
                self._file.executemany(
                    "INSERT INTO groups VALUES (?,?,?,?,?,?,?,?)", [astuple(each) for each in groups]
                )
        except sqlite3.IntegrityError as error:
            raise RunFolderError(
                f"an episode of step {rows[0][4]} is in the ledger already ({error}), so it would count twice. This is "
                "a defect of Podium: please report it with the run folder."
            ) from error

    def rewind(self, step: int) -> int:
        """Deletes episodes and groups after `step`, whose weights are gone. Returns the number of deleted episodes."""
        with self._using, self._file:
            self._file.execute("DELETE FROM groups WHERE step > ?", (step,))
            return self._file.execute("DELETE FROM episodes WHERE step > ?", (step,)).rowcount

    def count(self, state: str | None = None) -> int:
        """Number of episodes in one state, or in all."""
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
