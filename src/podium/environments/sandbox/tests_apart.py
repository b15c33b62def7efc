# SPDX-License-Identifier: Apache-2.0
"""Tests of a program's functions, in two sandboxes: one has the program, the other the tests and what they expect."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from podium.environments.sandbox.limits import SandboxLimits, SandboxResult
from podium.environments.sandbox.process import SandboxProcess

_MOST_LINE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TestResult:
    """Why each test failed, by test; None: it passed."""

    __test__ = False  # for pytest, which takes the name for a class of tests

    failures: tuple[str | None, ...]

    @property
    def num_passed(self) -> int:
        """How many tests passed."""
        return sum(failure is None for failure in self.failures)

    @property
    def share(self) -> float:
        """The share of the tests that passed; 0 without tests."""
        return self.num_passed / len(self.failures) if self.failures else 0.0


class TestsApart:
    """One program and its tests. A test that takes too long, or ends the program, fails; those behind it get a new
    program."""

    __test__ = False

    def __init__(
        self, take: Callable[[], SandboxProcess], *, program: str, tests: Sequence[str], setup: str,
        limits: SandboxLimits, wall_s: float,
    ) -> None:  # fmt: skip
        self._take, self._program, self._tests, self._setup = take, program, list(tests), setup
        self._limits, self._wall_s = limits, wall_s
        self._failures: dict[int, str | None] = {}
        self._end = float("inf")
        self._line = b""
        self._is_loaded = False

    def result(self, *, stop_at_failure: bool, most_s: float | None) -> TestResult:
        """Runs the tests in order."""
        if most_s is not None:
            self._end = time.monotonic() + most_s
        first = 0
        while first < len(self._tests) and time.monotonic() < self._end:
            why = self._session(first)
            reached = max((*self._failures, first - 1)) + 1
            if not self._is_loaded:
                self._failures.update(dict.fromkeys(range(reached, len(self._tests)), why))
                break
            if why is not None and reached < len(self._tests):
                self._failures[reached] = why
                reached += 1
            if stop_at_failure and any(self._failures.values()):
                break
            first = reached
        left = "was not run: a test failed before" if stop_at_failure and any(self._failures.values()) else (
            "was not run: the time for all tests was over"
        )  # fmt: skip
        return TestResult(failures=tuple(self._failures.get(at, left) for at in range(len(self._tests))))

    def _session(self, first: int) -> str | None:
        """Runs tests from this one on, in two new sandboxes. Why it did not end by itself, if so."""
        program, tests = self._take(), None
        results: list[SandboxResult] = []
        self._line, self._is_loaded = b"", False
        try:
            tests = self._take()
            mine, theirs = socket.socketpair()
            with mine, theirs:
                cpu_s = self._limits.cpu_s * (len(self._tests) - first)
                program.send("serve", program=self._program, peer=theirs, cpu_s=cpu_s)
                tests.send("test", tests=self._tests, setup=self._setup, first=first, peer=mine, cpu_s=cpu_s)
            watcher = threading.Thread(
                target=lambda: results.append(program.finish(wall_s=float("inf"))), name="tested program", daemon=True
            )
            watcher.start()
            left_s = max(0.0, self._end - time.monotonic())
            result = tests.finish(wall_s=min(self._wall_s, left_s), on_control=self._hear)
            program.stop()
            watcher.join()
        finally:
            for process in (program, tests):
                if process is not None:
                    process.close()
        return self._why(result, results[0] if results else None)

    def _why(self, tests: SandboxResult, program: SandboxResult | None) -> str | None:
        if program is not None and program.stopped_by is not None:
            return f"the program was above the limit {program.stopped_by}"
        if tests.stopped_by == "wall_s":
            return f"took longer than {self._wall_s:g} s"
        if tests.stopped_by is not None:
            return f"the tests were above the limit {tests.stopped_by}"
        return None if tests.exit_code == 0 else f"the tests ended with exit code {tests.exit_code}"

    def _hear(self, part: bytes) -> float:
        """Reports of the tests' sandbox: each gives the next test its time."""
        *lines, self._line = (self._line + part)[-_MOST_LINE:].split(b"\n")
        for line in lines:
            self._is_loaded = True
            with contextlib.suppress(ValueError, TypeError, KeyError):  # tests may write nonsense: it is no report
                news = json.loads(line)
                if "test" in news:
                    self._failures[int(news["test"])] = news["failure"]
        return min(time.monotonic() + self._wall_s, self._end)
