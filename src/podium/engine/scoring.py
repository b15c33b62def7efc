# SPDX-License-Identifier: Apache-2.0
"""Log-probs and values of given tokens: packed forward passes without gradient, within a budget of tokens."""

# T tokens of all trajectories · S sampled tokens of one micro-batch

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.data.documents import Document, PackedBatch, PackedExamples, pack
from podium.data.prefix_splitting import share_in_micro_batches
from podium.data.prefixes import PrefixCost, RowPrefixes
from podium.data.splitting import split_step
from podium.data.trajectories import Ints, TokenColumn, TrajectoryBlock
from podium.engine.mesh import Mesh
from podium.models.causal_lm import PackedCausalLM
from podium.models.packing import TokenBatch, round_tokens, rows_to_device, to_device
from podium.models.prefix_sharing import prefix_cost
from podium.models.scalar import PackedScalarLM
from podium.models.training_mode import TrainedModule
from podium.progress import mark_progress


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoringBatch:
    """A packed micro-batch, and the positions of its sampled tokens in the block, in the order of the forward's
    results."""

    packed: PackedBatch
    places_S: Ints


def scoring_batches(
    block: TrajectoryBlock, *, max_tokens: int, replays: bool = False, prefixes: PrefixCost | None = None
) -> list[ScoringBatch]:
    """The trajectories with sampled tokens in as few micro-batches as possible. Tokens after a trajectory's last
    sampled token are left out; a trajectory longer than the budget gets its own micro-batch. `replays`: routers choose
    the experts that the block has recorded. `prefixes`: trajectories with one prompt share a micro-batch where that
    pays."""
    documents, begins = _documents(block, replays=replays)
    if not documents:
        return []
    lengths = [document.num_inputs for document in documents]
    plan = split_step(lengths, num_ranks=1, max_tokens=max(max_tokens, *lengths))
    if prefixes is not None:
        begin_with = RowPrefixes.of_documents(documents)
        plan = share_in_micro_batches(plan, prefixes.sequence.of(lengths), begin_with, prefixes)
    batches = []
    for rows in plan.micro_batches[0]:
        # Neighbours of equal length share one attention call.
        ordered = sorted(rows, key=lambda row: (lengths[row], row))
        places = [begins[row] + np.flatnonzero(documents[row].trained) for row in ordered]
        batches.append(ScoringBatch(packed=pack([documents[row] for row in ordered]), places_S=np.concatenate(places)))
    return batches


def score(
    model: PackedCausalLM,
    mesh: Mesh,
    block: TrajectoryBlock,
    *,
    temperature: float = 1.0,
    max_tokens: int = 16384,
    replays: bool = False,
) -> TokenColumn:
    """log softmax(logits / temperature) of every sampled token under the model's weights, 0 elsewhere. Temperature 0
    counts as 1, as in engines. Collective: ranks without (or with fewer) trajectories run empty passes. `replays`: for
    the model that sampled; routers choose the experts that the block has recorded."""

    def forward(tokens: TokenBatch) -> torch.Tensor:
        logprobs_S: torch.Tensor = model(tokens, None, "logprobs", temperature or 1.0)
        return logprobs_S

    return _seen(model, mesh, block, max_tokens, forward, replays=replays)


def values(model: PackedScalarLM, mesh: Mesh, block: TrajectoryBlock, *, max_tokens: int = 16384) -> TokenColumn:
    """The value of the state that each token was sampled in, 0 elsewhere. Collective, like `score`."""
    return _seen(model, mesh, block, max_tokens, lambda tokens: model(tokens, None, "values"))


@torch.no_grad()
def summed_logprobs(model: PackedCausalLM, mesh: Mesh, batch: PackedExamples) -> Tensor:
    """Log-probs summed over the trained tokens of each document [D], in packed order. Collective."""
    was_training = model.training
    model.eval()
    try:
        tokens = to_device(
            batch.packed, mesh.device, multiple=round_tokens(mesh.device), prefixes=prefix_cost(model, mesh.device)
        )
        logprobs_S: Tensor = model(tokens, None, "logprobs")
    finally:
        model.train(was_training)
    return rows_to_device(batch, mesh.device).summed(logprobs_S)


@torch.no_grad()
def _seen(
    model: TrainedModule,
    mesh: Mesh,
    block: TrajectoryBlock,
    max_tokens: int,
    forward: Callable[[TokenBatch], torch.Tensor],
    *,
    replays: bool = False,
) -> TokenColumn:
    prefixes = prefix_cost(model, mesh.device)
    batches = scoring_batches(block, max_tokens=max_tokens, replays=replays, prefixes=prefixes)
    most = max(mesh.gather(len(batches)))
    empty = ScoringBatch(packed=pack([]), places_S=np.empty(0, np.int64))
    values_T = np.zeros(len(block.tokens_T), np.float32)
    multiple, was_training = round_tokens(mesh.device), model.training
    model.eval()
    try:
        filled = _filled(batches, most, empty)
        pending = []
        for each in filled:
            pending.append(forward(to_device(each.packed, mesh.device, multiple=multiple, prefixes=prefixes)))
            mark_progress()
    finally:
        model.train(was_training)
    for batch, values_S in zip(batches, pending, strict=False):
        values_T[batch.places_S] = values_S.cpu().numpy()
        mark_progress()
    return TokenColumn.like(block, _agreed(values_T, mesh))


def _agreed(values_T: NDArray[np.float32], mesh: Mesh) -> NDArray[np.float32]:
    """The values of the first rank of a tensor group, on all of its ranks. Values decide which tokens are trained, and
    a last bit that differs must not part them. Ranks of a context group have gathered the same ones."""
    if mesh.tensor is None or not len(values_T):
        return values_T
    mine = torch.from_numpy(values_T).to(mesh.device)
    if mesh.tensor.rank > 0:
        mine = torch.zeros_like(mine)
    first: NDArray[np.float32] = mesh.tensor.sum(mine).cpu().numpy()
    return first


def _filled(batches: Sequence[ScoringBatch], count: int, empty: ScoringBatch) -> list[ScoringBatch]:
    return [*batches, *[empty] * (count - len(batches))]


def sampled_mask(block: TrajectoryBlock) -> NDArray[np.bool_]:
    """Mask of sampled tokens."""
    mask: NDArray[np.bool_] = block.versions_T >= 0
    return mask


def _documents(block: TrajectoryBlock, *, replays: bool) -> tuple[list[Document], list[int]]:
    """Each sequence up to its last sampled token, and its start in the block."""
    sampled_T, experts_TLK = sampled_mask(block), block.experts_TLK if replays else None
    documents, begins = [], []
    for begin, end in (sequence for row in range(len(block.ids)) for sequence in block.sequences(row)):
        trained = sampled_T[begin:end].copy()
        trained[:1] = False  # nothing stands before the first token to predict it from
        last = int(np.flatnonzero(trained)[-1]) + 1 if trained.any() else 0
        if last:
            documents.append(
                Document(
                    tokens=block.tokens_T[begin : begin + last],
                    trained=trained[:last],
                    experts=None if experts_TLK is None else experts_TLK[begin : begin + last],
                )
            )
            begins.append(begin)
    return documents, begins
