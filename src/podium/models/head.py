# SPDX-License-Identifier: Apache-2.0
"""The language-model head fused with the loss: log-probs, loss and gradients chunk by chunk, never all logits at once.

A loss that is a weighted sum over tokens of a function of each token's log-prob needs only the logits of its chunk. So
the gradients for hidden states and head are computed in the forward pass: three matrix products a chunk, where
recomputation would take four. A loss that ties tokens together (a ratio of whole sequences) needs all log-probs first
and takes four.

Over a tensor axis each rank has the logits of its part of the vocabulary. The ranks exchange a maximum, sums and the
target's logit of each token, never logits, except for losses of whole distributions (head_kernels.py).

Over a context axis each rank has its own tokens and their loss. Where a loss ties tokens together, the first rank
computes it from the log-probs of all, and the others get the gradient of their own."""

# S trained tokens · C tokens of one chunk · V vocabulary rows (padded) · E hidden width

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from podium.models.context_parallel import ContextPart
from podium.models.head_kernels import HeadSpec, kernels_of, shaped_logits

TokenLoss = Callable[[Tensor], Tensor]
"""Log-probs of the targets [C] -> loss of each [C]; differentiable, one token at a time."""


class Objective(Protocol):
    """A loss over the trained tokens of one micro-batch that depends on which tokens they are."""

    @property
    def temperature(self) -> float:
        """Log-probs are log softmax(logits / temperature)."""

    @property
    def entropy(self) -> float:
        """Coefficient of the entropy bonus: this times a token's entropy is subtracted from its loss."""

    @property
    def watches_entropy(self) -> bool:
        """Whether entropies are needed, for a bonus or for reports; they cost a pass over the logits."""

    @property
    def ties_tokens(self) -> bool:
        """Whether a token's loss depends on other tokens' log-probs; it then gets all tokens at once."""

    def __call__(self, logprobs_C: Tensor, tokens: slice) -> Tensor:
        """The loss of each of these tokens, differentiable in their log-probs."""


class LogitsObjective(Protocol):
    """A loss over the whole distribution at each trained token: divergence from a teacher, for instance."""

    def __call__(self, logits_CV: Tensor, tokens: slice) -> Tensor:
        """The loss of each of these tokens, differentiable in their float32 logits over the real vocabulary."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenObjective:
    """A token loss as an objective."""

    loss: TokenLoss
    temperature: float = 1.0
    entropy: float = 0.0
    watches_entropy: bool = False
    ties_tokens: bool = False

    def __call__(self, logprobs_C: Tensor, tokens: slice) -> Tensor:
        return self.loss(logprobs_C)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EntropyObjective:
    """A loss that may also read the entropy of each token's distribution, as a constant."""

    loss: Callable[[Tensor, Tensor, slice], Tensor]  # log-probs, entropies (zero if not watched), which tokens they are
    watches_entropy: bool
    ties_tokens: bool
    temperature: float = 1.0
    entropy: float = 0.0

    def __call__(self, logprobs_C: Tensor, entropy_C: Tensor, tokens: slice) -> Tensor:
        return self.loss(logprobs_C, entropy_C, tokens)


def fused_token_loss(
    hidden_SE: Tensor,
    weight_VE: Tensor,
    targets_S: Tensor,
    weights_S: Tensor,
    loss: TokenLoss,
    spec: HeadSpec,
    part: ContextPart | None = None,
) -> Tensor:
    """Σ over tokens of weight · loss(log-prob of the target), differentiable in hidden states and head."""
    if torch.is_grad_enabled():
        return fused_objective(hidden_SE, weight_VE, targets_S, weights_S, TokenObjective(loss), spec, part)[0]
    logprobs_S = target_logprobs(hidden_SE, weight_VE, targets_S, spec)
    if part is not None:  # evaluations count losses by the token's number in the micro-batch
        logprobs_S, weights_S = part.join(logprobs_S), part.join(weights_S)
        if not part.is_first:
            return logprobs_S.new_zeros(())
    return (loss(logprobs_S) * weights_S).sum()


def fused_objective(
    hidden_SE: Tensor,
    weight_VE: Tensor,
    targets_S: Tensor,
    weights_S: Tensor,
    objective: Objective | EntropyObjective,
    spec: HeadSpec,
    part: ContextPart | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (Σ over tokens of weight · loss, log-probs [S], entropies [S], zero if they are not needed). Only the
    first is differentiable. `part`: the tokens are those of one rank of a context axis; the sums of all ranks are the
    micro-batch's."""
    result: tuple[Tensor, Tensor, Tensor] = _FusedHead.apply(  # type: ignore[no-untyped-call]
        hidden_SE, weight_VE, targets_S, weights_S, objective, spec, part
    )
    return result


def fused_logits_objective(
    hidden_SE: Tensor,
    weight_VE: Tensor,
    weights_S: Tensor,
    objective: LogitsObjective,
    spec: HeadSpec,
    part: ContextPart | None = None,
) -> Tensor:
    """Σ over tokens of weight · loss of their whole distribution, differentiable in hidden states and head. `part`: as
    in `fused_objective`."""
    result: Tensor = _FusedLogits.apply(  # type: ignore[no-untyped-call]
        hidden_SE, weight_VE, weights_S, objective, spec, part
    )
    return result


def target_logprobs(
    hidden_SE: Tensor, weight_VE: Tensor, targets_S: Tensor, spec: HeadSpec, temperature: float = 1.0
) -> Tensor:
    """log softmax(logits / temperature) of the target tokens in float32; not differentiable."""
    parts = []
    with torch.no_grad():
        for start in range(0, len(targets_S), spec.chunk_tokens):
            chunk = slice(start, start + spec.chunk_tokens)
            logits = _logits(hidden_SE[chunk], weight_VE)
            parts.append(kernels_of(spec).statistics(logits, targets_S[chunk], spec, temperature)[0])
    return torch.cat(parts) if parts else hidden_SE.new_zeros(0, dtype=torch.float32)


def _target_entropies(
    hidden_SE: Tensor, weight_VE: Tensor, targets_S: Tensor, spec: HeadSpec, temperature: float
) -> Tensor:
    """The entropy of each token's distribution, for a loss that needs all of them first."""
    parts, kernels = [], kernels_of(spec)
    for start in range(0, len(targets_S), spec.chunk_tokens):
        chunk = slice(start, start + spec.chunk_tokens)
        logits_CV = _logits(hidden_SE[chunk], weight_VE)
        log_sum_C = kernels.statistics(logits_CV, targets_S[chunk], spec, temperature)[1]
        parts.append(kernels.entropy(logits_CV, log_sum_C, spec, temperature))
    return torch.cat(parts) if parts else hidden_SE.new_zeros(0, dtype=torch.float32)


def next_token_scores(hidden_SE: Tensor, weight_VE: Tensor, spec: HeadSpec) -> Tensor:
    """Float32 logits over the real vocabulary [S, vocab_size]."""
    with torch.no_grad():
        logits_SV = _logits(hidden_SE, weight_VE)
        if spec.tensor is not None:
            logits_SV = spec.tensor.gather(logits_SV, 1)
        return shaped_logits(logits_SV, spec)[:, : spec.vocab_size]


def full_logits(hidden_SE: Tensor, weight_VE: Tensor) -> Tensor:
    """Float32 logits directly after the head's product: padding rows included, before scale and soft cap."""
    return _logits(hidden_SE, weight_VE)


def shaped_scores(logits_SV: Tensor, spec: HeadSpec) -> Tensor:
    """Turns `full_logits` into the result of `next_token_scores`."""
    return shaped_logits(logits_SV, spec)[:, : spec.vocab_size]


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_SE: Tensor,
        weight_VE: Tensor,
        targets_S: Tensor,
        weights_S: Tensor,
        objective: Objective | EntropyObjective,
        spec: HeadSpec,
        part: ContextPart | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        kernels, temperature = kernels_of(spec), objective.temperature
        total = torch.zeros((), dtype=torch.float32, device=hidden_SE.device)
        logprobs_S = torch.empty(len(targets_S), dtype=torch.float32, device=hidden_SE.device)
        entropy_S = torch.zeros_like(logprobs_S)
        grad_hidden = torch.empty_like(hidden_SE) if wants_hidden else None
        grad_weight = torch.zeros_like(weight_VE, dtype=torch.float32) if wants_weight else None
        tied: Tensor | None = None
        # One chunk holds all there are, unless other ranks have more.
        if objective.ties_tokens and (part is not None or len(targets_S) > spec.chunk_tokens):
            logprobs_S = target_logprobs(hidden_SE, weight_VE, targets_S, spec, temperature)
            if isinstance(objective, EntropyObjective) and objective.watches_entropy:
                entropy_S = _target_entropies(hidden_SE, weight_VE, targets_S, spec, temperature)
            total, tied = _tied_loss(objective, logprobs_S, entropy_S, weights_S, part)
        for start in range(0, len(targets_S), spec.chunk_tokens):
            chunk = slice(start, start + spec.chunk_tokens)
            hidden_CE, targets_C = hidden_SE[chunk], targets_S[chunk]
            logits_CV = _logits(hidden_CE, weight_VE)
            logprobs_C, log_sum_C = kernels.statistics(logits_CV, targets_C, spec, temperature)
            if objective.watches_entropy:
                entropy_S[chunk] = entropy_C = kernels.entropy(logits_CV, log_sum_C, spec, temperature)
            if tied is not None:
                grad_logprobs_C = tied[chunk]
            else:
                logprobs_S[chunk] = logprobs_C
                loss = _loss_of(objective, chunk if part is None else part.in_all(chunk), entropy_S[chunk])
                value, grad_logprobs_C = _loss_and_gradient(logprobs_C, weights_S[chunk], loss)
                total += value
            bend_C: Tensor | None = None
            if objective.watches_entropy and objective.entropy:
                bend_C = -objective.entropy * weights_S[chunk]
                total += (bend_C * entropy_C).sum()
            if not (wants_hidden or wants_weight):
                continue
            grad_logits_CV = kernels.gradient(
                logits_CV, log_sum_C, targets_C, grad_logprobs_C, spec, hidden_SE.dtype, temperature,
                None if bend_C is None else (bend_C, entropy_C),
            )  # fmt: skip
            if grad_hidden is not None:
                torch.mm(grad_logits_CV, weight_VE, out=grad_hidden[chunk])
            if grad_weight is not None:
                _accumulate_product(grad_weight, grad_logits_CV, hidden_CE)
        _add_up_parts(grad_hidden, spec)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight_VE.dtype
        ctx.mark_non_differentiable(logprobs_S, entropy_S)
        return total, logprobs_S, entropy_S

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return *_scaled_gradients(ctx, grad), None, None, None, None, None


class _FusedLogits(torch.autograd.Function):
    """Like _FusedHead, for losses of whole distributions: torch differentiates the loss of a chunk in its logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_SE: Tensor,
        weight_VE: Tensor,
        weights_S: Tensor,
        objective: LogitsObjective,
        spec: HeadSpec,
        part: ContextPart | None,
    ) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        total = torch.zeros((), dtype=torch.float32, device=hidden_SE.device)
        grad_hidden = torch.empty_like(hidden_SE) if wants_hidden else None
        grad_weight = torch.zeros_like(weight_VE, dtype=torch.float32) if wants_weight else None
        for start in range(0, len(hidden_SE), spec.logits_chunk_tokens):
            chunk = slice(start, min(start + spec.logits_chunk_tokens, len(hidden_SE)))
            hidden_CE = hidden_SE[chunk]
            with torch.set_grad_enabled(wants_hidden or wants_weight):
                logits_CV = _logits(hidden_CE, weight_VE).detach()
                if spec.tensor is not None:
                    logits_CV = spec.tensor.gather(logits_CV, 1)
                raw_CV = logits_CV.requires_grad_(wants_hidden or wants_weight)
                tokens = chunk if part is None else part.in_all(chunk)
                value = (objective(shaped_logits(raw_CV, spec)[:, : spec.vocab_size], tokens) * weights_S[chunk]).sum()
            total += value.detach()
            if not (wants_hidden or wants_weight):
                continue
            grad_logits_CV = torch.autograd.grad(value, raw_CV)[0].to(hidden_SE.dtype)
            if spec.tensor is not None:
                grad_logits_CV = grad_logits_CV[:, spec.tensor.part(grad_logits_CV.shape[1])]
            if grad_hidden is not None:
                torch.mm(grad_logits_CV, weight_VE, out=grad_hidden[chunk])
            if grad_weight is not None:
                _accumulate_product(grad_weight, grad_logits_CV, hidden_CE)
        _add_up_parts(grad_hidden, spec)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight_VE.dtype
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_scaled_gradients(ctx, grad), None, None, None, None


def _add_up_parts(grad_hidden: Tensor | None, spec: HeadSpec) -> None:
    """A rank's part of the vocabulary gives a summand of the hidden states' gradient."""
    if grad_hidden is not None and spec.tensor is not None:
        spec.tensor.sum(grad_hidden)


def _scaled_gradients(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the forward pass, times the gradient of the sum."""
    grad_hidden, grad_weight = ctx.saved_tensors  # type: ignore[attr-defined]
    if grad_hidden is not None:
        grad_hidden = grad_hidden * grad.to(grad_hidden.dtype)
    if grad_weight is not None:  # scaled and cast in one pass
        dtype: torch.dtype = ctx.weight_dtype  # type: ignore[attr-defined]
        grad_weight = torch.mul(grad_weight, grad, out=torch.empty_like(grad_weight, dtype=dtype))
    return grad_hidden, grad_weight


def _loss_of(objective: Objective | EntropyObjective, tokens: slice, entropy_C: Tensor) -> TokenLoss:
    """The objective of these tokens as a function of their log-probs alone."""
    if isinstance(objective, EntropyObjective):
        return lambda logprobs_C: objective(logprobs_C, entropy_C, tokens)
    return lambda logprobs_C: objective(logprobs_C, tokens)


def _tied_loss(
    objective: Objective | EntropyObjective,
    logprobs_S: Tensor,
    entropy_S: Tensor,
    weights_S: Tensor,
    part: ContextPart | None,
) -> tuple[Tensor, Tensor]:
    """The loss of all tokens at once, and its gradient in the log-probs. Of a context axis the first rank has the loss
    of all ranks' tokens, and each the gradient of its own."""
    if part is not None:
        logprobs_S, entropy_S, weights_S = (part.join(each) for each in (logprobs_S, entropy_S, weights_S))
    total, gradient_S = logprobs_S.new_zeros(()), torch.zeros_like(logprobs_S)
    if len(logprobs_S) and (part is None or part.is_first):  # a group without documents has no loss
        loss = _loss_of(objective, slice(0, len(logprobs_S)), entropy_S)
        total, gradient_S = _loss_and_gradient(logprobs_S, weights_S, loss)
    return total, gradient_S if part is None else part.axis.sum(gradient_S)[part.trained]


def _loss_and_gradient(logprobs_C: Tensor, weights_C: Tensor, loss: TokenLoss) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = logprobs_C.detach().requires_grad_()
        value = (loss(leaf) * weights_C).sum()
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


def _logits(hidden_CE: Tensor, weight_VE: Tensor) -> Tensor:
    """Float32 logits: on CUDA the product of bfloat16 operands is kept in the float32 it was accumulated in."""
    if hidden_CE.dtype == torch.float32 or not hidden_CE.is_cuda:
        return hidden_CE @ weight_VE.T
    return torch.mm(hidden_CE, weight_VE.T, out_dtype=torch.float32)


def _accumulate_product(total_VE: Tensor, left_CV: Tensor, right_CE: Tensor) -> None:
    """total += leftᵀ · right, in float32 for operands of any dtype."""
    if left_CV.dtype == torch.float32:
        total_VE.addmm_(left_CV.T, right_CE)
    elif left_CV.is_cuda:
        torch.addmm(total_VE, left_CV.T, right_CE, out_dtype=torch.float32, out=total_VE)
    else:
        total_VE.add_(left_CV.T @ right_CE)
