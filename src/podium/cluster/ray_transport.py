# SPDX-License-Identifier: Apache-2.0
"""Workers as Ray actors in placement groups, rows in Ray's object store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import re
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from podium.cluster.layout import Pool, RayCluster
from podium.cluster.objects import Stored
from podium.cluster.orders import Beat, Envelope, Hello, Invoke, Order, Whereabouts
from podium.cluster.placement import Bundle, NodeState
from podium.cluster.transport import BundlePlace, ByReference, GoneError
from podium.cluster.worker import Worker
from podium.errors import ClusterError, PlacementError, PodiumError, StoreError

Value = TypeVar("Value")

# Longest wait for an object to come from another node.
_FETCH_S = 120.0
_DEATHS = (
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.OutOfMemoryError,
)
# How every gRPC server, Ray's too, is greeted, and the kind of frame with which it answers.
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
_HTTP2_SETTINGS = 4
# How long answers are waited for together before each is for itself, and how many calls may do so at a time.
_MOMENT_S = 0.05
_MOST_WAITING = 8
# Longest wait for a node to say that it lives.
_NODE_S = 0.5


class RayTransport:
    """Actors where they are placed. Owns the Ray that it started, and only that."""

    has_collectives = True

    def __init__(self, *, owned: bool) -> None:
        self._owned = owned
        self._suspects: set[str] = set()
        self._waiters = ThreadPoolExecutor(max_workers=_MOST_WAITING, thread_name_prefix="podium waits for Ray")
        self._waiting = 0

    @classmethod
    async def open(cls, settings: RayCluster) -> RayTransport:
        """Joins the Ray that is named, that this process is in already, or starts a local one."""
        if ray.is_initialized():
            here = ray.get_runtime_context().gcs_address
            if settings.address not in (None, "auto", "local", here):
                raise ClusterError(f"this process is in the Ray cluster at {here}, not in that at {settings.address}.")
            return cls(owned=False)
        address = settings.address or os.environ.get("RAY_ADDRESS")  # Ray's documented contract with submitted jobs
        if address:
            await _check_reachable(address, settings.deadline_s)
        try:
            # In this thread, not beside it: Ray sets its signal handlers only in the main one. Its waits are bounded.
            _start(settings, address)
        except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            what = f"Ray at {address} cannot be joined" if address else "a local Ray cannot be started"
            raise ClusterError(f"{what}: {error}") from error
        return cls(owned=True)

    def _check_open(self) -> None:
        """Ray starts itself anew when it is used after its end."""
        if not ray.is_initialized():
            raise ClusterError("the cluster was closed: nothing can be asked of it any more.")

    def nodes(self) -> tuple[NodeState, ...]:
        self._check_open()
        free = ray._private.state.available_resources_per_node()
        alive = sorted((node for node in ray.nodes() if self._lives(node)), key=lambda node: str(node["NodeID"]))
        names = [str(node["NodeManagerAddress"]) for node in alive]
        return tuple(
            NodeState(
                id=str(node["NodeID"]),
                # Several raylets of one machine have one address.
                name=name if names.count(name) == 1 else f"{name}~{node['NodeID'][:6]}",
                total=dict(node["Resources"]),
                free=dict(free.get(node["NodeID"], {})),
            )
            for node, name in zip(alive, names, strict=True)
        )

    def _lives(self, node: dict[str, Any]) -> bool:
        """Ray believes in a node for some 15 s after its death. One whose workers could not be reached is asked."""
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
        groups = [
            placement_group([dict(bundle.needs)], bundle_label_selector=[{"ray.io/node-id": node.id}])
            for bundle, node in zip(bundles, nodes, strict=True)
        ]
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.gather(*(_awaited(group.ready()) for group in groups))
        except BaseException as error:
            for group in groups:
                remove_placement_group(group)
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
        if ray.is_initialized():
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                remove_placement_group(place.handle)

    def spawn(self, pool: Pool, slot: int, place: BundlePlace, name: str) -> RayProcess:
        actor = Worker.options(  # type: ignore[attr-defined]
            num_cpus=pool.each.cpus,
            num_gpus=pool.each.gpus,
            resources=dict(pool.each.custom),
            scheduling_strategy=PlacementGroupSchedulingStrategy(place.handle, placement_group_bundle_index=0),
        ).remote(name, place.node.name, tuple(sys.path))
        return RayProcess(actor, lambda: self._suspects.add(place.node.id))

    async def at_once(self, answers: Sequence[Awaitable[Envelope]]) -> list[Envelope] | None:
        if self._waiting >= _MOST_WAITING:
            return None
        refs = [answer.ref for answer in answers if isinstance(answer, _Answer)]
        assert len(refs) == len(answers)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._waiters, _got_at_once, refs)
        finally:
            self._waiting -= 1

    def store(self, value: Value) -> Stored[Value]:
        self._check_open()
        try:
            return RayStored(ray.put(value))
        except (TypeError, pickle.PicklingError):
            raise ClusterError(f"a {type(value).__name__} cannot be pickled, and so not be stored.") from None

    async def close(self) -> None:
        self._waiters.shutdown(wait=False)
        if self._owned:
            await asyncio.to_thread(ray.shutdown)


async def _check_reachable(address: str, deadline_s: float) -> None:
    """Something must listen there: Ray itself takes 20 s to say that nothing does."""
    if "://" in address:
        raise ClusterError(
            f"{address} is not the address of a Ray cluster but of a client or job server. Run this program as a job "
            f"there (`ray job submit --address {address} -- podium train ...`), or give the head's host:port."
        )
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return  # "auto" and "local": Ray knows what they mean
    try:
        async with asyncio.timeout(deadline_s):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            if "RAY_USE_TLS" not in os.environ:  # then it would wait for a handshake first
                writer.write(_HTTP2_HELLO)
                if (await reader.readexactly(9))[3] != _HTTP2_SETTINGS:
                    raise OSError("what listens there is not Ray")
        writer.close()
    except asyncio.IncompleteReadError as error:
        raise ClusterError(f"what listens at {address} is not Ray: it hung up on a greeting.") from error
    except (OSError, TimeoutError) as error:
        why = str(error) or f"no answer in {deadline_s:.0f} s"
        raise ClusterError(
            f"no Ray cluster answers at {address} ({why}). Start one there with `ray start --head`, correct the "
            "address, or leave it (and RAY_ADDRESS) away for a local one."
        ) from error


def _start(settings: RayCluster, address: str | None) -> None:
    """Ray puts handlers of its own on signals; those that the program has set stay."""
    usual = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler, None)
    mine = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        _init(settings, address)
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in mine.items():
                if handler not in usual:
                    signal.signal(number, handler)


def _init(settings: RayCluster, address: str | None) -> None:
    quiet: dict[str, Any] = {"log_to_driver": settings.show_output, "logging_level": logging.ERROR}
    if address:
        with _loopback_only() if _is_on_loopback_only(address) else contextlib.nullcontext():
            ray.init(address=address, **quiet)
        return
    with _loopback_only():
        ray.init(
            address="local",  # not whatever cluster somebody else has started on this machine
            num_cpus=settings.cpus or os.cpu_count(),
            num_gpus=settings.gpus,
            object_store_memory=settings.object_store_bytes,
            include_dashboard=False,
            **quiet,
        )


@contextlib.contextmanager
def _loopback_only() -> Iterator[None]:
    """A cluster of one machine needs no open port: with this Ray takes the loopback address for its node, as it does by
    default on macOS, and listens there only."""
    constants = ray._private.ray_constants
    before, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def _is_on_loopback_only(address: str) -> bool:
    """Ray replaces a loopback address by the machine's outer one; a cluster like ours does not listen there."""
    host, _, port = address.rpartition(":")
    if host not in ("127.0.0.1", "localhost") or not port.isdigit():
        return False
    try:
        outer = ray._private.services.node_ip_address_from_perspective()
        socket.create_connection((outer, int(port)), timeout=_NODE_S).close()
    except OSError:
        return True
    return False


class RayProcess:
    """One actor."""

    def __init__(self, actor: Any, suspect_node: Callable[[], None]) -> None:
        self._actor, self._suspect_node = actor, suspect_node

    @property
    def actor(self) -> Any:
        return self._actor

    def hello(self) -> Awaitable[Hello]:
        return self._answer(self._actor.hello.remote())

    def perform(self, order: Order, *arguments: Any, **named: Any) -> Awaitable[Envelope]:
        return self._answer(_sent(self._actor.perform, order, arguments, named))

    def perform_storing(self, order: Invoke, *arguments: Any, **named: Any) -> tuple[Awaitable[Envelope], Stored[Any]]:
        envelope, rows = _sent(self._actor.perform_storing, order, arguments, named)
        return self._answer(envelope), RayStored(rows)

    def stream(self, order: Invoke, *arguments: Any, **named: Any) -> AsyncIterator[tuple[Envelope, Stored[Any]]]:
        return self._blocks(_sent(self._actor.stream.options(num_returns="streaming"), order, arguments, named))

    async def _blocks(self, items: Any) -> AsyncIterator[tuple[Envelope, Stored[Any]]]:
        while True:
            envelope = await self._answer(await self._next(items))
            rows = RayStored(await self._next(items))
            yield envelope, rows
            if envelope.last:
                return

    def control(self, order: Invoke, *arguments: Any, **named: Any) -> Awaitable[Envelope]:
        return self._answer(_sent(self._actor.control, order, arguments, named))

    def where(self) -> Awaitable[Whereabouts]:
        return self._answer(self._actor.where.remote())

    async def beats(self, every_s: float) -> AsyncIterator[Beat]:
        items = self._actor.beats.options(num_returns="streaming").remote(every_s)
        while True:
            yield await self._answer(await self._next(items))

    def _answer(self, ref: Any) -> _Answer:
        return _Answer(self, ref)

    async def answer(self, ref: Any) -> Any:
        try:
            return await ref
        except ray.exceptions.RayError as error:
            raise self._told(error) from None

    async def _next(self, items: Any) -> Any:
        try:
            return await anext(items)
        except StopAsyncIteration:
            raise GoneError("its stream ended before its last word") from None
        except ray.exceptions.RayError as error:
            raise self._told(error) from None

    def _told(self, error: ray.exceptions.RayError) -> PodiumError:
        """The role host catches what roles raise, so what comes as an error of Ray is not the role's: arguments or
        answers that cannot be pickled, or the end of the worker, of whatever kind."""
        if isinstance(error, ray.exceptions.ObjectLostError):
            return StoreError(f"an argument is lost with the node that held it: {str(error).splitlines()[0]}")
        if isinstance(error, ray.exceptions.RayTaskError):
            return ClusterError(f"a call could not be carried to or from its worker: {error.cause!r}\n{error}")
        if isinstance(error, ray.exceptions.ActorUnavailableError):
            self._suspect_node()
        if isinstance(error, _DEATHS):
            return GoneError(_cause(error))
        return ClusterError(f"an answer came and cannot be read here: {error}")

    def card(self) -> RayCard:
        return RayCard(self._actor)

    def kill(self) -> None:
        if ray.is_initialized():
            ray.kill(self._actor, no_restart=True)


class RayCard:
    """An actor as other workers call it; pickles as its handle."""

    def __init__(self, actor: Any) -> None:
        self._process = RayProcess(actor, lambda: None)

    def __reduce__(self) -> tuple[Any, ...]:
        return RayCard, (self._process.actor,)

    def control(self, order: Invoke, *arguments: Any, **named: Any) -> Awaitable[Envelope]:
        return self._process.control(order, *arguments, **named)


class _Answer(Awaitable[Any]):
    """What a worker will say: to be awaited, or got together with others."""

    def __init__(self, process: RayProcess, ref: Any) -> None:
        self._process, self.ref = process, ref

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._process.answer(self.ref).__await__()


def _got_at_once(refs: list[Any]) -> list[Any] | None:
    _, late = ray.wait(refs, num_returns=len(refs), timeout=_MOMENT_S)
    try:
        return None if late else ray.get(refs)
    except ray.exceptions.RayError:
        return None


def _sent(method: Any, order: Order, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    try:
        by_name = dict(zip(named, _references(tuple(named.values())), strict=True))
        return method.remote(order, *_references(arguments), **by_name)
    except (TypeError, pickle.PicklingError):
        what = f"{order.role}.{order.method}" if isinstance(order, Invoke) else type(order).__name__.lower()
        bad = [f"number {at}" for at, value in enumerate(arguments) if not _travels(value)]
        bad += [key for key, value in named.items() if not _travels(value)]
        kinds = {type(value).__name__ for value in (*arguments, *named.values()) if not _travels(value)}
        # Ray's own words show the values, which may be secret.
        raise ClusterError(
            f"{what}: its argument {', '.join(bad)} ({', '.join(sorted(kinds))}) cannot be pickled, and so not be sent."
        ) from None


def _travels(value: Any) -> bool:
    try:
        ray.cloudpickle.dumps(value)
    except Exception:
        return False
    return True


async def _awaited(ref: Any) -> Any:
    return await ref


def _references(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Ray fetches an argument that is a reference itself before it calls the method."""
    return tuple(_reference(each.stored) if isinstance(each, ByReference) else each for each in arguments)


def _reference(stored: Stored[Any]) -> Any:
    assert isinstance(stored, RayStored)
    return stored.reference()


def _cause(error: BaseException) -> str:
    """The one sentence of Ray's account that says what happened."""
    text = str(error)
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return "its node or the connection to it is gone"
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        used = re.search(r"was ([^)]*)\)?", text)
        return f"Ray ended it because its node ran out of memory ({used.group(1) if used else 'see `ray logs`'})"
    ways = ("Worker exit detail:", "The actor is dead because")
    detail = next((found for way in ways if (found := re.search(rf"{way} (.*?)\.(?:\s|$)", text))), None)
    pid = re.search(r"pid: (\d+)", text)
    what = detail.group(1).rstrip(".") if detail else text.split("\n", 1)[0].rstrip(".")
    return f"process {pid.group(1)} is gone ({what})" if pid else what


class RayStored(Stored[Any]):
    """An object of Ray's store, owned by the process that called for it: it outlives the worker that made it."""

    def __init__(self, ref: Any) -> None:
        self._ref = ref
        self._gone = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return RayStored, (self.reference(),)

    def reference(self) -> Any:
        if self._ref is None:
            raise StoreError(f"a stored object is used and {self._gone}. Use it before, or let a later step hold it.")
        if not ray.is_initialized():
            raise StoreError("a stored object is used after its cluster was closed. Read it before.")
        return self._ref

    def read(self) -> Any:
        try:
            return ray.get(self.reference(), timeout=_FETCH_S)
        except ray.exceptions.GetTimeoutError:
            raise StoreError(
                f"an object did not come from the store in {_FETCH_S:.0f} s: its node is overloaded, or cut off."
            ) from None
        except ray.exceptions.ObjectLostError as error:
            raise StoreError(f"an object is lost with the node that held it: {str(error).splitlines()[0]}") from error

    def free(self, reason: str) -> None:
        self._ref, self._gone = None, reason
