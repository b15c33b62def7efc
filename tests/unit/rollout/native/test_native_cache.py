# SPDX-License-Identifier: Apache-2.0
"""Keys and values in pages: copies and moves in all layers, whatever their shapes, and the bytes they take."""

from __future__ import annotations

import pytest
import torch

from podium.rollout.native.block_manager import BlockCopy
from podium.rollout.native.cache import KVCache, LayerShape, bytes_per_token
from podium.rollout.native.holding import hold
from podium.rollout.native.slots import Arrangement

# The second layer's keys and values differ in width, the third is like the first.
WIDE, UNEVEN = LayerShape(heads=2, key_width=4, value_width=4), LayerShape(heads=1, key_width=6, value_width=2)
SHAPES = [WIDE, UNEVEN, WIDE]


def cache_of(block_size: int, num_blocks: int = 5) -> KVCache:
    """Every element is another number."""
    nbytes = bytes_per_token(SHAPES, torch.float32) * block_size * num_blocks
    storage = torch.arange(nbytes // 4, dtype=torch.float32).view(torch.uint8)
    return KVCache(SHAPES, num_blocks=num_blocks, block_size=block_size, storage=storage, dtype=torch.float32)


def pages_of(cache: KVCache) -> list[torch.Tensor]:
    """[page, K, P, E] of all layers, keys and values."""
    return [store.clone() for layer in cache.layers for store in (layer.keys, layer.values)]


def test_a_token_takes_its_keys_and_values_in_all_layers() -> None:
    assert bytes_per_token(SHAPES, torch.float32) == 4 * (2 * 8 + 8 + 2 * 8)
    assert bytes_per_token(SHAPES, torch.bfloat16) == 2 * 40


def test_layers_share_no_element_and_fill_the_storage() -> None:
    cache = cache_of(block_size=3)
    everything = torch.cat([store.flatten() for store in pages_of(cache)])
    assert sorted(everything.tolist()) == list(range(40 * 3 * 5))
    assert [tuple(layer.keys.shape) for layer in cache.layers] == [(5, 2, 3, 4), (5, 1, 3, 6), (5, 2, 3, 4)]


@pytest.mark.parametrize("block_size", [4, 300])
def test_the_beginning_of_a_page_is_copied_in_every_layer(block_size: int) -> None:
    cache = cache_of(block_size)
    before = pages_of(cache)
    cache.copy([BlockCopy(source=1, target=4, tokens=3), BlockCopy(source=1, target=0, tokens=2)])
    for old, new in zip(before, pages_of(cache), strict=True):
        assert torch.equal(new[4, :, :3], old[1, :, :3])
        assert torch.equal(new[0, :, :2], old[1, :, :2])
        assert torch.equal(new[1:4], old[1:4])


def test_slots_change_places_as_far_as_is_worth_it() -> None:
    cache = cache_of(block_size=6)
    before = pages_of(cache)
    cache.move(Arrangement(target_of={0: 2, 2: 3, 3: 0}, tokens=4))
    for old, new in zip(before, pages_of(cache), strict=True):
        for source, target in ((0, 2), (2, 3), (3, 0), (1, 1), (4, 4)):
            assert torch.equal(new[target, :, :4], old[source, :, :4])


def test_memory_that_was_given_back_comes_again_as_zeros_at_the_same_views() -> None:
    holding = hold(64, torch.device("cpu"))
    view = holding.bytes.view(torch.float32)
    view.fill_(7)
    assert holding.release() == 64
    assert holding.bytes.untyped_storage().nbytes() == 0
    holding.restore()
    assert view.tolist() == [0.0] * 16
