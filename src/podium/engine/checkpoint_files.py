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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from podium.errors import CheckpointError

_FORMAT = 1
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


class SavedCheckpoint:
    """One complete checkpoint, verified file by file."""

    def __init__(self, folder: Path, *, verify: bool = True) -> None:
        self.folder = folder
        self.record = read_json(folder / "checkpoint.json")
        if self.record.get("format") != _FORMAT:
            raise CheckpointError(
                f"{folder} has format {self.record.get('format')}; this Podium reads format {_FORMAT}."
            )
        self._indexes = [read_json(folder / f"rank-{rank:05d}.json") for rank in range(self.record["ranks"])]
        if verify:
            self._verify()

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

    def _verify(self) -> None:
        expected = {**self.record["files"]}
        for index in self._indexes:
            expected.update(index["files"])
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
        "files": {arrays.name: fingerprint(arrays)},
    }
    write_json(partial / "checkpoint.json", record)
    _flush_folder(partial)
    final = folder / f"step-{step:08d}"
    if final.exists():  # the same step saved again after a resume
        shutil.rmtree(final)
    os.replace(partial, final)
    _flush_folder(folder)


def saved_steps(folder: Path) -> list[SavedStep]:
    """Complete checkpoints, oldest first. Partial ones are not listed: they never became checkpoints."""
    steps = []
    for path in sorted(path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()):
        loss = None
        with contextlib.suppress(CheckpointError):  # a damaged one is listed, and detected when it is opened
            loss = read_json(path / "checkpoint.json").get("heldout_loss")
        steps.append(SavedStep(step=int(path.name.removeprefix("step-")), folder=path, heldout_loss=loss))
    return steps


def set_aside_later(folder: Path, step: int) -> list[int]:
    """Renames the checkpoints after `step` when a run continues from that step, so that none of them counts as newest.
    They are kept until the run has reached the same step again."""
    later = [each for each in saved_steps(folder) if each.step > step]
    for each in later:
        aside = folder / f"{SUPERSEDED}{each.step:08d}"
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(each.folder, aside)
    return [each.step for each in later]


def best_step(saved: Sequence[SavedStep]) -> SavedStep | None:
    """The step with the lowest held-out loss, the newer of two equals."""
    scored = [each for each in saved if each.heldout_loss is not None and math.isfinite(each.heldout_loss)]
    return min(scored, key=lambda each: (each.heldout_loss, -each.step)) if scored else None


def to_remove(saved: Sequence[SavedStep], *, keep: int, keep_best: bool) -> list[SavedStep]:
    """All steps but the newest `keep` and, if requested, the best; pure."""
    kept_steps = {each.step for each in list(saved)[-keep:]}
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
