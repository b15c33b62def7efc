# SPDX-License-Identifier: Apache-2.0
"""Ranks that are killed and started again: the run goes on from memory and ends as the one that nobody killed."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import assert_gone, finished, spawned_children, started, wait_until
from helpers.runs import tiny_recipe, write_recipe
from helpers.times import times_of
from helpers.tiny import write_chats
from podium.engine.checkpoint_files import saved_steps
from podium.observe import read_metrics
from podium.runs.events import recoveries
from podium.runs.folder import RunFolder
from podium.runs.host_memory import memory_folder

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc"),
    pytest.mark.slow,
]
STEPS = 10
FIRST_MOMENT = "first-moment"
# A logger is loaded inside rank 0, so it is where a test can reach into a rank of a real run. This one stops rank 0
# once at each of the places that the test names, for ever, and leaves a file there: `start-up`, `step-5` (its metrics
# are written, its snapshot is not begun), `evaluation-4`, and `save-6` (half of a checkpoint's file is written).
HANGS = """
import json, threading
from pathlib import Path
from podium.engine import checkpoint

class Hangs:
    def __init__(self, folder):
        self.folder = Path(folder)
        self.places = json.loads((Path(__file__).parent / "places.json").read_text())
        plain = checkpoint.save_tensors
        def half(tensors, path):
            plain(tensors, path)
            place = f"save-{int(path.parent.name.removeprefix('.partial-'))}"
            if self.is_next(place):
                content = path.read_bytes()
                path.write_bytes(content[: len(content) // 2])
                self.hang(place)
        checkpoint.save_tensors = half
        self.hang("start-up")
    def is_next(self, place):
        return place in self.places and not (self.folder / place).exists()
    def hang(self, place):
        if self.is_next(place):
            (self.folder / place).touch()
            threading.Event().wait()
    def log(self, metrics):
        kind = "evaluation" if "heldout/loss" in metrics.values else "step"
        self.hang(f"{kind}-{metrics.step}")
    def text(self, step, name, text): pass
    def close(self): pass

def logger(folder):
    return Hangs(folder)
"""
TIMES = ("_s", "mfu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("data") / "train.jsonl")


def recipe_of(model: Path, data: Path, folder: Path, **changes: Any) -> str:
    """Two ranks, a checkpoint every 6 steps and an evaluation every 4."""
    values = {
        "data": {"train": [{"path": str(data)}], "heldout": [{"path": str(data)}]},
        "steps": STEPS,
        "evaluation": {"every": 4, "at_start": True, "max_documents": 8},
        "checkpoint": {"every": 6},
        "placement": {"devices": 2, "restarts": 3},
        **changes,
    }
    return write_recipe(tiny_recipe(model, data, folder, "run", **values), folder / "r.yaml")


@pytest.fixture(scope="module")
def unbroken(tiny_folder: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody killed."""
    folder = tmp_path_factory.mktemp("unbroken")
    recipe = recipe_of(tiny_folder, data, folder, placement={"devices": 2})
    finished(["-m", "podium", "train", recipe], folder / "out")
    return folder / "run"


def metrics_of(run: Path) -> list[tuple[int, dict[str, float]]]:
    return [
        (each.step, {name: value for name, value in each.values.items() if not name.endswith(TIMES)})
        for each in read_metrics(run)
    ]


def final_files(run: Path) -> dict[str, bytes]:
    """Weights, moments and data position after the last step."""
    folder = run / "checkpoints" / f"step-{STEPS:08d}"
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}


def assert_same(run: Path, unbroken: Path) -> None:
    assert final_files(run) == final_files(unbroken)
    assert len(final_files(run)) == 3
    assert metrics_of(run) == metrics_of(unbroken)
    saved = [[each.step for each in saved_steps(each / "checkpoints")] for each in (run, unbroken)]
    assert saved == [[6, STEPS]] * 2
    assert RunFolder.open(run).status == "finished"
    memory = memory_folder(run)
    assert memory is not None
    assert not memory.exists()


def with_hangs(folder: Path) -> dict[str, Any]:
    (folder / "hangs.py").write_text(HANGS)
    return {"folder": str(folder), "name": "run", "loggers": [f"{folder}/hangs.py:logger"]}


def killed_at(
    kills: Sequence[tuple[str, int]], recipe: str, folder: Path, *, hangs: Sequence[str] | None = None
) -> str:
    """Runs to its end, and kills a rank at each of some places. `hangs`: where rank 0 stops, if it does so elsewhere
    too. Returns what the command said."""
    (folder / "places.json").write_text(json.dumps(hangs or [place for place, _ in kills]))
    output = folder / "out"
    with started(["-m", "podium", "train", recipe], output) as process:
        dead: set[int] = set()
        for place, victim in kills:
            reached = Reached(launcher=process.pid, dead=dead, file=folder / "run" / place)
            wait_until(lambda: reached() or process.poll() is not None, place)  # noqa: B023
            assert process.poll() is None, output.read_text()
            ranks = reached.ranks()
            dead |= set(ranks)
            os.kill(ranks[victim], signal.SIGKILL)
        assert process.wait(240) == 0, output.read_text()
        assert_gone(process.pid)
    return " ".join(output.read_text().split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """Whether the present ranks are at a place. At the first moment their processes only exist."""

    launcher: int
    dead: set[int]
    file: Path

    def ranks(self) -> list[int]:
        return [each for each in spawned_children(self.launcher) if each not in self.dead]

    def __call__(self) -> bool:
        return len(self.ranks()) == 2 and (self.file.name == FIRST_MOMENT or self.file.exists())


@pytest.mark.parametrize(
    ("place", "victim", "step"),
    [
        pytest.param(FIRST_MOMENT, 1, 0, marks=pytest.mark.soak),
        ("start-up", 1, 0),
        pytest.param("step-1", 0, 0, marks=pytest.mark.soak),
        ("step-5", 0, 4),
        pytest.param("step-8", 1, 7, marks=pytest.mark.soak),
        ("evaluation-4", 0, 3),
        pytest.param("save-6", 1, 5, marks=pytest.mark.soak),
        (f"save-{STEPS}", 0, STEPS - 1),
    ],
)
def test_a_killed_rank_costs_the_step_in_progress_and_nothing_else(
    place: str, victim: int, step: int, tiny_folder: Path, data: Path, unbroken: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(tiny_folder, data, tmp_path, run=with_hangs(tmp_path))

    said = killed_at([(place, victim)], recipe, tmp_path)

    going_on = f"going on after step {step}" if step else "beginning again"
    assert re.search(rf"restart 1 of 3: rank {victim} \(process \d+\) died with SIGKILL", said)
    assert re.search(rf"restart 1 of 3: {going_on}, [\d.]+ s after the failure", said)
    assert "Traceback" not in said
    (event,) = recoveries(tmp_path / "run")
    assert (event.part, event.remedy, event.step) == ("rank", "restart", step)
    assert "SIGKILL" in event.cause
    assert 0.0 < event.seconds < 240.0  # a loaded machine imports torch for half a minute
    if step:  # else no rank had written its time
        seconds = times_of(tmp_path / "run")["ranks"].seconds
        assert seconds["waiting for recovery"] > 0.0
        assert seconds["waiting for recovery"] + seconds["start-up"] > 2 * 0.9 * event.seconds
    assert_same(tmp_path / "run", unbroken)


def test_a_checkpoint_that_was_being_written_in_the_background_is_written_again(
    tiny_folder: Path, data: Path, unbroken: Path, tmp_path: Path
) -> None:
    changes = {"run": with_hangs(tmp_path), "checkpoint": {"every": 6, "background": True}}
    recipe = recipe_of(tiny_folder, data, tmp_path, **changes)

    said = killed_at([("step-7", 1)], recipe, tmp_path, hangs=["save-6", "step-7"])

    assert "restart 1 of 3: going on after step 6" in said
    assert_same(tmp_path / "run", unbroken)


def test_several_kills_in_one_run(tiny_folder: Path, data: Path, unbroken: Path, tmp_path: Path) -> None:
    recipe = recipe_of(tiny_folder, data, tmp_path, run=with_hangs(tmp_path))

    said = killed_at([("step-3", 1), ("step-4", 0), ("save-6", 0)], recipe, tmp_path)

    assert [event.step for event in recoveries(tmp_path / "run")] == [2, 3, 5]
    assert said.count("restart 1 of 3: going on after step") == 3  # a completed step gives all back
    assert re.search(r"when one failed, rank 0 was at File \"\S+\", line \d+ in ", said), said  # where it waited
    assert "rank 0 (process " in (tmp_path / "run" / "stacks.txt").read_text()
    assert_same(tmp_path / "run", unbroken)


def test_one_rank_is_restarted_too(tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    """It runs in a process of its own then."""
    runs = []
    for name, placement in (("alone", {"devices": 1}), ("killed", {"devices": 1, "restarts": 1})):
        folder = tmp_path / name
        folder.mkdir()
        recipe = recipe_of(tiny_folder, data, folder, run=with_hangs(folder), placement=placement)
        (folder / "places.json").write_text(json.dumps(["step-5"] if name == "killed" else []))
        with started(["-m", "podium", "train", recipe], folder / "out") as process:
            if name == "killed":
                wait_until((folder / "run" / "step-5").exists, "step 5")
                os.kill(spawned_children(process.pid)[0], signal.SIGKILL)
            assert process.wait(240) == 0, (folder / "out").read_text()
        runs.append(folder / "run")

    alone, killed = runs
    assert times_of(killed)["ranks"].seconds["waiting for recovery"] > 0.0
    assert [event.step for event in recoveries(killed)] == [4]
    assert metrics_of(killed) == metrics_of(alone)
    assert final_files(killed) == final_files(alone)


def test_a_rank_that_is_stopped_counts_as_dead(tiny_folder: Path, data: Path, unbroken: Path, tmp_path: Path) -> None:
    placement = {"devices": 2, "restarts": 1, "heartbeat_timeout_s": 2.0}
    recipe = recipe_of(tiny_folder, data, tmp_path, run=with_hangs(tmp_path), placement=placement)
    (tmp_path / "places.json").write_text(json.dumps(["step-5"]))
    with started(["-m", "podium", "train", recipe], tmp_path / "out") as process:
        wait_until((tmp_path / "run" / "step-5").exists, "step 5")
        os.kill(spawned_children(process.pid)[1], signal.SIGSTOP)
        assert process.wait(240) == 0, (tmp_path / "out").read_text()
        assert_gone(process.pid)

    said = " ".join((tmp_path / "out").read_text().split())
    assert re.search(
        r"restart 1 of 1: rank 1 \(process \d+\): stopped \(SIGSTOP\), without a sign of life for 2 s", said
    )
    assert [event.step for event in recoveries(tmp_path / "run")] == [4]
    assert_same(tmp_path / "run", unbroken)


def test_a_run_that_is_resumed_by_hand_does_not_find_snapshots_of_its_earlier_life(
    tiny_folder: Path, data: Path, unbroken: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(tiny_folder, data, tmp_path, run=with_hangs(tmp_path))
    run = tmp_path / "run"
    (tmp_path / "places.json").write_text(json.dumps(["step-9"]))
    with started(["-m", "podium", "train", recipe], tmp_path / "out") as process:
        wait_until((run / "step-9").exists, "step 9")
        os.kill(process.pid, signal.SIGKILL)  # the launcher, which can clear nothing
        assert_gone(process.pid)
    memory = memory_folder(run)
    assert memory is not None
    assert memory.exists()

    (tmp_path / "places.json").write_text(json.dumps(["start-up"]))
    with started(["-m", "podium", "resume", str(run)], tmp_path / "out") as process:
        wait_until((run / "start-up").exists, "the start-up")
        assert not list(memory.glob("*/step-*"))
        os.kill(spawned_children(process.pid)[1], signal.SIGKILL)
        assert process.wait(240) == 0, (tmp_path / "out").read_text()
        assert_gone(process.pid)

    assert [event.step for event in recoveries(run)] == [6]
    assert_same(run, unbroken)
