# SPDX-License-Identifier: Apache-2.0
"""How published weights travel: one interface, and a class for every way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor


class Delivery(Protocol):
    """The receiving end of a transport: whole tensors, one after the other, never all at once."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value of every tensor of the manifest, in its order, in the published dtype, without padding rows.
        A tensor is the caller's to read until the next one is asked for; it may share a buffer with it."""
