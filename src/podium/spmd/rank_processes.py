# SPDX-License-Identifier: Apache-2.0
"""Watches ranks from outside: which have ended, which are stopped (SIGSTOP), and which hang. Torch-free."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.cluster.helper_stacks import stacks_of_helpers
from podium.cluster.processes import look
from podium.progress import published
from podium.stack_dumps import (
    append_stacks,
    dumped_stacks,
    dumper_name,
    frames_of_threads,
    innermost,
    innermost_frame,
    is_debugged,
)

# How often a launcher looks at its ranks.
LOOK_S = 0.2
_GRACE_S = 2.0
_ASK_AGAIN_S = 10.0
# What the others wait for may have advanced a little longer than they.
_NEARLY = 0.5
# A rank waits for its peers in a collective, or for their rows.
_COLLECTIVES, _INNERMOST = "/torch/distributed/", 4
_EXCHANGE = ("/podium/spmd/exchanging.py", "all_gather")
# Of a main thread that waits for data, its loader says where.
_TOKENIZERS = "/podium/data/workers.py"
_LOADER, _PRODUCER = "/podium/data/loader.py", "_produce"


class RankMarks:
    """When each rank advanced last, in memory that ranks and launcher share: a rank that holds Python's lock for ever
    cannot send anything."""

    def __init__(self, ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._marks, self._pids = context.RawArray("d", ranks), context.RawArray("q", ranks)

    def published(self, rank: int) -> AbstractContextManager[None]:
        """Inside, the marks of this thread are those of a rank, which is this process."""
        self._pids[rank] = os.getpid()
        marks = self._marks

        def publish(at_s: float) -> None:
            marks[rank] = at_s

        return published(publish)

    def of(self, pid: int | None) -> float | None:
        """The mark of a process; None: it is no rank, or has not marked anything yet."""
        known = [mark for mark, own in zip(self._marks, self._pids, strict=True) if own == pid and mark]
        return known[0] if known else None


class Stalls:
    """For how long marks have not changed. Counts looks instead of reading the clock: the process that looks may have
    been stopped too, for instance by Ctrl-Z."""

    def __init__(self) -> None:
        self._last_s: dict[Any, float] = {}
        self._stalled_s: dict[Any, float] = {}

    def look(self, who: Any, mark_s: float | None) -> float:
        """Takes a mark; returns the seconds since it changed. One in the future belongs to a wait with a deadline."""
        is_same = mark_s is not None and self._last_s.get(who) == mark_s and mark_s <= time.monotonic()
        if mark_s is not None:
            self._last_s[who] = mark_s
        return self.count(who, is_same)

    def count(self, who: Any, is_stalled: bool) -> float:
        """Counts a look at `who`; returns for how long it has been stalled."""
        self._stalled_s[who] = self._stalled_s.get(who, 0.0) + LOOK_S if is_stalled else 0.0
        return self._stalled_s[who]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStacks:
    """Where a rank and the processes that it has started were."""

    pid: int
    name: str
    dump: str | None  # None: it did not answer
    helpers: tuple[tuple[str, str], ...] = ()  # names and dumps

    @classmethod
    def of(cls, pid: int) -> RankStacks:
        """Asks a rank, and its tokenizers."""
        name, dump = dumper_name(pid) or "a rank that starts", dumped_stacks(pid)
        return cls(pid=pid, name=name, dump=dump, helpers=stacks_of_helpers(pid))

    @property
    def place(self) -> str | None:
        """The innermost call of its work, which a tokenizer may do for it."""
        place = None if self.dump is None else place_of(self.dump)
        if place is None or _TOKENIZERS not in place:
            return place
        busy = [at for _, dump in self.helpers if (at := innermost(dump)) is not None and _TOKENIZERS not in at]
        return busy[0] if busy else place

    @property
    def waits_for_peers(self) -> bool:
        """Whether it waits for other ranks."""
        threads = [] if self.dump is None else frames_of_threads(self.dump)
        is_exchanging = any(all(part in frame for part in _EXCHANGE) for frames in threads for frame in frames)
        return is_exchanging or any(_COLLECTIVES in frame for frame in (threads or [[]])[-1][:_INNERMOST])

    @property
    def is_debugged(self) -> bool:
        """Whether a debugger has stopped its main thread."""
        return self.dump is not None and is_debugged(frames_of_threads(self.dump)[-1])

    def __str__(self) -> str:
        own = f"{self.name} (process {self.pid})\n{self.dump or 'did not answer'}\n"
        return "\n".join([own, *(f"{name} of {self.name}\n{dump}\n" for name, dump in self.helpers)])


def place_of(dump: str) -> str | None:
    """The innermost call of a main thread, or of its loader if it waits for data."""
    *others, main = frames_of_threads(dump)
    place = innermost_frame(main)
    if place is not None and _LOADER in place:
        producer = next((each for each in others if each and any(_is_producer(frame) for frame in each)), main)
        place = innermost_frame(producer)
    return place


def _is_producer(frame: str) -> bool:
    return _LOADER in frame and frame.endswith(f" in {_PRODUCER}")


class RankProcesses:
    """The processes of one group of ranks. Torch's agent gives ranks half a minute to end when another one is gone:
    one of them may wait for the dead one's part of a checkpoint. A run that restarts does not need that."""

    def __init__(
        self, stacks_file: Path | None, most_stopped_s: float = math.inf, *, marks: RankMarks | None = None,
        most_hung_s: float = math.inf,
    ) -> None:  # fmt: skip
        """`most_stopped_s`: for how long a rank may be stopped before it is killed; `most_hung_s`: for how long its
        `marks` may not change."""
        self._stacks_file, self._most_stopped_s = stacks_file, most_stopped_s
        self._marks, self._most_hung_s = marks, most_hung_s
        self._stops, self._stalls = Stalls(), Stalls()
        self._asks_at_s = most_hung_s  # stalled for so long, ranks are asked where they are
        self.ended: str | None = None  # which ranks were killed because they did not go on, and what that means
        self._others = set(multiprocessing.active_children())
        self._ranks: set[Any] = set()
        self._failed_s: float | None = None
        self.told = ""  # where the others were when one failed

    @property
    def failed_s(self) -> float:
        """When the first one was seen to have failed, on the monotonic clock; now if none was."""
        return time.monotonic() if self._failed_s is None else self._failed_s

    def look(self, *, ends_others: Callable[[], bool]) -> None:
        """Looks which are there. `ends_others`: kills those that are left some seconds after one was killed."""
        self._ranks |= set(multiprocessing.active_children()) - self._others
        living = [rank for rank in self._ranks if rank.exitcode is None]
        self._end_stopped(living)
        self._end_hung(living)
        if self._failed_s is None and any(rank.exitcode for rank in self._ranks):
            self._failed_s = time.monotonic()
            self._keep([RankStacks.of(rank.pid) for rank in living], "a rank failed, and the others were here:")
        was_killed = any((rank.exitcode or 0) < 0 for rank in self._ranks)
        if was_killed and time.monotonic() - self.failed_s > _GRACE_S and ends_others():
            for rank in self._ranks:
                rank.kill()

    def _end_stopped(self, living: Sequence[Any]) -> None:
        """Kills ranks that were stopped for too long."""
        stopped_s = {rank: self._stops.count(rank, is_stopped(rank.pid)) for rank in living}
        stopped = [rank for rank in living if stopped_s[rank] >= self._most_stopped_s]
        if not stopped or self._failed_s is not None:
            return
        names = sorted(f"{dumper_name(rank.pid) or 'a rank that starts'} (process {rank.pid})" for rank in stopped)
        self._keep(
            [RankStacks.of(rank.pid) for rank in living if not stopped_s[rank]],
            "a rank was stopped, and the others were here:",
        )
        self._end(
            stopped, f"{', '.join(names)}: stopped (SIGSTOP), without a sign of life for {self._most_stopped_s:g} s."
        )

    def _end_hung(self, living: Sequence[Any]) -> None:
        """Kills ranks that have not advanced for too long, but for those that only wait for another one. While a
        debugger has stopped one of them, all are left alone."""
        if self._marks is None or self._failed_s is not None:
            return
        marks = {rank: self._marks.of(rank.pid) for rank in living}
        stalled_s = {rank: self._stalls.look(rank, mark) for rank, mark in marks.items()}
        longest_s = max(stalled_s.values(), default=0.0)
        if longest_s < self._asks_at_s:
            self._asks_at_s = self._asks_at_s if longest_s >= self._most_hung_s else self._most_hung_s
            return
        stacks = {rank: RankStacks.of(rank.pid) for rank in living}
        stalled = [rank for rank in living if stalled_s[rank] >= _NEARLY * self._most_hung_s]
        stuck = [rank for rank in stalled if not stacks[rank].waits_for_peers]
        # They wait for one that advances, and have a deadline for that; or one has advanced while it was asked.
        waits = not stuck and len(stalled) < len(living)
        stuck = stuck or stalled
        goes_on = any(self._marks.of(rank.pid) != marks[rank] for rank in stuck)
        if waits or goes_on or any(each.is_debugged for each in stacks.values()):
            self._asks_at_s = longest_s + _ASK_AGAIN_S
            return
        words = sorted(_hang(stacks[rank]) for rank in stuck)
        self._keep(list(stacks.values()), "a rank hangs, and all ranks were here:")
        self._end(stuck, f"{', '.join(words)}: no progress for {self._most_hung_s:g} s (placement.timeout_s).")

    def _end(self, ranks: Sequence[Any], cause: str) -> None:
        self._failed_s = time.monotonic()
        self.ended = f"{cause} It counts as dead; the others were ended."
        for rank in ranks:
            rank.kill()

    def _keep(self, stacks: Sequence[RankStacks], title: str) -> None:
        """Keeps the stacks of ranks that go on or hang."""
        if self._stacks_file is None or not stacks:
            return
        ordered = sorted(stacks, key=lambda each: (each.name, each.pid))
        where = [
            f"{each.name} did not answer" if each.place is None else f"{each.name} was at {each.place}"
            for each in ordered
        ]
        append_stacks(self._stacks_file, title, "\n".join(map(str, ordered)))
        self.told = f"when one failed, {', '.join(where)}. Their stacks are in {self._stacks_file}"


def _hang(stacks: RankStacks) -> str:
    place = f" at {stacks.place}" if stacks.place is not None else ""
    return f"{stacks.name} (process {stacks.pid}) hangs{place}"


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal."""
    process = look(pid)
    return process is not None and process.is_stopped
