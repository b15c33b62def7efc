# SPDX-License-Identifier: Apache-2.0
"""The table at the end of a run: small, within the console's width, and no reason for a run to fail."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from podium.observe.causes import CAUSES
from podium.observe.timeline import SlowEpisode, TimelineFile, TimelineSpan, timeline_file
from podium.runs.accounting import WorkerTime
from podium.runs.time_table import closing_lines, table_lines

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


@pytest.mark.serial
def test_the_table_of_a_long_run_takes_less_than_half_a_second(tmp_path: Path) -> None:
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
    assert time.process_time() - began < 0.5
    assert len(lines) >= 4
