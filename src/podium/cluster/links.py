# SPDX-License-Identifier: Apache-2.0
"""Process groups that span pools (learner to generator). They are formed again when a pool on either side is
rebuilt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from podium.cluster.deadlines import Deadline
from podium.cluster.fanout import Pending, gather_answers
from podium.cluster.identity import WorkerId
from podium.cluster.meshes import MeshRegistry
from podium.cluster.messages import Call, Connect, Disconnect, OpenMeeting, Reply
from podium.cluster.worker_pool import WorkerPool
from podium.errors import ClusterError


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Roles whose workers share a group. `generation` counts how often the group was formed."""

    name: str
    roles: tuple[str, ...]
    generation: int


class Links:
    """All links of a layout."""

    def __init__(
        self, worker_pools: Mapping[str, WorkerPool], registry: Callable[[], MeshRegistry], *, timeout_s: float
    ) -> None:
        self._worker_pools, self._registry, self._timeout_s = worker_pools, registry, timeout_s
        self._renewing = asyncio.Lock()
        self._links: dict[str, Link] = {}
        self._outdated: set[str] = set()  # links that are formed again before they are used

    async def connect(self, name: str, roles: tuple[str, ...], deadline: Deadline) -> None:
        """Forms the link between the workers of these roles, or forms it again with the current ones."""
        before = self._links.get(name)
        link = Link(name=name, roles=roles, generation=before.generation + 1 if before else 0)
        workers = self._members(link)
        if len(set(workers)) != len(workers):
            raise ClusterError(
                f"link {name}: the roles {', '.join(roles)} share workers, and one worker has one place in a link. "
                "Colocated roles need none."
            )
        self._links[name] = link
        await self._make(link, workers, deadline)

    def outdate(self, pool: str) -> None:
        """The pool has new workers: its links must be formed again."""
        self._outdated |= self._of(pool)

    async def renew(self, deadline: Deadline, *, pool: str | None = None) -> None:
        """Forms outdated links again, or those of them that this pool is in; surviving workers leave the old ones
        first, once they are idle."""
        async with self._renewing:
            for name in sorted(self._outdated if pool is None else self._outdated & self._of(pool)):
                link, call = self._links[name], Disconnect(name=name)
                members = self._members(link)
                what = f"leaving the link {name}"
                await self._order(members, dict.fromkeys(range(len(members)), call).__getitem__, what, deadline)
                await self.connect(name, link.roles, deadline)
                self._outdated.discard(name)

    def _of(self, pool: str) -> set[str]:
        registry = self._registry()
        return {
            link.name for link in self._links.values() if any(registry.mesh(role).pool == pool for role in link.roles)
        }

    def _members(self, link: Link) -> tuple[WorkerId, ...]:
        return tuple(worker for role in link.roles for worker in self._registry().workers_of(role))

    async def _make(self, link: Link, workers: tuple[WorkerId, ...], deadline: Deadline) -> None:
        what = f"making the link {link.name}"
        opened = await self._order(workers[:1], lambda _: OpenMeeting(name=f"link {link.name}"), what, deadline)

        def call(rank: int) -> Call:
            return Connect(
                name=link.name,
                generation=link.generation,
                meeting=opened[0].value,
                rank=rank,
                world=len(workers),
                deadline_s=deadline.left_s,
                timeout_s=self._timeout_s,
            )

        # The workers' own deadline expires first: its message is more specific.
        await self._order(workers, call, what, Deadline(deadline.left_s + 5.0))

    async def _order(
        self, workers: tuple[WorkerId, ...], call: Callable[[int], Call], what: str, deadline: Deadline
    ) -> list[Reply]:
        """Sends a call to workers of several pools at once; each pool reports its own failures. A worker that is busy,
        or fails here, is still in step with the rest of its pool."""
        members = [self._worker_pools[worker.pool].living(worker) for worker in workers]  # all live, or nothing is sent
        by_pool: dict[str, list[Pending]] = {}
        for rank, member in enumerate(members):
            sent = Pending(worker=member.worker, answer=member.process.perform(call(rank)))
            by_pool.setdefault(member.worker.pool, []).append(sent)
        gathered = await asyncio.gather(
            *(
                gather_answers(pending, what, deadline, self._worker_pools[pool], in_step=False)
                for pool, pending in by_pool.items()
            )
        )
        return [reply for replies in gathered for reply in replies]
