# SPDX-License-Identifier: Apache-2.0
"""Which workers are forked, and that the others start as Ray starts them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from podium.cluster import fork_request
from podium.cluster.fork_request import worker_command

WORKER = "/ray/_private/workers/default_worker.py"


def test_an_ordinary_worker_is_forked_without_the_options_of_rays_setup_script() -> None:
    options = [WORKER, "--worker-id=7", "--runtime-env-hash=0", "--language=PYTHON"]
    assert worker_command(options) == [WORKER, "--worker-id=7", "--runtime-env-hash=0"]
    assert worker_command([*options, "--serialized-runtime-env-context={}"]) == options[:3]
    assert worker_command([*options, "--worker-type=WORKER"]) == [*options[:3], "--worker-type=WORKER"]


@pytest.mark.parametrize(
    "option",
    [
        "--language=JAVA",
        f"--serialized-runtime-env-context={json.dumps({'py_executable': '/other/python'})}",
        f"--serialized-runtime-env-context={json.dumps({'env_vars': {'A': 'b'}})}",
    ],
)
def test_a_worker_that_needs_more_than_a_fork_is_not_forked(option: str) -> None:
    assert worker_command([WORKER, "--worker-id=7", option]) is None


def test_flags_of_the_interpreter_are_not_lost_in_a_fork() -> None:
    assert worker_command(["-s", WORKER]) is None


@pytest.mark.parametrize(
    ("language", "becomes", "keeps"), [("PYTHON", "default_worker.py", 2), ("JAVA", "setup_worker.py", 3)]
)
def test_without_a_server_the_process_becomes_the_worker(
    tmp_path: Path, language: str, becomes: str, keeps: int
) -> None:
    """One that needs more than a fork becomes Ray's setup script, which stands beside the worker's."""
    (tmp_path / becomes).write_text("import sys; print(sys.argv)")
    options = [str(tmp_path / "default_worker.py"), "--worker-id=7", f"--language={language}"]
    script = tmp_path / "fork_request.py"
    script.symlink_to(fork_request.__file__)
    output = subprocess.run(
        [sys.executable, str(script), *options], capture_output=True, text=True, timeout=30, check=True
    )
    expected = options[:keeps] if becomes == "default_worker.py" else [str(tmp_path / becomes), *options]
    assert output.stdout.strip() == str(expected)
