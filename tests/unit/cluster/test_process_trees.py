# SPDX-License-Identifier: Apache-2.0
"""Killing processes that go on starting others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.processes import wait_until
from podium.cluster.processes import kill_trees, look

# Two hundred children, one after the other, and none of them ends by itself.
_PARENT = """
import os, time
for _ in range(200):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    time.sleep(0.002)
time.sleep(60)
"""


def members(session: int) -> list[int]:
    """Living processes of a session."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, of = (place / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(of) == session and state != "Z":
            found.append(int(place.name))
    return found


@pytest.mark.parametrize("_", range(5))
def test_no_process_is_left_of_a_parent_that_is_starting_others(_: int) -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], start_new_session=True)
    try:
        wait_until(lambda: len(members(parent.pid)) > 20, "some children", deadline_s=20)
        root = look(parent.pid)
        assert root is not None
        kill_trees([root])
        parent.wait(10)
        time.sleep(0.1)
        assert members(parent.pid) == []
    finally:
        for pid in members(parent.pid):
            os.kill(pid, 9)
        parent.wait(10)
