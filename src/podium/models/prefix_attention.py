# SPDX-License-Identifier: Apache-2.0
"""Attention of a micro-batch whose documents share prefixes, on CPU, without copies of keys.

A segment attends to itself with a causal mask. Then all segments that continue it attend to its keys at once: they are
neighbours, and each of their queries sees all of these keys. Both parts are merged by the log-sum-exp. In backward the
gradients of each part follow from the output and the log-sum-exp of all parts, so a shared key gets one gradient from
all its queries together."""

# U tokens of the tree · H query heads · K key-value heads · G = H / K · M queries · E head width

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from podium.models.attention_spec import AttentionSpec
from podium.models.packing import Segments

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def merges_parts(query: Tensor, value: Tensor, segments: Segments, spec: AttentionSpec) -> bool:
    """Whether this kind of attention has parts that can be merged here: torch's kernel on CPU, and every query sees all
    keys before it."""
    is_plain = spec.softcap is None and spec.sinks is None and spec.dropout == 0.0
    sees_all = spec.window is None or segments.longest <= spec.window
    return is_plain and sees_all and query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def merged_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, spec: AttentionSpec) -> Tensor:
    """[1, H, U, E] and twice [1, K, U, E] -> [1, U, H, E]."""
    scale = spec.scale(query.shape[-1])
    out: Tensor = _Merged.apply(query[0], key[0], value[0], segments, scale)  # type: ignore[no-untyped-call]
    return out.unsqueeze(0)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_HUE: Tensor, k_KUE: Tensor, v_KUE: Tensor, segments: Segments, scale: float) -> Tensor:
        num_heads, num_tokens, width = q_HUE.shape
        out_UHE = torch.empty(num_tokens, num_heads, width, dtype=torch.float32, device=q_HUE.device)
        out_HUE = out_UHE.transpose(0, 1)
        lse_HU = torch.empty(num_heads, num_tokens, dtype=torch.float32, device=q_HUE.device)
        for tokens, _, tensors in _own_parts(segments, q_HUE, k_KUE, v_KUE):
            out, lse = _FORWARD(*tensors, 0.0, True, scale=scale)
            out_HUE[:, tokens] = _joined(out)
            lse_HU[:, tokens] = lse.transpose(0, 1).flatten(1)
        for keys, queries in segments.continued():
            out, lse = _FORWARD(*_shared_part(q_HUE, k_KUE, v_KUE, keys, queries), 0.0, False, scale=scale)
            more, more_lse = out.reshape(num_heads, -1, width), lse.reshape(num_heads, -1)
            _merge(out_HUE[:, queries], lse_HU[:, queries], more, more_lse)
        result = out_UHE.to(q_HUE.dtype)
        ctx.save_for_backward(q_HUE, k_KUE, v_KUE, result, lse_HU)
        ctx.segments, ctx.scale = segments, scale
        return result

    @staticmethod
    def backward(ctx: Any, grad_UHE: Tensor) -> tuple[Tensor | None, ...]:
        q_HUE, k_KUE, v_KUE, out_UHE, lse_HU = ctx.saved_tensors
        segments, scale = ctx.segments, ctx.scale
        grad_HUE, out_HUE = grad_UHE.transpose(0, 1), out_UHE.transpose(0, 1)
        num_shared = len(k_KUE)
        dq, dk, dv = (torch.empty(each.shape, dtype=torch.float32) for each in (q_HUE, k_KUE, v_KUE))
        for tokens, count, tensors in _own_parts(segments, q_HUE, k_KUE, v_KUE):
            grad, out = (_parts(each[:, tokens], count) for each in (grad_HUE, out_HUE))
            lse = _parts(lse_HU[:, tokens].unsqueeze(-1), count).squeeze(-1)
            parts = _BACKWARD(grad, *tensors, out, lse.contiguous(), 0.0, True, scale=scale)
            dq_part, dk_part, dv_part = (_joined(each) for each in parts)
            dq[:, tokens] = dq_part
            for sums, part in ((dk, dk_part), (dv, dv_part)):
                sums[:, tokens] = part.unflatten(0, (num_shared, -1)).float().sum(1)
        for keys, queries in segments.continued():
            grad, out = (_grouped(each[:, queries], num_shared) for each in (grad_HUE, out_HUE))
            lse = lse_HU[:, queries].reshape(1, num_shared, -1)
            tensors = _shared_part(q_HUE, k_KUE, v_KUE, keys, queries)
            dq_part, dk_part, dv_part = _BACKWARD(grad, *tensors, out, lse, 0.0, False, scale=scale)
            dq[:, queries] += dq_part.reshape(len(dq), -1, dq.shape[-1])
            dk[:, keys] += dk_part[0]
            dv[:, keys] += dv_part[0]
        return dq.to(q_HUE.dtype), dk.to(k_KUE.dtype), dv.to(v_KUE.dtype), None, None


def _own_parts(
    segments: Segments, q_HUE: Tensor, k_KUE: Tensor, v_KUE: Tensor
) -> Iterator[tuple[slice, int, tuple[Tensor, ...]]]:
    """Of each run of equally long segments: its tokens, the number of segments, and queries, keys and values
    [segments, H, L, E]. torch's kernel has one key head for each query head."""
    groups = len(q_HUE) // len(k_KUE)
    for run in segments.runs:
        tokens = slice(run.offset, run.offset + run.num_documents * run.length)
        q, k, v = q_HUE[:, tokens], k_KUE[:, tokens], v_KUE[:, tokens]
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=0), v.repeat_interleave(groups, dim=0)
        yield tokens, run.num_documents, tuple(_parts(each, run.num_documents) for each in (q, k, v))


def _shared_part(q_HUE: Tensor, k_KUE: Tensor, v_KUE: Tensor, keys: slice, queries: slice) -> tuple[Tensor, ...]:
    """Queries [1, K, G × M, E] and the keys and values that all of them see. Without a mask their order does not
    matter, so the heads that share a key head are queries of one head."""
    q = _grouped(q_HUE[:, queries], len(k_KUE))
    return q, k_KUE[:, keys].unsqueeze(0), v_KUE[:, keys].unsqueeze(0)


def _grouped(values_HME: Tensor, num_shared: int) -> Tensor:
    """[H, M, E] -> [1, K, G × M, E]."""
    return values_HME.reshape(1, num_shared, -1, values_HME.shape[-1])


def _parts(values_HTE: Tensor, count: int) -> Tensor:
    """[H, tokens of a run, E] -> [segments, H, L, E]."""
    parts: Tensor = values_HTE.unflatten(1, (count, -1))
    return parts.transpose(0, 1)


def _joined(values_DHLE: Tensor) -> Tensor:
    """[segments, H, L, E] -> [H, tokens of a run, E]."""
    return values_DHLE.transpose(0, 1).flatten(1, 2)


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Adds attention to further keys to that of the keys before, in place."""
    total = torch.logaddexp(lse, more_lse)
    out *= (lse - total).exp().unsqueeze(-1)
    out.addcmul_(more, (more_lse - total).exp().unsqueeze(-1))
    lse.copy_(total)
