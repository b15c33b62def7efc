# SPDX-License-Identifier: Apache-2.0
"""Which generator answers an episode, while devices of the learner are lent and while they are not."""

from __future__ import annotations

from collections import Counter

import pytest

from podium.roles.episode_runner import engine_of

SIZES = [(own, lent) for own in range(1, 9) for lent in range(1, 9)]


@pytest.mark.parametrize("num_own", range(1, 9))
def test_without_lent_devices_prompts_go_round(num_own: int) -> None:
    assert [engine_of(prompt, num_own, 0) for prompt in range(50)] == [prompt % num_own for prompt in range(50)]


@pytest.mark.parametrize(("num_own", "num_lent"), SIZES)
def test_every_generator_has_an_even_part(num_own: int, num_lent: int) -> None:
    num_engines = num_own + num_lent
    for first in (0, 5, 1_000):
        prompts = range(first * num_own, first * num_own + num_own * num_engines)
        counts = Counter(engine_of(prompt, num_own, num_lent) for prompt in prompts)
        assert counts == dict.fromkeys(range(num_engines), num_own)


@pytest.mark.parametrize(("num_own", "num_lent"), SIZES)
def test_few_prompts_are_spread_too(num_own: int, num_lent: int) -> None:
    num_engines = num_own + num_lent
    counts = Counter(engine_of(prompt, num_own, num_lent) for prompt in range(4 * num_engines))
    assert max(counts.values()) <= 6
    assert set(counts) == set(range(num_engines))


@pytest.mark.parametrize(("num_own", "num_lent"), SIZES)
def test_prompts_move_to_lent_devices_only(num_own: int, num_lent: int) -> None:
    for prompt in range(500):
        engine = engine_of(prompt, num_own, num_lent)
        assert engine == prompt % num_own or engine >= num_own
