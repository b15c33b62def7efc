# SPDX-License-Identifier: Apache-2.0
"""Rendezvous addresses of ranks, as plain values that travel between processes. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileMeeting:
    """Ranks of one machine rendezvous over a file: nothing listens."""

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpMeeting:
    """Ranks rendezvous over a store that one of them serves on `host`, an address of its own node."""

    host: str
    port: int


Meeting = FileMeeting | TcpMeeting
