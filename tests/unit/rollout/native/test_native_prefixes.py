# SPDX-License-Identifier: Apache-2.0
"""What is computed once is not computed again: prompts of groups, turns of a conversation, common beginnings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from native_world import Learner, ask, prompt_of, sequence, sequences

SLOTS: dict[str, Any] = {}
PAGES: dict[str, Any] = {"block_size": 8}
WAYS = pytest.mark.parametrize("way", [SLOTS, PAGES], ids=["slots", "blocks"])


@WAYS
@pytest.mark.parametrize("max_running", [3, 64])
def test_the_prompt_of_a_group_is_computed_once(learner: Learner, way: dict[str, Any], max_running: int) -> None:
    """The first sample computes 30 tokens; the other seven feed the last of them for its logits."""
    prompt = prompt_of(30)
    engine = learner.engine(max_running=max_running, **way)
    found = sequences(engine, [ask(0, prompt, sample=sample, new=6) for sample in range(8)])
    load = engine.load()
    assert load.prefilled_tokens == 30 + 7
    assert load.reused_tokens == 7 * 29
    assert sorted(each.reused_tokens for each in found.values()) == [0] + [29] * 7
    assert len({tuple(each.tokens_L) for each in found.values()}) == 8
    assert max(learner.gap(each) for each in found.values()) < 1e-4


def test_the_samples_of_a_group_hold_the_pages_of_their_prompt_once(learner: Learner) -> None:
    """Three full pages of 8 for 30 tokens, and the last page and one to write for each of 8."""
    engine = learner.engine(**PAGES)
    prompt = prompt_of(30)
    engine.submit([ask(0, prompt, sample=sample, new=3 if sample == 0 else 30) for sample in range(8)])
    results = engine.results(deadline_s=30)
    assert next(results).id.sample == 0
    assert engine.load().running == 7
    assert engine.load().cache_tokens_used == (3 + 7) * 8
    assert len(list(results)) == 7


@WAYS
def test_a_further_turn_reuses_prompt_and_answer(learner: Learner, way: dict[str, Any]) -> None:
    """All but the last token of the answer, which was drawn and never fed."""
    engine = learner.engine(**way)
    first = sequence(engine, ask(0, 20, new=10))
    second = ask(1, np.concatenate([first.prompt, first.tokens_L, prompt_of(5)]), new=10)
    found = sequence(engine, second)
    assert found.reused_tokens == 20 + 10 - 1
    assert engine.load().prefilled_tokens == 20 + (35 - 29)
    assert found.tokens_L.tolist() == sequence(learner.engine(), second).tokens_L.tolist()
    third = ask(2, np.concatenate([found.prompt, found.tokens_L, prompt_of(3)]), new=4)
    assert sequence(engine, third).reused_tokens == 35 + 10 - 1


@pytest.mark.slow
@pytest.mark.parametrize(("way", "reused"), [(SLOTS, [49, 50, 50, 50]), (PAGES, [48, 48, 48, 49])])
def test_branches_of_one_turn_each_find_it(learner: Learner, way: dict[str, Any], reused: list[int]) -> None:
    """Four go on from one answer of 50 tokens with 6 others. The first takes over where it ended, after 49; in slots
    that is all of it, so the others wait for that one; in pages they have six full ones and do not wait for two tokens.
    """
    engine = learner.engine(**way)
    first = sequence(engine, ask(0, 40, new=10))
    shared = np.concatenate([first.prompt, first.tokens_L])
    branches = [ask(1, np.concatenate([shared, prompt_of(6, seed)]), sample=seed, new=5) for seed in range(4)]
    found = sequences(engine, branches)
    assert sorted(each.reused_tokens for each in found.values()) == reused
    assert engine.load().prefilled_tokens == 40 + sum(56 - each for each in reused)
    for each in branches:
        assert found[each.id].tokens_L.tolist() == sequence(learner.engine(), each).tokens_L.tolist()


def test_an_answer_that_was_cancelled_is_reused_too(learner: Learner) -> None:
    engine = learner.engine()
    long, short = ask(0, 20, new=100), ask(1, 3, new=5)
    engine.submit([long, short])
    results = engine.results(deadline_s=30)
    assert next(results).id == short.id
    engine.cancel([long.id])
    cut = next(results)
    assert (cut.finish, cut.num_tokens) == ("cancelled", 5)
    again = sequence(engine, ask(2, np.concatenate([cut.prompt, cut.tokens_L, prompt_of(2)])))
    assert again.reused_tokens == 24


def test_reuse_can_be_switched_off(learner: Learner) -> None:
    engine = learner.engine(reuse_prefixes=False, **PAGES)
    sequences(engine, [ask(0, prompt_of(30), sample=sample, new=2) for sample in range(4)])
    load = engine.load()
    assert (load.prefilled_tokens, load.reused_tokens, load.cache_tokens_kept) == (120, 0, 0)
