# SPDX-License-Identifier: Apache-2.0
"""What the batches of graders say of them: whether a grader works on one at a time, and how long it worked. Pure and
torch-free."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from podium.controller.grading_queue import MOST_QUEUED
from podium.observe.timeline import EPISODES, TimelineSpan

# How much later a batch ends for each second that it waits for earlier ones: 1 where a grader works on one at a time,
# 0 where it works on all of them. Between, the nearer one counts.
_HALF = 0.5
# Waits that differ by less than this part of a grading say nothing of that.
_APART = 0.05
# Batches that are compared with each other.
_MOST_COMPARED = 250


def grades_one_by_one(gradings: Mapping[str, Sequence[TimelineSpan]]) -> bool:
    """Whether a batch that waits for those that its grader has already ends later by as much. All graders do the same
    work. Where no batch waited it does not matter; then it is so. Where all of them waited as long, graders were at
    work all the time, and as many batches were open as the controller gives to a grader of that kind."""
    waits = [wait for spans in gradings.values() for wait in _waits(spans)]
    if not any(wait_s > 0.0 for wait_s, _, _ in waits):
        return True
    few = waits[:: -(-len(waits) // _MOST_COMPARED)]
    least_s = _APART * statistics.median(length_s for _, length_s, _ in few)
    slopes = [
        (other - length) / (later - wait)
        for (wait, length, _), (later, other, _) in itertools.combinations(few, 2)
        if abs(later - wait) > least_s
    ]
    if len(slopes) < len(few) - 1:
        return statistics.median(num_open for _, _, num_open in few) <= MOST_QUEUED
    return statistics.median(slopes) >= _HALF


def _waits(spans: Sequence[TimelineSpan]) -> list[tuple[float, float, int]]:
    """Of each batch of a grader: the seconds until those that it had already have ended, its length, and how many
    batches are open then. Without the first: what the grader had before that is not known in the middle of a run."""
    found: list[tuple[float, float, int]] = []
    open_until_s: list[float] = []
    for span in sorted(spans, key=lambda each: (each.begin_s, each.end_s)):
        open_until_s = [end_s for end_s in open_until_s if end_s > span.begin_s]
        wait_s = max(open_until_s, default=span.begin_s) - span.begin_s
        open_until_s.append(span.end_s)
        found.append((wait_s, span.end_s - span.begin_s, len(open_until_s)))
    return found[1:] if len(found) > 1 else found


def own_lengths_s(spans: Iterable[TimelineSpan]) -> list[float]:
    """What an episode of each batch took a grader that works on one batch at a time: since the end of the one before
    it, if it waited. Runs of earlier versions did not record how many episodes a batch has; then it is one."""
    found, until_s = [], -math.inf
    for span in sorted(spans, key=lambda each: each.end_s):
        episodes = (span.values or {}).get(EPISODES, 1.0)
        found.append((span.end_s - max(span.begin_s, until_s)) / max(1.0, episodes))
        until_s = span.end_s
    return found


def working_s(spans: Iterable[TimelineSpan], window: tuple[float, float] = (-math.inf, math.inf)) -> float:
    """Seconds of the window in which a grader had at least one batch."""
    total_s, until_s = 0.0, window[0]
    for span in sorted(spans, key=lambda each: each.begin_s):
        end_s = min(span.end_s, window[1])
        total_s += max(0.0, end_s - max(span.begin_s, until_s))
        until_s = max(until_s, end_s)
    return total_s
