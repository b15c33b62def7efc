# SPDX-License-Identifier: Apache-2.0
"""Inputs of recomputed layers that wait in host memory for the backward pass.

On CUDA each input is copied to pinned memory on a stream of its own while the layer computes, and comes back while the
layer after it is recomputed. On CPU the tensors stay where they are."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class ActivationOffload:
    """Moves what autograd saves inside `saving()`. Backward reads in the reverse order, so with each tensor that it
    takes the one saved before it begins to come back."""

    def __init__(self) -> None:
        self._waiting: list[weakref.ref[_Offloaded]] = []  # the graph owns them
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Tensors that are saved for the backward pass in this context wait in host memory."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    @property
    def num_waiting(self) -> int:
        """Tensors that the backward pass has not taken yet."""
        return sum(1 for each in self._waiting if each() is not None)

    def _pack(self, tensor: Tensor) -> _Offloaded:
        moved = _Offloaded(tensor, self._stream_of(tensor))
        self._waiting.append(weakref.ref(moved))
        return moved

    def _unpack(self, saved: _Offloaded) -> Tensor:
        self._waiting = [each for each in self._waiting if each() is not None and each() is not saved]
        value = saved.take()
        before = self._waiting[-1]() if self._waiting else None
        if before is not None:
            before.begin_return()
        return value

    def _stream_of(self, tensor: Tensor) -> torch.cuda.Stream | None:
        if tensor.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        return self._stream if tensor.is_cuda else None


class _Offloaded:
    """One tensor in host memory, or on its way."""

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream | None) -> None:
        self._stream, self._device = stream, tensor.device
        self._back: Tensor | None = None
        source = tensor.detach()
        if stream is None:
            self._host = source
            return
        self._host = torch.empty_like(source, device="cpu", pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(self._device))  # until it is computed
        with torch.cuda.stream(stream):
            self._host.copy_(source, non_blocking=True)
        source.record_stream(stream)  # its memory is not used again before it is copied

    def begin_return(self) -> None:
        """Copies back to the device without waiting for it."""
        if self._stream is not None and self._back is None:
            with torch.cuda.stream(self._stream):
                self._back = self._host.to(self._device, non_blocking=True)

    def take(self) -> Tensor:
        """The tensor on its device; the current stream waits for it, the host does not."""
        if self._stream is None:
            return self._host
        self.begin_return()
        back, self._back = self._back, None
        assert back is not None
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        back.record_stream(current)
        return back
