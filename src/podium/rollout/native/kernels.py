# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for decoding on CUDA: attention over blocks, and sampling. Imported only if Triton is available.

Attention is split along the sequence into parts of a fixed length. A long sequence thus does not delay the others, and
the order of additions within one sequence does not depend on its batch (up to 8192 tokens of the longest; beyond that,
parts grow with it)."""

# B lanes (sequences of this step) · H query heads · K key-value heads · G = H / K · E head width · V vocabulary

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_PART_TOKENS = 256
_MOST_PARTS = 32
_BLOCK = 64
_STRETCH = 2048


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, key, value, keys, values, table, rows, lengths, mixes, sums, tops,
    scale, softcap, window, table_width, part_tokens,
    query_head, query_token, key_head, key_token, value_head, value_token,
    K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, EK: tl.constexpr, EKP: tl.constexpr, EV: tl.constexpr,
    EVP: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    lane, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + lane)
    row = tl.load(rows + lane)
    last = length - 1
    low = tl.maximum(length - window, 0)
    begin = tl.maximum(part * part_tokens, low)
    end = tl.minimum((part + 1) * part_tokens, last)
    owns_last = last // part_tokens == part
    if (begin >= end) & (not owns_last):
        return
    group, wide, deep = tl.arange(0, GP), tl.arange(0, EKP), tl.arange(0, EVP)
    q = tl.load(
        query + (head * G + group)[:, None] * query_head + lane * query_token + wide[None, :],
        mask=(group[:, None] < G) & (wide[None, :] < EK), other=0.0,
    )  # fmt: skip
    top = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    mix = tl.zeros([GP, EVP], tl.float32)
    if owns_last:
        # This step's own key and value: read from the forward, and stored for later steps.
        page = tl.load(table + row * table_width + last // PAGE).to(tl.int64)
        place = (page * K + head) * PAGE + last % PAGE
        k_new = tl.load(key + head * key_head + lane * key_token + wide, mask=wide < EK, other=0.0)
        v_new = tl.load(value + head * value_head + lane * value_token + deep, mask=deep < EV, other=0.0)
        tl.store(keys + place * EK + wide, k_new, mask=wide < EK)
        tl.store(values + place * EV + deep, v_new, mask=deep < EV)
        score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], axis=1) * scale
        if CAPPED:
            score = softcap * (2.0 / (1.0 + tl.exp(-2.0 * score / softcap)) - 1.0)
        top = score
        total = tl.full([GP], 1.0, tl.float32)
        mix += v_new.to(tl.float32)[None, :]
    for start in range(begin // BLOCK * BLOCK, end, BLOCK):
        page = tl.load(table + row * table_width + start // PAGE).to(tl.int64)
        at = tl.arange(0, BLOCK)
        place = (page * K + head) * PAGE + start % PAGE + at
        seen = (start + at >= begin) & (start + at < end)
        k = tl.load(keys + place[:, None] * EK + wide[None, :], mask=seen[:, None] & (wide[None, :] < EK), other=0.0)
        score = tl.dot(q, tl.trans(k)) * scale
        if CAPPED:
            score = softcap * (2.0 / (1.0 + tl.exp(-2.0 * score / softcap)) - 1.0)
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        shrink = tl.exp(top - higher)
        weight = tl.exp(score - higher[:, None])
        v = tl.load(values + place[:, None] * EV + deep[None, :], mask=seen[:, None] & (deep[None, :] < EV), other=0.0)
        total = total * shrink + tl.sum(weight, axis=1)
        mix = mix * shrink[:, None] + tl.dot(weight.to(v.dtype), v)
        top = higher
    slot = (lane * K * G + head * G + group) * PARTS + part
    tl.store(mixes + slot[:, None] * EV + deep[None, :], mix, mask=(group[:, None] < G) & (deep[None, :] < EV))
    tl.store(sums + slot, total, mask=group < G)
    tl.store(tops + slot, top, mask=group < G)


@triton.jit  # type: ignore[untyped-decorator]
def _join_parts(  # type: ignore[no-untyped-def]
    mixes, sums, tops, lengths, sinks, out, window, part_tokens,
    H: tl.constexpr, EV: tl.constexpr, EVP: tl.constexpr, PARTS: tl.constexpr, SUNK: tl.constexpr,
):  # fmt: skip
    lane, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + lane)
    low = tl.maximum(length - window, 0)
    part, deep = tl.arange(0, PARTS), tl.arange(0, EVP)
    used = (part * part_tokens < length) & ((part + 1) * part_tokens > low)
    slot = (lane * H + head) * PARTS + part
    top = tl.load(tops + slot, mask=used, other=float("-inf"))
    total = tl.load(sums + slot, mask=used, other=0.0)
    mix = tl.load(mixes + slot[:, None] * EV + deep[None, :], mask=used[:, None] & (deep[None, :] < EV), other=0.0)
    highest = tl.max(top, axis=0)
    shrink = tl.where(used, tl.exp(top - highest), 0.0)
    whole = tl.sum(total * shrink, axis=0)
    if SUNK:
        whole += tl.exp(tl.load(sinks + head).to(tl.float32) - highest)
    result = tl.sum(mix * shrink[:, None], axis=0) / whole
    tl.store(out + (lane * H + head) * EV + deep, result.to(out.dtype.element_ty), mask=deep < EV)


def cut_for(longest: int, device: torch.device) -> Tensor:
    """How sequences of at most `longest` tokens are split into parts. The numbers are returned as the shape of an empty
    tensor, because plain numbers would be compiled into the layers. Powers of two, so that few graphs serve all
    lengths."""
    parts = max(2, triton.next_power_of_2(triton.cdiv(longest, _PART_TOKENS)))
    return torch.empty(min(parts, _MOST_PARTS), max(1, parts // _MOST_PARTS) + 1, device=device)


@torch.library.custom_op("podium::paged_decode", mutates_args=())
def paged_decode(
    query: Tensor,  # [1, H, B, E]
    key: Tensor,  # [1, K, B, E]
    value: Tensor,
    keys: Tensor,  # [blocks, K, P, E]: the new key is stored there
    values: Tensor,
    table: Tensor,  # int32 [rows, blocks of a sequence]
    rows: Tensor,  # int64 [B]
    lengths: Tensor,  # int32 [B], this step's token included
    cut: Tensor,  # from `cut_for`
    sinks: Tensor | None,
    scale: float,
    softcap: float,  # 0: none
    window: int,  # 0: none
) -> Tensor:
    """[1, B, H, E]. Writes to `keys` and `values`, which is not declared: nothing else of a layer reads them, and a
    declared mutation would make the compiler copy the whole cache."""
    lanes, heads = query.shape[2], query.shape[1]
    _, shared, page, width = keys.shape
    depth = values.shape[-1]
    count, part_tokens = cut.shape[0], (cut.shape[1] - 1) * _PART_TOKENS
    window = window or (1 << 30)
    out = query.new_empty(1, lanes, heads, depth)
    mixes = query.new_empty(lanes * heads * count * depth, dtype=torch.float32)
    stats = query.new_empty(2, lanes * heads * count, dtype=torch.float32)
    grouped = heads // shared
    # A matrix product of the hardware is at least 16 wide.
    common: dict[str, Any] = {"EV": depth, "EVP": max(16, triton.next_power_of_2(depth))}
    _attend[(lanes, shared, count)](
        query, key, value, keys, values, table, rows, lengths, mixes, stats[0], stats[1],
        scale, softcap, window, table.shape[1], part_tokens,
        query.stride(1), query.stride(2), key.stride(1), key.stride(2), value.stride(1), value.stride(2),
        K=shared, G=grouped, GP=max(16, triton.next_power_of_2(grouped)), EK=width,
        EKP=max(16, triton.next_power_of_2(width)), PAGE=page, BLOCK=min(_BLOCK, page), PARTS=count, CAPPED=softcap > 0,
        num_warps=4, num_stages=3, **common,
    )  # fmt: skip
    _join_parts[(lanes, heads)](
        mixes, stats[0], stats[1], lengths, sinks, out, window, part_tokens,
        H=heads, PARTS=count, SUNK=sinks is not None, num_warps=2, **common,
    )  # fmt: skip
    return out


@paged_decode.register_fake
def _(query, key, value, keys, values, *_):  # type: ignore[no-untyped-def]
    return query.new_empty(1, query.shape[2], query.shape[1], values.shape[-1])


@triton.jit  # type: ignore[untyped-decorator]
def _shaped(logits, spot, mask, scale, softcap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.load(logits + spot, mask=mask, other=float("-inf")).to(tl.float32) * scale
    if CAPPED:
        x = tl.where(mask, softcap * (2.0 / (1.0 + tl.exp(-2.0 * x / softcap)) - 1.0), float("-inf"))
    return x


@triton.jit  # type: ignore[untyped-decorator]
def _summarise(  # type: ignore[no-untyped-def]
    logits, temperatures, tops, sums, bests, scale, softcap, vocabulary, stride,
    STRETCHES: tl.constexpr, STRETCH: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    lane, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + lane)
    temperature = tl.where(temperature == 0.0, 1.0, temperature)
    spot = stretch * STRETCH + tl.arange(0, STRETCH)
    x = _shaped(logits, lane * stride + spot, spot < vocabulary, scale, softcap, CAPPED) / temperature
    top = tl.max(x, axis=0)
    at = lane * STRETCHES + stretch
    tl.store(tops + at, top)
    tl.store(sums + at, tl.sum(tl.where(top == float("-inf"), 0.0, tl.exp(x - top)), axis=0))
    tl.store(bests + at, stretch * STRETCH + tl.argmax(x, axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _pick(  # type: ignore[no-untyped-def]
    logits, temperatures, uniforms, tops, sums, bests, tokens, logprobs, scale, softcap, vocabulary, stride,
    STRETCHES: tl.constexpr, STRETCHES2: tl.constexpr, STRETCH: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + lane)
    greedy = temperature == 0.0
    temperature = tl.where(greedy, 1.0, temperature)
    which = tl.arange(0, STRETCHES2)
    at = lane * STRETCHES + which
    top = tl.load(tops + at, mask=which < STRETCHES, other=float("-inf"))
    total = tl.load(sums + at, mask=which < STRETCHES, other=0.0)
    highest = tl.max(top, axis=0)
    weight = tl.where(which < STRETCHES, total * tl.exp(top - highest), 0.0)
    whole = tl.sum(weight, axis=0)
    running = tl.cumsum(weight, axis=0)
    # Never the exact end of the sum: rounding must not lead past the last token with any weight.
    mark = tl.minimum(tl.load(uniforms + lane).to(tl.float32), 0.9999999) * whole
    stretch = tl.minimum(tl.sum((running <= mark).to(tl.int32), axis=0), STRETCHES - 1)
    before = tl.sum(tl.where(which < stretch, weight, 0.0), axis=0)
    spot = stretch * STRETCH + tl.arange(0, STRETCH)
    x = _shaped(logits, lane * stride + spot, spot < vocabulary, scale, softcap, CAPPED) / temperature
    inside = tl.exp(x - highest)
    sums_in = before + tl.cumsum(inside, axis=0)
    index = tl.sum((sums_in <= mark).to(tl.int32), axis=0)
    heaviest = tl.max(tl.where(inside > 0, tl.arange(0, STRETCH), -1), axis=0)
    token = stretch * STRETCH + tl.maximum(tl.minimum(index, heaviest), 0)
    best_stretch = tl.argmax(top, axis=0)
    best = tl.sum(tl.where(which == best_stretch, tl.load(bests + at, mask=which < STRETCHES, other=0), 0), axis=0)
    token = tl.where(greedy, best, token)
    chosen = _shaped(logits, lane * stride + token, token < vocabulary, scale, softcap, CAPPED) / temperature
    tl.store(tokens + lane, token.to(tl.int64))
    tl.store(logprobs + lane, chosen - highest - tl.log(whole))


def sample_on_device(
    logits_BV: Tensor,
    temperatures_B: Tensor,
    uniforms_B: Tensor,
    *,
    vocab_size: int,
    scale: float,
    softcap: float | None,
    tokens_B: Tensor,
    logprobs_B: Tensor,
) -> None:
    """Does the same as sampling.sample for rows without logits processing, in two passes over padded float32 logits."""
    lanes = logits_BV.shape[0]
    stretches = triton.cdiv(vocab_size, _STRETCH)
    tops, sums = (logits_BV.new_empty(lanes * stretches, dtype=torch.float32) for _ in range(2))
    bests = logits_BV.new_empty(lanes * stretches, dtype=torch.int32)
    fixed: dict[str, Any] = {"STRETCHES": stretches, "STRETCH": _STRETCH, "CAPPED": softcap is not None}
    shape = (scale, softcap or 0.0, vocab_size, logits_BV.stride(0))
    _summarise[(lanes, stretches)](logits_BV, temperatures_B, tops, sums, bests, *shape, num_warps=4, **fixed)
    _pick[(lanes,)](
        logits_BV, temperatures_B, uniforms_B, tops, sums, bests, tokens_B, logprobs_B, *shape,
        STRETCHES2=triton.next_power_of_2(stretches), num_warps=8, **fixed,
    )  # fmt: skip
