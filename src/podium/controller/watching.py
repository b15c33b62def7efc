# SPDX-License-Identifier: Apache-2.0
"""Says what a run is doing when it does not go on: stacks of all processes when a worker hangs, and a word every few
minutes while a step takes long."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from podium.cluster import Workers
from podium.cluster.deadlines import now_s
from podium.cluster.hangs import Hang
from podium.cluster.virtual_time import VirtualLoop
from podium.observe import Console
from podium.observe.formats import duration
from podium.runs.folder import RunFolder

# A run says something at least this often.
SAY_EVERY_S = 300.0


def hang_reporter(folder: RunFolder, console: Console) -> Callable[[Hang], None]:
    """Appends the stacks of a hang to the run's stacks file, and says on the console where they are."""

    def report(hang: Hang) -> None:
        names, file = ", ".join(map(str, hang.workers)), folder.stacks_file
        console.warning(f"{names}: {hang.cause}. The stacks of all processes are in {file}.")
        title = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime())
        # A full disk must not end the run: the console has the innermost call.
        with contextlib.suppress(OSError), file.open("a", encoding="utf-8") as stacks:
            stacks.write(f"=== {title} {hang}\n\n")

    return report


class Stepping(Protocol):
    """A run that commits steps."""

    @property
    def num_committed(self) -> int:
        """The last committed step."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A run that commits nothing now: it recovers."""

    num_committed: int


@asynccontextmanager
async def saying_what_takes_long(
    run: Stepping, workers: Workers, console: Console, *, every_s: float = SAY_EVERY_S
) -> AsyncIterator[None]:
    """Inside, a step that is not committed for long is mentioned every so often, with what each worker does. A
    simulation takes no time, so it has nothing to say."""
    if isinstance(asyncio.get_running_loop(), VirtualLoop):
        yield
        return
    saying = asyncio.create_task(_say(run, workers, console, every_s))
    try:
        yield
    finally:
        saying.cancel()


async def _say(run: Stepping, workers: Workers, console: Console, every_s: float) -> None:
    """Waits for nothing but time; cancelled at the end of the run."""
    began_s, committed = now_s(), run.num_committed
    while True:
        await asyncio.sleep(every_s)
        if run.num_committed != committed:
            began_s, committed = now_s(), run.num_committed
            continue
        busy = [each for pool in workers.health().values() for each in pool if each.died is not None or each.doing]
        doing = "; ".join(map(str, busy)) or "all workers are idle"
        console.note(f"step {committed + 1} has taken {duration(now_s() - began_s)} so far. {doing}")
