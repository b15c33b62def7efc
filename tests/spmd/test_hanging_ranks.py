# SPDX-License-Identifier: Apache-2.0
"""Ranks of real runs that hang in code: each is noticed within `placement.timeout_s`, with the stacks of all ranks, and
counts as dead."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import assert_gone, started
from helpers.runs import tiny_recipe, write_recipe
from helpers.tiny import write_chats
from podium.observe import read_metrics
from podium.runs.events import recoveries
from podium.runs.folder import RunFolder

pytestmark = pytest.mark.slow
STEPS, LIMIT_S = 6, 25.0
# The first one that gets there hangs, and nobody after it.
CODE = """
import os, threading
from pathlib import Path

FLAG = Path(__file__).parent / "hangs"

def is_first():
    try:
        os.close(os.open(FLAG, os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False

rows = 0
def deadlocks(row):
    global rows
    rows += 1
    if rows == 20 and is_first():
        threading.Event().wait()
    return row

class Loops:
    def log(self, metrics):
        if metrics.step == 3 and is_first():
            while True:
                pass
    def text(self, step, name, text): pass
    def close(self): pass

def logger(folder):
    return Loops()
"""
CASES = pytest.mark.parametrize(
    ("hangs", "place"), [("map", "in deadlocks"), ("logger", "in log")], ids=["transform", "endless loop"]
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("data") / "train.jsonl")


def trained(
    model: Path, data: Path, folder: Path, name: str, *, hangs: str | None, workers: int = 0, **placement: Any
) -> tuple[int, str]:
    """Runs to its end. Returns the exit code and what the command said."""
    (folder / "code.py").write_text(CODE)
    source: dict[str, Any] = {"path": str(data)}
    run: dict[str, Any] = {"folder": str(folder), "name": name}
    if hangs == "map":
        source["map"] = f"{folder}/code.py:deadlocks"
    elif hangs == "logger":
        run["loggers"] = [f"{folder}/code.py:logger"]
    values = {
        "data": {"train": [source], "workers": workers}, "steps": STEPS, "run": run,
        "placement": {"timeout_s": LIMIT_S, **placement},
    }  # fmt: skip
    recipe = write_recipe(tiny_recipe(model, data, folder, name, **values), folder / f"{name}.yaml")
    with started(["-m", "podium", "train", recipe], folder / f"{name}.out") as process:
        code = process.wait(240)
        assert_gone(process.pid)
    return code, " ".join((folder / f"{name}.out").read_text().split())


def losses_of(run: Path) -> dict[int, float]:
    return {each.step: each.values["loss"] for each in read_metrics(run)}


@CASES
def test_of_two_ranks_the_one_that_hangs_is_named_and_the_run_goes_on(
    hangs: str, place: str, tiny_folder: Path, data: Path, tmp_path: Path
) -> None:
    assert trained(tiny_folder, data, tmp_path, "calm", hangs=None, devices=2)[0] == 0

    code, said = trained(tiny_folder, data, tmp_path, "run", hangs=hangs, devices=2, restarts=1)

    assert code == 0, said
    hangs_at = r"restart 1 of 1: rank \d \(process \d+\) hangs at File \"\S+/code.py\", line \d+ (in \w+)"
    found = re.search(rf"{hangs_at}: no progress for 25 s", said)
    assert found is not None, said
    assert found[1] == place
    stacks = (tmp_path / "run" / "stacks.txt").read_text()
    assert "rank 0 (process" in stacks
    assert "rank 1 (process" in stacks
    assert place in stacks
    (event,) = recoveries(tmp_path / "run")
    assert (event.part, event.remedy) == ("rank", "restart")
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "calm")


def test_a_tokenizer_that_hangs_ends_a_run_without_restarts_and_its_stack_is_kept(
    tiny_folder: Path, data: Path, tmp_path: Path
) -> None:
    code, said = trained(tiny_folder, data, tmp_path, "run", hangs="map", workers=1, devices=2)

    assert code != 0
    assert re.search(r"error: .*rank \d \(process \d+\) hangs at File \"\S+/code.py\", line \d+ in deadlocks", said), (
        said
    )
    assert f"its stacks.txt is now {tmp_path}/run.stacks.txt" in said  # it was the first step
    assert re.search(r"tokenizer 0 of rank \d", (tmp_path / "run.stacks.txt").read_text())


@CASES
def test_a_single_rank_gets_an_error_where_it_hangs(
    hangs: str, place: str, tiny_folder: Path, data: Path, tmp_path: Path
) -> None:
    code, said = trained(tiny_folder, data, tmp_path, "run", hangs=hangs, devices=1)

    assert code != 0
    place = rf'no progress for 25 s \(placement.timeout_s\), at File "\S+/code.py", line \d+ {place}'
    assert re.search(place, said), said
    is_begun = hangs == "logger"
    stacks = tmp_path / "run" / "stacks.txt" if is_begun else tmp_path / "run.stacks.txt"
    assert "code.py" in stacks.read_text()
    assert not is_begun or RunFolder.open(tmp_path / "run").status == "failed"


def test_a_single_rank_in_a_process_of_its_own_is_started_again(tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    assert trained(tiny_folder, data, tmp_path, "calm", hangs=None, devices=1)[0] == 0

    code, said = trained(tiny_folder, data, tmp_path, "run", hangs="logger", devices=1, restarts=1)

    assert code == 0, said
    assert "restart 1 of 1: rank 0 (process" in said
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "calm")
