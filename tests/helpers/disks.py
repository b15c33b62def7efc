# SPDX-License-Identifier: Apache-2.0
"""Small disks that a test can fill."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, *, size: str = "1m") -> Iterator[Path]:
    """A file system of its own with this much room. Skips the test where nothing can be mounted."""
    folder.mkdir(exist_ok=True)
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if mount is None or subprocess.run(command, capture_output=True, timeout=30).returncode != 0:
        pytest.skip("a small file system cannot be mounted here (that needs root)")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True, timeout=30)


def fill(folder: Path, *, leave: int = 0) -> Path:
    """Fills the disk of a folder but for `leave` bytes. Returns the file to remove."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(1024))
        file.truncate(max(0, file.tell() - leave))
    return filler
