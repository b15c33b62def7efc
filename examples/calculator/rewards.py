# SPDX-License-Identifier: Apache-2.0
"""The reward of the calculator task."""

from __future__ import annotations


def correct(answer: str, reference: str) -> float:
    """1 if the model's last answer is the right number, with or without the calculator."""
    return float(answer.strip() == reference)
