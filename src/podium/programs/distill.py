# SPDX-License-Identifier: Apache-2.0
"""A student that learns its teachers' distribution on fixed data. Every rank runs this."""

from __future__ import annotations

from podium.recipe import DistillRecipe
from podium.spmd.distilling import DistillMethod
from podium.spmd.run import SpmdRun
from podium.spmd.teachers import open_teachers


def distill(run: SpmdRun[DistillRecipe]) -> None:
    """One optimizer step per packed step of documents."""
    method = DistillMethod(run.recipe.distill, run.engine, open_teachers(run))
    for step in run.steps(method.measure, method.averages):
        tally = method.tally()
        report, _ = run.engine.objective_step(
            method.batches(step.split, tally),
            normalizer=step.global_tokens,
            lr=step.lr,
            stop_requested=run.stop_requested,
            tally=tally,
        )
        run.record(step, report)
