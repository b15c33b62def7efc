# SPDX-License-Identifier: Apache-2.0
"""Files of recorded steps: arrays and values of one step each, chained by digests. Torch-free, and nothing in a file is
executable: safetensors and JSON.

Each file names the digest of the file before it. A changed byte, a missing file or two files in each other's place are
therefore noticed when the chain is read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from podium.errors import StepRecordError

_FORMAT = 1
_TEMPORARY = ".tmp"
# Before the first file.
NO_DIGEST = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepFile:
    """The content of one file. Values are JSON values."""

    step: int
    arrays: Mapping[str, NDArray[Any]]
    values: Mapping[str, Any]


def step_path(folder: Path, step: int) -> Path:
    """The file of a step."""
    return folder / f"step-{step:06d}.safetensors"


def recorded_steps(folder: Path) -> list[int]:
    """Steps that have a file, in ascending order."""
    names = (path.name.removeprefix("step-").removesuffix(".safetensors") for path in folder.glob("step-*.safetensors"))
    return sorted(int(name) for name in names if name.isdigit())


def write_step(folder: Path, file: StepFile, previous: str) -> str:
    """Writes a step's file, which is complete when it has its name. `previous` is the digest of the file before it.
    Returns its own digest."""
    header = json.dumps({"format": _FORMAT, "step": file.step, "previous": previous, "values": file.values})
    digest = _digest(file.arrays, header)
    folder.mkdir(parents=True, exist_ok=True)
    path = step_path(folder, file.step)
    temporary = path.with_name(path.name + _TEMPORARY)
    with temporary.open("wb") as stream:
        stream.write(save(dict(file.arrays), {"podium": header, "sha256": digest}))
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
    return digest


def read_step(folder: Path, step: int, previous: str) -> tuple[StepFile, str]:
    """Reads a step's file and its digest. Raises an error if the file is missing, is not what was written, or does not
    follow the file with the digest `previous`."""
    path = step_path(folder, step)
    try:
        with safe_open(str(path), framework="np") as opened:
            metadata = opened.metadata() or {}
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        header = metadata["podium"]
        described = json.loads(header)
        stored, number = described["previous"], int(described["step"])
    except FileNotFoundError as error:
        raise _missing(folder, path) from error
    except OSError as error:
        raise StepRecordError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise StepRecordError(f"{path} is damaged: it is not a file of a recorded step ({error}). {_ADVICE}") from error
    digest = _digest(arrays, header)
    if digest != metadata.get("sha256"):
        raise StepRecordError(
            f"{path} was changed after the run wrote it: its content has SHA-256 {digest[:16]}, written was "
            f"{str(metadata.get('sha256'))[:16]}. {_ADVICE}"
        )
    if described.get("format") != _FORMAT:
        raise StepRecordError(f"{path} has format {described.get('format')}; this Podium reads format {_FORMAT}.")
    if number != step:
        raise StepRecordError(f"{path} holds step {number}, not step {step}. {_ADVICE}")
    if stored != previous:
        raise StepRecordError(
            f"{path} does not follow the file of step {step - 1}: it was written after a file with SHA-256 "
            f"{stored[:16] or '(none)'}, and the one that is there has {previous[:16] or '(none)'}. {_ADVICE}"
        )
    return StepFile(step=step, arrays=arrays, values=described["values"]), digest


def verify_steps(folder: Path, last: int, digest: str | None) -> None:
    """Reads all files from step 1 to `last`. Raises an error if one is missing or is not what was written. `digest` is
    that of the last one, from the checkpoint."""
    previous = NO_DIGEST
    for step in range(1, last + 1):
        _, previous = read_step(folder, step, previous)
    if digest is not None and previous != digest:
        raise StepRecordError(
            f"{step_path(folder, last)} is not the file that the run's checkpoint of step {last} names: it has SHA-256 "
            f"{previous[:16] or '(none)'}, and the checkpoint names {digest[:16]}. {_ADVICE}"
        )


def forget_steps_after(folder: Path, step: int) -> None:
    """Removes the files of later steps, and what a killed process left."""
    for later in recorded_steps(folder):
        if later > step:
            step_path(folder, later).unlink()
    for path in folder.glob(f"step-*{_TEMPORARY}"):
        path.unlink()


_ADVICE = "Restore the folder of recorded steps from a copy; without it the run cannot be replayed."


def _missing(folder: Path, path: Path) -> StepRecordError:
    steps = recorded_steps(folder)
    if not steps:
        return StepRecordError(f"{folder} has no recorded steps. {_ADVICE}")
    return StepRecordError(f"{path} is missing: {folder} has {_ranges(steps)}. {_ADVICE}")


def _ranges(steps: Sequence[int]) -> str:
    """Ascending numbers as "steps 1 to 4, 6"."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1].append(step)
        else:
            parts.append([step])
    return "steps " + ", ".join(f"{part[0]} to {part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def _digest(arrays: Mapping[str, NDArray[Any]], header: str) -> str:
    """SHA-256 of the header and of every array with its name, type and shape."""
    content = hashlib.sha256(header.encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        content.update(json.dumps([name, array.dtype.str, array.shape]).encode())
        content.update(array.data.cast("B") if array.size else b"")
    return content.hexdigest()
