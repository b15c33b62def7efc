# SPDX-License-Identifier: Apache-2.0
"""One CUDA device: its kernel gives the integers of torch's arithmetic on the CPU, at the speed of its memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from podium.engine.offload import OffloadedTensors
from podium.weights import fingerprints
from podium.weights.fingerprints import BLOCK, Piece, fingerprint, partial_fingerprint, piece_fingerprints, unsigned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]

DEVICE = "cuda"


def values(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Every pattern of bits, NaN and infinities too."""
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    bound = 1 << (8 * dtype.itemsize - 1)
    return torch.randint(-bound, bound, (count,), generator=torch.Generator().manual_seed(0)).to(integers).view(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 4095, 4096, 4097, BLOCK, 3 * BLOCK + 77])
@pytest.mark.parametrize("first", [0, 1, BLOCK - 1, 5 * BLOCK + 3, (1 << 33) + 12345])
def test_the_kernel_gives_the_integers_of_the_cpu(dtype: torch.dtype, count: int, first: int) -> None:
    wanted = partial_fingerprint(values(count, dtype), first=first, dtype=dtype)
    found = partial_fingerprint(values(count, dtype).to(DEVICE), first=first, dtype=dtype)
    assert found.is_cuda
    assert unsigned(found.reshape(1)) == unsigned(wanted.reshape(1))


def test_one_launch_gives_the_integers_of_the_cpu_for_pieces_of_any_kind() -> None:
    cases = [
        (1, 0, torch.bfloat16), (4096, 1, torch.bfloat16), (5000, (1 << 33) + 12345, torch.float32),
        (3 * BLOCK + 77, BLOCK - 1, torch.bfloat16), (9000, 5, torch.float32),
    ]  # fmt: skip
    pieces: list[Piece | None] = [
        Piece(values=values(count, dtype), first=first, dtype=dtype) for count, first, dtype in cases
    ]
    pieces.append(Piece(values=torch.randn(BLOCK + 5), first=3, dtype=torch.bfloat16))  # is cast
    pieces.append(Piece(values=values(300, torch.bfloat16)[:0], first=0, dtype=torch.bfloat16))
    pieces.insert(2, None)
    there = [each and replace(each, values=each.values.to(DEVICE)) for each in pieces]
    wanted = piece_fingerprints(pieces, torch.device("cpu")).tolist()
    assert wanted[2] == 0
    for _ in range(2):  # the second time from what is known of the addresses
        assert piece_fingerprints(there, torch.device(DEVICE)).tolist() == wanted
    changed = there[0]
    assert changed is not None
    changed.values.view(torch.int16)[0] ^= 1
    assert piece_fingerprints(there, torch.device(DEVICE)).tolist()[0] != wanted[0]


def test_masters_are_cast_to_the_published_dtype_as_on_the_cpu() -> None:
    masters = torch.randn(BLOCK + 5, generator=torch.Generator().manual_seed(1))
    wanted = fingerprint(masters.bfloat16())
    found = partial_fingerprint(masters.to(DEVICE), first=0, dtype=torch.bfloat16)
    assert unsigned(found.reshape(1)) == [wanted]


def test_without_triton_torchs_own_arithmetic_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = values(2 * BLOCK + 9, torch.bfloat16).to(DEVICE)
    wanted = fingerprint(tensor)
    monkeypatch.setattr(fingerprints, "find_spec", lambda name: None)
    assert fingerprint(tensor) == wanted


def test_scratch_is_bounded_and_the_speed_is_that_of_memory() -> None:
    tensor = torch.zeros(1 << 28, dtype=torch.bfloat16, device=DEVICE)
    fingerprint(tensor)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    partial_fingerprint(tensor, first=0, dtype=torch.bfloat16)
    end.record()
    end.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 32 * 2**20
    speed = tensor.nbytes / begin.elapsed_time(end) / 1e6
    print(f"{speed:.0f} GB/s")
    assert speed > 100


def test_offloaded_tensors_give_their_memory_back() -> None:
    tensors = [torch.randn(1 << 20, device=DEVICE) for _ in range(4)]
    wanted = [tensor.cpu() for tensor in tensors]
    away = OffloadedTensors(tensors)
    before = torch.cuda.memory_allocated()
    assert away.offload() == 4 * 4 * (1 << 20)
    assert before - torch.cuda.memory_allocated() >= away.nbytes
    away.restore()
    assert torch.cuda.memory_allocated() == before
    assert all(torch.equal(tensor.cpu(), each) for tensor, each in zip(tensors, wanted, strict=True))
