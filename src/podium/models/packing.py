# SPDX-License-Identifier: Apache-2.0
"""A micro-batch as tensors on a device: packed tokens, the boundaries of the documents in it, and its rows."""

# T packed tokens · S trained tokens · D documents · R rows

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from podium.data.documents import PackedBatch, PackedExamples
from podium.data.prefixes import PrefixCost, PrefixTree
from podium.data.routed_experts import unrecorded
from podium.models.routing import Routing

if TYPE_CHECKING:
    from podium.models.context_parallel import ContextPart


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """Neighbouring documents of one length: they share one attention call, without padding."""

    num_documents: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SegmentRun(Run):
    """Neighbouring segments of one length behind one parent. A segment that others continue is a run of its own."""

    parent: int  # position of the run that they continue; -1: they begin their documents
    before: int  # tokens of their documents before them
    offset: int  # of their first token
    end: int  # where the tokens that continue them end


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segments:
    """Documents of a micro-batch whose shared prefixes are computed once: each segment sees those that it continues."""

    runs: tuple[SegmentRun, ...]  # depth first
    longest: int  # tokens of the longest document

    def continued(self) -> Iterator[tuple[slice, slice]]:
        """The tokens of each segment that others continue, and those of all that do."""
        for run in self.runs:
            stop = run.offset + run.length
            if run.num_documents == 1 and run.end > stop:
                yield slice(run.offset, stop), slice(stop, run.end)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    """Document boundaries; passed to the attention of every layer as a keyword argument."""

    boundaries: Tensor  # int32 [D + 1] on the device
    longest: int
    runs: tuple[Run, ...]  # for kernels that go document by document; empty where a variable-length kernel is used
    windows: list[int | None] | None = None  # if given, every attention call records its sliding window
    routing: Routing | None = None  # for the routers of a mixture of experts
    context: ContextPart | None = None  # if given, the forward has a part of the tokens that have these boundaries
    segments: Segments | None = None  # if given, documents share prefixes, and the boundaries are those of segments


class AttentionStep(Protocol):
    """An alternative to Packing: attention that reads more than the tokens of this forward."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """[1, H, T, E] and twice [1, K, T, E] -> [1, T, H, E]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenBatch:
    """One micro-batch on the device. Only trained positions reach the head. Where documents share prefixes, a token may
    be trained more than once: with what follows it in each document."""

    tokens_T: Tensor
    positions_T: Tensor
    trained_S: Tensor  # indices into T of the positions whose target is trained
    targets_S: Tensor
    weights_S: Tensor
    trained: NDArray[np.int64]  # trained_S on the host
    offsets: NDArray[np.int32]  # the boundaries of documents on the host
    packing: Packing


def runs_of(offsets: np.ndarray) -> tuple[Run, ...]:
    """Neighbours of equal length form one run each; documents sorted by length thus need the fewest calls."""
    lengths = np.diff(offsets)
    starts = np.flatnonzero(np.concatenate([[True], lengths[1:] != lengths[:-1]]))
    ends = np.concatenate([starts[1:], [len(lengths)]])
    return tuple(
        Run(num_documents=int(end - first), length=int(lengths[first])) for first, end in zip(starts, ends, strict=True)
    )


def segments_of(tree: PrefixTree) -> Segments:
    """The runs of a tree's segments."""
    runs: list[SegmentRun] = []
    run_of: dict[int, int] = {-1: -1}  # of each segment that others continue
    lengths, inner = tree.lengths_G.tolist(), set(tree.inner.tolist())
    columns = zip(
        tree.parents_G.tolist(), tree.starts_G.tolist(), tree.offsets_G.tolist(), tree.ends_G.tolist(), strict=False
    )
    for segment, (parent, before, offset, end) in enumerate(columns):
        length, last = lengths[segment], runs[-1] if runs else None
        joins = last is not None and (last.parent, last.length) == (run_of[parent], length)
        if joins and segment not in inner and segment - 1 not in inner:
            assert last is not None
            runs[-1] = replace(last, num_documents=last.num_documents + 1, end=end)
            continue
        if segment in inner:
            run_of[segment] = len(runs)
        runs.append(
            SegmentRun(num_documents=1, length=length, parent=run_of[parent], before=before, offset=offset, end=end)
        )
    return Segments(runs=tuple(runs), longest=int((tree.starts_G + tree.lengths_G).max()))


def round_tokens(device: torch.device) -> int:
    """Token counts are padded to a multiple of this: matrix kernels on CUDA are faster with round sizes."""
    return 64 if device.type == "cuda" else 1


def to_device(
    batch: PackedBatch, device: torch.device, *, multiple: int = 1, prefixes: PrefixCost | None = None
) -> TokenBatch:
    """Copies a packed batch to the device, padded to a multiple of `multiple` tokens with a separate document that
    trains nothing (matrix kernels prefer round shapes; on CPU there is no padding). `prefixes`: documents share their
    prefixes if that pays; the trained tokens, their targets and weights are the same ones in the same order."""
    tree = None if prefixes is None else prefixes.share(batch.tokens_T, batch.offsets)
    if tree is not None:
        return _shared(batch, tree, device)
    tokens, positions, offsets = batch.tokens_T, batch.positions_T, batch.offsets
    padding = -len(tokens) % multiple
    if padding:
        tokens = np.concatenate([tokens, np.zeros(padding, np.int32)])
        positions = np.concatenate([positions, np.arange(padding, dtype=np.int32)])
        offsets = np.concatenate([offsets, np.array([len(tokens)], np.int32)])
    routing, experts = None, batch.experts_TLK
    if experts is not None:
        experts = np.concatenate([experts, unrecorded(padding, experts)]) if padding else experts
        routing = Routing(replayed_TLK=on_device(experts, device))
    trained = np.flatnonzero(batch.weights_T)
    on_cuda = device.type == "cuda"
    return TokenBatch(
        tokens_T=on_device(tokens.astype(np.int64), device),
        positions_T=on_device(positions.astype(np.int64), device),
        trained_S=on_device(trained, device),
        targets_S=on_device(batch.targets_T[trained].astype(np.int64), device),
        weights_S=on_device(batch.weights_T[trained], device),
        trained=trained,
        offsets=offsets,
        packing=Packing(
            boundaries=on_device(offsets, device),
            longest=int(np.diff(offsets).max()),
            runs=() if on_cuda else runs_of(offsets),
            routing=routing,
        ),
    )


def _shared(batch: PackedBatch, tree: PrefixTree, device: torch.device) -> TokenBatch:
    """The tokens of the tree instead of those of the documents."""
    assert batch.experts_TLK is None, "documents of mixtures do not share prefixes"
    trained = np.flatnonzero(batch.weights_T)
    places = tree.place_T[trained]
    offsets = tree.offsets_G.astype(np.int32)
    return TokenBatch(
        tokens_T=on_device(batch.tokens_T[tree.first_U].astype(np.int64), device),
        positions_T=on_device(batch.positions_T[tree.first_U].astype(np.int64), device),
        trained_S=on_device(places, device),
        targets_S=on_device(batch.targets_T[trained].astype(np.int64), device),
        weights_S=on_device(batch.weights_T[trained], device),
        trained=places,
        offsets=offsets,
        packing=Packing(
            boundaries=on_device(offsets, device),
            longest=int(tree.lengths_G.max()),
            runs=(),
            segments=segments_of(tree),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowTensors:
    """Which tokens and documents of a packed micro-batch belong to which row, on the device."""

    document_S: Tensor  # of each trained token
    places: tuple[Tensor, ...]  # [R] each: the rows' first documents, their second ones
    first_R: Tensor  # the first trained token of each row's first document
    counts_D: Tensor  # trained tokens of each document
    values_R: Tensor
    sources_R: Tensor

    def of_documents(self, values_D: Tensor) -> tuple[Tensor, ...]:
        """Numbers of documents by place in the row: chosen and rejected, or the only one."""
        return tuple(values_D[place] for place in self.places)

    def summed(self, values_S: Tensor) -> Tensor:
        """Sums over the trained tokens of each document [D]."""
        return values_S.new_zeros(len(self.counts_D)).index_add(0, self.document_S, values_S)

    def spread(self, loss_R: Tensor, values_S: Tensor) -> Tensor:
        """Turns a loss of rows into one of tokens: each is placed at its row's first trained token, the others are
        zero."""
        return torch.zeros_like(values_S).index_add(0, self.first_R, loss_R.to(values_S.dtype))


def rows_to_device(batch: PackedExamples, device: torch.device) -> RowTensors:
    """Called before the forward pass: a copy in its middle would make the host wait for the device."""
    return RowTensors(
        document_S=on_device(batch.document_S, device),
        places=tuple(on_device(column, device) for column in batch.places.T),
        first_R=on_device(np.searchsorted(batch.document_S, batch.places[:, 0]), device),
        counts_D=on_device(np.array([document.num_trained for document in batch.documents], np.int64), device),
        values_R=on_device(batch.values_R, device),
        sources_R=on_device(batch.sources_R, device),
    )


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copies an array without waiting for the device."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
