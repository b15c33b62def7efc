# SPDX-License-Identifier: Apache-2.0
"""Log-probs of sampled tokens: those of transformers' own forward pass, whatever they were packed with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.engines import make_engine, one_rank
from helpers.thread_axis import ThreadAxis, on_threads
from helpers.tiny import save_tiny_model
from podium.data.trajectories import TrajectoryBlock, TrajectoryId, TrajectoryIds
from podium.engine.mesh import Mesh
from podium.engine.scoring import _agreed, sampled_mask, score, scoring_batches
from podium.engine.train_step import TrainEngine


def block_of(rows: Sequence[tuple[int, int, int]], seed: int = 0) -> TrajectoryBlock:
    """Trajectories of (prompt, sampled, following) tokens: what follows is not sampled (a tool's answer, say)."""
    draw = np.random.default_rng(seed)
    lengths = [sum(row) for row in rows]
    versions = [np.r_[np.full(a, -1), np.full(b, 4), np.full(c, -1)] for a, b, c in rows]
    total = sum(lengths)
    versions_T = np.concatenate(versions).astype(np.int32) if rows else np.empty(0, np.int32)
    return TrajectoryBlock(
        ids=TrajectoryIds.of(TrajectoryId(row, 0) for row in range(len(rows))),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tokens_T=draw.integers(0, 250, total).astype(np.int32),
        loss_mask_T=versions_T >= 0,
        behavior_logprobs_T=np.zeros(total, np.float32),
        versions_T=versions_T,
    )


@pytest.fixture(scope="module", params=["qwen3", "gemma2"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainEngine:
    return make_engine(save_tiny_model(request.param, tmp_path_factory.mktemp("model")))


ROWS = ((3, 5, 0), (1, 1, 4), (7, 0, 2), (2, 30, 0), (4, 6, 6), (0, 4, 0), (9, 9, 0))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("max_tokens", [16, 1000])
def test_log_probs_are_those_of_one_trajectory_alone_through_transformers(
    engine: TrainEngine, temperature: float, max_tokens: int
) -> None:
    block = block_of(ROWS)
    engine.model.train()
    found = score(engine.model, one_rank(), block, temperature=temperature, max_tokens=max_tokens)
    assert engine.model.training
    assert found.ids.same_as(block.ids)
    sampled = sampled_mask(block)
    engine.model.eval()
    for row in range(len(ROWS)):
        part = slice(int(block.offsets[row]), int(block.offsets[row + 1]))
        tokens = torch.from_numpy(block.tokens_T[part].astype(np.int64))
        engine.model.hf.set_attn_implementation("eager")
        with torch.no_grad():
            logits = engine.model.hf(input_ids=tokens[None], use_cache=False).logits[0, :, :250].float()
        engine.model.hf.set_attn_implementation("podium_packed")
        wanted = torch.log_softmax(logits / (temperature or 1.0), -1)[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
        wanted = np.where(sampled[part][1:], wanted, 0.0)
        np.testing.assert_allclose(found.values_T[part][1:], wanted, atol=1e-4)
        assert found.values_T[part][0] == 0.0  # nothing stands before it


def test_a_block_without_sampled_tokens_needs_no_pass(engine: TrainEngine) -> None:
    assert scoring_batches(block_of(()), max_tokens=16) == []
    found = score(engine.model, one_rank(), block_of(((3, 0, 0), (1, 0, 2))))
    assert found.values_T.tolist() == [0.0] * 6


@given(
    rows=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 5)), max_size=12),
    budget=st.integers(1, 40),
)
def test_every_sampled_token_is_scored_once_within_the_budget(rows: list[tuple[int, int, int]], budget: int) -> None:
    block = block_of(rows)
    batches = scoring_batches(block, max_tokens=budget)
    places = np.concatenate([batch.places_S for batch in batches]) if batches else np.empty(0, np.int64)
    wanted = sampled_mask(block)
    wanted[block.offsets[:-1][block.lengths_N > 0]] = False
    assert sorted(places.tolist()) == np.flatnonzero(wanted).tolist()
    longest = max((prompt + sampled - 1 for prompt, sampled, _ in rows), default=0)
    for batch in batches:
        assert batch.packed.num_tokens <= max(budget, longest)
        targets = batch.packed.targets_T[batch.packed.weights_T > 0]
        assert targets.tolist() == block.tokens_T[batch.places_S].tolist()


def test_a_tensor_group_agrees_on_the_values_of_its_first_rank() -> None:
    def agreed(axis: ThreadAxis) -> list[float]:
        mesh = Mesh(rank=axis.rank, world=3, device=torch.device("cpu"), devices=None, tensor=axis)  # type: ignore[arg-type]
        return _agreed(np.array([0.1, -2.5, 0.0], np.float32) + np.float32(axis.rank), mesh).tolist()

    first = np.array([0.1, -2.5, 0.0], np.float32).tolist()
    assert on_threads(3, agreed) == [first] * 3
