# SPDX-License-Identifier: Apache-2.0
"""Folders of runs in host memory: there while a run lives, and gone afterwards, also those of killed runs."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from podium.runs import host_memory
from podium.runs.host_memory import claim_launch, held_memory, launch_folder, memory_folder


@pytest.fixture(autouse=True)
def tmpfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(host_memory, "_TMPFS", folder)
    return folder


def folder_of(run: Path) -> Path:
    folder = memory_folder(run)
    assert folder is not None
    return folder


def test_a_folder_lives_as_long_as_its_run(tmp_path: Path, tmpfs: Path) -> None:
    run = tmp_path / "run"
    with held_memory(run):
        (folder_of(run) / "policy").mkdir()
        assert folder_of(run).stat().st_mode & 0o077 == 0
    assert not list(tmpfs.iterdir())


def test_it_is_removed_when_the_run_fails(tmp_path: Path, tmpfs: Path) -> None:
    with pytest.raises(ValueError, match="no"), held_memory(tmp_path / "run"):
        raise ValueError("no")
    assert not list(tmpfs.iterdir())


def test_a_run_begins_without_what_an_earlier_one_left(tmp_path: Path) -> None:
    run = tmp_path / "run"
    left = folder_of(run) / "policy" / "step-00000004"
    left.mkdir(parents=True)

    with held_memory(run):
        assert not left.exists()


def test_folders_of_killed_runs_are_removed_and_those_of_others_stay(tmp_path: Path, tmpfs: Path) -> None:
    killed, remote = tmp_path / "killed", tmp_path / "remote"
    code = (
        "import sys, time; from pathlib import Path; from podium.runs import host_memory as memory\n"
        f"memory._TMPFS = Path({str(tmpfs)!r})\n"
        f"with memory.held_memory(Path({str(killed)!r})):\n    print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        folder_of(remote).mkdir(parents=True)  # its controller is on another machine: no lock
        with held_memory(tmp_path / "first"):
            assert folder_of(killed).exists()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)

    with held_memory(tmp_path / "second"):
        assert not folder_of(killed).exists()
        assert folder_of(remote).exists()


def test_a_name_that_another_user_has_taken_is_not_used(
    tmp_path: Path, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = os.getuid() + 1
    (tmpfs / f"podium-{other}").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: other)

    assert memory_folder(tmp_path / "run") is None
    with held_memory(tmp_path / "run"):
        pass
    assert [each.name for each in tmpfs.iterdir()] == [f"podium-{os.getuid()}"]


def test_a_system_without_tmpfs_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_TMPFS", tmp_path / "nowhere")

    assert memory_folder(tmp_path / "run") is None
    with held_memory(tmp_path / "run"):
        pass


def test_each_launch_has_a_folder_of_its_own_that_its_successors_share(tmp_path: Path) -> None:
    run, seen = tmp_path / "run", []
    for is_emptied in (True, False, True):
        with held_memory(run, is_emptied=is_emptied, is_removed=False):
            seen.append(launch_folder(run))
    assert seen[0] is not None
    assert seen[0].parent == folder_of(run)
    assert seen[0] == seen[1] != seen[2]
    assert launch_folder(tmp_path / "another") is None


def test_a_worker_on_another_node_removes_what_earlier_launches_and_killed_runs_left(tmpfs: Path) -> None:
    mine = tmpfs / f"podium-{os.getuid()}"
    earlier, killed = mine / "run" / "launch-1" / "policy", mine / "killed" / "launch-7"
    for each in (earlier, killed):
        each.mkdir(parents=True)
    (mine / "killed" / "lock").touch()  # nobody holds it

    first, second = claim_launch(mine / "run" / "launch-2"), claim_launch(mine / "run" / "launch-2")

    assert first is not None
    assert second is not None
    assert sorted(each.name for each in mine.iterdir()) == ["run"]
    assert sorted(each.name for each in (mine / "run").iterdir()) == ["launch-2", "lock"]
    first.close()
    with held_memory(Path("another")):  # the second one still holds it
        assert (mine / "run" / "launch-2").is_dir()
    second.close()
    with held_memory(Path("another")):
        assert not (mine / "run").exists()


def test_a_folder_that_cannot_be_made_is_not_claimed(tmpfs: Path) -> None:
    (tmpfs / "podium-0").write_text("in the way")
    assert claim_launch(tmpfs / "podium-0" / "run" / "launch-1") is None


def test_a_folder_that_is_removed_before_it_is_held_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, flock, removed = tmp_path / "run", fcntl.flock, []

    def flock_too_late(file: object, how: int) -> None:
        if not removed:  # another run has found the lock free
            removed.append(folder_of(run))
            host_memory.remove_memory(folder_of(run))
        flock(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", flock_too_late)
    with held_memory(run):
        assert launch_folder(run) is not None
    assert removed
