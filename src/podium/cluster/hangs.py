# SPDX-License-Identifier: Apache-2.0
"""Workers that live and whose call does not advance: which of them are stuck, and where everybody is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from podium.cluster.health import WhereReport
from podium.cluster.identity import WorkerId
from podium.cluster.messages import Beat
from podium.cluster.spans import process_places

# A worker whose innermost frames are in these files waits for its peers.
_COLLECTIVES = ("/torch/distributed/",)
_INNERMOST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """Workers of one pool that live and do not advance, with the stacks of all workers."""

    workers: tuple[WorkerId, ...]  # those that are stuck; others of the pool may wait for them
    cause: str  # why they count as dead
    where: Mapping[str, WhereReport]  # pool -> where its workers are

    @classmethod
    def of(cls, beat: Beat, workers: tuple[WorkerId, ...], report: WhereReport) -> Hang:
        """Of workers whose heartbeats come, `beat` among them, and whose call does not advance."""
        place = report.innermost(workers[0])
        cause = f"it hangs: no progress in {beat.doing} for {beat.stalled_s:.0f} s" + (f", at {place}" if place else "")
        return cls(workers=workers, cause=cause, where={workers[0].pool: report})

    def __str__(self) -> str:
        names = ", ".join(map(str, self.workers))
        controller = "\n".join(["controller", *(str(place) for place in process_places())])
        return "\n\n".join([f"{names}: {self.cause}", *(each.stacks() for each in self.where.values()), controller])


def stuck_workers(report: WhereReport, stalled: Sequence[WorkerId]) -> tuple[WorkerId, ...]:
    """Of workers that do not advance, those that the others wait for: they are not in a collective. All of them, if
    that does not tell them apart."""
    stuck = tuple(worker for worker in stalled if not _waits_for_peers(report, worker))
    return stuck or tuple(stalled)


def _waits_for_peers(report: WhereReport, worker: WorkerId) -> bool:
    frames = report.work_stack(worker)[-_INNERMOST:]
    return any(part in frame for frame in frames for part in _COLLECTIVES)
