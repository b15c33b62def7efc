# SPDX-License-Identifier: Apache-2.0
"""Greedy answers for evaluation, through the training forward: packed, sharded, any verified architecture.

Every new token is one packed forward over all unfinished sequences. This is fast enough for a few held-out prompts with
short answers; it is not a rollout engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from podium.data.documents import Tokens
from podium.engine.mesh import Mesh
from podium.models.causal_lm import PackedCausalLM
from podium.models.packing import Packing, TokenBatch, runs_of
from podium.progress import mark_progress


@torch.no_grad()
def greedy_answers(
    model: PackedCausalLM,
    mesh: Mesh,
    prompts: Sequence[Tokens],
    *,
    max_new_tokens: int,
    stop_tokens: frozenset[int],
    max_batch_tokens: int,
) -> list[Tokens]:
    """The most likely continuation of each prompt, in order, on every rank. The prompts are split over ranks, and all
    ranks run the same number of forwards."""
    model.eval()
    parts = [list(range(rank, len(prompts), mesh.data_ranks)) for rank in range(mesh.data_ranks)]
    batches = [list(_batches(part, prompts, max_new_tokens, max_batch_tokens)) for part in parts]
    answers: dict[int, Tokens] = {}
    for turn in range(max(len(each) for each in batches)):
        own = batches[mesh.data_rank]
        mine = own[turn] if turn < len(own) else []
        batch_answers = _answer_batch(model, mesh, [prompts[i] for i in mine], max_new_tokens, stop_tokens)
        answers.update(zip(mine, batch_answers, strict=True))
    model.train()
    merged = {index: answer for part in mesh.gather(answers) for index, answer in part.items()}
    return [merged[index] for index in range(len(prompts))]


def _batches(part: list[int], prompts: Sequence[Tokens], room: int, limit: int) -> Iterator[list[int]]:
    batch: list[int] = []
    size = 0
    for index in sorted(part, key=lambda i: (len(prompts[i]), i)):
        length = len(prompts[index]) + room
        if batch and size + length > limit:
            yield batch
            batch, size = [], 0
        batch.append(index)
        size += length
    if batch:
        yield batch


def _answer_batch(
    model: PackedCausalLM, mesh: Mesh, prompts: list[Tokens], max_new_tokens: int, stop_tokens: frozenset[int]
) -> list[Tokens]:
    sequences = [list(map(int, prompt)) for prompt in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    open_rows = list(range(len(prompts)))
    for _ in range(max_new_tokens):
        # A finished rank still joins the others' forwards, with a single token.
        batch = _last_positions([sequences[row] for row in open_rows] or [[0]], mesh.device)
        chosen = model(batch, None, kind="scores").argmax(dim=-1).tolist()
        mark_progress()
        still = []
        for row, token in zip(open_rows, chosen, strict=False):
            if token in stop_tokens:
                continue
            sequences[row].append(token)
            answers[row].append(token)
            still.append(row)
        open_rows = still
        if not _anyone(mesh, bool(open_rows)):
            break
    return [np.array(answer, np.int32) for answer in answers]


def _last_positions(sequences: list[list[int]], device: torch.device) -> TokenBatch:
    lengths = np.array([len(sequence) for sequence in sequences])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = np.concatenate([np.arange(length) for length in lengths])
    trained = offsets[1:].astype(np.int64) - 1
    last = torch.from_numpy(trained).to(device)
    return TokenBatch(
        tokens_T=torch.tensor([token for sequence in sequences for token in sequence], device=device),
        positions_T=torch.from_numpy(positions.astype(np.int64)).to(device),
        trained_S=last,
        targets_S=torch.zeros_like(last),
        weights_S=torch.zeros(len(last), device=device),
        trained=trained,
        offsets=offsets,
        packing=Packing(
            boundaries=torch.from_numpy(offsets).to(device),
            longest=int(lengths.max()),
            runs=() if device.type == "cuda" else runs_of(offsets),
        ),
    )


def _anyone(mesh: Mesh, mine: bool) -> bool:
    if not mesh.is_sharded:
        return mine
    return bool(mesh.sum(torch.tensor([float(mine)], device=mesh.device)).item())
