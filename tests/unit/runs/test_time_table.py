# SPDX-License-Identifier: Apache-2.0
"""The table at the end of a run: small, within the console's width, and no reason for a run to fail."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from podium.observe.causes import CAUSES
from podium.observe.timeline import (
    SlowEpisode,
    TimelineFile,
    TimelineSpan,
    earlier_file,
    read_newest,
    timeline_file,
)  # fmt: skip
from podium.runs.accounting import WorkerTime
from podium.runs.time_table import closing_lines, part_text, table_lines

LEARNER, GENERATOR = "train[0]@here/cpu#0", "rollout[0]@here/cpu#0"


def test_the_largest_causes_come_first_with_seconds_and_shares() -> None:
    times = [
        WorkerTime(worker="controller", seconds={"generation": 200.0}),
        WorkerTime(worker=LEARNER, seconds={"update": 30.0, "waiting for the tail of generation": 70.0}),
        WorkerTime(worker=GENERATOR, seconds={"generation": 90.0, "waiting for weights": 10.0}),
        WorkerTime(worker="rollout[1]@here/cpu#0", seconds={"generation": 100.0}),
    ]
    assert table_lines(times) == [
        "  seconds of workers                    train x1  rollout x2",
        "  generation                                   -    190  95%",
        "  waiting for the tail of generation   70.0  70%           -",
        "  update                               30.0  30%           -",
        "  waiting for weights                          -   10.0   5%",
        "  idle                                 70.0  70%   10.0   5%",
    ]


def test_it_is_small_whatever_the_workers_did() -> None:
    seconds = {cause: 10.0 + at for at, cause in enumerate(CAUSES)}
    pools = ("train", "rollout", "graders", "runners")
    lines = table_lines([WorkerTime(worker=f"{pool}[0]@here/cpu#0", seconds=seconds) for pool in pools])
    assert len(lines) <= 10
    assert max(map(len, lines)) <= 80


def write(run: Path, end_s: float) -> None:
    file = TimelineFile(timeline_file(run))
    file.append(
        [
            TimelineSpan("controller", "launch", 0.0, 0.0),
            TimelineSpan("controller", "rollout", 0.0, end_s),
            TimelineSpan(GENERATOR, "generator.stream > tail", 1.0, end_s),
            TimelineSpan(LEARNER, "policy.describe", 0.0, 1.0),
        ]
    )
    file.append_slowest(
        4, [SlowEpisode(step=4, group=7, sample=2, tokens=511, begin_s=1.0, end_s=end_s, worker=GENERATOR)]
    )
    file.close()


def test_the_slowest_episodes_are_named_where_workers_waited_for_them(tmp_path: Path) -> None:
    write(tmp_path, 10.0)
    lines = closing_lines(tmp_path)
    assert lines[-1] == f"  slowest in step 4: group 7 sample 2 (511 tokens, 9.0 s on {GENERATOR})"
    assert any("waiting for the tail of generation" in line for line in lines)


def test_a_short_run_and_one_without_a_timeline_have_none(tmp_path: Path) -> None:
    assert closing_lines(tmp_path) == []
    write(tmp_path, 3.0)
    assert closing_lines(tmp_path) == []


def test_no_error_ends_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError

    write(tmp_path, 10.0)
    monkeypatch.setattr("podium.runs.time_table.worker_times", fail)
    assert closing_lines(tmp_path) == []


def write_phases(run: Path, *, steps: int, most_bytes: int = 32 << 20) -> None:
    """600 s of start-up, half of the steps with 1.5 s of grading, and then half without."""
    clock = [0.0]
    file = TimelineFile(timeline_file(run), most_bytes=most_bytes, clock=lambda: clock[0])
    file.append([TimelineSpan("controller", "launch", 0.0, 0.0), TimelineSpan("controller", "start-up", 0.0, 600.0)])
    for step in range(steps):
        at = clock[0] = 600.0 + 2.0 * step
        update_s = at + 1.5 if step < steps / 2 else at + 0.5
        file.append(
            [
                TimelineSpan("controller", "rollout", at, at + 0.5),
                *([TimelineSpan("controller", "grade", at + 0.5, update_s)] if update_s > at + 0.5 else []),
                TimelineSpan("controller", "update", update_s, at + 2.0),
                TimelineSpan(LEARNER, "generator.stream", at, at + 0.5),
                TimelineSpan(LEARNER, "policy.update", update_s, at + 2.0),
            ]
        )
    file.close()


def cells(lines: list[str], cause: str) -> list[str]:
    return next((line.split()[-2:] for line in lines if line.strip().startswith(cause)), ["-"])


def test_a_table_has_the_start_and_all_steps_of_a_run(tmp_path: Path) -> None:
    """More than a quarter MiB. 600 s of start-up, 1,000 s of waits for grading, and 1,000 times 1.5 s and 0.5 s of
    updates: 4,600 s."""
    write_phases(tmp_path, steps=2_000)
    assert timeline_file(tmp_path).stat().st_size > 1 << 18
    lines = closing_lines(tmp_path)

    assert "seconds of workers" in lines[0]
    assert cells(lines, "waiting for start-up") == ["600", "13%"]
    assert cells(lines, "waiting for grading") == ["1000", "22%"]
    assert cells(lines, "update") == ["2000", "43%"]


def test_a_table_of_a_part_of_a_run_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_phases(tmp_path, steps=400)
    monkeypatch.setattr("podium.runs.time_table._MOST_BYTES", 10_000)
    lines = closing_lines(tmp_path)

    assert cells(lines, "waiting for start-up") == ["-"]
    (steps,) = re.findall(r"^  only the last (\d+) steps \(.+\), not all of the run:$", lines[0])
    assert 20 < int(steps) < 200
    assert part_text(read_newest(tmp_path, most_bytes=1 << 20)) is None


def test_a_part_reaches_into_a_full_file_and_begins_where_all_files_are(tmp_path: Path) -> None:
    write_phases(tmp_path, steps=400, most_bytes=30_000)
    current, earlier = timeline_file(tmp_path), earlier_file(timeline_file(tmp_path))
    newest = read_newest(tmp_path, most_bytes=current.stat().st_size + earlier.stat().st_size)
    assert newest.begin_s is not None  # the file before the earlier one is lost
    assert newest.begin_s > 700.0
    assert newest.num_steps > 100
    rank = TimelineFile(timeline_file(tmp_path, 1))
    rank.append([TimelineSpan("rank 1", "compute", 0.0, 1_300.0), TimelineSpan("rank 1", "compute", 1_300.0, 1_400.0)])
    rank.close()
    spans = read_newest(tmp_path, most_bytes=5_000).spans
    assert min(span.end_s for span in spans) > 1_300.0


@pytest.mark.slow
@pytest.mark.serial
def test_the_table_of_a_long_run_takes_less_than_a_thousandth_of_it(tmp_path: Path) -> None:
    file = TimelineFile(timeline_file(tmp_path), most_bytes=8 << 20)
    for step in range(6_000):
        at = step * 2.0
        spans = [
            TimelineSpan("controller", "rollout", at, at + 1.0),
            TimelineSpan("controller", "update", at + 1, at + 2),
        ]
        for worker in range(8):
            name = f"train[{worker}]@here/cpu#0"
            spans += [
                TimelineSpan(name, "generator.stream > steps", at, at + 0.5),
                TimelineSpan(name, "generator.stream > tail", at + 0.5, at + 0.6 + worker / 100),
                TimelineSpan(name, "generator.stream", at, at + 0.6 + worker / 100),
                TimelineSpan(name, "policy.update", at + 1.1, at + 1.9),
            ]
        file.append(spans)
    file.close()
    began = time.process_time()
    lines = closing_lines(tmp_path)
    assert time.process_time() - began < 12.0
    assert lines[0].startswith("  only the last ")
    assert len(lines) >= 4
