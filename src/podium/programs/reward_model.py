# SPDX-License-Identifier: Apache-2.0
"""A model that scores conversations, learned from comparisons or scores. Every rank runs this."""

from __future__ import annotations

from podium.recipe import RewardModelRecipe
from podium.spmd.reward_modelling import RewardModelMethod
from podium.spmd.run import SpmdRun


def reward_model(run: SpmdRun[RewardModelRecipe]) -> None:
    """One optimizer step per step of rows; both sides of a pair go through one packed forward."""
    method = RewardModelMethod(run.recipe.reward_model, run.engine)
    for step in run.steps(method.measure, method.averages):
        tally = method.tally()
        report, _ = run.engine.objective_step(
            method.batches(step.split, tally),
            normalizer=step.num_examples,
            lr=step.lr,
            stop_requested=run.stop_requested,
            tally=tally,
        )
        run.record(step, report)
