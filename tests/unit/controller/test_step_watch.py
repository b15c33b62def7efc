# SPDX-License-Identifier: Apache-2.0
"""A run whose step takes long says so every few minutes, and a hang leaves the stacks of all processes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podium.cluster.hangs import Hang
from podium.cluster.health import WhereReport, WorkerHealth
from podium.cluster.identity import WorkerId
from podium.controller.watching import SAY_EVERY_S, hang_reporter, saying_what_takes_long
from podium.observe import Console
from podium.runs.folder import RunFolder

WORKER = WorkerId("train", 0, "node-a", "cpu", 0)
MOST_SILENT_S = 600.0


class Lines(Console):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)

    def warning(self, text: str) -> None:
        self.lines.append(f"warning: {text}")


@dataclass
class Run:
    num_committed: int = 3


@dataclass
class Busy:
    """Workers of which one updates."""

    healths: dict[str, tuple[WorkerHealth, ...]] = field(
        default_factory=lambda: {
            "train": (
                WorkerHealth(worker=WORKER, died=None, silent_s=0.1, doing="policy.update", for_s=80.0, stalled_s=0.4),
            )
        }
    )

    def health(self) -> Any:
        return self.healths


def test_a_run_says_something_within_ten_minutes() -> None:
    assert SAY_EVERY_S < MOST_SILENT_S


def test_a_step_that_takes_long_is_mentioned_with_what_its_workers_do() -> None:
    console, workers = Lines(), Busy()

    async def body() -> None:
        async with saying_what_takes_long(Run(), workers, console, every_s=0.01):  # type: ignore[arg-type]
            while len(console.lines) < 2:
                await asyncio.sleep(0.005)
        after = len(console.lines)
        await asyncio.sleep(0.03)
        assert len(console.lines) == after

    asyncio.run(asyncio.wait_for(body(), 10))
    assert console.lines[0].startswith("step 4 has taken 0:00 so far. train[0]@node-a/cpu#0: in policy.update for 80.0")


def test_a_run_that_commits_steps_says_nothing_more() -> None:
    console, run = Lines(), Run()

    async def body() -> None:
        async with saying_what_takes_long(run, Busy(), console, every_s=0.05):  # type: ignore[arg-type]
            for _ in range(20):
                run.num_committed += 1
                await asyncio.sleep(0.01)

    asyncio.run(body())
    assert console.lines == []


def test_the_stacks_of_every_hang_are_kept(tmp_path: Path) -> None:
    console, folder = Lines(), RunFolder(path=tmp_path)
    report = hang_reporter(folder, console)
    for seconds in (20.0, 30.0):
        where = {"train": WhereReport(answers={WORKER: None})}
        report(Hang(workers=(WORKER,), cause=f"no progress in policy.update for {seconds:.0f} s", where=where))
    assert "no progress in policy.update for 20 s" in console.lines[0]
    assert str(folder.stacks_file) in console.lines[0]
    text = folder.stacks_file.read_text()
    assert text.count("=== ") == 2
    assert "for 30 s" in text
