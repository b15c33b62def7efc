# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: made once, never written over, gone again when the run never began."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.recipes import make_recipe
from podium.errors import RunFolderError
from podium.observe.line_files import LineFile
from podium.recipe import Recipe, dump_recipe
from podium.runs.folder import RunFolder, row_lines, write_atomically


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return make_recipe(f"run.folder={tmp_path / 'runs'}")


def test_a_new_folder_holds_the_recipe_and_the_state(recipe: Recipe, tmp_path: Path) -> None:
    folder = RunFolder.create(recipe)

    assert folder.path == tmp_path / "runs" / "sums"
    assert folder.recipe() == recipe
    assert folder.status == "starting"
    assert folder.state()["program"] == "sft"
    assert {"python", "podium", "torch", "transformers"} <= set(folder.state()["versions"])
    assert folder.checkpoints.is_dir()


def test_a_folder_that_exists_is_never_written_over(recipe: Recipe) -> None:
    folder = RunFolder.create(recipe)
    folder.update(status="running")

    with pytest.raises(RunFolderError, match=rf"{folder.path} .*no checkpoint\b"):
        RunFolder.create(recipe)
    (folder.checkpoints / "step-00000002").mkdir()
    with pytest.raises(RunFolderError, match=rf"{folder.path} .*`podium resume"):
        RunFolder.create(recipe)
    assert folder.status == "running"


# Makes a folder and lets the run fail, in processes of which number N is killed before its Nth change of a file there.
KILLED = """
import itertools, os, signal, sys
from pathlib import Path
from podium.recipe import load_recipe
from podium.runs.folder import RunFolder

CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
root, recipe = sys.argv[1], load_recipe(sys.argv[2])

def dies(number):
    left = itertools.count(number, -1)

    def hook(event, arguments):
        if event in CHANGES and root in str(arguments[0]) and next(left) == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)

for number in itertools.count(1):
    child = os.fork()
    if child == 0:
        dies(number)
        RunFolder.create(recipe).end_failed(RuntimeError())
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    folder = RunFolder.create(recipe)
    assert folder.is_starting and folder.recipe() == recipe and not any(folder.checkpoints.iterdir())
    assert [each.name for each in folder.path.parent.iterdir()] == [folder.path.name]
    folder.end_failed(RuntimeError())
    assert not any(folder.path.parent.iterdir())
    if code == 0:
        print(number)
        break
    assert code == -signal.SIGKILL
"""


@pytest.mark.slow
def test_a_start_that_is_killed_at_any_moment_leaves_the_name_free(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "sums.yaml").write_text(dump_recipe(recipe))
    command = [sys.executable, "-c", KILLED, str(tmp_path / "runs"), str(tmp_path / "sums.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10


def test_a_file_in_the_way_is_refused_and_left_alone(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "sums").write_text("mine")

    with pytest.raises(RunFolderError, match=r"runs/sums .*--set run\.name="):
        RunFolder.create(recipe)
    assert (tmp_path / "runs" / "sums").read_text() == "mine"


def test_a_run_that_hangs_in_its_first_step_leaves_its_stacks_beside_its_name(recipe: Recipe, tmp_path: Path) -> None:
    folder, error = RunFolder.create(recipe), RuntimeError("it hangs")
    folder.stacks_file.write_text("in clean")

    folder.end_failed(error)

    assert not folder.path.exists()
    stacks = folder.path.with_name("sums.stacks.txt")
    assert stacks.read_text() == "in clean"
    assert error.__notes__[-1] == f"its stacks.txt is now {stacks}"


def test_a_place_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(RunFolderError, match=r"file/sums .*: Not a directory"):
        RunFolder.create(make_recipe(f"run.folder={tmp_path / 'file'}"))


def test_a_disk_that_fills_up_leaves_no_half_made_folder(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("podium.runs.folder.write_atomically", full)

    with pytest.raises(RunFolderError, match=r"runs/sums .*: No space left on device"):
        RunFolder.create(recipe)
    assert not (tmp_path / "runs" / "sums").exists()


def test_opening_what_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"/none\b"):
        RunFolder.open(tmp_path / "none")


def test_opening_some_other_folder_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"recipe\.yaml .*run\.json"):
        RunFolder.open(tmp_path)


def test_an_existing_run_is_opened_by_its_path(recipe: Recipe) -> None:
    made = RunFolder.create(recipe)

    assert RunFolder.open(str(made.path)) == made


def test_a_run_that_never_began_is_removed(recipe: Recipe) -> None:
    folder = RunFolder.create(recipe)
    folder.end_failed(OSError())

    assert not folder.path.exists()
    RunFolder.create(recipe)


@pytest.mark.parametrize("status", ["running", "stopped", "finished"])
def test_a_run_that_began_is_kept(recipe: Recipe, status: str) -> None:
    folder = RunFolder.create(recipe)
    folder.update(status=status)
    folder.end_failed(OSError())

    assert folder.status == "failed"


def test_discarding_what_is_damaged_or_gone_raises_nothing_over_the_first_error(recipe: Recipe, tmp_path: Path) -> None:
    folder = RunFolder.create(recipe)
    (folder.path / "run.json").write_text("{")
    folder.end_failed(OSError())
    RunFolder(path=tmp_path / "none").end_failed(OSError())

    assert folder.path.exists()


def test_updates_merge_and_leave_no_temporary_file(recipe: Recipe) -> None:
    folder = RunFolder.create(recipe)
    folder.update(status="running", cpu={"threads": 1})
    folder.update(step=3)

    assert (folder.status, folder.state()["step"], folder.state()["cpu"]) == ("running", 3, {"threads": 1})
    names = sorted(path.name for path in folder.path.iterdir())
    assert names == ["checkpoints", "recipe.yaml", "run.json", "run.lock"]


def test_a_write_that_fails_half_way_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.json"
    file.write_text("old")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("podium.runs.folder.os.fsync", fail)

    with pytest.raises(OSError, match="No space"):
        write_atomically(file, "new")
    assert file.read_text() == "old"


def add_samples(folder: RunFolder, step: int, rows: list[dict[str, str]]) -> None:
    file = LineFile(folder.samples_file)
    file.append(row_lines(step, rows))
    file.close()


def test_samples_are_appended_as_json_lines(recipe: Recipe) -> None:
    folder = RunFolder.create(recipe)
    add_samples(folder, 2, [{"prompt": "zwölf?", "answer": "12"}])
    add_samples(folder, 4, [{"prompt": "b", "answer": "c"}])

    lines = [json.loads(line) for line in folder.samples_file.read_text(encoding="utf-8").splitlines()]
    assert lines == [{"step": 2, "prompt": "zwölf?", "answer": "12"}, {"step": 4, "prompt": "b", "answer": "c"}]


def test_a_folder_is_run_by_one_process_at_a_time(recipe: Recipe) -> None:
    folder = RunFolder.create(recipe)
    with folder.held(), pytest.raises(RunFolderError, match=f"process {os.getpid()}"), folder.held():
        pass
    with folder.held():
        pass


def test_samples_of_later_steps_and_a_torn_line_are_forgotten_on_resume(recipe: Recipe) -> None:
    folder = RunFolder.create(recipe)
    for step in (2, 4, 6):
        add_samples(folder, step, [{"prompt": "a", "answer": "b"}])
    with folder.samples_file.open("a", encoding="utf-8") as file:
        file.write('{"step": 1, "pro')

    folder.forget_after(4)

    steps = [json.loads(line)["step"] for line in folder.samples_file.read_text(encoding="utf-8").splitlines()]
    assert steps == [2, 4]


def test_a_folder_that_a_living_process_has_just_made_is_refused(tmp_path: Path) -> None:
    """It does not hold it yet. That of a process that is gone, or a zombie, is free."""
    recipe = make_recipe(f"run.folder={tmp_path}", "run.name=new")
    folder = RunFolder.create(recipe)

    def left_by(pid: int, host: str) -> None:
        (folder.path / "run.lock").write_text(json.dumps({"pid": pid, "host": host, "since_s": 0.0}))

    left_by(os.getppid(), platform.node())
    with pytest.raises(RunFolderError, match=rf"is running right now \(process {os.getppid()} on"):
        RunFolder.create(recipe)
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    for pid, host in ((ended.pid, platform.node()), (2**22 + 1, platform.node()), (os.getppid(), "elsewhere")):
        left_by(pid, host)
        RunFolder.create(recipe)
    ended.wait()
