# SPDX-License-Identifier: Apache-2.0
"""A generator that is slower than the others, by the summaries of their engines' steps. Torch-free."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping

from podium.observe.timeline import STEPS, TAIL, TimelineSpan
from podium.observe.timing import NESTED

# A generator whose engine steps take so many times those of the others is slow; fewer steps than that say nothing.
_SLOW, _FEWEST_STEPS = 1.5, 20


def slow_generators(spans: Iterable[TimelineSpan]) -> Iterator[str]:
    """Generators whose engine takes much longer for a step than the others' engines, and does not make more of it."""
    seconds: dict[str, float] = {}
    counts: dict[str, tuple[float, float]] = {}  # engine steps and tokens
    for span in spans:
        if span.values is None or span.name.rpartition(NESTED)[2] not in (STEPS, TAIL):
            continue
        worker, values = span.worker.partition("@")[0], span.values  # also those that took its place
        seconds[worker] = seconds.get(worker, 0.0) + span.end_s - span.begin_s
        steps, tokens = counts.get(worker, (0.0, 0.0))
        counts[worker] = steps + values.get("steps", 0.0), tokens + values.get("generated_tokens", 0.0)
    kept = [worker for worker, (steps, tokens) in counts.items() if steps >= _FEWEST_STEPS and tokens > 0]
    step_s = {worker: seconds[worker] / counts[worker][0] for worker in kept}
    token_s = {worker: seconds[worker] / counts[worker][1] for worker in kept}
    for worker in kept:
        usual_s, usual_token_s = _median_of_others(worker, step_s), _median_of_others(worker, token_s)
        if step_s[worker] > _SLOW * usual_s and token_s[worker] > _SLOW * usual_token_s:
            others = "the other generator" if len(kept) == 2 else "the others"
            yield (
                f"{worker} is slow: it generates {1 / token_s[worker]:.3g} tokens/s while it has work, and "
                f"{others} {1 / usual_token_s:.3g} (a step of its engine takes {1000 * step_s[worker]:.3g} ms instead "
                f"of {1000 * usual_s:.3g} ms)"
            )


def _median_of_others(worker: str, values: Mapping[str, float]) -> float:
    return statistics.median([each for other, each in values.items() if other != worker] or [math.inf])
