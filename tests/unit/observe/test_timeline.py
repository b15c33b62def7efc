# SPDX-License-Identifier: Apache-2.0
"""Timelines: what is written is read again, files stay small, and damage costs only what it hits."""

from __future__ import annotations

import errno
from itertools import count
from pathlib import Path

import pytest

from podium.observe.timeline import (
    EngineSteps,
    SlowEpisode,
    TimelineFile,
    TimelineSpan,
    earlier_file,
    engine_steps,
    read_slowest,
    read_timeline,
    spans_of,
    timeline_file,
)
from podium.observe.timing import Stopwatch, wall_clock_s


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_spans_of_several_processes_are_read_as_they_were_written(tmp_path: Path) -> None:
    spans = [
        TimelineSpan("controller", "update", 1_700_000_000.25, 1_700_000_001.5),
        TimelineSpan("train[0]@node/cpu#0", "policy.update > forward", 1_700_000_000.5, 1_700_000_001.0),
    ]
    of_rank = TimelineSpan("rank 11", "compute", 1_700_000_002.0, 1_700_000_002.125)
    file, another = TimelineFile(timeline_file(tmp_path)), TimelineFile(timeline_file(tmp_path, 11))
    file.append(spans)
    another.append([of_rank])
    file.close()
    another.close()

    assert list(read_timeline(tmp_path)) == [*spans, of_rank]


def test_numbers_about_spans_and_the_slowest_episodes_are_read_again(tmp_path: Path) -> None:
    values = {"steps": 12, "lanes": 3.5, "generated_tokens": 42, "prefilled_tokens": 7, "prefill_s": 0.125}
    worker = "rollout[0]@node/cpu#0"
    spans = [
        TimelineSpan(worker, "generator.stream > tail", 1_700_000_000.0, 1_700_000_001.0, values),
        TimelineSpan(worker, "generator.stream", 1_700_000_000.0, 1_700_000_002.0),
    ]
    episodes = [
        SlowEpisode(step=3, group=7, sample=2, tokens=511, begin_s=1e9, end_s=1e9 + 3.25, worker=worker),
        SlowEpisode(step=3, group=1, sample=0, tokens=4, begin_s=1e9, end_s=1e9 + 1.0, worker=worker),
    ]
    file = TimelineFile(timeline_file(tmp_path))
    file.append(spans)
    file.append_slowest(3, episodes)
    file.close()

    assert list(read_timeline(tmp_path)) == spans
    assert list(read_slowest(tmp_path)) == episodes
    assert str(episodes[0]) == f"group 7 sample 2 (511 tokens, 3.2 s on {worker})"
    assert list(engine_steps(read_timeline(tmp_path))) == [
        EngineSteps(
            worker=worker, begin_s=1_700_000_000.0, end_s=1_700_000_001.0, steps=12, lanes=3.5, generated_tokens=42,
            prefilled_tokens=7, prefill_s=0.125, is_tail=True,
        )
    ]  # fmt: skip


def test_spans_wait_for_a_second_and_not_longer(tmp_path: Path) -> None:
    clock = Clock()
    file = TimelineFile(timeline_file(tmp_path), clock=clock)
    span = TimelineSpan("rank 0", "compute", 5.0, 6.0)
    clock.now_s += 0.5
    file.append([span])
    assert not timeline_file(tmp_path).exists()
    clock.now_s += 0.5
    file.append([span])
    assert list(read_timeline(tmp_path)) == [span, span]
    file.close()


def test_a_long_run_keeps_its_newest_spans_in_a_bounded_size(tmp_path: Path) -> None:
    clock, most_bytes = Clock(), 4_000
    file = TimelineFile(timeline_file(tmp_path), most_bytes=most_bytes, clock=clock)
    for at in range(500):
        clock.now_s += 2.0
        file.append([TimelineSpan("rank 0", f"step {at}", float(at), at + 0.5)])
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * most_bytes + 100
    file.close()

    kept = [span.name for span in read_timeline(tmp_path)]
    assert earlier_file(timeline_file(tmp_path)).exists()
    assert kept == [f"step {at}" for at in range(500 - len(kept), 500)]
    assert len(kept) > 60


def test_another_process_counts_what_an_earlier_one_wrote(tmp_path: Path) -> None:
    """A run that is resumed often must not grow without bound."""
    for at in count():
        file = TimelineFile(timeline_file(tmp_path), most_bytes=1_000)
        file.append([TimelineSpan("rank 0", f"step {at}", 0.0, 1.0)])
        file.close()
        if earlier_file(timeline_file(tmp_path)).exists():
            break
        assert at < 100
    assert [span.name for span in read_timeline(tmp_path)] == [f"step {each}" for each in range(at + 1)]


@pytest.mark.parametrize(
    "damage",
    ["half a line", '{"worker": "rank 0"}\n', '[1, 2]\n{"spans": 3}\n', "\0\0\n", '{"step": 1, "slowest": [[1]]}\n'],
)
def test_damaged_lines_are_left_out(tmp_path: Path, damage: str) -> None:
    span = TimelineSpan("rank 0", "compute", 5.0, 6.0)
    file = TimelineFile(timeline_file(tmp_path))
    file.append([span])
    file.close()
    with timeline_file(tmp_path).open("a") as lines:
        lines.write(damage)
    assert list(read_timeline(tmp_path)) == [span]

    resumed = TimelineFile(timeline_file(tmp_path))
    resumed.append([span])
    resumed.close()
    assert list(read_timeline(tmp_path)) == [span, span]


def test_a_stopwatch_returns_its_spans_once() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    with watch.span("evaluation"):
        clock.now_s += 1.0
        with watch.span("rollout"):
            clock.now_s += 2.0
    clock.now_s += 4.0

    assert spans_of("controller", watch) == [
        TimelineSpan("controller", "launch", 100.0, 100.0),
        TimelineSpan("controller", "evaluation > rollout", 101.0, 103.0),
        TimelineSpan("controller", "evaluation", 100.0, 103.0),
    ]
    assert spans_of("controller", watch) == []


def test_a_detail_of_a_span_leaves_its_seconds() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    with watch.span("wait"):
        clock.now_s += 1.0
        with watch.detail("waiting for grading"):
            clock.now_s += 2.0
    assert watch.seconds() == {"other": 0.0, "wait": 3.0}
    assert spans_of("controller", watch)[1:] == [
        TimelineSpan("controller", "wait > waiting for grading", 101.0, 103.0),
        TimelineSpan("controller", "wait", 100.0, 103.0),
    ]


def test_a_stopwatch_measures_by_the_time_of_day() -> None:
    watch = Stopwatch()
    with watch.span("update"):
        pass
    assert spans_of("controller", watch)[-1].end_s == pytest.approx(wall_clock_s(), abs=5.0)


class Reports:
    """Is told of the disk."""

    def __init__(self) -> None:
        self.faults = list[str]()
        self.num_lost: int | None = None

    def cannot_write(self, path: Path, fault: str) -> None:
        self.faults.append(fault)

    def writes_again(self, path: Path, num_lost: int) -> None:
        self.num_lost = num_lost


def test_spans_wait_for_a_folder_that_is_gone_but_not_without_end(tmp_path: Path) -> None:
    clock, reports, run = Clock(), Reports(), tmp_path / "run"
    file = TimelineFile(timeline_file(run), reports, clock=clock)
    for at in range(1_500):
        clock.now_s += 2.0
        file.append([TimelineSpan("rank 0", f"step {at}", float(at), at + 0.5)])
    assert reports.faults
    run.mkdir()
    file.close()
    assert [span.name for span in read_timeline(run)] == [f"step {at}" for at in range(1_000)]
    assert reports.num_lost == 0


def test_a_disk_that_refuses_the_change_of_files_loses_no_span(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError(errno.EROFS, "read-only")

    clock = Clock()
    file = TimelineFile(timeline_file(tmp_path), Reports(), most_bytes=200, clock=clock)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", refuse)
        for at in range(10):
            clock.now_s += 2.0
            file.append([TimelineSpan("rank 0", f"step {at}", float(at), at + 0.5)])
    clock.now_s += 2.0
    file.append([TimelineSpan("rank 0", "step 10", 10.0, 10.5)])
    file.close()
    assert [span.name for span in read_timeline(tmp_path)] == [f"step {at}" for at in range(11)]
    assert earlier_file(timeline_file(tmp_path)).exists()
