# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed, interrupted or lose a rank, and go on as if nothing had happened."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from helpers.processes import assert_gone, finished, members, spawned_children, started, wait_until
from helpers.runs import STEPS, losses, tiny_recipe, write_recipe
from helpers.tiny import write_chats
from podium import api
from podium.engine.checkpoint_files import saved_steps
from podium.runs.folder import RunFolder

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for left-over processes in /proc"),
    pytest.mark.slow,
]

# A logger is loaded inside rank 0, so it is where a test can reach into a rank of a real run. This one makes the write
# of step 6 stop half-way for ever.
HALF_WRITTEN = """
import threading
from podium.engine import checkpoint

class Nothing:
    def log(self, metrics): pass
    def text(self, step, name, text): pass
    def close(self): pass

def logger(folder):
    plain = checkpoint.save_tensors
    def stuck(tensors, path):
        plain(tensors, path)
        if "00000006" in str(path):
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2])
            threading.Event().wait()
    checkpoint.save_tensors = stuck
    return Nothing()
"""
# Kills its rank once, as step 5 is recorded.
DIES_ONCE = """
import os, signal
from pathlib import Path
from podium.engine import memory_snapshots

class Deadly:
    def __init__(self, folder):
        self.marker = Path(folder) / "died-once"
    def log(self, metrics):
        if metrics.step == 5 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    def text(self, step, name, text): pass
    def close(self): pass

def logger(folder):
    memory_snapshots._free_bytes = lambda folder: 1000
    return Deadly(folder)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("data") / "train.jsonl")


@pytest.fixture(scope="module")
def unbroken(tiny_folder: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[int, float]]:
    """Number of ranks -> losses of the run that was never stopped."""
    runs = tmp_path_factory.mktemp("unbroken")
    found = {}
    for ranks in (1, 2):
        api.train(tiny_recipe(tiny_folder, data, runs, str(ranks), placement={"devices": ranks}))
        found[ranks] = losses(runs / str(ranks))
        assert list(found[ranks]) == list(range(1, STEPS + 1))
    assert list(found[2].values()) == pytest.approx(list(found[1].values()), rel=1e-5)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_kill_9_in_the_middle_of_a_checkpoint_resumes_bit_for_bit(
    ranks: int, tiny_folder: Path, data: Path, unbroken: dict[int, dict[int, float]], tmp_path: Path
) -> None:
    (tmp_path / "stuck.py").write_text(HALF_WRITTEN)
    # Written in the background, so that training goes on past the step whose checkpoint is never completed.
    changes = {
        "run": {"folder": str(tmp_path), "name": "killed", "loggers": [f"{tmp_path}/stuck.py:logger"]},
        "placement": {"devices": ranks}, "checkpoint": {"background": True},
    }  # fmt: skip
    recipe = write_recipe(tiny_recipe(tiny_folder, data, tmp_path, "killed", **changes), tmp_path / "r.yaml")
    run = tmp_path / "killed"
    half = run / "checkpoints" / ".partial-00000006"
    with started(["-m", "podium", "train", recipe], tmp_path / "out") as process:
        wait_until(
            lambda: half.exists() and bool(losses_so_far(run)) and max(losses_so_far(run)) >= 7,
            f"a half-written checkpoint in {half}: {(tmp_path / 'out').read_text()}",
        )
        if ranks == 1:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            os.kill(process.pid, signal.SIGKILL)  # only the launcher: its ranks end by themselves
        assert_gone(process.pid)
    assert half.exists()
    assert [each.step for each in saved_steps(run / "checkpoints")] == [3]

    elsewhere = shutil.copytree(run, tmp_path / "elsewhere")
    result = api.resume(run, overrides=["run.loggers=[]"])
    assert (result.status, result.step) == ("finished", STEPS)
    assert losses(run) == unbroken[ranks]
    assert [each.step for each in saved_steps(run / "checkpoints")] == [6, 8]

    if ranks == 2:  # and what two ranks saved goes on with one
        api.resume(elsewhere, overrides=["run.loggers=[]", "placement.devices=1"])
        assert list(losses(elsewhere).values()) == pytest.approx(list(unbroken[2].values()), rel=1e-4)


def losses_so_far(run: Path) -> dict[int, float]:
    return losses(run) if (run / "metrics.jsonl").exists() else {}


@pytest.mark.slow
def test_what_one_rank_saved_continues_with_two(
    tiny_folder: Path, data: Path, unbroken: dict[int, dict[int, float]], tmp_path: Path
) -> None:
    api.train(tiny_recipe(tiny_folder, data, tmp_path, "grown"))
    shutil.rmtree(tmp_path / "grown" / "checkpoints" / "step-00000008")
    api.resume(tmp_path / "grown", overrides=["placement.devices=2"])
    assert list(losses(tmp_path / "grown").values()) == pytest.approx(list(unbroken[1].values()), rel=1e-4)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ctrl_c_saves_exits_0_and_says_how_to_resume(ranks: int, tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    changes = {"steps": 100_000, "placement": {"devices": ranks}}
    recipe = write_recipe(tiny_recipe(tiny_folder, data, tmp_path, "stopped", **changes), tmp_path / "r.yaml")
    run, output = tmp_path / "stopped", tmp_path / "out"
    with started(["-m", "podium", "train", recipe], output) as process:
        wait_until(lambda: len(losses_so_far(run)) >= 2, "the second step")
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all processes of the job
        assert process.wait(60) == 0, output.read_text()
        assert_gone(process.pid)
    last = max(losses(run))
    assert re.search(rf"stopped .*\b{last}\b.*podium resume {re.escape(str(run))}", output.read_text())
    assert "Traceback" not in output.read_text()
    assert saved_steps(run / "checkpoints")[-1].step == last
    assert RunFolder.open(run).status == "stopped"
    assert not (run / "stop-requested").exists()

    if ranks == 1:
        result = api.resume(run, overrides=[f"steps={last + 2}"])
        assert (result.status, result.step) == ("finished", last + 2)
        assert list(losses(run)) == list(range(1, last + 3))


@pytest.mark.slow
def test_a_lost_rank_is_restarted_from_the_last_checkpoint_where_there_is_no_memory(
    tiny_folder: Path,
    data: Path,
    unbroken: dict[int, dict[int, float]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "deadly.py").write_text(DIES_ONCE)  # rank 0 also finds little free memory
    changes = {
        "run": {"folder": str(tmp_path), "name": "lost", "loggers": [f"{tmp_path}/deadly.py:logger"]},
        "placement": {"devices": 2, "restarts": 1},
    }  # fmt: skip
    result = api.train(tiny_recipe(tiny_folder, data, tmp_path, "lost", **changes))
    assert (tmp_path / "lost" / "died-once").exists()
    assert (result.status, result.step) == ("finished", STEPS)
    said = " ".join(capfd.readouterr().out.split())
    assert said.count("no snapshots in memory: they take") == 2  # each attempt says so: progress renews the restarts
    assert re.search(r"resumed .*\b3\b", said)
    assert "restart 1 of 1: going on after step 3, " in said
    assert losses(tmp_path / "lost") == unbroken[2]
    assert spawned_children() == []


@pytest.mark.slow
def test_under_torchrun_the_same_command_works(
    tiny_folder: Path, data: Path, unbroken: dict[int, dict[int, float]], tmp_path: Path
) -> None:
    recipe = write_recipe(tiny_recipe(tiny_folder, data, tmp_path, "torchrun"), tmp_path / "r.yaml")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone"]
    said = finished([*launcher, "-m", "podium", "train", recipe], tmp_path / "out")
    assert len(re.findall(rf"finished .*\b{STEPS}\b", said)) == 1
    assert losses(tmp_path / "torchrun") == unbroken[2]


@pytest.mark.slow
def test_ranks_that_torchrun_restarts_go_on_from_the_newest_checkpoint(
    tiny_folder: Path, data: Path, unbroken: dict[int, dict[int, float]], tmp_path: Path
) -> None:
    """Torchrun keeps its store over restarts. Ranks found the addresses of dead ones in it, three times in four."""
    (tmp_path / "deadly.py").write_text(DIES_ONCE)
    run = {"folder": str(tmp_path), "name": "again", "loggers": [f"{tmp_path}/deadly.py:logger"]}
    recipe = write_recipe(tiny_recipe(tiny_folder, data, tmp_path, "again", run=run), tmp_path / "r.yaml")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--max-restarts", "1"]
    said = finished([*launcher, "-m", "podium", "train", recipe], tmp_path / "out")
    assert (tmp_path / "again" / "died-once").exists()
    assert re.search(r"resumed after step 3", said)
    assert losses(tmp_path / "again") == unbroken[2]


@pytest.mark.slow
def test_a_second_ctrl_c_ends_all_ranks_at_once(tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(HALF_WRITTEN)
    changes = {
        "run": {"folder": str(tmp_path), "name": "twice", "loggers": [f"{tmp_path}/stuck.py:logger"]},
        "placement": {"devices": 2},
    }  # fmt: skip
    recipe = write_recipe(tiny_recipe(tiny_folder, data, tmp_path, "twice", **changes), tmp_path / "r.yaml")
    run, output = tmp_path / "twice", tmp_path / "out"
    with started(["-m", "podium", "train", recipe], output) as process:
        wait_until(lambda: (run / "checkpoints" / ".partial-00000006").exists(), "the checkpoint that never ends")
        os.kill(process.pid, signal.SIGINT)
        wait_until(lambda: "press Ctrl-C again" in output.read_text(), "the answer to the first Ctrl-C")
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == 130, output.read_text()
        assert_gone(process.pid)
    assert members(process.pid) == []
    assert [each.step for each in saved_steps(run / "checkpoints")] == [3]
