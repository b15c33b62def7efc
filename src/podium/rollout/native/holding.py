# SPDX-License-Identifier: Apache-2.0
"""Device memory that is held, given back while the engine sleeps, and taken again."""

from __future__ import annotations

import os

import torch
from torch import Tensor


def free_bytes(device: torch.device) -> int:
    """What could still be allocated on the device: unused memory of torch's own pool counts."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        pooled = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + pooled
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class DeviceHolding:
    """Some bytes on a device. They are zero at first: a mask hides what was never written from attention, but not if it
    is no number."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.bytes: Tensor = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def release(self) -> int:
        """Gives the memory back; the tensor keeps its shape and must not be read."""
        self.bytes.untyped_storage().resize_(0)
        return self.nbytes

    def restore(self) -> int:
        """Takes it again."""
        self.bytes.untyped_storage().resize_(self.nbytes)
        self.bytes.zero_()
        return self.nbytes

    def close(self) -> None:
        self.bytes.untyped_storage().resize_(0)
