# SPDX-License-Identifier: Apache-2.0
"""How episodes are dealt to graders, what becomes of one that dies, and how their answers are joined again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.made_batches import make_answer, make_rollouts
from podium.cluster import MeshShape
from podium.cluster.identity import WorkerId
from podium.cluster.results import Span
from podium.controller.recovery import RecoveryPlan
from podium.controller.replacing import WorkerReplacements
from podium.errors import DeadlineError, WorkerDiedError
from podium.roles.carriers import GradeNote, GraderFacts, GradeShard
from podium.roles.grading_handle import GraderHandle, Rewarded, group_parts, shard_of
from podium.roles.stages import Rollouts
from podium.runs.events import recoveries


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 5))
def test_groups_stay_whole_and_every_row_is_graded_once(groups: list[int], count: int) -> None:
    group_N = np.array(groups, np.int64)

    parts = group_parts(group_N, count)

    assert len(parts) == count
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(groups)))
    owners = [{rank for rank, part in enumerate(parts) if draw in group_N[part]} for draw in set(groups)]
    assert all(len(owner) == 1 for owner in owners)
    sizes = [len(np.unique(group_N[part])) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_shares_are_stretches_of_groups() -> None:
    parts = group_parts(np.array([4, 4, 7, 7, 7, 9]), 2)

    assert [part.tolist() for part in parts] == [[0, 1, 2, 3, 4], [5]]


def test_a_shard_has_the_tasks_of_its_rows_only() -> None:
    rollouts = make_rollouts([make_answer(1, finish="length"), make_answer(2), make_answer(3, finish="cancelled")])

    shard = shard_of(rollouts.take(np.array([0, 2])), show=2)

    assert list(shard.tasks) == [1, 3]
    assert shard.truncated_N.tolist() == [True, True]
    assert [id.prompt_index for id in shard.ids] == [1, 3]
    assert shard.show == 2


# --- the handle, over graders that do as a test says ---

Answer = Callable[[int, GradeShard], GradeNote]


class FakeGraders:
    """Workers and their role in one; keeps account of who was replaced."""

    def __init__(self, count: int, answer: Answer) -> None:
        self.mesh = SimpleNamespace(shape=MeshShape(replica=count))
        self.workers = tuple(WorkerId("graders", rank, "here", "cpu") for rank in range(count))
        self.ended: list[int] = []
        self.recovered: list[str] = []
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.spans: list[Span] = []
        self.lost: list[tuple[str, int]] = []
        self._answer = answer

    def record(self, spans: Sequence[Span]) -> None:
        self.spans += spans

    def record_lost(self, call: str, began_s: float, worker: WorkerId) -> None:
        self.lost.append((call, worker.index))

    def requires(self, *methods: Any) -> None: ...

    def within(self, seconds: float) -> FakeGraders:
        return self

    async def control_one(self, rank: int, method: Any, shard: GradeShard, purpose: str) -> Any:
        return SimpleNamespace(value=self._answer(rank, shard))

    async def end_worker(self, worker: WorkerId) -> None:
        self.ended.append(worker.index)
        raise WorkerDiedError("it is dead already")

    async def recover(self, pool: str) -> None:
        self.recovered.append(pool)


def _draws(rank: int, shard: GradeShard) -> GradeNote:
    """The reward of an episode is its draw, and that of the second reward its grader."""
    draws = shard.ids.array_N4[:, 0].astype(np.float64)
    return GradeNote(
        values_NR=np.stack([draws, np.full(len(draws), rank)], axis=1),
        errors={row: f"draw {int(draw)}" for row, draw in enumerate(draws) if draw == 5},
        extras={"f/size": draws + 1} if rank == 0 else {},
        texts=tuple((f"{int(draw)}?", "!") for draw in draws[: shard.show]),
    )


def _graded(
    count: int, answer: Answer, rewards: tuple[int, ...] = (0, 2), show: int = 0, restarts: int = 1,
    folder: Path | None = None,
) -> tuple[FakeGraders, Rollouts, Rewarded]:  # fmt: skip
    rollouts = make_rollouts([make_answer(draw, sample) for draw in (3, 5, 6, 8) for sample in (0, 1)])
    fake: Any = FakeGraders(count, answer)
    handle = _handle(fake, rewards, restarts, folder)
    return fake, rollouts, asyncio.run(handle.grade(rollouts, show=show))


def _handle(
    fake: Any, rewards: tuple[int, ...] = (0, 2), restarts: int = 1, folder: Path | None = None
) -> GraderHandle:
    replacements = WorkerReplacements(
        RecoveryPlan(restarts), warn=fake.warnings.append, note=fake.notes.append, folder=folder, step=4
    )
    return GraderHandle(fake, fake, rewards, timeout_s=1.0, warn=fake.warnings.append, replacements=replacements)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_answers_of_all_graders_are_in_the_order_of_the_rows(count: int) -> None:
    graders, _, found = _graded(count, _draws, show=3)

    assert found.rewards == (0, 2)
    assert found.values_NR[:, 0].tolist() == [3, 3, 5, 5, 6, 6, 8, 8]
    assert found.errors == {2: "draw 5", 3: "draw 5"}
    (size_N,) = found.extras.values()
    mine = np.isfinite(size_N)  # the rows of the first grader: nobody else gives this number
    assert size_N[mine].tolist() == [4, 4, 6, 6, 7, 7, 9, 9][: int(mine.sum())]
    assert mine.sum() == 2 * -(-4 // min(count, 4))
    assert found.texts == ((0, "3?", "!"), (1, "3?", "!"), (2, "5?", "!"))
    assert len({span.worker for span in graders.spans}) == len(graders.spans) == min(count, 4)


def test_a_grader_that_dies_is_replaced_and_its_share_tried_once_more() -> None:
    calls: list[int] = []

    def answer(rank: int, shard: GradeShard) -> GradeNote:
        calls.append(rank)
        if rank == 1 and calls.count(1) == 1:
            raise WorkerDiedError("grader 1 is gone")
        return _draws(rank, shard)

    fake, _, found = _graded(2, answer)

    assert sorted(calls) == [0, 1, 1]
    assert (fake.ended, fake.recovered) == ([1], ["graders"])
    assert fake.lost == [("grader.grade", 1)]
    assert found.values_NR[:, 0].tolist() == [3, 3, 5, 5, 6, 6, 8, 8]


@pytest.mark.parametrize("error", [WorkerDiedError("it is gone\nstack"), DeadlineError("it is gone")])
def test_a_share_that_fails_twice_has_no_rewards_and_spoils_no_other(error: Exception) -> None:
    def answer(rank: int, shard: GradeShard) -> GradeNote:
        if rank == 1:
            raise error
        return _draws(rank, shard)

    fake, _, found = _graded(2, answer)

    assert found.values_NR[:4, 0].tolist() == [3, 3, 5, 5]
    assert np.isnan(found.values_NR[4:]).all()
    message = "the grader's process failed 2 times: it is gone"
    assert {row: error for row, error in found.errors.items() if row > 3} == dict.fromkeys(range(4, 8), message)
    assert fake.ended == [1, 1]


def test_a_share_is_retried_as_often_as_graders_may_die() -> None:
    """A share may meet several deaths that it has nothing to do with."""
    calls: list[int] = []

    def answer(rank: int, shard: GradeShard) -> GradeNote:
        calls.append(rank)
        if rank == 1 and calls.count(1) <= 3:
            raise WorkerDiedError("grader 1 is gone")
        return _draws(rank, shard)

    fake, _, found = _graded(2, answer, restarts=3)

    assert fake.ended == [1, 1, 1]
    assert found.values_NR[:, 0].tolist() == [3, 3, 5, 5, 6, 6, 8, 8]


def test_a_share_whose_grader_never_answers_is_retried_once() -> None:
    def answer(rank: int, shard: GradeShard) -> GradeNote:
        raise DeadlineError("it hangs")

    fake, _, found = _graded(1, answer, restarts=3)

    assert fake.ended == [0, 0]
    assert np.isnan(found.values_NR).all()


def test_without_restarts_the_first_death_of_a_grader_ends_the_run() -> None:
    def answer(rank: int, shard: GradeShard) -> GradeNote:
        raise WorkerDiedError("grader 0 is gone")

    with pytest.raises(WorkerDiedError, match=r"grader 0 is gone\nThe run ends: placement\.restarts is 0\."):
        _graded(1, answer, restarts=0)


@pytest.mark.parametrize(
    ("restarts", "remedy", "words"),
    [(2, "retry", "graded again"), (1, "give up", "have no reward")],
)
def test_deaths_of_graders_are_said_and_recorded(tmp_path: Path, restarts: int, remedy: str, words: str) -> None:
    failures = iter([WorkerDiedError("grader 0 is gone.\nstack"), WorkerDiedError("grader 0 is gone again.")])

    def answer(rank: int, shard: GradeShard) -> GradeNote:
        if (error := next(failures, None)) is not None:
            raise error
        return _draws(rank, shard)

    fake, _, _ = _graded(1, answer, restarts=restarts, folder=tmp_path)

    first, second = recoveries(tmp_path)
    assert (first.part, first.cause, first.remedy, first.step) == ("grader", "grader 0 is gone.", "retry", 4)
    assert (second.cause, second.remedy) == ("grader 0 is gone again.", remedy)
    assert fake.warnings[0] == "grader 0 is gone. It is replaced, and its episodes are graded again."
    assert words in fake.warnings[1]
    assert [note.rpartition(" after ")[0] for note in fake.notes] == ["the grader is back"] * 2


def test_a_grader_that_several_batches_had_is_replaced_and_recorded_once(tmp_path: Path) -> None:
    class SlowGraders(FakeGraders):
        """The first two batches meet the death, and its replacement takes a moment."""

        num_deaths = 2

        async def control_one(self, rank: int, method: Any, shard: GradeShard, purpose: str) -> Any:
            await asyncio.sleep(0)
            if self.num_deaths:
                self.num_deaths -= 1
                raise WorkerDiedError("grader 0 is gone.")
            return SimpleNamespace(value=self._answer(rank, shard))

        async def recover(self, pool: str) -> None:
            await asyncio.sleep(0.01)

    async def grade_both() -> list[Rewarded]:
        return list(await asyncio.gather(handle.grade_on(0, rollouts), handle.grade_on(0, rollouts)))

    rollouts, fake = make_rollouts([make_answer(3)]), SlowGraders(1, _draws)
    handle = _handle(fake, folder=tmp_path)
    found = asyncio.run(grade_both())

    assert [each.values_NR[:, 0].tolist() for each in found] == [[3], [3]]
    assert fake.ended == [0]
    assert len(list(recoveries(tmp_path))) == 1


@pytest.mark.parametrize("num_deaths", [1, 2])
def test_a_grader_that_dies_when_it_is_asked_how_it_works_is_replaced(tmp_path: Path, num_deaths: int) -> None:
    class DyingGraders(FakeGraders):
        left = num_deaths

        async def call_one(self, rank: int, method: Any) -> Any:
            if self.left:
                self.left -= 1
                raise WorkerDiedError("grader 0 is gone.")
            return SimpleNamespace(value=GraderFacts(inputs=(), overlaps=True))

    fake = DyingGraders(1, _draws)
    handle = _handle(fake, restarts=1, folder=tmp_path)

    if num_deaths == 2:
        with pytest.raises(WorkerDiedError):
            asyncio.run(handle.facts())
    else:
        assert asyncio.run(handle.facts()).overlaps
    assert [each.part for each in recoveries(tmp_path)] == ["grader"] * num_deaths


def test_what_a_grader_warns_of_is_shown_once() -> None:
    def answer(rank: int, shard: GradeShard) -> GradeNote:
        note = _draws(rank, shard)
        return GradeNote(values_NR=note.values_NR, errors=note.errors, warnings=("it prints too much",))

    fake, _, _ = _graded(2, answer)

    assert fake.warnings == ["it prints too much"]


def test_an_error_that_is_not_the_workers_is_not_swallowed() -> None:
    def answer(rank: int, shard: GradeShard) -> GradeNote:
        raise ZeroDivisionError("a defect")

    with pytest.raises(ZeroDivisionError, match="a defect"):
        _graded(1, answer)
