# SPDX-License-Identifier: Apache-2.0
"""The files of checkpoints beside their tensors: which steps are saved, their records, and whether they are whole. The
layout is described in checkpoint.py. Torch-free: the controller reads and lists checkpoints."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import load_file, save_file

from podium.errors import CheckpointError

# 2: checkpoint.json has a checksum of itself, and of the indexes of all ranks.
_FORMAT, _OLDER_FORMATS = 2, (1,)
_RECORD = "checkpoint.json"
PARTIAL = ".partial-"
SUPERSEDED = ".superseded-"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extras:
    """Values saved once that are the same on every rank: JSON values and arrays (the data position, for instance)."""

    values: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStep:
    """A complete checkpoint on disk."""

    step: int
    folder: Path
    heldout_loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailure:
    """A checkpoint that could not be written because of the disk. It may be tried again."""

    step: int
    folder: Path
    reason: str
    needed_bytes: int = 0  # of all ranks as far as they are known
    free_bytes: int | None = None
    is_consequence: bool = False  # of the failure of another rank


SaveState = Literal["idle", "writing", "written"] | SaveFailure
"""How far the save of a writer is."""


def joined_state(states: Sequence[SaveState]) -> SaveState:
    """The state of a save from those of all ranks. A failure counts first, and that of the rank where it began."""
    failures = [each for each in states if isinstance(each, SaveFailure)]
    if failures:
        first = min(failures, key=lambda each: each.is_consequence)
        needed = [each.needed_bytes for each in failures]
        # Ranks hold about equal parts.
        return replace(first, needed_bytes=sum(needed) * len(states) // len(needed))
    for state in ("writing", "written"):
        if state in states:
            return state
    return "idle"


class SavedCheckpoint:
    """One complete checkpoint, verified file by file."""

    def __init__(self, folder: Path, *, verify: bool = True, ranks: Sequence[int] | None = None) -> None:
        """`ranks`: whose files are read; by default, those of all ranks that wrote it."""
        self.folder = folder
        self.record = read_json(folder / _RECORD)
        if self.record.get("format") not in (_FORMAT, *_OLDER_FORMATS):
            raise CheckpointError(
                f"{folder} has format {self.record.get('format')}; this Podium reads format {_FORMAT}."
            )
        is_whole = self.record["format"] in _OLDER_FORMATS or self.record.get("checksum") == _checksum(self.record)
        if verify and not is_whole:
            raise CheckpointError(f"{folder / _RECORD} is damaged: it is not what its checksum says.")
        self._ranks = tuple(range(self.record["ranks"]) if ranks is None else ranks)
        names = [f"rank-{rank:05d}.json" for rank in self._ranks]
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise CheckpointError(f"{folder / missing[0]} is missing, so the checkpoint is incomplete.")
        if verify:
            written = self.record["files"]
            self._verify({name: written[name] for name in written if name in names or not name.startswith("rank-")})
        self._indexes = [read_json(folder / name) for name in names]
        if verify:
            self._verify({name: written for index in self._indexes for name, written in index["files"].items()})

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        return int(self.record["step"])

    @property
    def values(self) -> Mapping[str, Any]:
        """Values that were saved beside the tensors, without arrays."""
        values: Mapping[str, Any] = self.record["extras"]
        return values

    def extras(self) -> Extras:
        """Values and arrays that were saved beside the tensors."""
        return Extras(values=self.record["extras"], arrays=load_file(self.folder / "extras.safetensors"))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The full shape of each saved tensor."""
        return {name: tuple(part["shape"]) for index in self._indexes for name, part in index["pieces"].items()}

    def _verify(self, expected: Mapping[str, Mapping[str, int]]) -> None:
        with ThreadPoolExecutor(8) as pool:
            actual_files = list(pool.map(lambda name: fingerprint(self.folder / name), expected))
        for (name, wanted), actual in zip(expected.items(), actual_files, strict=True):
            if actual != wanted:
                raise CheckpointError(
                    f"{self.folder / name} is damaged: {actual['bytes']} bytes with checksum {actual['crc32']}, "
                    f"written were {wanted['bytes']} bytes with checksum {wanted['crc32']}."
                )


def complete(
    folder: Path, partial: Path, step: int, extras: Extras, *, ranks: int, heldout_loss: float | None = None
) -> None:
    """Makes a partial checkpoint, which all ranks have written, the checkpoint of its step."""
    arrays = partial / "extras.safetensors"
    save_file(dict(extras.arrays), arrays)
    flush(arrays)
    record = {
        "format": _FORMAT,
        "step": step,
        "ranks": ranks,
        "heldout_loss": heldout_loss,
        "extras": extras.values,
        "files": {path.name: fingerprint(path) for path in (arrays, *sorted(partial.glob("rank-*.json")))},
    }
    _write_record(partial / _RECORD, record)
    _flush_folder(partial)
    final, aside = folder / f"step-{step:08d}", folder / f"{SUPERSEDED}{step:08d}"
    if final.exists():  # the same step saved again after a resume: the old one is removed when the new one is in place
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(final, aside)
    os.replace(partial, final)
    _flush_folder(folder)
    shutil.rmtree(aside, ignore_errors=True)


def record_loss(folder: Path, step: int, heldout_loss: float) -> None:
    """Records the held-out loss of a saved step in its checkpoint."""
    path = folder / f"step-{step:08d}" / _RECORD
    _write_record(path, {**read_json(path), "heldout_loss": heldout_loss})


def _write_record(path: Path, record: Mapping[str, Any]) -> None:
    values = json.loads(json.dumps(record))  # as it is read again: keys are texts
    write_json(path, {**values, "checksum": _checksum(values)})


def _checksum(record: Mapping[str, Any]) -> int:
    """Of all values of checkpoint.json but the checksum itself."""
    values = {name: value for name, value in record.items() if name != "checksum"}
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def saved_steps(folder: Path) -> list[SavedStep]:
    """Complete checkpoints, oldest first. Partial ones are not listed: they never became checkpoints."""
    steps = []
    for path in sorted(path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()):
        loss = None
        with contextlib.suppress(CheckpointError):  # a damaged one is listed, and detected when it is opened
            loss = read_json(path / _RECORD).get("heldout_loss")
        steps.append(SavedStep(step=int(path.name.removeprefix("step-")), folder=path, heldout_loss=loss))
    return steps


def newest_whole(folders: Sequence[Path], *, after: int = 0, reads_tensors: bool = True) -> int | None:
    """The newest step after `after` of which every folder has a whole checkpoint; None if there is none. Reads all
    bytes of that step and of damaged later ones, and nothing of older ones. `reads_tensors`: without, damaged tensors
    are not detected."""
    steps = set.intersection(*({each.step for each in saved_steps(folder)} for folder in folders))
    for step in sorted((each for each in steps if each > after), reverse=True):
        with contextlib.suppress(CheckpointError, OSError):  # a disk may also refuse to read it
            for folder in folders:
                SavedCheckpoint(folder / f"step-{step:08d}", ranks=None if reads_tensors else ())
            return step
    return None


def set_aside_later(folder: Path, step: int) -> list[int]:
    """Renames the checkpoints after `step` when a run continues from that step, so that none of them counts as newest.
    They are kept until the run has reached the same step again."""
    later = [each for each in saved_steps(folder) if each.step > step]
    for each in later:
        aside = folder / f"{SUPERSEDED}{each.step:08d}"
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(each.folder, aside)
    return [each.step for each in later]


def bring_back(folder: Path, steps: Sequence[int]) -> None:
    """Undoes `set_aside_later`, which returned these steps, for a run that could not begin."""
    for step in steps:
        os.replace(folder / f"{SUPERSEDED}{step:08d}", folder / f"step-{step:08d}")


def best_step(saved: Sequence[SavedStep]) -> SavedStep | None:
    """The step with the lowest held-out loss, the newer of two equals."""
    scored = [each for each in saved if each.heldout_loss is not None and math.isfinite(each.heldout_loss)]
    return min(scored, key=lambda each: (each.heldout_loss, -each.step)) if scored else None


def to_remove(saved: Sequence[SavedStep], *, keep: int, keep_best: bool, resumed: int | None = None) -> list[SavedStep]:
    """All steps but the newest `keep`, the one that the run was resumed from (`resumed`) and, if requested, the best;
    pure."""
    kept_steps = {each.step for each in list(saved)[-keep:]} | {resumed}
    best = best_step(saved) if keep_best else None
    if best is not None:
        kept_steps.add(best.step)
    return [each for each in saved if each.step not in kept_steps]


def fingerprint(path: Path) -> dict[str, int]:
    """Size and checksum of a file."""
    try:
        checksum = size = 0
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                checksum, size = zlib.crc32(chunk, checksum), size + len(chunk)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing.") from error
    return {"bytes": size, "crc32": checksum}


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes the file whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(values), encoding="utf-8")
    flush(temporary)
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any]:
    """A file of a checkpoint. A missing or damaged one is a CheckpointError."""
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing, so the checkpoint is incomplete.") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}).") from error
    return values


def flush(path: Path) -> None:
    """Waits until the file is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
