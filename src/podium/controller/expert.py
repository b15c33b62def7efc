# SPDX-License-Identifier: Apache-2.0
"""Which episodes an expert iteration learns from; pure."""

from __future__ import annotations

import numpy as np

from podium.roles.stages import GradedRollouts


def solved_episodes(graded: GradedRollouts, *, solved_at: float, per_prompt: int) -> GradedRollouts:
    """Of each prompt the best solved episodes, at most `per_prompt`; of equals the shorter, then the first."""
    rewards_N, group_N = graded.rewards_N, graded.group_N
    lengths_N = graded.rollouts.note.sampled_N
    order = np.lexsort((np.arange(len(graded)), lengths_N, -rewards_N, group_N))
    order = order[rewards_N[order] >= solved_at]
    groups = group_N[order]
    starts = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]])) if len(groups) else np.empty(0, int)
    place = np.arange(len(order)) - np.repeat(starts, np.diff([*starts, len(order)]))
    return graded.take(np.sort(order[place < per_prompt]))
