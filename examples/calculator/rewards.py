# SPDX-License-Identifier: Apache-2.0
"""What makes an episode of the calculator task good."""

from __future__ import annotations


def correct(answer: str, reference: str) -> float:
    """1 when the model's last words are the right number, whichever way it came by it."""
    return float(answer.strip() == reference)
