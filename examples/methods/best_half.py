# SPDX-License-Identifier: Apache-2.0
"""A custom on-policy program: GRPO that trains on the best half of each group."""

# N episodes

from __future__ import annotations

import numpy as np

from podium.algorithms.advantages import group_relative
from podium.controller.run import OnPolicyRun


async def train(run: OnPolicyRun) -> None:
    """Advantages compare with the whole group; the update sees the best episodes only."""
    share = float(run.recipe.options.get("share", 0.5))
    async for step in run.steps():
        advantages_N = group_relative(step.rewards_N, step.group_N)
        keep_N = best_of_each_group(step.rewards_N, step.group_N, share)
        step = step.keep(keep_N)
        batch = step.batch(advantages_N[keep_N])
        report = await run.policy.update(batch)
        await run.commit(step, batch, policy=report)


def best_of_each_group(rewards_N: np.ndarray, group_N: np.ndarray, share: float) -> np.ndarray:
    """Which episodes are among the best `share` of their group; at least one of each group."""
    keep_N = np.zeros(len(rewards_N), bool)
    for group in np.unique(group_N):
        members = np.flatnonzero(group_N == group)
        count = max(1, round(share * len(members)))
        keep_N[members[np.argsort(-rewards_N[members], kind="stable")[:count]]] = True
    return keep_N
