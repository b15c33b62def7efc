# SPDX-License-Identifier: Apache-2.0
"""Progress of a batch of answers: one updating line on a terminal, a line at intervals elsewhere. Torch-free."""

from __future__ import annotations

import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TextIO

from podium.observe.formats import duration, rate
from podium.rollout.engine import Load

_LIVE_S, _PLAIN_S = 0.25, 10.0
_RATE_OVER_S = 10.0
_TO_LINE_START, _CLEAR_TO_END = "\r", "\x1b[K"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Number of answers from before this start, finished since, and wanted in total."""

    before: int
    finished: int
    wanted: int

    @property
    def done(self) -> int:
        """Answers of this start and of earlier ones."""
        return self.before + self.finished


def describe(standing: Standing, load: Load, *, tokens_per_s: float, elapsed_s: float) -> str:
    """The progress line. The remaining time is estimated from the answers finished so far."""
    left = standing.wanted - standing.done
    parts = [
        f"answers {standing.done}/{standing.wanted}",
        f"tokens/s {rate(tokens_per_s)}",
        f"running {load.running}",
        f"waiting {max(0, left - load.running)}",
    ]
    if standing.finished:
        parts.append(f"time left {duration(left * elapsed_s / standing.finished)}")
    return "  ".join(parts)


class Progress:
    """Shows `standing` and `load` until its block ends.

    A separate thread reads them at intervals, because a single answer may take long. The thread waits only for its next
    interval; leaving the block ends it."""

    def __init__(self, stream: TextIO, standing: Callable[[], Standing], load: Callable[[], Load]) -> None:
        self._stream, self._standing, self._load = stream, standing, load
        self._live = stream.isatty()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._began = time.monotonic()
        self._generated = deque([(self._began, load().generated_tokens)])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join()
        if self._live:
            self._show()
            print(file=self._stream, flush=True)

    def _run(self) -> None:
        while not self._left.wait(_LIVE_S if self._live else _PLAIN_S):
            self._show()

    def _show(self) -> None:
        line = self._line()
        if self._live:
            width = shutil.get_terminal_size().columns
            self._stream.write(f"{_TO_LINE_START}{line[: width - 1]}{_CLEAR_TO_END}")
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def _line(self) -> str:
        now, load = time.monotonic(), self._load()
        self._generated.append((now, load.generated_tokens))
        while len(self._generated) > 2 and now - self._generated[0][0] > _RATE_OVER_S:
            self._generated.popleft()
        then, sampled = self._generated[0]
        return describe(
            self._standing(),
            load,
            tokens_per_s=(load.generated_tokens - sampled) / max(now - then, 1e-9),
            elapsed_s=now - self._began,
        )
