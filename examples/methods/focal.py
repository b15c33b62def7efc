# SPDX-License-Identifier: Apache-2.0
"""A custom program on fixed data: SFT with the focal loss. Well-predicted tokens have less weight."""

# T trained tokens

from __future__ import annotations

from torch import Tensor

from podium.spmd.evaluation import mean_token_loss
from podium.spmd.run import SpmdRun


def train(run: SpmdRun) -> None:
    """Every rank runs this, on its own micro-batches."""
    gamma = float(run.recipe.options.get("gamma", 2.0))

    def focal_loss(logprobs_T: Tensor) -> Tensor:
        """-(1 - p)^gamma log p; with gamma 0 the cross-entropy."""
        return -((1 - logprobs_T.exp()).clamp(min=0) ** gamma) * logprobs_T

    for step in run.steps(mean_token_loss(run.engine, focal_loss)):
        report = run.engine.train_step(
            step.micro_batches,
            focal_loss,
            normalizer=step.global_tokens,  # over all ranks: their shares are unequal
            lr=step.lr,
            stop_requested=run.stop_requested,
        )
        run.record(step, report)
