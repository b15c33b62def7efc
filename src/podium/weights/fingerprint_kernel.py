# SPDX-License-Identifier: Apache-2.0
"""The sum behind a fingerprint in one pass over memory (CUDA): the same integers as torch's arithmetic."""

from __future__ import annotations

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
