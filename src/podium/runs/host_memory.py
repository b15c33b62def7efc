# SPDX-License-Identifier: Apache-2.0
"""The folder of a run in host memory: it outlives the processes of the run, but not the machine. Torch-free."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

_TMPFS = Path("/dev/shm")
_LOCK = "lock"
_LAUNCH = "launch"
_OF_LAUNCH = "launch-"


def memory_folder(run: Path) -> Path | None:
    """Where snapshots of a run are kept: one folder for each run folder of a user. None: this system has no tmpfs, or
    another user has taken the name."""
    mine = _mine()
    return None if mine is None else mine / hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]


def launch_folder(run: Path) -> Path | None:
    """Where the workers of this launch of a run keep their snapshots, on each of their nodes. What an earlier launch
    has left on another node has another name. None: nobody holds the folder of the run."""
    folder = memory_folder(run)
    try:
        return None if folder is None else folder / (folder / _LAUNCH).read_text(encoding="utf-8")
    except OSError:
        return None


def claim_launch(launch: Path) -> TextIO | None:
    """Makes the folder of a launch on the node of a worker, as `launch_folder` has named it, and removes what earlier
    launches and killed runs have left there. It is kept until the file is closed. None: it cannot be made, or belongs
    to another user."""
    run, mine = launch.parent, launch.parent.parent
    try:
        _remove_free(mine, but=run)
        lock = _held(run)
        for other in run.glob(f"{_OF_LAUNCH}*"):
            if other != launch:
                shutil.rmtree(other, ignore_errors=True)
        launch.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    return lock


def _held(folder: Path) -> TextIO:
    """Makes the folder of a run and holds it. Nobody else removes it then."""
    while True:
        for each in (folder.parent, folder):
            each.mkdir(mode=0o700, exist_ok=True)
            if each.stat().st_uid != os.getuid():
                raise PermissionError(f"{each} belongs to another user.")
        with contextlib.suppress(FileNotFoundError):  # it was removed before it was held
            lock = (folder / _LOCK).open("a")
            fcntl.flock(lock, fcntl.LOCK_SH)  # the controller, its supervisor and workers share it
            if (folder / _LOCK).stat().st_ino == os.fstat(lock.fileno()).st_ino:
                return lock
            lock.close()


@contextlib.contextmanager
def held_memory(run: Path, *, is_emptied: bool = True, is_removed: bool = True) -> Iterator[None]:
    """The run has its folder in memory: emptied at the beginning, and removed at the end. Folders of runs that were
    killed are removed too: their locks are free."""
    folder, mine = memory_folder(run), _mine()
    if folder is None or mine is None:
        yield
        return
    _remove_free(mine, but=folder)
    if is_emptied:
        remove_memory(folder)
    with _held(folder):
        if not (folder / _LAUNCH).exists():
            (folder / _LAUNCH).write_text(f"{_OF_LAUNCH}{uuid.uuid4().hex}", encoding="utf-8")
        try:
            yield
        finally:
            if is_removed:
                remove_memory(folder)


def keep_memory(run: Path) -> TextIO | None:
    """Keeps the folder of a run in memory after the death of the process that holds it, until the file is closed. None:
    there is no folder."""
    folder = memory_folder(run)
    try:
        lock = (folder / _LOCK).open() if folder is not None else None
    except OSError:
        return None
    if lock is not None:
        fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def forget_memory(run: Path) -> None:
    """Removes the folder of a run that has ended."""
    folder = memory_folder(run)
    if folder is not None:
        remove_memory(folder)


def _mine() -> Path | None:
    mine = _TMPFS / f"podium-{os.getuid()}"
    if not _TMPFS.is_dir() or not os.access(_TMPFS, os.W_OK) or (mine.exists() and mine.stat().st_uid != os.getuid()):
        return None
    return mine


def _remove_free(mine: Path, *, but: Path) -> None:
    """A folder without a lock may belong to a run whose controller is on another machine."""
    for lock in mine.glob(f"*/{_LOCK}"):
        if lock.parent == but:
            continue
        with contextlib.suppress(OSError), lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_memory(lock.parent)


def remove_memory(folder: Path) -> None:
    """Removes a folder in memory, and the one above it if that is empty then."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # other runs have theirs there
        folder.parent.rmdir()
