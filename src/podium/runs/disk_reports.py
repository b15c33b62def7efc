# SPDX-License-Identifier: Apache-2.0
"""What a run says about faults of the disk: once when a file cannot be written, once when it can again; and why a
checkpoint is missing."""

from __future__ import annotations

from pathlib import Path

from podium.disk import free_bytes, size_text
from podium.engine.checkpoint_files import SaveFailure
from podium.errors import CheckpointError, counted
from podium.observe import Console


class ConsoleDiskReports:
    """Warns on the console of a run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._failing: dict[Path, str] = {}

    def cannot_write(self, path: Path, fault: str) -> None:
        """Warns if the file has not failed for this reason already."""
        if self._failing.get(path) == fault:
            return
        self._failing[path] = fault
        free = free_bytes(path)
        room = "" if free is None else f" ({size_text(free)} free)"
        self._console.warning(
            f"{path} cannot be written: {fault}{room}. The run goes on and keeps what belongs there in memory; it is "
            "written as soon as that is possible. Make room on that disk, or repair it."
        )

    def writes_again(self, path: Path, num_lost: int = 0) -> None:
        """Notes that the file is complete again."""
        if self._failing.pop(path, None) is not None:
            lost = f", but for {counted(num_lost, 'line')} for which there was no memory" if num_lost else ""
            self._console.note(f"{path} can be written again and has everything that waited{lost}")


def save_failure_text(failure: SaveFailure, *, newest: int | None) -> str:
    """What failed, where, how much room it needs, and what is left. `newest`: the step of the newest whole
    checkpoint."""
    room = ""
    if failure.needed_bytes:
        free = "" if failure.free_bytes is None else f", and {size_text(failure.free_bytes)} is free"
        room = f" It needs {size_text(failure.needed_bytes)} in {failure.folder}{free}."
    whole = (
        "There is no other checkpoint." if newest is None else f"The newest whole checkpoint is that of step {newest}."
    )
    return f"the checkpoint of step {failure.step} cannot be written: {failure.reason}.{room} {whole}"


def last_save_error(failure: SaveFailure, *, newest: int | None) -> CheckpointError:
    """The error of a run whose last step cannot be saved, so that its work is lost."""
    return CheckpointError(f"{save_failure_text(failure, newest=newest)} {ADVICE}")


ADVICE = "Make room on that disk; older runs and exports may be removed, and checkpoint.keep may be lowered."
