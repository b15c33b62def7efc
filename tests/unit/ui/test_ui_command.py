# SPDX-License-Identifier: Apache-2.0
"""`podium ui` as a process: it says where it is, answers, and ends with Ctrl-C. And the page of a run that ran."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.runs import STEPS, losses, tiny_recipe
from helpers.tiny import write_chats
from podium.api import train


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_told_to_end(runs: Path, number: signal.Signals) -> None:
    """Also where its parent ignores SIGINT, as shells do for what runs in the background."""
    command = [sys.executable, "-m", "podium", "ui", str(runs), "--port", "0", "--no-browser"]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    with started as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith(f"{runs}: open http://127.0.0.1:"), line
            address = line.split()[2]
            assert b'"id":"one"' in urllib.request.urlopen(f"{address}api/runs", timeout=30).read()
            stream = urllib.request.urlopen(f"{address}api/events?run=one", timeout=30)
            stream.readline()
            begin = time.monotonic()
            process.send_signal(number)
            assert process.wait(timeout=20) == 0
            assert time.monotonic() - begin < 10
            assert process.stdout.read() == "ended\n"
            assert process.stderr is not None
            assert process.stderr.read() == ""
        finally:
            process.kill()


@pytest.mark.slow
def test_folders_that_do_not_exist_are_said(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "podium", "ui", str(tmp_path / "none"), "--no-browser"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert ended.returncode == 2
    assert ended.stderr.startswith("error: there is no folder")


@pytest.mark.slow
def test_the_page_of_a_run_that_ran(tiny_folder: Path, tmp_path: Path, serve: Callable[..., Any]) -> None:
    data = write_chats(tmp_path / "chats.jsonl")
    train(tiny_recipe(tiny_folder, data, tmp_path / "runs", "real"))

    browser = serve(tmp_path / "runs")
    (row,) = browser.get("/api/runs")["runs"]
    assert (row["status"], row["step"], row["steps"], row["broken"]) == ("finished", STEPS, STEPS, None)
    facts = browser.get("/api/runs/real")
    assert [each["step"] for each in facts["checkpoints"]] == [6, 8]
    assert all(each["size_bytes"] > 1000 for each in facts["checkpoints"])
    assert {each["kind"] for each in facts["lineage"]} >= {"data", "weights"}
    curve = browser.get("/api/runs/real/metrics?names=loss")["series"]["loss"]
    assert dict(zip(curve["step"], curve["value"], strict=True)) == losses(tmp_path / "runs" / "real")
    (rank,) = browser.get("/api/runs/real/accounting")["workers"]
    assert sum(rank["seconds"].values()) == pytest.approx(rank["total_s"])
    assert browser.get("/api/runs/real/timeline")["workers"][0]["spans"]
    documents = [
        document for each in browser.get("/api/runs/real/examples")["examples"] for document in each["documents"]
    ]
    assert documents
    for document in documents:
        assert len(document["texts"]) == len(document["loss_mask"]) == document["length"]
        assert not document["loss_mask"][0]  # nothing predicts it
        assert any(document["loss_mask"])
