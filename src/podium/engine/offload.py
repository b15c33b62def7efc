# SPDX-License-Identifier: Apache-2.0
"""Tensors of the training engine that are offloaded while other roles need the memory, and restored in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from podium.engine.optimizer import AdamW
from podium.engine.sharding import local_tensor
from podium.errors import OffloadError


class OffloadedTensors:
    """Tensors that can move between device and host memory. While they are offloaded their storages are empty. The
    tensor objects and all references to them stay; reading them then is an error of the caller.

    Host copies (pinned with CUDA) are kept and overwritten each time, because pinning costs more than copying.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor has its own storage, as parameters, masters and moments do."""
        held = [local_tensor(tensor) for tensor in tensors]
        if any(tensor.numel() and not tensor.untyped_storage().nbytes() for tensor in held):
            raise OffloadError("one of the tensors to offload is away already. Restore it first.")
        self._tensors = [tensor for tensor in held if tensor.untyped_storage().nbytes()]
        places = [tensor.untyped_storage().data_ptr() for tensor in self._tensors]
        if len(set(places)) != len(places):
            raise OffloadError(
                "two of the tensors to offload share their memory, which can leave the device only once. Name each "
                "storage once."
            )
        self._sizes = [tensor.untyped_storage().nbytes() for tensor in self._tensors]
        self._host: list[Tensor] | None = None
        self._is_away = False

    @property
    def nbytes(self) -> int:
        """Bytes that offloading frees."""
        return sum(self._sizes)

    @torch.no_grad()
    def offload(self) -> int:
        """Moves to host memory; returns the bytes freed on the device."""
        if self._is_away:
            raise OffloadError("these tensors are in host memory already. Restore them before they leave again.")
        if self._host is None:
            self._host = [_host_copy(size, tensor) for size, tensor in zip(self._sizes, self._tensors, strict=True)]
        for tensor, host in zip(self._tensors, self._host, strict=True):
            host.copy_(_bytes(tensor), non_blocking=True)
        self._wait()  # before the memory is reused
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)
        self._is_away = True
        if any(tensor.is_cuda for tensor in self._tensors):
            torch.cuda.empty_cache()  # torch would keep the memory in its pool, and others need it
        return self.nbytes

    @torch.no_grad()
    def restore(self) -> int:
        """Moves back into the same tensors; returns the bytes taken on the device."""
        if not self._is_away or self._host is None:
            raise OffloadError("these tensors are on the device; there is nothing to restore.")
        for tensor, host, size in zip(self._tensors, self._host, self._sizes, strict=True):
            tensor.untyped_storage().resize_(size)
            _bytes(tensor).copy_(host, non_blocking=True)
        self._wait()  # the host copies may be written again
        self._is_away = False
        return self.nbytes

    def _wait(self) -> None:
        for device in {tensor.device for tensor in self._tensors if tensor.is_cuda}:
            torch.cuda.synchronize(device)


def what_can_leave(optimizer: AdamW) -> list[Tensor]:
    """Tensors that generation does not read: moments, separate float32 masters, and gradients. A parameter that is its
    own master stays on the device. With optimizer.offload only gradients are there."""
    tensors: list[Tensor] = []
    if not optimizer.is_offloaded:
        tensors += [*optimizer.first_moments, *optimizer.second_moments]
        tensors += [each.master for each in optimizer.trained if each.has_own_master]
    gradients = [each.parameter.grad for each in optimizer.trained]
    tensors += [local_tensor(gradient) for gradient in gradients if gradient is not None]
    return tensors


def _host_copy(size: int, tensor: Tensor) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=tensor.is_cuda)


def _bytes(tensor: Tensor) -> Tensor:
    """The whole storage as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
