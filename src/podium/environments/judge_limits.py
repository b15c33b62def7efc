# SPDX-License-Identifier: Apache-2.0
"""When requests to a judge may be sent: a rate limit and waits between retries. Pure: the caller has the clock."""

from __future__ import annotations

import email.utils
import time

_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 30.0


class RateLimit:
    """Requests at even distances, in the order in which they ask. One event loop uses it."""

    def __init__(self, per_second: float | None) -> None:
        self._distance_s = 0.0 if per_second is None else 1.0 / per_second
        self._next_s = float("-inf")

    def reserve(self, now_s: float) -> float:
        """The seconds that the caller has to wait before it sends its request."""
        begin_s = max(now_s, self._next_s)
        self._next_s = begin_s + self._distance_s
        return begin_s - now_s

    def hold(self, until_s: float) -> None:
        """No request is sent before this time: the endpoint asked for it."""
        self._next_s = max(self._next_s, until_s)


def backoff_s(retry: int, chance: float) -> float:
    """Seconds before a retry, the first one being 0: twice as long each time, and by `chance` (0 to 1) down to half of
    that, so that requests which failed together do not return together."""
    return min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** min(retry, 16)) * (0.5 + 0.5 * chance)


def retry_after_s(header: str | None, now_epoch_s: float | None = None) -> float | None:
    """What a Retry-After header asks for: seconds, or a date. None: nothing that can be read."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            date = email.utils.parsedate_to_datetime(header)
        except ValueError:
            return None
        seconds = date.timestamp() - (time.time() if now_epoch_s is None else now_epoch_s)
    return max(0.0, seconds) if seconds < float("inf") else None
