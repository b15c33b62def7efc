# SPDX-License-Identifier: Apache-2.0
"""Records what every step is trained on, so that its update can run again: tokens, log-probs, versions and rewards.

The controller holds references to rows. Recording copies the rows out of the object store in a thread, while the policy
learns from them, and writes the file while the next step runs."""

# N episodes · K rewards of turns

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podium.cluster import RowRefs, Stored
from podium.cluster.blocking import in_thread
from podium.controller.ledger import GroupRecord
from podium.controller.open_groups import SampledStep
from podium.data.prefixes import RowPrefixes
from podium.data.tasks import Task
from podium.data.trajectories import TrajectoryBlock, TrajectoryId, TrajectoryIds
from podium.disk import disk_fault, size_text
from podium.errors import RunFolderError
from podium.roles.blocks import empty_block
from podium.roles.carriers import EpisodeNote, TurnRewards
from podium.roles.stages import GradedRollouts, Rollouts
from podium.runs.step_files import NO_DIGEST, StepFile, write_step

Arrays = dict[str, NDArray[Any]]
Store = Callable[[TrajectoryBlock], Stored[TrajectoryBlock]]
Tasks = Callable[[Iterable[int]], Mapping[int, Task]]

# Of steps that wait in memory for a disk that can be written again. They cannot be dropped.
_MOST_WAITING_BYTES = 4 << 30
_BLOCK = ("tokens_T", "loss_mask_T", "behavior_logprobs_T", "versions_T")
# Only of a mixture whose routers are replayed; only where episodes have several sequences.
_OPTIONAL = ("experts_TLK", "starts_T")
_NOTE = ("finish_N", "sampled_N", "trained_N", "turns_N", "version_N", "newest_version_N", "environment_N")
_TURNS = ("row_K", "token_K", "reward_K")
_REWARDS = ("rewards_N", "values_NR", "shaping_N")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedStep:
    """What a step was trained on, as it was recorded."""

    step: SampledStep
    more: tuple[GradedRollouts, ...]  # what the program sampled beside, in order
    groups: tuple[GroupRecord, ...]  # those that ended with the step


class StepRecorder:
    """Only the controller's single task uses it. `digest` is that of the last file before the run begins."""

    def __init__(self, folder: Path, *, is_on: bool, digest: str | None) -> None:
        self._folder, self._is_on = folder, is_on
        self._digest = digest or NO_DIGEST
        self._reading: list[asyncio.Task[tuple[Arrays, dict[str, Any]]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._waiting: deque[StepFile] = deque()  # committed and not written
        self.fault: str | None = None  # of the disk, since when files wait

    def begin(self, step: SampledStep) -> None:
        """Starts to copy the rows of a step."""
        if self._is_on:
            assert not self._reading, "the step before is committed"
            is_trained_N = step.sampled.rollouts.rows.ids.positions_of(step.episodes.rollouts.rows.ids)
            self._reading.append(asyncio.create_task(in_thread(_pack_step, step.sampled, is_trained_N)))

    def add(self, more: GradedRollouts) -> None:
        """Starts to copy rows that the program sampled for the step beside its groups."""
        if self._is_on:
            self._reading.append(asyncio.create_task(in_thread(_pack, more, f"more.{len(self._reading)}")))

    async def commit(self, step: int, *, version: int, groups: Sequence[GroupRecord]) -> None:
        """Waits until the rows are copied, then begins to write the step's file."""
        if not self._is_on:
            return
        packed = await asyncio.gather(*self._reading)
        self._reading.clear()
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing
        file = StepFile(
            step=step,
            arrays={name: array for arrays, _ in packed for name, array in arrays.items()},
            values={
                "version": version,  # of the weights after the step
                "groups": [astuple(each) for each in groups],
                "parts": [values for _, values in packed],
            },
        )
        self._waiting.append(file)
        self._begin_writing()

    async def written(self) -> str | None:
        """Waits until all committed steps are written. Returns the digest of the last; None: nothing is recorded. If
        `fault` is not None afterwards, the disk did not take all of them: the next call tries again."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing
        if self._waiting:
            await in_thread(self._write_waiting)
        return self._digest if self._is_on else None

    def _begin_writing(self) -> None:
        self._writing = asyncio.create_task(in_thread(self._write_waiting))

    def _write_waiting(self) -> None:
        """Writes the files that wait, in order: each has the digest of the one before it."""
        try:
            while self._waiting:
                self._digest = write_step(self._folder, self._waiting[0], self._digest)
                self._waiting.popleft()
            self.fault = None
        except OSError as error:
            self.fault = disk_fault(error)
            if self.fault is None:
                raise
            waiting = sum(array.nbytes for file in self._waiting for array in file.arrays.values())
            if waiting > _MOST_WAITING_BYTES:
                raise RunFolderError(
                    f"{self._folder} cannot be written: {self.fault}. The records of {len(self._waiting)} steps wait "
                    f"in memory ({size_text(waiting)}), and there is no room for more. Make room, or repair the disk, "
                    "and continue from the newest checkpoint."
                ) from error

    async def close(self) -> None:
        """Gives up the step that is not committed, and waits for the others."""
        for reading in self._reading:
            reading.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)
        self._reading.clear()
        await self.written()


def recorded_step(file: StepFile, tasks: Tasks, store: Store) -> RecordedStep:
    """The step of a file. `store` puts rows where the workers can read them."""
    first, *more = file.values["parts"]
    sampled = _unpacked(file.arrays, "sampled", first, tasks, store)
    trained, positions = sampled, file.arrays["trained_positions"]
    if len(positions) != len(sampled):
        trained = sampled.take(positions)
    return RecordedStep(
        step=SampledStep(sampled=sampled, episodes=trained),
        more=tuple(
            _unpacked(file.arrays, f"more.{number}", values, tasks, store) for number, values in enumerate(more, 1)
        ),
        groups=tuple(_group(row) for row in file.values["groups"]),
    )


def _group(row: Sequence[Any]) -> GroupRecord:
    return GroupRecord(**dict(zip(GroupRecord.__dataclass_fields__, row, strict=True)))


# --- to arrays and values ---


def _pack_step(sampled: GradedRollouts, trained_positions: NDArray[np.int64]) -> tuple[Arrays, dict[str, Any]]:
    arrays, values = _pack(sampled, "sampled")
    return {**arrays, "trained_positions": trained_positions}, values


def _pack(graded: GradedRollouts, name: str) -> tuple[Arrays, dict[str, Any]]:
    arrays, values = _pack_rollouts(graded.rollouts, name)
    arrays |= {f"{name}.{column}": np.array(getattr(graded, column)) for column in _REWARDS}
    arrays[f"{name}.failed"] = TrajectoryIds.of(sorted(graded.failed)).array_N4
    left_out = []
    for number, part in enumerate(graded.left_out):
        part_arrays, part_values = _pack_rollouts(part, f"{name}.left_out.{number}")
        arrays |= part_arrays
        left_out.append(part_values)
    values |= {
        "names": graded.names,
        "num_failed": graded.num_failed,
        "num_dropped": graded.num_dropped,
        "first_error": graded.first_error,
        "extras": dict(graded.extras),
        "left_out": left_out,
    }
    return arrays, values


def _pack_rollouts(rollouts: Rollouts, name: str) -> tuple[Arrays, dict[str, Any]]:
    """Arrays are copies: what they are read from may be freed before they are written."""
    note, rows = rollouts.note, rollouts.rows
    block = rows.read() if len(rows) else empty_block()
    arrays = {f"{name}.ids": np.array(block.ids.array_N4), f"{name}.offsets": np.array(block.offsets)}
    arrays |= {f"{name}.{column}": np.array(getattr(block, column)) for column in _BLOCK}
    optional = {column: getattr(block, column) for column in _OPTIONAL}
    arrays |= {f"{name}.{column}": np.array(values) for column, values in optional.items() if values is not None}
    arrays |= {f"{name}.note.{column}": np.array(getattr(note, column)) for column in _NOTE}
    arrays |= {f"{name}.turns.{column}": np.array(getattr(note.turn_rewards, column)) for column in _TURNS}
    if note.turn_rewards.parent_K is not None:
        arrays[f"{name}.turns.parent_K"] = np.array(note.turn_rewards.parent_K)
    arrays |= {f"{name}.counts.{number}": np.array(each) for number, each in enumerate(note.counts.values())}
    return arrays, {
        "step": rollouts.step,
        "version": rollouts.version,
        "metrics": dict(rollouts.metrics),
        "errors": [[row, error] for row, error in note.errors.items()],
        "counts": list(note.counts),
        "warnings": note.warnings,
    }


# --- and back ---


def _unpacked(
    arrays: Mapping[str, NDArray[Any]], name: str, values: Mapping[str, Any], tasks: Tasks, store: Store
) -> GradedRollouts:
    columns = {column: arrays[f"{name}.{column}"] for column in _REWARDS}
    return GradedRollouts(
        rollouts=_unpacked_rollouts(arrays, name, values, tasks, store),
        **columns,
        names=tuple(values["names"]),
        num_failed=values["num_failed"],
        num_dropped=values["num_dropped"],
        first_error=values["first_error"],
        extras={key: (total, count) for key, (total, count) in values["extras"].items()},
        left_out=tuple(
            _unpacked_rollouts(arrays, f"{name}.left_out.{number}", part, tasks, store)
            for number, part in enumerate(values["left_out"])
        ),
        failed=frozenset(TrajectoryId(*row) for row in arrays[f"{name}.failed"].tolist()),
    )


def _unpacked_rollouts(
    arrays: Mapping[str, NDArray[Any]], name: str, values: Mapping[str, Any], tasks: Tasks, store: Store
) -> Rollouts:
    ids = TrajectoryIds(arrays[f"{name}.ids"])
    block = TrajectoryBlock(
        ids=ids, offsets=arrays[f"{name}.offsets"], **{column: arrays[f"{name}.{column}"] for column in _BLOCK},
        experts_TLK=arrays.get(f"{name}.experts_TLK"), starts_T=arrays.get(f"{name}.starts_T"),
    )  # fmt: skip
    note = EpisodeNote(
        **{column: arrays[f"{name}.note.{column}"] for column in _NOTE},
        turn_rewards=TurnRewards(
            **{column: arrays[f"{name}.turns.{column}"] for column in _TURNS},
            parent_K=arrays.get(f"{name}.turns.parent_K"),
        ),
        errors=dict(values["errors"]),
        counts={key: arrays[f"{name}.counts.{number}"] for number, key in enumerate(values["counts"])},
        warnings=tuple(values["warnings"]),
        prefixes=RowPrefixes.of(block),
    )
    return Rollouts(
        step=values["step"],
        version=values["version"],
        rows=RowRefs.whole(store(block), ids, block.lengths_N) if len(ids) else RowRefs.join([]),
        note=note,
        tasks=tasks(np.unique(ids.array_N4[:, 0]).tolist()),
        metrics=values["metrics"],
    )
