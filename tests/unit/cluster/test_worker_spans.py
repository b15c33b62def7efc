# SPDX-License-Identifier: Apache-2.0
"""Spans of a worker's threads: nested, timed, drained once, and seen from outside while they are open."""

import threading
from contextlib import contextmanager

import pytest

from podium.cluster import spans
from podium.cluster.identity import WorkerId
from podium.cluster.spans import SpanRecorder

WORKER = WorkerId("gen", 0, "node-a", "cpu")


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(spans, "wall_s", clock)
    return clock


@contextmanager
def at_work(recorder, name="work"):
    """A thread of that name, inside `generate` > `sampling`, until the block ends."""
    inside, leave = threading.Event(), threading.Event()

    def sampling_loop():
        with recorder.span("generate"), recorder.span("sampling"):
            inside.set()
            assert leave.wait(20)

    def run():
        recorder.name_thread(name)
        sampling_loop()

    thread = threading.Thread(target=run, name="carrier")
    thread.start()
    try:
        assert inside.wait(20)
        yield
    finally:
        leave.set()
        thread.join(20)


def test_spans_nest_by_name_and_end_from_the_inside_out(clock):
    recorder = SpanRecorder()
    with recorder.span("step"):
        clock.now_s = 101.0
        with recorder.span("forward"):
            clock.now_s = 103.0
        with recorder.span("backward"):
            clock.now_s = 106.0
    done = recorder.drain(WORKER)
    assert [(span.name, span.begin_s, span.end_s) for span in done] == [
        ("step > forward", 101.0, 103.0),
        ("step > backward", 103.0, 106.0),
        ("step", 100.0, 106.0),
    ]
    assert {span.worker for span in done} == {WORKER}


def test_drained_spans_do_not_come_again_and_open_ones_come_when_they_end(clock):
    recorder = SpanRecorder()
    with recorder.span("outer"):
        with recorder.span("inner"):
            pass
        assert [span.name for span in recorder.drain(WORKER)] == ["outer > inner"]
    assert [span.name for span in recorder.drain(WORKER)] == ["outer"]
    assert recorder.drain(WORKER) == ()


def test_a_span_that_an_exception_ends_is_closed_too():
    recorder = SpanRecorder()
    recorder.name_thread("work")

    def fail():
        with recorder.span("outer"), recorder.span("inner"):
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert [span.name for span in recorder.drain(WORKER)] == ["outer > inner", "outer"]
    assert recorder.doing("work") == ("", 0.0)


def test_what_a_thread_is_doing_is_its_innermost_open_span(clock):
    recorder = SpanRecorder()
    recorder.name_thread("work")
    assert recorder.doing("work") == ("", 0.0)
    with recorder.span("outer"):
        clock.now_s = 101.0
        with recorder.span("inner"):
            clock.now_s = 103.5
            assert recorder.doing("work") == ("outer > inner", 2.5)
        assert recorder.doing("work") == ("outer", 3.5)
    assert recorder.doing("work") == ("", 0.0)
    assert recorder.doing("nobody") == ("", 0.0)


def test_threads_do_not_nest_in_each_others_spans():
    recorder = SpanRecorder()
    with recorder.span("mine"), at_work(recorder):
        assert recorder.doing("work")[0] == "generate > sampling"
    assert sorted(span.name for span in recorder.drain(WORKER)) == ["generate", "generate > sampling", "mine"]


def test_another_thread_sees_where_the_work_thread_is():
    recorder = SpanRecorder()
    with at_work(recorder):
        (place,) = recorder.places(everyone=False)
    assert (place.thread, place.span) == ("work", "generate > sampling")
    functions = [frame.split()[-1] for frame in place.stack]
    assert "sampling_loop" in functions
    assert functions[-1] == "wait"
    assert any("test_worker_spans.py:" in frame for frame in place.stack)


def test_everyone_is_all_threads_but_the_asking_one_and_work_comes_first():
    recorder = SpanRecorder()
    with at_work(recorder, "zebra"), at_work(recorder):
        named = [place.thread for place in recorder.places(everyone=False)]
        everyone = [place.thread for place in recorder.places(everyone=True)]
    assert named == ["work", "zebra"]
    assert everyone[0] == "work"
    assert set(named) <= set(everyone)
    assert threading.current_thread().name not in everyone


def test_a_thread_in_no_span_has_none():
    recorder, leave, ready = SpanRecorder(), threading.Event(), threading.Event()

    def idle():
        recorder.name_thread("work")
        ready.set()
        leave.wait(20)

    thread = threading.Thread(target=idle)
    thread.start()
    assert ready.wait(20)
    (place,) = recorder.places(everyone=False)
    leave.set()
    thread.join(20)
    assert place.span == ""
