# SPDX-License-Identifier: Apache-2.0
"""Packed attention, hooked into any transformers model through its own attention interface.

Documents never attend to each other. The document boundaries arrive with every call as the keyword argument
`packing`; there is no global state.
"""

# T packed tokens · H query heads · K key-value heads · E head width · L document length · D documents

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from podium.errors import UnsupportedModelError
from podium.models.attention_blocks import LEAST_ROWS, SCORE_ELEMENTS
from podium.models.attention_spec import AttentionSpec, distances
from podium.models.context_parallel import divides_heads, gather_tokens, own_heads, to_own_heads, to_own_tokens
from podium.models.packing import AttentionStep, Packing, Run, Segments, runs_of
from podium.models.prefix_attention import merged_attention, merges_parts
from podium.models.ring_attention import ring_attention

PACKED_ATTENTION = "podium_packed"

# Attention without a variable-length kernel goes by blocks of queries where it would hold more than this.
_MASK_ELEMENTS = 1 << 26  # of a window's mask

# torch 2.11 always allows grouped heads in varlen_attn; later releases need an argument.
_GROUPED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


def register_packed_attention() -> None:
    """Registers `set_attn_implementation("podium_packed")` with transformers."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def packed_attention(
    module: nn.Module,
    query: Tensor,  # [1, H, T, E]
    key: Tensor,  # [1, K, T, E]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | AttentionStep | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature -> [1, T, H, E]."""
    if packing is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} did not pass Podium's `packing` argument on to its attention, so documents in "
            "one pack would see each other. This architecture is not supported."
        )
    if getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(f"{type(module).__name__} attends in both directions; Podium trains causal models.")
    if not isinstance(packing, Packing):
        out = packing.attend(
            module, query, key, value, scaling=scaling, window=sliding_window, softcap=softcap, sinks=s_aux
        )
        return out, None
    if packing.windows is not None:
        packing.windows.append(sliding_window)
    spec = AttentionSpec(scaling=scaling, dropout=dropout, window=sliding_window, softcap=softcap, sinks=s_aux)
    attend = _attend if packing.context is None else _over_context
    return attend(query, key, value, packing, spec), None


def _attend(query: Tensor, key: Tensor, value: Tensor, packing: Packing, spec: AttentionSpec) -> Tensor:
    """[1, H, T, E] and twice [1, K, T, E] -> [1, T, H, E]."""
    if packing.segments is not None:
        by_segment: Tensor = _by_segment(query, key, value, packing.segments, spec)
        return by_segment
    if _has_kernel(query, spec):
        q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
        bounds, longest = packing.boundaries, packing.longest
        out = varlen_attention(q, k, v, (bounds, bounds), (longest, longest), scaling=spec.scaling, window=spec.window)
        return out.unsqueeze(0)
    by_document: Tensor = _by_document(query, key, value, packing, spec)
    return by_document


def _has_kernel(query: Tensor, spec: AttentionSpec) -> bool:
    is_plain = spec.softcap is None and spec.sinks is None and spec.dropout == 0.0
    return query.is_cuda and query.dtype != torch.float32 and is_plain


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _over_context(query: Tensor, key: Tensor, value: Tensor, packing: Packing, spec: AttentionSpec) -> Tensor:
    """Attention of the tokens of one rank of a context axis, which have keys on all of them."""
    part, num_heads = packing.context, query.shape[1]
    assert part is not None
    if divides_heads(num_heads, part.axis):
        if spec.sinks is not None:
            spec = replace(spec, sinks=spec.sinks[own_heads(num_heads, part.axis)])
        return to_own_tokens(_attend(*to_own_heads(query, key, value, part), packing, spec), part)
    if spec.dropout:  # what a rank drops it must drop again in backward: the keys are gathered, and torch knows
        begin, origin, outs = part.start, 0, []
        key, value = gather_tokens(key, value, part)
    else:
        first = part.num_spanned
        spanned = ring_attention(query[0, :, :first], key[0], value[0], part, spec)
        begin = origin = part.start + first
        outs = [spanned.transpose(0, 1)]
        query, key, value = query[:, :, first:], key[:, :, first:], value[:, :, first:]
    if begin < part.start + part.num_own:
        outs += _documents_from(query, key, value, packing, spec, begin, origin)
    # Empty sums tie a rank without queries to the backward pass, in which all ranks take part.
    ties = query[..., :0].sum() + key[..., :0].sum() + value[..., :0].sum()
    padding = value.new_zeros(part.each - part.num_own, query.shape[1], value.shape[-1]) + ties
    return torch.cat([*outs, padding]).unsqueeze(0)


def _documents_from(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, spec: AttentionSpec, begin: int, origin: int
) -> list[Tensor]:
    """Attention of a rank's own tokens from `begin` on, whose keys begin at the token `origin` -> [tokens, H, E] each.
    Documents with such tokens have all of their keys."""
    part = packing.context
    assert part is not None
    end = part.start + part.num_own
    if _has_kernel(query, spec):
        # Documents that end before these queries have none, and those after them neither queries nor keys.
        bounds = (packing.boundaries.clamp(begin, end) - begin, packing.boundaries.clamp(origin, end) - origin)
        longest = (min(packing.longest, end - begin), min(packing.longest, end - origin))
        seen = (query[:, :, : end - begin], key[:, :, : end - origin], value[:, :, : end - origin])
        q, k, v = (each[0].transpose(0, 1) for each in seen)
        return [varlen_attention(q, k, v, bounds, longest, scaling=spec.scaling, window=spec.window)]
    outs = []
    for start, first, last in _pieces(packing, begin, end):
        q = query[:, :, first - begin : last - begin]
        k, v = (each[:, :, start - origin : last - origin] for each in (key, value))
        if first == start:
            out = _of_documents(q, k, v, spec)
        else:
            visible = _visible(slice(first - start, last - start), slice(0, last - start), spec, q.device)
            out = plain_attention(
                q, k, v, visible, scaling=spec.scaling, dropout=spec.dropout, softcap=spec.softcap, sinks=spec.sinks
            )
        outs.append(out[0].transpose(0, 1))
    return outs


def _pieces(packing: Packing, begin: int, end: int) -> list[tuple[int, int, int]]:
    """Of each document with tokens between `begin` and `end`: its start, and the first and the end of these tokens."""
    runs = packing.runs or runs_of(packing.boundaries.cpu().numpy())
    lengths = [run.length for run in runs for _ in range(run.num_documents)]
    bounds = ((stop - length, stop) for length, stop in zip(lengths, accumulate(lengths), strict=True))
    pieces = ((start, max(start, begin), min(stop, end)) for start, stop in bounds)
    return [(start, first, last) for start, first, last in pieces if first < last]


def varlen_attention(
    query: Tensor,  # [queries, H, E]
    key: Tensor,  # [keys, K, E]
    value: Tensor,
    bounds: tuple[Tensor, Tensor],  # of queries and of keys
    longest: tuple[int, int],
    *,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Causal attention within each document on CUDA; the last query of a document sees its last key."""
    out: Any = varlen_attn(
        query,
        key,
        value,
        *bounds,
        *longest,
        scale=scaling,
        # transformers counts the query itself as part of its window, the kernel counts only tokens to the left of it.
        window_size=(-1 if window is None else window - 1, 0),
        **_GROUPED_HEADS,
    )
    return out  # type: ignore[no-any-return]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_document(query: Tensor, key: Tensor, value: Tensor, packing: Packing, spec: AttentionSpec) -> Tensor:
    """One call for each run of equally long documents: the fastest way on CPU, and correct on any device."""
    runs = packing.runs
    if not runs:  # on CUDA, without a kernel for this case: the boundaries are on the device only
        runs = runs_of(packing.boundaries.cpu().numpy())
    # Split, not sliced: the backward of a split is one concatenation, that of a slice a whole tensor of zeros each.
    sizes = [run.num_documents * run.length for run in runs]
    parts = zip(*(tensor[0].split(sizes, dim=1) for tensor in (query, key, value)), strict=True)
    outs = []
    for run, part in zip(runs, parts, strict=True):
        q, k, v = (_documents(tensor, run) for tensor in part)
        out = _of_documents(q, k, v, spec)
        outs.append(out.transpose(1, 2).reshape(run.num_documents * run.length, *out.shape[1:2], out.shape[-1]))
    return (outs[0] if len(outs) == 1 else torch.cat(outs)).unsqueeze(0)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_segment(query: Tensor, key: Tensor, value: Tensor, segments: Segments, spec: AttentionSpec) -> Tensor:
    """Documents that share prefixes. Where parts of attention cannot be merged, each segment attends to copies of the
    keys that it continues, with its own behind them."""
    if merges_parts(query, value, segments, spec):
        return merged_attention(query, key, value, segments, spec)
    runs = segments.runs
    sizes = [run.num_documents * run.length for run in runs]
    parts = zip(*(tensor[0].split(sizes, dim=1) for tensor in (query, key, value)), strict=True)
    paths: dict[int, list[Tensor]] = {}  # of each run that others continue: its keys and values, with those before them
    outs = []
    for number, (run, part) in enumerate(zip(runs, parts, strict=True)):
        q, *own = (_documents(tensor, run) for tensor in part)
        if run.parent >= 0:
            before = (each.expand(run.num_documents, -1, -1, -1) for each in paths[run.parent])
            own = [torch.cat(pair, dim=2) for pair in zip(before, own, strict=True)]
        if run.end > run.offset + run.num_documents * run.length:
            paths[number] = own
        k, v = own
        out = _of_documents(q, k, v, spec)
        outs.append(out.transpose(1, 2).reshape(run.num_documents * run.length, *out.shape[1:2], out.shape[-1]))
    return torch.cat(outs).unsqueeze(0)


def _documents(part: Tensor, run: Run) -> Tensor:
    """[H, tokens of the run, E] -> [D, H, L, E], as a view."""
    return part.view(part.shape[0], run.num_documents, run.length, part.shape[2]).transpose(0, 1)


def _of_documents(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Documents of one length, or the last tokens of them: [D, H, L, E] and twice [D, K, L', E] -> [D, H, L, E]. The
    last query stands at the last key."""
    return (_with_kernel if spec.softcap is None and spec.sinks is None else _written_out)(q, k, v, spec)


def _with_kernel(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """torch's own attention. Only a window, or keys before the first query, need a mask, which for long documents is
    one of a block of queries."""
    length, grouped, window = k.shape[2], q.shape[1] != k.shape[1], spec.window
    before = length - q.shape[2]
    if before == 0 and (window is None or length <= window):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=spec.dropout, scale=spec.scaling, enable_gqa=grouped
        )
    blocks = list(_blocks(length, window, _MASK_ELEMENTS // length, before))
    # Blocks share their masks, in the form that is kept for the backward pass: most see their keys in the same way.
    masks: dict[tuple[int, int], Tensor] = {}
    outs = []
    for queries, keys in blocks:
        shape = (queries.stop - queries.start, keys.stop - keys.start)
        if shape not in masks:
            visible = _visible(queries, keys, spec, q.device)
            masks[shape] = visible if len(blocks) == 1 else _added(visible, q.dtype)
        outs.append(
            F.scaled_dot_product_attention(
                q[:, :, queries.start - before : queries.stop - before], k[:, :, keys], v[:, :, keys],
                attn_mask=masks[shape], dropout_p=spec.dropout, scale=spec.scaling, enable_gqa=grouped,
            )
        )  # fmt: skip
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _added(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask that is added to scores."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


def _written_out(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """`plain_attention`. Scores of long documents exist for a block of queries at a time, in backward again."""
    (num_documents, num_heads), length, device = q.shape[:2], k.shape[2], q.device
    before = length - q.shape[2]

    def block(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        return plain_attention(
            q, k, v, visible, scaling=spec.scaling, dropout=spec.dropout, softcap=spec.softcap, sinks=spec.sinks
        )

    rows = SCORE_ELEMENTS // max(1, num_documents * num_heads * length)
    blocks = list(_blocks(length, spec.window, rows, before))
    if len(blocks) == 1:
        [(queries, keys)] = blocks
        k, v = (each if keys.start == 0 else each[:, :, keys] for each in (k, v))
        return block(q, k, v, _visible(queries, keys, spec, device))
    outs = []
    for queries, keys in blocks:
        own = slice(queries.start - before, queries.stop - before)
        parts = q[:, :, own], k[:, :, keys], v[:, :, keys], _visible(queries, keys, spec, device)
        outs.append(checkpoint(block, *parts, use_reentrant=False) if torch.is_grad_enabled() else block(*parts))
    return torch.cat(outs, dim=2)


def _blocks(length: int, window: int | None, rows: int, before: int = 0) -> Iterator[tuple[slice, slice]]:
    """Blocks of so many queries, each with the keys that they see. The first query has `before` keys before it."""
    rows = max(rows, LEAST_ROWS)
    if rows >= length - before:
        yield slice(before, length), slice(0 if window is None else max(0, before - window + 1), length)
        return
    for start in range(before, length, rows):
        stop = min(start + rows, length)
        yield slice(start, stop), slice(0 if window is None else max(0, start - window + 1), stop)


def _visible(queries: slice, keys: slice, spec: AttentionSpec, device: torch.device) -> Tensor:
    """[queries, keys]: which keys each query sees."""
    return spec.visible(distances(queries, keys, device))


def plain_attention(
    q: Tensor,  # [D, H, queries, E]
    k: Tensor,  # [D, K, keys, E]
    v: Tensor,
    visible: Tensor,  # bool, broadcast to [D, H, queries, keys]
    *,
    scaling: float | None,
    dropout: float = 0.0,
    softcap: float | None,
    sinks: Tensor | None,  # [H]
    key_stretch: int | None = None,
) -> Tensor:
    """Attention written out, for features without a fused kernel: soft-capped scores and attention sinks.
    `key_stretch`: values are added up over so many keys at a time, so that surplus keys behind them leave the bits as
    they are."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q @ k.transpose(-1, -2)) * (scaling if scaling is not None else q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf")).float()
    if sinks is not None:
        sink = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1).float()
        probabilities = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
    else:
        probabilities = torch.softmax(scores, dim=-1)
    weights = F.dropout(probabilities.to(v.dtype), p=dropout)
    if key_stretch is None or v.shape[-2] <= key_stretch:
        return weights @ v
    stretches = zip(weights.split(key_stretch, dim=-1), v.split(key_stretch, dim=-2), strict=True)
    return sum((part @ values for part, values in stretches), start=torch.zeros((), dtype=v.dtype, device=v.device))
