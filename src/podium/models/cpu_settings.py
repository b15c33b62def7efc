# SPDX-License-Identifier: Apache-2.0
"""Torch settings of a rank that computes on CPU. Without torch: the controller keeps them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSettings:
    """Torch threads of one rank, and whether oneDNN is on; `measured` describes how they were chosen."""

    threads: int
    onednn: bool
    measured: str = ""

    def apply(self) -> None:
        """Sets torch's threads and oneDNN in this process."""
        import torch

        torch.set_num_threads(self.threads)
        torch.backends.mkldnn.set_flags(self.onednn)

    def __str__(self) -> str:
        return f"{self.threads} thread{'s' if self.threads > 1 else ''} with oneDNN {'on' if self.onednn else 'off'}"
