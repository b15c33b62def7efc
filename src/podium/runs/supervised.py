# SPDX-License-Identifier: Apache-2.0
"""What a process that is started again after its death tells its supervisor, and what it learns from it. Torch-free."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from podium.runs.folder import is_pipeline_folder

GUARD = "guard"
"""The name of the process that ends a Ray with the process that it belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptProcess:
    """A process that outlives the one that started it. Its pid and `started` together are unique."""

    pid: int
    started: int  # in clock ticks since boot
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRay:
    """The Ray of a run, with its workers: it outlives the process that started it, for the one that takes its place.
    Only in memory and in pipes: it has the token."""

    address: str
    token: str = field(repr=False)
    processes: tuple[KeptProcess, ...]  # their descendants belong to it too
    folder: str | None  # of the server that forks workers; removed in the end
    resume_step: int | None  # with which the workers were built
    # Whether all workers had started. If not, the next process ends those that are there, and starts all of them again.
    is_ready: bool = True
    namespace: str | None = None  # of the workers in a cluster of others; None: the cluster is the run's own

    def values(self) -> Mapping[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> KeptRay:
        """From JSON values."""
        return cls(**{**values, "processes": tuple(KeptProcess(**each) for each in values["processes"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Predecessor:
    """The process that carried out a run before this one."""

    cause: str  # of its end
    ended_s: float  # by the clock of `time.monotonic`, which all processes of a machine share
    is_recorded: bool  # whether the run folder has all that is needed to go on; if not, the command is repeated
    ray: KeptRay | None = None  # what it has left behind

    @property
    def has_workers(self) -> bool:
        """Whether it has left workers with all of their state."""
        return self.ray is not None and self.ray.is_ready


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedRun:
    """The run that a process carries out, for the one that takes its place."""

    folder: Path
    restarts: int  # deaths without a committed step between them that are answered
    heartbeat_timeout_s: float  # for how long it may be stopped

    def values(self) -> Mapping[str, Any]:
        """As JSON values."""
        return asdict(self) | {"folder": str(self.folder)}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SupervisedRun:
        """From JSON values."""
        return cls(**{**values, "folder": Path(values["folder"])})


class Supervision:
    """The way of a process to its supervisor. A supervisor that does not read costs messages, never time."""

    def __init__(self, pipe: int, predecessor: Predecessor | None = None, run: Path | None = None) -> None:
        """`predecessor`: the process before this one, and the `run` that it carried out; None: it had begun none."""
        os.set_blocking(pipe, False)
        self._pipe, self._predecessor, self._run = pipe, predecessor, run
        self.asks_restart = self._has_begun = False

    def predecessor(self, folder: Path) -> Predecessor | None:
        """The process whose run this one goes on with, if that is the run of the folder."""
        if self._run is None:  # stages of a pipeline before this one have taken their time
            return None if is_pipeline_folder(folder.parent) else self._predecessor
        return self._predecessor if self._run.absolute() == folder.absolute() else None

    def begins_pipeline(self, folder: Path) -> None:
        """The folder of a pipeline has all that is needed to go on with it."""
        self._tell("pipeline", str(folder))

    def begins(self, run: SupervisedRun) -> None:
        """From now on the process that takes the place of this one goes on with the run."""
        self._has_begun = True
        self._tell("run", dict(run.values()))

    def begins_alone(self) -> None:
        """From now on the process is not started again if it dies: its run keeps nothing for another one."""
        self._tell("alone", True)

    def is_recorded(self) -> None:
        """The run folder has all that is needed to go on: before, the command itself has to be repeated."""
        self._tell("recorded", True)

    def keeps(self, ray: KeptRay | None) -> None:
        """If this process dies, its Ray and its workers go on, for the next one. None: they end, or have ended."""
        self._tell("ray", None if ray is None else dict(ray.values()))

    def note_progress(self) -> None:
        """A step was committed."""
        self._tell("progress", True)

    def note_end(self) -> None:
        """This process ends by itself. One that does not say so was ended: Ray, for instance, ends a process whose
        raylet dies while it connects, with exit code 1."""
        self._tell("end", True)

    def note_signal(self) -> None:
        """A signal to stop or to end came."""
        self._tell("signal", True)

    @property
    def has_begun(self) -> bool:
        """Whether another process would go on with its run."""
        return self._has_begun

    def ask_restart(self, cause: str, *, is_death: bool = True) -> None:
        """This process ends now, and another one should go on with nothing of it, if its run may be started again.
        Without `is_death` that does not count: what this process found is of no use to it."""
        if self._has_begun:
            self.asks_restart = True
            self._tell("restart" if is_death else "start_anew", cause)

    def _tell(self, name: str, value: Any) -> None:
        with contextlib.suppress(OSError):  # nobody reads, or not fast enough
            os.write(self._pipe, json.dumps({name: value}).encode() + b"\n")


SUPERVISION: ContextVar[Supervision | None] = ContextVar("supervision", default=None)
"""Of this process, if it has a supervisor."""


def predecessor_of(folder: Path) -> Predecessor | None:
    """The process after whose death this one goes on with the run of a folder, or begins it; None: there was none."""
    supervision = SUPERVISION.get()
    return None if supervision is None else supervision.predecessor(folder)


def goes_on_with(folder: Path) -> bool:
    """Whether this process goes on with the run of a folder as another one of the same command has recorded it."""
    predecessor = predecessor_of(folder)
    return predecessor is not None and predecessor.is_recorded


def note_end() -> None:
    """Tells the supervisor of this process, if it has one, that it ends by itself."""
    supervision = SUPERVISION.get()
    if supervision is not None:
        supervision.note_end()


def is_restarting() -> bool:
    """Whether this process ends so that another one can go on with its run."""
    supervision = SUPERVISION.get()
    return supervision is not None and supervision.asks_restart
