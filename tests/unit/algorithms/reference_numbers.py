# SPDX-License-Identifier: Apache-2.0
"""Reads data/rl_reference.json: jagged inputs, and what verl 0.9.1's core_algos makes of them in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

REFERENCE: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "rl_reference.json").read_text())
EXPECT: dict[str, Any] = REFERENCE["expect"]

LENGTHS_N = torch.tensor(REFERENCE["lengths"])
GROUP_N = torch.tensor(REFERENCE["group"])
REWARDS_N = torch.tensor(REFERENCE["rewards"])
OFFSETS = torch.cat([torch.zeros(1, dtype=torch.int64), LENGTHS_N.cumsum(0)])
SEQUENCE_T = torch.repeat_interleave(torch.arange(len(LENGTHS_N)), LENGTHS_N)


def flat(rows: list[list[float]]) -> Tensor:
    """The rows of all trajectories, end to end."""
    return torch.tensor([value for row in rows for value in row])


def given(name: str) -> Tensor:
    """An input with one value per token, by its name in the file."""
    return flat(REFERENCE[name])


def expected(name: str, part: str | None = None) -> Tensor:
    """An answer with one value per token, by its name in the file."""
    return flat(EXPECT[name][part] if part else EXPECT[name])
