# SPDX-License-Identifier: Apache-2.0
"""Metrics of the sources of a mix: rows, tokens and loss of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from podium.data.documents import SplitExamples
from podium.engine.train_step import source_sum

Unit = Literal["rows", "tokens"]
"""What a loss is a mean over."""


def source_metrics(split: SplitExamples, sums: Mapping[str, float], unit: Unit) -> dict[str, float]:
    """Rows, tokens and mean loss of each source of a step over all ranks; nothing for a single source. `sums` are those
    of the step's tally. A source without a row in the step has no loss."""
    values: dict[str, float] = {}
    losses = mean_losses(split, sums, unit)
    for name, rows, tokens in zip(split.sources, _counts(split, "rows"), _counts(split, "inputs"), strict=True):
        values[f"source/{name}/rows"] = float(rows)
        values[f"source/{name}/tokens"] = float(tokens)
        if name in losses:
            values[f"source/{name}/loss"] = losses[name]
    return values


def mean_losses(split: SplitExamples, sums: Mapping[str, float], unit: Unit) -> dict[str, float]:
    """Source -> mean loss, of the sources that have rows and whose loss was summed."""
    return {
        name: sums[source_sum(name)] / float(count)
        for name, count in zip(split.sources, _counts(split, unit), strict=True)
        if count and source_sum(name) in sums
    }


def heldout_losses(split: SplitExamples, sums: Mapping[str, float], unit: Unit) -> dict[str, float]:
    """`NAME/loss` of each source of held-out data."""
    return {f"{name}/loss": loss for name, loss in mean_losses(split, sums, unit).items()}


def _counts(split: SplitExamples, what: Literal["rows", "tokens", "inputs"]) -> np.ndarray:
    """One count for each source: rows, trained tokens, or positions through the model."""
    counts = np.zeros(len(split.sources), np.int64)
    if split.sources:
        for example in split.examples:
            match what:
                case "rows":
                    counts[example.source] += 1
                case "tokens":
                    counts[example.source] += example.num_trained
                case "inputs":
                    counts[example.source] += example.num_inputs
    return counts
