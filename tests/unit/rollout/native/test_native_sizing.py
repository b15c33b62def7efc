# SPDX-License-Identifier: Apache-2.0
"""How many pages, rows and tokens the native engine takes, from the recipe and the memory there is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from podium.errors import RolloutError
from podium.recipe import RolloutSection
from podium.rollout.native.sizing import GIB, Sizes, choose_sizes, padded_keys

KIB = 1 << 10


def sizes(section: RolloutSection | None = None, **changes: Any) -> Sizes:
    """A model of 1024 tokens' context and 1 KiB a token on a machine with 64 GiB free."""
    about = {"context": 1024, "token_bytes": KIB, "cuda": False, "free_bytes": 64 * GIB}
    return choose_sizes(section or RolloutSection(), **{**about, **changes})


def test_on_cpu_a_page_is_a_slot_and_there_are_as_many_again_to_remember() -> None:
    """64 answers of 1 MiB each, twice: 128 MiB of the 2 GiB there may be."""
    found = sizes()
    assert found == Sizes(
        max_length=1024, max_running=64, prefill_tokens=1024, block_size=1024, num_blocks=128, slots=True
    )
    assert found.cache_tokens == 128 * 1024


def test_on_cuda_pages_have_64_tokens_and_take_80_percent_of_what_is_free() -> None:
    """0.8 · 10 GiB of pages of 64 KiB are 131,072; 256 answers of 16 pages each, twice, are 8,192."""
    found = sizes(cuda=True, free_bytes=10 * GIB)
    assert (found.block_size, found.slots, found.max_running, found.prefill_tokens) == (64, False, 256, 8192)
    assert found.num_blocks == 8192
    assert sizes(cuda=True, free_bytes=GIB // 4).num_blocks == int(0.8 * (GIB // 4)) // (64 * KIB) - 1


def test_the_recipe_rules() -> None:
    section = RolloutSection(memory_gib=1, max_length=100, max_running=3, prefill_tokens=17, block_size=8)
    assert sizes(section) == Sizes(
        max_length=100, max_running=3, prefill_tokens=17, block_size=8, num_blocks=2 * 13 * 3, slots=False
    )


def test_slots_that_are_few_become_pages() -> None:
    """16 MiB hold two slots of 8 MiB: not enough to run side by side, so 64 pages of 256 tokens it is, one of them the
    engine's own."""
    found = sizes(RolloutSection(memory_gib=16 / 1024), context=8192)
    assert (found.block_size, found.num_blocks, found.slots) == (256, 64 - 1, False)
    requested = sizes(RolloutSection(memory_gib=16 / 1024, block_size=8192), context=8192)
    assert (requested.block_size, requested.num_blocks, requested.max_running, requested.slots) == (8192, 2, 2, True)


def test_no_more_run_than_there_are_slots() -> None:
    found = sizes(RolloutSection(memory_gib=20 / 1024, max_running=50))
    assert (found.slots, found.num_blocks, found.max_running) == (True, 20, 20)


def test_a_slot_is_a_sequence_in_whole_vectors_of_keys() -> None:
    found = sizes(RolloutSection(max_length=40, block_size=64))
    assert (found.block_size, found.slots) == (48, True)


@pytest.mark.parametrize(("requested", "taken"), [(1, 16), (16, 16), (48, 64), (96, 128), (256, 256)])
def test_on_cuda_a_page_is_a_power_of_two(requested: int, taken: int) -> None:
    assert sizes(RolloutSection(block_size=requested), cuda=True).block_size == taken


def test_nothing_is_longer_than_the_context() -> None:
    assert sizes(RolloutSection(max_length=5000)).max_length == 1024


def test_without_a_budget_a_cpu_machine_keeps_half_of_what_is_free() -> None:
    found = sizes(free_bytes=40 * 1024 * KIB)
    assert (found.slots, found.num_blocks, found.max_running) == (True, 20, 20)


def test_a_budget_beyond_what_is_free_is_refused() -> None:
    with pytest.raises(RolloutError, match=r"rollout\.memory_gib: 3 GiB .*\b2\.00 GiB"):
        sizes(RolloutSection(memory_gib=3), free_bytes=2 * GIB)


def test_a_budget_without_room_for_a_page_is_refused() -> None:
    with pytest.raises(RolloutError, match=r"rollout\.memory_gib: .*\b1024 tokens .*\b1024 bytes"):
        sizes(RolloutSection(memory_gib=0.5 / 1024, block_size=1024))


@given(
    context=st.integers(1, 5000),
    token_bytes=st.sampled_from([1, 100, 4096, 200_000]),
    free_mib=st.integers(0, 8000),
    cuda=st.booleans(),
    max_length=st.none() | st.integers(1, 6000),
    max_running=st.none() | st.integers(1, 300),
    block_size=st.none() | st.integers(1, 6000),
)
def test_whatever_is_requested_the_cache_fits_and_something_can_run(
    context: int, token_bytes: int, free_mib: int, cuda: bool, **requested: int | None
) -> None:
    free = free_mib << 20
    try:
        found = sizes(RolloutSection(**requested), context=context, token_bytes=token_bytes, cuda=cuda, free_bytes=free)
    except RolloutError as error:
        assume("single page" in str(error))
        return
    own = 0 if found.slots else found.block_size
    assert found.cache_tokens >= 1
    assert (found.cache_tokens + own) * token_bytes <= free
    assert 1 <= found.max_running <= (requested["max_running"] or 256)
    assert found.max_length == min(requested["max_length"] or context, context)
    assert not found.slots or found.block_size == padded_keys(found.max_length)
    assert not found.slots or found.max_running <= found.num_blocks
