# SPDX-License-Identifier: Apache-2.0
"""The folder of a run in host memory: it outlives the processes of the run, but not the machine. Torch-free."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path

_TMPFS = Path("/dev/shm")


def memory_folder(run: Path) -> Path | None:
    """Where snapshots of a run are kept: one folder for each run folder of a user. None: this system has no
    tmpfs, or another user has taken the name."""
    mine = _TMPFS / f"podium-{os.getuid()}"
    if not _TMPFS.is_dir() or not os.access(_TMPFS, os.W_OK) or (mine.exists() and mine.stat().st_uid != os.getuid()):
        return None
    return mine / hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]


def clear_memory(run: Path) -> None:
    """Frees what a run has kept there."""
    folder = memory_folder(run)
    if folder is not None and folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # other runs have theirs there
            folder.parent.rmdir()
