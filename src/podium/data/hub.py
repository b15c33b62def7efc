# SPDX-License-Identifier: Apache-2.0
"""Hugging Face datasets, from a saved folder or the hub, through the optional package `datasets`."""

from __future__ import annotations

import importlib.util
import json
import os
from typing import Any

from podium.data.null_fields import NullFields
from podium.data.rows import Row
from podium.data.storage import open_binary
from podium.errors import DataError, MissingExtraError
from podium.recipe.schema import SourceSection

_ROWS_PER_BLOCK = 4096


class DatasetsSource:
    """A Hugging Face dataset of known length; blocks are ranges of its rows, read from memory-mapped files."""

    def __init__(self, name: str, dataset: Any) -> None:
        self.name = name
        self._dataset = dataset
        self._nulls = NullFields(name)

    @property
    def note(self) -> str | None:
        """What reading changed in the rows so far."""
        return self._nulls.note

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return -(-len(self._dataset) // _ROWS_PER_BLOCK)

    def read_block(self, index: int) -> list[Row]:
        """The rows of one block."""
        begin = index * _ROWS_PER_BLOCK
        columns: dict[str, list[Any]] = self._dataset[begin : begin + _ROWS_PER_BLOCK]
        names = list(columns)
        rows = []
        for offset, values in enumerate(zip(*columns.values(), strict=True)):
            place = f"{self.name}, row {begin + offset + 1}"
            rows.append(Row(self._nulls.without(dict(zip(names, values, strict=True)), place), place))
        return rows

    def fingerprint(self) -> str:
        """The library's own fingerprint, with the number of rows."""
        return f"{self._dataset._fingerprint}-{len(self._dataset)}"


def is_saved_dataset(folder: str) -> bool:
    """Whether a local folder was written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    folder = os.path.expanduser(folder)
    marks = ("dataset_dict.json", "state.json")
    return any(os.path.isfile(os.path.join(folder, mark)) for mark in marks)


def open_dataset(section: SourceSection, key: str) -> DatasetsSource:
    """Opens a saved folder, or a hub id (`owner/name`, or `owner/name:config`)."""
    require_datasets(section, key)
    import datasets

    folder = os.path.expanduser(section.path)
    try:
        if os.path.isdir(folder):
            loaded = datasets.load_from_disk(folder) if is_saved_dataset(folder) else None
            dataset = datasets.load_dataset(folder, split=section.split) if loaded is None else loaded
        else:
            name, _, config = section.path.partition(":")
            dataset = datasets.load_dataset(name, config or None, split=section.split)
    except Exception as error:  # builders of `datasets` and the network raise errors of any type
        raise DataError(
            f"{key}: there is no file or folder {section.path}, and as a Hugging Face dataset with split "
            f"{section.split!r} it cannot be loaded ({type(error).__name__}: {error}). Check the path, the id "
            f"(owner/name or owner/name:config), {key}.split, and the network."
        ) from error
    if isinstance(dataset, datasets.DatasetDict):
        if section.split not in dataset:
            listed = ", ".join(str(split) for split in dataset)
            raise DataError(f"{key}.split: {section.path} has no split {section.split!r}. It has: {listed}.")
        dataset = dataset[section.split]
    if len(dataset) == 0:
        raise DataError(f"{key}: {section.path}, split {section.split!r}, has no rows. Choose another split or source.")
    return DatasetsSource(section.path, dataset)


def require_datasets(section: SourceSection, key: str) -> None:
    """Raises an error unless the package `datasets` is installed; does not import it."""
    if importlib.util.find_spec("datasets") is None:
        raise MissingExtraError(
            f"{key}: {section.path} is a Hugging Face dataset, and the package `datasets` is not installed. "
            "Run `pip install podium[datasets]`, or give a JSONL, Parquet or CSV file."
        )


def first_saved_row(section: SourceSection, key: str) -> Row | None:
    """The first row of a saved folder, read with pyarrow alone; None when it has no rows."""
    import pyarrow

    folder = os.path.expanduser(section.path)
    if os.path.isfile(os.path.join(folder, "dataset_dict.json")):
        folder = os.path.join(folder, section.split)
        if not os.path.isdir(folder):
            raise DataError(f"{key}.split: {section.path} has no split {section.split!r}.")
    try:
        with open_binary(os.path.join(folder, "state.json")) as stream:
            names = [entry["filename"] for entry in json.load(stream)["_data_files"]]
        for name in names:
            with pyarrow.memory_map(os.path.join(folder, name)) as stream, pyarrow.ipc.open_stream(stream) as batches:
                for batch in batches:
                    if batch.num_rows:
                        place = f"{section.path}, row 1"
                        return Row(NullFields(section.path).without(batch.slice(0, 1).to_pylist()[0], place), place)
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        raise DataError(
            f"{key}: {section.path} is not a whole datasets folder ({error}). Save it again with save_to_disk."
        ) from error
    return None
