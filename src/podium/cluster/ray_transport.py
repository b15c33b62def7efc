# SPDX-License-Identifier: Apache-2.0
"""Workers as Ray actors in placement groups, rows in Ray's object store."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from podium.cluster.blocking import in_thread
from podium.cluster.deadlines import Deadline
from podium.cluster.joined_ray import check_joinable, join_ray
from podium.cluster.keepalive import KeepAlive
from podium.cluster.layout import Pool, RayCluster
from podium.cluster.local_ray import LocalRay
from podium.cluster.messages import Reply
from podium.cluster.objects import Stored
from podium.cluster.placement import Bundle, NodeState, bundles_of
from podium.cluster.processes import ProcessInfo, look
from podium.cluster.ray_arguments import STORE_IS_FULL, RayStored, full_store
from podium.cluster.ray_compat import (
    NAMESPACE,
    available_resources_per_node,
    draining_nodes,
    install_again,
    signal_handlers,
)
from podium.cluster.ray_keeping import actor_options, kept_actors, kept_places, place_options, remove_kept
from podium.cluster.ray_process import PendingReply, RayProcess
from podium.cluster.transport import BundlePlace, LeftBehind
from podium.cluster.worker import Worker
from podium.errors import ClusterError, PlacementError

Value = TypeVar("Value")

# How long answers are awaited together before each is awaited alone, and how many calls may do so at a time.
_MOMENT_S = 0.05
_MOST_WAITING = 8
# Between two looks at the nodes, for those that join or are being drained.
_LOOK_S = 2.0
# Until another controller takes over from one that has died, or has been stopped for the heartbeat timeout.
_SUCCESSOR_S = 60.0
# Longest wait for a node to confirm that it lives.
_NODE_S = 0.5


class RayTransport:
    """Workers as Ray actors. Ends only a Ray that it started."""

    has_collectives = True
    can_be_ended = True
    can_be_silent = True

    def __init__(self, *, joined: bool, local: LocalRay | None, keepalive: KeepAlive | None = None) -> None:
        """`joined`: this transport connected the process to Ray; `local`: the cluster that this transport ends;
        `keepalive`: of workers in a joined cluster that outlive this process."""
        self._joined, self._local, self._keepalive = joined, local, keepalive
        # Of what outlives this process; None: nothing does.
        self._namespace = NAMESPACE if local is not None and local.can_outlive else None
        if keepalive is not None:
            self._namespace = keepalive.namespace
        self._node = ray.get_runtime_context().get_node_id()
        self._suspects: set[str] = set()
        self._waiters = ThreadPoolExecutor(max_workers=_MOST_WAITING, thread_name_prefix="podium waits for Ray")
        self._waiting = 0

    @classmethod
    async def open(cls, settings: RayCluster, starting: LocalRay | None = None) -> RayTransport:
        """Joins the Ray that is named or that this process is already in. Otherwise starts a local one (or awaits one
        that is `starting`)."""
        if starting is not None:
            return await cls._opened(starting)
        if ray.is_initialized():
            here = ray.get_runtime_context().gcs_address
            if settings.address not in (None, "auto", "local", here):
                raise ClusterError(f"this process is in the Ray cluster at {here}, not in that at {settings.address}.")
            return cls(joined=False, local=None)
        address = settings.running_address
        if address is None:
            return await cls._opened(LocalRay(settings))
        await check_joinable(address, settings.deadline_s)
        try:
            # Runs in this thread: Ray sets its signal handlers only in the main thread. Its waits are bounded.
            join_ray(address, settings)
        except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            raise ClusterError(f"Ray at {address} cannot be joined: {error}") from error
        keepalive = None
        if settings.kept_as is not None:
            keepalive = await in_thread(KeepAlive, settings.kept_as, settings.heartbeat_timeout_s + _SUCCESSOR_S)
        return cls(joined=True, local=None, keepalive=keepalive)

    @classmethod
    async def _opened(cls, local: LocalRay) -> RayTransport:
        """Waits for the cluster or its failure, which has its own deadline."""
        try:
            await asyncio.wrap_future(local.ready)
        except BaseException:
            await in_thread(local.stop)
            raise
        install_again(signal_handlers())
        return cls(joined=False, local=local)

    def on_failure(self, call: Callable[[ClusterError], object]) -> None:
        """`call` is called once in this event loop when the cluster itself, not one of its workers, has failed."""
        if self._local is not None:
            loop = asyncio.get_running_loop()
            self._local.on_failure(lambda error: loop.call_soon_threadsafe(call, error))

    def failure(self) -> ClusterError | None:
        """Checks now why the local cluster failed. None while it works, and for a joined cluster."""
        return self._local.check() if self._local is not None else None

    @property
    def _is_usable(self) -> bool:
        """Whether Ray can be called. Ray blocks for a minute if its servers are gone, and restarts when it is used
        after its end."""
        return ray.is_initialized() and (self._local is None or self._local.failure is None)

    def is_process_missing(self, since_s: float) -> bool:
        """Known only for a Ray that this process started."""
        return self._local is not None and self._local.starting.is_missing(since_s)

    def _check_open(self) -> None:
        """Raises an error if the transport is closed: Ray would restart when it is used after its end."""
        if self._local is not None and self._local.failure is not None:
            raise self._local.failure
        if not ray.is_initialized():
            raise ClusterError("the cluster was closed: nothing can be asked of it any more.")

    def nodes(self) -> tuple[NodeState, ...]:
        """The living nodes with their free resources."""
        self._check_open()
        free, draining = available_resources_per_node(), draining_nodes()
        alive = sorted((node for node in ray.nodes() if self._lives(node)), key=lambda node: str(node["NodeID"]))
        names = [str(node["NodeManagerAddress"]) for node in alive]
        return tuple(
            NodeState(
                id=str(node["NodeID"]),
                # Several raylets of one machine have one address.
                name=name if names.count(name) == 1 else f"{name}~{node['NodeID'][:6]}",
                total=dict(node["Resources"]),
                free=dict(free.get(node["NodeID"], {})),
                is_draining=node["NodeID"] in draining,
            )
            for node, name in zip(alive, names, strict=True)
        )

    async def nodes_changed(self) -> None:
        """Returns after a while: Ray does not tell."""
        await asyncio.sleep(_LOOK_S)

    def _lives(self, node: dict[str, Any]) -> bool:
        """Checks nodes whose workers could not be reached. Ray reports a node as alive for some 15 s after its
        death."""
        if not node["Alive"] or node["NodeID"] not in self._suspects:
            return bool(node["Alive"])
        try:
            address = (node["NodeManagerAddress"], node["NodeManagerPort"])
            socket.create_connection(address, timeout=_NODE_S).close()
        except OSError:
            return False
        return True

    async def reserve(
        self, bundles: Sequence[Bundle], nodes: Sequence[NodeState], deadline_s: float
    ) -> list[BundlePlace]:
        """Reserves a placement group for each bundle on its node, all or none."""
        groups: list[PlacementGroup] = []

        def reserved() -> bool:
            """Ray waits here for gcs_server, for a minute if that is gone."""
            for bundle, node in zip(bundles, nodes, strict=True):
                selector = [{"ray.io/node-id": node.id}]
                options = place_options(bundle, self._namespace) if self._namespace is not None else {}
                groups.append(placement_group([dict(bundle.needs)], bundle_label_selector=selector, **options))
            deadline = Deadline(deadline_s)
            # Not `ready()`: that is a task, for which Ray starts a process.
            return all(group.wait(deadline.left_s) for group in groups)

        try:
            async with asyncio.timeout(deadline_s):
                if not await in_thread(reserved):
                    raise TimeoutError
        except BaseException as error:
            for group in groups:
                self._remove(group)
            if not isinstance(error, TimeoutError):
                raise
            wanted = "; ".join(f"{bundle} on {node.name}" for bundle, node in zip(bundles, nodes, strict=True))
            raise PlacementError(
                f"Ray did not give what it reported as free within {deadline_s:.0f} s: {wanted}. Another job may have "
                "taken it meanwhile; try again."
            ) from None
        return [
            BundlePlace(bundle=bundle, node=node, handle=group)
            for bundle, node, group in zip(bundles, nodes, groups, strict=True)
        ]

    def release(self, place: BundlePlace) -> None:
        """Releases the placement group."""
        self._remove(place.handle)

    def _remove(self, group: PlacementGroup) -> None:
        """Removes it in the background: Ray waits for gcs_server's answer."""

        def remove() -> None:
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                remove_placement_group(group)

        if self._is_usable:
            threading.Thread(target=remove, name="podium gives a place back", daemon=True).start()

    async def spawn(self, pool: Pool, slot: int, place: BundlePlace, name: str) -> RayProcess:
        """Asks Ray for an actor in this place; its process starts in the background."""
        options = Worker.options(  # type: ignore[attr-defined]
            num_cpus=pool.each.cpus,
            num_gpus=pool.each.gpus,
            resources=dict(pool.each.custom),
            scheduling_strategy=PlacementGroupSchedulingStrategy(place.handle, placement_group_bundle_index=0),
            **(actor_options(name, self._namespace) if self._namespace is not None else {}),
        )
        actor = await in_thread(options.remote, name, place.node.name, tuple(sys.path))
        if place.node.id == self._node and self._local is not None:
            self._local.starting.add(actor)
        return self._process(actor, place.node.id)

    def _process(self, actor: Any, node: str, info: ProcessInfo | None = None) -> RayProcess:
        return RayProcess(
            actor,
            suspect_node=lambda: self._suspects.add(node),
            came_up=self._came_up,
            kill=self._kill,
            is_here=node == self._node,
            info=info,
        )

    async def left_behind(self, pools: Sequence[Pool]) -> LeftBehind:
        """Actors and placement groups that outlived their controller."""
        if self._namespace is None:
            return LeftBehind()
        actors, nodes = await in_thread(kept_actors, self._namespace), await in_thread(self.nodes)
        bundles = [bundle for pool in pools for bundle in bundles_of(pool)]
        places = await in_thread(kept_places, bundles, nodes, self._namespace)
        processes = {
            name: self._process(actor, at.node, look(at.pid) if at.node == self._node else None)
            for name, (actor, at) in actors.items()
        }
        return LeftBehind(processes=processes, places=places)

    async def end_left(self) -> None:
        """Ends actors and placement groups that outlived their controller. Ray frees what they hold a little later."""
        if self._namespace is not None:
            await in_thread(remove_kept, self._namespace)

    def _came_up(self, actor: Any, process: ProcessInfo | None) -> None:
        if self._local is not None:
            self._local.starting.discard(actor, process)

    def _kill(self, actor: Any) -> None:
        if self._local is not None:
            self._local.starting.discard(actor)
        if self._is_usable:
            ray.kill(actor, no_restart=True)

    async def at_once(self, answers: Sequence[Awaitable[Reply]]) -> list[Reply] | None:
        """All answers, if they come within a moment; else None, and each is awaited alone."""
        if self._waiting >= _MOST_WAITING:
            return None
        refs = [answer.ref for answer in answers if isinstance(answer, PendingReply)]
        assert len(refs) == len(answers)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._waiters, _got_at_once, refs)
        finally:
            self._waiting -= 1

    def store(self, value: Value) -> Stored[Value]:
        """Puts a value into Ray's object store."""
        self._check_open()
        try:
            return RayStored(ray.put(value))
        except (TypeError, pickle.PicklingError):
            raise ClusterError(f"a {type(value).__name__} cannot be pickled, so it cannot be stored.") from None
        except STORE_IS_FULL:
            raise full_store() from None

    async def close(self) -> None:
        """Ends the Ray that this transport started, or leaves the one that it joined."""
        self._waiters.shutdown(wait=False)
        if self._local is not None:
            await in_thread(self._local.stop)
        elif self._joined:
            if self._keepalive is not None:
                await in_thread(self._keepalive.end)
            await in_thread(ray.shutdown)


def _got_at_once(refs: list[Any]) -> list[Any] | None:
    _, late = ray.wait(refs, num_returns=len(refs), timeout=_MOMENT_S)
    try:
        return None if late else ray.get(refs)
    except ray.exceptions.RayError:
        return None
