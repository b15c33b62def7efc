# SPDX-License-Identifier: Apache-2.0
"""The inside of a worker, independent of the transport: it builds roles, runs their methods and reports where it is.

Calls run on one thread, `work`; `where` and `beats` answer on others in the meantime."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Generator, Iterable, Iterator
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, assert_never

import numpy as np

from podium.cluster.helper_stacks import SHORT_S, stacks_of_helpers
from podium.cluster.identity import WorkerId
from podium.cluster.layout import public_methods
from podium.cluster.meshes import RoleMesh
from podium.cluster.messages import (
    Attached,
    Beat,
    Build,
    Call,
    Clear,
    Connect,
    Disconnect,
    Failure,
    Handshake,
    Import,
    Invoke,
    Join,
    OpenChannel,
    OpenMeeting,
    Reply,
    RowsHead,
    Settle,
    Whereabouts,
)
from podium.cluster.results import Computed
from podium.cluster.spans import SpanRecorder
from podium.cluster.worker_context import Interruptible, WorkerContext
from podium.engine.addresses import DeviceKind, TcpMeeting
from podium.errors import ClusterError, PodiumError
from podium.importing import import_all, import_transformers_without_torch, load_object
from podium.progress import mark_progress, stalled_s

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from podium.cluster.channels import Channel
    from podium.cluster.rendezvous import TransferGroup
    from podium.engine.meeting import MeetingServer

Result = TypeVar("Result")
Waiting = Generator[Awaitable[Any], Any, Result]
"""Work that yields what it waits for."""

# Raised by what ends a worker: not a failure of its role.
_ENDS = (SystemExit, asyncio.CancelledError)
# Most characters of an exception's text.
_LONGEST = 16_000
WORK, CONTROL = "work", "control"


class RoleHost:
    """The roles of one worker and what they share: its identity, its process groups, its links and its spans."""

    def __init__(
        self, *, node: str, host: str, device: str, kind: DeviceKind, own_process: bool, forms_groups: bool = True
    ) -> None:
        """`forms_groups`: whether workers form real process groups and links; those of a simulation do not."""
        self._handshake = Handshake(node=node, host=host, device=device, kind=kind, pid=os.getpid())
        self._own_process, self._forms_groups = own_process, forms_groups
        self._worker: WorkerId | None = None
        self._meshes: dict[str, RoleMesh] = {}
        self._devices: dict[str, DeviceMesh | None] = {}
        self._roles: dict[str, Any] = {}
        self._servers: dict[str, MeetingServer] = {}
        self._transfers: dict[str, TransferGroup] = {}
        self._channels: dict[str, Channel] = {}
        self._recorder = SpanRecorder()
        self._invoked_by: int | None = None  # the work thread, while it runs a method of a role
        self.grace_s: float | None = None  # how long the worker goes on after it was asked to leave; None: not at all
        self.is_leaving = False  # heartbeats say so
        self._contexts: list[WorkerContext] = []
        self._num_controllers = 1
        self._serial = 0  # of the last call to all workers of a role
        self._num_controlling, self._controlled = 0, threading.Condition()  # calls on control threads

    def handshake(self) -> Handshake:
        """The worker's report about itself when it starts."""
        return self._handshake

    def attach(self) -> Attached:
        """Another controller takes over from one that is gone. The worker is the next incarnation from now on: calls of
        the earlier controller that have not begun are refused, and those that wait for more of it end soon."""
        self._num_controllers += 1
        if self._worker is not None:
            self._worker = replace(self._worker, incarnation=self._worker.incarnation + 1)
            for context in self._contexts:
                context.worker = self._worker
        for role in list(self._roles.values()):
            if isinstance(role, Interruptible):
                role.abandon()
        return Attached(worker=self._worker, roles=frozenset(self._roles), pid=self._handshake.pid)

    def perform(self, call: Call, *arguments: Any, **named: Any) -> tuple[Reply, Any]:
        """Runs a call on the work thread. Returns the reply, and rows to store (None: none). An exception of the role's
        code is part of the reply, so that it does not look like a fault of the worker."""
        return _driven(self._performing(call, arguments, named))

    async def perform_async(self, call: Call, *arguments: Any, **named: Any) -> tuple[Reply, Any]:
        """`perform` in the running event loop."""
        return await _driven_in_loop(self._performing(call, arguments, named))

    def stream(self, call: Invoke, *arguments: Any, **named: Any) -> Iterator[tuple[Reply, Any]]:
        """Calls a method that yields `Computed` blocks and passes each on as it comes; the last reply has none."""
        self._recorder.name_thread(WORK)
        failure: Failure | None = None
        try:
            with self._recorder.span(_title(call)), self._watched():
                for computed in _items(self._invoke(call, arguments, named)):
                    head, rows = self._head(call, computed)
                    yield self._reply(head, None, last=False), rows
                    mark_progress()
        except (SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            failure = _failure(error)
        yield self._reply(None, failure), None

    async def stream_async(self, call: Invoke, *arguments: Any, **named: Any) -> AsyncGenerator[tuple[Reply, Any]]:
        """`stream` in the running event loop."""
        failure: Failure | None = None
        try:
            with self._recorder.span(_title(call)):
                async with aclosing(_items_in_loop(self._invoke(call, arguments, named))) as blocks:
                    async for computed in blocks:
                        head, rows = self._head(call, computed)
                        yield self._reply(head, None, last=False), rows
        except (SystemExit, GeneratorExit, asyncio.CancelledError):
            raise
        except BaseException as error:
            failure = _failure(error)
        yield self._reply(None, failure), None

    def control(self, call: Invoke, *arguments: Any, **named: Any) -> Reply:
        """Calls a role's method on a control thread, while work may be busy, for instance to cancel or pause it. The
        role makes the two thread-safe. Records no spans: those belong to the work thread."""
        return _driven(self._controlling(call, arguments, named))

    async def control_async(self, call: Invoke, *arguments: Any, **named: Any) -> Reply:
        """`control` in the running event loop."""
        return await _driven_in_loop(self._controlling(call, arguments, named))

    def drop_roles(self) -> None:
        """Forgets the roles of a worker that has ended in a process that goes on: what they hold is freed at once, and
        their processes of user code end."""
        self._contexts.clear()
        self._roles.clear()

    def where(self) -> Whereabouts:
        """Each thread's open spans and stack, and the stacks of the processes that it has started; answers while work
        is busy."""
        helpers = stacks_of_helpers(os.getpid(), within_s=SHORT_S) if self._own_process else ()
        return Whereabouts(threads=self._recorder.places(everyone=self._own_process), helpers=helpers)

    def beats(self, every_s: float) -> Iterator[Beat]:
        """Sends heartbeats at intervals from a separate thread, until another controller attaches."""
        number = self._num_controllers
        while number == self._num_controllers:
            doing, for_s = self._recorder.doing(WORK)
            thread = self._invoked_by
            stalled = 0.0 if thread is None else stalled_s(thread)
            yield Beat(doing=doing, for_s=for_s, stalled_s=stalled, is_leaving=self.is_leaving)
            time.sleep(every_s)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Inside, heartbeats report how long the work thread has not advanced. Starting a role has other deadlines."""
        self._invoked_by = threading.get_ident()
        mark_progress()
        try:
            yield
        finally:
            self._invoked_by = None

    def _performing(self, call: Call, arguments: tuple[Any, ...], named: dict[str, Any]) -> Waiting[tuple[Reply, Any]]:
        self._recorder.name_thread(WORK)
        value: Any = None
        rows: Any = None
        failure: Failure | None = None
        try:
            with self._recorder.span(_title(call)), self._watched() if isinstance(call, Invoke) else nullcontext():
                value = self._do(call, arguments, named)
                if inspect.isawaitable(value):
                    value = yield value
            if isinstance(call, Invoke) and call.wants == "rows":
                value, rows = self._head(call, value)
        except _ENDS:
            raise  # the process ends, and the controller notices that
        except BaseException as error:
            value, rows, failure = None, None, _failure(error)
        return self._reply(value, failure), rows

    def _controlling(self, call: Invoke, arguments: tuple[Any, ...], named: dict[str, Any]) -> Waiting[Reply]:
        self._recorder.name_thread(CONTROL)
        self._note_controlling(1)
        try:
            value = self._invoke(call, arguments, named)
            if inspect.isawaitable(value):
                value = yield value
            return Reply(self._worker, value, None, ())
        except _ENDS:
            raise
        except BaseException as error:
            return Reply(self._worker, None, _failure(error), ())
        finally:
            self._note_controlling(-1)

    def _note_controlling(self, change: int) -> None:
        with self._controlled:
            self._num_controlling += change
            self._controlled.notify_all()

    def _clear(self, deadline_s: float) -> int:
        """On the work thread, so that no other call runs there."""
        with self._controlled:
            if not self._controlled.wait_for(lambda: self._num_controlling == 0, deadline_s):
                raise ClusterError(f"{self._worker}: calls of an earlier controller run after {deadline_s:.0f} s.")
        for role in self._roles.values():
            if isinstance(role, Interruptible):
                role.reset()
        return self._serial

    def _reply(self, value: Any, failure: Failure | None, *, last: bool = True) -> Reply:
        spans = self._recorder.drain(self._worker) if self._worker is not None else ()
        return Reply(self._worker, value, failure, spans, last)

    def _do(self, call: Call, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        match call:
            case Invoke():
                return self._invoke(call, arguments, named)
            case Settle():
                self._worker, self.grace_s = call.worker, call.grace_s
                self._meshes = {mesh.role: mesh for mesh in call.meshes}
                self._devices = dict.fromkeys(self._meshes)
            case Import():
                if call.tokenizers_only and self._own_process:
                    import_transformers_without_torch()
                import_all(call.modules)
            case OpenMeeting() | Join() | Connect() | Disconnect() if not self._forms_groups:
                return TcpMeeting(host=self._handshake.host, port=0)
            case OpenMeeting():
                from podium.cluster.rendezvous import serve

                self._servers[call.name] = server = serve(self._handshake.host)
                return server.meeting
            case Join():
                from podium.cluster.rendezvous import join

                self._devices = join(call, self._handshake.host, self._handshake.kind, tuple(self._meshes.values()))
            case Build():
                self._build(call, *arguments)
            case Clear():
                return self._clear(call.deadline_s)
            case Connect():
                from podium.cluster.rendezvous import TransferGroup

                self._transfers.pop(call.name, None)
                self._transfers[call.name] = TransferGroup(call, self._handshake.host, self._handshake.kind)
            case OpenChannel():
                self._channels[call.channel.role] = call.channel
            case Disconnect():
                link = self._transfers.pop(call.name, None)
                if link is not None:
                    link.close()
            case other:
                assert_never(other)
        return None

    def _build(self, call: Build, kind: type[Any], arguments: tuple[Any, ...]) -> None:
        assert self._worker is not None
        if call.implementation is not None:
            kind = _implementation(call.implementation, kind)
        here = {name: parameters_of(method) for name, method in public_methods(kind).items()}
        for name, parameters in call.methods.items():
            if here.get(name) != parameters:
                actual = f"has ({', '.join(here[name])})" if name in here else "does not exist"
                raise ClusterError(
                    f"{self._worker}: the controller would call {kind.__name__}.{name}({', '.join(parameters)}), and "
                    f"in this worker's copy of the code it {actual}. Controller and workers must run the same code."
                )
        if self._handshake.kind == "cuda":
            import torch

            torch.cuda.set_device(0)  # of this thread, which is the one that works
        context = WorkerContext(
            worker=self._worker,
            role=call.role,
            mesh=self._meshes[call.role],
            device="cuda:0" if self._handshake.kind == "cuda" else "cpu",
            devices=self._devices[call.role],
            recorder=self._recorder,
            transfers=self._transfers,
            colocated_roles=MappingProxyType(self._roles),
            channels=MappingProxyType(self._channels),
        )
        self._contexts.append(context)
        self._roles[call.role] = kind(context, *arguments)

    def _invoke(self, call: Invoke, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if call.worker != self._worker:
            raise ClusterError(f"a call for {call.worker} came to {self._worker}, which is another worker.")
        if call.serial:
            self._serial = call.serial
        return getattr(self._roles[call.role], call.method)(*arguments, **named)

    def _head(self, call: Invoke, computed: Any) -> tuple[RowsHead, Any]:
        """The controller's view of the rows, and the rows."""
        if not isinstance(computed, Computed):
            raise ClusterError(
                f"{call.role}.{call.method} was called for rows and gave {type(computed).__name__}; "
                "such a method returns (or yields) Computed."
            )
        rows = computed.rows
        head = RowsHead(
            ids=computed.ids,
            lengths_N=np.zeros(len(computed.ids), np.int64) if rows is None else rows.lengths_N,
            stored=rows is not None,
            metrics=computed.metrics,
            note=computed.note,
        )
        return head, rows


def _driven(work: Waiting[Result]) -> Result:
    """Runs work in this thread. What it waits for (a role's method that is a coroutine) gets an event loop."""
    try:
        waits = next(work)
        while True:
            try:
                result = asyncio.run(_awaited(waits))
            except BaseException as error:
                waits = work.throw(error)
            else:
                waits = work.send(result)
    except StopIteration as done:
        value: Result = done.value
        return value


async def _driven_in_loop(work: Waiting[Result]) -> Result:
    """Runs work in the running event loop."""
    try:
        waits = next(work)
        while True:
            try:
                result = await waits
            except BaseException as error:
                waits = work.throw(error)
            else:
                waits = work.send(result)
    except StopIteration as done:
        value: Result = done.value
        return value


async def _awaited(waits: Awaitable[Any]) -> Any:
    return await waits


def _items(blocks: Iterable[Any] | AsyncIterator[Any]) -> Iterator[Any]:
    """What a role's method yields. An asynchronous generator gets an event loop."""
    if not isinstance(blocks, AsyncIterator):
        yield from blocks
        return
    with asyncio.Runner() as runner:
        while True:
            try:
                yield runner.run(_next_of(blocks))
            except StopAsyncIteration:
                return


async def _items_in_loop(blocks: Iterable[Any] | AsyncIterator[Any]) -> AsyncGenerator[Any]:
    if isinstance(blocks, AsyncGenerator):
        async with aclosing(blocks):  # what it has started ends with its worker
            async for each in blocks:
                yield each
    elif isinstance(blocks, AsyncIterator):
        async for each in blocks:
            yield each
    else:
        for each in blocks:
            yield each


async def _next_of(blocks: AsyncIterator[Any]) -> Any:
    return await anext(blocks)


def _implementation(place: str, interface: type[Any]) -> type[Any]:
    implementation = load_object(place)
    if not isinstance(implementation, type) or not issubclass(implementation, interface):
        raise ClusterError(f"{place} is not a subclass of {interface.__name__}, which it must implement.")
    return implementation


@cache
def parameters_of(method: Any) -> tuple[str, ...]:
    """A method's parameters by name and kind, without annotations and defaults: enough to notice that two copies of the
    code differ."""
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return ("...",)
    nothing = inspect.Parameter.empty
    bare = [each.replace(annotation=nothing, default=nothing) for each in signature.parameters.values()]
    written = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))[1:-1]
    return tuple(written.split(", ")) if written else ()


def _title(call: Call) -> str:
    match call:
        case Invoke():
            return f"{call.role}.{call.method}"
        case Build():
            return f"build {call.role}"
        case Connect():
            return f"connect {call.name}"
        case _:
            return type(call).__name__.lower()


def _failure(error: BaseException) -> Failure:
    try:
        text, trace = str(error), "".join(traceback.format_exception(error))
    except Exception:  # an exception whose text raises
        text, trace = "(its text is unavailable)", "".join(traceback.format_tb(error.__traceback__))
    if len(text) > _LONGEST or len(trace) > 2 * _LONGEST:
        text, trace = f"{text[:_LONGEST]} ...", f"... {trace[-_LONGEST:]}"
    picklable: Exception | None = None
    if isinstance(error, PodiumError):
        try:
            pickle.loads(pickle.dumps(error))
            picklable = error
        except Exception:
            picklable = None
    return Failure(kind=type(error).__name__, text=text, trace=trace, error=picklable)


def extend_import_path(path: tuple[str, ...]) -> None:
    """Lets a worker import everything that the controller can import, including user modules."""
    for entry in path:
        if entry not in sys.path:
            sys.path.append(entry)
