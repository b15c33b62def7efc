# SPDX-License-Identifier: Apache-2.0
"""Programs per second in the sandbox: a trivial Python program, a shell script, and tests in two sandboxes.

    python benchmarks/sandbox.py --seconds 6 --workers 2

Prints wall time and processor time of each execution, with all processes of the sandbox: on a machine that others use,
processor time says how many a free one would run."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import os
import platform
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from podium.environments.sandbox import Sandbox

_PR_SET_CHILD_SUBREAPER = 36
_CORES = 2


def main() -> None:
    """Measures all kinds, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each kind")
    parser.add_argument("--workers", type=int, default=_CORES, help="programs at the same time")
    arguments = parser.parse_args()
    # The init of a sandbox then becomes this process's child when it ends, and its time can be counted.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {arguments.workers} workers")
    box = Sandbox(workers=arguments.workers)
    kinds: dict[str, Callable[[int], bool]] = {
        "python": lambda at: box.run(f"print({at})").text == f"{at}\n",
        "shell": lambda at: box.run(f"echo {at}", language="shell").text == f"{at}\n",
        "tests": lambda at: box.test(f"def f(): return {at}", [f"assert f() == {at}"]).share == 1.0,
    }
    try:
        for name, run in kinds.items():
            run(0)
            print(f"{name:7} {measured(run, arguments.workers, arguments.seconds)}")
    finally:
        box.close()


def measured(run: Callable[[int], bool], workers: int, seconds: float) -> str:
    """Runs as many as it can for so long. Each result is checked."""
    numbers, end = itertools.count(), time.monotonic() + seconds

    def work(_: int) -> list[float]:
        waited = []
        while time.monotonic() < end:
            began_s = time.monotonic()
            assert run(next(numbers))
            waited.append(time.monotonic() - began_s)
        return waited

    before_s, began_s = processor_s(), time.monotonic()
    with ThreadPoolExecutor(workers) as threads:
        waits = sorted(itertools.chain.from_iterable(threads.map(work, range(workers))))
    took_s = time.monotonic() - began_s
    cpu_s = (processor_s() - before_s) / len(waits)
    return (
        f"{len(waits) / took_s:6.1f} a second; each {1000 * cpu_s:.1f} ms of processor time, so at most "
        f"{_CORES / cpu_s:.0f} a second on {_CORES} free cores; median {1000 * waits[len(waits) // 2]:.0f} ms; load "
        f"{os.getloadavg()[0]:.1f}"
    )


def processor_s() -> float:
    """Of this process and of all that have ended below it."""
    time.sleep(0.3)  # what was killed is still ending
    with contextlib.suppress(ChildProcessError):
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
    children, own = resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF)
    return children.ru_utime + children.ru_stime + own.ru_utime + own.ru_stime


if __name__ == "__main__":
    main()
