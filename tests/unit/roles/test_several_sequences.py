# SPDX-License-Identifier: Apache-2.0
"""Episodes of several token sequences in one row: packed as documents of their own, counted as one episode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from helpers.on_policy import recording_engine, refs_of
from podium.data.trajectories import TrajectoryBlock, TrajectoryId, TrajectoryIds
from podium.engine.scoring import score, scoring_batches
from podium.recipe import AlgorithmSection
from podium.roles.carriers import TurnRewards, UpdatePlan, UpdateShard
from podium.roles.policy_update import PolicyUpdate
from podium.roles.token_rows import packed_rows


def block_of(rows: list[list[tuple[list[int], str]]]) -> TrajectoryBlock:
    """For each row its sequences: tokens, and x where one was sampled."""
    tokens = [token for row in rows for tokens, _ in row for token in tokens]
    mask_T = np.array([letter == "x" for row in rows for _, letters in row for letter in letters], np.bool_)
    starts = [at > 0 and place == 0 for row in rows for at, (ids, _) in enumerate(row) for place in range(len(ids))]
    return TrajectoryBlock(
        ids=TrajectoryIds.of([TrajectoryId(row, 0) for row in range(len(rows))]),
        offsets=np.cumsum([0, *(sum(len(ids) for ids, _ in row) for row in rows)]).astype(np.int64),
        tokens_T=np.array(tokens, np.int32),
        loss_mask_T=mask_T,
        behavior_logprobs_T=np.where(mask_T, -1.0, 0).astype(np.float32),
        versions_T=np.where(mask_T, 0, -1).astype(np.int32),
        starts_T=np.array(starts, np.bool_) if any(starts) else None,
    )


TREE = [([1, 2, 3, 4], "..xx"), ([1, 2, 9, 8, 7], "....x")]
LONE = [([5, 6, 7], ".xx")]


def test_each_sequence_is_a_document_and_all_of_a_row_are_one_episode() -> None:
    block = block_of([TREE, LONE])

    packed, places_S, row_S, num_rows = packed_rows(block, block.loss_mask_T, np.arange(2))

    # Of a document's tokens the last is only a target: 2, 3 and 4 inputs.
    assert np.diff(packed.offsets).tolist() == [2, 3, 4]
    assert packed.tokens_T.tolist() == [5, 6, 1, 2, 3, 1, 2, 9, 8]
    assert packed.positions_T.tolist() == [0, 1, 0, 1, 2, 0, 1, 2, 3]
    assert places_S.tolist() == [10, 11, 2, 3, 8]
    assert row_S.tolist() == [0, 0, 1, 1, 1]
    assert num_rows == 2


def test_the_first_token_of_every_sequence_is_predicted_by_nothing() -> None:
    assert block_of([TREE, LONE]).first_T.tolist() == [0, 4, 9]
    assert block_of([LONE, LONE]).first_T.tolist() == [0, 3]


def test_rows_keep_their_sequences_when_they_are_cut_and_joined() -> None:
    whole = block_of([LONE, TREE])
    parts = [whole.take(np.array([1])), block_of([LONE]), whole.take(np.array([0]))]

    joined = TrajectoryBlock.concatenate(parts)

    assert [list(joined.sequences(row)) for row in range(3)] == [[(0, 4), (4, 9)], [(9, 12)], [(12, 15)]]
    assert TrajectoryBlock.concatenate(parts[1:]).starts_T is not None
    assert TrajectoryBlock.concatenate([block_of([LONE]), block_of([LONE])]).starts_T is None


def test_log_probs_of_a_sequence_do_not_depend_on_the_others_of_its_row(tiny_folder: Path) -> None:
    engine = recording_engine(tiny_folder)
    apart = block_of([[each] for each in (*TREE, *LONE)])
    together = block_of([TREE, LONE])

    scores = [score(engine.language_model, engine.mesh, block).values_T for block in (apart, together)]

    assert len(scoring_batches(together, max_tokens=99)[0].places_S) == 5
    assert np.array_equal(scores[0], scores[1])
    assert (scores[0] != 0).sum() == 5


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean_mean"])
def test_the_gradient_of_a_tree_is_the_one_by_hand(tiny_folder: Path, reduction: str) -> None:
    engine = recording_engine(tiny_folder)
    block, advantages = block_of([TREE, LONE]), np.array([0.5, -2.0])
    shard = UpdateShard(rows=refs_of(block), batches=((np.arange(2),),), advantages_N=advantages)
    algorithm = AlgorithmSection.model_validate({"reduction": reduction, "loss": "policy_gradient"})
    plan = UpdatePlan(step=1, lr=0.0, algorithm=algorithm, temperature=1.0, versions=(0,), max_new_tokens=8)

    PolicyUpdate(engine, max_tokens=99).run(block, shard, plan)

    [found] = engine.recorded
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    total = torch.zeros(())
    for sequences, advantage in zip([TREE, LONE], advantages.tolist(), strict=True):
        trained = sum(letters.count("x") for _, letters in sequences)
        share = 1 / 5 if reduction == "token_mean" else 1 / (2 * trained)
        for tokens, letters in sequences:
            logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
            sampled = [at for at, letter in enumerate(letters) if letter == "x"]
            total = total - share * advantage * sum(logprobs[at - 1, tokens[at]] for at in sampled)
    total.backward()
    by_hand = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert found.keys() == by_hand.keys()
    for name, gradient in by_hand.items():
        rows = found[name].reshape(-1, *gradient.shape[1:])[: len(gradient)]  # a vocabulary is padded
        assert torch.allclose(rows, gradient, atol=1e-6), name
    assert any(gradient.abs().max() > 1e-4 for gradient in by_hand.values())


def test_the_gradient_of_turns_of_a_tree_is_the_one_by_hand(tiny_folder: Path) -> None:
    """A turn, two answers behind it, and a new conversation, with an advantage for each; the shared turn is trained
    once, in the first sequence that has it."""
    tree = [([1, 2, 3, 4, 9, 6, 7], "..xx.xx"), ([1, 2, 3, 4, 9, 8], ".....x"), ([5, 6, 7], ".xx")]
    engine = recording_engine(tiny_folder)
    block = block_of([tree])
    ends, by_turn = [3, 6, 12, 15], [0.5, -2.0, 1.5, 3.0]
    turns = TurnRewards(
        row_K=np.zeros(4, np.int64), token_K=np.array(ends), reward_K=np.array(by_turn),
        parent_K=np.array([-1, 0, 0, -1]),
    )  # fmt: skip
    shard = UpdateShard(rows=refs_of(block), batches=((np.arange(1),),), turn_advantages=turns)
    algorithm = AlgorithmSection.model_validate({"loss": "policy_gradient"})
    plan = UpdatePlan(step=1, lr=0.0, algorithm=algorithm, temperature=1.0, versions=(0,), max_new_tokens=8)

    PolicyUpdate(engine, max_tokens=99).run(block, shard, plan)

    [found] = engine.recorded
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    total = torch.zeros(())
    for (tokens, _), places in zip(tree, [{2: 0, 3: 0, 5: 1, 6: 1}, {5: 2}, {1: 3, 2: 3}], strict=True):
        logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        for at, turn in places.items():
            total = total - by_turn[turn] * logprobs[at - 1, tokens[at]] / 7
    total.backward()
    by_hand = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert found.keys() == by_hand.keys()
    for name, gradient in by_hand.items():
        rows = found[name].reshape(-1, *gradient.shape[1:])[: len(gradient)]  # a vocabulary is padded
        assert torch.allclose(rows, gradient, atol=1e-6), name
    assert any(gradient.abs().max() > 1e-4 for gradient in by_hand.values())
