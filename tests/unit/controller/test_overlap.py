# SPDX-License-Identifier: Apache-2.0
"""Generation that goes on while the policy learns, over fake roles: what is trained on what, and what is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.fake_roles import Admitted, Bandit, FakeGenerator, FakeGrader, FakeLearner, FakeStream, answer_slowly
from helpers.made_batches import WORKER, make_answer, make_result
from helpers.trials import Trial
from podium.algorithms.staleness import AgeStatistics
from podium.controller.group_flow import GroupFlow
from podium.controller.overlap import OverlapExecutor
from podium.controller.prompts import PromptSource
from podium.controller.run import OnPolicyRun
from podium.controller.scheduled import LiveGroups
from podium.controller.scheduler import GroupScheduler
from podium.data.tasks import IndexedTask
from podium.data.trajectories import TrajectoryId
from podium.errors import ClusterError, DataError, InvariantError, ProgramError, WorkerDiedError
from podium.roles.episode_stream import Lost
from podium.runs.showing import show_lines
from podium.weights.weight_transfers import ByStore

pytestmark = pytest.mark.timeout(60)

SPLIT = ("placement={layout: split, devices: 2}", "steps=6")


@pytest.fixture(autouse=True)
def slow_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps mix versions and orders of prompts."""
    answer_slowly(monkeypatch)


def trained(trial: Trial) -> list[tuple[Any, ...]]:
    """(prompt index, step, oldest version, newest version, trained version) of every group in the ledger."""
    columns = "prompt_index, step, oldest_version, newest_version, trained_version"
    return trial.episodes(columns, "ORDER BY prompt_index", table="groups")


def capacity(trial: Trial) -> int:
    """Prompts that were admitted before anything was trained."""
    journal = trial.bandit.journal
    first_update = next(at for at, entry in enumerate(journal) if entry[0] == "update")
    return sum(len(entry[2]) for entry in journal[:first_update] if entry[0] == "admit")


@pytest.mark.parametrize("on_new_weights", ["keep", "recompute", "finish"])
@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_no_group_is_older_than_the_bound_and_each_is_trained_once(
    tmp_path: Path, staleness: int, on_new_weights: str
) -> None:
    trial = Trial(
        tmp_path, *SPLIT, "steps=8", f"rollout.staleness={staleness}", f"rollout.on_new_weights={on_new_weights}"
    )
    trial.run()

    rows = trained(trial)
    assert [row[0] for row in rows] == list(range(32))
    assert Counter(row[1] for row in rows) == dict.fromkeys(range(1, 9), 4)
    ages = [row[4] - row[2] for row in rows]
    assert all(0 <= age <= staleness for age in ages)
    assert max(ages) >= 1  # something did overlap
    assert trial.metric("staleness/max")[8] <= staleness


def test_generation_goes_on_during_the_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update of step 1 ends only when prompts of step 2 were answered: without overlap it would wait forever."""
    original = FakeLearner.update

    async def update(self: FakeLearner, batch: Any, plan: Any, *, seed: int) -> Any:
        while plan.step == 1 and not any(4 in entry[2] for entry in self._bandit.calls("generate")):
            await asyncio.sleep(0)
        return await original(self, batch, plan, seed=seed)

    monkeypatch.setattr(FakeLearner, "update", update)
    run = Trial(tmp_path, *SPLIT, "rollout.staleness=1").run()

    assert run.num_committed == 6


def test_weights_reach_engines_while_they_generate(tmp_path: Path) -> None:
    trial = Trial(tmp_path, *SPLIT, "rollout.staleness=1", "rollout.on_new_weights=recompute")
    trial.run()

    # The first version is sent before anything runs; the last one is needed by nobody.
    assert [entry[2] for entry in trial.bandit.calls("send")] == [0]
    assert [entry[2] for entry in trial.bandit.calls("store")] == [1, 2, 3, 4, 5]
    assert [entry[2:] for entry in trial.bandit.calls("install_in_flight")] == [
        (version, "recompute") for version in (1, 2, 3, 4, 5)
    ]


def test_with_finish_an_engine_gets_weights_only_when_it_has_nothing_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_prompts: list[int] = []
    streams: list[FakeStream] = []

    async def install(self: FakeGenerator, rank: int, transfer: ByStore, in_flight: str) -> int:
        open_prompts.append(sum(stream._num_open for stream in streams))
        return await original(self, rank, transfer, in_flight)

    def init(self: FakeStream, *arguments: Any) -> None:
        original_init(self, *arguments)
        streams.append(self)

    original, original_init = FakeGenerator.install_in_flight, FakeStream.__init__
    monkeypatch.setattr(FakeGenerator, "install_in_flight", install)
    monkeypatch.setattr(FakeStream, "__init__", init)
    Trial(tmp_path, *SPLIT, "rollout.staleness=2", "rollout.on_new_weights=finish").run()

    assert open_prompts
    assert set(open_prompts) == {0}


def test_the_learner_is_not_updated_while_its_weights_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storing = {"now": 0}
    original_store, original_update = FakeLearner.store, FakeLearner.update

    async def store(self: FakeLearner, number: int) -> ByStore:
        storing["now"] += 1
        for _ in range(40):
            await asyncio.sleep(0)
        storing["now"] -= 1
        return await original_store(self, number)

    async def update(self: FakeLearner, batch: Any, plan: Any, *, seed: int) -> Any:
        assert not storing["now"]
        return await original_update(self, batch, plan, seed=seed)

    monkeypatch.setattr(FakeLearner, "store", store)
    monkeypatch.setattr(FakeLearner, "update", update)
    assert Trial(tmp_path, *SPLIT, "rollout.staleness=2").run().num_committed == 6


def test_an_evaluation_has_the_engines_for_itself_and_the_newest_weights(tmp_path: Path) -> None:
    trial = Trial(tmp_path, *SPLIT, "rollout.staleness=2", "evaluation.every=2", heldout=3)
    trial.run()

    journal = trial.bandit.journal
    greedy = [at for at, entry in enumerate(journal) if entry[0] == "generate" and entry[4].temperature == 0]
    assert len(greedy) >= 3
    for at in greedy:
        done = [entry for entry in journal[:at] if entry[0] in ("install_in_flight", "install")]
        updates = [entry for entry in journal[:at] if entry[0] == "update"]
        assert done[-1][2] == (updates[-1][2] if updates else 0)
    assert [row[0] for row in trained(trial)] == list(range(24))


def test_the_wait_of_an_evaluation_for_running_episodes_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = OverlapExecutor._drain

    async def drain(self: OverlapExecutor, generating: Any) -> None:
        await original(self, generating)
        await asyncio.sleep(0.05)

    monkeypatch.setattr(OverlapExecutor, "_drain", drain)
    trial = Trial(tmp_path, *SPLIT, "rollout.staleness=2", "evaluation.every=2", heldout=3)
    trial.run()

    drained_s = trial.metric("heldout/drain_s")
    assert [step for step, seconds in drained_s.items() if seconds >= 0.05] == [2, 4, 6]
    assert sum(trial.metric("time/drain_s").values()) < 0.05  # it is no part of a step
    assert trial.parts.watch.seconds()["drain"] >= 0.15


def test_a_pause_before_the_streams_are_open_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that were ready before a pause make the next step at once: then its streams are not open yet."""
    original = OnPolicyRun._begin

    async def begin(self: OnPolicyRun, number: int, objects: Any) -> Any:
        step = await original(self, number, objects)
        await self.sample(step, 1)  # pauses generation
        return step

    monkeypatch.setattr(OnPolicyRun, "_begin", begin)
    assert Trial(tmp_path, *SPLIT, "rollout.staleness=2").run().num_committed == 6


@pytest.mark.parametrize(
    "step", [pytest.param(step, marks=[] if step in (1, 2, 5, 8) else [pytest.mark.slow]) for step in range(1, 9)]
)
def test_save_and_resume_in_the_middle_of_overlap_loses_nothing_and_trains_nothing_twice(
    tmp_path: Path, step: int
) -> None:
    """AReaL #1345: capacity after a resume equals that before."""
    settings = (*SPLIT, "steps=9", "rollout.staleness=2", "checkpoint.every=1")
    first = Trial(tmp_path, *settings)
    assert first.run().num_committed == 9

    saved = first.bandit.saves["policy"][step]
    resumed = Trial(tmp_path, *settings, step=step, saved=saved, cursor=saved["cursor"])
    resumed.run()

    rows = trained(resumed)
    assert [row[0] for row in rows] == list(range(36))
    assert Counter(row[1] for row in rows) == dict.fromkeys(range(1, 10), 4)
    given = [index for entry in resumed.bandit.calls("generate") for index in entry[2]]
    assert len(given) == len(set(given)) == 36 - 4 * step
    assert (capacity(first), capacity(resumed)) == (12, min(12, 36 - 4 * step))


def test_rows_of_a_block_that_two_steps_share_stay_until_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All prompts that wait are answered in one block, which so has groups of several steps."""

    def answer_all(self: FakeStream, admitted: Admitted) -> None:
        indexes = tuple(prompt.prompt_index for prompt in admitted.prompts)
        self._generator._works("generate", indexes, len(admitted.samples), self._plan)
        ids = [TrajectoryId(prompt.prompt_index, sample) for prompt in admitted.prompts for sample in admitted.samples]
        answers = [self._generator._answer(id, self._plan) for id in ids]
        self._num_open += 1
        self._arrivals.put_nowait(make_result(answers))

    monkeypatch.setattr(FakeStream, "answer_all", answer_all)
    trial = Trial(tmp_path, *SPLIT, "rollout.staleness=2")
    trial.run()

    assert len(trial.bandit.calls("generate")[0][2]) > 4  # more than one step
    assert [row[0] for row in trained(trial)] == list(range(24))


@pytest.mark.parametrize("staleness", [0, 1])
def test_episodes_of_a_lost_worker_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int) -> None:
    """The worker dies with the first prompts that it has; its replacement gets them again under the next attempt."""
    lost = Lost(rank=0, worker=WORKER, error=WorkerDiedError("killed"))
    deaths: list[Lost] = []

    def answer_all(self: FakeStream, admitted: Admitted) -> None:
        self._num_open += 1
        if admitted.attempt == 0 and admitted.prompts[0].prompt_index == 0:
            deaths.append(lost)
            self._arrivals.put_nowait(lost)  # type: ignore[arg-type]
            return
        answers = [
            replace(
                make_answer(prompt.prompt_index, sample),
                id=TrajectoryId(prompt.prompt_index, sample, 0, admitted.attempt),
            )
            for prompt in admitted.prompts
            for sample in admitted.samples
        ]
        versions = [np.full(1, self._generator._version, np.int32)] * len(answers)
        stamped = [replace(answer, versions_L=each) for answer, each in zip(answers, versions, strict=True)]
        self._arrivals.put_nowait(make_result(stamped))

    async def replaced(self: FakeGenerator, stream: Any, lost: Lost) -> None:
        pass

    monkeypatch.setattr(FakeStream, "answer_all", answer_all)
    monkeypatch.setattr(FakeGenerator, "replace", replaced)
    trial = Trial(tmp_path, *SPLIT, "steps=3", f"rollout.staleness={staleness}")
    runners: Any = trial.roles.generator  # they have the same methods
    trial.parts = replace(trial.parts, roles=replace(trial.roles, runner=runners))
    trial.run()

    assert len(deaths) == 1
    rows = trial.episodes("prompt_index, attempts, step", "ORDER BY prompt_index", table="groups")
    assert [row[0] for row in rows] == list(range(12))
    assert rows[0][1] == 2


def test_a_runner_that_is_replaced_while_new_weights_are_on_their_way_begins_with_those_that_engines_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies when step 1 is committed, and its successor's episodes end before version 1 is installed."""
    lost = Lost(rank=0, worker=WORKER, error=WorkerDiedError("killed"))
    streams, held, original = list[FakeStream](), list[int](), FakeLearner.store

    def answer_all(self: FakeStream, admitted: Admitted) -> None:
        for prompt in admitted.prompts:
            if admitted.attempt == 0 and prompt.prompt_index >= 4 and not streams:
                held.append(prompt.prompt_index)  # of the second step
                continue
            answers = [
                replace(
                    make_answer(prompt.prompt_index, sample, version=self._generator._version),
                    id=TrajectoryId(prompt.prompt_index, sample, 0, admitted.attempt),
                )
                for sample in admitted.samples
            ]
            self._num_open += 1
            self._arrivals.put_nowait(make_result(answers))

    async def store(self: FakeLearner, number: int) -> ByStore:
        if number == 1:
            stream = seen[0]
            streams.append(stream)
            stream._num_open += 1
            stream._arrivals.put_nowait(lost)  # type: ignore[arg-type]
            for _ in range(50):
                await asyncio.sleep(0)
        return await original(self, number)

    async def replaced(self: FakeGenerator, stream: Any, lost: Lost) -> None:
        pass

    seen: list[FakeStream] = []
    begin = FakeStream.__init__

    def note(self: FakeStream, *arguments: Any) -> None:
        begin(self, *arguments)
        seen.append(self)

    monkeypatch.setattr(FakeStream, "__init__", note)
    monkeypatch.setattr(FakeStream, "answer_all", answer_all)
    monkeypatch.setattr(FakeGenerator, "replace", replaced)
    monkeypatch.setattr(FakeLearner, "store", store)
    trial = Trial(tmp_path, *SPLIT, "steps=3", "rollout.staleness=1")
    runners: Any = trial.roles.generator  # they have the same methods
    trial.parts = replace(trial.parts, roles=replace(trial.roles, runner=runners))
    trial.run()

    assert held == [4, 5, 6, 7]
    rows = trial.episodes("prompt_index, attempts, admitted_version", "ORDER BY prompt_index", table="groups")
    assert [row[0] for row in rows] == list(range(12))
    assert rows[4][1:] == (2, 0)


def test_ages_count_updates_and_not_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version has the number of the step that made it. Steps 1 to 4 make none, so version 5 is one update after
    version 0."""
    original = OnPolicyRun.commit

    async def commit(self: OnPolicyRun, step: Any, *arguments: Any, **named: Any) -> None:
        if step.number <= 4:
            self._state.updated_steps.discard(step.number)
            named["policy"] = None
        await original(self, step, *arguments, **named)

    monkeypatch.setattr(OnPolicyRun, "commit", commit)
    answer_slowly(monkeypatch)
    trial = Trial(tmp_path, *SPLIT, "steps=8", "rollout.staleness=1")
    trial.run()

    assert max(trial.metric("staleness/max").values()) == 1.0
    assert max(trial.metric("staleness/queue").values()) <= 1.0
    rows = trial.episodes("trained_version, oldest_version", table="groups")
    assert max(trained - oldest for trained, oldest in rows) == 5  # version 5 is one update after version 0


@pytest.mark.parametrize(("role", "method"), [
    (FakeGrader, "grade_on"), (FakeLearner, "store"), (FakeGenerator, "install_in_flight"), (FakeStream, "__aiter__"),
])  # fmt: skip
def test_a_failure_beside_the_program_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: type, method: str
) -> None:
    async def fail(self: Any, *arguments: Any) -> Any:
        raise ClusterError(f"{method} failed")

    async def fail_to_iterate(self: FakeStream) -> AsyncIterator[Any]:
        raise ClusterError(f"{method} failed")
        yield

    monkeypatch.setattr(role, method, fail_to_iterate if role is FakeStream else fail)
    with pytest.raises(ClusterError, match=f"{method} failed"):
        Trial(tmp_path, *SPLIT, "rollout.staleness=1").run()


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_verl_6387_generation_that_fails_is_not_reported_as_the_end_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    """There, a failure of the rollouter became the sentinel that ends a run, and the job was reported as successful.
    Here the run fails with that error, is not finished, and can be resumed after the last step it committed."""
    original = FakeStream.__aiter__

    async def fail_later(self: FakeStream) -> AsyncIterator[Any]:
        async for block in original(self):
            if 10 in block.ids.array_N4[:, 0]:  # of the third step
                raise RuntimeError("injected rollout failure")
            yield block

    monkeypatch.setattr(FakeStream, "__aiter__", fail_later)
    trial = Trial(tmp_path, *SPLIT, f"rollout.staleness={staleness}", "checkpoint.every=1")
    run = OnPolicyRun(trial.parts, trial.state)
    with pytest.raises(RuntimeError, match="injected rollout failure"):
        asyncio.run(trial._program(run))
    with pytest.raises(ProgramError, match="before the loop over"):
        run.require_finished()
    assert run.num_committed <= 2
    assert sorted(trial.metric("step_s")) == list(range(1, run.num_committed + 1))

    monkeypatch.setattr(FakeStream, "__aiter__", original)
    step = run.num_committed
    saved = trial.bandit.saves["policy"][step] if step else None
    resumed = Trial(
        tmp_path, *SPLIT, f"rollout.staleness={staleness}", step=step, saved=saved,
        cursor=saved["cursor"] if saved else None,
    )  # fmt: skip
    assert resumed.run().num_committed == 6
    assert [row[0] for row in trained(resumed)] == list(range(24))


def test_a_prompt_that_cannot_be_read_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = PromptSource.take

    def take(self: PromptSource, count: int) -> list[IndexedTask]:
        taken = original(self, count)
        if any(prompt.prompt_index == 9 for prompt in taken):
            raise DataError("row 9 is broken")
        return taken

    monkeypatch.setattr(PromptSource, "take", take)
    with pytest.raises(DataError, match="row 9"):
        Trial(tmp_path, *SPLIT, "rollout.staleness=1").run()


def test_a_stop_leaves_a_state_that_a_resumed_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(tmp_path, *SPLIT, "steps=9", "rollout.staleness=2")
    original = OnPolicyRun.commit

    async def commit(self: OnPolicyRun, step: Any, *arguments: Any, **named: Any) -> None:
        await original(self, step, *arguments, **named)
        if step.number == 4:
            trial.folder.stop_file.touch()

    monkeypatch.setattr(OnPolicyRun, "commit", commit)
    assert trial.run().num_committed == 4
    monkeypatch.setattr(OnPolicyRun, "commit", original)

    saved = trial.bandit.saves["policy"][4]
    resumed = Trial(tmp_path, *SPLIT, "steps=9", "rollout.staleness=2", step=4, saved=saved, cursor=saved["cursor"])
    resumed.run()
    assert [row[0] for row in trained(resumed)] == list(range(36))


def test_after_a_stop_request_generators_get_nothing_for_steps_that_do_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop is requested during the update of step 3, and episodes go on to end. A resumed run trains every group
    once."""
    settings = (*SPLIT, "steps=9", "rollout.staleness=2", "rollout.max_running=4")
    trial = Trial(tmp_path, *settings)
    original, at = FakeLearner.update, []

    async def update(self: FakeLearner, batch: Any, plan: Any, *, seed: int) -> Any:
        if plan.step == 3:
            trial.folder.stop_file.touch()
            at.append(len(self._bandit.journal))
            for _ in range(200):
                await asyncio.sleep(0)
        return await original(self, batch, plan, seed=seed)

    monkeypatch.setattr("podium.controller.overlap._LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(FakeLearner, "update", update)
    assert trial.run().num_committed == 3
    assert [entry for entry in trial.bandit.journal[at[0] :] if entry[0] == "admit"] == []
    monkeypatch.setattr(FakeLearner, "update", original)

    saved = trial.bandit.saves["policy"][3]
    resumed = Trial(tmp_path, *settings, step=3, saved=saved, cursor=saved["cursor"])
    resumed.run()
    assert [row[0] for row in trained(resumed)] == list(range(36))


def stopped_after_step_1(folder: Path, *settings: str) -> Trial:
    """A stop is requested during the update of step 1."""
    trial = Trial(folder, *SPLIT, *settings)

    def stop(step: int) -> dict[str, float]:
        trial.folder.stop_file.touch()
        return {}

    trial.bandit.reports = stop
    return trial


@pytest.mark.parametrize(("staleness", "stops", "counts"), [
    (0, False, {"trained": 24}), (0, True, {"trained": 4}), (1, False, {"trained": 24}),
    (1, True, {"trained": 4, "void": 4}),
])  # fmt: skip
def test_at_the_end_of_a_run_every_group_is_trained_or_void(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int, stops: bool, counts: dict[str, int]
) -> None:
    ended: list[dict[str, int]] = []
    original = GroupFlow.end

    def end(self: GroupFlow) -> None:
        original(self)
        ended.append(dict(self._audit.counts))

    monkeypatch.setattr(GroupFlow, "end", end)
    setting = f"rollout.staleness={staleness}"
    (stopped_after_step_1(tmp_path, setting) if stops else Trial(tmp_path, *SPLIT, setting)).run()
    assert ended == [counts]


def test_a_scheduler_that_forgets_groups_when_the_run_stops_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LiveGroups, "numbers", lambda self: [])
    with pytest.raises(InvariantError, match="the run ends and this group has no end"):
        stopped_after_step_1(tmp_path, "rollout.staleness=1").run()


def test_show_tells_the_age_of_trained_tokens_and_what_devices_did(tmp_path: Path) -> None:
    ages = {
        age: AgeStatistics(count=count, kl_k3=0.0, ratio=count, ratio_squares=count) for age, count in ((0, 1), (1, 3))
    }
    trial = Trial(tmp_path, *SPLIT, "rollout.staleness=2", bandit=Bandit(reports=lambda step: {"ages": ages}))
    trial.run()

    lines = dict(line.split(":", 1) for line in show_lines(trial.folder.path) if ":" in line)
    assert "age 0 25.0%, age 1 75.0%" in lines["trained tokens"]
    answers = lines["tokens of an answer, p50, p90, p99 (means over steps)"]
    assert answers == " offered 2, 3, 3; trained 2, 3, 3"
    assert "wait for episodes" in lines["learners"]
    assert "idle 0.0%" in lines["generators"]
    assert ("age", "0.0") in trial.console.steps[0].own


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_schedule_that_stands_still_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    """A scheduler that forgets the groups of step 2 must not make the run wait forever."""
    original = GroupScheduler._admit

    def admit(self: GroupScheduler) -> Iterator[Any]:
        return iter(()) if self._next_group >= 4 else original(self)

    monkeypatch.setattr(GroupScheduler, "_admit", admit)
    with pytest.raises(InvariantError, match="step"):
        Trial(tmp_path, *SPLIT, f"rollout.staleness={staleness}").run()
