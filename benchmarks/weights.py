# SPDX-License-Identifier: Apache-2.0
"""Publishing weights from one process to another: Podium's transports beside a bare broadcast of the same bytes.

    .venv/bin/python benchmarks/weights.py [--layers 6] [--turns 5] [--bucket-mib 16] [--json figures.json]

Two processes over gloo, one run, the ways alternated turn by turn; figures are medians over turns of the slower
process, and ratios are of the bare broadcast's time. The weights have the shapes of Qwen3-0.6B with fewer layers and a
smaller vocabulary. `bare` is one `dist.broadcast` of one contiguous tensor. `broadcast` is the collective transport up
to the receiver's views; `installed` also copies each tensor into the receiver's own, as an engine does; `verified`
computes and compares all fingerprints on top. `store` packs and reads in one process, without a cluster.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from podium.weights.fingerprints import fingerprint
from podium.weights.receiving import Verified
from podium.weights.transports import (
    Delivery,
    received,
    send_by_broadcast,
    send_by_store,
)
from podium.weights.versions import TensorSpec, WeightVersion
from podium.weights.weight_transfers import ByBroadcast, ByStore, Shared, WeightBucket

CPU = torch.device("cpu")
E, FF, HEADS, KV, HEAD = 1024, 3072, 16, 8, 128


class Weights:
    """Tensors in memory, as a learner on one device has them."""

    def __init__(self, layers: int, vocabulary: int, seed: int) -> None:
        torch.manual_seed(seed)
        shapes = {"embed": (vocabulary, E), "norm": (E,)}
        for layer in range(layers):
            shapes |= {
                f"{layer}.q": (HEADS * HEAD, E), f"{layer}.k": (KV * HEAD, E), f"{layer}.v": (KV * HEAD, E),
                f"{layer}.o": (E, HEADS * HEAD), f"{layer}.gate": (FF, E), f"{layer}.up": (FF, E),
                f"{layer}.down": (E, FF), f"{layer}.norm1": (E,), f"{layer}.norm2": (E,), f"{layer}.qn": (HEAD,),
            }  # fmt: skip
        self.by_name = {name: torch.randn(shape) for name, shape in shapes.items()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.by_name.items()

    def version(self) -> WeightVersion:
        specs = [TensorSpec(name=n, shape=tuple(t.shape), dtype="float32") for n, t in self.by_name.items()]
        prints = [fingerprint(tensor) for tensor in self.by_name.values()]
        return WeightVersion(number=1, manifest=tuple(specs), fingerprints=tuple(prints))


class Stored:
    """Stands for a reference into the object store."""

    def __init__(self, bucket: WeightBucket) -> None:
        self._bucket = bucket

    def read(self) -> WeightBucket:
        return self._bucket


class GroupLink:
    """The default process group as a link."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        dist.broadcast(tensor, src=source)
        return tensor


def rank_main(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    mine = Weights(args.layers, args.vocabulary, seed=0 if rank == 0 else 1)
    boxes = [mine.version() if rank == 0 else None]
    dist.broadcast_object_list(boxes, src=0)
    version = boxes[0]
    assert version is not None
    ways = _ways(rank, mine, version, args)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(args.turns + 1):
        for name, way in ways.items():
            dist.barrier()
            began = time.perf_counter()
            way()
            took = torch.tensor([time.perf_counter() - began])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if turn:  # the first one warms up
                times[name].append(took.item())
    if rank == 0:
        figures = {name: statistics.median(each) for name, each in times.items()}
        figures |= _alone(mine, version, args)
        Path(folder, "figures.json").write_text(json.dumps({"bytes": version.nbytes, "seconds": figures}))
    dist.barrier()
    dist.destroy_process_group()


def _ways(rank: int, mine: Weights, version: WeightVersion, args: argparse.Namespace) -> dict[str, Callable[[], None]]:
    flat = torch.zeros(version.nbytes, dtype=torch.uint8)
    transfer = ByBroadcast(version=version, link="all", bucket_bytes=args.bucket_mib * 2**20)
    link = GroupLink()

    def bare() -> None:
        dist.broadcast(flat, src=0)

    def moved(take: Callable[[Delivery], None]) -> Callable[[], None]:
        def way() -> None:
            if rank == 0:
                send_by_broadcast(transfer, mine, link, CPU)
            else:
                arrival = received(transfer, device=CPU, link=lambda _: link)
                assert arrival is not None
                take(arrival)

        return way

    def install(delivery: Delivery) -> None:
        for name, tensor in delivery.tensors():
            mine.by_name[name].copy_(tensor)

    def look(delivery: Delivery) -> None:
        for _ in delivery.tensors():
            pass

    return {
        "bare": bare,
        "broadcast": moved(look),
        "installed": moved(install),
        "verified": moved(lambda delivery: install(Verified(delivery, version))),
    }


def _alone(mine: Weights, version: WeightVersion, args: argparse.Namespace) -> dict[str, float]:
    """Through the store, both ends in this process, verified."""
    by_store = ByStore(version=version, bucket_bytes=args.bucket_mib * 2**20)
    found: dict[str, list[float]] = {"store": []}
    for _ in range(args.turns):
        began = time.perf_counter()
        stored = tuple(Stored(bucket) for bucket in send_by_store(by_store, mine))
        _take(replace(by_store, stored=stored), version)
        found["store"].append(time.perf_counter() - began)
    assert received(Shared(version=version), device=CPU, link=lambda _: GroupLink()) is None
    return {name: statistics.median(each) for name, each in found.items()}


def _take(transfer: ByStore, version: WeightVersion) -> None:
    arrival = received(transfer, device=CPU, link=lambda _: GroupLink())
    assert arrival is not None
    for _ in Verified(arrival, version).tensors():
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=16)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (args, folder), nprocs=2)
        found = json.loads(Path(folder, "figures.json").read_text())
    seconds, size = found["seconds"], found["bytes"]
    print(f"{size / 1e6:,.0f} MB of float32 weights, buckets of {args.bucket_mib} MiB, {os.cpu_count()} cores, "
          f"{platform.machine()}, torch {torch.__version__}, median of {args.turns} turns\n")  # fmt: skip
    print("| way | bytes moved | ms | GB/s | of the bare broadcast |\n|---|---|---|---|---|")
    print("| shared | 0 | 0 | - | - |")
    for name, took in seconds.items():
        ratio = f"{seconds['bare'] / took:.0%}" if name != "store" else "-"
        print(f"| {name} | {size:,} | {took * 1e3:,.0f} | {size / took / 1e9:.2f} | {ratio} |")
    ratios = {name: seconds["bare"] / seconds[name] for name in ("broadcast", "installed", "verified")}
    result = {**found, "ratios_to_bare": ratios, "shared_bytes": 0, "target": 0.6, "bucket_mib": args.bucket_mib}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main()
