# SPDX-License-Identifier: Apache-2.0
"""What a run has in a Ray cluster of others, and outlives its controller, is kept alive by controllers: an actor there
ends all of it when none has called for some time."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any

import ray

from podium.cluster.ray_keeping import KEEPALIVE, remove_kept

_CALLS = 6  # in the time after which everything is ended
_LOOK_S = 0.5
_ANSWER_S = 10.0


@ray.remote(num_cpus=0, max_restarts=0, max_concurrency=4)
class _Guardian:
    """Lives in the cluster, apart from all controllers."""

    def __init__(self, namespace: str, timeout_s: float) -> None:
        self._namespace, self._timeout_s, self._called_s = namespace, timeout_s, time.monotonic()
        threading.Thread(target=self._watch, name="keepalive", daemon=True).start()

    def call(self, timeout_s: float) -> None:
        """A controller lives."""
        self._timeout_s, self._called_s = timeout_s, time.monotonic()

    def end(self) -> None:
        """Ends all that is kept."""
        remove_kept(self._namespace)

    def _watch(self) -> None:
        while time.monotonic() - self._called_s < self._timeout_s:
            time.sleep(min(_LOOK_S, self._timeout_s / _CALLS))
        self.end()
        os._exit(0)


class KeepAlive:
    """Keeps what a run has in a cluster, as long as this process lives and for `timeout_s` after its death."""

    def __init__(self, namespace: str, timeout_s: float) -> None:
        """`namespace`: of the actors and placement groups. A controller before this one may have kept them."""
        self.namespace, self._timeout_s = namespace, timeout_s
        self._ended = threading.Event()
        self._guardian = self._found()
        self._thread = threading.Thread(target=self._call, name="podium keepalive", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ends all that is kept. May block for some seconds."""
        self._ended.set()
        self._thread.join(_ANSWER_S)
        with contextlib.suppress(ray.exceptions.RayError):  # else it ends by itself
            ray.get(self._guardian.end.remote(), timeout=_ANSWER_S)
            ray.kill(self._guardian)

    def _found(self) -> Any:
        with contextlib.suppress(ValueError):
            return ray.get_actor(KEEPALIVE, self.namespace)
        options = {"name": KEEPALIVE, "namespace": self.namespace, "lifetime": "detached"}
        return _Guardian.options(**options).remote(self.namespace, self._timeout_s)  # type: ignore[attr-defined]

    def _call(self) -> None:
        while not self._ended.wait(self._timeout_s / _CALLS):
            try:
                ray.get(self._guardian.call.remote(self._timeout_s), timeout=_ANSWER_S)
            except ray.exceptions.GetTimeoutError:
                continue
            except (ray.exceptions.RayError, ValueError):  # it was lost with its node
                with contextlib.suppress(ray.exceptions.RayError, ValueError):
                    self._guardian = self._found()
