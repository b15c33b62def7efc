# SPDX-License-Identifier: Apache-2.0
"""The reward of the arithmetic task."""

from __future__ import annotations


def exact_answer(answer: str, reference: str, row: object = None) -> float:
    """1 if the number at the end is right, else 0: 85 and 70+15=85 are both right.

    `row` is unused. Evaluations of programs with fixed data pass it; rewards pass it only where a function has it.
    """
    return float(answer.rpartition("=")[2].strip() == reference)
