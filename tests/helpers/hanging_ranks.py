# SPDX-License-Identifier: Apache-2.0
"""Processes that mark progress until a test says that they hang. Here, because a spawned process imports it by name."""

from __future__ import annotations

import time
from pathlib import Path

from podium.progress import mark_progress
from podium.spmd.rank_processes import RankMarks
from podium.stack_dumps import allow_dumps


def work(marks: RankMarks, rank: int, folder: Path) -> None:
    """Advances every few milliseconds, until there is a file that is named after this rank: it hangs then, or waits in
    a collective or in a debugger if the file says so."""
    allow_dumps(f"rank {rank}")
    with marks.published(rank):
        mark_progress()
        (folder / f"advances-{rank}").touch()
        while not (folder / f"hang-{rank}").exists():
            mark_progress()
            time.sleep(0.005)
        if (folder / f"hang-{rank}").read_text() == "collective":
            exec(compile("while True:\n    pass\n", "/lib/torch/distributed/distributed_c10d.py", "exec"))
        if (folder / f"hang-{rank}").read_text() == "debugger":
            exec(compile("while True:\n    pass\n", "/lib/python/pdb.py", "exec"))
        loops_for_ever()


def loops_for_ever() -> None:
    """Runs, and never advances."""
    while True:
        pass
