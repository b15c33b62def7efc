# SPDX-License-Identifier: Apache-2.0
"""Simulated runs of the real controller with random faults, for as long as it is given.

    make chaos                                        five minutes, from a seed that differs each time
    PYTHONPATH=tests python tests/chaos.py --seconds 3600 --seed 100000

Each seed has a method, a layout, a number of devices of each generator, a staleness, settings, up to six faults and up
to three more in each start, also that of a resumed part, while workers start, connect and get their first weights:
deaths, silence, late and lost replies and slow phases of learners (with critics, references, teachers and reward
models), generators, graders and episode runners, generators that leave (SIGTERM), nodes that join, die or are drained,
and requests to stop, after which the run is resumed. They come at any time: in saves, evaluations and recoveries too.
The run must come to its end in virtual time, train every group once, keep the invariants of the schedule and the bound
of staleness and, at staleness 0, end with the weights of the run without faults. The first seed that does not is shown
with the fewest faults that it needs, and the exit code is 1."""

from __future__ import annotations

import argparse
import gc
import logging
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from types import FrameType

from helpers.simulated_faults import AnyFault, CalmRuns, Schedule, StartFault
from helpers.simulated_runs import METHODS
from podium.controller.simulation.faults import shortest

# Of real time: a simulated run takes less than a second, and one that computes forever never reaches a virtual limit.
_LONGEST_S = 120
# In memory, where there is such a folder: the disk's latency is not simulated.
_MEMORY = Path("/dev/shm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, help="the first one; default: from the clock")
    parser.add_argument("--runs", type=int, help="at most so many")
    parser.add_argument("--method", choices=METHODS, help="default: one for each seed")
    parser.add_argument("--keep-going", action="store_true", help="show all seeds that fail, not only the first")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # every fault is one
    signal.signal(signal.SIGALRM, _expire)
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        num_failed = _run(CalmRuns(Path(folder)), arguments)
    sys.exit(1 if num_failed else 0)


def _run(calm: CalmRuns, arguments: argparse.Namespace) -> int:
    """Runs schedules one after the other and reports them. Returns how many failed."""
    first: int = arguments.seed if arguments.seed is not None else time.time_ns() % 10**9
    seed, began_s, failed = first, time.monotonic(), list[int]()
    cases, methods, kinds = Counter[str](), Counter[str](), Counter[str]()
    while time.monotonic() - began_s < arguments.seconds and seed - first != arguments.runs:
        signal.alarm(_LONGEST_S)
        schedule = Schedule(calm, seed, arguments.method)
        try:
            schedule.check()
        except Exception:
            failed.append(seed)
            _show(schedule, seed)
            if not arguments.keep_going:
                break
        case = schedule.case
        cases[f"{case.layout}, staleness {case.staleness}"] += 1
        if case.tensor > 1:
            cases[f"{case.layout}, generators of {case.tensor} devices"] += 1
        methods[case.method] += 1
        kinds.update(_kind(fault) for fault in schedule.faults)
        seed += 1
        if (seed - first) % 100 == 0:
            gc.collect()
            seconds = time.monotonic() - began_s
            print(f"{seed - first} schedules, {len(failed)} failed, {seconds:.0f} s", flush=True)
    signal.alarm(0)
    print(f"{seed - first} schedules (seeds {first} to {seed - 1}) in {time.monotonic() - began_s:.0f} s")
    for name, count in [*sorted(cases.items()), *sorted(methods.items()), *sorted(kinds.items())]:
        print(f"  {name}: {count}")
    print(f"failed: {', '.join(map(str, failed)) or 'none'}")
    return len(failed)


def _kind(fault: AnyFault) -> str:
    if isinstance(fault, StartFault):
        return f"{type(fault.fault).__name__}, at the start of {'a resumed' if fault.part else 'the first'} part"
    return type(fault).__name__


def _show(schedule: Schedule, seed: int) -> None:
    """Shows why a schedule fails, and the fewest faults that it needs for that."""
    traceback.print_exc()
    signal.alarm(20 * _LONGEST_S)
    print(f"seed {seed}: {schedule.case}; it needs these faults:")
    for fault in shortest(schedule.faults, schedule.fails):
        print(f"  {fault}")
    sys.stdout.flush()


def _expire(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"the simulation computes for more than {_LONGEST_S} s of real time")


if __name__ == "__main__":
    main()
