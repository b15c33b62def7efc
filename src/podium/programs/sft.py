# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning: cross-entropy over the trained tokens. Every rank runs this."""

from __future__ import annotations

from podium.algorithms.dense import token_cross_entropy
from podium.recipe import SftRecipe
from podium.spmd.evaluation import mean_token_loss
from podium.spmd.run import SpmdRun


def sft(run: SpmdRun[SftRecipe]) -> None:
    """One optimizer step per packed step of documents. All ranks have the same number of micro-batches."""
    for step in run.steps(mean_token_loss(run.engine, token_cross_entropy)):
        report = run.engine.train_step(
            step.micro_batches,
            token_cross_entropy,
            # The count over all ranks: they hold unequal shares, a local mean would weigh them wrongly.
            normalizer=step.global_tokens,
            lr=step.lr,
            stop_requested=run.stop_requested,
            sources=step.sources,
        )
        run.record(step, report)
