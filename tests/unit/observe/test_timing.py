# SPDX-License-Identifier: Apache-2.0
"""Every second is accounted to one cause: by hand-moved clocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.observe.timing import Stopwatch


class HandClock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def watch(clock: HandClock) -> Stopwatch:
    return Stopwatch(clock)


def test_time_outside_every_span_is_other(watch: Stopwatch, clock: HandClock) -> None:
    clock.now += 3
    assert watch.seconds() == {"other": 3.0}


def test_a_span_inside_another_is_taken_from_it(watch: Stopwatch, clock: HandClock) -> None:
    clock.now += 1
    with watch.span("compute"):
        clock.now += 4
        with watch.span("data"):
            clock.now += 2
        clock.now += 8
    assert watch.seconds() == {"other": 1.0, "compute": 12.0, "data": 2.0}


def test_a_cause_inside_itself_counts_once(watch: Stopwatch, clock: HandClock) -> None:
    with watch.span("compute"), watch.span("compute"):
        clock.now += 5
    assert watch.seconds()["compute"] == 5.0


def test_a_span_that_is_still_open_counts_up_to_now(watch: Stopwatch, clock: HandClock) -> None:
    with watch.span("checkpoint"):
        clock.now += 2
        assert watch.seconds()["checkpoint"] == 2.0
        clock.now += 1
    assert watch.seconds()["checkpoint"] == 3.0


def test_a_mark_is_a_moment_and_takes_no_time(watch: Stopwatch, clock: HandClock) -> None:
    with watch.span("publish"):
        clock.now += 2
        watch.mark("published version 3")
        clock.now += 1
    assert watch.seconds() == {"other": 0.0, "publish": 3.0}
    spans = [(span.name, span.begin_s, span.end_s) for span in watch.take_spans()]
    assert spans == [("launch", 50.0, 50.0), ("published version 3", 52.0, 52.0), ("publish", 50.0, 53.0)]


def test_what_was_before_the_launch_is_a_span_and_takes_no_time(watch: Stopwatch, clock: HandClock) -> None:
    clock.now += 1
    watch.note_before("recovery", 4.0)
    watch.note_before("too late", 0.5)
    assert watch.seconds() == {"other": 1.0}
    spans = [(span.name, span.begin_s, span.end_s) for span in watch.take_spans()]
    assert spans == [("launch", 50.0, 50.0), ("recovery", 47.0, 50.0)]


def test_a_span_that_raises_ends_there(watch: Stopwatch, clock: HandClock) -> None:
    def fail() -> None:
        with watch.span("data"):
            clock.now += 2
            raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        fail()
    clock.now += 1
    assert watch.seconds() == {"other": 1.0, "data": 2.0}


def test_the_summary_puts_the_largest_cause_first_and_other_last(watch: Stopwatch, clock: HandClock) -> None:
    clock.now += 5
    with watch.span("data"):
        clock.now += 1
    with watch.span("compute"):
        clock.now += 4
    summary = watch.summary()
    assert summary.total_s == 10.0
    assert [(row.cause, row.seconds, row.share) for row in summary.rows] == [
        ("compute", 4.0, 0.4),
        ("data", 1.0, 0.1),
        ("other", 5.0, 0.5),
    ]
    assert summary.lines() == [
        "compute       4.00 s   40.0%",
        "data          1.00 s   10.0%",
        "other         5.00 s   50.0%",
        "total        10.00 s  100.0%",
    ]


def test_a_summary_of_no_time_at_all_has_no_shares(watch: Stopwatch) -> None:
    assert [row.share for row in watch.summary().rows] == [0.0]


@given(st.recursive(st.integers(0, 9), lambda inner: st.tuples(st.sampled_from("abc"), st.lists(inner, max_size=4))))
def test_the_causes_always_add_up_to_the_whole(tree: object) -> None:
    clock = HandClock()
    watch = Stopwatch(clock)

    def live(node: object) -> None:
        match node:
            case int(seconds):
                clock.now += seconds
            case (str(cause), list(inner)):
                with watch.span(cause):
                    for each in inner:
                        live(each)

    live(tree)
    assert sum(watch.seconds().values()) == clock.now - 50.0
    assert watch.summary().total_s == clock.now - 50.0
