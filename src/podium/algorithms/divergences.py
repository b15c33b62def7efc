# SPDX-License-Identifier: Apache-2.0
"""How far a student's next-token distribution is from a teacher's, per token, differentiable in the student's logits.

Teachers come as log-probs at the same temperature as the student's, over the same vocabulary; they are constants.
Results are not multiplied by the temperature's square, which would keep the size of the gradients as the temperature
grows: a caller that wants it has one factor to apply. A student's logits must be finite.
"""

# C tokens of a chunk · V vocabulary · K largest of a teacher

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal, assert_never

import torch
from torch import Tensor

from podium.algorithms.logarithms import log1mexp, widened

DivergenceKind = Literal["forward_kl", "reverse_kl", "jsd"]

# A teacher's log-prob is at least this: a token that it rules out costs the student much, not infinitely much, and
# exp(-100) adds nothing where it should be 0.
LOGPROB_FLOOR: Final = -100.0


def divergence(
    kind: DivergenceKind,
    student_logits_CV: Tensor,
    teacher_logprobs_CV: Tensor,
    *,
    temperature: float = 1.0,
    beta: float = 0.5,
) -> Tensor:
    """The divergence of that kind at each token.

    forward_kl, KL(teacher || student): the student must cover all that the teacher would say. reverse_kl,
    KL(student || teacher): the student must not say what the teacher would not. jsd, beta KL(teacher || M) +
    (1 - beta) KL(student || M), with M = beta teacher + (1 - beta) student: between 0 and log 2, symmetric at beta
    0.5. Divided by beta it tends to the forward KL as beta goes to 0, divided by 1 - beta to the reverse KL as beta
    goes to 1. At exactly 0 and 1 it would vanish, so there it is those KLs themselves.
    """
    assert student_logits_CV.shape == teacher_logprobs_CV.shape, (
        f"student {tuple(student_logits_CV.shape)} and teacher {tuple(teacher_logprobs_CV.shape)} differ in shape"
    )
    student_CV = torch.log_softmax(widened(student_logits_CV) / temperature, dim=-1)
    return _between(kind, student_CV, widened(teacher_logprobs_CV.detach()), beta)


def top_k_divergence(
    kind: DivergenceKind,
    student_logits_CV: Tensor,
    teacher_ids_CK: Tensor,
    teacher_logprobs_CK: Tensor,
    *,
    temperature: float = 1.0,
    beta: float = 0.5,
) -> Tensor:
    """The same, of a teacher known by its K largest log-probs only: all other tokens are one outcome.

    Never more than the divergence over the whole vocabulary, and equal to it for K = V. The ids of a token are
    distinct.
    """
    assert teacher_ids_CK.shape == teacher_logprobs_CK.shape, "ids and log-probs of the teacher differ in shape"
    scaled_CV = widened(student_logits_CV) / temperature
    normalisers_C1 = scaled_CV.logsumexp(dim=-1, keepdim=True)
    student = scaled_CV.gather(-1, teacher_ids_CK) - normalisers_C1
    teacher = widened(teacher_logprobs_CK.detach())
    if teacher_ids_CK.shape[-1] < scaled_CV.shape[-1]:
        # The student's rest is summed up and not taken from 1: it may be far below the rounding of 1.
        rest_C1 = scaled_CV.scatter(-1, teacher_ids_CK, -math.inf).logsumexp(dim=-1, keepdim=True)
        student = torch.cat([student, rest_C1 - normalisers_C1], dim=-1)
        teacher = torch.cat([teacher, log1mexp(teacher.logsumexp(dim=-1, keepdim=True))], dim=-1)
    return _between(kind, student, teacher, beta)


def mixture_logprobs(teacher_logprobs_CV: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """log of the weighted mean of the teachers' probabilities; the weights are positive and need not sum to 1."""
    whole = math.fsum(weights)
    mixture_CV: Tensor | None = None
    # One by one: all teachers stacked would be the largest tensor of the step.
    for logprobs_CV, weight in zip(teacher_logprobs_CV, weights, strict=True):
        part_CV = widened(logprobs_CV.detach()) + math.log(weight / whole)
        mixture_CV = part_CV if mixture_CV is None else torch.logaddexp(mixture_CV, part_CV)
    assert mixture_CV is not None, "a mixture of no teachers"
    return mixture_CV


def _between(kind: DivergenceKind, student_CV: Tensor, teacher_CV: Tensor, beta: float) -> Tensor:
    """The divergence of two distributions, both as log-probs."""
    teacher_CV = teacher_CV.clamp(min=LOGPROB_FLOOR)
    match kind:
        case "forward_kl":
            return _kl(teacher_CV, student_CV)
        case "reverse_kl":
            return _kl(student_CV, teacher_CV)
        case "jsd":
            if beta == 0:
                return _kl(teacher_CV, student_CV)
            if beta == 1:
                return _kl(student_CV, teacher_CV)
            mixture_CV = torch.logaddexp(student_CV + math.log1p(-beta), teacher_CV + math.log(beta))
            return beta * _kl(teacher_CV, mixture_CV) + (1 - beta) * _kl(student_CV, mixture_CV)
        case other:
            assert_never(other)


def _kl(left_CV: Tensor, right_CV: Tensor) -> Tensor:
    return (left_CV.exp() * (left_CV - right_CV)).sum(dim=-1)
