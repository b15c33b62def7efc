# SPDX-License-Identifier: Apache-2.0
"""Transports of published weights: one interface, and a class for each transport.

A sender takes a transfer and a source of tensors (PublishedWeights); a receiver takes the same transfer and delivers
the same tensors. Weights of a sharded model are gathered while they are sent, so all its ranks take part and one of
them sends the bytes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.errors import RolloutError, WeightMismatchError
from podium.progress import mark_progress
from podium.weights.versions import TensorSpec
from podium.weights.weight_transfers import Bucket, ByBroadcast, ByStore, Shared, WeightBucket, WeightTransfer


class Delivery(Protocol):
    """The receiving end of a transport: whole tensors, one after the other, never all at once."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value of every tensor of the manifest, in its order, in the published dtype, without padding rows. A
        tensor is valid only until the next one is requested, because they may share a buffer."""


class Arrival(Delivery, Protocol):
    """A delivery from another process that counts the bytes received."""

    @property
    def moved_bytes(self) -> int:
        """Bytes received so far."""


class TransferLink(Protocol):
    """A process group for transports, such as a link between pools of workers."""

    @property
    def rank(self) -> int:
        """This process's rank in the link."""

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Fills `tensor` on all ranks with that of rank `source`."""


def received(transfer: WeightTransfer, *, device: torch.device, link: Callable[[str], TransferLink]) -> Arrival | None:
    """The receiving end of a transfer; None if nothing travels. `link` finds a link by its name."""
    match transfer:
        case Shared():
            return None
        case ByBroadcast():
            return BroadcastArrival(transfer, link(transfer.link), device)
        case ByStore():
            return StoreArrival(transfer, device)
        case other:
            assert_never(other)


def send_by_broadcast(transfer: ByBroadcast, weights: Delivery, link: TransferLink, device: torch.device) -> int:
    """Returns the bytes that the source put on the link. The sender's other ranks only help to gather. Collective over
    the link."""
    is_source, moved = link.rank == transfer.source, 0
    staging = _Staging(transfer, device)
    for bucket, tensors in _by_bucket(transfer.buckets, weights):
        if is_source and len(bucket.specs) == 1:
            buffer = _bytes_of(next(tensors))  # as it is: large ones are not copied
        elif is_source:
            buffer = staging.buffer(bucket)
            _pack(bucket, tensors, buffer)
        else:
            buffer = staging.buffer(bucket)
            _exhaust(tensors)  # the source waits for this rank's shards before it sends
        _broadcast(buffer, transfer, link)
        moved += bucket.nbytes if is_source else 0
    return moved


class BroadcastArrival:
    """Tensors received over a link. A rank that stops reading early still takes part to the end, because others wait
    for it."""

    def __init__(self, transfer: ByBroadcast, link: TransferLink, device: torch.device) -> None:
        self._transfer, self._link, self._device = transfer, link, device
        self.moved_bytes = 0

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Receives bucket after bucket and yields views of its tensors."""
        staging, buckets = _Staging(self._transfer, self._device), iter(self._transfer.buckets)
        try:
            for bucket in buckets:
                buffer = _broadcast(staging.buffer(bucket), self._transfer, self._link)
                self.moved_bytes += bucket.nbytes
                yield from _views(bucket, buffer)
        except GeneratorExit:
            for bucket in buckets:
                _broadcast(staging.buffer(bucket), self._transfer, self._link)
            raise


def send_by_store(transfer: ByStore, weights: Delivery, *, is_sender: bool = True) -> Iterator[WeightBucket]:
    """Yields buckets for a worker to stream as its answer. The sender's other ranks iterate too, but yield nothing."""
    for number, (bucket, tensors) in enumerate(_by_bucket(transfer.buckets, weights)):
        if is_sender:
            buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
            _pack(bucket, tensors, buffer)
            yield WeightBucket(number=number, bytes_B=buffer.numpy())


class StoreArrival:
    """Tensors in the object store, read in place."""

    def __init__(self, transfer: ByStore, device: torch.device) -> None:
        self._transfer, self._device = transfer, device
        self.moved_bytes = 0

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Reads bucket after bucket from the object store."""
        buckets, stored = self._transfer.buckets, self._transfer.stored
        if len(stored) != len(buckets):
            raise RolloutError(
                f"weights of version {self._transfer.version.number} are {len(buckets)} stored buckets, and the "
                f"transfer refers to {len(stored)}. Gather all answers of the sender before the transfer is handed on."
            )
        for number, (bucket, reference) in enumerate(zip(buckets, stored, strict=True)):
            held: WeightBucket = reference.read()
            if held.number != number or held.nbytes != bucket.nbytes:
                raise WeightMismatchError(
                    f"bucket {number} of version {self._transfer.version.number} has {bucket.nbytes} bytes, and the "
                    f"object stored for it is bucket {held.number} with {held.nbytes}. References of another version "
                    "or in another order were put into the transfer: publish again."
                )
            self.moved_bytes += held.nbytes
            mark_progress()
            for name, tensor in _views(bucket, _read_only(held.bytes_B)):
                yield name, tensor.to(self._device)


def _by_bucket(buckets: Sequence[Bucket], weights: Delivery) -> Iterator[tuple[Bucket, Iterator[Tensor]]]:
    """Each bucket with its tensors, which are produced on demand: each is invalid when the next one comes."""
    arriving = weights.tensors()
    for bucket in buckets:
        tensors = _of_bucket(bucket, arriving)
        yield bucket, tensors
        _exhaust(tensors)  # ranks that do not keep the tensors still take part in the gathering


def _exhaust(tensors: Iterator[Tensor]) -> None:
    for _ in tensors:
        pass


def _of_bucket(bucket: Bucket, arriving: Iterator[tuple[str, Tensor]]) -> Iterator[Tensor]:
    for spec in bucket.specs:
        name, tensor = next(arriving, ("nothing", torch.empty(0)))
        if (name, tuple(tensor.shape), tensor.dtype) != (spec.name, spec.shape, torch_dtype(spec.dtype)):
            raise WeightMismatchError(
                f"the version's manifest says {spec} and the model has {name} {list(tensor.shape)} {tensor.dtype} in "
                "its place: the version was described from another model. Describe this one, and publish that."
            )
        yield tensor


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of this name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _view(buffer: Tensor, spec: TensorSpec, offset: int) -> Tensor:
    return buffer[offset : offset + spec.nbytes].view(torch_dtype(spec.dtype)).view(spec.shape)


def _views(bucket: Bucket, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    for spec, offset in zip(bucket.specs, bucket.offsets, strict=True):
        yield spec.name, _view(buffer, spec, offset)


def _pack(bucket: Bucket, tensors: Iterator[Tensor], buffer: Tensor) -> None:
    for spec, offset, tensor in zip(bucket.specs, bucket.offsets, tensors, strict=True):
        _view(buffer, spec, offset).copy_(tensor)


class _Staging:
    """One buffer for all buckets of a transfer; a tensor larger than a bucket gets a temporary one."""

    def __init__(self, transfer: ByBroadcast, device: torch.device) -> None:
        sizes = [bucket.nbytes for bucket in transfer.buckets if bucket.nbytes <= transfer.bucket_bytes]
        self._device = device
        self._shared = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=device)

    def buffer(self, bucket: Bucket) -> Tensor:
        if bucket.nbytes > len(self._shared):
            return torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device)
        return self._shared[: bucket.nbytes]


def _broadcast(buffer: Tensor, transfer: ByBroadcast, link: TransferLink) -> Tensor:
    for part in buffer.split(transfer.bucket_bytes):
        link.broadcast(part, transfer.source)
        mark_progress()
    return buffer


def _read_only(array: NDArray[np.uint8]) -> Tensor:
    """A tensor on the same memory. Torch warns that it is writable; no receiver writes to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(array)
