# SPDX-License-Identifier: Apache-2.0
"""Selects the waiting examples of the next step; pure, and independent of ranks and micro-batches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from podium.data.documents import Example


def compose_step(waiting: Sequence[Example], budget: int) -> tuple[int, ...]:
    """Positions in `waiting` of the next step's examples, in order of arrival; together at most `budget` inputs.

    Takes examples in order until one does not fit. Fills the remaining room from the rest, the longest that fits first.
    The oldest is always taken, so none waits forever."""
    lengths = [example.num_inputs for example in waiting]
    room = budget
    first_left = 0
    for length in lengths:
        if length > room:
            break
        room -= length
        first_left += 1
    chosen = list(range(first_left))
    # Sorted by length, and among equals the oldest last: the end of the fitting part is longest and oldest.
    rest = sorted((length, -index) for index, length in enumerate(lengths[first_left:], start=first_left))
    while room > 0 and (fitting := bisect_right(rest, (room, 0))):
        length, negative_index = rest.pop(fitting - 1)
        del rest[fitting - 1 :]  # what is longer than the room now is longer than any room later
        chosen.append(-negative_index)
        room -= length
    return tuple(sorted(chosen))
