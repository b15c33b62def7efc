# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation: the teachers' opinion of the student's own samples, as the advantage of each token."""

# T tokens · K teachers

from __future__ import annotations

from torch import Tensor


def several_teachers_advantages(teacher_logprobs_KT: Tensor, student_logprobs_T: Tensor, weights_K: Tensor) -> Tensor:
    """The weighted sum of each teacher's advantages.

    With weights that sum to 1 the student is drawn to the teachers' weighted geometric mean; a sum above or below 1
    scales the whole, as the weight of a single teacher does.
    """
    differences_KT = teacher_logprobs_KT.detach().float() - student_logprobs_T.detach().float()
    return (weights_K.detach().float().unsqueeze(-1) * differences_KT).sum(dim=0)
