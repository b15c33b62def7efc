# SPDX-License-Identifier: Apache-2.0
"""Writes keys and values of all lanes of a step into the KV cache: for steps in which lanes are successive tokens of
one sequence and read each other's."""

# B lanes · K key-value heads · P positions of a block · E head width

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("podium::write_lanes", mutates_args=())
def write_lanes(
    key: Tensor,  # [1, K, B, E]
    value: Tensor,
    keys: Tensor,  # [blocks, K, P, E]
    values: Tensor,
    table: Tensor,
    rows: Tensor,
    lengths: Tensor,
) -> Tensor:
    """Writes the key and value of every lane into the cache, before any lane attends. Returns nothing of use; the
    writing is not declared, for the reason that `paged_decode` gives."""
    last, page = lengths.long() - 1, keys.shape[2]
    block, offset = table[rows, last // page].long(), last % page
    keys[block, :, offset] = key[0].transpose(0, 1)
    values[block, :, offset] = value[0].transpose(0, 1)
    return lengths.clone()


@write_lanes.register_fake
def _(key, value, keys, values, table, rows, lengths):  # type: ignore[no-untyped-def]
    return torch.empty_like(lengths)
