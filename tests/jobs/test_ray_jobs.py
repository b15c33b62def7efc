# SPDX-License-Identifier: Apache-2.0
"""Runs as jobs of a Ray cluster that asks for a token: submitted, followed, stopped. Needs Ray's job server, which has
an environment of its own: `make test-jobs`."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

if importlib.util.find_spec("aiohttp_cors") is None:
    pytest.skip("Ray's job server is not installed in this environment: run `make test-jobs`", allow_module_level=True)

from helpers.on_policy import numbers, rl_recipe
from helpers.processes import descendants, started, wait_until
from helpers.workspace import Workspace
from podium.engine.checkpoint_files import saved_steps

pytestmark = [pytest.mark.jobs, pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(600)]

TOKEN = "c" * 64
PODIUM = str(Path(sys.executable).with_name("podium"))
STOP_S = 90
# Submits with Ray's client, follows the log, and prints it and how the job ended.
SUBMIT = """
import asyncio, sys
from ray.job_submission import JobSubmissionClient

async def follow(client, job):
    async for lines in client.tail_job_logs(job):
        print(lines, end="", flush=True)

client = JobSubmissionClient(sys.argv[1])
job = client.submit_job(entrypoint=sys.argv[2])
asyncio.run(follow(client, job))
print("ended:", client.get_job_status(job).value)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster of one node with a job server."""

    head: int  # the process of `ray start --block`
    address: str
    jobs: str

    def ray(self, *arguments: str, code: int | None = 0, deadline_s: float = 240.0) -> str:
        """`ray job ARGUMENTS`, as a user types it; returns what it said."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "job", arguments[0], "--address", self.jobs]
        done = subprocess.run(
            [*command, *arguments[1:]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=deadline_s
        )
        assert code is None or done.returncode == code, done.stdout
        return done.stdout

    def processes_of_jobs(self, folder: Path) -> dict[int, str]:
        """Drivers, workers and what else runs in the folder of a job or below the cluster's job supervisors."""
        found = {
            pid: name for pid, name in descendants(self.head).items() if name.startswith(("ray::Worker", "ray::Job"))
        }
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if (
                    entry.name.isdigit()
                    and entry.joinpath("cwd").resolve() == folder
                    and int(entry.name) != os.getpid()
                ):
                    found[int(entry.name)] = entry.joinpath("cmdline").read_text()
        return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Started as docs/clusters.md says, on loopback, where ~/.ray/auth_token exists. No process is left of it."""
    home = tmp_path_factory.mktemp("home")
    (home / ".ray").mkdir()
    (home / ".ray/auth_token").write_text(TOKEN)
    port, jobs = free_port(), free_port()
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as files,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("HOME", str(home))
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # on loopback only
        patch.setenv("RAY_JOB_STOP_WAIT_TIME_S", str(STOP_S))
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
            patch.delenv(name, raising=False)
        command = ["-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}", "--num-cpus=4"]
        command += ["--node-ip-address=127.0.0.1", "--num-gpus=0", "--object-store-memory=100000000"]
        command += ["--dashboard-host=127.0.0.1", f"--dashboard-port={jobs}", f"--temp-dir={files}"]
        output = tmp_path_factory.mktemp("ray") / "start.txt"
        with started([*command, "--include-dashboard=true", "--disable-usage-stats"], output) as process:
            wait_until(lambda: process.poll() is not None or "--block" in output.read_text(), "the start of Ray")
            assert process.poll() is None, output.read_text()
            found = Cluster(head=process.pid, address=f"127.0.0.1:{port}", jobs=f"http://127.0.0.1:{jobs}")
            with pytest.MonkeyPatch.context() as client:
                client.setenv("RAY_AUTH_MODE", "token")
                wait_until(lambda: _lists(found), "the job server")
                yield found
            below = descendants(process.pid)
            for pid in (process.pid, *below):
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)


def _lists(cluster: Cluster) -> bool:
    with suppress(AssertionError):
        cluster.ray("list")
        return True
    return False


@pytest.fixture
def inline(workspace: Workspace) -> dict[int, dict[str, float]]:
    """The numbers of the run in one process."""
    done = workspace.process("train", rl_recipe(workspace, "inline"))
    assert done.code == 0, done
    return numbers(workspace.path / "runs/inline")


def require_finished(said: str, cluster: Cluster, workspace: Workspace, inline: dict[int, dict[str, float]]) -> None:
    assert f"joining Ray at {cluster.address}" in said
    assert "step 3/3" in said
    assert "finished at step 3: runs/sums" in said
    run = workspace.path / "runs/sums"
    assert numbers(run) == inline
    assert TOKEN not in said
    assert all(TOKEN.encode() not in file.read_bytes() for file in run.rglob("*") if file.is_file())
    wait_until(lambda: not cluster.processes_of_jobs(workspace.path), "the end of the job's processes", deadline_s=60)


def test_ray_job_submit_follows_a_run_to_its_end(
    cluster: Cluster, workspace: Workspace, inline: dict[int, dict[str, float]]
) -> None:
    recipe = rl_recipe(workspace, placement={"launcher": "ray"})
    said = cluster.ray("submit", "--", "env", "-C", str(workspace.path), PODIUM, "train", recipe)
    assert "succeeded" in said
    require_finished(said, cluster, workspace, inline)


def test_the_client_of_ray_does_too(
    cluster: Cluster, workspace: Workspace, inline: dict[int, dict[str, float]]
) -> None:
    recipe = rl_recipe(workspace, placement={"launcher": "ray"})
    entrypoint = f"cd {workspace.path} && {PODIUM} train {recipe}"
    done = subprocess.run(
        [sys.executable, "-c", SUBMIT, cluster.jobs, entrypoint], capture_output=True, text=True, timeout=240
    )
    assert done.stdout.endswith("ended: SUCCEEDED\n"), done
    require_finished(done.stdout, cluster, workspace, inline)


def test_a_mistake_in_the_recipe_fails_the_job_with_its_words(cluster: Cluster, workspace: Workspace) -> None:
    recipe = rl_recipe(workspace, stepz=3)
    said = cluster.ray("submit", "--", "env", "-C", str(workspace.path), PODIUM, "train", recipe, code=1)
    assert "failed with exit code 2" in said
    assert "stepz" in said
    assert "Traceback" not in said


def test_ray_job_stop_saves_and_ends_every_process(cluster: Cluster, workspace: Workspace) -> None:
    recipe = rl_recipe(workspace, "long", steps=100_000, placement={"launcher": "ray"}, checkpoint={"every": 50_000})
    command = ["env", "-C", str(workspace.path), PODIUM, "train", recipe]
    cluster.ray("submit", "--submission-id", "long", "--no-wait", "--", *command)
    metrics = workspace.path / "runs/long/metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, "the first step", deadline_s=200)
    assert cluster.processes_of_jobs(workspace.path)

    assert "was stopped" in cluster.ray("stop", "long", deadline_s=STOP_S + 60)
    said = cluster.ray("logs", "long", code=None)
    (saved,) = saved_steps(workspace.path / "runs/long/checkpoints")
    assert f"stopped at step {saved.step}; continue with: podium resume runs/long" in said
    wait_until(lambda: not cluster.processes_of_jobs(workspace.path), "the end of the job's processes", deadline_s=60)
