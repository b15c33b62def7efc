# SPDX-License-Identifier: Apache-2.0
"""A cluster as the controller sees it: opened on Ray, in this process or simulated, and ready to start layouts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from podium.cluster.blocking import in_thread
from podium.cluster.inline import InlineTransport
from podium.cluster.layout import Layout, RayCluster
from podium.cluster.local_ray import LocalRay
from podium.cluster.member import Timeouts
from podium.cluster.objects import ObjectScope, Stored
from podium.cluster.placement import TooLarge, bundles_of, preflight
from podium.cluster.simulated_faults import NodeFault, WorkerFault
from podium.cluster.transport import Transport, Value
from podium.cluster.workers import Tell, Workers
from podium.errors import ClusterError, PlacementError

_FOREVER_S = 1e7


@asynccontextmanager
async def open_ray(
    settings: RayCluster = RayCluster(),  # noqa: B008
    *,
    starting: LocalRay | None = None,
    tell: Tell = lambda what: None,
) -> AsyncIterator[Cluster]:
    """Opens a cluster on Ray, or on the local one that is already `starting`. On exit, a Ray started here ends; a
    joined one stays. When the cluster itself fails, the block is cancelled and ClusterError is raised. `tell` gets
    progress messages."""
    address = settings.running_address
    tell("waiting for Ray" if starting is not None else f"joining Ray at {address}" if address else "starting Ray")
    from podium.cluster.ray_transport import RayTransport

    transport = await RayTransport.open(settings, starting)
    async with _opened(transport, tell=tell) as cluster:
        yield cluster


@asynccontextmanager
async def open_inline(*, deadlines: bool = True, tell: Tell = lambda what: None) -> AsyncIterator[Cluster]:
    """The same interface in this process: each worker is a thread, and a breakpoint in a role stops there. Without
    `deadlines`, calls do not time out in a debugger."""
    async with _opened(InlineTransport(), unhurried=not deadlines, tell=tell) as cluster:
        yield cluster


@asynccontextmanager
async def open_simulated(
    faults: Sequence[WorkerFault | NodeFault] = (), *, start_s: float = 0.0, num_nodes: int = 0,
    slots_per_node: int = 1, tell: Tell = lambda what: None,
) -> AsyncIterator[Cluster]:  # fmt: skip
    """The same interface on the virtual clock of `run_virtual`: workers are tasks, and their methods wait with
    `asyncio.sleep`. A worker starts in `start_s`, and `faults` happen to workers and nodes at their times. `num_nodes`
    and `slots_per_node`: see `SimulatedTransport`."""
    from podium.cluster.simulated import SimulatedTransport
    from podium.cluster.virtual_time import VirtualLoop

    if not isinstance(asyncio.get_running_loop(), VirtualLoop):
        raise ClusterError("a simulated cluster needs a virtual clock: start the program with run_virtual(main()).")
    transport = SimulatedTransport(faults, start_s=start_s, num_nodes=num_nodes, slots_per_node=slots_per_node)
    async with _opened(transport, tell=tell) as cluster:
        yield cluster


@asynccontextmanager
async def _opened(transport: Transport, *, unhurried: bool = False, tell: Tell) -> AsyncIterator[Cluster]:
    cluster = Cluster(transport, unhurried=unhurried, tell=tell)
    owner = asyncio.current_task()
    assert owner is not None
    failures: list[ClusterError] = []
    is_open = True

    def fail(error: ClusterError) -> None:
        if is_open:
            failures.append(error)
            owner.cancel()

    transport.on_failure(fail)
    try:
        yield cluster
    except asyncio.CancelledError:
        if failures and owner.uncancel() == 0:  # else the user has cancelled it too
            raise failures[0] from None
        raise
    except Exception as error:
        # The death of Ray's own processes also kills workers: the first failure is reported.
        root = transport.failure()
        if root is None or error is root:
            raise
        if failures:
            owner.uncancel()
        raise root from error
    finally:
        is_open = False
        try:
            cluster.end()
        finally:
            await transport.close()


class Cluster:
    """Starts layouts and frees objects step by step."""

    def __init__(self, transport: Transport, *, unhurried: bool = False, tell: Tell = lambda what: None) -> None:
        self._transport, self._unhurried, self._tell = transport, unhurried, tell
        self._started: list[Workers] = []
        self._ended = False

    def check(self, layout: Layout) -> None:
        """Preflight: raises an explanation if the layout can never fit, before anything starts."""
        bundles = [bundle for pool in layout.pools for bundle in bundles_of(pool)[: pool.num_first]]
        outcome = preflight(bundles, self._transport.nodes())
        if isinstance(outcome, TooLarge):
            raise PlacementError(outcome.reason)
        if not self._transport.has_collectives:
            for pool in layout.pools:
                if pool.collectives and pool.slots > 1:
                    raise PlacementError(
                        f"pool {pool.name} has {pool.slots} workers that meet in collectives, and the inline cluster "
                        "is one process, which can have one default process group. Use Ray, or one slot, or a pool "
                        "without collectives."
                    )

    async def start(self, layout: Layout, timeouts: Timeouts = Timeouts(), *, deadline_s: float = 300.0) -> Workers:  # noqa: B008
        """Starts all pools of a layout. A worker that dies during the start is started again; any other failure ends
        them all. `deadline_s` is also the default deadline of the calls on its roles."""
        if self._ended:
            raise ClusterError("this cluster is closed: nothing can be started in it any more.")
        await in_thread(self.check, layout)
        deadline_s = _FOREVER_S if self._unhurried else deadline_s
        workers = Workers(layout, self._transport, timeouts, deadline_s=deadline_s, tell=self._tell)
        await workers.start()
        self._started.append(workers)
        return workers

    async def attach(self, layout: Layout, timeouts: Timeouts = Timeouts(), *, deadline_s: float = 300.0) -> Workers:  # noqa: B008
        """Takes over the workers of a layout that another controller has started in this cluster, and has left because
        it died. Those that are dead or do not get free are started again. Raises an AttachError if none is there."""
        deadline_s = _FOREVER_S if self._unhurried else deadline_s
        workers = Workers(layout, self._transport, timeouts, deadline_s=deadline_s, tell=self._tell)
        self._started.append(workers)
        await workers.attach()
        return workers

    async def end_left(self) -> None:
        """Ends what another controller has left in this cluster that died before all of its workers had started."""
        await self._transport.end_left()

    def failure(self) -> ClusterError | None:
        """Why the cluster itself has failed, with all its workers; None if it has not."""
        return self._transport.failure()

    def scope(self, name: str) -> ObjectScope:
        """A scope whose objects are freed when the block ends."""
        return ObjectScope(name)

    def store(self, value: Value) -> Stored[Value]:
        """Stores a value where all workers can read it. May block: the value is copied."""
        return self._transport.store(value)

    def total(self, resource: str) -> float:
        """Total of a resource ("CPU", "GPU", a custom one) over all nodes."""
        return sum(node.total.get(resource, 0.0) for node in self._transport.nodes())

    def end(self) -> None:
        """Ends all started workers."""
        self._ended = True
        for workers in self._started:
            workers.end()
        self._started.clear()
