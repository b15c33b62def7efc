# SPDX-License-Identifier: Apache-2.0
"""Optimizer state that stays in host memory and passes through the device piece by piece while it is updated.

The update itself is that of a device that holds everything, so the weights are the same bit for bit. On CUDA the next
piece arrives and the last one leaves while a piece is updated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

PIECE_ELEMENTS = 1 << 25
"""Of one piece: 384 MiB of masters and moments. Three of them are on the device at most: one arriving, one being
updated, one leaving. It is a multiple of what a vector loop takes at once: the elements that such a loop leaves over
may be rounded otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParameterState:
    """All that an update of one parameter, or of a part of it, reads and writes."""

    index: int  # in the optimizer's list
    gradient: Tensor
    master: Tensor
    first: Tensor
    second: Tensor
    copy: Tensor | None  # in the compute dtype, if the master is a separate tensor
    device: torch.device  # that the update runs on

    def pieces(self) -> Iterator[ParameterState]:
        """Flat parts of at most PIECE_ELEMENTS each. An update treats every element by itself."""
        tensors = [self.gradient, self.master, self.first, self.second, *([] if self.copy is None else [self.copy])]
        if not all(each.is_contiguous() for each in tensors):
            yield self
            return
        for start in range(0, self.master.numel(), PIECE_ELEMENTS):
            part = slice(start, start + PIECE_ELEMENTS)
            gradient, master, first, second, *copy = (each.view(-1)[part] for each in tensors)
            yield replace(
                self, gradient=gradient, master=master, first=first, second=second, copy=copy[0] if copy else None
            )


class StateStreams:
    """Brings state to the device and takes it back."""

    def __init__(self) -> None:
        self._arriving: torch.cuda.Stream | None = None
        self._leaving: torch.cuda.Stream | None = None

    def on_device(self, states: Sequence[ParameterState]) -> Iterator[ParameterState]:
        """Every piece on its device, one after the other. What the caller has written is stored when it asks for the
        next one."""
        pieces = (piece for state in states for piece in state.pieces())
        home = next(pieces, None)
        there = None if home is None else self._bring(home)
        while home is not None and there is not None:
            following = next(pieces, None)
            arriving = None if following is None else self._bring(following)
            self._arrived(there)
            yield there
            self._store(there, home)
            home, there = following, arriving

    def wait(self) -> None:
        """Until everything that was updated is in host memory."""
        if self._leaving is not None:
            self._leaving.synchronize()

    def _bring(self, home: ParameterState) -> ParameterState:
        if home.device.type != "cuda":
            return _on(home, home.device)
        if self._arriving is None:
            self._arriving, self._leaving = torch.cuda.Stream(home.device), torch.cuda.Stream(home.device)
        assert self._leaving is not None
        # Not more than a piece that leaves and one that arrives: memory is what this is for.
        self._arriving.wait_stream(self._leaving)
        with torch.cuda.stream(self._arriving):
            return _on(home, home.device)

    def _arrived(self, there: ParameterState) -> None:
        if self._arriving is None:
            return
        current = torch.cuda.current_stream(there.device)
        current.wait_stream(self._arriving)
        for tensor in (there.master, there.first, there.second):
            tensor.record_stream(current)

    def _store(self, there: ParameterState, home: ParameterState) -> None:
        moved = [(there.first, home.first), (there.second, home.second)]
        if home.copy is not None:
            moved.append((there.master, home.master))
        if self._leaving is None:
            for source, target in moved:
                target.copy_(source)
            return
        self._leaving.wait_stream(torch.cuda.current_stream(there.device))
        with torch.cuda.stream(self._leaving):
            for source, target in moved:
                target.copy_(source, non_blocking=True)
                source.record_stream(self._leaving)


def on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, pinned if the tensor is on a GPU."""
    return zeros_on_host(tensor, pinned=tensor.is_cuda).copy_(tensor)


def zeros_on_host(like: Tensor, *, pinned: bool) -> Tensor:
    """Zeros of this shape and dtype in host memory."""
    return torch.zeros_like(like, device="cpu", pin_memory=pinned)


def _on(state: ParameterState, device: torch.device) -> ParameterState:
    """A copy on the device. A parameter that is its own master is there already."""
    first, second = (each.to(device, non_blocking=True, copy=True) for each in (state.first, state.second))
    master = state.master if state.copy is None else state.master.to(device, non_blocking=True, copy=True)
    return replace(state, master=master, first=first, second=second)
