# SPDX-License-Identifier: Apache-2.0
"""Dense recipes with `placement.launcher: ray`: on a Ray that is started on demand, and on one that runs already."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helpers.messages import facts
from helpers.processes import started, wait_until
from helpers.runs import STEPS, losses, tiny_recipe, write_recipe
from helpers.tiny import write_chats
from helpers.workspace import Workspace
from podium import api
from podium.cluster import Layout, MeshShape, Pool, RoleSpec, open_inline
from podium.engine.checkpoint_files import saved_steps
from podium.errors import LaunchError, RoleError
from podium.runs.events import recoveries
from podium.runs.folder import RunFolder
from podium.runs.host_memory import memory_folder
from podium.spmd.on_ray import SpmdRank

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for left-over processes in /proc"),
    pytest.mark.timeout(400),
    pytest.mark.serial,
    pytest.mark.slow,
]

# A command takes some 15 s on an idle machine: importing torch in the driver, starting Ray, and torch in the ranks.
WAIT_S = 200.0
# A cluster of two nodes with one CPU each, as raylets of this machine; it stands until its process is ended.
TWO_NODES = """
import json, os, sys, time
from pathlib import Path
os.environ.pop("RAY_ADDRESS", None)
os.environ.update(json.loads(sys.argv[2]))
from ray.cluster_utils import Cluster

node = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "object_store_memory": 100 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
cluster.add_node(**node)
address = Path(sys.argv[1])
address.with_suffix(".new").write_text(cluster.address)
address.with_suffix(".new").rename(address)
time.sleep(10_000)
"""
# Keeps the raylets on loopback; who joins them finds that out.
ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# Loggers are loaded inside rank 0: there a test can reach into a rank. All of these act once, as step 5 is recorded.
DEED_AT_STEP_5 = """
import os, signal, threading
from pathlib import Path

class Deed:
    def __init__(self, folder):
        self.done = Path(folder) / "done-once"
    def log(self, metrics):
        if metrics.step == 5 and not self.done.exists():
            self.done.touch()
            {deed}
    def text(self, step, name, text): pass
    def close(self): pass
"""
DIE = "os.kill(os.getpid(), signal.SIGKILL)"
HANG = "threading.Event().wait()"
BUG = "[][7]"


@pytest.fixture(scope="module")
def ray_files() -> Iterator[str]:
    """Where Ray keeps its sockets and the address of "the current cluster": not where other users of the machine look.
    Paths of sockets must be short."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        yield folder


@pytest.fixture(autouse=True)
def _alone(ray_files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cluster but the test's own, and no torchrun."""
    for name in ("RAY_ADDRESS", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (Path(ray_files) / "alone").mkdir(exist_ok=True)
    monkeypatch.setenv("RAY_TMPDIR", f"{ray_files}/alone")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("data") / "train.jsonl")


@pytest.fixture(scope="module")
def local_run(tiny_folder: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of two ranks that the local launcher started and nobody disturbed."""
    runs = tmp_path_factory.mktemp("local")
    api.train(tiny_recipe(tiny_folder, data, runs, "two", placement={"devices": 2}))
    assert list(losses(runs / "two")) == list(range(1, STEPS + 1))
    return runs / "two"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCluster:
    """Two nodes with one CPU each."""

    address: str
    session: int
    environment: dict[str, str]


@pytest.fixture(scope="module")
def two_nodes(ray_files: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "two_nodes.py").write_text(TWO_NODES)
    (Path(ray_files) / "joined").mkdir()
    address, output = folder / "address", folder / "out"
    environment = {"RAY_TMPDIR": f"{ray_files}/joined", **ON_LOOPBACK}
    with started([str(folder / "two_nodes.py"), str(address), json.dumps(environment)], output) as process:
        wait_until(lambda: address.exists() or process.poll() is not None, "a cluster of two nodes")
        assert process.poll() is None, output.read_text()
        yield RunningCluster(address=address.read_text(), session=process.pid, environment=environment)
    assert_session_over(process.pid)


@pytest.fixture
def joined(two_nodes: RunningCluster, _alone: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """RAY_ADDRESS names the running cluster; its session. Whatever the test does, the cluster outlives it and holds no
    rank then."""
    session = two_nodes.session
    monkeypatch.setenv("RAY_TMPDIR", two_nodes.environment["RAY_TMPDIR"])
    monkeypatch.setenv("RAY_ADDRESS", two_nodes.address)
    yield session
    wait_until(lambda: not ranks_of(session), "the end of the ranks", deadline_s=30)
    assert sum(name.endswith("/raylet") for name in session_of(session).values()) == 2


def session_of(leader: int) -> dict[int, str]:
    """Living processes of a session, by id, with the names that they have given themselves. Ray's workers leave the
    process group of the process that started Ray, and stay in its session."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                state, _, _, session = entry.joinpath("stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == leader and state != "Z":
                    found[int(entry.name)] = (
                        entry.joinpath("cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
                    )
    return found


def assert_session_over(leader: int) -> None:
    with suppress(AssertionError):
        wait_until(lambda: not session_of(leader), "the end of the session", deadline_s=30)
    assert session_of(leader) == {}


def ranks_of(session: int) -> list[int]:
    """Processes of Podium's actor class, and the tokenizers that they started."""
    names = session_of(session)
    workers = [process for process, name in names.items() if name.startswith("ray::Worker")]
    return workers + [process for process in names if b"multiprocessing.spawn" in _command(process)]


def _command(process: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes()
    return b""


def has_open(process: int, file: Path) -> bool:
    with suppress(OSError):
        return any(Path(os.readlink(each)) == file.resolve() for each in Path(f"/proc/{process}/fd").iterdir())
    return False


@contextmanager
def podium(*arguments: str, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a session of its own; nothing of the session is left afterwards."""
    with started(["-m", "podium", *arguments], output) as process:
        yield process
    assert_session_over(process.pid)


def said_by(*arguments: str, output: Path, code: int = 0) -> str:
    """Runs to its end, and ends everything that it started by itself; returns what it said."""
    with podium(*arguments, output=output) as process:
        assert process.wait(WAIT_S) == code, output.read_text()
        assert_session_over(process.pid)
    return output.read_text()


def recipe_on_ray(model: Path, data: Path, folder: Path, name: str, /, **changes: Any) -> str:
    placement = {"launcher": "ray", "devices": 2, **changes.pop("placement", {})}
    recipe = tiny_recipe(model, data, folder, name, placement=placement, **changes)
    return write_recipe(recipe, folder / f"{name}.yaml")


def with_deed(folder: Path, name: str, deed: str) -> dict[str, Any]:
    (folder / "deed.py").write_text(DEED_AT_STEP_5.replace("{deed}", deed))
    return {"folder": str(folder), "name": name, "loggers": [f"{folder}/deed.py:Deed"]}


def without_the_last_checkpoint(run: Path) -> Path:
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08d}")
    return run


def losses_so_far(run: Path) -> dict[int, float]:
    return losses(run) if (run / "metrics.jsonl").exists() else {}


def test_a_ray_started_on_demand_gives_the_local_launchers_losses_and_a_run_that_continues_locally(
    tiny_folder: Path, data: Path, local_run: Path, tmp_path: Path
) -> None:
    recipe = recipe_on_ray(tiny_folder, data, tmp_path, "ray")

    said = said_by("train", recipe, output=tmp_path / "out")

    run = tmp_path / "ray"
    assert losses(run) == losses(local_run)
    assert "rank 1: ranks[1]@127.0.0.1/cpu#0" in said
    assert f"step {STEPS}: {run}" in said
    assert RunFolder.open(run).status == "finished"
    console = (run / "console.log").read_text()
    assert f"step {STEPS}/{STEPS}" in console
    assert console in said

    api.resume(without_the_last_checkpoint(run), overrides=["placement.launcher=local"])
    assert losses(run) == losses(local_run)


def test_torchrun_cannot_launch_what_launches_itself(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")

    outcome = workspace.podium("train", workspace.recipe(placement={"launcher": "ray"}))

    workspace.refused(outcome, "placement.launcher: ray ", "torchrun")


def test_a_node_without_the_launching_folder_is_reported_with_what_must_be_shared(tmp_path: Path) -> None:
    """A node with another file system is not possible on one machine, so this is the worker's part alone."""

    async def build() -> None:
        mesh, pool = MeshShape(), Pool(name="ranks", slots=1)
        role = RoleSpec(name="rank", kind=SpmdRank, pool="ranks", mesh=mesh, arguments=((f"{tmp_path}/none",),))
        async with open_inline() as cluster:
            await cluster.start(Layout(pools=(pool,), roles=(role,)))

    with pytest.raises(RoleError, match=rf"{tmp_path}/none\b") as found:
        asyncio.run(build())
    assert isinstance(found.value.__cause__, LaunchError)


def test_an_address_where_no_ray_answers_is_reported_at_once(
    tiny_folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    began = time.monotonic()

    said = said_by("train", recipe_on_ray(tiny_folder, data, tmp_path, "lost"), output=tmp_path / "out", code=2)

    assert time.monotonic() - began < 60  # of which nearly all is importing torch on a busy machine
    assert re.search(r"(?m)^error: .*\bRay\b.* 127\.0\.0\.1:1\b", said)
    assert "Traceback" not in said
    assert not (tmp_path / "lost").exists()


@pytest.mark.slow
def test_a_local_run_continues_exactly_on_a_cluster_that_runs_already(
    joined: int, tiny_folder: Path, data: Path, local_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a folder with relative paths, which the nodes do not have as theirs, and with tokenizers as processes."""
    monkeypatch.chdir(tmp_path)
    without_the_last_checkpoint(shutil.copytree(local_run, Path("runs") / "moved"))
    changes = ("placement.launcher=ray", "data.workers=1")

    said = said_by("resume", "runs/moved", *(word for each in changes for word in ("--set", each)), output=Path("out"))

    assert re.search(r"resumed .*step 6\b", said)
    assert f"step {STEPS}: runs/moved" in said
    assert RunFolder.open(Path("runs/moved")).status == "finished"
    nodes = {line.split("@")[1].split("/")[0] for line in said.splitlines() if line.startswith("rank ")}
    assert len(nodes) == 2, said
    assert losses(Path("runs/moved")) == losses(local_run)


@pytest.mark.slow
def test_a_cluster_that_happens_to_run_on_this_machine_is_not_joined(
    joined: int, tiny_folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS")
    recipe = recipe_on_ray(tiny_folder, data, tmp_path, "own", placement={"devices": 1}, steps=3)

    said = said_by("train", recipe, output=tmp_path / "out")

    assert "rank 0: ranks[0]@127.0.0.1/cpu#0" in said  # a node alone: those of the cluster have a suffix


@pytest.mark.slow
def test_one_rank_shows_its_steps_as_they_happen_and_saves_on_ctrl_c(
    tiny_folder: Path, data: Path, tmp_path: Path
) -> None:
    api.train(tiny_recipe(tiny_folder, data, tmp_path, "local"))
    recipe = recipe_on_ray(tiny_folder, data, tmp_path, "one", placement={"devices": 1}, steps=100_000)
    run, output = tmp_path / "one", tmp_path / "out"

    with podium("train", recipe, output=output) as process:
        wait_until(lambda: f"step {STEPS:6d}/100000" in output.read_text(), "the eighth step on the driver's console")
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all processes of the job
        assert process.wait(60) == 0, output.read_text()
        assert_session_over(process.pid)

    stopped_well(run, output.read_text())
    found = losses(run)
    assert {step: found[step] for step in range(1, STEPS + 1)} == losses(tmp_path / "local")


@pytest.mark.slow
def test_sigterm_saves_too(joined: int, tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    """It is what stops a submitted job. Ray's own handler for it would end the driver."""
    recipe = recipe_on_ray(tiny_folder, data, tmp_path, "job", steps=100_000)
    run, output = tmp_path / "job", tmp_path / "out"

    with podium("train", recipe, output=output) as process:
        wait_until(lambda: len(losses_so_far(run)) >= 2, "the second step")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, output.read_text()

    stopped_well(run, output.read_text())


def stopped_well(run: Path, said: str) -> None:
    last = max(losses(run))
    assert "Ctrl-C" in said
    assert re.search(f"stopped .*step {last}; .*podium resume {re.escape(str(run))}", said)
    assert "Traceback" not in said
    assert saved_steps(run / "checkpoints")[-1].step == last
    assert RunFolder.open(run).status == "stopped"
    assert not (run / "stop-requested").exists()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_ranks_that_hang(tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    recipe = recipe_on_ray(tiny_folder, data, tmp_path, "twice", run=with_deed(tmp_path, "twice", HANG))
    run, output = tmp_path / "twice", tmp_path / "out"

    with podium("train", recipe, output=output) as process:
        wait_until((run / "done-once").exists, "the hang of rank 0")
        process.send_signal(signal.SIGINT)
        wait_until(lambda: "Ctrl-C" in output.read_text(), "the answer to the first Ctrl-C")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, output.read_text()
        assert_session_over(process.pid)

    assert "Traceback" not in output.read_text()
    assert [each.step for each in saved_steps(run / "checkpoints")] == [3]
    assert RunFolder.open(run).status == "failed"


@pytest.mark.slow
def test_a_killed_rank_is_restarted_from_the_last_checkpoint_even_if_the_others_hang(
    joined: int, tiny_folder: Path, data: Path, local_run: Path, tmp_path: Path
) -> None:
    changes = {"run": with_deed(tmp_path, "killed", HANG), "placement": {"restarts": 1}}
    recipe = recipe_on_ray(tiny_folder, data, tmp_path, "killed", **changes)
    run, output = tmp_path / "killed", tmp_path / "out"

    with podium("train", recipe, output=output) as process:
        wait_until((run / "done-once").exists, "the hang of rank 0")
        (rank_1,) = (each for each in ranks_of(joined) if not has_open(each, run / "console.log"))
        os.kill(rank_1, signal.SIGKILL)
        assert process.wait(WAIT_S) == 0, output.read_text()

    said = output.read_text()
    assert "restart 1 of 1: ranks[1]@" in said
    assert f"process {rank_1} " in said
    assert re.search(r"resumed .*step 3\b", said)
    assert "no snapshots in memory: the ranks are on 2 nodes" in " ".join(said.split())
    assert losses(run) == losses(local_run)


@pytest.mark.slow
def test_on_one_node_a_killed_rank_goes_on_after_the_last_step(
    tiny_folder: Path, data: Path, local_run: Path, tmp_path: Path
) -> None:
    changes = {"run": with_deed(tmp_path, "killed", DIE), "placement": {"restarts": 1}}
    recipe = recipe_on_ray(tiny_folder, data, tmp_path, "killed", **changes)
    run = tmp_path / "killed"

    said = " ".join(said_by("train", recipe, output=tmp_path / "out").split())

    assert "restart 1 of 1: ranks[0]@" in said
    assert re.search(r"restart 1 of 1: going on after step 4, [\d.]+ s after the failure", said)
    assert [(event.part, event.step) for event in recoveries(run)] == [("rank", 4)]
    assert losses(run) == losses(local_run)
    for file in (local_run / "checkpoints" / f"step-{STEPS:08d}").glob("*.safetensors"):
        assert (run / "checkpoints" / f"step-{STEPS:08d}" / file.name).read_bytes() == file.read_bytes()
    memory = memory_folder(run)
    assert memory is not None
    assert not memory.exists()


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_its_place_and_restarted(
    tiny_folder: Path, data: Path, local_run: Path, tmp_path: Path
) -> None:
    """Rank 1 waits for it in a collective, and is not taken for the one that hangs."""
    changes = {"run": with_deed(tmp_path, "hangs", HANG), "placement": {"restarts": 1, "timeout_s": 15}}
    recipe = recipe_on_ray(tiny_folder, data, tmp_path, "hangs", **changes)
    run = tmp_path / "hangs"

    said = " ".join(said_by("train", recipe, output=tmp_path / "out").split())

    assert re.search(r"warning: ranks\[0\]@\S+: it hangs: no progress in rank.run for \d+ s, at ", said), said
    assert "ranks[1]" not in said.split("it hangs")[1].split("stacks.txt")[0]
    assert "deed.py" in (run / "stacks.txt").read_text()
    assert [event.part for event in recoveries(run)] == ["rank"]
    assert losses(run) == losses(local_run)


@pytest.mark.slow
def test_without_restarts_a_killed_rank_is_named_with_the_way_to_go_on(
    joined: int, tiny_folder: Path, data: Path, tmp_path: Path
) -> None:
    recipe = recipe_on_ray(tiny_folder, data, tmp_path, "dead", run=with_deed(tmp_path, "dead", DIE))

    said = said_by("train", recipe, output=tmp_path / "out", code=2)

    assert "error: ranks[0]@" in said
    assert "other ranks" in said
    assert "workers.recover" not in said
    assert "Traceback" not in said
    assert re.search(facts("step 3 ", f"podium resume {tmp_path / 'dead'}"), said)
    assert RunFolder.open(tmp_path / "dead").status == "failed"


@pytest.mark.slow
def test_a_bad_row_is_reported_as_itself_after_the_restarts_and_leaves_nothing(
    joined: int, tiny_folder: Path, tmp_path: Path
) -> None:
    rows = write_chats(tmp_path / "train.jsonl").read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join([*rows[:9], "{oops", *rows[10:]]))
    recipe = recipe_on_ray(tiny_folder, tmp_path / "train.jsonl", tmp_path, "bad", placement={"restarts": 1})

    said = said_by("train", recipe, output=tmp_path / "out", code=2)

    message = f"data.train.0: {tmp_path}/train.jsonl, line 10: "
    assert f"restart 1 of 1: {message}" in " ".join(said.split()) + " "
    assert f"\nerror: {message}" in said
    assert "Traceback" not in said
    assert "died" not in said
    assert not (tmp_path / "bad").exists()


@pytest.mark.slow
def test_a_run_that_diverges_is_reported_as_itself(joined: int, tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    optimizer = {"lr": 1e38, "warmup_steps": 0, "clip_norm": None, "max_skipped_in_a_row": 3}
    recipe = recipe_on_ray(tiny_folder, data, tmp_path, "wild", optimizer=optimizer, checkpoint={"every": 1})

    said = said_by("train", recipe, output=tmp_path / "out", code=2)

    assert "\nerror: steps 2 to 4 " in said
    assert "Traceback" not in said
    assert "podium resume" in said


@pytest.mark.slow
def test_a_bug_in_a_users_code_on_a_rank_comes_with_its_traceback_once(
    joined: int, tiny_folder: Path, data: Path, tmp_path: Path
) -> None:
    recipe = recipe_on_ray(tiny_folder, data, tmp_path, "bug", run=with_deed(tmp_path, "bug", BUG))

    said = said_by("train", recipe, output=tmp_path / "out", code=2)

    assert "error: ranks[0]@" in said
    assert "deed.py" in said
    assert said.count("Traceback") == 1
    assert said.count("IndexError: list index out of range") == 2  # in the first line and under the traceback


@pytest.mark.slow
def test_more_ranks_than_the_cluster_has_places_for_are_refused_with_what_each_node_has(
    joined: int, tiny_folder: Path, data: Path, tmp_path: Path
) -> None:
    recipe = recipe_on_ray(tiny_folder, data, tmp_path, "large", placement={"devices": 3})

    said = said_by("train", recipe, output=tmp_path / "out", code=2)

    assert "error: placement.devices: 3 ranks " in said
    assert said.count("1 CPU, free 1 CPU") == 2
    assert "at most 2 slots" in said
    assert "Traceback" not in said
    assert not (tmp_path / "large").exists()


@pytest.mark.slow
def test_ranks_and_a_ray_started_on_demand_end_with_a_killed_driver(
    tiny_folder: Path, data: Path, local_run: Path, tmp_path: Path
) -> None:
    recipe = recipe_on_ray(tiny_folder, data, tmp_path, "gone", run=with_deed(tmp_path, "gone", HANG))
    with podium("train", recipe, output=tmp_path / "out") as process:
        wait_until((tmp_path / "gone" / "done-once").exists, "the hang of rank 0")
        assert len(ranks_of(process.pid)) == 2
        process.kill()
        process.wait(WAIT_S)
        # Ray's agents notice within a minute, by themselves; the end of this block does not wait for it.
        agents = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}
        wait_until(lambda: set(session_of(process.pid).values()) <= agents, "the end of the ranks", deadline_s=20)

    api.resume(tmp_path / "gone", overrides=["placement.launcher=local"])
    assert losses(tmp_path / "gone") == losses(local_run)


@pytest.mark.slow
def test_ranks_on_a_running_cluster_end_with_a_killed_driver(
    joined: int, tiny_folder: Path, data: Path, tmp_path: Path
) -> None:
    changes = {"run": with_deed(tmp_path, "gone", HANG), "data": {"train": [{"path": str(data)}], "workers": 1}}
    recipe = recipe_on_ray(tiny_folder, data, tmp_path, "gone", **changes)
    with podium("train", recipe, output=tmp_path / "out") as process:
        wait_until((tmp_path / "gone" / "done-once").exists, "the hang of rank 0")
        assert len(ranks_of(joined)) >= 4  # two ranks, and a tokenizer for each
        process.kill()
        process.wait(WAIT_S)
        wait_until(lambda: not ranks_of(joined), "the end of the ranks", deadline_s=20)
