# SPDX-License-Identifier: Apache-2.0
"""Server-sent events of one run: new lines of its metrics and changes of its status, by looking at the files."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from podium.errors import PodiumError
from podium.observe.metrics import json_value
from podium.ui.answers import json_text
from podium.ui.site import Site

_LOOK_S = 0.5
_HEARTBEAT_S = 10.0
# Whether a process still holds the folder does not show in its files: that is asked after so many seconds.
_STATUS_S = 5.0
# Lines of one look; a browser that was asleep gets the newest, and asks for the curves again.
_MOST_LINES = 200
HEARTBEAT = ": still here\n\n"


def run_events(site: Site, run_id: str, stop: threading.Event, *, look_s: float = _LOOK_S) -> Iterator[str]:
    """Texts to send until `stop`: the status first, then an event for every new line of metrics and for every change of
    the status. A comment every ten seconds finds out whether anybody listens. `reset` says that the metrics were
    written anew, by a resumed run for instance."""
    data = site.data(run_id)
    metrics = data.metrics
    line = metrics.refresh()
    status: dict[str, Any] = {}
    stamp: object = None
    asked_s = spoke_s = time.monotonic()
    yield "retry: 2000\n\n"
    while True:
        before, stamp = stamp, _stamp(data.path)
        if stamp != before or time.monotonic() - asked_s >= _STATUS_S:
            asked_s = time.monotonic()
            for event in _news(site, run_id, status):
                spoke_s = time.monotonic()
                yield event
        count = metrics.refresh()
        if count < line:
            line = count
            spoke_s = time.monotonic()
            yield event_text("reset", {"lines": count})
        if count > line:
            line = max(line, count - _MOST_LINES)
            new = metrics.since(line)  # another request may have read more meanwhile
            line += len(new)
            for step, time_s, values in new:
                shown = {name: json_value(value) for name, value in values.items()}
                yield event_text("metrics", {"step": step, "time_s": time_s, "values": shown})
            spoke_s = time.monotonic()
        if time.monotonic() - spoke_s >= _HEARTBEAT_S:
            spoke_s = time.monotonic()
            yield HEARTBEAT
        if stop.wait(look_s):
            return


def _stamp(run: Path) -> tuple[tuple[int, int, int] | None, ...]:
    """Changes with the state of a run, and when its folder is gone."""
    found: list[tuple[int, int, int] | None] = []
    for name in ("run.json", "recipe.yaml"):
        try:
            stat = os.stat(run / name)
            found.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
        except OSError:
            found.append(None)
    return tuple(found)


def _news(site: Site, run_id: str, known: dict[str, Any]) -> Iterator[str]:
    """The status where it differs from the known one. A run that is gone has the status `gone`."""
    try:
        row = site.status(run_id)
        status = {name: row[name] for name in ("status", "step", "steps", "changed_s", "broken")}
    except PodiumError as error:
        status = {"status": "gone", "broken": str(error)}
    if {**status, "changed_s": 0} != {**known, "changed_s": 0}:
        known.clear()
        known |= status
        yield event_text("status", status)


def event_text(name: str, value: Any) -> str:
    """One event. JSON has no line breaks, so it is one line of data."""
    return f"event: {name}\ndata: {json_text(value)}\n\n"
