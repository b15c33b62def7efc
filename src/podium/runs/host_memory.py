# SPDX-License-Identifier: Apache-2.0
"""The folder of a run in host memory: it outlives the processes of the run, but not the machine. Torch-free."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

_TMPFS = Path("/dev/shm")
_LOCK = "lock"


def memory_folder(run: Path) -> Path | None:
    """Where snapshots of a run are kept: one folder for each run folder of a user. None: this system has no tmpfs, or
    another user has taken the name."""
    mine = _mine()
    return None if mine is None else mine / hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]


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
    for each in (mine, folder):
        each.mkdir(mode=0o700, exist_ok=True)
    with (folder / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # shared with a supervisor; the run folder has a lock of its own
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
