# SPDX-License-Identifier: Apache-2.0
"""Messages between a worker and the processes that run its user code: pickles with a short header, over a socket."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Literal, cast

Kind = Literal["call", "partial", "value", "error"]
"""A call; a partial answer; its answer; or why it has none (a text)."""
_KINDS: tuple[Kind, ...] = ("call", "partial", "value", "error")
_HEADER = struct.Struct("<QBI")


class FrameProtocol(asyncio.Protocol):
    """Both ends of the socket. `on_frame` and `on_end` are called in the event loop."""

    def __init__(self, on_frame: Callable[[int, Kind, bytes], None], on_end: Callable[[], None]) -> None:
        self._on_frame, self._on_end = on_frame, on_end
        self._buffer = bytearray()
        self._outgoing: list[bytes] = []
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport to send with."""
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's is of no class of asyncio's

    def connection_lost(self, exc: Exception | None) -> None:
        """Reports the end of the connection."""
        self._transport = None
        self._on_end()

    def data_received(self, data: bytes) -> None:
        """Reports each frame that is complete, and keeps the rest."""
        self._buffer += data
        begin = 0
        while len(self._buffer) - begin >= _HEADER.size:
            number, kind, size = _HEADER.unpack_from(self._buffer, begin)
            end = begin + _HEADER.size + size
            if len(self._buffer) < end:
                break
            self._on_frame(number, _KINDS[kind], bytes(self._buffer[begin + _HEADER.size : end]))
            begin = end
        del self._buffer[:begin]

    def send(self, number: int, kind: Kind, payload: bytes) -> None:
        """Never waits: data that the other end has not read yet is buffered here. After the end of the connection
        nothing is sent.

        Messages of one iteration of the event loop are sent together, which takes a third of the time. Partial answers
        are sent at once, because the process may not survive until the next iteration."""
        if not self._outgoing and kind != "partial":
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(_HEADER.pack(number, _KINDS.index(kind), len(payload)) + payload)
        if kind == "partial":
            self._flush()

    def _flush(self) -> None:
        frames, self._outgoing = self._outgoing, []
        if frames and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(frames))

    def abort(self) -> None:
        """Closes at once; `on_end` follows."""
        if self._transport is not None:
            self._transport.abort()
