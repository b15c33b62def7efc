# SPDX-License-Identifier: Apache-2.0
"""The only actor class. It passes calls to the role host, and does not interpret them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

import ray

from podium.cluster.host import RoleHost, extend_import_path
from podium.cluster.messages import Attached, Beat, Call, Handshake, Invoke, Reply, Whereabouts
from podium.cluster.ray_arguments import PackedArguments, unpack
from podium.cluster.ray_compat import forget_token
from podium.stack_dumps import allow_dumps


# `work` is one thread, always the same: device, grad mode and the order of collectives belong to it. The others answer
# while it is busy; `ask` and `pulse` run none of the role's code that waits, so nothing keeps them.
@ray.remote(concurrency_groups={"work": 1, "control": 8, "ask": 1, "pulse": 1}, max_restarts=0, max_task_retries=0)
class Worker:
    """One process on one device slot."""

    def __init__(self, name: str, node: str, import_path: tuple[str, ...]) -> None:
        self._name = name
        forget_token()
        extend_import_path(import_path)
        allow_dumps()
        self._end = signal.signal(signal.SIGTERM, self._ask_to_leave)
        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        self._host = RoleHost(
            node=node,
            host=ray.util.get_node_ip_address(),
            device="gpu" + "+".join(gpus) if gpus else "cpu",
            kind="cuda" if gpus else "cpu",
            own_process=True,
        )

    def _ask_to_leave(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM is a notice if the pool has a grace period: heartbeats say so, and the controller moves the work
        elsewhere. At the end of the period, or at the second signal, the process ends as without one."""
        if self._host.grace_s is None or self._host.is_leaving:
            if callable(self._end):
                self._end(number, frame)
            raise SystemExit(1)
        self._host.is_leaving = True
        signal.signal(signal.SIGALRM, self._ask_to_leave)
        signal.setitimer(signal.ITIMER_REAL, self._host.grace_s)

    def __repr__(self) -> str:
        """Ray prints this before every line of the worker's output."""
        return self._name

    @ray.method(concurrency_group="work")
    def perform(self, call: Call, packed: PackedArguments, *objects: Any) -> Reply:
        """Runs a call in the work thread."""
        arguments, named = unpack(packed, objects)
        return self._host.perform(call, *arguments, **named)[0]

    @ray.method(concurrency_group="work", num_returns=2)
    def perform_storing(self, call: Invoke, packed: PackedArguments, *objects: Any) -> tuple[Reply, Any]:
        """Runs a call in the work thread; reply and rows are two objects."""
        arguments, named = unpack(packed, objects)
        return self._host.perform(call, *arguments, **named)

    @ray.method(concurrency_group="work")
    def stream(self, call: Invoke, packed: PackedArguments, *objects: Any) -> Iterator[Any]:
        """Yields rows, reply, rows, reply ...: each is a separate object, owned by the caller."""
        arguments, named = unpack(packed, objects)
        for reply, rows in self._host.stream(call, *arguments, **named):
            yield rows
            yield reply

    @ray.method(concurrency_group="control")
    def control(self, call: Invoke, packed: PackedArguments, *objects: Any) -> Reply:
        """Runs a call beside the work thread."""
        arguments, named = unpack(packed, objects)
        return self._host.control(call, *arguments, **named)

    @ray.method(concurrency_group="ask")
    def handshake(self) -> Handshake:
        """The worker's report about itself."""
        return self._host.handshake()

    @ray.method(concurrency_group="ask")
    def attach(self) -> Attached:
        """Takes calls of another controller from now on. The one before is gone."""
        return self._host.attach()

    @ray.method(concurrency_group="ask")
    def where(self) -> Whereabouts:
        """Where the worker's threads are now."""
        return self._host.where()

    @ray.method(concurrency_group="pulse")
    def beats(self, every_s: float) -> Iterator[Beat]:
        """Heartbeats, one every `every_s`."""
        yield from self._host.beats(every_s)
