# SPDX-License-Identifier: Apache-2.0
"""Spans of one worker in lanes of whole microseconds: in each, a span is inside the one before it or after it."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from podium.observe.timeline import TimelineSpan
from podium.runs.tracing import in_lanes

BEGIN_S = 1_790_000_000.0


def span(name: str, begin_s: float, end_s: float) -> TimelineSpan:
    return TimelineSpan("grade[0]", name, begin_s, end_s)


def written(name: str, begin_s: float, end_s: float) -> TimelineSpan:
    """As it is read back: begin and length are rounded one by one."""
    begin_s, length_s = round(BEGIN_S + begin_s, 6), round(end_s - begin_s, 6)
    return span(name, begin_s, begin_s + length_s)


def lanes(*spans: TimelineSpan) -> list[tuple[int, TimelineSpan]]:
    return [(placed.lane, placed.span) for placed in in_lanes(spans)]


def times(*spans: TimelineSpan) -> list[tuple[int, str, int, int]]:
    return [(each.lane, each.span.name, each.begin_us, each.end_us) for each in in_lanes(spans, BEGIN_S)]


def test_calls_at_the_same_time_have_lanes_of_their_own_and_keep_what_is_inside() -> None:
    first, second, third = span("grade", 0, 10), span("grade", 2, 6), span("grade", 6, 12)
    inside = span("grade > decoding", 3, 5)
    assert lanes(inside, second, first, third) == [(0, first), (1, second), (1, inside), (1, third)]


def test_a_span_as_long_as_the_one_around_it_is_inside_it() -> None:
    """The inner one is written first."""
    inner, outer = span("compute > checkpoint", 1, 2), span("compute", 1, 2)
    assert lanes(inner, outer) == [(0, outer), (0, inner)]


def test_a_span_whose_outer_one_is_unknown_is_shown_all_the_same() -> None:
    """The outer one ends later, and may be in no file yet."""
    alone, beside = span("stream > waiting", 1, 2), span("stream > waiting", 1.5, 3)
    assert lanes(alone, beside) == [(0, alone), (1, beside)]


def test_an_end_that_rounding_moves_past_the_outer_end_is_cut_off_there() -> None:
    """Outer: 0.4 to 2.4 us, as 0 and 2. Inner: 0.6 to 2.3 us, as 1 and 2, so that it would end at 3."""
    outer, inner = written("update", 0.4e-6, 2.4e-6), written("update > forward", 0.6e-6, 2.3e-6)
    assert times(inner, outer) == [(0, "update", 0, 2), (0, "update > forward", 1, 2)]


def test_an_inner_span_that_rounding_makes_the_longer_one_stays_inside() -> None:
    outer, inner = span("update", BEGIN_S + 1, BEGIN_S + 2), span("update > forward", BEGIN_S + 1, BEGIN_S + 2.000001)
    assert times(inner, outer) == [
        (0, "update", 1_000_000, 2_000_000), (0, "update > forward", 1_000_000, 2_000_000),
    ]  # fmt: skip


def test_a_span_that_rounding_lets_begin_before_the_last_one_ended_begins_at_that_end() -> None:
    """First: 0.6 to 2.3 us, as 1 and 2, so that it would end at 3. Second: from 2.3 us on."""
    first, second = written("rollout", 0.6e-6, 2.3e-6), written("update", 2.3e-6, 9e-6)
    inner = written("update > forward", 2.3e-6, 9e-6)
    assert times(first, second, inner) == [
        (0, "rollout", 1, 3), (0, "update", 3, 9), (0, "update > forward", 3, 9),
    ]  # fmt: skip


def test_a_span_that_ends_with_an_inner_one_too_long_leaves_its_lane_free() -> None:
    spans = (
        written("update", 0.4e-6, 2.4e-6),
        written("update > forward", 0.6e-6, 2.3e-6),
        written("rollout", 2.4e-6, 5e-6),
    )
    assert times(*spans)[-1] == (0, "rollout", 2, 5)


def require_nesting(spans: list[TimelineSpan]) -> None:
    placed = list(in_lanes(spans, BEGIN_S))
    assert Counter(each.span for each in placed) == Counter(spans)
    for at, outer in enumerate(placed):
        assert outer.begin_us <= outer.end_us
        for other in placed[at + 1 :]:
            if other.lane == outer.lane:
                assert outer.begin_us <= other.begin_us
                assert other.begin_us >= outer.end_us or other.end_us <= outer.end_us
        assert abs(outer.begin_us - round((outer.span.begin_s - BEGIN_S) * 1e6)) <= 2
        assert abs(outer.end_us - round((outer.span.end_s - BEGIN_S) * 1e6)) <= 4


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20), st.sampled_from(("a", "b", "a > b", "a > b > c")))))
def test_no_lane_has_spans_that_cross(drawn: list[tuple[int, int, str]]) -> None:
    require_nesting([span(name, BEGIN_S + begin, BEGIN_S + begin + length) for begin, length, name in drawn])


@given(st.lists(st.tuples(st.floats(0, 2e-5), st.booleans()), max_size=30))
def test_a_stopwatch_of_microseconds_has_one_lane_where_every_inner_span_is_inside(
    drawn: list[tuple[float, bool]],
) -> None:
    """Random spans as a stopwatch makes them: each begins and ends some time after what came before."""
    now_s, open_spans, spans = 0.0, [("a", 0.0)], []
    for after_s, begins in drawn:
        now_s += after_s
        if begins:
            open_spans.append((f"{open_spans[-1][0]} > {len(open_spans)}", now_s))
        elif len(open_spans) > 1:
            name, begin_s = open_spans.pop()
            spans.append(written(name, begin_s, now_s))
    spans += [written(name, begin_s, now_s) for name, begin_s in reversed(open_spans)]
    require_nesting(spans)
    assert {each.lane for each in in_lanes(spans, BEGIN_S)} == {0}
