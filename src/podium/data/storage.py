# SPDX-License-Identifier: Apache-2.0
"""Files by name, local or through fsspec: finds them, opens them, and detects changes."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Sequence
from typing import Any, BinaryIO, cast

from podium.errors import DataError, MissingExtraError

_SAMPLE_BYTES = 1 << 16


def is_url(name: str) -> bool:
    """Whether a path is an fsspec URL."""
    return "://" in name


def is_glob(name: str) -> bool:
    """Whether a path has wildcards."""
    return any(character in name for character in "*?[")


def open_binary(name: str) -> BinaryIO:
    """Opens a local file or an fsspec URL for reading; a missing one is a FileNotFoundError."""
    if not is_url(name):
        return open(os.path.expanduser(name), "rb")
    file_system, path = _file_system(name)
    return cast(BinaryIO, file_system.open(path, "rb"))


def size_bytes(name: str) -> int:
    """The size of a file."""
    if not is_url(name):
        return os.path.getsize(os.path.expanduser(name))
    file_system, path = _file_system(name)
    return int(file_system.size(path))


def is_folder(name: str) -> bool:
    """Whether a path is a folder."""
    if not is_url(name):
        return os.path.isdir(os.path.expanduser(name))
    file_system, path = _file_system(name)
    return bool(file_system.isdir(path))


def exists(name: str) -> bool:
    """Whether a path exists."""
    if not is_url(name):
        return os.path.exists(os.path.expanduser(name))
    file_system, path = _file_system(name)
    return bool(file_system.exists(path))


def list_files(name: str) -> list[str]:
    """The file itself, the matches of a glob, or the visible files below a folder, sorted. Empty: none."""
    names = _list_remote(name) if is_url(name) else _list_local(name)
    return sorted(names)


def fingerprint(names: Sequence[str]) -> str:
    """Size, head and tail of each file: enough to notice that data changed between a run and its resume."""
    digest = hashlib.blake2b(digest_size=16)
    for name in names:
        size = size_bytes(name)
        digest.update(size.to_bytes(8, "little"))
        with open_binary(name) as stream:
            digest.update(stream.read(_SAMPLE_BYTES))
            stream.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _visible(path: str, below: str) -> bool:
    relative = os.path.relpath(path, below) if below else path
    return not any(part.startswith((".", "_")) for part in relative.split("/"))


def _list_local(name: str) -> list[str]:
    path = os.path.expanduser(name)
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        inside = glob.glob(os.path.join(glob.escape(path), "**"), recursive=True)
        return [file for file in inside if os.path.isfile(file) and _visible(file, path)]
    return [file for file in glob.glob(path, recursive=True) if os.path.isfile(file)] if is_glob(path) else []


def _list_remote(name: str) -> list[str]:
    file_system, path = _file_system(name)
    if file_system.isfile(path):
        return [name]
    if file_system.isdir(path):
        inside = [file for file in file_system.find(path) if _visible(file, path)]
    elif is_glob(path):
        inside = [file for file in file_system.glob(path) if file_system.isfile(file)]
    else:
        inside = []
    return [file_system.unstrip_protocol(file) for file in inside]


def _file_system(name: str) -> tuple[Any, str]:
    import fsspec.core

    try:
        file_system, path = fsspec.core.url_to_fs(name)
    except ImportError as error:
        raise MissingExtraError(f"{name}: {error}. Install the fsspec package of this kind of storage.") from error
    except ValueError as error:
        raise DataError(f"{name}: no file system for this URL ({error}). Check what stands before ://.") from error
    return file_system, path
