# SPDX-License-Identifier: Apache-2.0
"""What happened to a run beside its steps: deaths of workers and what was done about them. One JSON line each in
`events.jsonl` of its folder; a resumed run appends. Torch-free."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

EVENTS_FILE = "events.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Workers died, and the run went on."""

    part: str  # what died: grader, runner, generator, learner, controller, rank
    cause: str
    remedy: str  # what was done: retry, respawn, rewind, restart, attach
    step: int  # committed when the run went on
    seconds: float  # until then
    time_s: float  # when it went on, since 1970


def append_recovery(run: Path, *, part: str, cause: str, remedy: str, step: int, seconds: float) -> None:
    """Adds a recovery to the run's events."""
    event = Recovery(part=part, cause=cause, remedy=remedy, step=step, seconds=seconds, time_s=time.time())
    # A full disk must not end the run: the console has it too.
    with contextlib.suppress(OSError), (run / EVENTS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"event": "recovery", **asdict(event)}) + "\n")


def recoveries(run: Path) -> Iterator[Recovery]:
    """All recoveries of a run, oldest first. A line that a full disk has cut is left out."""
    path = run / EVENTS_FILE
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            values = json.loads(line)
            if values.pop("event") == "recovery":
                yield Recovery(**values)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
