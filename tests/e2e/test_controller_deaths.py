# SPDX-License-Identifier: Apache-2.0
"""The controller of a run is killed, or Ray under it: a new controller goes on by itself, and the run ends with the
weights, optimizer state, metrics and ledger of the run that nobody killed. Ray and the workers outlive the
controller."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import chdir, closing, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from golden.runs import fingerprint, make_task, pipeline, recipe, train
from helpers.on_policy import podium, session_of
from helpers.processes import wait_until
from helpers.times import times_of
from podium.cluster.processes import children, command_of
from podium.runs.events import recoveries
from podium.runs.host_memory import memory_folder
from podium.runs.showing import show_lines

pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(300)]

STEPS = 6
Victim = Callable[[int], int | None]


def controller(command: int) -> int | None:
    """The child of a command's first process that was forked from it. Orphans are its children too."""
    found = [pid for pid in children(command) if command_of(pid) == command_of(command)]
    return found[0] if found else None


def ray_process(name: str) -> Victim:
    def find(command: int) -> int | None:
        for pid in session_of(command):
            with suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].endswith(name.encode()):
                    return pid
        return None

    return find


def workers_of(command: int) -> set[int]:
    """Process ids of Podium's workers."""
    return {pid for pid in session_of(command) if command_of(pid).startswith(b"ray::Worker")}


def token_of(command: int) -> str:
    """Of the Ray of a run, as its raylet has it."""
    raylet = ray_process("raylet")(command)
    environment = Path(f"/proc/{raylet}/environ").read_bytes().split(b"\0")
    return next(each for each in environment if each.startswith(b"RAY_AUTH_TOKEN=")).partition(b"=")[2].decode()


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deaths")
    make_task(folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(task: Path) -> dict[str, dict[str, Any]]:
    """Method -> what its run computes in one process, filled as tests ask for it."""
    return {}


def values_of(method: str, name: str, **changes: Any) -> dict[str, Any]:
    values = recipe(method)
    values |= {"steps": STEPS, "checkpoint": {"every": STEPS, "background": False}}
    for key, change in changes.items():
        values[key] = {**values.get(key, {}), **change} if isinstance(change, dict) else change
    placement = {"launcher": "ray", **changes.get("placement", {})}
    return values | {"placement": {**values["placement"], **placement}, "run": {**values["run"], "name": name}}


def expected(undisturbed: dict[str, dict[str, Any]], method: str, task: Path, **changes: Any) -> dict[str, Any]:
    key = f"{method} {sorted(changes)}"
    if key not in undisturbed:
        values = values_of(method, f"{method}-inline", **changes, placement={"launcher": "inline"})
        undisturbed[key] = fingerprint(train(values, task), step=STEPS)
    return undisturbed[key]


def committed(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b'"step_s"') if metrics.is_file() else 0


def disturbed(
    values: Mapping[str, Any],
    task: Path,
    hits: list[tuple[Victim, int]],
    *,
    number: int = signal.SIGKILL,
    code: int = 0,
    watch: Callable[[int], None] = lambda command: None,
) -> tuple[Path, str]:
    """Runs the command and hits each victim after so many committed steps. `watch` is called before each hit, and when
    a step was committed after the last. Returns the run folder and what it said."""
    name = values["run"]["name"]
    file, output, run = task / f"{name}.yaml", task / f"{name}.out", task / "runs" / name
    file.write_text(yaml.safe_dump(dict(values)), encoding="utf-8")
    with chdir(task), podium("train", str(file), output=output) as process:
        for find, after in hits:
            found: list[int] = []

            def there(find: Victim = find, after: int = after, found: list[int] = found) -> bool:
                is_due = committed(run) >= after and "starting Ray" in output.read_text()
                if is_due and process.poll() is None and not found:
                    found += [each for each in [find(process.pid)] if each is not None]
                return bool(found) or process.poll() is not None

            wait_until(there, f"step {after}", deadline_s=120)
            assert found, output.read_text()
            watch(process.pid)
            num_before = committed(run)
            os.kill(found[0], number)
            wait_until(lambda pid=found[0]: not Path(f"/proc/{pid}").exists(), "the end of the victim")  # type: ignore[misc]
        wait_until(lambda: process.poll() is not None or committed(run) > num_before, "another step")
        if process.poll() is None:
            watch(process.pid)
        assert process.wait(120) == code, output.read_text()
        wait_until(lambda: not session_of(process.pid), "the end of the session", deadline_s=15)
    return run, " ".join(output.read_text().split())  # the console wraps lines


@pytest.mark.parametrize(
    ("method", "victim", "afters"),
    [
        pytest.param("grpo", controller, [0], marks=pytest.mark.soak),
        ("ppo", controller, [1, 4]),
        pytest.param("tool-agent", controller, [3], marks=pytest.mark.soak),
        ("grpo", ray_process("gcs_server"), [2]),
        pytest.param("grpo", ray_process("raylet"), [3], marks=pytest.mark.soak),
    ],
    ids=["controller at start-up", "controller of ppo twice", "controller of an agent", "gcs_server", "raylet"],
)
def test_the_run_goes_on(
    task: Path, undisturbed: dict[str, dict[str, Any]], request: pytest.FixtureRequest, method: str, victim: Victim,
    afters: list[int],
) -> None:  # fmt: skip
    name = f"{method}-{request.node.callspec.id}".replace(" ", "-")
    workers, tokens = list[set[int]](), set[str]()

    def watch(command: int) -> None:
        workers.append(workers_of(command))
        tokens.add(token_of(command))

    is_attached = victim is controller and afters[0] > 0  # before the first step, workers are still starting
    run, said = disturbed(
        values_of(method, name), task, [(victim, after) for after in afters],
        watch=watch if is_attached else lambda command: None,
    )  # fmt: skip

    assert fingerprint(run, step=STEPS) == expected(undisturbed, method, task), said
    found = list(recoveries(run))
    remedy = "attach" if is_attached else "restart"
    assert [(each.part, each.remedy) for each in found] == [("controller", remedy)] * len(afters), said
    if is_attached:
        assert len(workers) > len(afters)
        assert workers[0]
        assert all(each == workers[0] for each in workers)
        assert said.count(f"attached to {len(workers[0])} workers: going on after step") == len(afters)
        (token,) = tokens
        assert not any(token in each.read_text(errors="ignore") for each in run.rglob("*") if each.is_file())
        assert token not in said
    else:
        assert said.count(", with new workers: going on after step") == len(afters)
    for each, after in zip(found, afters, strict=True):
        assert each.step >= after - 1
    assert said.count("A new controller goes on with the run.") == len(afters)
    assert any("recover" in line for line in show_lines(run))
    memory = memory_folder(run)
    assert memory is None or not memory.exists()


@pytest.mark.parametrize("moments_s", [(0.0, 0.3, 0.9), (1.5, 2.5, 4.0)], ids=["first second", "afterwards"])
def test_a_command_that_is_killed_in_its_first_seconds_goes_on(
    task: Path, undisturbed: dict[str, dict[str, Any]], moments_s: tuple[float, ...]
) -> None:
    """Before and after its run begins; each controller so many seconds after it appeared."""
    name = f"early-{moments_s[0]:g}"
    file, output, run = task / f"{name}.yaml", task / f"{name}.out", task / "runs" / name
    file.write_text(yaml.safe_dump(values_of("grpo", name)), encoding="utf-8")
    with chdir(task), podium("train", str(file), output=output) as process:
        killed: list[int] = []
        for moment_s in moments_s:
            wait_until(lambda: controller(process.pid) not in (None, *killed), "a controller", deadline_s=60)
            found = controller(process.pid)
            assert found is not None
            time.sleep(moment_s)
            os.kill(found, signal.SIGKILL)
            killed.append(found)
        assert process.wait(200) == 0, output.read_text()
        wait_until(lambda: not session_of(process.pid), "the end of the session", deadline_s=15)
    said = " ".join(output.read_text().split())
    assert said.count("The controller was killed by SIGKILL.") == len(moments_s), said
    assert fingerprint(run, step=STEPS) == expected(undisturbed, "grpo", task), said
    assert [(each.part, each.remedy) for each in recoveries(run)][-1] == ("controller", "restart")
    memory = memory_folder(run)
    assert memory is None or not memory.exists()


@pytest.mark.soak
def test_a_stopped_controller_is_replaced_and_what_was_due_is_done(
    task: Path, undisturbed: dict[str, dict[str, Any]]
) -> None:
    """Stopped while it evaluates: the evaluation of that step, and its checkpoint, are there in the end, once."""
    often = {
        "checkpoint": {"every": 2, "background": False}, "evaluation": {"every": 2},
        "data": {"heldout": [{"path": "prompts.jsonl"}]},
    }  # fmt: skip
    values = values_of("grpo", "evaluating", **often, placement={"heartbeat_timeout_s": 5})
    run, said = disturbed(values, task, [(controller, 2)], number=signal.SIGSTOP)
    assert fingerprint(run, step=STEPS) == expected(undisturbed, "grpo", task, **often), said
    assert "is stopped (SIGSTOP) and has given no sign of life for 5 s" in said


@pytest.mark.soak
def test_a_worker_that_dies_with_its_controller_is_replaced_and_the_others_stay(
    task: Path, undisturbed: dict[str, dict[str, Any]]
) -> None:
    found: list[set[int]] = []

    def watch(command: int) -> None:
        found.append(workers_of(command))
        if len(found) == 1:
            os.kill(min(found[0]), signal.SIGKILL)

    run, said = disturbed(values_of("grpo", "both"), task, [(controller, 2)], watch=watch)
    assert fingerprint(run, step=STEPS) == expected(undisturbed, "grpo", task), said
    assert len(found[0] & found[1]) == len(found[0]) - 1
    assert "attached to 1 worker: going on after step" in said


def test_nothing_is_left_when_the_supervisor_is_killed_between_two_controllers(task: Path) -> None:
    values = values_of("grpo", "unwatched", steps=500)
    file, output, run = task / "unwatched.yaml", task / "unwatched.out", task / "runs" / "unwatched"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    with chdir(task), podium("train", str(file), output=output) as process:
        wait_until(lambda: committed(run) >= 1, "a step")
        victim, workers = controller(process.pid), workers_of(process.pid)
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: controller(process.pid) not in (None, victim), "another controller")
        assert workers_of(process.pid) == workers
        process.kill()
        process.wait(20)
        wait_until(lambda: not session_of(process.pid), "the end of the session", deadline_s=15)


def test_it_ends_when_it_dies_too_often(task: Path) -> None:
    values = values_of("grpo", "doomed", placement={"restarts": 1}, steps=500)
    run, said = disturbed(values, task, [(controller, 1), (controller, 0)], code=-signal.SIGKILL)
    assert "as often as placement.restarts allows" in said
    assert "Continue it with: podium resume runs/doomed" in said
    memory = memory_folder(run)
    assert memory is None or not memory.exists()


def test_a_signal_to_the_command_stops_the_run_after_its_step(task: Path) -> None:
    # The step that was begun takes longer than the 3 s after which Ray's own handler would abort the process.
    (task / "slow.py").write_text("import time\n\ndef reward(answer):\n    time.sleep(0.4)\n    return 0.0\n")
    values = values_of("grpo", "asked", steps=500, reward=[{"function": "slow.py:reward"}], grading={"workers": 1})
    file, output, run = task / "asked.yaml", task / "asked.out", task / "runs" / "asked"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    with chdir(task), podium("train", str(file), output=output) as process:
        wait_until(lambda: committed(run) >= 1, "a step")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, output.read_text()
    assert "stopped at step" in output.read_text()
    assert output.read_text().count("stopping after this step") == 1


def test_a_stage_of_a_pipeline_goes_on(task: Path) -> None:
    values = pipeline()
    values["run"] = {**values.get("run", {}), "name": "stages"}
    values["stages"]["grpo"]["placement"] = {**values["stages"]["grpo"].get("placement", {}), "launcher": "ray"}
    file, output, run = task / "stages.yaml", task / "stages.out", task / "runs" / "stages" / "grpo"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    with chdir(task), podium("train", str(file), output=output) as process:
        wait_until(lambda: committed(run) >= 2, "a step of the second stage")
        victim = controller(process.pid)
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        assert process.wait(150) == 0, output.read_text()
    said = " ".join(output.read_text().split())
    assert said.count("sft: sft, 4 steps") == said.count("sft: unchanged") == 1, said  # trained once
    assert [each.part for each in recoveries(run)] == ["controller"]
    assert times_of(run)["controller"].seconds["waiting for recovery"] > 0.0
    assert not (task / "runs" / "stages" / ".earlier").exists()
    undisturbed = {**pipeline(), "run": {**pipeline().get("run", {}), "name": "calm"}}
    steps = max(int(each.name.removeprefix("step-")) for each in (run / "checkpoints").glob("step-*"))
    assert fingerprint(run, step=steps) == fingerprint(train(undisturbed, task) / "grpo", step=steps)


@pytest.mark.soak
def test_a_run_with_staleness_counts_every_group_once(task: Path) -> None:
    split = {"layout": "split", "devices": 2, "rollout_devices": 1}
    values = values_of("grpo", "stale", placement=split, rollout={"staleness": 1})
    run, _ = disturbed(values, task, [(controller, 3)])
    with closing(sqlite3.connect(run / "episodes.sqlite")) as ledger:
        rows = ledger.execute("SELECT prompt_index, step, trained_version - oldest_version FROM groups").fetchall()
        per_step = ledger.execute("SELECT step, COUNT(*) FROM groups GROUP BY step ORDER BY step").fetchall()
    assert [step for step, _ in per_step] == list(range(1, STEPS + 1))
    assert len({count for _, count in per_step}) == 1
    assert len({prompt for prompt, _, _ in rows}) == len(rows)
    assert all(age <= 1 for _, _, age in rows)
