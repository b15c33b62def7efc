# SPDX-License-Identifier: Apache-2.0
"""One slot of a pool with its current worker, how long each kind of wait may take, and where workers are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from podium.cluster.blocking import in_thread
from podium.cluster.health import Died, Leaving, WhereReport
from podium.cluster.helper_stacks import SHORT_S, stacks_of_helpers
from podium.cluster.identity import WorkerId
from podium.cluster.messages import Beat, Whereabouts
from podium.cluster.transport import GoneError, Process
from podium.stack_dumps import dumped_stacks

# How long the other workers may take to answer `where` when one is late.
_WHERE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Timeouts of each kind of wait."""

    place_s: float = 60.0  # until others release their resources
    start_s: float = 120.0  # processes, and the constructors of their roles
    rendezvous_s: float = 60.0
    collective_s: float = 600.0  # a single collective, later
    beat_s: float = 0.5
    silent_s: float = 10.0  # without a heartbeat, before a warning
    heartbeat_timeout_s: float = 60.0  # without any sign of life, before it counts as dead
    hang_s: float | None = None  # without progress in a call, before it counts as dead; None: calls need not advance


@dataclass
class Member:
    """One slot of the pool. `worker` is the current one."""

    slot: int
    worker: WorkerId
    process: Process
    beat: Beat | None = None
    heard_s: float = field(default_factory=time.monotonic)
    died: Died | None = None
    death: asyncio.Future[Died] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    watcher: asyncio.Task[None] | None = None
    leaving: Leaving | None = None  # it will be gone soon


async def ask_where(members: Sequence[Member]) -> WhereReport:
    """Asks members where they are. Those that do not answer within two seconds are None."""

    async def ask(member: Member) -> Whereabouts:
        return await member.process.where()

    async def one(member: Member) -> Whereabouts | None:
        try:
            return await asyncio.wait_for(ask(member), _WHERE_S)
        except TimeoutError:
            return await _dumped(member)
        except GoneError:
            return None

    answers = await asyncio.gather(*(one(member) for member in members))
    return WhereReport(answers={member.worker: answer for member, answer in zip(members, answers, strict=True)})


async def _dumped(member: Member) -> Whereabouts | None:
    """Where a worker is that does not answer, if its process is on this machine and not stopped."""
    process = member.process.look()
    if process is None or (stacks := await in_thread(dumped_stacks, process.pid)) is None:
        return None
    helpers = await in_thread(stacks_of_helpers, process.pid, within_s=SHORT_S)
    return Whereabouts(threads=(), dump=stacks, helpers=helpers)
