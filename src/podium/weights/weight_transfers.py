# SPDX-License-Identifier: Apache-2.0
"""Weight transfers: small, picklable descriptions of how weights travel. A controller handles nothing else.

Both ends split the manifest into the same buckets, so buckets need no headers. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from podium.data.trajectories import Ints, TrajectoryId, TrajectoryIds
from podium.errors import RolloutError
from podium.weights.versions import TensorSpec, WeightVersion

BUCKET_BYTES = 64 * 2**20
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Neighbours in the manifest that travel in one buffer. A tensor larger than the limit has its own bucket."""

    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]  # of each tensor's first byte
    nbytes: int


def plan_buckets(
    manifest: Iterable[TensorSpec], bucket_bytes: int, *, alone_bytes: int | None = None
) -> tuple[Bucket, ...]:
    """As few buckets of at most `bucket_bytes` as the manifest's order allows. Tensors from `alone_bytes` on have their
    own bucket: they are sent without a copy, while small ones are first copied into one buffer."""
    if bucket_bytes < 1:
        raise RolloutError(f"a bucket of {bucket_bytes} bytes holds nothing. Give a positive size, 64 MiB say.")
    alone = bucket_bytes + 1 if alone_bytes is None else alone_bytes
    buckets: list[Bucket] = []
    filling = _Filling()
    for spec in manifest:
        if not filling.fits(spec, bucket_bytes) or spec.nbytes >= alone:
            buckets += filling.taken()
        filling.add(spec)
        if spec.nbytes >= alone:
            buckets += filling.taken()
    return (*buckets, *filling.taken())


def large(bucket_bytes: int) -> int:
    """The size from which a tensor is sent alone: starting a collective then costs little compared with its bytes."""
    return max(1, bucket_bytes // 8)


class _Filling:
    """The bucket that is being filled."""

    def __init__(self) -> None:
        self._specs: list[TensorSpec] = []
        self._offsets: list[int] = []
        self._end = 0

    @property
    def _next(self) -> int:
        return -(-self._end // _ALIGNMENT) * _ALIGNMENT

    def fits(self, spec: TensorSpec, limit: int) -> bool:
        return not self._specs or self._next + spec.nbytes <= limit

    def add(self, spec: TensorSpec) -> None:
        self._offsets.append(self._next)
        self._specs.append(spec)
        self._end = self._offsets[-1] + spec.nbytes

    def taken(self) -> list[Bucket]:
        """Returns the current bucket and begins an empty one."""
        bucket = Bucket(specs=tuple(self._specs), offsets=tuple(self._offsets), nbytes=self._end)
        self._specs, self._offsets, self._end = [], [], 0
        return [bucket] if bucket.specs else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Nothing travels: both ends have the same tensors."""

    version: WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class ByBroadcast:
    """Over a process group that contains both ends. The ends work at the same time, so both get this before the
    transfer."""

    version: WeightVersion
    link: str  # the controller's name for it
    source: int = 0  # rank in the link that has the weights
    bucket_bytes: int = BUCKET_BYTES

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The tensors grouped for sending; large ones are alone."""
        return plan_buckets(self.version.manifest, self.bucket_bytes, alone_bytes=large(self.bucket_bytes))


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightBucket:
    """The bytes of one bucket, as a worker's streamed answer: the store keeps them, the controller has the reference.
    It is a single row whose id is the bucket's number, because workers answer with rows."""

    number: int
    bytes_B: NDArray[np.uint8]

    @property
    def ids(self) -> TrajectoryIds:
        """The bucket's number as an id."""
        return bucket_ids([self.number])

    @property
    def lengths_N(self) -> Ints:
        """The one bucket's length in bytes."""
        return np.array([len(self.bytes_B)], np.int64)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(self.bytes_B.nbytes)

    def take(self, rows: Ints) -> Self:
        """The bucket itself: it is never split."""
        assert rows.tolist() == [0], "a bucket is not cut"
        return self

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """The only part: buckets are never joined."""
        (bucket,) = parts
        return bucket


def bucket_ids(numbers: Iterable[int]) -> TrajectoryIds:
    """The ids by which buckets are requested and answered."""
    return TrajectoryIds.of(TrajectoryId(number, 0) for number in numbers)


class Readable(Protocol):
    """A reference to a stored bucket."""

    def read(self) -> Any:
        """The stored value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByStore:
    """Through the object store. The caller that gathers the sender's answers fills `stored`, one for each bucket."""

    version: WeightVersion
    bucket_bytes: int = BUCKET_BYTES
    stored: tuple[Readable, ...] = ()

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The tensors grouped into stored objects."""
        return plan_buckets(self.version.manifest, self.bucket_bytes)

    @property
    def ids(self) -> TrajectoryIds:
        """The ids requested from the sender's stream."""
        return bucket_ids(range(len(self.buckets)))


WeightTransfer = Shared | ByBroadcast | ByStore
