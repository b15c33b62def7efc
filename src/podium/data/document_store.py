# SPDX-License-Identifier: Apache-2.0
"""Numbers computed once per document and kept on disk, looked up by the document's content.

Layout of the folder: `part-00000.json` names the files of a finished part and is written last, so that an interrupted
pass continues after its last part. `complete.json` marks a complete store. Safetensors and JSON only."""

# D documents of a part · N numbers of it: one for each document, or one for each trained token

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from podium.data.documents import Document
from podium.errors import DataError, RunFolderError

_COMPLETE = "complete.json"
# Arrays of a part that are not columns.
_KEYS, _OFFSETS = "keys", "offsets"

Columns = Mapping[str, NDArray[Any]]


def document_key(document: Document) -> tuple[int, int]:
    """A 128-bit key of the document's tokens and of which are trained."""
    digest = hashlib.blake2b(document.tokens.astype(np.int32).tobytes(), digest_size=16)
    digest.update(document.trained.tobytes())
    high, low = np.frombuffer(digest.digest(), np.uint64).tolist()
    return high, low


@dataclass(frozen=True, slots=True)
class _DocumentLocation:
    file: str
    start: int
    stop: int


class DocumentStore:
    """Opened on every rank; each rank writes its own files. Columns are read from disk on demand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[tuple[int, int], _DocumentLocation] = {}
        self._open_files: dict[str, Any] = {}
        self._num_parts = 0
        while (self.folder / f"part-{self._num_parts:05d}.json").is_file():
            self._take_in(self._num_parts)
            self._num_parts += 1

    @property
    def is_complete(self) -> bool:
        """Whether every part has been written."""
        return (self.folder / _COMPLETE).is_file()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: tuple[int, int]) -> bool:
        return key in self._places

    def read(self, document: Document) -> dict[str, NDArray[Any]]:
        """The document's numbers, column by column."""
        place = self._places.get(document_key(document))
        if place is None:
            raise DataError(
                f"{self.folder} has nothing about a document that is trained on now, so the data changed after it was "
                "computed (a `map` that samples at random does this). Set preference.reference or distill.targets to "
                "live, or remove the folder to have it computed again."
            )
        file = self._opened(place.file)
        names = [name for name in file.keys() if name not in (_KEYS, _OFFSETS)]  # noqa: SIM118 not a mapping
        return {name: file.get_slice(name)[place.start : place.stop] for name in names}

    def write(self, rank: int, documents: Sequence[Document], lengths: Sequence[int], columns: Columns) -> None:
        """Writes this rank's documents of the next part; `lengths`: number of rows of the columns for each of them."""
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        keys = np.array([document_key(document) for document in documents], np.uint64).reshape(-1, 2)
        path = self.folder / self._file_name(self._num_parts, rank)
        # Written by hand: safetensors makes its files private to their owner, and a cache may be shared.
        path.with_suffix(".tmp").write_bytes(save({_KEYS: keys, _OFFSETS: offsets, **columns}))
        os.replace(path.with_suffix(".tmp"), path)

    def finish_part(self, world: int, *, is_main: bool) -> None:
        """Marks the part as finished after all ranks have written. Every rank calls it, behind a barrier."""
        if is_main:
            names = [self._file_name(self._num_parts, rank) for rank in range(world)]
            self._note(f"part-{self._num_parts:05d}.json", {"files": names})
        self._take_in(self._num_parts, [self._file_name(self._num_parts, rank) for rank in range(world)])
        self._num_parts += 1

    def finish(self) -> None:
        """Marks the store as complete; rank 0 only."""
        self._note(_COMPLETE, {"parts": self._num_parts, "documents": len(self)})

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Locks the store: only one run computes it at a time. The system releases the lock when that process ends in
        any way."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / "lock").open("a+")
        except OSError as error:
            raise RunFolderError(
                f"{self.folder} cannot be written ({error.strerror or error}). Name another folder with run.cache."
            ) from error
        with lock as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RunFolderError(
                    f"{self.folder} is being computed by another run right now. Start this one when it is done: it "
                    "will find everything there. Or give this run a cache of its own (run.cache)."
                ) from error
            yield

    def _file_name(self, part: int, rank: int) -> str:
        return f"part-{part:05d}-rank-{rank:05d}.safetensors"

    def _take_in(self, part: int, files: Sequence[str] | None = None) -> None:
        for name in files or self._files_of(part):
            self._open_files.pop(name, None)
            file = self._opened(name)
            keys, offsets = file.get_tensor(_KEYS), file.get_tensor(_OFFSETS).tolist()
            for at, (high, low) in enumerate(keys.tolist()):
                self._places[high, low] = _DocumentLocation(name, offsets[at], offsets[at + 1])

    def _files_of(self, part: int) -> list[str]:
        note = f"part-{part:05d}.json"
        try:
            return list(json.loads((self.folder / note).read_text(encoding="utf-8"))["files"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(note, error) from error

    def _opened(self, name: str) -> Any:
        if name not in self._open_files:
            try:
                self._open_files[name] = safe_open(str(self.folder / name), framework="numpy")
            except (SafetensorError, OSError) as error:
                raise self._damaged(name, error) from error
        return self._open_files[name]

    def _damaged(self, name: str, error: Exception) -> DataError:
        return DataError(
            f"{self.folder / name} cannot be read ({error}). Remove the folder {self.folder} to have it computed again."
        )

    def _note(self, name: str, values: Mapping[str, Any]) -> None:
        temporary = self.folder / f"{name}.tmp"
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(values, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.folder / name)
