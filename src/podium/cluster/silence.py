# SPDX-License-Identifier: Apache-2.0
"""Measures how long a worker without heartbeats has shown no other sign of life either."""

from __future__ import annotations

from collections.abc import Callable

from podium.cluster.processes import ProcessInfo

# How often a silent worker is checked, and the share of a core above which it counts as busy.
_SLICE_S = 2.0
_BUSY = 0.2


class Silence:
    """The time since a worker's last heartbeat, in slices. Each slice is awaited, so that time during which this
    process was stopped itself does not count. A call that holds the GIL keeps a worker from sending heartbeats; on this
    machine its CPU use is a sign of life instead."""

    def __init__(
        self,
        look: Callable[[], ProcessInfo | None],
        *,
        warn_s: float,
        timeout_s: float,
        busy_s: float | None = None,
    ) -> None:
        """`look` reports the process; None if nothing is known about it. `busy_s`: how long one that computes may be
        silent; None: for ever."""
        self._look, self._warn_s, self._timeout_s, self._busy_s = look, warn_s, timeout_s, busy_s
        self.slice_s = min(warn_s, timeout_s, _SLICE_S)
        self._last: ProcessInfo | None = None
        self._silent_s = self._warned_s = self.lifeless_s = 0.0
        self.guess = "frozen, cut off, or in a call that holds Python's lock"

    def look(self) -> None:
        """Called after each slice without a heartbeat."""
        self._silent_s += self.slice_s
        self.lifeless_s += self.slice_s
        now = self._look()
        if now is not None and now.is_stopped:
            self.guess = f"process {now.pid} is stopped (SIGSTOP)"
        elif now is not None and self._last is not None and now.cpu_s - self._last.cpu_s > _BUSY * self.slice_s:
            self.guess, self.lifeless_s = "busy in a call that holds Python's lock", 0.0
        self._last = now

    def should_warn(self) -> bool:
        """Whether to warn: once every so many seconds."""
        if self._silent_s - self._warned_s < self._warn_s:
            return False
        self._warned_s = self._silent_s
        return True

    @property
    def is_over(self) -> bool:
        """Whether the worker was silent for too long."""
        return self.lifeless_s >= self._timeout_s or self._is_too_busy

    @property
    def _is_too_busy(self) -> bool:
        return self._busy_s is not None and self._silent_s >= max(self._busy_s, self._timeout_s)

    @property
    def cause(self) -> str:
        """Why a worker whose silence is over counts as dead."""
        if self.lifeless_s < self._timeout_s:
            return f"no heartbeat for {self._silent_s:.0f} s: {self.guess}"
        return f"no sign of life for {self.lifeless_s:.0f} s: {self.guess}"
