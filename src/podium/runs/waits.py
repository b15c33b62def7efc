# SPDX-License-Identifier: Apache-2.0
"""Names the cause of a moment of a worker: by its span, by the phase of the controller, and by what the other workers
do at the same time. Pure and torch-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final, Protocol

from podium.observe.causes import FOR_GRADING, FOR_PROMPTS, FOR_RANKS, FOR_REQUESTS, FOR_TOOLS, Cause
from podium.observe.timeline import TAIL, TimelineWorker
from podium.observe.timing import NESTED, RESTART

_GENERATORS: Final = ("generator", "lent-generator")
# Of a worker's call `role.method`: what it computes, by its method.
_BY_METHOD: Final[Mapping[str, Cause]] = {
    "stream": "generation", "serve": "generation", "grade": "grading", "score": "scoring", "estimate": "scoring",
    "update": "update", "describe": "weights", "describe_base": "weights", "check_base": "weights", "send": "weights",
    "store": "weights", "install": "weights", "share": "weights", "copy_from": "weights", "hold": "residency",
    "save": "save", "save_state": "save", "finish_saving": "save", "snapshot": "save", "snapshots": "save",
    "forget_snapshots": "save", "restore": "waiting for recovery",
}  # fmt: skip
# Calls that tell or ask something.
_QUICK: Final = frozenset({
    "facts", "lanes", "usage", "has_stepped", "admit", "finish_stream", "give_back", "begin_serving", "stop_serving",
    "exchange", "forget", "abandon", "reset", "use_lent",
})  # fmt: skip
# Of spans that are no call of a role.
_BY_NAME: Final[Mapping[str, Cause]] = {
    "import": "start-up", "settle": "start-up", "join": "start-up", "openmeeting": "start-up", "clear": "start-up",
    "openchannel": "start-up", "disconnect": "weights", "decoding": "grading", "rewards": "grading",
    "installing weights": "weights",
    # of ranks
    "start-up": "start-up", "preparation": "start-up", "data": "waiting for data", "compute": "update",
    "evaluation": "evaluation", "checkpoint": "save", "snapshot": "save", RESTART: "waiting for recovery",
}  # fmt: skip
# Of the controller's phases: what the phase is, and what a worker without work waits for.
_PHASES: Final[Mapping[str, tuple[Cause, Cause | None]]] = {
    "start-up": ("start-up", "waiting for start-up"), "shut-down": ("control", "waiting for the controller"),
    "recovery": ("waiting for recovery", "waiting for recovery"),
    RESTART: ("waiting for recovery", "waiting for recovery"),
    "evaluation": ("evaluation", "waiting for evaluation"), "checkpoint": ("save", "waiting for save"),
    "publish": ("weights", "waiting for weights"), "residency": ("residency", "residency"),
    "lend": ("residency", "residency"), "rollout": ("generation", None), "wait": ("generation", None),
    "drain": ("generation", None), "grade": ("grading", None), "score": ("scoring", None), "update": ("update", None),
    "refresh": ("weights", None),
}  # fmt: skip
_GENERATING: Final = frozenset({"rollout", "wait", "drain"})


class Activity:
    """What is going on somewhere in the run: bits of a number. (Those of the enum module take ten times as long.)"""

    NOTHING: Final = 0
    GENERATING: Final = 1
    TAIL: Final = 2  # a generator has few sequences left
    OUT: Final = 4  # a generator has nothing to generate
    TOOLS: Final = 8  # a runner waits for tools only
    RUNNER_TAIL: Final = 16
    GRADING: Final = 32
    LEARNING: Final = 64
    WEIGHTS: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Duties:
    """What a worker is there for, by its pool and its calls."""

    generates: bool
    learns: bool
    grades: bool
    plays: bool  # episodes, as a runner
    is_rank: bool  # of an SPMD program


@dataclass(frozen=True, slots=True)
class Meanwhile:
    """What the others do. `phase`: of the controller, "" if it is in none; None: it is not known."""

    phase: str | None = None
    detail: str | None = None
    activity: int = Activity.NOTHING  # all bits


@dataclass(frozen=True, slots=True)
class Moment:
    """An interval in which nobody changes what he does."""

    begin_s: float
    end_s: float
    meanwhile: Meanwhile = field(default_factory=Meanwhile)


class Interval(Protocol):
    """What a process did; None: nothing."""

    @property
    def begin_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...
    @property
    def name(self) -> str | None: ...


def duties_of(worker: str, names: Iterable[str]) -> Duties:
    """The duties of a worker, given the names of its spans."""
    kind, roles = TimelineWorker.of(worker).kind, {name.partition(".")[0] for name in names}
    return Duties(
        generates="generator" in roles or kind == "rollout",
        learns=bool(roles & {"policy", "critic"}) or kind == "train",
        grades="grader" in roles or kind == "graders",
        plays="runner" in roles or kind == "runners",
        is_rank=kind == "ranks",
    )


@cache
def waits(name: str | None) -> bool:
    """Whether a process in this span, or in none, has nothing to do."""
    return name is None or name.rpartition(NESTED)[2].startswith("waiting") or _is_runner_tail(name)


@cache
def computing_cause(duties: Duties, name: str, meanwhile: Meanwhile) -> Cause:
    """What a worker in a span that is no wait computes."""
    cause = _cause_of(name)
    if duties.is_rank:
        return cause
    if meanwhile.phase in ("recovery", RESTART):
        return "waiting for recovery"
    if meanwhile.phase == "start-up" and cause in ("control", "unknown"):
        return "start-up"
    return "evaluation" if meanwhile.phase == "evaluation" and cause in _EVALUATED else cause


_EVALUATED: Final = frozenset({"generation", "episodes", "grading", "scoring"})


@cache
def waiting_cause(duties: Duties, name: str | None, meanwhile: Meanwhile) -> Cause:
    """What a worker without work waits for. `name`: of the span in which it says that it waits."""
    own = None if name is None else name.rpartition(NESTED)[2]
    if own == FOR_RANKS:
        return "waiting for other ranks"
    if duties.is_rank or meanwhile.phase is None:
        return "unknown"
    known = _PHASES.get(meanwhile.phase)
    if known is not None and known[1] is not None:
        return known[1]
    if meanwhile.phase and known is None:
        return "unknown"
    if duties.plays:
        return _of_runner(own, meanwhile)
    if duties.grades:
        is_spare = meanwhile.activity & Activity.GRADING and not _is_generating(meanwhile)
        return "waiting for grading" if is_spare else "waiting for the other role"
    if own == FOR_REQUESTS and meanwhile.activity & Activity.TOOLS:
        return "waiting for tools"
    if meanwhile.phase in _GENERATING or meanwhile.phase == "grade":
        return _while_generating(duties, own, meanwhile)
    return _while_learning(duties, own, meanwhile)


@cache
def phase_cause(name: str | None, meanwhile: Meanwhile) -> Cause:
    """The time of the controller: the phase that it directs."""
    if name is None:
        return "unknown" if meanwhile.phase is None else "control"
    phase, _, detail = name.partition(NESTED)
    return "grading" if detail == FOR_GRADING else _PHASES.get(phase, ("unknown", None))[0]


def moments(
    controlling: Sequence[tuple[float, float, str | None]], others: Mapping[str, tuple[Duties, Sequence[Interval]]]
) -> Iterator[Moment]:
    """The time of the controller, cut where what it or another worker does changes. Without a controller there is
    none."""
    if not controlling:
        return
    named = [at for at, (_, _, name) in enumerate(controlling) if name is not None]
    if not named:
        return
    first_s, last_s = controlling[named[0]][0], controlling[named[-1]][1]
    changes: list[tuple[float, int, int]] = []  # when, which worker, what it does from then on
    for number, (duties, life) in enumerate(others.values()):
        before: int | None = None
        for interval in life:
            now = _activity(duties, interval.name)
            if now != before:
                changes.append((interval.begin_s, number, now))
            before = now
        if life:
            changes.append((life[-1].end_s, number, Activity.NOTHING))
    changes.sort(key=lambda change: change[0])
    counts: defaultdict[int, int] = defaultdict(int)  # by activity: workers
    doing: dict[int, int] = {}  # by worker: its activity
    activity = Activity.NOTHING
    at, last = 0, None
    for begin_s, end_s, name in controlling:
        if end_s <= first_s or begin_s >= last_s:
            continue
        phase, _, detail = ("", "", "") if name is None else name.partition(NESTED)
        while begin_s < end_s:
            while at < len(changes) and changes[at][0] <= begin_s:
                _, number, now = changes[at]
                before_it = doing.get(number, Activity.NOTHING)
                doing[number] = now
                counts[before_it] -= 1
                counts[now] += 1
                if not counts[before_it]:
                    activity &= ~before_it
                activity |= now
                at += 1
            until_s = min(end_s, changes[at][0]) if at < len(changes) else end_s
            meanwhile = _meanwhile(phase, detail or None, activity)
            if last is not None and last.meanwhile is meanwhile:
                last = Moment(last.begin_s, until_s, meanwhile)
            else:
                if last is not None:
                    yield last
                last = Moment(begin_s, until_s, meanwhile)
            begin_s = until_s
    if last is not None:
        yield last


# --- internals ---


@cache
def _meanwhile(phase: str, detail: str | None, activity: int) -> Meanwhile:
    return Meanwhile(phase, detail, activity)


@cache
def _activity(duties: Duties, name: str | None) -> int:
    """What the others see of a worker."""
    if name is None:
        return Activity.OUT if duties.generates else Activity.NOTHING
    role, own = name.partition(".")[0], name.rpartition(NESTED)[2]
    if duties.plays:
        return {FOR_TOOLS: Activity.TOOLS, TAIL: Activity.RUNNER_TAIL}.get(own, Activity.NOTHING)
    if own.startswith("waiting"):
        return Activity.OUT if duties.generates else Activity.NOTHING
    if role in _GENERATORS and _cause_of(name) == "generation":
        return Activity.TAIL if own == TAIL else Activity.GENERATING
    match _cause_of(name):
        case "grading":
            return Activity.GRADING
        case "update":
            return Activity.LEARNING
        case "scoring":  # reward models grade
            return Activity.GRADING if role.startswith("reward") else Activity.LEARNING
        case "weights":
            return Activity.WEIGHTS
        case _:
            return Activity.NOTHING


@cache
def _cause_of(name: str) -> Cause:
    """Of a span that is no wait: its innermost part that says something."""
    for part in reversed(name.split(NESTED)):
        if (cause := _BY_NAME.get(part)) is not None:
            return cause
        if part.startswith(("build ", "connect ")):
            return "start-up"
        role, _, method = part.partition(".")
        if method:
            return _of_call(role, method)
    return "unknown"


def _of_call(role: str, method: str) -> Cause:
    if role == "runner" and method == "stream":
        return "episodes"
    if role == "policy" and method == "grade":  # notes the held-out score in a checkpoint
        return "save"
    return _BY_METHOD.get(method) or ("control" if method in _QUICK else "unknown")


def _is_runner_tail(name: str) -> bool:
    return name.startswith("runner.") and name.endswith(f"{NESTED}{TAIL}")


def _is_generating(meanwhile: Meanwhile) -> bool:
    return bool(meanwhile.activity & (Activity.GENERATING | Activity.TAIL))


def _is_tail(activity: int) -> bool:
    """Whether the last episodes run: some generators have nothing to do any more, or few sequences."""
    if activity & Activity.RUNNER_TAIL:
        return True
    if activity & Activity.GENERATING and not activity & Activity.TOOLS:
        return bool(activity & Activity.OUT)
    return bool(activity & Activity.TAIL)


def _of_runner(own: str | None, meanwhile: Meanwhile) -> Cause:
    """A runner says itself what its episodes wait for."""
    if own == FOR_TOOLS:
        return "waiting for tools"
    if own == TAIL:
        return "waiting for the tail of generation"
    if meanwhile.phase == "grade" or meanwhile.detail == FOR_GRADING:
        return "waiting for grading"
    return "waiting for the other role"


def _while_generating(duties: Duties, own: str | None, meanwhile: Meanwhile) -> Cause:
    """While the run waits for episodes, a learner or a generator that has nothing to do."""
    activity = meanwhile.activity
    if meanwhile.phase == "grade" or meanwhile.detail == FOR_GRADING:
        return "waiting for grading"
    if own == FOR_REQUESTS and not activity & Activity.RUNNER_TAIL and _is_generating(meanwhile):
        return "waiting for tools"  # those of the episodes that it has cached; other generators have requests
    if _is_generating(meanwhile):
        is_tail = duties.generates or _is_tail(activity) or meanwhile.phase == "drain"
        return "waiting for the tail of generation" if is_tail else "waiting for the other role"
    if activity & Activity.TOOLS:
        return "waiting for tools"
    if activity & Activity.RUNNER_TAIL:
        return "waiting for the tail of generation"
    if activity & Activity.GRADING:
        return "waiting for grading"
    if activity & Activity.WEIGHTS:
        return "waiting for weights"
    return "waiting for prompts" if own == FOR_PROMPTS else "waiting for the controller"


def _while_learning(duties: Duties, own: str | None, meanwhile: Meanwhile) -> Cause:
    """While the run scores, updates or does nothing with workers, one that has nothing to do."""
    activity = meanwhile.activity
    if duties.learns and activity & Activity.LEARNING:
        return "waiting for other ranks"
    if activity & Activity.LEARNING or (meanwhile.phase and duties.generates and not duties.learns):
        return "waiting for the other role"
    if own == FOR_PROMPTS:
        return "waiting for prompts"
    return "waiting for weights" if activity & Activity.WEIGHTS else "waiting for the controller"
