# SPDX-License-Identifier: Apache-2.0
"""Sandboxes that are started before they are needed, and what users call: `Sandbox`."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal

from podium.environments.sandbox import isolation
from podium.environments.sandbox.limits import SandboxLimits, SandboxResult
from podium.environments.sandbox.process import SandboxProcess, SandboxSpec
from podium.environments.sandbox.tests_apart import TestResult, TestsApart
from podium.errors import SandboxError
from podium.recipe.on_policy import SandboxSection

_MOST_WORKERS = 16
_SPARE = 2
_TAKE_S = 60.0

Language = Literal["python", "shell"]


class Sandbox:
    """Runs programs that nobody has read, each in a new sandbox. All methods may be called from any thread.

    Sandboxes are one-shot: each is started ahead of time, runs one program, and is killed with all that it left. Raises
    a SandboxError where programs cannot be isolated, unless `allow_unsafe` says that limits are enough."""

    def __init__(
        self, limits: SandboxLimits | None = None, *, workers: int | None = None, python: str | None = None,
        paths: Sequence[str] = (), allow_unsafe: bool = False,
    ) -> None:  # fmt: skip
        """Starts nothing yet. `workers`: programs at the same time (default: one for each core, 16 at most). `python`:
        another interpreter, with its packages. `paths`: further files and folders that programs may read."""
        self.limits = limits or SandboxLimits()
        self.workers = workers or min(_MOST_WORKERS, _num_cores())
        self._python, self._paths, self._allow_unsafe = python, tuple(paths), allow_unsafe
        self._lock = threading.Lock()
        self._pool: _Pool | None = None
        # A test of functions needs two sandboxes, and waits for the second while it has the first.
        self._room = threading.BoundedSemaphore(self.workers)
        self._executor = ThreadPoolExecutor(self.workers, thread_name_prefix="sandbox")

    @classmethod
    def of(cls, section: SandboxSection) -> Sandbox:
        """The sandbox of a recipe."""
        limits = SandboxLimits(
            wall_s=section.wall_s, cpu_s=section.cpu_s, memory_mib=section.memory_mib, processes=section.processes,
            output_kib=section.output_kib, tmp_mib=section.tmp_mib,
        )  # fmt: skip
        return cls(
            limits, workers=section.workers, python=section.python, paths=section.paths,
            allow_unsafe=section.allow_unsafe,
        )  # fmt: skip

    def run(
        self, program: str, *, language: Language = "python", stdin: str | bytes = "", args: Sequence[str] = (),
        files: Mapping[str, str] | None = None, wall_s: float | None = None,
    ) -> SandboxResult:  # fmt: skip
        """Runs a Python program or a shell script, and waits for its end. `files` are written into its working
        directory before. `wall_s` replaces the limit of that name."""
        _check_names(files or {})
        data = stdin.encode("utf-8", errors="surrogateescape") if isinstance(stdin, str) else stdin
        with self._room:
            process = self._take()
            try:
                process.send(language, program=program, args=list(args), files=files)
                return process.finish(stdin=data, wall_s=wall_s)
            finally:
                process.close()

    async def run_async(
        self, program: str, *, language: Language = "python", stdin: str | bytes = "", args: Sequence[str] = (),
        files: Mapping[str, str] | None = None, wall_s: float | None = None,
    ) -> SandboxResult:  # fmt: skip
        """`run` for coroutines: other coroutines go on meanwhile."""
        call = partial(self.run, program, language=language, stdin=stdin, args=args, files=files, wall_s=wall_s)
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def test(
        self, program: str, tests: Sequence[str], *, setup: str = "", wall_s: float | None = None,
        stop_at_failure: bool = False, most_s: float | None = None,
    ) -> TestResult:  # fmt: skip
        """Runs Python tests of a Python program's functions and classes. The program runs in one sandbox and the tests
        in another, so that it cannot see what they expect, nor say that they passed.

        `setup` runs before each test, on the side of the tests. `wall_s` is for each test, `most_s` for all."""
        with self._room:
            run = TestsApart(
                self._take, program=program, tests=tests, setup=setup, limits=self.limits,
                wall_s=wall_s or self.limits.wall_s,
            )  # fmt: skip
            return run.result(stop_at_failure=stop_at_failure, most_s=most_s)

    async def test_async(
        self, program: str, tests: Sequence[str], *, setup: str = "", wall_s: float | None = None,
        stop_at_failure: bool = False, most_s: float | None = None,
    ) -> TestResult:  # fmt: skip
        """`test` for coroutines."""
        call = partial(
            self.test, program, tests, setup=setup, wall_s=wall_s, stop_at_failure=stop_at_failure, most_s=most_s
        )
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def require(self) -> None:
        """Raises a SandboxError if programs cannot be run here."""
        with self._lock:
            if self._pool is None:
                spec = SandboxSpec(
                    limits=self.limits, python=isolation.interpreter(self._python), paths=self._paths,
                    is_isolated=self._can_isolate(),
                )  # fmt: skip
                self._pool = _Pool(spec, self.workers + _SPARE)
                weakref.finalize(self, self._pool.close)

    @property
    def is_isolated(self) -> bool:
        """Whether programs are isolated, and not only limited."""
        self.require()
        assert self._pool is not None
        return self._pool.spec.is_isolated

    def close(self) -> None:
        """Ends the sandboxes that wait."""
        with self._lock:
            if self._pool is not None:
                self._pool.close()
                self._pool = None
        self._executor.shutdown(wait=False)

    def _take(self) -> SandboxProcess:
        self.require()
        assert self._pool is not None
        return self._pool.take()

    def _can_isolate(self) -> bool:
        try:
            require_isolation(self.limits, self._python, self._paths)
        except SandboxError as error:
            if not self._allow_unsafe:
                raise
            print(f"warning: sandbox.allow_unsafe: programs run without isolation. {error}", file=sys.stderr)
            return False
        return True


def require_isolation(limits: SandboxLimits, python: str | None, paths: Sequence[str]) -> None:
    """Starts one sandbox, and raises a SandboxError if that fails."""
    isolation.bubblewrap()
    for path in paths:
        if not os.path.exists(path):
            raise SandboxError(f"sandbox.paths: {path} does not exist. Remove it, or name what programs may read.")
    process = SandboxProcess(SandboxSpec(limits=limits, python=isolation.interpreter(python), paths=paths))
    try:
        process.wait_ready()
        process.send("python", program="print(6 * 7)", args=[])
        result = process.finish(wall_s=_TAKE_S)
        if result.stdout != b"42\n":
            raise isolation.not_started(result.stderr)
    finally:
        process.close()


def require_section(section: SandboxSection) -> None:
    """Raises a SandboxError if the recipe's programs cannot be run on this machine."""
    if section.allow_unsafe:
        isolation.interpreter(section.python)
        return
    sandbox = Sandbox.of(section)
    require_isolation(sandbox.limits, section.python, section.paths)


_RECIPE_SANDBOX: list[Sandbox] = []


def recipe_sandbox() -> Sandbox:
    """The sandbox of the run's recipe, for reward functions, tools and environments. It is the same in every call."""
    if not _RECIPE_SANDBOX:
        _RECIPE_SANDBOX.append(Sandbox())
    return _RECIPE_SANDBOX[0]


def use_recipe_sandbox(section: SandboxSection) -> Sandbox:
    """Makes `recipe_sandbox` the one of this section, for the whole process."""
    _RECIPE_SANDBOX[:] = [Sandbox.of(section)]
    return _RECIPE_SANDBOX[0]


class _Pool:
    """Sandboxes that wait. A thread starts them, which lives as long as the pool: they end with it."""

    def __init__(self, spec: SandboxSpec, size: int) -> None:
        self.spec, self._size = spec, size
        self._idle: deque[SandboxProcess] = deque()
        self._news = threading.Condition()
        self._is_closed = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._fill, name="sandbox pool", daemon=True)
        self._thread.start()

    def take(self) -> SandboxProcess:
        """The oldest one. Waits until one is started and Python runs in it."""
        deadline = time.monotonic() + _TAKE_S
        while True:
            with self._news:
                while not self._idle:
                    if self._error is not None:
                        error, self._error = self._error, None
                        self._news.notify_all()
                        raise SandboxError(f"sandbox: no sandbox can be started: {error}")
                    if self._is_closed or not self._news.wait(deadline - time.monotonic()):
                        raise SandboxError("sandbox: it is closed, or no sandbox was started in a minute.")
                process = self._idle.popleft()
                self._news.notify_all()
            try:
                process.wait_ready()
                return process
            except SandboxError:
                process.close()
                if time.monotonic() >= deadline or self._is_closed:
                    raise

    def close(self) -> None:
        """Ends the sandboxes that wait, and the thread."""
        with self._news:
            self._is_closed = True
            self._news.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(_TAKE_S)

    def _fill(self) -> None:
        """Starts sandboxes while fewer than `size` wait. `take` wakes it up, and waits for it."""
        while True:
            with self._news:
                while not self._is_closed and (len(self._idle) >= self._size or self._error is not None):
                    self._news.wait()
                if self._is_closed:
                    break
            try:
                process = SandboxProcess(self.spec)
            except Exception as error:
                with self._news:
                    self._error = error
                    self._news.notify_all()
                continue
            with self._news:
                self._idle.append(process)
                self._news.notify_all()
        for process in self._idle:
            process.close()


def _num_cores() -> int:
    """Those that this process may use, where the system says so."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_names(files: Mapping[str, str]) -> None:
    for name in files:
        if os.path.isabs(name) or ".." in name.split("/"):
            raise SandboxError(f"sandbox: {name!r} is outside of the program's working directory.")
