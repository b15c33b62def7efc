# SPDX-License-Identifier: Apache-2.0
"""Workers that are killed in the middle of a run: the run goes on by itself and, at staleness 0, ends with the weights,
optimizer state, metrics and ledger of the run that nobody killed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from golden.runs import fingerprint, make_task, recipe, train
from helpers.hanging_roles import HANGING, hang_file
from helpers.on_policy import numbers
from helpers.times import times_of
from podium.cluster.workers import Workers
from podium.errors import WorkerDiedError
from podium.roles.interfaces import IMPLEMENTATIONS
from podium.runs.events import membership_changes, recoveries
from podium.runs.host_memory import memory_folder
from podium.runs.showing import show_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 6
COLOCATED = {"layout": "colocated", "devices": 1}
SPLIT = {"layout": "split", "devices": 3, "rollout_devices": 2}
ELASTIC = {"layout": "elastic", "devices": 2, "rollout_devices": 1}
_PATIENCE_S = 120.0
HANG_S = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Kills the worker in a slot, some time after a step was committed."""

    worker: str
    after_step: int
    delay_s: float = 0.0
    signal: int = signal.SIGKILL


class Killer:
    """Kills workers of the run that a test starts, in a thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._started: list[Workers] = []
        self.killed: list[str] = []
        started, start = self._started, Workers.start

        async def noted(workers: Workers) -> None:
            started.append(workers)
            await start(workers)

        monkeypatch.setattr(Workers, "start", noted)

    def begin(self, run: Path, kills: list[Kill]) -> threading.Thread:
        """Kills them one after the other."""
        thread = threading.Thread(target=self._kill_all, args=(run, kills), daemon=True)
        thread.start()
        return thread

    def _kill_all(self, run: Path, kills: list[Kill]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        for kill in kills:
            while not _has_committed(run, kill.after_step) and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(kill.delay_s)
            pid = self._pid(kill.worker)
            while pid is None and time.monotonic() < deadline:
                time.sleep(0.01)
                pid = self._pid(kill.worker)
            if pid is not None:
                os.kill(pid, kill.signal)
                self.killed.append(kill.worker)

    def _pid(self, name: str) -> int | None:
        for workers in self._started:
            for pool in workers.pools:
                for member in workers.worker_pool(pool).members:
                    info = member.process.look()
                    if f"{pool}[{member.slot}]" == name and member.died is None and info is not None:
                        return info.pid
        return None


def _has_committed(run: Path, step: int) -> bool:
    if step == 0:
        return True
    metrics = run / "metrics.jsonl"
    return metrics.is_file() and len(metrics.read_bytes().splitlines()) >= step


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recovery")
    make_task(folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(task: Path) -> dict[str, dict[str, Any]]:
    """Method -> what its run computes in one process, filled as tests ask for it."""
    return {}


def _values(method: str, name: str, placement: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    values = recipe(method)
    values |= {"steps": STEPS, "checkpoint": {"every": STEPS, "background": False}, **changes}
    return values | {"placement": {**values["placement"], **placement}, "run": {**values["run"], "name": name}}


def _expected(undisturbed: dict[str, dict[str, Any]], method: str, task: Path) -> dict[str, Any]:
    if method not in undisturbed:
        inline = {"launcher": "inline", "layout": "colocated", "devices": 1}
        run = train(_values(method, f"{method}-inline", inline), task)
        undisturbed[method] = fingerprint(run, step=STEPS)
    return undisturbed[method]


def _without_rollout(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Without what depends on the layout, and counts of tokens: lost ones are generated again."""
    names = ("lending/", "rollout/", "response/offered_", "response/trained_", "staleness/", "groups/void/")
    metrics = {name: value for name, value in numbers["metrics"].items() if not name.startswith(names)}
    return {**numbers, "metrics": metrics}


CASES = {
    "learner generates": ("grpo", COLOCATED, [Kill(worker="train[0]", after_step=2, delay_s=0.05)]),
    "learner early": ("grpo", COLOCATED, [Kill(worker="train[0]", after_step=0, delay_s=0.3)]),
    "learner twice": (
        "grpo", COLOCATED,
        [Kill(worker="train[0]", after_step=1, delay_s=0.2), Kill(worker="train[0]", after_step=3, delay_s=0.3)],
    ),
    "learner of ppo": ("ppo", COLOCATED, [Kill(worker="train[0]", after_step=3, delay_s=0.4)]),
    "learner of an adapter": ("lora-grpo", COLOCATED, [Kill(worker="train[0]", after_step=2, delay_s=0.1)]),
    "learner of split": ("grpo", SPLIT, [Kill(worker="train[0]", after_step=2, delay_s=0.2)]),
    "generator of split": ("grpo", SPLIT, [Kill(worker="rollout[1]", after_step=2, delay_s=0.05)]),
    "learner of elastic": ("grpo", ELASTIC, [Kill(worker="train[0]", after_step=2, delay_s=0.1)]),
    "generator of elastic": ("grpo", ELASTIC, [Kill(worker="rollout[0]", after_step=2, delay_s=0.1)]),
    "generator of an agent": ("tool-agent", SPLIT, [Kill(worker="rollout[0]", after_step=2, delay_s=0.1)]),
    "learner of an agent": ("tool-agent", ELASTIC, [Kill(worker="train[0]", after_step=2, delay_s=0.1)]),
    "runner of an agent": ("tool-agent", COLOCATED, [Kill(worker="runners[0]", after_step=2, delay_s=0.1)]),
    "grader": ("grpo", COLOCATED, [Kill(worker="graders[0]", after_step=2, delay_s=0.1)]),
}  # fmt: skip
# Of each kind of worker one, in different layouts and methods.
SELECTED = ("learner of ppo", "learner of split", "learner of an agent", "generator of elastic", "grader")


@pytest.mark.parametrize(
    "case", [each if each in SELECTED else pytest.param(each, marks=pytest.mark.soak) for each in CASES]
)
def test_a_run_whose_worker_is_killed_computes_the_same(
    task: Path, undisturbed: dict[str, dict[str, Any]], case: str, local_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, placement, kills = CASES[case]
    expected = _expected(undisturbed, method, task)
    name = case.replace(" ", "-")
    killer = Killer(monkeypatch)
    thread = killer.begin(task / "runs" / name, kills)

    run = train(_values(method, name, {"launcher": "ray", **placement}), task)

    thread.join(_PATIENCE_S)
    assert killer.killed == [kill.worker for kill in kills]
    found, expected = _without_rollout(fingerprint(run, step=STEPS)), _without_rollout(expected)
    assert not [name for name, value in found["metrics"].items() if value != expected["metrics"].get(name)]
    assert found == expected
    memory = memory_folder(run)
    assert memory is None or not memory.exists()


def test_a_frozen_learner_is_replaced(
    task: Path, undisturbed: dict[str, dict[str, Any]], local_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _expected(undisturbed, "grpo", task)
    kill = Kill(worker="train[0]", after_step=2, delay_s=0.1, signal=signal.SIGSTOP)
    thread = Killer(monkeypatch).begin(task / "runs" / "frozen", [kill])

    run = train(_values("grpo", "frozen", {"launcher": "ray", **COLOCATED, "heartbeat_timeout_s": 3.0}), task)

    thread.join(_PATIENCE_S)
    assert _without_rollout(fingerprint(run, step=STEPS)) == _without_rollout(expected)
    (recovery,) = recoveries(run)
    assert "no sign of life" in recovery.cause
    stacks = (run / "stacks.txt").read_text()
    assert re.search(r"train\[0\].*\n  does not answer", stacks)
    assert re.search(r"graders\[0\].*\n  thread", stacks)


@pytest.mark.parametrize("axis", ["shard", "tensor"])
def test_learners_that_meet_in_collectives_are_replaced_together(
    task: Path, local_ray: None, monkeypatch: pytest.MonkeyPatch, axis: str
) -> None:
    two = {"launcher": "ray", "layout": "colocated", "devices": 2, "policy": {axis: 2}}
    expected = fingerprint(train(_values("grpo", f"two-{axis}", two), task), step=STEPS)
    kills = [Kill(worker="train[1]", after_step=2, delay_s=0.2), Kill(worker="train[0]", after_step=4, delay_s=0.3)]
    thread = Killer(monkeypatch).begin(task / "runs" / f"two-{axis}-killed", kills)

    run = train(_values("grpo", f"two-{axis}-killed", two), task)

    thread.join(_PATIENCE_S)
    assert _without_rollout(fingerprint(run, step=STEPS)) == _without_rollout(expected)
    assert [each.part for each in recoveries(run)] == ["learner", "learner"]
    assert times_of(run)["train"].seconds["waiting for recovery"] > 0


@pytest.fixture
def hanging_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learners and generators that hang once where a file says so."""
    monkeypatch.setattr("podium.controller.layout.IMPLEMENTATIONS", {**IMPLEMENTATIONS, **HANGING})


def test_learners_of_which_one_hangs_are_replaced_and_the_stacks_of_all_are_kept(
    task: Path, local_ray: None, hanging_roles: None
) -> None:
    two = {"launcher": "ray", "layout": "colocated", "devices": 2, "timeout_s": HANG_S}
    expected = fingerprint(train(_values("grpo", "two-advance", two), task), step=STEPS)
    hang_file(task / "model", "policy[1]").touch()
    began_s = time.monotonic()

    run = train(_values("grpo", "one-hangs", two), task)

    assert time.monotonic() - began_s < HANG_S + _PATIENCE_S / 2
    assert _without_rollout(fingerprint(run, step=STEPS)) == _without_rollout(expected)
    (recovery,) = recoveries(run)
    assert (recovery.part, recovery.remedy, recovery.step) == ("learner", "rebuild", 2)
    assert re.search(r"train\[1\]\S*: it hangs: no progress in policy\.update .*endless_loop", recovery.cause)
    stacks = (run / "stacks.txt").read_text()
    assert re.search(r"train\[0\](.*\n)*?.*torch/distributed", stacks)  # waits in a collective
    assert re.search(r"train\[1\](.*\n)*?.*endless_loop", stacks)
    assert re.search(r"graders\[0\].*\n  thread", stacks)
    assert re.search(r"controller\n  thread", stacks)
    console = " ".join((run / "console.log").read_text().split())
    assert "The stacks of all processes are in" in console


def test_nemo_rl_3470_a_generator_that_hangs_is_replaced_while_the_others_generate(
    task: Path, undisturbed: dict[str, dict[str, Any]], local_ray: None, hanging_roles: None
) -> None:
    """There, what waited for an endpoint that was gone was waited for without a limit, and nothing said so."""
    expected = _expected(undisturbed, "grpo", task)
    hang_file(task / "model", "generator[1]").touch()

    run = train(_values("grpo", "generator-hangs", {"launcher": "ray", **SPLIT, "timeout_s": HANG_S}), task)

    assert _without_rollout(fingerprint(run, step=STEPS)) == _without_rollout(expected)
    (recovery,) = recoveries(run)
    assert recovery.part == "generator"
    assert recovery.remedy in ("respawn", "fewer")  # the run may have ended before another one had started
    assert re.search(r"rollout\[1\].*it hangs: no progress in generator\.stream", recovery.cause)


def test_a_generator_is_replaced_while_the_others_generate(
    task: Path, undisturbed: dict[str, dict[str, Any]], local_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _expected(undisturbed, "grpo", task)
    kills = [Kill(worker="rollout[0]", after_step=1, delay_s=0.1), Kill(worker="rollout[1]", after_step=3, delay_s=0.1)]
    thread = Killer(monkeypatch).begin(task / "runs" / "respawned", kills)

    run = train(_values("grpo", "respawned", {"launcher": "ray", **SPLIT}), task)

    thread.join(_PATIENCE_S)
    assert _without_rollout(fingerprint(run, step=STEPS)) == _without_rollout(expected)
    found = list(recoveries(run))
    assert {each.part for each in found} == {"generator"}
    # When the second dies, the run waits for another, or goes back if it died while it got weights. The generator that
    # hangs, above, is replaced while it generates in any case.
    assert {each.remedy for each in found} & {"respawn", "rewind"}
    times_of(run)


def test_a_generator_that_gets_sigterm_hands_over_its_sequences(
    task: Path, undisturbed: dict[str, dict[str, Any]], local_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _expected(undisturbed, "grpo", task)
    notice = Kill(worker="rollout[1]", after_step=2, delay_s=0.05, signal=signal.SIGTERM)
    thread = Killer(monkeypatch).begin(task / "runs" / "noticed", [notice])

    run = train(_values("grpo", "noticed", {"launcher": "ray", **SPLIT}), task)

    thread.join(_PATIENCE_S)
    assert _without_rollout(fingerprint(run, step=STEPS)) == _without_rollout(expected)
    (change,) = membership_changes(run)
    assert (change.change, change.generator, change.generators) == ("left", "rollout[1]", 1)
    assert "SIGTERM" in change.cause
    assert list(recoveries(run)) == []
    console = " ".join((run / "console.log").read_text().split())
    assert "leaves: it got SIGTERM. Its running sequences move to the others." in console


@pytest.mark.parametrize(
    ("layout", "worker"),
    [
        ("split", "rollout[0]"),
        ("elastic", "train[0]"),
        pytest.param("split", "train[0]", marks=pytest.mark.soak),
        pytest.param("elastic", "rollout[0]", marks=pytest.mark.soak),
    ],
)
def test_with_staleness_every_group_is_trained_once(
    task: Path, layout: str, worker: str, local_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"stale-{layout}-{worker[:5]}"
    placement = {"launcher": "ray", "layout": layout, "devices": 3, "rollout_devices": 2}
    values = _values("grpo", name, placement, rollout={**recipe("grpo")["rollout"], "staleness": 1})
    other = "rollout[1]" if worker == "rollout[0]" else worker  # nobody waits for the successor of the first
    kills = [Kill(worker=worker, after_step=2, delay_s=0.1), Kill(worker=other, after_step=4, delay_s=0.2)]
    killer = Killer(monkeypatch)
    thread = killer.begin(task / "runs" / name, kills)

    run = train(values, task)

    thread.join(_PATIENCE_S)
    assert killer.killed == [worker, other]
    numbers_by_step = numbers(run)
    assert sorted(numbers_by_step) == list(range(1, STEPS + 1))
    assert max(each["staleness/max"] for each in numbers_by_step.values()) <= 1
    with contextlib.closing(sqlite3.connect(run / "episodes.sqlite")) as file:
        groups = file.execute("SELECT prompt_index, step, trained_version FROM groups ORDER BY prompt_index").fetchall()
        episodes = file.execute("SELECT COUNT(*), COUNT(DISTINCT prompt_index * 100 + sample) FROM episodes").fetchone()
    prompts_per_step = values["rollout"]["prompts_per_step"]
    assert len(groups) == len({prompt for prompt, _, _ in groups}) == STEPS * prompts_per_step
    assert Counter(step for _, step, _ in groups) == dict.fromkeys(range(1, STEPS + 1), prompts_per_step)
    assert episodes == (STEPS * prompts_per_step * 4,) * 2


@pytest.mark.parametrize(
    ("worker", "part", "remedies", "words"),
    [
        ("train[0]", "learner", ("rebuild",), "Its workers are replaced."),
        ("graders[0]", "grader", ("retry",), "It is replaced, and its episodes are graded again."),
        # One that dies between two steps, while nobody waits for its episodes, may be met by another call.
        ("runners[0]", "runner", ("retry", "rewind"), "replaced"),
    ],
)
def test_every_recovery_is_recorded(
    task: Path, local_ray: None, monkeypatch: pytest.MonkeyPatch, worker: str, part: str, remedies: tuple[str, ...],
    words: str,
) -> None:  # fmt: skip
    killer, name = Killer(monkeypatch), f"recorded-{part}"
    thread = killer.begin(task / "runs" / name, [Kill(worker=worker, after_step=2)])

    method = "tool-agent" if part == "runner" else "grpo"
    run = train(_values(method, name, {"launcher": "ray", **COLOCATED}), task)

    thread.join(_PATIENCE_S)
    (recovery,) = recoveries(run)
    assert recovery.part == part
    assert recovery.remedy in remedies
    # The snapshot of step 2 may not have been complete, and step 3 may have ended before the others were needed.
    assert recovery.step in ((1, 2) if part == "learner" else (1, 2, 3))
    assert worker in recovery.cause
    assert 0 < recovery.seconds < 60
    console = " ".join((run / "console.log").read_text().split())
    assert f"the {part} is back after" in console
    assert words in console
    lines = [" ".join(line.split()) for line in show_lines(run)]
    assert any(line.startswith(f"recoveries: 1 ({part} 1) in ") for line in lines)


@pytest.mark.parametrize("worker", ["train[0]", pytest.param("graders[0]", marks=pytest.mark.soak)])
def test_without_restarts_a_death_ends_the_run_and_says_so(
    task: Path, local_ray: None, monkeypatch: pytest.MonkeyPatch, worker: str
) -> None:
    killer, name = Killer(monkeypatch), f"fragile-{worker[:5]}"
    thread = killer.begin(task / "runs" / name, [Kill(worker=worker, after_step=2)])

    with pytest.raises(WorkerDiedError, match=re.escape(worker)):
        train(_values("grpo", name, {"launcher": "ray", **COLOCATED, "restarts": 0}), task)

    thread.join(_PATIENCE_S)
    assert "placement.restarts is 0" in " ".join((task / "runs" / name / "console.log").read_text().split())
    assert not list(recoveries(task / "runs" / name))
