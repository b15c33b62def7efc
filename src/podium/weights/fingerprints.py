# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of tensors: sums over elements, so that the parts of any sharding add up to that of the whole.

The fingerprint is the sum modulo 2^64 of bits(element) · weight(index), where the bits are those of the published
dtype read as a signed integer, the index is the element's place in the whole tensor without padding rows, and weights
are odd and pseudo-random: weight(index) = inner[index mod BLOCK] · outer(index div BLOCK). One changed element always
changes it; any other difference goes unseen with a chance of some 2^-32 (differences in the sign bits of float32
alone) to 2^-64. It guards against mistakes and broken transfers, not against somebody who wants to deceive it.
"""

# B elements of one block

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from podium.data.splitmix import GAMMA, mix_tensor, signed
from podium.models.tensor_shards import Box

# The inner weights of one block stay in the cache of a CPU core; a kernel on a GPU reads them through its own.
BLOCK = 1 << 17
# Number of elements that are cast to the published dtype at a time, which bounds the scratch memory.
_CHUNK = 1 << 23
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_OUTER_SALT = 0x51ED_270B_9A5F_1C3D


def fingerprint(tensor: Tensor) -> int:
    """Fingerprint of a whole tensor, as it is."""
    return unsigned(partial_fingerprint(tensor, first=0, dtype=tensor.dtype).reshape(1))[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """Consecutive elements of a tensor without its padding rows, and the index of the first one in the whole tensor."""

    values: Tensor
    first: int
    dtype: torch.dtype  # that is published

    @classmethod
    def of_rows(cls, local: Tensor, box: Box, shape: Sequence[int], dtype: torch.dtype) -> Piece:
        """This rank's rows of a tensor of `shape`, the shape without padding rows."""
        assert Box(box.starts[1:], box.stops[1:]) == Box.whole(shape[1:]), "only rows are sharded"
        if not shape:
            return cls(values=local, first=0, dtype=dtype)
        rows = max(0, min(box.stops[0], shape[0]) - box.starts[0])
        return cls(values=local[:rows], first=box.starts[0] * math.prod(shape[1:]), dtype=dtype)


def piece_fingerprint(local: Tensor, box: Box, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The contribution of this rank's rows to the fingerprint of a tensor of `shape`, the shape without padding rows:
    rows after it do not count. An int64 scalar on the tensor's device; those of all ranks are added with
    wrap-around."""
    piece = Piece.of_rows(local, box, shape, dtype)
    return partial_fingerprint(piece.values, first=piece.first, dtype=dtype)


def piece_fingerprints(pieces: Sequence[Piece | None], device: torch.device) -> Tensor:
    """The contributions [P] of many pieces; None is no piece, and counts as 0. On CUDA one kernel reads all that need
    no cast: to launch one for each tensor of a model takes longer than reading its weights."""
    totals_P = torch.zeros(len(pieces), dtype=torch.int64, device=device)
    together: dict[int, list[int]] = {}
    for index, piece in enumerate(pieces):
        if piece is None or not piece.values.numel():
            continue
        if _fits_one_launch(piece):
            together.setdefault(piece.values.element_size(), []).append(index)
        else:
            totals_P[index] = partial_fingerprint(piece.values, first=piece.first, dtype=piece.dtype)
    for element_size, indices in together.items():
        chosen = [piece for index in indices if (piece := pieces[index]) is not None]
        totals_P[torch.as_tensor(indices, device=device)] = _one_launch(chosen, element_size, device)
    return totals_P


def partial_fingerprint(values: Tensor, *, first: int, dtype: torch.dtype) -> Tensor:
    """Fingerprint of consecutive elements of the whole tensor, starting at index `first`."""
    flat = values.detach().reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    add_up = _one_pass if flat.is_cuda and find_spec("triton") is not None else _block_by_block
    # Without a cast there is no scratch to bound, and one kernel reads all of it.
    chunk = max(1, flat.numel()) if add_up is _one_pass and flat.dtype == dtype else _CHUNK
    for start in range(0, flat.numel(), chunk):
        total += add_up(bits_of(flat[start : start + chunk].to(dtype)), first + start)
    return total


def unsigned(totals: Tensor) -> list[int]:
    """int64 sums as the unsigned numbers of a version, from 0 to 2^64 - 1. Waits for the device."""
    return [value & 0xFFFF_FFFF_FFFF_FFFF for value in totals.tolist()]


def bits_of(values: Tensor) -> Tensor:
    """The same memory as signed integers: -0.0 and every NaN are bits like any other."""
    return values.view(_INTEGERS[values.element_size()])


def _block_by_block(bits: Tensor, first: int) -> Tensor:
    inner_B, outer = inner_weights(bits.device), outer_weights(first, len(bits), bits.device).tolist()
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    at = 0
    for weight in outer:
        begin = (first + at) % BLOCK
        part = bits[at : at + BLOCK - begin]
        total += (part * inner_B[begin : begin + len(part)]).sum() * weight
        at += len(part)
    return total


def _one_pass(bits: Tensor, first: int) -> Tensor:
    from podium.weights.fingerprint_kernel import weighted_sum

    outer = outer_weights(first, len(bits), bits.device)
    return weighted_sum(bits, first, inner_weights(bits.device), outer)


def _fits_one_launch(piece: Piece) -> bool:
    values = piece.values
    is_plain = values.dtype == piece.dtype and values.is_contiguous() and values.element_size() in (2, 4)
    return values.is_cuda and is_plain and find_spec("triton") is not None


def _one_launch(pieces: Sequence[Piece], element_size: int, device: torch.device) -> Tensor:
    from podium.weights.fingerprint_kernel import Stretch, weighted_sums

    stretches = [
        Stretch(address=piece.values.data_ptr(), numel=piece.values.numel(), first=piece.first) for piece in pieces
    ]
    outers = [outer_weights(each.first, each.numel, device) for each in stretches]
    return weighted_sums(stretches, element_size, inner_weights(device), outers)


@functools.cache
def inner_weights(device: torch.device) -> Tensor:
    """The weight of each position within a block, cached per device."""
    return _odd_weights(torch.arange(BLOCK, dtype=torch.int64, device=device))


@functools.lru_cache(maxsize=4096)
def outer_weights(first: int, count: int, device: torch.device) -> Tensor:
    """One weight for each block that the elements from index `first` on touch. Cached: a dozen small kernels for each
    tensor of a model would take longer than reading its weights."""
    blocks = torch.arange(first // BLOCK, (first + count - 1) // BLOCK + 1, dtype=torch.int64, device=device)
    return _odd_weights(blocks + _OUTER_SALT)


def _odd_weights(numbers: Tensor) -> Tensor:
    """Pseudo-random odd weights of consecutive numbers, the same on every device."""
    return mix_tensor((numbers + 1) * signed(GAMMA)) | 1
