# SPDX-License-Identifier: Apache-2.0
"""Attention of a block of queries to a block of the keys that they see: outputs with their log-sum-exp, so that those
of several blocks of keys can be merged, and gradients from the output and the log-sum-exp of all blocks.

On CUDA torch's flash attention computes a block where it can; elsewhere it is written out."""

# H query heads · K key-value heads · G = H / K · M queries · N keys · E head width

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from podium.models.attention_spec import AttentionSpec, distances

SCORE_ELEMENTS = 1 << 26  # of scores that exist at a time, over all heads
LEAST_ROWS = 64
_FLASH_WIDTH = 256


def attend_block(q_HME: Tensor, k_KNE: Tensor, v_KNE: Tensor, ahead: int, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Output [H, M, E] of a softmax over these keys alone, and its log-sum-exp [H, M]; both float32. `ahead`: by how
    many tokens the first query is after the first key. Every query sees some of the keys."""
    if has_flash(q_HME, v_KNE, spec):
        causal, left, right = _flash_window(q_HME, k_KNE, ahead, spec)
        q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (q_HME, k_KNE, v_KNE))
        out, lse_1HM, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False,
            scale=spec.scale(q.shape[-1]), window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return out[0].transpose(0, 1).float(), lse_1HM[0]
    outs, lses = [], []
    for rows in _blocks(q_HME, k_KNE):
        scores, _ = _scores(q_HME[:, rows], k_KNE, ahead + rows.start, spec)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp_().to(v_KNE.dtype)
        outs.append((weights @ v_KNE.unsqueeze(1)).flatten(0, 1).float())
        lses.append(lse.flatten(0, 1))
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


def block_gradients(
    q_HME: Tensor, k_KNE: Tensor, v_KNE: Tensor, out_HME: Tensor, lse_HM: Tensor, grad_HME: Tensor, ahead: int,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What these keys add to the gradients of queries, keys and values, in float32. Output, its gradient and
    log-sum-exp are those of all keys that the queries see."""
    if has_flash(q_HME, v_KNE, spec):
        causal, left, right = _flash_window(q_HME, k_KNE, ahead, spec)
        tensors = (grad_HME, q_HME, k_KNE, v_KNE, out_HME)
        grad, q, k, v, out = (each.transpose(0, 1).unsqueeze(0).contiguous() for each in tensors)
        nothing = torch.empty(2, dtype=torch.int64, device=q.device)  # of dropout's random numbers
        grads = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse_HM.unsqueeze(0).contiguous(), None, None, q.shape[1], k.shape[1], 0.0, causal,
            nothing, nothing, scale=spec.scale(q.shape[-1]), window_size_left=left, window_size_right=right,
        )  # fmt: skip
        dq, dk, dv = (each[0].transpose(0, 1).float() for each in grads)
        return dq, dk, dv
    groups = (len(k_KNE), -1)
    delta_HM = (grad_HME.float() * out_HME.float()).sum(-1)
    dq_HME = torch.empty(q_HME.shape, dtype=torch.float32, device=q_HME.device)
    dk, dv = (torch.zeros(each.shape, dtype=torch.float32, device=each.device) for each in (k_KNE, v_KNE))
    scale = spec.scale(q_HME.shape[-1])
    for rows in _blocks(q_HME, k_KNE):
        q, grad = (each[:, rows].float().unflatten(0, groups) for each in (q_HME, grad_HME))  # [K, G, M, E]
        lse, delta = (each[:, rows].unflatten(0, groups).unsqueeze(-1) for each in (lse_HM, delta_HM))
        scores, slope = _scores(q_HME[:, rows], k_KNE, ahead + rows.start, spec)
        weights = (scores - lse).exp_()
        dv += (weights.transpose(-1, -2) @ grad).sum(1)
        grad_scores = weights * (grad @ v_KNE.float().unsqueeze(1).transpose(-1, -2) - delta) * scale
        if slope is not None:
            grad_scores *= slope
        dq_HME[:, rows] = (grad_scores @ k_KNE.float().unsqueeze(1)).flatten(0, 1)
        dk += (grad_scores.transpose(-1, -2) @ q).sum(1)
    return dq_HME, dk, dv


def has_flash(q_HME: Tensor, v_KNE: Tensor, spec: AttentionSpec) -> bool:
    """Whether torch's flash attention computes such a block. Sinks are no part of a block."""
    width = q_HME.shape[-1]
    fits = width == v_KNE.shape[-1] and width % 8 == 0 and width <= _FLASH_WIDTH
    # With a window to the left, the kernel lets a query see at most N keys to the right of where it puts it: if there
    # are more queries than keys, the first ones would not see the last keys.
    fits = fits and (spec.window is None or q_HME.shape[1] <= v_KNE.shape[1])
    return q_HME.is_cuda and q_HME.dtype in (torch.bfloat16, torch.float16) and spec.softcap is None and fits


def _flash_window(q_HME: Tensor, k_KNE: Tensor, ahead: int, spec: AttentionSpec) -> tuple[bool, int | None, int | None]:
    """Whether the block is causal, and how many keys to the left and to the right a query sees. The kernel lets the
    last query stand at the last key."""
    causal = ahead == 0
    if spec.window is None:
        return causal, None, None
    moved = ahead - (k_KNE.shape[1] - q_HME.shape[1])  # how far queries really are from where the kernel puts them
    assert moved <= spec.window - 1, "each query sees a key"
    return causal, spec.window - 1 - moved, 0 if causal else -1


def _blocks(q_HME: Tensor, k_KNE: Tensor) -> Iterator[slice]:
    """Rows of queries whose scores exist at a time."""
    length = q_HME.shape[1]
    rows = max(SCORE_ELEMENTS // max(1, len(q_HME) * k_KNE.shape[1]), LEAST_ROWS)
    return (slice(start, min(start + rows, length)) for start in range(0, length, rows))


def _scores(q_HME: Tensor, k_KNE: Tensor, ahead: int, spec: AttentionSpec) -> tuple[Tensor, Tensor | None]:
    """Float32 scores [K, G, M, N], and the slope of their soft cap."""
    q = q_HME.unflatten(0, (len(k_KNE), -1))
    scores = (q @ k_KNE.unsqueeze(1).transpose(-1, -2)).float() * spec.scale(q.shape[-1])
    slope = None
    if spec.softcap is not None:
        bent = torch.tanh(scores / spec.softcap)
        scores, slope = spec.softcap * bent, 1 - bent.square()
    length, num_keys = q.shape[2], k_KNE.shape[1]
    if spec.window is not None or ahead < num_keys - 1:  # else the first query sees all keys, and so do all
        visible = spec.visible(distances(slice(ahead, ahead + length), slice(0, num_keys), scores.device))
        scores = scores.masked_fill_(~visible, float("-inf"))
    return scores, slope
