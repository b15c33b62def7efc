# SPDX-License-Identifier: Apache-2.0
"""One call over four workers: Podium's cluster layer beside verl's worker group, on the same trajectories, in one run.

    .venv/bin/python benchmarks/dispatch.py        (see requirements-verl.txt for verl's environment)

The sides run one after the other, in processes and Rays of their own, `--turns` times; figures are medians over turns.
What each path does is told in dispatch_podium.py and dispatch_verl.py. Ratios are of wall time, verl over Podium.
Without verl's environment only Podium's figures are printed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
VERL = HERE.parent / ".venv-bench-verl" / "bin" / "python"
LIMIT_S = 1500
Figures = dict[str, Any]


def lengths_of(count: int) -> np.ndarray:
    """Log-normal, mean some 590 tokens, at most 2048."""
    drawn = np.random.default_rng(0).lognormal(6.1, 0.85, count)
    return np.clip(drawn, 16, 2048).astype(np.int64)


def run(python: str, script: str, lengths: Path, more: list[str]) -> Figures:
    command = [python, str(HERE / script), "--lengths", str(lengths), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode != 0:
        raise SystemExit(f"{script} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    found: Figures = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def at(found: Figures, path: str) -> Figures | None:
    """The figures at a path of names; None where that part failed (its error is a string) or is not there."""
    place: Any = found
    for name in path.split("/"):
        place = place.get(name) if isinstance(place, dict) else None
    return place if isinstance(place, dict) else None


def median(turns: list[Figures], path: str, figure: str) -> float | None:
    values = [each[figure] for found in turns if (each := at(found, path)) is not None and each.get(figure) is not None]
    return statistics.median(values) if values else None


def row(name: str, turns: list[Figures], path: str, base: float | None = None) -> str:
    wall, cpu, moved = (median(turns, path, figure) for figure in ("wall_s", "driver_cpu_s", "driver_bytes"))
    if wall is None:
        return f"| {name} | failed or not measured | | | |"
    ratio = f"{wall / base:.1f}x" if base is not None else ""
    driver = f"{cpu * 1e3:.1f}" if cpu is not None else ""
    size = f"{moved / 1e6:.2f}" if moved is not None else ""
    return f"| {name} | {wall * 1e3:.1f} | {driver} | {size} | {ratio} |"


HEAD = "| | wall ms | driver CPU ms | MB through the driver | verl over Podium |\n|---|---|---|---|---|"


def table(
    title: str, podium: list[tuple[str, str]], verl: list[tuple[str, str]], ours: list[Figures], theirs: list[Figures]
) -> None:
    print(f"\n{title}\n\n{HEAD}")
    base = median(ours, podium[0][1], "wall_s")
    for name, path in podium:
        print(row(f"Podium: {name}", ours, path))
    for name, path in verl if theirs else []:
        print(row(f"verl: {name}", theirs, path, base))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also keep everything that was measured here")
    asked = parser.parse_args()
    ours: list[Figures] = []
    theirs: list[Figures] = []
    counts = ["--counts", *map(str, asked.counts)]
    with tempfile.TemporaryDirectory() as folder:
        lengths = Path(folder) / "lengths.npy"
        np.save(lengths, lengths_of(max(asked.counts)))
        for _ in range(asked.turns):
            ours.append(run(sys.executable, "dispatch_podium.py", lengths, counts))
            if VERL.exists():
                theirs.append(run(str(VERL), "dispatch_verl.py", lengths, counts))
    if asked.json is not None:
        asked.json.write_text(json.dumps({"podium": ours, "verl": theirs}))
    print(f"{platform.machine()}, Python {platform.python_version()}, {asked.turns} turns; ", end="")
    print(theirs[0]["peer"] if theirs else f"verl is not there: see {HERE / 'requirements-verl.txt'}")
    for count in asked.counts:
        paths = f"dispatch/{count}"
        table(
            f"{count} trajectories, {at(ours[0], 'tokens')[str(count)]:,} tokens: dispatch, add one, collect",  # type: ignore[index]
            [
                ("tokens through the controller", f"{paths}/values"),
                ("references, column read by the controller", f"{paths}/references_read"),
                ("references only", f"{paths}/references"),
            ],
            [
                ("DataProto, its default", f"{paths}/dataproto"),
                ("DataProto, NumPy serialization", f"{paths}/dataproto_numpy"),
                ("legacy trainer's path (TensorDict, no padding)", f"{paths}/tensordict"),
                ("the same, converted before", f"{paths}/tensordict_call"),
                ("default trainer's path (TransferQueue), column read", f"{paths}/transfer_queue"),
                ("default trainer's path, column stays", f"{paths}/transfer_queue_call"),
            ],
            ours,
            theirs,
        )
        table(
            f"{count} trajectories: hand-off from one role to another, column read",
            [("references", f"handoff/{count}/references_read")],
            [
                ("through the driver", f"handoff/{count}/driver"),
                ("through the driver, NumPy", f"handoff/{count}/driver_numpy"),
                ("futures", f"handoff/{count}/futures"),
                ("futures, NumPy", f"handoff/{count}/futures_numpy"),
                ("TransferQueue", f"handoff/{count}/transfer_queue"),
            ],
            ours,
            theirs,
        )
    table(
        "An empty call, 4 workers",
        [("call_all", "empty_call"), ("Ray's floor", "empty_call_ray")],
        [("its group", "empty_call"), ("Ray's floor there", "empty_call_ray")],
        ours,
        theirs,
    )
    table(
        "Start of a group of 4, Ray running",
        [("two roles each", "group_start")],
        [("one role", "group_start")],
        ours,
        theirs,
    )


if __name__ == "__main__":
    main()
