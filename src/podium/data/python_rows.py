# SPDX-License-Identifier: Apache-2.0
"""Rows that a Python program holds in memory, written as a file that every process of a run can read.

The file is named by its content and its place in the recipe: the same rows give the same file, a resumed run finds what
it began with, and an error about a row names its index (rows.py)."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from podium.errors import DataError, type_phrase

_ROWS_PER_GROUP = 4096


def is_dataset(value: object) -> bool:
    """Whether a value is of a class of the package `datasets`, which is not imported for this."""
    datasets = sys.modules.get("datasets")
    kinds = ("Dataset", "IterableDataset", "DatasetDict", "IterableDatasetDict")
    return datasets is not None and isinstance(value, tuple(getattr(datasets, name) for name in kinds))


def write_rows(rows: Any, folder: Path, key: str) -> Path:
    """Writes a list of dicts as JSONL, or a `datasets.Dataset` as Parquet. `key` is its place in the recipe, named in
    every error."""
    if is_dataset(rows):
        return _write_dataset(rows, folder, key)
    if not isinstance(rows, list | tuple):
        raise DataError(f"{key}: expected a list of rows (dicts) or a datasets.Dataset, found {type_phrase(rows)}.")
    if not rows:
        raise DataError(f"{key}: the list of rows is empty. Check what fills it.")
    return _stored(folder, f"-{key}.jsonl", lambda stream: _write_lines(rows, stream, key))


def _write_lines(rows: Sequence[Any], stream: BinaryIO, key: str) -> None:
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
            raise DataError(f"{key}: row {index} is {_shown(row)}. A row is a dict from column names to values.")
        try:
            text = json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=_plain)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{key}: row {index} cannot be written as JSON ({error}). Give texts, numbers, lists and dicts."
            ) from error
        stream.write(text.encode("utf-8", errors="surrogatepass") + b"\n")


def _plain(value: Any) -> Any:
    """NumPy's scalars and arrays as Python's own."""
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"it holds {type_phrase(value)}")


def _write_dataset(dataset: Any, folder: Path, key: str) -> Path:
    import datasets

    if isinstance(dataset, Mapping):
        splits = ", ".join(map(str, dataset))
        raise DataError(f"{key}: {type_phrase(dataset)} has several splits ({splits}). Give one: dataset[SPLIT].")
    if not isinstance(dataset, datasets.Dataset):
        raise DataError(
            f"{key}: {type_phrase(dataset)} is read as a stream and has no length. Give a datasets.Dataset, a list "
            "of rows, or the path of a file."
        )
    if len(dataset) == 0:
        raise DataError(f"{key}: the dataset has no rows. Check its split and filters.")

    def write(stream: BinaryIO) -> None:
        from pyarrow.parquet import ParquetWriter

        tables = dataset.with_format("arrow").iter(batch_size=_ROWS_PER_GROUP)
        first = next(tables)
        with ParquetWriter(stream, first.schema) as writer:
            writer.write_table(first)
            for table in tables:
                writer.write_table(table.cast(first.schema))

    return _stored(folder, f"-{key}.parquet", write)


def _stored(folder: Path, suffix: str, write: Callable[[BinaryIO], None]) -> Path:
    """Writes beside the final place and renames: a crash leaves no half file under its name."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".rows-", suffix=suffix)
        try:
            with os.fdopen(descriptor, "w+b") as stream:
                write(stream)
                stream.flush()
                stream.seek(0)
                digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
            target = folder / f"rows-{digest}{suffix}"
            if not target.exists():
                os.chmod(temporary, 0o644)
                os.replace(temporary, target)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"rows cannot be written to {folder} ({error.strerror or error}). Use another one.") from error
    return target


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
