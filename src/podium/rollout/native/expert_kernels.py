# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for the experts of a mixture while decoding on CUDA. Imported only if Triton is available.

A decode step has few tokens and touches nearly all experts, so it takes the time of reading their weights. Each block
of rows belongs to one expert and every program reads one stripe of its weights. Nothing depends on the host: grids are
as large as any routing needs, and programs without rows end at once, so that the kernels live in CUDA graphs."""

# T tokens · K experts of a token · S = T · K pairs · E experts · H hidden width · I width of an expert
# M rows of a block · N columns and D depth of a tile

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_SMALLEST_BLOCK = 16  # rows: a matrix product of the hardware is at least that high
_LARGEST_BLOCK = 64
_COUNTED = 8192  # comparisons at a time while counting
_JOINED = 1024


@dataclass(frozen=True, slots=True)
class Tile:
    """How the programs of a product divide its weights. `transposed`: the weights are the left side, which the matrix
    units of Hopper read from shared memory."""

    columns: int
    depth: int
    num_warps: int
    num_stages: int
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Tiles:
    """Of both products. A tile of the first has its columns twice: gate and up."""

    first: Tile
    second: Tile


TILES = {
    "wide": Tiles(Tile(64, 128, 4, 3), Tile(128, 128, 4, 3)),
    "narrow": Tiles(Tile(32, 128, 4, 4), Tile(64, 128, 4, 4)),
    "deep": Tiles(Tile(64, 64, 4, 5), Tile(128, 64, 4, 5)),
    "transposed": Tiles(Tile(64, 128, 4, 3, transposed=True), Tile(128, 128, 4, 3, transposed=True)),
}
DEFAULT_TILES = TILES["transposed"]  # by 1% the fastest at 64 tokens on an H200: little depends on it


@triton.jit  # type: ignore[untyped-decorator]
def _arrange(  # type: ignore[no-untyped-def]
    experts, pair_of_row, expert_of_block,
    S, num_blocks, E: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, CHUNK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program per expert: which blocks are its own, and which pairs are their rows, in order. Rows that are left
    over have pair S, blocks that are left over expert -1."""
    mine = tl.program_id(0)
    expert, at, block = tl.arange(0, EP), tl.arange(0, CHUNK), tl.arange(0, BLOCKS)
    count = tl.zeros([EP], tl.int32)
    for start in range(0, S, CHUNK):
        found = tl.load(experts + start + at, mask=start + at < S, other=E).to(tl.int32)
        count += tl.sum((found[None, :] == expert[:, None]).to(tl.int32), axis=1)
    blocks = tl.where(expert < E, (count + M - 1) // M, 0)
    first = tl.sum(tl.where(expert < mine, blocks, 0), axis=0)
    own = tl.sum(tl.where(expert == mine, blocks, 0), axis=0)
    tl.store(expert_of_block + block, mine, mask=(block >= first) & (block < first + own))
    if mine == 0:
        tl.store(expert_of_block + block, -1, mask=(block >= tl.sum(blocks, axis=0)) & (block < num_blocks))
    taken = 0
    for start in range(0, S, CHUNK):
        found = tl.load(experts + start + at, mask=start + at < S, other=E).to(tl.int32)
        is_mine = (found == mine).to(tl.int32)
        row = first * M + taken + tl.cumsum(is_mine, axis=0) - 1
        tl.store(pair_of_row + row, start + at, mask=is_mine == 1)
        taken += tl.sum(is_mine, axis=0)
    left = tl.arange(0, M)
    row = first * M + taken + left
    tl.store(pair_of_row + row, tl.zeros([M], tl.int32) + S, mask=taken + left < own * M)


@triton.jit  # type: ignore[untyped-decorator]
def _product(x, w, TRANSPOSED: tl.constexpr):  # type: ignore[no-untyped-def]
    """[rows, depth] and [columns, depth] to [rows, columns], or to [columns, rows]."""
    if TRANSPOSED:
        out = tl.dot(w, tl.trans(x))
    else:
        out = tl.dot(x, tl.trans(w))
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _gate_up(  # type: ignore[no-untyped-def]
    hidden, weights, pair_of_row, expert_of_block, acts, S,
    K: tl.constexpr, H: tl.constexpr, I: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """silu(x · gate) · (x · up) of one block of rows and N columns of its expert. Products are rounded to the dtype of
    the weights, as a grouped matrix product does."""
    block, column = tl.program_id(0), tl.program_id(1) * N + tl.arange(0, N)
    expert = tl.load(expert_of_block + block).to(tl.int64)
    if expert < 0:
        return
    row = block * M + tl.arange(0, M)
    pair = tl.load(pair_of_row + row)
    token = (pair // K).to(tl.int64)
    is_pair, is_column, deep = pair < S, column < I, tl.arange(0, D)
    gate_rows = weights + (expert * 2 * I + column)[:, None] * H
    if TRANSPOSED:
        gate, up = tl.zeros([N, M], tl.float32), tl.zeros([N, M], tl.float32)
    else:
        gate, up = tl.zeros([M, N], tl.float32), tl.zeros([M, N], tl.float32)
    for start in range(0, H, D):
        at = start + deep
        x = tl.load(hidden + token[:, None] * H + at[None, :], mask=is_pair[:, None] & (at[None, :] < H), other=0.0)
        inside = is_column[:, None] & (at[None, :] < H)
        g = tl.load(gate_rows + at[None, :], mask=inside, other=0.0)
        u = tl.load(gate_rows + I * H + at[None, :], mask=inside, other=0.0)
        gate += _product(x, g, TRANSPOSED)
        up += _product(x, u, TRANSPOSED)
    if TRANSPOSED:
        gate, up = tl.trans(gate), tl.trans(up)
    dtype = acts.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    act = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(acts + row[:, None].to(tl.int64) * I + column[None, :], act.to(dtype), mask=is_column[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _down(  # type: ignore[no-untyped-def]
    acts, weights, pair_of_row, expert_of_block, outs, S,
    H: tl.constexpr, I: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """The outputs of pairs, in the order of the tokens."""
    block, column = tl.program_id(0), tl.program_id(1) * N + tl.arange(0, N)
    expert = tl.load(expert_of_block + block).to(tl.int64)
    if expert < 0:
        return
    row = block * M + tl.arange(0, M)
    pair = tl.load(pair_of_row + row)
    is_pair, is_column, deep = pair < S, column < H, tl.arange(0, D)
    act_rows = acts + row[:, None].to(tl.int64) * I
    weight_rows = weights + (expert * H + column)[:, None] * I
    if TRANSPOSED:
        out = tl.zeros([N, M], tl.float32)
    else:
        out = tl.zeros([M, N], tl.float32)
    for start in range(0, I, D):
        at = start + deep
        x = tl.load(act_rows + at[None, :], mask=is_pair[:, None] & (at[None, :] < I), other=0.0)
        w = tl.load(weight_rows + at[None, :], mask=is_column[:, None] & (at[None, :] < I), other=0.0)
        out += _product(x, w, TRANSPOSED)
    if TRANSPOSED:
        out = tl.trans(out)
    spot = outs + pair[:, None].to(tl.int64) * H + column[None, :]
    tl.store(spot, out.to(outs.dtype.element_ty), mask=is_pair[:, None] & is_column[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _join(outs, gates, joined, K: tl.constexpr, H: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weighted sum over the experts of a token, in float32."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros([N], tl.float32)
    for k in range(K):
        out = tl.load(outs + (token * K + k) * H + column, mask=column < H, other=0.0).to(tl.float32)
        total += out * tl.load(gates + token * K + k).to(tl.float32)
    tl.store(joined + token * H + column, total.to(joined.dtype.element_ty), mask=column < H)


def experts_with(tiles: Tiles, hidden: Tensor, experts: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """What fused_experts.plain_experts computes, with these tiles."""
    (num_experts, width, depth), (tokens, per_token) = down.shape, experts.shape
    hidden, experts, gates = hidden.contiguous(), experts.contiguous(), gates.contiguous()
    assert gate_up.is_contiguous()
    assert down.is_contiguous()
    assert gate_up.shape == (num_experts, 2 * depth, width)
    pairs, rows = tokens * per_token, _rows_of_block(tokens * per_token, num_experts)
    # Each expert leaves at most one block partly empty, and no block is quite empty.
    blocks = min(pairs, pairs // rows + num_experts)
    pair_of_row = experts.new_empty(blocks * rows, dtype=torch.int32)
    expert_of_block = experts.new_empty(blocks, dtype=torch.int32)
    acts, outs = hidden.new_empty(blocks * rows, depth), hidden.new_empty(pairs, width)
    joined = torch.empty_like(hidden)
    padded = triton.next_power_of_2(num_experts)
    _arrange[(num_experts,)](
        experts, pair_of_row, expert_of_block, pairs, blocks,
        E=num_experts, EP=padded, M=rows, CHUNK=max(16, min(_COUNTED // padded, triton.next_power_of_2(pairs))),
        BLOCKS=triton.next_power_of_2(blocks), num_warps=4,
    )  # fmt: skip
    tile = tiles.first
    _gate_up[(blocks, triton.cdiv(depth, tile.columns))](
        hidden, gate_up, pair_of_row, expert_of_block, acts, pairs,
        K=per_token, H=width, I=depth, M=rows, N=tile.columns, D=tile.depth, TRANSPOSED=tile.transposed,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    tile = tiles.second
    _down[(blocks, triton.cdiv(width, tile.columns))](
        acts, down, pair_of_row, expert_of_block, outs, pairs,
        H=width, I=depth, M=rows, N=tile.columns, D=tile.depth, TRANSPOSED=tile.transposed,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    _join[(tokens, triton.cdiv(width, _JOINED))](outs, gates, joined, K=per_token, H=width, N=_JOINED, num_warps=4)
    return joined


def _rows_of_block(pairs: int, num_experts: int) -> int:
    """About as many as an expert gets: more would be computed in vain, fewer would read its weights again."""
    mean = -(-pairs // num_experts)
    return min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, 1 << (mean - 1).bit_length()))
