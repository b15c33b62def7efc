# SPDX-License-Identifier: Apache-2.0
"""What happened to a run beside its steps: deaths of workers and what was done about them, and generators that joined
or left. One JSON line each in `events.jsonl` of its folder; a resumed run appends. Torch-free."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

EVENTS_FILE = "events.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Workers died, and the run went on."""

    part: str  # what died: grader, runner, generator, learner, controller, rank
    cause: str
    # What was done: retry, respawn, rewind, restart, attach; fewer: without it; give up: without its work.
    remedy: str
    step: int  # committed when the run went on
    seconds: float  # until then
    time_s: float  # when it went on, since 1970


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipChange:
    """A generator joined a running job, or left it."""

    change: str  # joined, left
    generator: str
    cause: str
    step: int  # committed
    generators: int  # that there are afterwards
    time_s: float  # since 1970


def append_recovery(run: Path, *, part: str, cause: str, remedy: str, step: int, seconds: float) -> None:
    """Adds a recovery to the run's events."""
    _append(run, "recovery", {"part": part, "cause": cause, "remedy": remedy, "step": step, "seconds": seconds})


def append_membership(run: Path, *, change: str, generator: str, cause: str, step: int, generators: int) -> None:
    """Adds a generator that joined or left to the run's events."""
    values = {"change": change, "generator": generator, "cause": cause, "step": step, "generators": generators}
    _append(run, "membership", values)


def recoveries(run: Path) -> Iterator[Recovery]:
    """All recoveries of a run, oldest first."""
    return _events(run, "recovery", Recovery)


def membership_changes(run: Path) -> Iterator[MembershipChange]:
    """All generators that joined or left a run, oldest first."""
    return _events(run, "membership", MembershipChange)


_EventT = TypeVar("_EventT")


def _append(run: Path, event: str, values: Mapping[str, object]) -> None:
    # A full disk must not end the run: the console has it too.
    with contextlib.suppress(OSError), (run / EVENTS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"event": event, **values, "time_s": time.time()}) + "\n")


def _events(run: Path, event: str, kind: Callable[..., _EventT]) -> Iterator[_EventT]:
    """All events of a kind, oldest first. A line that a full disk has cut is left out."""
    path = run / EVENTS_FILE
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            values = json.loads(line)
            if values.pop("event") == event:
                yield kind(**values)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
