# SPDX-License-Identifier: Apache-2.0
"""Turns a recipe's source section into rows: files of several formats, local or remote, and Hugging Face datasets."""

from __future__ import annotations

import bisect
import os
import re
from collections.abc import Sequence
from typing import Protocol

from podium.data import hub, storage
from podium.data.files import (
    ONE_READER,
    DataFile,
    FileFormat,
    ParquetFile,
    Readers,
    format_of,
    known_suffixes,
    open_file,
)
from podium.data.rows import Row
from podium.errors import DataError
from podium.recipe.schema import SourceSection

__all__ = ["FilesSource", "Row", "Source", "first_row", "open_source"]

_HUB_ID = re.compile(r"^[\w.-]+(/[\w.-]+)?(:[\w.-]+)?$")


class Source(Protocol):
    """Rows in blocks that can be read independently and in any order; some blocks may be empty."""

    name: str

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""

    def read_block(self, index: int) -> list[Row]:
        """The rows of one block."""

    def fingerprint(self) -> str:
        """Changes if the data changed between a run and its resume."""

    @property
    def note(self) -> str | None:
        """What reading changed in the rows so far, for the user; None if nothing."""


class FilesSource:
    """One or more files with the same kind of rows, concatenated."""

    def __init__(self, name: str, files: Sequence[DataFile], key: str) -> None:
        self.name = name
        self.files = tuple(files)
        self._key = key
        self._blocks_before = [0]
        for file in self.files:
            self._blocks_before.append(self._blocks_before[-1] + file.num_blocks)

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return self._blocks_before[-1]

    def read_block(self, index: int) -> list[Row]:
        """The rows of one block."""
        position = bisect.bisect_right(self._blocks_before, index) - 1
        file = self.files[position]
        try:
            return file.read_block(index - self._blocks_before[position])
        except FileNotFoundError as error:
            raise DataError(f"{self._key}: {file.name} was there at the start and is gone. Put it back.") from error

    @property
    def note(self) -> str | None:
        """The first note of a file."""
        return next((file.note for file in self.files if isinstance(file, ParquetFile) and file.note), None)

    def fingerprint(self) -> str:
        """The fingerprint of size, head and tail of each file."""
        return storage.fingerprint([file.name for file in self.files])


def open_source(section: SourceSection, key: str, *, keep_bad: bool = False, readers: Readers = ONE_READER) -> Source:
    """Opens the source at `section.path`; `key` is its place in the recipe (`data.train.0`), named in every error.
    `keep_bad`: a line that cannot be read becomes a row with a `problem`, and is no error. `readers`: this rank, where
    several ranks read the same rows and tell each other their errors."""
    if _is_dataset(section):
        return hub.open_dataset(section, key)
    files = _open_files(section, key, keep_bad=keep_bad, readers=readers)
    if all(file.first_row() is None for file in files):
        raise _no_rows(section, key)
    return FilesSource(section.path, files, key)


def first_row(section: SourceSection, key: str, *, keep_bad: bool = False) -> Row | None:
    """The first row, reading only the beginning; None for a hub id, which would need the network. `keep_bad`: as in
    `open_source`."""
    if _is_dataset(section):
        hub.require_datasets(section, key)
        if not hub.is_saved_dataset(section.path):
            return None
        row = hub.first_saved_row(section, key)
    else:
        first_rows = (file.first_row() for file in _open_files(section, key, keep_bad=keep_bad))
        row = next((row for row in first_rows if row is not None), None)
    if row is None:
        raise _no_rows(section, key)
    return row


def _no_rows(section: SourceSection, key: str) -> DataError:
    return DataError(f"{key}: {section.path} has no rows. Check that the right file was written.")


def _is_dataset(section: SourceSection) -> bool:
    path = section.path
    if section.format != "auto":
        return section.format == "datasets"
    if storage.is_url(path) or storage.is_glob(path):
        return False
    if storage.exists(path):
        return storage.is_folder(path) and hub.is_saved_dataset(path)
    # It does not exist: `owner/name` is a hub id unless it looks like a file, or like a path into an existing folder.
    looks_local = format_of(path) is not None or "/" not in path or os.path.isdir(path.split("/")[0])
    return _HUB_ID.match(path) is not None and not looks_local


def _open_files(
    section: SourceSection, key: str, *, keep_bad: bool = False, readers: Readers = ONE_READER
) -> list[DataFile]:
    names = _list(section, key)
    filled = [name for name in names if storage.size_bytes(name) > 0]
    if not filled:
        raise DataError(f"{key}: {section.path} is empty (0 bytes). Check that what writes it has finished.")
    return [open_file(name, _format(name, section, key), key, keep_bad=keep_bad, readers=readers) for name in filled]


def _list(section: SourceSection, key: str) -> list[str]:
    try:
        names = storage.list_files(section.path)
    except OSError as error:
        raise DataError(f"{key}: {section.path} cannot be listed ({error}).") from error
    if not names:
        what = "no file matches" if storage.is_glob(section.path) else "there is no file or folder"
        if storage.exists(section.path):
            what = "there is no file in the folder"
        raise DataError(
            f"{key}: {what} {section.path}. Check {key}.path; paths are relative to the folder you start podium in."
            + (f" For a Hugging Face id set {key}.format to datasets." if _HUB_ID.match(section.path) else "")
        )
    if len(names) == 1 or not storage.is_folder(section.path):
        return names
    # A folder may also hold a README or a licence: take only files with the format's suffix.
    wanted = [name for name in names if format_of(name) is not None and section.format in ("auto", format_of(name))]
    return wanted or names


def _format(name: str, section: SourceSection, key: str) -> FileFormat:
    match section.format:
        case "jsonl" | "csv" | "parquet":
            return section.format
    file_format = format_of(name)
    if file_format is None:
        raise DataError(
            f"{key}: the suffix of {name} does not say what it holds. Known are {known_suffixes()} (and .gz after "
            f"the text formats); or set {key}.format to jsonl, parquet or csv."
        )
    return file_format
