# SPDX-License-Identifier: Apache-2.0
"""Every transport delivers what was sent, in order, bit for bit; what arrives wrong is refused by name."""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from podium.cluster.objects import InlineStored
from podium.errors import RolloutError, WeightMismatchError
from podium.weights.fingerprints import fingerprint
from podium.weights.receiving import Verified
from podium.weights.transports import (
    Delivery,
    received,
    send_by_broadcast,
    send_by_store,
)
from podium.weights.versions import TensorSpec, WeightVersion
from podium.weights.weight_transfers import ByBroadcast, ByStore, Shared, WeightBucket, plan_buckets

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Held:
    """Weights in memory, handed out through one buffer: a reader that keeps a tensor too long sees it change."""

    tensors_by_name: dict[str, Tensor]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.tensors_by_name.items():
            lent = tensor.clone()
            yield name, lent
            lent.fill_(77)

    def version(self, number: int = 1) -> WeightVersion:
        specs = tuple(
            TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self.tensors_by_name.items()
        )
        prints = tuple(fingerprint(tensor) for tensor in self.tensors_by_name.values())
        return WeightVersion(number=number, manifest=specs, fingerprints=prints)


def some_weights() -> Held:
    draw = torch.Generator().manual_seed(0)
    return Held(
        {
            "odd": torch.randn(3, generator=draw).bfloat16(),
            "matrix": torch.randn(5, 7, generator=draw),
            "scalar": torch.tensor(4.0),
            "empty": torch.zeros(0, 3),
            "large": torch.randn(40, 30, generator=draw),
            "count": torch.arange(9),
            "cube": torch.randn(2, 3, 4, generator=draw).bfloat16(),
        }
    )


class MemoryLink:
    """A link between threads of this process: each receiver has a queue of its own."""

    def __init__(self, rank: int, queues: dict[int, queue.Queue[Tensor]], source: int) -> None:
        self.rank, self._queues, self._source = rank, queues, source
        self.sizes: list[int] = []

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        assert source == self._source
        self.sizes.append(tensor.numel())
        if self.rank == source:
            for each in self._queues.values():
                each.put(tensor.clone())
        else:
            tensor.copy_(self._queues[self.rank].get(timeout=20))
        return tensor


def links(world: int, source: int) -> list[MemoryLink]:
    queues: dict[int, queue.Queue[Tensor]] = {rank: queue.Queue() for rank in range(world) if rank != source}
    return [MemoryLink(rank, queues, source) for rank in range(world)]


def kept(delivery: Delivery) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in delivery.tensors()}


def same(found: dict[str, Tensor], wanted: Held) -> bool:
    return list(found) == list(wanted.tensors_by_name) and all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
        for name, tensor in wanted.tensors_by_name.items()
    )


@given(
    sizes=st.lists(st.integers(0, 300), max_size=12),
    limit=st.integers(1, 400),
    alone=st.none() | st.integers(1, 300),
)
def test_buckets_hold_every_tensor_once_in_order_within_the_limit(
    sizes: list[int], limit: int, alone: int | None
) -> None:
    manifest = [TensorSpec(name=str(at), shape=(size,), dtype="uint8") for at, size in enumerate(sizes)]
    buckets = plan_buckets(manifest, limit, alone_bytes=alone)
    assert [spec for bucket in buckets for spec in bucket.specs] == manifest
    for bucket in buckets:
        assert bucket.nbytes <= limit or len(bucket.specs) == 1
        assert len(bucket.specs) == 1 or alone is None or max(spec.nbytes for spec in bucket.specs) < alone
        end = 0
        for spec, offset in zip(bucket.specs, bucket.offsets, strict=True):
            assert offset >= end
            assert offset % 16 == 0
            end = offset + spec.nbytes
        assert end == bucket.nbytes


def test_a_bucket_of_no_bytes_is_refused() -> None:
    with pytest.raises(RolloutError, match=r"bucket .*\b0 bytes"):
        plan_buckets([], 0)


@pytest.mark.parametrize("bucket_bytes", [64, 200, 10**6])
def test_a_broadcast_reaches_receivers_while_other_senders_only_listen(bucket_bytes: int) -> None:
    weights = some_weights()
    transfer = ByBroadcast(version=weights.version(), link="weights", source=1, bucket_bytes=bucket_bytes)
    ends = links(3, source=1)
    moved: dict[int, int] = {}

    def send(rank: int) -> None:
        moved[rank] = send_by_broadcast(transfer, weights, ends[rank], CPU)

    threads = [threading.Thread(target=send, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    arrival = received(transfer, device=CPU, link={"weights": ends[2]}.__getitem__)
    assert arrival is not None
    assert same(kept(Verified(arrival, transfer.version)), weights)
    for thread in threads:
        thread.join(20)
    total = sum(bucket.nbytes for bucket in transfer.buckets)
    assert moved == {0: 0, 1: total}
    assert arrival.moved_bytes == total
    assert total >= transfer.version.nbytes
    assert max(ends[2].sizes) <= bucket_bytes  # the large tensor came in several


def test_who_stops_early_takes_part_to_the_end() -> None:
    weights = some_weights()
    transfer = ByBroadcast(version=weights.version(), link="weights", bucket_bytes=64)
    sender, receiver = links(2, source=0)
    send_by_broadcast(transfer, weights, sender, CPU)
    arrival = received(transfer, device=CPU, link=lambda _: receiver)
    assert arrival is not None
    for name, _ in Verified(arrival, transfer.version).tensors():
        if name == "matrix":
            break
    assert sum(receiver.sizes) == sum(sender.sizes)


@pytest.mark.parametrize("bucket_bytes", [64, 10**6])
def test_the_object_store_is_read_where_it_lies(bucket_bytes: int) -> None:
    weights = some_weights()
    transfer = ByStore(version=weights.version(), bucket_bytes=bucket_bytes)
    assert list(send_by_store(transfer, weights, is_sender=False)) == []
    buckets = list(send_by_store(transfer, weights))
    assert [id for bucket in buckets for id in bucket.ids] == list(transfer.ids)
    for bucket in buckets:
        bucket.bytes_B.flags.writeable = False  # as it comes out of the store
    filled = replace(transfer, stored=tuple(InlineStored(bucket) for bucket in buckets))
    arrival = received(filled, device=CPU, link=_no_link)
    assert arrival is not None
    assert same(kept(Verified(arrival, transfer.version)), weights)
    assert arrival.moved_bytes == sum(bucket.nbytes for bucket in buckets)
    again = received(filled, device=CPU, link=_no_link)
    assert again is not None
    first = next(tensor for name, tensor in again.tensors() if name == "matrix")
    inside = [bucket.bytes_B for bucket in buckets if np.shares_memory(bucket.bytes_B, first.numpy())]
    assert len(inside) == 1


def test_references_that_are_missing_or_of_other_buckets_are_refused() -> None:
    weights = some_weights()
    transfer = ByStore(version=weights.version(), bucket_bytes=64)
    buckets = [InlineStored(bucket) for bucket in send_by_store(transfer, weights)]
    with pytest.raises(RolloutError, match=rf"version 1\b.*\b{len(buckets)} .*\b1\b"):
        kept(_arrival(replace(transfer, stored=tuple(buckets[:1]))))
    with pytest.raises(WeightMismatchError, match=r"bucket 0 .*\bbucket \d"):
        kept(_arrival(replace(transfer, stored=tuple(reversed(buckets)))))


def test_shared_weights_do_not_move() -> None:
    assert received(Shared(version=some_weights().version()), device=CPU, link=_no_link) is None


def test_transfers_can_be_sent_through_a_controller() -> None:
    version = some_weights().version()
    for transfer in (
        Shared(version=version),
        ByBroadcast(version=version, link="w"),
        ByStore(version=version),
    ):
        assert pickle.loads(pickle.dumps(transfer)) == transfer
    bucket = pickle.loads(pickle.dumps(WeightBucket(number=3, bytes_B=np.arange(4, dtype=np.uint8))))
    assert (bucket.number, bucket.nbytes, bucket.bytes_B.tolist()) == (3, 4, [0, 1, 2, 3])


def test_a_model_that_is_not_the_versions_is_not_sent() -> None:
    weights = some_weights()
    version = weights.version()
    short = Held({"odd": weights.tensors_by_name["odd"]})
    with pytest.raises(WeightMismatchError, match=r"matrix \[5, 7\] float32 .*\bnothing\b"):
        list(send_by_store(ByStore(version=version), short))
    other = Held({**weights.tensors_by_name, "matrix": torch.zeros(7, 5)})
    with pytest.raises(WeightMismatchError, match=r"matrix \[5, 7\] float32 .*matrix \[7, 5\] torch\.float32"):
        list(send_by_store(ByStore(version=version), other))


def test_tensors_that_differ_are_named_after_all_have_come() -> None:
    weights = some_weights()
    version = weights.version(5)
    wrong = {name: tensor.clone() for name, tensor in weights.tensors_by_name.items()}
    wrong["matrix"][4, 6] = -wrong["matrix"][4, 6]
    wrong["count"][[0, 1]] = wrong["count"][[1, 0]]
    delivery = Verified(Held(wrong), version).tensors()
    assert [next(delivery)[0] for _ in wrong] == list(wrong)
    said = r"\b2 of 7 .*version 5 .*: matrix, count\."
    with pytest.raises(WeightMismatchError, match=said):
        next(delivery)


def test_a_delivery_of_another_model_is_refused_at_the_first_tensor_that_does_not_fit() -> None:
    weights = some_weights()
    version, all_of = weights.version(5), weights.tensors_by_name
    cases = {
        r"large \[40, 30\] float32 .*\[30, 40\] float32": {**all_of, "large": torch.zeros(30, 40)},
        r"odd \[3\] bfloat16 .*\[3\] float32": {**all_of, "odd": torch.zeros(3)},
        r"\bmatrix .*\bodd\b": {name: all_of[name] for name in list(all_of)[1:]},
        r"\bcube\b": {name: all_of[name] for name in list(all_of)[:-1]},
        r"\bsurplus\b": {**all_of, "surplus": torch.zeros(1)},
    }
    for said, wrong in cases.items():
        with pytest.raises(WeightMismatchError, match=rf"version 5 .*{said}"):
            kept(Verified(Held(wrong), version))


def _no_link(name: str) -> MemoryLink:
    raise AssertionError(name)


def _arrival(transfer: ByStore) -> Delivery:
    arrival = received(transfer, device=CPU, link=_no_link)
    assert arrival is not None
    return arrival
