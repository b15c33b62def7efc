# SPDX-License-Identifier: Apache-2.0
"""Simulated runs of the real controller whose workers die at random moments, for as long as it is given.

    make chaos                                        five minutes, from a seed that differs each time
    PYTHONPATH=tests python tests/chaos.py --seconds 3600 --seed 100000

Each seed has a layout, a staleness and up to six deaths of learners, generators and graders, in recoveries too. The run
must come to its end, train every group once, keep the bound of staleness and, at staleness 0, end with the weights of
the run that nobody disturbed. The first seed that does not is shown with the fewest deaths that it needs, and the exit
code is 1."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from helpers.simulated_faults import Disturbance
from podium.controller.simulation.faults import shortest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, help="the first one; default: from the clock")
    parser.add_argument("--runs", type=int, help="at most so many")
    asked = parser.parse_args()
    logging.disable(logging.WARNING)  # every death is one
    first = asked.seed if asked.seed is not None else time.time_ns() % 10**9
    began_s, num_deaths, kinds = time.monotonic(), 0, Counter[str]()
    seed = first
    while time.monotonic() - began_s < asked.seconds and (asked.runs is None or seed - first < asked.runs):
        with tempfile.TemporaryDirectory() as folder:
            disturbance = Disturbance(Path(folder), seed)
            try:
                disturbance.check()
            except Exception:
                traceback.print_exc()
                few = shortest(disturbance.deaths, disturbance.fails)
                print(f"seed {seed}: {disturbance.layout}, staleness {disturbance.staleness}; it needs these deaths:")
                for death in few:
                    print(f"  {death}")
                sys.exit(1)
        num_deaths += len(disturbance.deaths)
        kinds[f"{disturbance.layout}, staleness {disturbance.staleness}"] += 1
        seed += 1
    runs = seed - first
    print(f"{runs} runs (seeds {first} to {seed - 1}) with {num_deaths} deaths in {time.monotonic() - began_s:.0f} s:")
    print("  no hang, no group lost or trained twice, no weights that differ")
    for kind, count in sorted(kinds.items()):
        print(f"  {kind}: {count}")


if __name__ == "__main__":
    main()
