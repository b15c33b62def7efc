# SPDX-License-Identifier: Apache-2.0
"""Workers that die with work that their successors can do again: what handles tell the controller, which decides."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from podium.cluster import WorkerId
from podium.cluster.deadlines import now_s
from podium.errors import ClusterError

Answer = Literal["retry", "give up"]
"""What becomes of the work of a lost worker: its successor does it again, or it is left out. There is a successor in
both cases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostWorker:
    """A worker is dead, or does not answer."""

    part: Literal["grader", "runner"]
    worker: WorkerId
    error: ClusterError
    failures: int = 0  # how often its work has failed, if it is one batch
    hangs: int = 0  # how often of these without an answer
    noticed_s: float = field(default_factory=now_s)  # when

    @property
    def cause(self) -> str:
        """Why, in one line."""
        return str(self.error).splitlines()[0]


class Replacements(Protocol):
    """The controller's side."""

    def decide(self, lost: LostWorker) -> Answer:
        """What becomes of the work. Raises an error if the run ends."""
        ...

    def replacing(self, lost: LostWorker, answer: Answer) -> AbstractContextManager[None]:
        """A context for starting the successor. Entered once for each lost worker: it says and records what is done,
        and how long it takes."""
        ...

    def note_work_done(self, part: Literal["grader", "runner"], rank: int) -> None:
        """A worker has done some of its work."""
        ...
