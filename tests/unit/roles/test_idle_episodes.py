# SPDX-License-Identifier: Apache-2.0
"""Episodes without an advantage: they count in what the loss is divided by, and need not be computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.made_batches import make_batch, make_graded
from helpers.on_policy import CASES, MAX_NEW_TOKENS, assembled, make_episodes, recording_engine, refs_of, run_update
from helpers.tiny import save_tiny_model
from podium.recipe import AlgorithmSection, CorrectionSection, KlSection
from podium.roles.carriers import UpdatePlan, UpdateShard
from podium.roles.mini_batches import without_idle
from podium.roles.policy_update import PolicyUpdate
from podium.roles.stages import Advantages, TrainBatch

GRADED = make_graded([1, 1, 0, 1], [0, 0, 1, 1], lengths=[2, 3, 4, 5])
BATCH = make_batch(GRADED, [0.0, 0.0, -0.5, 0.5])


def plan(algorithm: AlgorithmSection) -> UpdatePlan:
    return UpdatePlan(
        step=1, lr=0.0, algorithm=algorithm, temperature=1.0, versions=(0,), max_new_tokens=MAX_NEW_TOKENS
    )


def test_a_group_that_agrees_is_counted_and_not_computed() -> None:
    kept, absent = without_idle(BATCH, plan(AlgorithmSection()), np.zeros(4, np.int64))

    assert kept.tolist() == [2, 3]
    assert absent == [(2 + 3, 2)]


def test_a_mini_batch_that_would_have_none_left_is_computed_whole() -> None:
    kept, absent = without_idle(BATCH, plan(AlgorithmSection(mini_batches=2)), np.array([0, 0, 1, 1]))

    assert kept.tolist() == [0, 1, 2, 3]
    assert absent == [(0, 0), (0, 0)]


@pytest.mark.parametrize(
    "algorithm",
    [
        AlgorithmSection(entropy=0.01),
        AlgorithmSection(kl=KlSection(coefficient=0.1)),
        AlgorithmSection(correction=CorrectionSection()),
        AlgorithmSection(loss="mine.py:loss"),
    ],
)
def test_where_another_term_has_a_gradient_all_are_computed(algorithm: AlgorithmSection) -> None:
    kept, absent = without_idle(BATCH, plan(algorithm), np.zeros(4, np.int64))

    assert kept.tolist() == [0, 1, 2, 3]
    assert absent == [(0, 0)]


def test_whitened_advantages_are_not_looked_at_before() -> None:
    whitened: TrainBatch = replace(BATCH, advantages=Advantages(values_N=np.array([0.0, 0.0, -0.5, 0.5]), whiten=True))

    assert without_idle(whitened, plan(AlgorithmSection()), np.zeros(4, np.int64))[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["clipped", "sequence means", "constant", "gspo"])
def test_the_gradient_is_that_of_computing_them(tmp_path: Path, name: str) -> None:
    save_tiny_model("qwen3", tmp_path)
    episodes, case = make_episodes(tmp_path), CASES[name]
    advantages_N = episodes.advantages_N.copy()
    advantages_N[::2] = 0
    episodes = replace(episodes, advantages_N=advantages_N)
    engine: Any = recording_engine(tmp_path)
    whole = run_update(engine, episodes, case)

    rows = np.flatnonzero(advantages_N)
    idle = episodes.block.take(np.flatnonzero(advantages_N == 0))
    trained = idle.loss_mask_T.copy()
    trained[idle.offsets[:-1]] = False
    per_row = [int(trained[begin:end].sum()) for begin, end in zip(idle.offsets[:-1], idle.offsets[1:], strict=True)]
    block = episodes.block.take(rows)
    shard = UpdateShard(
        rows=refs_of(block), batches=((np.arange(len(rows)),),), advantages_N=advantages_N[rows],
        absent=((sum(per_row), sum(count > 0 for count in per_row)),),
    )  # fmt: skip
    engine.recorded = []
    PolicyUpdate(engine, max_tokens=4096).run(
        block, shard, replace(plan(case.section), temperature=episodes.temperature)
    )

    (found,) = (assembled(engine, each) for each in engine.recorded)
    (expected,) = whole.gradients
    flat, wanted = (torch.cat([each.double().ravel() for each in grads.values()]) for grads in (found, expected))
    assert float((flat - wanted).norm()) <= 1e-6 * float(wanted.norm())
