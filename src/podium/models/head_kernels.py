# SPDX-License-Identifier: Apache-2.0
"""Statistics and gradients of logits: on one rank, or on ranks that each have the logits of a part of the vocabulary.

Over a tensor axis the ranks exchange the largest score, the sum of exponentials and the target's score of each token,
and no logits. Each then has the gradient of its own logits."""

# C tokens of one chunk · V vocabulary rows of this rank (padded)

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from podium.models.tensor_axis import TensorAxis


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """Parameters that turn a hidden state into log-probs, apart from the weights."""

    vocab_size: int  # real rows; the padded ones after them have probability zero
    softcap: float | None = None  # logits = softcap · tanh(logits / softcap)
    scale: float = 1.0  # logits are multiplied by this
    chunk_tokens: int = 4096
    logits_chunk_tokens: int = 1024  # for losses over whole distributions, which need several copies of them
    compiled: bool = False
    tensor: TensorAxis | None = None  # ranks that each have a part of the rows


def shaped_logits(logits_CV: Tensor, spec: HeadSpec) -> Tensor:
    """Float32 logits after scale and soft cap."""
    logits = logits_CV.float()
    if spec.scale != 1.0:
        logits = logits * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    return logits


def _masked(logits_CV: Tensor, spec: HeadSpec) -> Tensor:
    if logits_CV.shape[1] == spec.vocab_size:
        return logits_CV
    padded = torch.arange(logits_CV.shape[1], device=logits_CV.device) >= spec.vocab_size
    return logits_CV.masked_fill(padded, float("-inf"))


def _scores(logits_CV: Tensor, spec: HeadSpec, temperature: float) -> Tensor:
    """Shaped logits over the temperature; padding columns have the lowest number, which no sum notices."""
    scores = shaped_logits(logits_CV, spec) / temperature
    padded = torch.arange(logits_CV.shape[1], device=logits_CV.device) >= spec.vocab_size
    return scores.masked_fill(padded, torch.finfo(torch.float32).min)


def _sum_of_exponentials(scores_CV: Tensor, largest_C: Tensor) -> Tensor:
    return (scores_CV - largest_C[:, None]).exp().sum(-1)


def _statistics(logits_CV: Tensor, targets_C: Tensor, spec: HeadSpec, temperature: float) -> tuple[Tensor, Tensor]:
    """(log-prob of the target, log of the sum of exponentials) of each row."""
    shaped = _masked(shaped_logits(logits_CV, spec), spec)
    if temperature != 1.0:
        shaped = shaped / temperature
    log_sum_C = torch.logsumexp(shaped, dim=-1)
    return shaped.gather(1, targets_C[:, None]).squeeze(1) - log_sum_C, log_sum_C


def _entropy(logits_CV: Tensor, log_sum_C: Tensor, spec: HeadSpec, temperature: float) -> Tensor:
    """Entropy of softmax(logits / temperature): log of the sum of exponentials minus the expected logit."""
    shaped = _masked(shaped_logits(logits_CV, spec), spec)
    if temperature != 1.0:
        shaped = shaped / temperature
    softmax = (shaped - log_sum_C[:, None]).exp()
    # A padding row has probability 0 and logit -inf, and 0 times that is not a number.
    return log_sum_C - (softmax * shaped.clamp_min(torch.finfo(torch.float32).min)).sum(-1)


def _gradient(
    logits_CV: Tensor,
    log_sum_C: Tensor,
    targets_C: Tensor,
    grad_C: Tensor,
    spec: HeadSpec,
    dtype: torch.dtype,
    temperature: float = 1.0,
    entropy_gradient: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """d loss / d logits = grad · (onehot − softmax) / temperature, through soft cap and scale. `entropy_gradient` is
    the gradient with respect to each entropy, and the entropies: d entropy / d logit = −softmax · (log softmax +
    entropy)."""
    shaped = shaped_logits(logits_CV, spec)
    scores = _masked(shaped, spec)
    if temperature != 1.0:
        scores = scores / temperature
    logprobs = scores - log_sum_C[:, None]
    softmax = logprobs.exp()
    columns = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    onehot = (columns[None, :] == targets_C[:, None]).to(softmax.dtype)
    grad = grad_C[:, None] * (onehot - softmax)
    if entropy_gradient is not None:
        grad_entropy_C, entropy_C = entropy_gradient
        lifted = logprobs.clamp_min(torch.finfo(torch.float32).min) + entropy_C[:, None]
        grad = grad - grad_entropy_C[:, None] * softmax * lifted
    if spec.softcap is not None:
        grad = grad * (1 - (shaped / spec.softcap) ** 2)
    return (grad * (spec.scale / temperature)).to(dtype)


def _gradient_in_place(
    logits_CV: Tensor,
    log_sum_C: Tensor,
    targets_C: Tensor,
    grad_C: Tensor,
    spec: HeadSpec,
    dtype: torch.dtype,
    temperature: float = 1.0,
    entropy_gradient: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Like `_gradient`, without a second array of logits: for eager mode, where every pass over them costs time."""
    plain = spec.softcap is None and spec.scale == 1.0 and temperature == 1.0 and entropy_gradient is None
    if not plain or logits_CV.dtype != torch.float32 or dtype != torch.float32:
        return _gradient(logits_CV, log_sum_C, targets_C, grad_C, spec, dtype, temperature, entropy_gradient)
    grad = logits_CV.sub_(log_sum_C[:, None]).exp_()
    grad[:, spec.vocab_size :] = 0
    grad.mul_(-grad_C[:, None])
    grad.scatter_add_(1, targets_C[:, None], grad_C[:, None])
    return grad


Bend = tuple[Tensor, Tensor] | None


@dataclass(frozen=True, slots=True)
class Kernels:
    """What the head computes from the logits of a chunk, in eager mode or compiled."""

    statistics: Callable[[Tensor, Tensor, HeadSpec, float], tuple[Tensor, Tensor]]
    entropy: Callable[[Tensor, Tensor, HeadSpec, float], Tensor]
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor, HeadSpec, torch.dtype, float, Bend], Tensor]
    scores: Callable[[Tensor, HeadSpec, float], Tensor]
    sum_of_exponentials: Callable[[Tensor, Tensor], Tensor]


_EAGER = Kernels(_statistics, _entropy, _gradient_in_place, _scores, _sum_of_exponentials)


@functools.cache
def _compiled_kernels() -> Kernels:
    """Created on first use: the compiler takes seconds to import."""
    return Kernels(
        torch.compile(_statistics), torch.compile(_entropy), torch.compile(_gradient), torch.compile(_scores),
        torch.compile(_sum_of_exponentials),
    )  # fmt: skip


def kernels_of(spec: HeadSpec) -> Kernels:
    """The kernels of this head."""
    local = _compiled_kernels() if spec.compiled else _EAGER
    if spec.tensor is None:
        return local
    # Another rank's target is no column here, which the gradient in place does not expect.
    return _divided(replace(local, gradient=local.gradient if spec.compiled else _gradient), spec.tensor)


def _divided(local: Kernels, axis: TensorAxis) -> Kernels:
    """The same statistics and gradients, from this rank's columns of the logits and sums over the ranks."""

    def own(logits_CV: Tensor, spec: HeadSpec) -> tuple[HeadSpec, int]:
        """The spec of this rank's columns, and the first of them."""
        start = axis.rank * logits_CV.shape[1]
        real = min(max(spec.vocab_size - start, 0), logits_CV.shape[1])
        return replace(spec, vocab_size=real, tensor=None), start

    def statistics(logits_CV: Tensor, targets_C: Tensor, spec: HeadSpec, temperature: float) -> tuple[Tensor, Tensor]:
        part, start = own(logits_CV, spec)
        scores_CV = local.scores(logits_CV, part, temperature)
        largest_C = axis.largest(scores_CV.amax(-1))
        own_C = (targets_C >= start) & (targets_C < start + logits_CV.shape[1])
        target_C = scores_CV.gather(1, torch.where(own_C, targets_C - start, 0)[:, None]).squeeze(1)
        sums_2C = torch.stack([local.sum_of_exponentials(scores_CV, largest_C), target_C.masked_fill(~own_C, 0.0)])
        axis.sum(sums_2C)
        log_sum_C = largest_C + sums_2C[0].log()
        return sums_2C[1] - log_sum_C, log_sum_C

    def entropy(logits_CV: Tensor, log_sum_C: Tensor, spec: HeadSpec, temperature: float) -> Tensor:
        expected_C = log_sum_C - local.entropy(logits_CV, log_sum_C, own(logits_CV, spec)[0], temperature)
        return log_sum_C - axis.sum(expected_C)

    def gradient(
        logits_CV: Tensor, log_sum_C: Tensor, targets_C: Tensor, grad_C: Tensor, spec: HeadSpec,
        dtype: torch.dtype, temperature: float = 1.0, entropy_gradient: Bend = None,
    ) -> Tensor:  # fmt: skip
        part, start = own(logits_CV, spec)
        # The target of another rank is no column here.
        return local.gradient(
            logits_CV, log_sum_C, targets_C - start, grad_C, part, dtype, temperature, entropy_gradient
        )

    return replace(local, statistics=statistics, entropy=entropy, gradient=gradient)
