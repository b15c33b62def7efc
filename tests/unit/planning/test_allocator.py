# SPDX-License-Identifier: Apache-2.0
"""What torch's caching allocator keeps, by hand-placed blocks; and what processes of recorded runs held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.model_shapes import config_folder, dry_recipe
from podium.planning.allocator import MIB, CachingAllocator, freed_logits, state_rounding
from podium.planning.devices import GIB, device_named
from podium.planning.memory import memory_lines, memory_of
from podium.planning.model_shape import shape_of

H200 = device_named("H200")
QWEN_06: dict[str, Any] = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151_936, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
QWEN_17 = {**QWEN_06, "hidden_size": 2048, "intermediate_size": 6144}


def test_segments_of_three_sizes() -> None:
    """100 bytes and 1 MiB share 2 MiB; 8 MiB begin a segment of 20 MiB, and the rest of the second one is 12 MiB. It
    serves the first 11 MiB, and is not split for 1 MiB; the next 11 MiB get a segment of 12."""
    allocator = CachingAllocator()
    sizes = (100, MIB, MIB, *[8 * MIB] * 3, 11 * MIB, 11 * MIB)
    for size, reserved in zip(sizes, (2, 2, 4, 24, 24, 44, 44, 56), strict=True):
        allocator.take(size)
        assert allocator.reserved == reserved * MIB
    assert allocator.live == allocator.most_live == 512 + (2 + 24 + 12 + 12) * MIB


def test_free_neighbours_serve_what_neither_could() -> None:
    allocator = CachingAllocator()
    first, second, third = (allocator.take(6 * MIB) for _ in range(3))
    allocator.give(first)
    allocator.give(third)  # joins the 2 MiB behind it
    allocator.take(8 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.give(second)  # joins the first
    allocator.take(12 * MIB)
    assert (allocator.reserved, allocator.live) == (20 * MIB, 20 * MIB)


def test_the_smallest_block_that_is_large_enough_is_split() -> None:
    allocator = CachingAllocator()
    large, small = allocator.take(40 * MIB), allocator.take(20 * MIB)
    allocator.give(large)
    allocator.give(small)
    allocator.take(18 * MIB)
    allocator.take(40 * MIB)  # the larger one is whole
    assert allocator.reserved == 60 * MIB


def test_the_third_logits_find_no_segment() -> None:
    """4,096 rows make 64 MiB of logits and 32 of gradients, each in segments of their own. The second gradient splits
    the segment of the first logits while the second live, so that the third take 64 MiB more; the fourth need none."""
    kept = [freed_logits(tokens, 4096, itemsize=2) // MIB for tokens in (4096, 8192, 12_288, 16_384, 65_536)]
    assert kept == [0, 0, 64, 64, 64]
    assert freed_logits(16_384, 4096, itemsize=4) == 0  # gradients as large as logits take their places


def test_state_of_a_shape_by_hand(tmp_path: Path) -> None:
    """Matrices of 8 MiB in float32 leave 4 of 20 MiB; nothing that comes later is so small."""
    shape = shape_of(dry_recipe(config_folder(tmp_path / "m", QWEN_17), 1, None).model)
    assert state_rounding(shape, 2) == pytest.approx(348 * MIB, rel=0.02)
    assert 0 < state_rounding(shape, 2, offloaded=True) < state_rounding(shape, 2)


@pytest.mark.parametrize(
    ("config", "held", "allocated"), [(QWEN_06, (37.03, 36.97), 33.70), (QWEN_17, (64.14, 64.14), 60.47)]
)
def test_what_processes_held_on_an_h200(
    config: dict[str, Any], held: tuple[float, float], allocated: float, tmp_path: Path
) -> None:
    """SFT of 16,384 tokens a step: both hosts of docs/planning.md. No value was chosen by these figures."""
    recipe = dry_recipe(
        config_folder(tmp_path / "m", config), 1, None, tokens_per_step=16_384, micro_batch_tokens=16_384,
        data={"train": "rows.jsonl", "max_length": 4097},
    )  # fmt: skip
    plan = memory_of(recipe, H200)
    for each in held:
        assert plan.held_bytes / GIB == pytest.approx(each, rel=0.015)
    assert (plan.peak.num_bytes - plan.peak.of("CUDA context")) / GIB == pytest.approx(allocated, rel=0.015)
    (line,) = memory_lines(recipe, H200)
    assert "with what torch's allocator keeps: freed logits 2.3 GiB, rounded segments" in line
    assert plan.share == plan.peak.num_bytes / H200.memory_bytes  # what is kept does not refuse a run


def test_a_cpu_keeps_nothing(tmp_path: Path) -> None:
    recipe = dry_recipe(config_folder(tmp_path / "m", QWEN_06), 1, None)
    plan = memory_of(recipe, device_named("CPU"))
    assert plan.held_bytes == plan.peak.num_bytes
    assert "keeps" not in "".join(plan.lines())
