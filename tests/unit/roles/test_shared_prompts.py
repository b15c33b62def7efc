# SPDX-License-Identifier: Apache-2.0
"""The controller knows which episodes have one prompt, and keeps them in one micro-batch where that pays."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from helpers.fake_roles import FakeLearner
from podium.data.costs import SequenceCost
from podium.data.prefixes import PrefixCost, RowPrefixes
from podium.data.trajectories import TrajectoryId
from podium.roles.blocks import block_of
from podium.roles.carriers import EpisodeNote
from podium.roles.handles import LearnerHandle
from podium.rollout.requests import Completion

COST = PrefixCost(sequence=SequenceCost(per_token=1.0), per_segment=5.0)


def completion(prompt_index: int, sample: int, num_tokens: int) -> Completion:
    return Completion(
        id=TrajectoryId(prompt_index, sample),
        prompt=np.full(30, prompt_index, np.int32),
        tokens_L=np.full(num_tokens, 7, np.int32),
        logprobs_L=np.zeros(num_tokens, np.float32),
        versions_L=np.zeros(num_tokens, np.int32),
        finish="stop",
    )


def notes() -> tuple[np.ndarray, EpisodeNote]:
    block, note = block_of([completion(group, sample, 4 + sample) for group in range(4) for sample in range(4)])
    return block.lengths_N, note


def handle(prefixes: PrefixCost | None) -> LearnerHandle:
    handle = object.__new__(LearnerHandle)
    handle.facts = replace(FakeLearner.facts, prefixes=prefixes, max_tokens=90)
    handle._group = cast(Any, SimpleNamespace(mesh=SimpleNamespace(shape=SimpleNamespace(data_ranks=2))))
    return handle


def test_a_block_notes_the_prompt_of_each_episode() -> None:
    _, note = notes()
    assert note.prefixes is not None
    assert note.prefixes.tokens_N.tolist() == [30] * 16
    assert len(set(note.prefixes.key_N.tolist())) == 4


def test_prompts_stay_with_their_rows_when_notes_are_joined_and_taken() -> None:
    _, note = notes()
    assert note.prefixes is not None
    joined = EpisodeNote.in_order([note.take(np.arange(8, 16)), note.take(np.arange(8))], np.roll(np.arange(16), 8))
    assert joined.prefixes is not None
    assert joined.prefixes.key_N.tolist() == note.prefixes.key_N.tolist()
    assert EpisodeNote.concatenate([note, replace(note, prefixes=None)]).prefixes is None


def test_episodes_of_one_prompt_share_a_micro_batch_if_the_model_shares_prefixes() -> None:
    lengths_N, note = notes()
    mini_batch_N = np.repeat([0, 1], 8)
    plan = handle(COST).split(lengths_N, mini_batch_N, note.prefixes)
    places = np.stack([plan.rank_N, plan.mini_batch_N, plan.micro_step_N], axis=1)
    assert all((places[first : first + 4] == places[first]).all() for first in range(0, 16, 4))
    assert (plan.mini_batch_N == mini_batch_N).all()
    assert plan.micro_steps_B == (1, 1)
    rows = np.concatenate([part for rank in range(2) for parts in plan.rows(rank) for part in parts])
    assert sorted(rows.tolist()) == list(range(16))


def test_without_shared_prefixes_they_are_split_as_always() -> None:
    lengths_N, note = notes()
    plain = handle(None).split(lengths_N, np.zeros(16, np.int64), note.prefixes)
    unknown = handle(COST).split(lengths_N, np.zeros(16, np.int64))
    assert plain.num_micro_steps == unknown.num_micro_steps == 4
    assert (plain.rank_N == unknown.rank_N).all()


def test_an_agents_prompt_is_what_comes_before_its_first_sampled_token() -> None:
    block, _ = block_of([completion(0, 0, 5)])
    versions_T = block.versions_T.copy()
    versions_T[32:34] = -1  # an observation between two answers
    assert RowPrefixes.of(replace(block, versions_T=versions_T)).tokens_N.tolist() == [30]
