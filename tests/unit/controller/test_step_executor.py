# SPDX-License-Identifier: Apache-2.0
"""How the episodes of a step are run: graded as they end, admitted as there is room, and audited."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.fake_roles import Admitted, Bandit, FakeGenerator, FakeGrader, FakeStream
from helpers.trials import Trial
from podium.controller.schedule_audit import ScheduleAudit
from podium.errors import ClusterError, InvariantError
from podium.roles.carriers import EpisodeNote, GraderFacts
from podium.roles.grading_handle import Rewarded
from podium.roles.stages import Rollouts

pytestmark = pytest.mark.timeout(60)


def test_episodes_are_graded_while_others_are_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block after the first comes only when one more batch was graded: a run that grades at the end would hang."""
    trial, releasing = Trial(tmp_path, "steps=2"), list[asyncio.Task[None]]()

    def answer_all(self: FakeStream, admitted: Admitted) -> None:
        before = len(trial.bandit.calls("grade"))
        releasing.append(asyncio.create_task(release(self, self.promised(admitted.prompts, admitted.samples), before)))

    async def release(stream: FakeStream, blocks: list[Any], before: int) -> None:
        for number, block in enumerate(blocks):
            while len(trial.bandit.calls("grade")) < before + number:
                await asyncio.sleep(0)
            stream._arrivals.put_nowait(block)

    monkeypatch.setattr(FakeStream, "answer_all", answer_all)
    run = trial.run()

    assert run.num_committed == 2


@pytest.mark.parametrize("inputs", [("sample",), ("sample", "group"), ("batch",)])
def test_groups_that_a_reward_compares_are_graded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: tuple[Any, ...]
) -> None:
    seen: list[list[int]] = []

    async def facts(self: FakeGrader) -> GraderFacts:
        return GraderFacts(inputs=inputs, overlaps=True)

    async def grade_on(self: FakeGrader, rank: int, rollouts: Rollouts) -> Rewarded:
        seen.append(rollouts.group_N.tolist())
        return await self.grade(rollouts)

    monkeypatch.setattr(FakeGrader, "facts", facts)
    monkeypatch.setattr(FakeGrader, "grade_on", grade_on)
    trial = Trial(tmp_path, "steps=1")
    trial.run()

    assert sum(len(batch) for batch in seen) == 16
    if inputs != ("sample",):
        assert all(count == 4 for batch in seen for count in Counter(batch).values())


def test_a_failure_of_the_graders_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def grade_on(self: FakeGrader, rank: int, rollouts: Rollouts) -> Rewarded:
        raise ClusterError("the graders are gone")

    monkeypatch.setattr(FakeGrader, "grade_on", grade_on)
    trial = Trial(tmp_path, "steps=1")
    with pytest.raises(ClusterError, match="the graders are gone"):
        trial.run()


def test_every_decision_of_a_run_is_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()

    def observe(self: ScheduleAudit, event: Any, actions: Any) -> None:
        seen.update([type(event).__name__, *(type(action).__name__ for action in actions)])
        original(self, event, actions)

    original = ScheduleAudit.observe
    monkeypatch.setattr(ScheduleAudit, "observe", observe)
    Trial(tmp_path, "steps=3").run()

    assert seen == {
        "WorkerJoined": 1, "StepRequested": 4, "EpisodeEnded": 48, "GroupGraded": 12, "StepCommitted": 3,
        "WeightsInstalled": 2, "Admit": 12, "GradeGroup": 12, "StartStep": 3, "Publish": 2, "EndRun": 1,
    }  # fmt: skip


def test_a_generator_that_stamps_another_version_ends_the_run(tmp_path: Path) -> None:
    def mislabelled(note: EpisodeNote) -> EpisodeNote:
        return replace(note, newest_version_N=np.full(len(note.version_N), 9))

    with pytest.raises(InvariantError, match="invariant: versions"):
        Trial(tmp_path, "steps=1", bandit=Bandit(environment=mislabelled)).run()


def test_a_worker_is_given_a_quarter_more_than_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lanes(self: FakeGenerator) -> dict[int, int]:
        return {0: 4}

    monkeypatch.setattr(FakeGenerator, "lanes", lanes)
    trial = Trial(tmp_path, "steps=1")
    trial.run()

    # Five of four lanes: a second group of four episodes keeps it busy, a third waits until some have ended.
    given = [entry[2] for entry in trial.bandit.calls("generate")]
    assert given[0] == (0, 1)
    assert sorted(index for indices in given for index in indices) == [0, 1, 2, 3]


def test_the_ledger_has_the_history_of_every_group(tmp_path: Path) -> None:
    is_right = lambda id, chance: id.prompt_index == 1 or id.sample % 2 == 0  # noqa: E731
    trial = Trial(tmp_path, "steps=2", "algorithm.dynamic_sampling=true", bandit=Bandit(is_right=is_right))
    trial.run()

    columns = "prompt_index, step, attempts, oldest_version, newest_version, trained_version, void"
    rows = trial.episodes(columns, "ORDER BY prompt_index", table="groups")
    # Prompt 1 has equal rewards and is replaced by prompt 4; the weights of step 1 are version 1.
    assert rows[:5] == [
        (0, 1, 1, 0, 0, 0, None), (1, 1, 1, 0, 0, None, "uniform"), (2, 1, 1, 0, 0, 0, None), (3, 1, 1, 0, 0, 0, None),
        (4, 1, 1, 0, 0, 0, None),
    ]  # fmt: skip
    assert rows[5:] == [(number, 2, 1, 1, 1, 1, None) for number in range(5, 9)]
