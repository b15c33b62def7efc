# SPDX-License-Identifier: Apache-2.0
"""Faults of the disk: which errors they are, and what a run says about them. A run goes on without a file that cannot
be written, and writes it when it can."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sqlite3
from pathlib import Path

# A full disk, a full quota, a broken or read-only disk, a folder that is gone, and a file server that forgot it.
_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
_SQLITE_FAULTS = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_CANTOPEN: errno.ENOENT,
}
_NUMBER = re.compile(r"\(os error (\d+)\)")
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def disk_fault(error: BaseException) -> str | None:
    """The fault of the disk behind an error, in the system's words; None: the error is another one. Errors of
    safetensors and SQLite carry the system's error in their text or code."""
    number = _number(error)
    if number is None and error.__cause__ is not None:
        return disk_fault(error.__cause__)
    if number not in _FAULTS:
        return None
    assert number is not None
    return "the folder is gone" if number in _GONE else os.strerror(number)


def _number(error: BaseException) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    if isinstance(error, sqlite3.OperationalError):
        return _SQLITE_FAULTS.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
    found = _NUMBER.search(str(error))
    return int(found[1]) if found is not None and type(error).__name__ == "SafetensorError" else None


def free_bytes(path: Path) -> int | None:
    """Free bytes of the disk that holds a path, or would hold it; None if that cannot be told."""
    for folder in (path, *path.absolute().parents):
        try:
            return shutil.disk_usage(folder).free
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def size_text(num_bytes: int) -> str:
    """A number of bytes for people: 1.5 GiB, 12 KiB, 700 bytes."""
    for unit, name in _UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}" if num_bytes < 999.5 * unit else f"{num_bytes / unit:.0f} {name}"
    return f"{num_bytes} bytes"
