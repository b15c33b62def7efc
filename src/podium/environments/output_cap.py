# SPDX-License-Identifier: Apache-2.0
"""A limit on the output of user code: the first mebibytes are passed on, the rest is read and dropped."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO

MAX_OUTPUT_BYTES = 16 * 2**20
_CHUNK_BYTES = 2**16
_PIPE_BYTES = 2**20
_F_SETPIPE_SZ = 1031  # Linux; fcntl names it from Python 3.10 on, and not everywhere


class OutputCap:
    """The limit on the output of all user-code processes of one worker together, over the worker's whole life."""

    def __init__(self, name: str, max_bytes: int = MAX_OUTPUT_BYTES) -> None:
        self._name, self._max_bytes = name, max_bytes
        self._num_bytes = 0
        self._warning: str | None = None
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> int:
        """How many of these bytes may be kept. The first dropped byte is reported in the log."""
        with self._lock:
            num_kept = min(num_bytes, self._max_bytes - self._num_bytes)
            self._num_bytes += num_kept
            is_first = num_kept < num_bytes and self._warning is None
            if is_first:
                size = f"{self._max_bytes / 2**20:g} MiB"
                self._warning = f"{self._name} prints more than {size}; the rest is dropped."
        if is_first:
            _write(2, f"\nwarning: {self._warning}\n".encode())
        return num_kept

    @property
    def warning(self) -> str | None:
        """Warning for the console, once something was dropped."""
        return self._warning

    def forward(self, process: subprocess.Popen[bytes]) -> None:
        """Reads the process's output in a thread until its end, and passes on the part within the limit. Reading never
        stops while the process lives: a full pipe would block it in the middle of a call."""
        assert process.stdout is not None
        assert process.stderr is not None
        thread = threading.Thread(
            target=_forward, args=(process.stdout, process.stderr, self.take, process), name="user output", daemon=True
        )
        thread.start()


def _forward(
    stdout: IO[bytes], stderr: IO[bytes], take: Callable[[int], int], process: subprocess.Popen[bytes]
) -> None:
    buffer = bytearray(_CHUNK_BYTES)
    with selectors.DefaultSelector() as selector, stdout, stderr:
        for stream, target in ((stdout, 1), (stderr, 2)):
            if sys.platform == "linux":
                import fcntl

                with contextlib.suppress(OSError):  # the user's limit for pipes is reached
                    fcntl.fcntl(stream.fileno(), _F_SETPIPE_SZ, _PIPE_BYTES)
            selector.register(stream, selectors.EVENT_READ, target)
        while selector.get_map():
            for key, _ in selector.select():
                num_bytes = os.readv(key.fd, [buffer])
                if not num_bytes:
                    selector.unregister(key.fileobj)
                elif num_kept := take(num_bytes):
                    _write(key.data, buffer[:num_kept])
    process.wait()


def _write(target: int, data: bytes | bytearray) -> None:
    with contextlib.suppress(OSError):  # nobody reads the worker's own output any more
        os.write(target, data)
