# SPDX-License-Identifier: Apache-2.0
"""The parts of the fault-injection benchmark that compute something: its trials, its processes, its table."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kills
from kills_processes import Process, ProcessFamily, hit, names_victim
from kills_reward import digits
from kills_run import Numbers, Unbroken, is_complete, numbers_of
from kills_task import FIXED_DATA, LAYOUTS, STEPS, Task, recipe, sft_recipe
from kills_trials import (
    CONTROL,
    RANK,
    VICTIMS,
    Attempt,
    Moment,
    Row,
    Trial,
    cells,
    recoveries_line,
    table,
    trials,
    victims_table,
)
from podium.recipe import parse_recipe


def attempt(**changes: Any) -> Attempt:
    """A command that was hit after 20 s and ended 3 s later with a good error."""
    plain = Attempt(
        verb="train", code=2, wall_s=23.0, num_hits=1, hit_at_s=20.0, hit_while="ray::Worker, 3 steps done", end_s=3.0,
        named=True, advised=True, raw=False, left=(), gone_s=0.5,
    )  # fmt: skip
    return replace(plain, **changes)


RESUMED = attempt(
    verb="resume", code=0, num_hits=0, hit_at_s=None, hit_while=None, end_s=None, named=None, advised=None, raw=None
)


def row(*attempts: Attempt, victim: str = "learner", layout: str = "colocated", **changes: Any) -> Row:
    trial = Trial(
        seed=0, number=0, layout=layout, victim=victim, signal="KILL", moment=Moment(steps=3, share=0.5), again=None,
        pick=0.0,
    )  # fmt: skip
    plain = Row(
        trial=trial, attempts=attempts, completed=True, weights_equal=True, ledger_equal=True, first_difference=None,
        wall_s=60.0,
    )  # fmt: skip
    return replace(plain, **changes)


# --- trials ---


def test_a_trial_is_the_same_however_many_there_are() -> None:
    assert trials(60, seed=7)[:13] == trials(13, seed=7)
    assert trials(13, seed=8) != trials(13, seed=7)
    assert [trial.number for trial in trials(5, seed=7)] == [0, 1, 2, 3, 4]


def test_every_layout_and_victim_has_its_turn_before_one_has_a_second() -> None:
    every = cells(LAYOUTS, VICTIMS, "KILL")
    assert len(every) == 45
    for count, times in ((45, {1}), (60, {1, 2}), (135, {3})):
        found = Counter((trial.layout, trial.victim) for trial in trials(count, seed=1))
        assert set(found) == set(every)
        assert set(found.values()) == times


def test_generators_are_apart_only_in_some_layouts_and_runners_only_in_environments() -> None:
    every = cells(LAYOUTS, ("generator", "runner"), "KILL")
    assert every == [("split", "generator"), ("elastic", "generator"), ("environment", "runner")]


def test_fixed_data_has_ranks_and_a_launcher_only() -> None:
    victims = (*VICTIMS, RANK)
    assert cells(FIXED_DATA, victims, "KILL") == [("sft", "controller"), ("sft", "rank")]
    assert not [victim for _, victim in cells(LAYOUTS, victims, "KILL") if victim == RANK]


def test_nobody_freezes_a_launcher_because_nobody_would_notice() -> None:
    assert cells(("split", "sft"), ("controller", "rank"), "STOP") == [("split", "controller"), ("sft", "rank")]


def test_moments_cover_start_up_every_step_and_the_end() -> None:
    many = trials(2000, seed=0)
    at_start = [trial for trial in many if trial.moment.steps is None]
    assert 0.4 < len(at_start) / len(many) < 0.6  # two in five, and all of those that hit a worker without a role
    assert {trial.moment.steps for trial in many} == {None, *range(STEPS + 1)}
    assert all(0 <= trial.moment.share < 1 for trial in many)
    assert 0.4 < sum(trial.again is not None for trial in many) / len(many) < 0.6
    assert all(trial.moment.steps is None for trial in many if trial.victim == "worker")


@pytest.mark.parametrize(
    ("moment", "again", "is_certain"),
    [
        (Moment(steps=10, share=0.99), None, True),  # steps 11 and 12 are left
        (Moment(steps=11, share=0.0), None, False),  # one that is quicker than others may be the last
        (Moment(steps=12, share=0.0), None, False),
        (Moment(steps=None, share=0.99), None, True),
        (Moment(steps=8, share=0.5), Moment(steps=2, share=0.99), True),
        (Moment(steps=9, share=0.5), Moment(steps=2, share=0.0), False),
        (Moment(steps=None, share=0.5), Moment(steps=None, share=0.5), True),
        (Moment(steps=1, share=0.5), Moment(steps=None, share=0.01), False),
    ],
)
def test_a_kill_is_certain_where_whole_steps_are_left(moment: Moment, again: Moment | None, is_certain: bool) -> None:
    assert replace(row().trial, moment=moment, again=again).is_certain == is_certain


def test_kills_that_hit_nobody_are_counted_and_told() -> None:
    trial = replace(row().trial, again=Moment(steps=2, share=0.5))
    once, twice = row(attempt(), RESUMED, trial=trial), row(attempt(), attempt(), RESUMED, trial=trial)

    assert [each.num_missed for each in (row(attempt()), once, twice, row(RESUMED))] == [0, 1, 0, 1]
    assert "1 of 2 kills hit nobody" in kills.summary(once)
    assert "hit nobody" not in kills.summary(twice)
    assert row(RESUMED, victim=CONTROL).num_missed == 0


def test_a_process_that_is_gone_was_not_hit() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    try:
        assert hit(child.pid, signal.SIGKILL)
    finally:
        child.kill()
        child.wait(10)
    assert not hit(child.pid, signal.SIGKILL)


def test_a_delay_is_a_share_of_what_the_unbroken_run_took() -> None:
    appeared_s = {"worker": 10.0, "grader": 12.0, "learner": 11.0}
    unbroken = Unbroken(
        layout="split", appeared_s=appeared_s, ready_s=20.0, step_s=0.2, closing_s=3.0, wall_s=30.0,
        numbers=Numbers(weights="", ledger=[], metrics={}),
    )  # fmt: skip
    assert unbroken.delay_s("grader", Moment(steps=None, share=0.25)) == 2.0
    assert unbroken.delay_s("worker", Moment(steps=None, share=0.25)) == 0.5  # until all have a role
    assert unbroken.delay_s("grader", Moment(steps=4, share=0.5)) == 0.1
    assert unbroken.delay_s("grader", Moment(steps=STEPS, share=0.5)) == 1.5


def test_one_trial_alone_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["kills.py", "--trial", "17", "--seed", "5", "--victims", "grader,raylet"])
    alone = kills.plan(kills.parsed())
    assert alone == trials(18, seed=5, victims=("grader", "raylet"))[17:]


def test_a_victim_that_is_not_known_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kills.py", "--victims", "grader,greider"])
    with pytest.raises(SystemExit):
        kills.parsed()
    assert re.search(r"greider: .*controller", capsys.readouterr().err)


# --- runs ---


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recipes_are_valid_and_have_two_workers(layout: str, tmp_path: Path) -> None:
    found = parse_recipe(recipe(Task(folder=tmp_path), layout))
    assert (found.placement.launcher, found.placement.devices, found.steps) == ("ray", 2, 12)
    assert (found.environment is not None) == (layout == "environment")


def test_the_recipe_on_fixed_data_is_valid_and_restarts_its_two_ranks(tmp_path: Path) -> None:
    found = parse_recipe(sft_recipe(Task(folder=tmp_path)))
    assert (found.program, found.placement.devices, found.placement.restarts, found.steps) == ("sft", 2, 3, STEPS)


def test_the_reward_is_the_share_of_digits() -> None:
    assert [digits(answer, None) for answer in ("12ab", "7", "")] == [0.5, 1.0, 0.0]


def write_run(folder: Path, *, attempt: int = 0, loss: float = 0.5) -> Path:
    (folder / "checkpoints" / f"step-{STEPS:08d}").mkdir(parents=True)
    (folder / "checkpoints" / f"step-{STEPS:08d}" / "rank-00000.safetensors").write_bytes(b"weights")
    lines = [{"step": 1, "loss": loss, "step_s": 0.1 * attempt, "time_s": 5.0}, {"step": 1, "score": 0.25}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = sqlite3.connect(folder / "episodes.sqlite")
    file.execute(
        "CREATE TABLE episodes (prompt_index, sample, branch, attempt, step, state, finish, version, tokens, reward)"
    )
    file.execute("INSERT INTO episodes VALUES (0, 1, 0, ?, 1, 'consumed', 'stop', 0, 6, 0.5)", (attempt,))
    file.commit()
    file.close()
    return folder


def test_runs_are_compared_without_times_and_attempts(tmp_path: Path) -> None:
    whole, retried = numbers_of(write_run(tmp_path / "a")), numbers_of(write_run(tmp_path / "b", attempt=1))
    assert whole == retried
    assert whole.metrics == {"1": {"step": 1, "loss": 0.5, "score": 0.25}}
    assert whole.first_difference(retried) is None


def test_a_run_is_complete_when_its_last_checkpoint_is_whole(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    assert not is_complete(run)
    (run / "checkpoints" / f"step-{STEPS:08d}" / "checkpoint.json").touch()
    assert is_complete(run)


def test_the_first_step_that_differs_is_reported(tmp_path: Path) -> None:
    whole, other = numbers_of(write_run(tmp_path / "a")), numbers_of(write_run(tmp_path / "b", loss=0.25))
    assert whole.first_difference(other) == 1
    assert whole.weights == other.weights


# --- processes ---


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_a_process_that_left_its_session_is_found_by_its_environment_and_ended(tmp_path: Path) -> None:
    environment = {**os.environ, "RAY_TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    stray = subprocess.Popen(command, env=environment, start_new_session=True)
    other = subprocess.Popen(command, start_new_session=True)
    family = ProcessFamily(ray_folder=tmp_path, leader=-1)
    try:
        assert [process.pid for process in family.all_living()] == [stray.pid]
        family.end()
        assert stray.wait(10) == -signal.SIGKILL
        assert family.all_living() == []
        assert other.poll() is None
    finally:
        for process in (stray, other):
            hit(process.pid, signal.SIGKILL)
            process.wait(10)


def test_processes_are_identified_by_their_titles_and_by_rays_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles = {
        1: "/bin/python -m podium train x.yaml",
        2: "/ray/gcs/gcs_server --port=0",
        3: "/ray/raylet/raylet --python_worker_command=/bin/python /ray/default_worker.py --x",
        4: "ray::Worker.perform",
        5: "ray::Worker",
        6: "ray::IDLE",
        7: "/bin/python /ray/default_worker.py --node-ip-address=127.0.0.1",
        8: "ray::DashboardAgent",
        9: "ray::Worker.__init__",
        10: "/bin/python -P -c from podium.cluster.fork_server import main; main() 3 podium.roles.learner",
        11: "/bin/python -P -c from podium.cluster.fork_server import main; main() 3 podium.roles.learner",
        12: "/bin/python -c from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)",
        13: "/bin/python -c from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)",
        14: "/bin/python -m podium train x.yaml",
    }
    logs = tmp_path / "ray" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    for pid, names in {4: ("Worker", "train[1]#0"), 5: ("Worker", "train[0]#0"), 9: ("Worker",)}.items():
        said = "".join(f":actor_name:{name}\n" for name in names)
        (logs / f"worker-ab12-ffff-{pid}.out").write_text(f":job_id:01\n{said}")
    parents = {11: 10, 10: 14}
    living = [Process(pid=pid, title=title, parent=parents.get(pid, 1)) for pid, title in titles.items()]
    monkeypatch.setattr(ProcessFamily, "living", lambda self: living)
    assert [living[at].label for at in (0, 1, 3, 6)] == [
        "python",
        "gcs_server",
        "ray::Worker.perform",
        "default_worker.py",
    ]
    found = ProcessFamily(ray_folder=tmp_path, leader=1).by_victim()
    assert {victim: [process.pid for process in some] for victim, some in found.items()} == {
        "supervisor": [1], "controller": [14], "gcs_server": [2], "raylet": [3], "learner": [5, 4], "generator": [],
        "grader": [], "runner": [], "worker": [6, 7, 9, 11], "fork_server": [10], "rank": [12, 13],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("victim", "error"),
    [
        ("learner", "error: train[1]@node/cpu#0 died"),
        ("grader", "pool graders: graders[0] is gone"),
        ("raylet", "the node of this run died"),
        ("gcs_server", "Ray's GCS does not answer"),
    ],
)
def test_an_error_names_its_victim_or_not(victim: str, error: str) -> None:
    assert names_victim(victim).search(error)
    assert not names_victim(victim).search("error: something is gone")


# --- rows and table ---


def test_a_row_comes_back_from_its_line_and_a_line_cut_off_is_none(tmp_path: Path) -> None:
    kept = row(attempt(left=("raylet",)), RESUMED)
    again = replace(kept, trial=replace(kept.trial, number=1, again=Moment(steps=None, share=0.5)))
    file = tmp_path / "trials.jsonl"
    file.write_text(f"{kept.line()}\n{again.line()}\n{kept.line()[:50]}")
    assert kills.read_rows(file) == [kept, again]
    assert kills.read_rows(tmp_path / "none") == []


def test_a_row_is_good_only_if_nothing_hung_nothing_is_left_and_all_is_equal() -> None:
    assert row(attempt(), RESUMED).good
    assert not row(attempt(code=None), RESUMED).good
    assert not row(attempt(left=("raylet",)), RESUMED).good
    assert not row(attempt(), replace(RESUMED, left=("raylet",))).good
    assert not row(attempt(), RESUMED, weights_equal=False).good
    assert not row(attempt(), RESUMED, ledger_equal=False).good
    assert not row(attempt(), attempt(), completed=False).good


def test_the_table_has_a_line_for_each_layout_and_victim() -> None:
    rows = [
        row(attempt(end_s=2.0), RESUMED),
        row(attempt(end_s=6.0, named=False), attempt(end_s=4.0), RESUMED, weights_equal=False),
        row(
            attempt(code=0, end_s=9.0, named=None, advised=None, raw=None, num_hits=2),
            victim="grader",
            layout="split",
            recoveries=(("grader", 0.5), ("grader", 1.0), ("learner", 2.5)),
        ),
        row(attempt(code=None, end_s=90.0, left=("a", "b"), raw=True), RESUMED, victim="grader", layout="split"),
        row(RESUMED, victim=CONTROL),
    ]
    assert table(rows)[2:] == [
        "| colocated | learner | 2 | 3 |  |  | 4.0 | 6.0 | 0 | 0 | 0 | 1 of 2 | 2 of 2 | 2 (3) | 2 of 3 | 3 of 3 | 0 |",
        "| colocated | none | 1 | 0 |  |  |  |  | 0 | 0 | 0 | 1 of 1 | 1 of 1 |  |  |  | 0 |",
        "| split | grader | 2 | 3 | 1.0 | 2.5 | 49.5 | 90.0 | 1 | 2 | 1 | 2 of 2 | 2 of 2 | 0 (1), hung (1) "
        "| 1 of 1 | 1 of 1 | 1 |",
        "| all |  | 5 | 6 | 1.0 | 2.5 | 6.0 | 90.0 | 1 | 2 | 1 | 4 of 5 | 5 of 5 | 0 (1), 2 (3), hung (1) "
        "| 3 of 4 | 4 of 4 | 1 |",
    ]
    assert {line.count("|") for line in table(rows)} == {18}


def test_times_of_recoveries_are_kept_with_a_row_and_summed_up() -> None:
    healed = attempt(code=0, end_s=30.0, named=None, advised=None, raw=None)
    of_ranks = row(healed, victim=RANK, layout="sft", recoveries=(("rank", 6.0), ("rank", 9.0)))
    rows = [of_ranks, row(healed, recoveries=(("learner", 4.0),)), row()]

    assert [Row.read(each.line()) for each in rows] == rows
    assert recoveries_line(rows) == (
        "3 times a command went on by itself: 6.0 s after the death was noticed (median), 9.0 s (worst)"
    )
    assert recoveries_line(rows[2:]) == "no command went on by itself"


def test_each_victim_has_times_of_its_own_kind_over_all_layouts() -> None:
    healed = attempt(code=0, num_hits=2)
    rows = [
        row(healed, victim="grader", layout="split", recoveries=(("grader", 1.0), ("grader", 4.0), ("learner", 30.0))),
        row(healed, victim="grader", recoveries=(("grader", 2.0),)),
        row(healed, victim="runner", layout="environment"),
        # It takes its workers with it.
        row(attempt(code=0), victim="raylet", recoveries=(("controller", 12.0), ("learner", 3.0))),
    ]
    assert victims_table(rows)[2:] == [
        "| grader | 2 | 4 | 3 | 2.0 | 4.0 | 5 |",
        "| runner | 1 | 2 | 0 |  |  | 5 |",
        "| raylet | 1 | 1 | 2 | 7.5 | 12.0 |  |",
    ]


def test_a_folder_with_runs_of_other_code_is_refused(tmp_path: Path) -> None:
    kills.claim(tmp_path)
    kills.claim(tmp_path)
    (tmp_path / "code").write_text("another")
    with pytest.raises(SystemExit, match=f"{re.escape(str(tmp_path))}.*--folder"):
        kills.claim(tmp_path)
