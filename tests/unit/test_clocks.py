# SPDX-License-Identifier: Apache-2.0
"""Nothing that waits or measures reads the time of day, so a clock that is set during a run changes nothing."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import podium
from podium.cluster.deadlines import Deadline, now_s, wall_s
from podium.cluster.identity import WorkerId
from podium.cluster.spans import SpanRecorder
from podium.observe.timing import Stopwatch

SOURCE = Path(podium.__file__).parent
# Every use of the time of day, by file, with the reason.
ALLOWED = {
    "environments/judge_limits.py": "a Retry-After header that is a date",
    "observe/timing.py": "read once per process: spans of several machines are laid side by side",
    "runs/events.py": "when a run went on after a death, a time stamp for people",
    "runs/log.py": "time_s of a line of metrics.jsonl or machine.jsonl, a time stamp for people",
    "runs/folder.py": "since when a process holds a folder, shown to people",
}
CLOCKS = {("time", "time"), ("time", "time_ns"), ("time", "clock_gettime"), ("datetime", "now"),
          ("datetime", "utcnow"), ("datetime", "today"), ("date", "today")}  # fmt: skip


def uses_of_the_time_of_day(code: str) -> Iterator[int]:
    """Lines that name a wall clock: `time.time`, `datetime.now` and their like, however they are imported."""
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if (owner, name) in CLOCKS:
                yield node.lineno
            case ast.Attribute(value=ast.Attribute(attr=owner), attr=name) if (owner, name) in CLOCKS:
                yield node.lineno
            case ast.ImportFrom(module="time", names=names) if any(
                each.name in ("time", "time_ns", "clock_gettime") for each in names
            ):
                yield node.lineno


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("import time\nnow = time.time()", [2]),
        ("import time\nclock = time.time", [2]),
        ("from time import time", [1]),
        ("import datetime\nnow = datetime.datetime.now()", [2]),
        ("from datetime import datetime\nnow = datetime.now()", [2]),
        ("import time\nnow = time.monotonic()\nthen = time.perf_counter()", []),
    ],
)
def test_uses_are_found(code: str, lines: list[int]) -> None:
    assert list(uses_of_the_time_of_day(code)) == lines


def test_the_time_of_day_is_read_for_time_stamps_only() -> None:
    uses = {
        str(path.relative_to(SOURCE)): found
        for path in sorted(SOURCE.rglob("*.py"))
        if (found := list(uses_of_the_time_of_day(path.read_text(encoding="utf-8"))))
    }

    assert {file: len(lines) for file, lines in uses.items()} == dict.fromkeys(ALLOWED, 1), uses


@pytest.fixture(params=[-86_400.0, 86_400.0], ids=["a day back", "a day forward"])
def jumped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """The system's clock is set while the test runs."""
    real, jump = time.time, float(request.param)
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    return jump


def test_a_deadline_is_not_moved_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    deadline = Deadline(100.0)
    monkeypatch.setattr(time, "time", lambda: 0.0)

    assert 99.0 < deadline.left_s <= 100.0


def test_a_span_keeps_its_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, real = SpanRecorder(), time.time
    recorder.name_thread("work")
    with recorder.span("update"):
        monkeypatch.setattr(time, "time", lambda: real() - 86_400.0)
        assert 0.0 <= recorder.doing("work")[1] < 60.0

    (span,) = recorder.drain(WorkerId("train", 0, "here", "cpu"))
    assert 0.0 <= span.end_s - span.begin_s < 60.0


def test_clocks_go_on_from_where_they_were(jumped: float) -> None:
    before, wall = now_s(), wall_s()

    assert 0.0 <= now_s() - before < 60.0
    assert 0.0 <= wall_s() - wall < 60.0
    assert abs(wall - (time.time() - jumped)) < 3600.0  # the machine's own clock may have been set meanwhile


def test_the_time_by_cause_does_not_follow_the_clock(jumped: float) -> None:
    watch = Stopwatch()
    with watch.span("compute"):
        pass

    assert 0.0 <= watch.seconds()["compute"] < 60.0
    assert 0.0 <= watch.summary().total_s < 60.0
