# SPDX-License-Identifier: Apache-2.0
"""The interface through which the loaders of all ranks exchange what they have tokenized. Torch-free: `spmd` has the
implementation over a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Exchange(Protocol):
    """One rank's end. Every rank makes the same calls of `all_gather` in the same order."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def world(self) -> int:
        """Number of ranks."""

    def all_gather(self, payload: bytes, is_stopped: Callable[[], bool]) -> list[bytes] | None:
        """The payloads of all ranks, in rank order; None if stopped while waiting. Raises the error of a rank that
        failed, and an error if a rank is gone or does not come in time."""

    def fail(self, error: BaseException) -> None:
        """Says that this rank takes no further part: the others raise `error`. Does not wait."""
