# SPDX-License-Identifier: Apache-2.0
"""Learning from preferences: DPO, IPO, SimPO and ORPO on pairs, KTO on labelled rows. Every rank runs this."""

from __future__ import annotations

from podium.recipe import DpoRecipe
from podium.spmd.preferences import PreferenceMethod
from podium.spmd.references import open_references
from podium.spmd.run import SpmdRun


def dpo(run: SpmdRun[DpoRecipe]) -> None:
    """One optimizer step per step of rows; chosen and rejected of a pair go through one packed forward."""
    max_length = run.recipe.data.max_length
    assert max_length is not None, "filled in when a recipe is resolved"
    method = PreferenceMethod(
        run.recipe.preference, run.engine, open_references(run), max_tokens=run.max_tokens, max_length=max_length
    )
    for step in run.steps(method.measure, method.averages):
        tally = method.tally()
        report, _ = run.engine.objective_step(
            method.batches(step.split, tally),
            # The count over all ranks: they hold unequal shares, a local mean would weigh them wrongly.
            normalizer=step.num_examples,
            lr=step.lr,
            stop_requested=run.stop_requested,
            tally=tally,
        )
        run.record(step, report)
