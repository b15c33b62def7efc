# SPDX-License-Identifier: Apache-2.0
"""A tracker that fails, is slow or never answers: the caller goes on at once, order is kept, and warnings are few."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from podium.observe.background import BackgroundLogger, Limits
from podium.observe.loggers import Logger, TableLogger, close_loggers
from podium.observe.metrics import StepMetrics
from podium.observe.tracking import Row, error_text

QUICK = Limits(most_waiting=20, tries=3, pause_s=0.0, silence_s=60.0, close_s=10.0)
A_MOMENT_S = 10.0  # for what comes at once


class Recorder:
    """A tracker that keeps what it gets. `fails` says whether a call raises."""

    def __init__(self, fails: Callable[[str, Any], bool] = lambda method, argument: False) -> None:
        self.fails, self.calls = fails, list[tuple[str, Any]]()
        self.threads = set[int]()

    def log(self, metrics: StepMetrics) -> None:
        self._call("log", metrics.step)

    def text(self, step: int, name: str, text: str) -> None:
        self._call("text", (step, name, text))

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        self._call("table", (step, name, len(rows)))

    def close(self, *, failed: bool) -> None:
        self._call("close", failed)

    def _call(self, method: str, argument: Any) -> None:
        self.threads.add(threading.get_ident())
        if self.fails(method, argument):
            raise ConnectionError(f"{method} {argument} at https://me:hunter22@host/api?api_key=abcdef")
        self.calls.append((method, argument))


def metrics(step: int) -> StepMetrics:
    return StepMetrics(step=step, time_s=float(step), values={"loss": 1.0})


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + A_MOMENT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Closed: a tracker waits for it without end."""
    event = threading.Event()
    yield event
    event.set()


def test_records_arrive_in_their_order_and_in_one_other_thread(warnings: list[str]) -> None:
    tracker = Recorder()
    logger = BackgroundLogger("mine", lambda: tracker, warn=warnings.append, limits=QUICK)
    assert isinstance(logger, Logger)
    assert isinstance(logger, TableLogger)

    logger.log(metrics(1))
    logger.text(1, "samples", "85")
    logger.table(2, "samples", [{"answer": "85"}, {"answer": "86"}])
    logger.log(metrics(2))
    logger.close()

    assert tracker.calls == [
        ("log", 1), ("text", (1, "samples", "85")), ("table", (2, "samples", 2)), ("log", 2), ("close", False),
    ]  # fmt: skip
    assert len(tracker.threads) == 1
    assert threading.get_ident() not in tracker.threads
    assert warnings == []


def test_a_call_that_fails_once_is_tried_again_and_nothing_is_lost(warnings: list[str]) -> None:
    failing = {("log", 2): 2, ("close", True): 0}

    def fails(method: str, argument: Any) -> bool:
        left = failing.get((method, argument), 0)
        failing[method, argument] = left - 1
        return left > 0

    tracker = Recorder(fails)
    logger = BackgroundLogger("mine", lambda: tracker, warn=warnings.append, limits=QUICK)
    for step in (1, 2, 3):
        logger.log(metrics(step))
    close_loggers([logger], failed=True)

    assert tracker.calls == [("log", 1), ("log", 2), ("log", 3), ("close", True)]
    assert len(warnings) == 1


def test_a_record_that_is_never_taken_is_dropped_with_one_warning_and_no_secret(
    warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = Recorder(lambda method, argument: method == "log" and argument % 2 == 0)
    logger = BackgroundLogger("mine", lambda: tracker, warn=warnings.append, limits=QUICK)
    for step in range(1, 6):
        logger.log(metrics(step))
    logger.close()

    assert tracker.calls == [("log", 1), ("log", 3), ("log", 5), ("close", False)]
    failure, lost = warnings
    assert "mine failed: ConnectionError: log 2 at https://***@host/api?api_key=***" in failure
    assert "hunter22" not in failure
    assert "abcdef" not in failure
    assert "2 records missing at mine" in lost


def test_the_failure_of_close_is_a_warning(warnings: list[str]) -> None:
    tracker = Recorder(lambda method, argument: method == "close")
    logger = BackgroundLogger("mine", lambda: tracker, warn=warnings.append, limits=QUICK)
    logger.close()

    assert len(warnings) == 1
    assert "ConnectionError: close" in warnings[0]


def test_a_tracker_that_cannot_be_opened_is_off(warnings: list[str]) -> None:
    tries = []

    def open_nothing() -> Recorder:
        tries.append(1)
        raise RuntimeError("no such server")

    logger = BackgroundLogger("mine", open_nothing, warn=warnings.append, limits=QUICK)
    for step in range(1, 4):
        logger.log(metrics(step))
    logger.close()

    assert len(tries) == 3
    failure, off, lost = warnings
    assert "no such server" in failure
    assert "mine is off for the rest of this run" in off
    assert "3 records missing" in lost


def test_a_tracker_that_never_answers_delays_neither_steps_nor_the_end(
    warnings: list[str], gate: threading.Event
) -> None:
    called = threading.Event()

    def fails(method: str, argument: Any) -> bool:
        called.set()
        return not gate.wait(600)

    tracker = Recorder(fails)
    limits = Limits(most_waiting=20, silence_s=0.05, close_s=0.2)
    logger = BackgroundLogger("mine", lambda: tracker, warn=warnings.append, limits=limits)
    logger.log(metrics(1))
    assert called.wait(A_MOMENT_S)
    began = time.monotonic()
    for step in range(2, 1002):
        logger.log(metrics(step))
    assert time.monotonic() - began < 5.0  # 1000 calls
    assert len(logger._waiting) == 20  # type: ignore[attr-defined]
    time.sleep(0.06)
    logger.log(metrics(1002))
    began = time.monotonic()
    logger.close()

    assert time.monotonic() - began < 5.0
    silent, stuck = warnings
    assert "mine has not answered for 0.05 s" in silent
    assert "The run ends without it; 1002 records may be missing" in stuck

    gate.set()
    wait_for(lambda: ("close", False) in tracker.calls)
    assert [argument for method, argument in tracker.calls if method == "log"] == [1, *range(983, 1003)]


def test_rows_of_tables_count_for_the_bound(warnings: list[str], gate: threading.Event) -> None:
    logger = BackgroundLogger("mine", lambda: Recorder(lambda *call: not gate.wait(600)), warn=warnings.append,
                              limits=Limits(most_waiting=20, close_s=0.05))  # fmt: skip
    logger.log(metrics(0))
    wait_for(lambda: logger._calling_since is not None and not logger._waiting)
    for step in range(1, 6):
        logger.table(step, "samples", [{"answer": "85"}] * 9)

    assert len(logger._waiting) == 2
    gate.set()
    logger.close()


def test_several_trackers_that_never_answer_share_one_deadline(warnings: list[str], gate: threading.Event) -> None:
    limits = Limits(close_s=0.5)

    def stuck() -> Recorder:
        return Recorder(lambda *call: not gate.wait(600))

    loggers = [BackgroundLogger(str(name), stuck, warn=warnings.append, limits=limits) for name in range(4)]
    for logger in loggers:
        logger.log(metrics(1))
    began = time.monotonic()
    close_loggers(loggers, failed=False)

    assert time.monotonic() - began < 1.5  # one after the other would take 2
    assert len(warnings) == 4


def test_all_loggers_are_closed_though_one_raises(warnings: list[str]) -> None:
    class Broken(Recorder):
        def close(self) -> None:  # type: ignore[override]
            raise ZeroDivisionError

    tracker = Recorder()
    logger = BackgroundLogger("mine", lambda: tracker, warn=warnings.append, limits=QUICK)
    with pytest.raises(ZeroDivisionError):
        close_loggers([Broken(), logger], failed=False)  # type: ignore[list-item]

    assert tracker.calls == [("close", False)]


def test_a_tracker_that_ends_its_thread_is_a_failure_like_others(warnings: list[str]) -> None:
    def leave() -> Recorder:
        raise SystemExit(1)

    logger = BackgroundLogger("mine", leave, warn=warnings.append, limits=QUICK)
    logger.log(metrics(1))
    logger.close()
    assert [each.partition(".")[0] for each in warnings] == [
        "mine failed: SystemExit: 1", "mine is off for the rest of this run", "1 record missing at mine",
    ]  # fmt: skip


def test_a_password_with_an_at_sign_is_not_shown() -> None:
    error = OSError("no answer of https://me:hunter@22@host/api, see https://host/@help")
    assert error_text(error, {}) == "OSError: no answer of https://***@host/api, see https://host/@help"
