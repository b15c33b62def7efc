# SPDX-License-Identifier: Apache-2.0
"""Lets ranks that fail agree whether all of them failed after the same step, so that they can save it together.

They agree through files. A collective would not do: a rank that did not fail waits in another one."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

_FOLDER = ".failing-"
# Ranks fail together within milliseconds where the cause is the same (a row, a plug-in), and never where it is not.
_OTHERS_S, _DECISION_S = 5.0, 10.0
_LOOK_S = 0.02


def forget_failures(run: Path) -> None:
    """Removes what an earlier failure left in the run's folder."""
    for folder in run.glob(f"{_FOLDER}*"):
        shutil.rmtree(folder, ignore_errors=True)


def all_failed_after(
    step: int, run: Path, *, rank: int, world: int, attempt: int, is_ended: Callable[[], bool] = lambda: False
) -> bool:
    """Whether every rank of this attempt failed after this step. Rank 0 decides for all. Waits at most 10 s.
    `is_ended`: whether this rank is being ended, because another one is gone; it then waits no longer."""
    if world == 1:
        return True
    folder = run / f"{_FOLDER}{attempt}"
    folder.mkdir(exist_ok=True)
    notes = [folder / f"rank-{each}-after-{step}" for each in range(world)]
    decision = folder / f"save-{step}"
    notes[rank].touch()
    if rank == 0:
        agreed = _comes(lambda: all(note.exists() for note in notes), _OTHERS_S, is_ended)
        if agreed:
            decision.touch()
        return agreed
    agreed = _comes(decision.exists, _DECISION_S, is_ended)
    if not agreed:
        notes[rank].unlink(missing_ok=True)
    return agreed


def _comes(is_there: Callable[[], bool], limit_s: float, is_ended: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + limit_s
    while not is_there():
        if time.monotonic() > deadline or is_ended():
            return False
        time.sleep(_LOOK_S)
    return True
