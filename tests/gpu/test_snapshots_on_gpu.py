# SPDX-License-Identifier: Apache-2.0
"""Snapshots of tensors on a CUDA device: they have the values of their moment, and nothing else waits for them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from podium.engine.checkpoint import CheckpointReader
from podium.engine.checkpoint_files import Extras, saved_steps
from podium.engine.memory_snapshots import SnapshotWriter
from podium.engine.mesh import Mesh
from podium.models.tensor_shards import Box, TensorShard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
    pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a file system in memory"),
]


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="podium-test-") as folder:
        yield Path(folder)


def test_a_snapshot_has_the_values_of_its_moment_and_delays_nothing(memory: Path) -> None:
    mesh = Mesh(rank=0, world=1, device=torch.device("cuda"), devices=None)
    tensors = {f"layer{number}": torch.randn(2**26, device="cuda") for number in range(8)}  # 2 GiB
    tensors["odd"] = torch.randn(33, 7, device="cuda").T
    pieces = [
        TensorShard(name=name, local=each, box=Box.whole(each.shape), shape=tuple(each.shape))
        for name, each in tensors.items()
    ]
    writer = SnapshotWriter(memory / "policy", mesh, timeout_s=60)
    for step in range(1, 5):  # the first two also create their files
        for each in tensors.values():
            each.add_(1.0)
        expected = {name: each.cpu() for name, each in tensors.items()}
        torch.cuda.synchronize()
        began = time.perf_counter()
        writer.save(step, pieces, Extras(values={"at": step}, arrays={}))
        saved_s = time.perf_counter() - began
        freed = torch.empty(2**20, device="cuda")
        del freed
        torch.cuda.empty_cache()  # frees memory, for which the device waits
        freed_s = time.perf_counter() - began - saved_s
        writer.wait_copied()
        copied_s = time.perf_counter() - began
        for each in tensors.values():
            each.add_(1.0)
        writer.wait()
        (saved,) = [each for each in saved_steps(memory / "policy") if each.step == step]
        reader = CheckpointReader(saved.folder)
        assert all(torch.equal(reader.tensor(name), each) for name, each in expected.items())
        print(f"save {1e3 * saved_s:.1f} ms, free {1e3 * freed_s:.1f} ms, copied after {1e3 * copied_s:.1f} ms")
    assert saved_s + freed_s < 0.5 * copied_s
