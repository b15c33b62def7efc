# SPDX-License-Identifier: Apache-2.0
"""The health of workers: which are alive or silent, and the decision after a death. Pure, with a given clock."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from podium.cluster.identity import WorkerId
from podium.cluster.messages import Beat, Whereabouts
from podium.cluster.spans import ThreadPlace
from podium.stack_dumps import innermost

_FRAMES_SHOWN = 6
_LIBRARY = f"{sysconfig.get_paths()['stdlib']}/"
# Of work that waits for data, the loader says where; of a loader that waits for a tokenizer, the tokenizer.
_LOADER, _TOKENIZERS = "/podium/data/loader.py", "/podium/data/workers.py"
# From when on a call that does not advance is worth a word.
_STALLED_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """A worker's process or node is gone."""

    worker: WorkerId
    cause: str
    at_s: float  # when it was noticed, since 1970

    def __str__(self) -> str:
        return f"{self.worker} died: {self.cause}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A worker still works and will be gone soon: it got SIGTERM, or its node is being drained."""

    worker: WorkerId
    cause: str

    def __str__(self) -> str:
        return f"{self.worker} leaves: {self.cause}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Respawn:
    """Replace the workers of these slots; the others of the pool continue."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuild:
    """End the whole pool and start it again: its workers use collectives, and one that waits there for a dead peer
    cannot be recovered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Nothing is wrong."""


Remedy = Respawn | Rebuild | Leave


def remedy(*, collectives: bool, num_slots: int, dead: Sequence[int], broken: bool) -> Remedy:
    """Decides what a pool needs; pure, so that it is tested by value."""
    if not dead and not broken:
        return Leave()
    # In a pool of one, no peer waits.
    if (collectives and num_slots > 1) or not dead:
        return Rebuild()
    return Respawn(slots=tuple(sorted(dead)))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHealth:
    """What is known about a worker without calling it."""

    worker: WorkerId
    died: Died | None
    silent_s: float  # since its last sign of life
    doing: str
    for_s: float
    stalled_s: float = 0.0  # since its call advanced last

    def __str__(self) -> str:
        if self.died is not None:
            return str(self.died)
        doing = f"in {self.doing} for {self.for_s:.1f} s" if self.doing else "idle"
        stalled = f" (no progress for {self.stalled_s:.0f} s)" if self.stalled_s >= _STALLED_S else ""
        return f"{self.worker}: {doing}{stalled}, last heard {self.silent_s:.1f} s ago"


def worker_health(worker: WorkerId, beat: Beat | None, heard_s: float, died: Died | None, now_s: float) -> WorkerHealth:
    """Health of a worker. `heard_s`: when the last heartbeat came (or the worker was started), by the controller's
    clock."""
    return WorkerHealth(
        worker=worker,
        died=died,
        silent_s=max(0.0, now_s - heard_s),
        doing=beat.doing if beat is not None else "",
        for_s=beat.for_s + max(0.0, now_s - heard_s) if beat is not None and beat.doing else 0.0,
        stalled_s=beat.stalled_s + max(0.0, now_s - heard_s) if beat is not None and beat.stalled_s else 0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WhereReport:
    """Where each worker was when a call took too long, grouped by place."""

    answers: Mapping[WorkerId, Whereabouts | None]  # None: did not answer

    def groups(self) -> list[tuple[str, list[WorkerId]]]:
        """Places of the work thread with their workers, the most common first."""
        by_place: dict[str, list[WorkerId]] = {}
        for worker, answer in self.answers.items():
            by_place.setdefault(_place(answer), []).append(worker)
        return sorted(by_place.items(), key=lambda item: (-len(item[1]), item[0]))

    def work_stack(self, worker: WorkerId) -> tuple[str, ...]:
        """The stack of a worker's work thread, innermost call last; empty if it did not answer."""
        place = _work_thread(self.answers.get(worker))
        return place.stack if place is not None else ()

    def innermost(self, worker: WorkerId) -> str:
        """The innermost call of a worker's work that is not in Python's own library, "" if it did not answer. A loader
        that the work waits for, and a tokenizer that the loader waits for, say where they are."""
        answer = self.answers.get(worker)
        place = _innermost(self.work_stack(worker))
        if answer is None or _LOADER not in place:
            return place
        producers = [each.stack for each in answer.threads if any(map(_is_producer, each.stack))]
        place = _innermost(producers[0]) if producers else place
        if _TOKENIZERS not in place:
            return place
        busy = [at for _, dump in answer.helpers if (at := innermost(dump)) is not None and _TOKENIZERS not in at]
        return busy[0] if busy else place

    def stacks(self) -> str:
        """All threads of all workers, and of the processes that they have started."""
        parts = []
        for worker, answer in self.answers.items():
            if answer is None or answer.dump:
                dump = answer.dump if answer is not None else ""
                places = [f"  {_place(answer)}", *(f"    {line}" for line in dump.splitlines())]
            else:
                places = [str(place) for place in answer.threads]
            helpers = () if answer is None else answer.helpers
            parts.append("\n".join([str(worker), *places]))
            parts += [f"{name} of {worker}\n{helper.rstrip()}" for name, helper in helpers]
        return "\n\n".join(parts)

    def __str__(self) -> str:
        lines: list[str] = []
        groups = self.groups()
        split = len(groups) > 1 and len(groups[0][1]) == len(groups[1][1])  # then there is no "most"
        for position, (place, workers) in enumerate(groups):
            odd = "  <- they differ" if split else "  <- differs from most" if position > 0 else ""
            lines.append(f"{', '.join(str(worker) for worker in workers)}: {place}{odd}")
            lines += [f"    {frame}" for frame in _frames(self.answers[workers[0]])]
        return "\n".join(lines)


def _innermost(stack: Sequence[str]) -> str:
    outside = [frame for frame in stack if not frame.startswith(_LIBRARY) or "/site-packages/" in frame]
    return (outside or stack or ("",))[-1]


def _is_producer(frame: str) -> bool:
    return _LOADER in frame and frame.endswith(" _produce")


def _work_thread(answer: Whereabouts | None) -> ThreadPlace | None:
    if answer is None:
        return None
    return next((place for place in answer.threads if place.thread == "work"), None)


def _place(answer: Whereabouts | None) -> str:
    if answer is None:
        return "does not answer (dead, or in a call that holds Python's lock)"
    if answer.dump:
        return "does not answer (in a call that holds Python's lock)"
    place = _work_thread(answer)
    if place is None or not place.span:
        return "idle"
    return f"in {place.span}, at {place.stack[-1]}" if place.stack else f"in {place.span}"


def _frames(answer: Whereabouts | None) -> tuple[str, ...]:
    place = _work_thread(answer)
    return place.stack[-_FRAMES_SHOWN:] if place is not None and place.span else ()
