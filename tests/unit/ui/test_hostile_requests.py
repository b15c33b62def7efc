# SPDX-License-Identifier: Apache-2.0
"""Requests and folders that would stop a careless server: too many connections, addresses that are none, pipes in
place of files, names that look like ids of others."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from helpers.run_folders import make_run_folder
from podium.ui import server as server_module

Serve = Callable[..., Any]


def test_too_many_connections_are_told_so_and_later_ones_served(
    runs: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_MOST_CONNECTIONS", 3)
    browser = serve(runs)
    open_ones = [http.client.HTTPConnection("127.0.0.1", browser.server.server_port, timeout=20) for _ in range(3)]
    for each in open_ones:  # they stay open, as those of a browser do
        each.request("GET", "/api/runs")
        assert each.getresponse().read()

    refused = browser.ask("/api/runs")
    assert refused.status == 503
    assert "3 connections are open" in refused.json["error"]
    assert refused.headers["X-Content-Type-Options"] == "nosniff"
    open_ones[0].request("GET", "/api/runs")  # those that are open still have their threads
    assert open_ones[0].getresponse().status == 200

    for each in open_ones:
        each.close()
    until_s = time.monotonic() + 20
    while browser.ask("/api/runs").status == 503:
        assert time.monotonic() < until_s, "closed connections were not noticed"
        time.sleep(0.02)


def test_even_more_connections_are_closed_without_a_thread(
    runs: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_MOST_CONNECTIONS", 2)
    monkeypatch.setattr(server_module, "_MOST_REFUSALS", 2)
    browser = serve(runs)
    before = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", browser.server.server_port), timeout=20) for _ in range(30)]
    try:
        until_s = time.monotonic() + 20
        while threading.active_count() < before + 4 and time.monotonic() < until_s:
            time.sleep(0.01)
        assert threading.active_count() <= before + 4
        assert silent[-1].recv(100) == b""  # closed at once
    finally:
        for each in silent:
            each.close()


@pytest.mark.parametrize("path", ["http://[/", "http://[::1/api/runs"])
def test_an_address_that_is_none(browser: Any, path: str) -> None:
    status, answer = sent(browser, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert status == 400
    assert "Open the page at /" in answer["error"]


def test_a_long_search_is_refused(browser: Any) -> None:
    for where in ("/api/runs/one/rollouts?q=", "/api/runs/one/rollouts?step=1&q="):
        assert "more than 1000 characters" in browser.error(f"{where}{'a' * 1001}", 414)
        assert browser.get(f"{where}{'a' * 1000}")["total"] == 0
        assert browser.ask(f"{where}{'%25' * 20_000}").status == 414


def test_an_address_that_is_too_long_is_refused_as_json(browser: Any) -> None:
    answer = browser.ask(f"/api/runs?{'a' * 70_000}")
    assert answer.status == 414
    assert "cannot be read" in answer.json["error"]
    assert "default-src 'self'" in answer.headers["Content-Security-Policy"]


def test_a_request_that_is_none_is_answered_as_json(browser: Any) -> None:
    status, answer = sent(browser, b"<script> / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert status == 501
    assert "cannot be read" in answer["error"]


def sent(browser: Any, request: bytes) -> tuple[int, Any]:
    """Status and JSON of the answer to these bytes."""
    with socket.create_connection(("127.0.0.1", browser.server.server_port), timeout=20) as client:
        client.sendall(request)
        head, _, body = client.makefile("rb").read().partition(b"\r\n\r\n")
    assert b"application/json" in head
    assert b"<" not in body
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize("kind", ["pipe", "folder"])
@pytest.mark.parametrize(
    "name",
    ["metrics.jsonl", "run.json", "recipe.yaml", "events.jsonl", "console.log", "samples.jsonl", "examples.jsonl",
     "timeline.jsonl", "machine.jsonl", "run.lock", "episodes.sqlite"],
)  # fmt: skip
def test_a_file_that_is_none_is_not_opened(browser: Any, runs: Path, name: str, kind: str) -> None:
    """Reading a pipe that nobody writes would wait for ever."""
    place = runs / "two" / name
    place.unlink(missing_ok=True)
    os.mkfifo(place) if kind == "pipe" else place.mkdir()

    rows = {row["id"]: row for row in browser.get("/api/runs")["runs"]}
    assert set(rows) - {"two"} == {"one"}
    if "two" in rows:  # without its state it is no run
        assert str(place) in rows["two"]["broken"] or "has no" in rows["two"]["broken"]
    for path in ("", "/metrics", "/timeline", "/findings", "/heldout", "/examples", "/texts"):
        assert browser.ask(f"/api/runs/two{path}").status in (404, 422)
    assert browser.ask("/api/events?run=two").status in (404, 422)
    assert browser.get("/api/runs/one")["step"] == 10


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_rollouts_that_are_no_files_are_left_out(browser: Any, runs: Path, kind: str) -> None:
    place = runs / "one" / "rollouts" / "step-00000009.parquet"
    os.mkfifo(place) if kind == "pipe" else place.mkdir()

    assert browser.get("/api/runs/one/rollouts")["steps"] == [1, 4]
    assert browser.ask("/api/runs/one/rollouts?step=9").status == 404
    assert browser.ask("/api/runs/one/rollouts/9/0").status == 404


def test_rollouts_that_are_a_pipe(browser: Any, runs: Path) -> None:
    os.mkfifo(runs / "two" / "rollouts")
    assert browser.get("/api/runs/two")["has_rollouts"] is False
    assert browser.get("/api/runs/two/rollouts")["total"] == 0


def test_a_run_with_the_name_of_a_stage_is_another_run(tmp_path: Path, serve: Serve) -> None:
    runs = tmp_path / "runs"
    make_run_folder(runs / "pipe", "first", steps=3)
    state = {"status": "stopped", "order": ["first"], "parents": {}, "stages": {"first": {"status": "done"}}}
    (runs / "pipe" / "pipeline.json").write_text(json.dumps(state))
    make_run_folder(runs, "plain", steps=7)
    for name in ("pipe:first", "pipe\\x3afirst"):
        shutil.copytree(runs / "plain", runs / name)

    browser = serve(runs)
    rows = {row["id"]: row for row in browser.get("/api/runs")["runs"]}
    assert set(rows) == {"pipe", "pipe:first", "pipe\\x3afirst", "pipe\\x5cx3afirst", "plain"}
    assert {id: (row["name"], row["step"]) for id, row in rows.items() if id.startswith("pipe") and id != "pipe"} == {
        "pipe:first": ("first", 3), "pipe\\x3afirst": ("pipe:first", 7), "pipe\\x5cx3afirst": ("pipe\\x3afirst", 7),
    }  # fmt: skip
    for id, row in rows.items():
        if id == "pipe":  # it has no recipe
            continue
        assert browser.get(f"/api/runs/{quote(id, safe='')}")["step"] == row["step"]
