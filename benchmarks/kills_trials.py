# SPDX-License-Identifier: Apache-2.0
"""Trials of the fault-injection benchmark as values: drawn from a seed, what came of each, and the table of them."""

from __future__ import annotations

import json
import random
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Literal

from kills_task import ENVIRONMENTS, FIXED_DATA, LAYOUTS, SPLITS, STEPS

SignalName = Literal["KILL", "STOP"]
# `worker` is a worker process of Ray's that has no role yet; `none` is not killed at all, as a control.
VICTIMS = ("controller", "learner", "generator", "grader", "runner", "worker", "fork_server", "raylet", "gcs_server")
CONTROL = "none"
# Seconds until the run goes on, of what is replaced alone.
AIMS_S = {"generator": 5, "grader": 5, "runner": 5, "learner": 15, "controller": 15}
RANK = "rank"  # of a program on fixed data; its launcher is its controller
# Colocated generators live in the learners' processes; only environments have runners.
_ONLY_IN = {"generator": SPLITS, "runner": ENVIRONMENTS, RANK: FIXED_DATA}
_SHARE_AT_START = 0.4
_SHARE_KILLED_AGAIN = 0.5
_LATEST_AGAIN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When a victim is hit. `steps` is None: during start-up, `share` of the time between the victim's appearance and
    the first step. Else after that many steps of this command, `share` of a step later (of the time to the end, after
    the last one)."""

    steps: int | None
    share: float

    def __str__(self) -> str:
        return f"{self.share:.0%} of start-up" if self.steps is None else f"step {self.steps} + {self.share:.0%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run that is hit, and resumed where it did not go on by itself; some are hit once more after the first time,
    in their recovery or some steps later."""

    seed: int
    number: int
    layout: str
    victim: str
    signal: SignalName
    moment: Moment
    again: Moment | None
    pick: float  # which of several processes of the same role, as a share of their number

    @property
    def moments(self) -> tuple[Moment, ...]:
        """Of all kills that are planned."""
        return () if self.victim == CONTROL else tuple(each for each in (self.moment, self.again) if each is not None)

    @property
    def is_certain(self) -> bool:
        """Whether every kill comes while whole steps are left, however long they take. A second kill in start-up may
        come too late where the first one does not: a start-up may take longer than the steps that are left."""
        steps = [each.steps for each in self.moments]
        if None in steps[1:] and steps[0] is not None:
            return False
        return sum(each or 0 for each in steps) <= STEPS - 2

    @classmethod
    def read(cls, values: dict[str, Any]) -> Trial:
        again = values["again"]
        return cls(**{**values, "moment": Moment(**values["moment"]), "again": again and Moment(**again)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One command, `podium train` or `podium resume`. What belongs to the hit is None where there was none."""

    verb: str
    code: int | None  # None: it hung and was ended
    wall_s: float
    num_hits: int
    hit_at_s: float | None  # the last one, after the start of the command
    hit_while: str | None  # what the victim called itself, and how many steps were done
    end_s: float | None  # from the hit to the end of the command, finished or not
    named: bool | None  # the error names the victim; None where no error was to be expected
    advised: bool | None  # the error says how to go on
    raw: bool | None  # the output has a traceback or lines of Ray's log
    left: tuple[str, ...]  # processes that were still there some seconds after the end
    gone_s: float  # from the end of the command to the end of its last process

    @property
    def hung(self) -> bool:
        return self.code is None

    @property
    def healed(self) -> bool:
        return self.hit_at_s is not None and self.code == 0

    @classmethod
    def read(cls, values: dict[str, Any]) -> Attempt:
        return cls(**{**values, "left": tuple(values["left"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What came of a trial. Comparisons are with the unbroken run, and False where the run never completed."""

    trial: Trial
    attempts: tuple[Attempt, ...]
    completed: bool
    weights_equal: bool
    ledger_equal: bool
    first_difference: int | None  # first step whose metrics are other ones; None: all are equal
    wall_s: float
    recoveries: tuple[tuple[str, float], ...] = ()  # what the command itself replaced, and how long that took

    @property
    def recovered_s(self) -> list[float]:
        """Seconds from noticing each death until the run went on."""
        return [seconds for _, seconds in self.recoveries]

    @property
    def own_recovered_s(self) -> list[float]:
        """Those of the victim's own kind; of all kinds where it takes others with it."""
        victim = self.trial.victim
        return [seconds for part, seconds in self.recoveries if victim not in AIMS_S or part == victim]

    @property
    def hits(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.hit_at_s is not None]

    @property
    def num_missed(self) -> int:
        """Planned kills that hit nobody: the run was complete before, or had failed too often."""
        return len(self.trial.moments) - sum(attempt.num_hits for attempt in self.attempts)

    @property
    def good(self) -> bool:
        clean = all(not attempt.hung and not attempt.left for attempt in self.attempts)
        return clean and self.completed and self.weights_equal and self.ledger_equal

    def line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, line: str) -> Row:
        values = json.loads(line)
        attempts = tuple(Attempt.read(each) for each in values["attempts"])
        recoveries = tuple((part, seconds) for part, seconds in values.get("recoveries", ()))
        return cls(**{**values, "trial": Trial.read(values["trial"]), "attempts": attempts, "recoveries": recoveries})


# --- drawing ---


def cells(layouts: Sequence[str], victims: Sequence[str], signal: SignalName) -> list[tuple[str, str]]:
    """(layout, victim) that exist."""
    return [
        (layout, victim)
        for layout in layouts
        for victim in victims
        if layout in _ONLY_IN.get(victim, (layout,)) and (signal, victim, layout) != ("STOP", "controller", "sft")
        if layout not in FIXED_DATA or victim in (RANK, "controller", CONTROL)
    ]


def drawn(seed: int, layouts: Sequence[str], victims: Sequence[str], signal: SignalName) -> Iterator[Trial]:
    """Trials without end. Number N is the same however many are asked for; every layout and victim has its turn before
    one has a second."""
    every, number = cells(layouts, victims, signal), 0
    while True:
        turn = list(every)
        random.Random(f"order {seed} {number}").shuffle(turn)
        for layout, victim in turn:
            yield _trial(seed, number, layout, victim, signal)
            number += 1


def trials(
    count: int, *, seed: int, layouts: Sequence[str] = LAYOUTS, victims: Sequence[str] = VICTIMS,
    signal: SignalName = "KILL",
) -> list[Trial]:  # fmt: skip
    return list(islice(drawn(seed, layouts, victims, signal), count))


def _trial(seed: int, number: int, layout: str, victim: str, signal: SignalName) -> Trial:
    draw = random.Random(f"trial {seed} {number}")
    # A process that has no role yet is there at start-up only.
    at_start = draw.random() < _SHARE_AT_START or victim == "worker"
    moment = Moment(steps=None if at_start else draw.randint(0, STEPS), share=round(draw.random(), 4))
    again = None
    if draw.random() < _SHARE_KILLED_AGAIN and victim != CONTROL:
        at_start = draw.random() < _SHARE_AT_START or victim == "worker"
        again = Moment(steps=None if at_start else draw.randint(0, _LATEST_AGAIN), share=round(draw.random(), 4))
    return Trial(
        seed=seed, number=number, layout=layout, victim=victim, signal=signal, moment=moment, again=again,
        pick=round(draw.random(), 4),
    )  # fmt: skip


# --- the table ---

_HEADINGS = (
    "layout", "victim", "trials", "hits", "s to go on, median", "worst", "s to end, median", "worst", "hangs",
    "processes left", "healed",
    "weights equal", "ledger equal", "exit codes", "error names victim", "says how to go on", "raw output",
)  # fmt: skip


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown, a line for each layout and victim, and one for all. `s to go on`: of recoveries that the run recorded,
    since the death was noticed. `s to end` is from the hit to the end of the command, whether it failed or healed and
    finished."""
    found = [_markdown(_HEADINGS), _markdown(["---"] * len(_HEADINGS))]
    order = [(layout, victim) for layout in (*LAYOUTS, *FIXED_DATA) for victim in (*VICTIMS, RANK, CONTROL)]
    for layout, victim in order:
        some = [row for row in rows if (row.trial.layout, row.trial.victim) == (layout, victim)]
        if some:
            found.append(_markdown([layout, victim, *_cells(some)]))
    return [*found, _markdown(["all", "", *_cells(rows)])]


_VICTIM_HEADINGS = ("victim", "trials", "kills", "replaced", "s to go on, median", "worst", "aim")


def victims_table(rows: Sequence[Row]) -> list[str]:
    """Markdown, a line for each victim over all layouts. `replaced`: how often the run recorded that it replaced one of
    this kind. A grader that has nothing to do when it dies is noticed when it is needed, and never after the last
    batch."""
    found = [_markdown(_VICTIM_HEADINGS), _markdown(["---"] * len(_VICTIM_HEADINGS))]
    for victim in (*VICTIMS, RANK):
        some = [row for row in rows if row.trial.victim == victim]
        back_s = [each for row in some for each in row.own_recovered_s]
        times = [f"{statistics.median(back_s):.1f}", f"{max(back_s):.1f}"] if back_s else ["", ""]
        if some:
            kills = sum(hit.num_hits for row in some for hit in row.hits)
            aim = str(AIMS_S.get(victim, ""))
            found.append(_markdown([victim, str(len(some)), str(kills), str(len(back_s)), *times, aim]))
    return found


def recoveries_line(rows: Sequence[Row]) -> str:
    """How long it took commands to go on by themselves."""
    seconds = [each for row in rows for each in row.recovered_s]
    if not seconds:
        return "no command went on by itself"
    return (
        f"{len(seconds)} times a command went on by itself: {statistics.median(seconds):.1f} s after the death was "
        f"noticed (median), {max(seconds):.1f} s (worst)"
    )


def _cells(rows: Sequence[Row]) -> list[str]:
    hits = [hit for row in rows for hit in row.hits]
    every = [attempt for row in rows for attempt in row.attempts]
    seconds = [hit.end_s for hit in hits if hit.end_s is not None]
    back_s = [each for row in rows for each in row.recovered_s]
    codes = Counter("hung" if hit.code is None else str(hit.code) for hit in hits)
    return [
        str(len(rows)),
        str(sum(hit.num_hits for hit in hits)),
        f"{statistics.median(back_s):.1f}" if back_s else "",
        f"{max(back_s):.1f}" if back_s else "",
        f"{statistics.median(seconds):.1f}" if seconds else "",
        f"{max(seconds):.1f}" if seconds else "",
        str(sum(attempt.hung for attempt in every)),
        str(sum(len(attempt.left) for attempt in every)),
        str(sum(hit.healed for hit in hits)),
        _share([row.weights_equal for row in rows]),
        _share([row.ledger_equal for row in rows]),
        ", ".join(f"{code} ({count})" for code, count in sorted(codes.items())),
        _share([hit.named for hit in hits]),
        _share([hit.advised for hit in hits]),
        str(sum(bool(hit.raw) for hit in hits)),
    ]


def _share(answers: Sequence[bool | None]) -> str:
    known = [answer for answer in answers if answer is not None]
    return f"{sum(known)} of {len(known)}" if known else ""


def _markdown(values: Sequence[str]) -> str:
    return "| " + " | ".join(values) + " |"
