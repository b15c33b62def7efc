# SPDX-License-Identifier: Apache-2.0
"""What a user sees of a start-up on Ray, and of a Ray that dies under a run."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.on_policy import podium, rl_recipe, session_of
from helpers.processes import wait_until
from helpers.workspace import Workspace

pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(300)]


def gcs_server_of(session: int) -> int:
    for pid in session_of(session):
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].endswith(b"gcs_server"):
                return pid
    raise AssertionError("there is no gcs_server")


def test_start_up_is_reported_and_without_restarts_a_dead_gcs_server_ends_it_with_how_to_resume(
    workspace: Workspace,
) -> None:
    recipe = rl_recipe(
        workspace,
        "doomed",
        steps=500,
        placement={"launcher": "ray", "restarts": 0},
        checkpoint={"every": 1, "background": False},
    )
    output, checkpoint = workspace.path / "output", workspace.path / "runs" / "doomed" / "checkpoints" / "step-00000001"
    with podium("train", recipe, output=output) as process:
        wait_until(checkpoint.exists, "the first checkpoint", deadline_s=200)
        victim = gcs_server_of(process.pid)
        os.kill(victim, signal.SIGKILL)
        assert process.wait(40) == 2, output.read_text()
        wait_until(lambda: not session_of(process.pid), "the end of the session", deadline_s=10)
    lines = output.read_text().splitlines()
    waits = [re.fullmatch(r"start-up +[0-9.]+ s: (.*)", line) for line in lines]
    message = [found[1] for found in waits if found]
    assert (message[0], message[-1]) == ("starting Ray", "ready")
    assert {
        "controller: importing torch, reading tokenizer and prompts",
        "waiting for Ray",
        "train: starting 1 process",
        "train: importing podium.roles.learner, podium.roles.generator",
        "train: building policy",
        "graders: starting 1 process",
        "graders: importing transformers",
        "graders: building grader",
    } <= set(message)
    assert re.search(rf"^error: .*gcs_server .*process {victim}\b", lines[-2])
    assert re.fullmatch(r".*step \d+ .*podium resume runs/doomed", lines[-1])
