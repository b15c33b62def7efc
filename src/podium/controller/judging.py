# SPDX-License-Identifier: Apache-2.0
"""Metrics of judges: what they cost, and how often they agree with themselves. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from podium.environments.judges import JUDGED

_COMPARED, _AGREEING = "comparisons", "agreeing"


def split_judged(
    extras: Mapping[str, tuple[float, float]],
) -> tuple[dict[str, dict[str, float]], dict[str, tuple[float, float]]]:
    """The sums that judges gave with their rewards, by reward and number, and all other numbers."""
    judged: dict[str, dict[str, float]] = {}
    others: dict[str, tuple[float, float]] = {}
    for name, numbers in extras.items():
        reward, is_judged, key = name.rpartition("/" + JUDGED)
        if is_judged:
            judged.setdefault(reward, {})[key] = numbers[0]
        else:
            others[name] = numbers
    return judged, others


def judge_metrics(judged: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Totals of a step, and the share of comparisons in which both orders have the same result."""
    metrics: dict[str, float] = {}
    for reward, totals in judged.items():
        metrics |= {f"judge/{reward}/{key}": total for key, total in totals.items() if key != _AGREEING}
        if totals.get(_COMPARED):
            metrics[f"judge/{reward}/agreement"] = totals.get(_AGREEING, 0.0) / totals[_COMPARED]
    return metrics
