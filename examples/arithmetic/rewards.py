# SPDX-License-Identifier: Apache-2.0
"""What makes an answer to an arithmetic question good."""

from __future__ import annotations


def exact_answer(answer: str, reference: str, row: object = None) -> float:
    """1 when the right number stands at the end, behind the last `=` where the model worked it out; else 0."""
    return float(answer.rpartition("=")[2].strip() == reference)
