# SPDX-License-Identifier: Apache-2.0
"""The sums behind fingerprints in one pass over memory (CUDA): the same integers as torch's arithmetic."""

# P pieces · C chunks of pieces, one for each program of a kernel

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

_STEP = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _sum(bits, inner, outer, sums, begin, numel, BLOCK: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * STEP + tl.arange(0, STEP)
    live = at < numel
    place = begin + at  # counted from the beginning of the first block
    value = tl.load(bits + at, mask=live, other=0).to(tl.int64)
    weight = tl.load(inner + place % BLOCK, mask=live, other=0) * tl.load(outer + place // BLOCK, mask=live, other=0)
    tl.store(sums + tl.program_id(0), tl.sum(value * weight, axis=0))


def weighted_sum(bits: Tensor, first: int, inner: Tensor, outer: Tensor) -> Tensor:
    """Σ bits · inner[index mod block] · outer[index div block], modulo 2^64."""
    programs = triton.cdiv(len(bits), _STEP)
    sums = torch.empty(programs, dtype=torch.int64, device=bits.device)
    _sum[(programs,)](bits, inner, outer, sums, first % len(inner), len(bits), BLOCK=len(inner), STEP=_STEP)
    return sums.sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Where the elements of a piece are, their number, and the index of the first one in the whole tensor."""

    address: int
    numel: int
    first: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Chunks:
    """What the programs of one launch need to know, on the device."""

    addresses_P: Tensor
    numels_P: Tensor
    begins_P: Tensor  # of the first element, within its block
    outer_starts_P: Tensor  # of the piece, among all outer weights
    pieces_C: Tensor
    starts_C: Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _sums(  # type: ignore[no-untyped-def]
    addresses, numels, begins, outer_starts, pieces, starts, inner, outer, sums,
    IS_WIDE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    piece = tl.load(pieces + tl.program_id(0))
    at = tl.load(starts + tl.program_id(0)) + tl.arange(0, STEP)
    live = at < tl.load(numels + piece)
    if IS_WIDE:
        value = tl.load(tl.load(addresses + piece).to(tl.pointer_type(tl.int32)) + at, mask=live, other=0)
    else:
        value = tl.load(tl.load(addresses + piece).to(tl.pointer_type(tl.int16)) + at, mask=live, other=0)
    place = tl.load(begins + piece) + at
    outer_at = tl.load(outer_starts + piece) + place // BLOCK
    weight = tl.load(inner + place % BLOCK, mask=live, other=0) * tl.load(outer + outer_at, mask=live, other=0)
    tl.store(sums + tl.program_id(0), tl.sum(value.to(tl.int64) * weight, axis=0))


def weighted_sums(stretches: Sequence[Stretch], element_size: int, inner: Tensor, outers: Sequence[Tensor]) -> Tensor:
    """`weighted_sum` of many pieces with elements of 2 or 4 bytes, in one launch. `outers`: for each piece."""
    assert element_size in (2, 4)
    chunks = _chunks(tuple(stretches), tuple(len(outer) for outer in outers), len(inner), inner.device)
    sums_C = torch.empty(len(chunks.pieces_C), dtype=torch.int64, device=inner.device)
    _sums[(len(sums_C),)](
        chunks.addresses_P, chunks.numels_P, chunks.begins_P, chunks.outer_starts_P, chunks.pieces_C, chunks.starts_C,
        inner, torch.cat(list(outers)), sums_C, IS_WIDE=element_size == 4, BLOCK=len(inner), STEP=_STEP,
    )  # fmt: skip
    totals_P = torch.zeros(len(stretches), dtype=torch.int64, device=inner.device)
    return totals_P.index_add_(0, chunks.pieces_C, sums_C)


@functools.lru_cache(maxsize=8)
def _chunks(stretches: tuple[Stretch, ...], num_outer: tuple[int, ...], block: int, device: torch.device) -> _Chunks:
    """Cached: the weights of a model stay where they are from one version to the next."""
    counts = [-(-each.numel // _STEP) for each in stretches]
    pieces = np.repeat(np.arange(len(stretches), dtype=np.int64), counts)
    starts = np.concatenate([np.arange(count, dtype=np.int64) * _STEP for count in counts])

    def moved(values: object) -> Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64), device=device)

    return _Chunks(
        addresses_P=moved([each.address for each in stretches]),
        numels_P=moved([each.numel for each in stretches]),
        begins_P=moved([each.first % block for each in stretches]),
        outer_starts_P=moved(np.cumsum([0, *num_outer[:-1]])),
        pieces_C=moved(pieces),
        starts_C=moved(starts),
    )
