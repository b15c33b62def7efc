# SPDX-License-Identifier: Apache-2.0
"""Exchanges what the loaders of all ranks have tokenized. The collectives have a gloo group and a thread of their own:
training waits for them only when it waits for data."""

from __future__ import annotations

import contextlib
import enum
import logging
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from podium.data.workers import sendable
from podium.engine.mesh import Mesh
from podium.errors import LaunchError
from podium.progress import waiting_at_most

_LOG = logging.getLogger(__name__)
# How often a rank takes part that has nothing to send: a rank that ends waits at most this long for the others.
_TURN_S = 0.5
_POLL_S = 0.2
_CLOSE_S = 10.0
# How long a rank waits for its own end when another one has ended: that one's error is the cause, and comes first.
_END_S = 5.0


class _State(enum.IntEnum):
    """What a rank says in a turn."""

    IDLE = 0  # its loader has nothing to exchange now
    READY = 1
    FAILED = 2  # its loader has failed: the payload is the error
    CLOSED = 3


class RankExchange:
    """One rank's end of an exchange of bytes; implements `data.exchange.Exchange`. Collective to create.

    A thread takes turns with those of the other ranks, several in a second, whether there is something to send or not.
    In a turn all ranks learn the state of all. If all are ready they send their payloads. A rank that fails or ends
    says so in its last turn. So nobody is left waiting in a collective, and a rank that does not take part at all is
    noticed."""

    def __init__(self, mesh: Mesh, *, timeout_s: float) -> None:
        """`timeout_s`: the longest wait for the others."""
        self._mesh, self._timeout_s = mesh, timeout_s
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc="podium-data")
        self._changed = threading.Condition()  # guards everything below
        self._state, self._payload = _State.IDLE, b""
        self._received: list[bytes] | None = None
        self._failure: Exception | None = None  # why there are no more turns
        self._missing: list[int] = []  # ranks that were not ready in the last turn
        self._thread = threading.Thread(target=self._run, name="podium-exchange", daemon=True)
        self._thread.start()

    @property
    def rank(self) -> int:
        """This rank."""
        return self._mesh.rank

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self._mesh.world

    def all_gather(self, payload: bytes, is_stopped: Callable[[], bool]) -> list[bytes] | None:
        """The payloads of all ranks, in rank order; None if stopped while waiting. The thread ends the wait: with the
        payloads, or with the failure of a rank."""
        deadline_s = time.monotonic() + self._timeout_s
        with self._changed:
            if self._state is not _State.FAILED:
                self._state, self._payload = _State.READY, payload
                self._changed.notify_all()
            with waiting_at_most(self._timeout_s):
                while self._received is None:
                    if self._failure is not None:
                        raise self._failure
                    if is_stopped():
                        return None
                    if time.monotonic() > deadline_s:
                        raise self._late()
                    self._changed.wait(_POLL_S)
            received, self._received = self._received, None
            return received

    def fail(self, error: BaseException) -> None:
        """Says that this rank takes no further part: the others raise `error`. Does not wait."""
        sent = sendable(error) if isinstance(error, Exception) else LaunchError(f"{type(error).__name__}: {error}")
        with self._changed:
            self._state, self._payload = _State.FAILED, pickle.dumps(sent)
            self._changed.notify_all()

    def close(self) -> None:
        """Takes the last turn, and ends the thread and the group; a second call does nothing."""
        with self._changed:
            if self._state is not _State.FAILED:  # else the others hear of that
                self._state, self._payload = _State.CLOSED, b""
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            # The group stays: to destroy it would wait for the collective.
            _LOG.warning("rank %d: other ranks did not take part in the end of the exchange of data", self.rank)
            return
        with contextlib.suppress(ValueError, AssertionError):  # gone with the default group, or a second call
            dist.destroy_process_group(self._group)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        """Takes turns. Waits for the loader at most `_TURN_S`, then for all other ranks' threads, with the group's
        deadline. Ends when a rank has failed or closed, or is gone."""
        try:
            while (failure := self._turn()) is None:
                pass
        except Exception as error:  # of gloo
            failure = self._lost(error)
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def _turn(self) -> Exception | None:
        """One turn of all ranks. Returns why it was the last, or None."""
        with self._changed:
            self._changed.wait_for(lambda: self._state is not _State.IDLE, _TURN_S)
            state, payload = self._state, self._payload
        table = self._gather(torch.tensor([state, len(payload)]))
        states, sizes = [_State(value) for value in table[:, 0].tolist()], table[:, 1].tolist()
        if _State.FAILED in states:
            failed = states.index(_State.FAILED)
            is_sender = state is _State.FAILED
            sizes = [size if each is _State.FAILED else 0 for size, each in zip(sizes, states, strict=True)]
            error: Exception = pickle.loads(self._gather_bytes(payload if is_sender else b"", sizes)[failed])
            return error
        if _State.CLOSED in states:
            with self._changed:
                self._changed.wait_for(lambda: self._state is _State.CLOSED, _END_S)
            return LaunchError(
                f"rank {states.index(_State.CLOSED)} has ended, and the other ranks still need the rows that it "
                "tokenizes. Look for its error."
            )
        missing = [rank for rank, each in enumerate(states) if each is _State.IDLE]
        received = None if missing else self._gather_bytes(payload, sizes)
        with self._changed:
            self._missing = missing
            if received is not None:
                self._received = received
                if self._state is _State.READY:  # else it has ended in the meantime
                    self._state, self._payload = _State.IDLE, b""
                self._changed.notify_all()
        return None

    def _gather(self, values: Tensor) -> Tensor:
        """[rank, ...]: the tensors of all ranks."""
        out = torch.empty((self.world, *values.shape), dtype=values.dtype)
        dist.all_gather(list(out.unbind()), values, group=self._group)
        return out

    def _gather_bytes(self, payload: bytes, sizes: Sequence[int]) -> list[bytes]:
        padded = np.zeros(max(sizes), np.uint8)
        padded[: len(payload)] = np.frombuffer(payload, np.uint8)
        rows = self._gather(torch.from_numpy(padded)).numpy()
        return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]

    def _late(self) -> LaunchError:
        return LaunchError(
            f"rank {self.rank} waited {self._timeout_s:.0f} s for the rows that ranks {self._missing} tokenize. Look "
            "what those were doing: a source's `map` may hang, or storage may not answer. Raise placement.timeout_s if "
            "they are only slow."
        )

    def _lost(self, error: Exception) -> LaunchError:
        reason = str(error).split("\n", 1)[0]
        return LaunchError(
            f"rank {self.rank} lost the other ranks while they exchanged what they had tokenized: {reason} "
            "Look for the first error of another rank."
        )
