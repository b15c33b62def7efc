# SPDX-License-Identifier: Apache-2.0
"""Seconds from `podium train` to the first step of a run on two Ray workers, and the CPU time of all its processes.

    python benchmarks/start_up.py [--runs 3] [--against OTHER/src] [--kill-at "train: importing"]

The model is tiny, so that nothing but starting takes time. With `--against`, another checkout's code is run in turn
with this one's: on a busy machine only the comparison says something, and CPU time more than seconds. With `--kill-at`,
the controller is killed when the console says this, and both count from there.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from kills_processes import ProcessFamily, wait_until
from kills_task import make_task
from podium.cluster.processes import children

HERE = Path(__file__).resolve().parent
_LIMIT_S = 300.0
_STEPPED = b"\nstep "
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUp:
    """One start: until the console says that the first step is done."""

    seconds: float
    cpu_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--layout", default="colocated", help="colocated, split or environment")
    parser.add_argument("--against", type=Path, help="src folder of another checkout")
    parser.add_argument("--kill-at", metavar="TEXT", help="kill the controller when the console says this")
    options = parser.parse_args()
    sources = {"here": HERE.parent / "src"}
    if options.against is not None:
        sources = {"against": options.against.resolve(), **sources}
    found: dict[str, list[StartUp]] = {name: [] for name in sources}
    with tempfile.TemporaryDirectory() as folder:
        recipe = make_task(Path(folder) / "task").recipe_file(options.layout)
        for number in range(options.runs):
            for name, source in sources.items():
                found[name].append(measured(recipe, source, Path(folder) / f"{name}-{number}", options.kill_at))
                print(f"{name}: {found[name][-1].seconds:.1f} s, {found[name][-1].cpu_s:.1f} s of CPU", flush=True)
    for name, starts in found.items():
        seconds = statistics.median(each.seconds for each in starts)
        cpu_s = statistics.median(each.cpu_s for each in starts)
        print(f"{name}, median of {len(starts)}: {seconds:.1f} s, {cpu_s:.1f} s of CPU")


def measured(recipe: Path, source: Path, run: Path, kill_at: str | None) -> StartUp:
    """Starts the command, and ends it after its first step."""
    with tempfile.TemporaryDirectory(prefix="ray") as ray_folder, tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, "-m", "podium", "train", str(recipe), "--set", f"run.folder={run}"]
        environment = {**os.environ, "PYTHONPATH": str(source), "RAY_TMPDIR": ray_folder, "OMP_NUM_THREADS": "1"}
        began, cpu_s = time.monotonic(), 0.0
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        family = ProcessFamily(ray_folder=Path(ray_folder), leader=process.pid)

        def says(text: bytes) -> bool:
            """Whether the console has said this, or the command has ended."""
            return text in os.pread(output.fileno(), 1 << 20, 0) or process.poll() is not None

        try:
            if kill_at is not None:
                wait_until(lambda: says(kill_at.encode()), began + _LIMIT_S)
                began, cpu_s = time.monotonic(), _cpu_of(family)
                if process.poll() is None:
                    os.kill(_controller(process.pid), signal.SIGKILL)
            wait_until(lambda: says(_STEPPED), began + _LIMIT_S)
            start = StartUp(seconds=time.monotonic() - began, cpu_s=_cpu_of(family) - cpu_s)
        finally:
            family.end()
            process.wait()
        output.seek(0)
        said = output.read()
        if _STEPPED.decode() not in said:
            raise SystemExit(f"no step in {_LIMIT_S:.0f} s:\n{said}")
        return start


def _controller(command: int) -> int:
    """The child of the supervisor that has its command line. Orphans are its children too."""
    like = Path(f"/proc/{command}/cmdline").read_bytes()
    return next(pid for pid in children(command) if Path(f"/proc/{pid}/cmdline").read_bytes() == like)


def _cpu_of(family: ProcessFamily) -> float:
    return sum(_cpu_s(each.pid) for each in family.all_living())


def _cpu_s(pid: int) -> float:
    """Of a process and those of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS


if __name__ == "__main__":
    main()
