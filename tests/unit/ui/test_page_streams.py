# SPDX-License-Identifier: Apache-2.0
"""Server-sent events: what a run does arrives at the page."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.run_folders import append_steps
from podium.runs.folder import RunFolder
from podium.ui import server as page_server
from podium.ui import streams
from podium.ui.site import Site
from podium.ui.streams import run_events

Event = tuple[str, Any]


def parsed(texts: Iterator[str]) -> Iterator[Event]:
    for text in texts:
        lines = dict(line.split(": ", 1) for line in text.strip().splitlines())
        if "event" in lines:
            yield lines["event"], json.loads(lines["data"])


@pytest.fixture
def site(runs: Path) -> Iterator[Site]:
    site = Site(runs)
    yield site
    site.close()


def test_new_lines_and_a_new_status_arrive(site: Site, runs: Path) -> None:
    stop = threading.Event()
    run = RunFolder.open(runs / "two")
    events = parsed(run_events(site, "two", stop, look_s=0.001))

    assert next(events)[1]["status"] == "finished"
    append_steps(run, [7, 8])
    append_steps(run, [9], loss="NaN")
    seen = [next(events) for _ in range(3)]
    assert [(name, event["step"]) for name, event in seen] == [("metrics", 7), ("metrics", 8), ("metrics", 9)]
    assert seen[-1][1]["values"]["loss"] == "NaN"
    assert seen[0][1]["values"] == {"loss": 10 / 7, "reward/mean": 0.7, "step_s": 2.0}
    run.update(status="failed")
    name, status = next(events)
    assert (name, status["status"], status["step"], status["broken"]) == ("status", "failed", 9, None)
    stop.set()
    assert list(events) == []


def test_a_resumed_run_resets_the_curves(site: Site, runs: Path) -> None:
    run = RunFolder.open(runs / "two")
    events = parsed(run_events(site, "two", threading.Event(), look_s=0.001))
    next(events)
    shorter = run.metrics_file.with_suffix(".tmp")
    shorter.write_text("".join(run.metrics_file.read_text().splitlines(keepends=True)[:3]))
    os.replace(shorter, run.metrics_file)

    names = [next(events)[0] for _ in range(1)]
    assert names == ["reset"]
    append_steps(run, [4])
    assert next(event for event in events if event[0] == "metrics")[1]["step"] == 4


def test_a_run_that_is_removed_is_gone(site: Site, runs: Path) -> None:
    events = parsed(run_events(site, "two", threading.Event(), look_s=0.001))
    next(events)
    (runs / "two").rename(runs.parent / "two")

    assert next(event for event in events if event[0] == "status")[1]["status"] == "gone"


def test_a_quiet_run_has_heartbeats(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_HEARTBEAT_S", 0.01)
    texts = run_events(site, "two", threading.Event(), look_s=0.005)

    assert streams.HEARTBEAT in [next(texts) for _ in range(5)]


def test_over_http(browser: Any, runs: Path) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", browser.server.server_port, timeout=20)
    connection.request("GET", "/api/events?run=two")
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"

    def lines() -> Iterator[str]:
        while line := answer.readline():
            yield line.decode().strip()

    found = lines()
    assert next(line for line in found if line.startswith("event")) == "event: status"
    append_steps(RunFolder.open(runs / "two"), [7])
    assert next(line for line in found if line.startswith("event: m")) == "event: metrics"
    assert json.loads(next(found).removeprefix("data: "))["step"] == 7
    connection.close()


def test_streams_are_few_and_end_with_their_browser(
    runs: Path, serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_server, "_MOST_STREAMS", 1)
    monkeypatch.setattr(streams, "_HEARTBEAT_S", 0.05)
    browser = serve(runs)
    connection = http.client.HTTPConnection("127.0.0.1", browser.server.server_port, timeout=20)
    connection.request("GET", "/api/events?run=two")
    answer = connection.getresponse()
    answer.readline()
    assert "Close some of them" in browser.error("/api/events?run=two", 503)
    assert "run=RUN" in browser.error("/api/events", 400)
    answer.close()
    connection.close()

    until = time.monotonic() + 10
    while not browser.server.streams.acquire(blocking=False):
        assert time.monotonic() < until, "the stream of a browser that is gone has not ended"
        time.sleep(0.05)
    browser.server.streams.release()


def test_the_server_ends_at_once_although_a_page_listens(runs: Path, serve: Callable[..., Any]) -> None:
    browser = serve(runs)
    connection = http.client.HTTPConnection("127.0.0.1", browser.server.server_port, timeout=20)
    connection.request("GET", "/api/events?run=two")
    answer = connection.getresponse()
    begin = time.monotonic()
    browser.server.stop()

    assert answer.read().startswith(b"retry: ")  # until its end
    assert time.monotonic() - begin < 5
    connection.close()
