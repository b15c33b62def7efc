# SPDX-License-Identifier: Apache-2.0
"""Fills and verifies a model of which each rank of a tensor axis has a part, from whole published tensors."""

from __future__ import annotations

from collections.abc import Generator, Mapping

import torch
from torch import Tensor

from podium.models.tensor_shards import Box
from podium.models.tensor_split import TensorSplit
from podium.weights.fingerprints import piece_fingerprint
from podium.weights.receiving import compare_sums, require_tensor
from podium.weights.transports import Delivery
from podium.weights.versions import WeightVersion


@torch.no_grad()
def fill_parts(tensors: Mapping[str, Tensor], split: TensorSplit, delivery: Delivery) -> None:
    """Takes this rank's part of each whole tensor. Values change, addresses do not. Padding rows become zero."""
    arriving = delivery.tensors()
    try:
        for name, whole in arriving:
            part = tensors[name]
            mine = split.box(name, Box.whole(part.shape), part.shape)
            real = mine.overlap(Box.whole(whole.shape))
            if real != mine:
                part.zero_()
            if not real.is_empty:
                part[real.slices(mine.starts)].copy_(whole[real.slices()])
    finally:
        if isinstance(arriving, Generator):
            arriving.close()  # now: other ranks may wait for this end


@torch.no_grad()
def verify_divided(tensors: Mapping[str, Tensor], split: TensorSplit, version: WeightVersion) -> None:
    """Like `verify_in_place`, for parts: their fingerprints are added up over the ranks, so all ranks find the same.
    Collective over the tensor axis."""
    sums = []
    for spec in version.manifest:
        part = tensors.get(spec.name)
        shape = None if part is None else split.shape(spec.name, part.shape)
        part = require_tensor(part, shape, spec, version)
        sums.append(_partial(part, spec.name, spec.shape, split))
    if sums:
        compare_sums(version, split.axis.sum(torch.stack(sums)))


def _partial(part: Tensor, name: str, shape: tuple[int, ...], split: TensorSplit) -> Tensor:
    """This rank's contribution to a fingerprint. Whole rows count: columns are gathered first."""
    division = split.divisions.get(name)
    axis, dim = split.axis, None if division is None else division.dim
    box = split.box(name, Box.whole(part.shape), part.shape)
    if dim is not None and dim > 0:
        part = axis.gather(part, dim)
        box = Box.whole(part.shape)
    if (dim is None or dim > 0) and axis.rank > 0:  # rank 0 counts it
        return torch.zeros((), dtype=torch.int64, device=part.device)
    return piece_fingerprint(part, box, shape, part.dtype)
