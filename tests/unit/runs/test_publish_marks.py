# SPDX-License-Identifier: Apache-2.0
"""The moments at which weights were published: in the timeline, in a trace, and in no account of time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.simulated_runs import simulated, simulated_recipe
from podium.observe.timeline import CONTROLLER, TimelineSpan, is_mark, published_version, read_timeline
from podium.runs.accounting import worker_times
from podium.runs.tracing import write_trace

SPLIT = {"placement": {"layout": "split", "devices": 2}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "versions"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        (SPLIT, [0, 1, 2, 3, 4, 5]),
        ({**SPLIT, "rollout": {"staleness": 1}}, [0, 1, 2, 3, 4, 5]),
    ],
    ids=["colocated", "split", "stale"],
)
def test_a_trace_marks_every_version(tmp_path: Path, changes: dict[str, Any], versions: list[int]) -> None:
    """Six steps: the last one's weights are published to nobody."""
    run = simulated(simulated_recipe(tmp_path, **changes)).result.folder
    write_trace(run, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]

    marks = [event for event in events if event.get("cat") == "publish"]
    assert [mark["args"]["version"] for mark in marks] == versions
    assert [mark["name"] for mark in marks] == [f"published version {version}" for version in versions]
    assert all(mark["ph"] == "i" for mark in marks)
    times = [mark["ts"] for mark in marks]
    assert times == sorted(times)
    assert not any(event["ph"] == "X" and event["name"].startswith("published") for event in events)


def test_a_mark_is_no_time_of_the_controller(tmp_path: Path) -> None:
    run = simulated(simulated_recipe(tmp_path)).result.folder
    spans = list(read_timeline(run))
    lasting = [span for span in spans if published_version(span) is None]

    assert len(spans) - len(lasting) == 6
    assert worker_times(spans) == worker_times(lasting)


@pytest.mark.parametrize(
    "name", ["published version ", "published version x", "published version ²", "publish", "launch"]
)
def test_other_names_are_no_marks(name: str) -> None:
    assert published_version(TimelineSpan(CONTROLLER, name, 0.0, 0.0)) is None
    assert published_version(TimelineSpan(CONTROLLER, "published version 12", 0.0, 0.0)) == 12


def test_lent_and_recalled_devices_are_marks_in_turn(tmp_path: Path) -> None:
    changes = {"placement": {"layout": "elastic", "devices": 2}, "rollout": {"staleness": 1}}
    run = simulated(simulated_recipe(tmp_path, **changes)).result.folder
    spans = list(read_timeline(run))
    marks = [span.name for span in spans if is_mark(span) and published_version(span) is None]

    assert marks
    assert marks == ["devices lent", "devices recalled"] * (len(marks) // 2) + ["devices lent"] * (len(marks) % 2)
    assert worker_times(spans) == worker_times([span for span in spans if not is_mark(span)])
