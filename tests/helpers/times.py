# SPDX-License-Identifier: Apache-2.0
"""What the time of a finished run went into."""

from __future__ import annotations

from pathlib import Path

import pytest

from podium.observe.causes import Cause, is_idle
from podium.observe.timeline import read_timeline
from podium.runs.accounting import WorkerTime, times_by_kind, worker_times


def times_of(run: Path) -> dict[str, WorkerTime]:
    """By kind of worker. The causes of each worker add up to the time from the launch to the last span, and almost all
    of it is known."""
    spans = list(read_timeline(run))
    times = worker_times(spans)
    whole_s = max(span.end_s for span in spans) - min(span.begin_s for span in spans)
    for each in times:
        assert each.total_s == pytest.approx(whole_s, rel=0.005), each.worker
        assert each.seconds.get("unknown", 0.0) < 0.02 * whole_s, each
    return times_by_kind(times)


def largest_wait(time: WorkerTime) -> Cause:
    """What a kind of worker waited for most, but for the start of the run."""
    waits = {
        cause: spent for cause, spent in time.seconds.items() if is_idle(cause) and cause != "waiting for start-up"
    }
    return max(waits, key=lambda cause: waits[cause])
