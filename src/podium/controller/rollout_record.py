# SPDX-License-Identifier: Apache-2.0
"""Keeps episodes of every step in the run folder, to look at and to compute with.

Rows are copied out of the object store in a thread while the policy learns from them, and the file is written while
the next step runs. Nothing here ends a run: what cannot be kept is said and left out."""

# N episodes · T tokens of all of them

from __future__ import annotations

import asyncio
import copy
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podium.cluster.blocking import in_thread
from podium.controller.open_groups import SampledStep
from podium.controller.rollout_signal import TokenSignal, token_signal, trained_tokens
from podium.controller.step import Step
from podium.data.rows import LinePlace
from podium.data.tasks import Task
from podium.data.trajectories import Ints, TrajectoryBlock, TrajectoryIds
from podium.disk import disk_fault
from podium.environments.episode_texts import EpisodeTexts
from podium.errors import counted
from podium.recipe import OnPolicyRecipe
from podium.roles.carriers import FINISHES
from podium.roles.stages import GradedRollouts, Rollouts, TrainBatch
from podium.runs.log import RunLog
from podium.runs.rollout_files import RolloutColumns, write_rollouts

# Of steps that wait for a disk that can be written again; the oldest are lost first.
_MOST_WAITING_BYTES = 256 << 20
# Another stream than those of the run's own random numbers.
_STREAM = 0x726F6C6C
_ROW = re.compile(r"(?:, (?:line|row) (?P<from_1>\d+)$)|(?:^row (?P<from_0>\d+) of )")
# Numbers of lines are counted in files up to this size.
_MOST_COUNTED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """Episodes that are kept, with their rows. Without `graded`, they were left out for want of a reward."""

    rollouts: Rollouts
    block: TrajectoryBlock
    graded: GradedRollouts | None
    failed: frozenset[Any] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _KeptStep:
    """Everything that the file of a step is made from."""

    step: int
    parts: Sequence[_Part]
    signal: TokenSignal | None
    used: TrajectoryIds
    facts: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(part.block.nbytes for part in self.parts)


class RolloutRecorder:
    """Only the controller's single task uses it. `tokenizer`: of the model; None: files have no texts."""

    def __init__(self, recipe: OnPolicyRecipe, folder: Path, log: RunLog, *, tokenizer: Any, is_on: bool) -> None:
        section = recipe.run.rollouts
        self._recipe, self._folder, self._log, self._section = recipe, folder, log, section
        self._is_on = is_on and section.keep != "none"
        self._tokenizer = tokenizer
        self._texts: EpisodeTexts | None = None
        self._reading: list[asyncio.Task[list[_Part]]] = []
        self._num_kept = 0  # episodes of the step in progress
        self._waiting: deque[_KeptStep] = deque()  # committed and not written
        self._writing: asyncio.Task[None] | None = None
        self._fault: str | None = None  # of the disk, since when files wait
        self._error: Exception | None = None  # another one, that was not told yet
        self._num_lost = 0
        self._has_warned = False

    def begin(self, number: int, step: SampledStep) -> None:
        """Starts to copy episodes of a step."""
        self._num_kept = 0
        self.add(number, step.sampled)

    def add(self, number: int, graded: GradedRollouts) -> None:
        """Starts to copy episodes that the program sampled beside those of the step, as far as there is room."""
        if not self._is_on:
            return
        groups = self._chosen(number, graded)
        if len(groups):
            self._reading.append(asyncio.create_task(in_thread(_read, graded, groups)))

    async def commit(self, step: Step, batch: TrainBatch | None, *, version: int, is_updated: bool) -> None:
        """Waits until the episodes are copied, then begins to write the step's file. `version`: of the weights before
        the update."""
        if not self._is_on:
            return
        self._tell()
        reading, self._reading = self._reading, []
        found = await asyncio.gather(*reading, return_exceptions=True)
        try:
            parts = [part for each in found for part in _or_raise(each)]
            used = (step.episodes if batch is None else batch.graded).rollouts.rows.ids
            signal = None
            if batch is not None and is_updated:
                kept = TrajectoryIds.concatenate([part.block.ids for part in parts])
                kept = kept.take(np.flatnonzero(used.positions_of(kept) >= 0))
                if len(kept):
                    signal = await in_thread(token_signal, batch, kept, self._recipe.full_algorithm)
        except Exception as error:  # for instance: a node is gone with what it held
            self._error = error
            self._tell()
            return
        if not parts:
            return
        facts = {
            "version": version, "lr": step.lr, "kl_coefficient": step.kl_coefficient, "is_updated": is_updated,
            "episodes": len(step.sampled) + step.sampled.num_dropped,
        }  # fmt: skip
        self._waiting.append(_KeptStep(step=step.number, parts=parts, signal=signal, used=used, facts=facts))
        while len(self._waiting) > 1 and sum(each.nbytes for each in self._waiting) > _MOST_WAITING_BYTES:
            self._waiting.popleft()
            self._num_lost += 1
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(in_thread(self._write_waiting))

    async def written(self) -> None:
        """Waits until all committed steps are written, as far as the disk takes them."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing
        if self._waiting:
            await in_thread(self._write_waiting)
        self._tell()

    async def close(self) -> None:
        """Gives up the step that is not committed, and waits for the others."""
        for reading in self._reading:
            reading.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)
        self._reading.clear()
        await self.written()

    def _chosen(self, step: int, graded: GradedRollouts) -> Ints:
        """Prompt indices of the groups to keep."""
        every = np.concatenate([graded.group_N, *(part.group_N for part in graded.left_out)])
        groups, sizes = np.unique(every, return_counts=True)
        if self._section.keep == "all":
            return groups
        order = np.random.default_rng([self._recipe.run.seed, step, _STREAM]).permutation(len(groups))
        chosen: list[int] = []
        for at in order.tolist():
            if self._num_kept and self._num_kept + int(sizes[at]) > self._section.per_step:
                break
            self._num_kept += int(sizes[at])
            chosen.append(at)
        return groups[np.sort(np.array(chosen, np.int64))]

    def _tell(self) -> None:
        """Says on the console what is wrong with the files, and when it is over."""
        reports, error = self._log.disk_reports, self._error
        if self._fault is not None:
            reports.cannot_write(self._folder, self._fault)
        elif not self._waiting:
            reports.writes_again(self._folder)
            if self._num_lost:
                self._log.console.warning(
                    f"{self._folder} lacks {counted(self._num_lost, 'step')}, for which there was no memory while it "
                    "could not be written"
                )
                self._num_lost = 0
        if error is not None:
            self._error = None
            if not self._has_warned:
                self._has_warned = True
                self._log.console.warning(
                    f"episodes cannot be kept in {self._folder} ({type(error).__name__}: {error}). The run goes on "
                    "without them; later failures are not shown."
                )

    def _write_waiting(self) -> None:
        """Writes the steps that wait, in order. Runs in a thread, one at a time."""
        while self._waiting:
            kept = self._waiting[0]
            try:
                write_rollouts(self._folder, self._columns(kept))
            except OSError as error:
                self._fault = disk_fault(error)
                if self._fault is not None:
                    return
                self._error = error
            except Exception as error:  # a tokenizer's, for instance
                self._error = error
            else:
                self._fault = None
            if self._waiting and self._waiting[0] is kept:
                self._waiting.popleft()

    def _columns(self, kept: _KeptStep) -> RolloutColumns:
        if self._texts is None and self._tokenizer is not None:
            # The controller's own tokenizer is in use while this thread runs.
            self._texts = EpisodeTexts(copy.deepcopy(self._tokenizer), has_turns=self._recipe.environment is not None)
        return _columns(kept, self._texts)


def _or_raise(found: list[_Part] | BaseException) -> list[_Part]:
    if isinstance(found, BaseException):
        raise found
    return found


def _read(graded: GradedRollouts, groups: Ints) -> list[_Part]:
    """The rows of whole groups, copied: the store may free them before they are written."""
    chosen = graded.take(np.flatnonzero(np.isin(graded.group_N, groups)))
    parts = []
    if len(chosen):
        parts.append(_Part(rollouts=chosen.rollouts, block=_copied(chosen.rollouts), graded=chosen))
    for rollouts in graded.left_out:
        rollouts = rollouts.take(np.flatnonzero(np.isin(rollouts.group_N, groups)))
        if len(rollouts):
            parts.append(_Part(rollouts=rollouts, block=_copied(rollouts), graded=None, failed=graded.failed))
    return parts


def _copied(rollouts: Rollouts) -> TrajectoryBlock:
    block = rollouts.rows.read()
    return TrajectoryBlock(
        ids=block.ids,
        offsets=block.offsets.copy(),
        tokens_T=block.tokens_T.copy(),
        loss_mask_T=block.loss_mask_T.copy(),
        behavior_logprobs_T=block.behavior_logprobs_T.copy(),
        versions_T=block.versions_T.copy(),
        starts_T=None if block.starts_T is None else block.starts_T.copy(),
    )


def _columns(kept: _KeptStep, texts: EpisodeTexts | None) -> RolloutColumns:
    """Episodes of all parts in order of their ids."""
    block = TrajectoryBlock.concatenate([part.block for part in kept.parts])
    rows = [(part, row) for part in kept.parts for row in range(len(part.rollouts))]
    order = block.ids.order
    block, rows = block.take(order), [rows[at] for at in order.tolist()]
    tasks = [part.rollouts.tasks[id.prompt_index] for (part, _), id in zip(rows, block.ids, strict=True)]
    bounds, sampled_T = block.offsets.tolist(), block.versions_T >= 0
    places = [slice(begin, end) for begin, end in pairwise(bounds)]
    trained_N = kept.used.positions_of(block.ids) >= 0
    messages: list[str | None] = [None] * len(rows)
    if texts is not None:
        messages = [
            texts.of_sequences(
                task, [(block.tokens_T[begin:end], sampled_T[begin:end]) for begin, end in block.sequences(row)]
            )
            for row, task in enumerate(tasks)
        ]
    return RolloutColumns(
        step=kept.step,
        facts=kept.facts,
        group_N=block.ids.array_N4[:, 0],
        sample_N=block.ids.array_N4[:, 1],
        sources=[task.source for task in tasks],
        rows=[_row_number(task) for task in tasks],
        references=[task.reference for task in tasks],
        messages=messages,
        prompt_N=np.array([_first_sampled(sampled_T[place]) for place in places], np.int64),
        offsets=block.offsets,
        tokens_T=block.tokens_T,
        token_texts=None if texts is None else texts.of_tokens(block.tokens_T),
        loss_mask_T=trained_tokens(block),
        sampled_T=sampled_T,
        versions_T=block.versions_T,
        values_T={
            "log_probs": np.where(sampled_T, block.behavior_logprobs_T, np.nan).astype(np.float32),
            **_spread(kept.signal, block),
        },
        rewards_N=np.array([np.nan if part.graded is None else part.graded.rewards_N[row] for part, row in rows]),
        rewards=[_rewards(part, row) for part, row in rows],
        endings=[FINISHES[int(part.rollouts.note.finish_N[row])] for part, row in rows],
        trained_N=trained_N & bool(kept.facts["is_updated"]),
        states=[
            _state(part, row, is_used=is_used) for (part, row), is_used in zip(rows, trained_N.tolist(), strict=True)
        ],
        errors=[part.rollouts.note.errors.get(row) for part, row in rows],
    )


def _spread(signal: TokenSignal | None, block: TrajectoryBlock) -> dict[str, NDArray[np.float32]]:
    """The columns of a signal over all tokens of a block: NaN in other episodes."""
    if signal is None:
        return {}
    rows, bounds = block.ids.positions_of(signal.ids), block.offsets
    places = [np.arange(bounds[row], bounds[row + 1]) for row in rows.tolist()]
    places_T = np.concatenate(places)
    spread = {}
    for name, values_T in signal.columns.items():
        spread[name] = np.full(len(block.tokens_T), np.nan, np.float32)
        spread[name][places_T] = values_T
    return spread


def _first_sampled(sampled_L: NDArray[np.bool_]) -> int:
    return int(np.argmax(sampled_L)) if sampled_L.any() else len(sampled_L)


def _rewards(part: _Part, row: int) -> dict[str, float]:
    """By component: the recipe's rewards before their weights, the environment's, and what shaping adds."""
    named: dict[str, float] = {}
    if part.graded is not None:
        named |= dict(zip(part.graded.names, part.graded.values_NR[row].tolist(), strict=True))
        if part.graded.shaping_N[row]:
            named["overlong"] = float(part.graded.shaping_N[row])
    named["environment"] = float(part.rollouts.note.environment_N[row])
    return {name: value for name, value in named.items() if not np.isnan(value)}


def _state(part: _Part, row: int, *, is_used: bool) -> str:
    """What became of an episode, in the words of the ledger."""
    if part.graded is None:
        return "failed" if part.rollouts.rows.ids[row] in part.failed else "dropped"
    if is_used:
        return "consumed"
    return "uninformative" if part.graded.uniform_N[row] else "surplus"


def _row_number(task: Task) -> int | None:
    """The row of a task in its file, from 0, where that can be told without reading much."""
    place = task.place
    if isinstance(place, LinePlace) and place.byte > _MOST_COUNTED_BYTES:
        return None
    found = _ROW.search(str(place))
    if found is None:
        return None
    return int(found["from_1"]) - 1 if found["from_1"] is not None else int(found["from_0"])
