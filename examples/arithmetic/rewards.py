# SPDX-License-Identifier: Apache-2.0
"""What makes an answer to a sum good."""

from __future__ import annotations


def exact_answer(answer: str, reference: str, row: object = None) -> float:
    """1 when the number at the end is right, else 0. How it was come by does not count: 85 and 70+15=85 are both right.

    `row` is not looked at; evaluations of fixed-data programs give it, rewards only where a function asks for it.
    """
    return float(answer.rpartition("=")[2].strip() == reference)
