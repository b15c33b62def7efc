# SPDX-License-Identifier: Apache-2.0
"""Progress of reading rows: one updating line on a terminal, a line at intervals elsewhere."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

_LIVE_S, _PLAIN_S = 0.1, 10.0


class RowProgress:
    """Shows how many rows of a source are read. Without a stream it shows nothing."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._is_live = stream is not None and stream.isatty()
        self._shown_s = time.monotonic()

    def show(self, name: str, num_rows: int, share: float) -> None:
        """`num_rows` of the source are read, and `share` (0 to 1) of its blocks."""
        now_s = time.monotonic()
        if self._stream is None or now_s - self._shown_s < (_LIVE_S if self._is_live else _PLAIN_S):
            return
        self._shown_s = now_s
        width = shutil.get_terminal_size().columns
        text = f"{name}: {num_rows} rows, {share:.0%}"
        if self._is_live:
            room = max(0, min(40, width - len(text) - 5))
            bar = f" [{'#' * round(share * room):<{room}}]" if room >= 10 else ""
            self._stream.write(f"\r{(text + bar)[: width - 1]}\x1b[K")
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Clears the line of a terminal."""
        if self._stream is not None and self._is_live:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
