# SPDX-License-Identifier: Apache-2.0
"""Samples tokens from logits: the inverse of the cumulative distribution at one uniform number per row.

Log-probs are those of the distribution that a token is sampled from: softmax(logits / temperature) over the tokens of
the real vocabulary that top-k, top-p and min-p keep, after penalty and bias. Temperature 0 takes the most likely token
and reports log-probs of temperature 1, over all tokens."""

# B rows · V vocabulary (real rows) · C tokens of one stretch of the vocabulary

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from podium.data.documents import Tokens
from podium.rollout.requests import Sampling

# A long vocabulary is summed in two levels: rounding of a single running sum would favour its end.
_STRETCH = 1024
_WHOLE = Sampling(max_new_tokens=1)


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """One token per row. A NaN log-prob means that the logits were NaN, or left no token to sample."""

    tokens_B: Tensor
    logprobs_B: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitsProcessing:
    """Settings of a row that does not sample from the plain distribution, with the past tokens that they need."""

    row: int  # of the logits
    sampling: Sampling
    tokens: Tokens  # prompt and completion so far; read only where there is a penalty
    num_new: int


def sample(
    logits_BV: Tensor, temperatures_B: Tensor, uniforms_B: Tensor, processings: Sequence[LogitsProcessing] = ()
) -> SampledTokens:
    """Samples from float32 logits over the real vocabulary; they may be overwritten."""
    greedy_B = temperatures_B == 0
    if processings:
        rows = torch.tensor([each.row for each in processings], device=logits_BV.device)
        processed = _processed(logits_BV.index_select(0, rows), temperatures_B[rows], processings)
    sampled = _sample(logits_BV.div_(temperatures_B.masked_fill(greedy_B, 1.0)[:, None]), greedy_B, uniforms_B)
    if processings:
        again = _sample(processed, greedy_B[rows], uniforms_B[rows])
        sampled.tokens_B[rows], sampled.logprobs_B[rows] = again.tokens_B, again.logprobs_B
    return sampled


def _sample(scaled_BV: Tensor, greedy_B: Tensor, uniforms_B: Tensor) -> SampledTokens:
    """Samples from softmax(scaled). Where no token is left, or one overflows, the log-prob is NaN as of NaN logits."""
    log_sum_B = torch.logsumexp(scaled_BV, dim=-1)
    tokens_B = _pick(scaled_BV, log_sum_B, greedy_B, uniforms_B)
    return SampledTokens(tokens_B, scaled_BV.gather(1, tokens_B[:, None]).squeeze(1) - log_sum_B)


def _pick(scaled_BV: Tensor, log_sum_B: Tensor, greedy_B: Tensor, uniforms_B: Tensor) -> Tensor:
    num_greedy = int(greedy_B.sum())
    if num_greedy == len(greedy_B):
        return scaled_BV.argmax(dim=-1)
    picked_B = _inverse((scaled_BV - log_sum_B[:, None]).exp_(), uniforms_B)
    if num_greedy:
        picked_B = torch.where(greedy_B, scaled_BV.argmax(dim=-1), picked_B)
    return picked_B


def _inverse(probabilities_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """The first token at which the running sum passes the uniform number."""
    size = probabilities_BV.shape[1]
    if size <= _STRETCH:
        return _first_beyond(probabilities_BV, uniforms_B)[0]
    padded = torch.nn.functional.pad(probabilities_BV, (0, -size % _STRETCH))
    parts = padded.view(len(padded), -1, _STRETCH)
    part_B, before_B = _first_beyond(parts.sum(dim=-1, dtype=torch.float64), uniforms_B)
    inside_BC = parts.gather(1, part_B[:, None, None].expand(-1, 1, _STRETCH)).squeeze(1)
    offset_B, _ = _first_beyond(inside_BC, (uniforms_B - before_B).clamp_(min=0))
    return (part_B * _STRETCH + offset_B).clamp_(max=size - 1)


def _first_beyond(weights_BC: Tensor, marks_B: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (index of the first running sum above the mark, the sum before it). Rounding may leave the mark at the
    exact end: then the last index with any weight is taken, never one without."""
    sums_BC = weights_BC.cumsum(dim=-1, dtype=torch.float64)
    last_B = sums_BC[:, -1]
    below_B = torch.minimum(marks_B, last_B * (1 - 1e-12))
    index_B = torch.searchsorted(sums_BC, below_B[:, None], right=True).squeeze(1)
    index_B = index_B.clamp_(max=weights_BC.shape[1] - 1)
    at = index_B[:, None]
    return index_B, (sums_BC.gather(1, at) - weights_BC.gather(1, at)).squeeze(1)


def _processed(logits_BV: Tensor, temperatures_B: Tensor, processings: Sequence[LogitsProcessing]) -> Tensor:
    """Scaled logits with -inf for tokens that a row may not sample. In this order: penalty, bias, allowed tokens, stops
    that come too early; then by probability: top-k, top-p, min-p, each applied to the rest of the one before."""
    for row_V, each in zip(logits_BV, processings, strict=True):
        _reshape(row_V, each)
    scaled_BV = logits_BV / torch.where(temperatures_B == 0, 1.0, temperatures_B)[:, None]
    if any(each.sampling.is_truncated for each in processings):
        _cut_tails(scaled_BV, processings)
    return scaled_BV


def _reshape(logits_V: Tensor, each: LogitsProcessing) -> None:
    sampling, device = each.sampling, logits_V.device
    if sampling.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(each.tokens).astype(np.int64)).to(device)
        values = logits_V[seen]
        penalty = sampling.repetition_penalty
        logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if sampling.logit_bias:
        where = torch.tensor(list(sampling.logit_bias), device=device)
        logits_V[where] += torch.tensor(list(sampling.logit_bias.values()), dtype=logits_V.dtype, device=device)
    if sampling.allowed_tokens is not None:
        allowed = torch.tensor(sorted(sampling.allowed_tokens), device=device)
        allowed_logits = logits_V[allowed]
        logits_V.fill_(float("-inf"))
        logits_V[allowed] = allowed_logits
    if each.num_new < sampling.min_new_tokens and sampling.stop_tokens:
        logits_V[torch.tensor(sorted(sampling.stop_tokens), device=device)] = float("-inf")


def _cut_tails(scaled_BV: Tensor, processings: Sequence[LogitsProcessing]) -> None:
    """Applies top-k, top-p and min-p in place: every row gets a threshold below which tokens are removed."""
    values_BV, order_BV = scaled_BV.sort(dim=-1, descending=True, stable=True)
    size, device = scaled_BV.shape[1], scaled_BV.device

    samplings = [each.sampling if each.sampling.is_truncated else _WHOLE for each in processings]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

    ranks_V = torch.arange(size, device=device)
    top_k = column([float(each.top_k or size) for each in samplings])
    values_BV = values_BV.masked_fill(ranks_V >= top_k, float("-inf"))
    probabilities_BV = torch.softmax(values_BV, dim=-1)
    before_BV = probabilities_BV.cumsum(dim=-1) - probabilities_BV
    # The token that passes the share is kept, so the most likely one always is.
    outside_BV = before_BV >= column([each.top_p if each.top_p < 1 else 2.0 for each in samplings])
    outside_BV |= probabilities_BV < column([each.min_p for each in samplings]) * probabilities_BV[:, :1]
    values_BV = values_BV.masked_fill(outside_BV, float("-inf"))
    scaled_BV.scatter_(1, order_BV, values_BV)
