# SPDX-License-Identifier: Apache-2.0
"""Chooses the engine's sizes (blocks, rows and the longest sequence) from the recipe and the free memory. Pure and
torch-free."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from podium.errors import RolloutError
from podium.recipe import EngineSection

GIB = 1 << 30
# Floats of the widest vector of any CPU (AVX-512): attention reads keys in multiples of it.
_KEY_MULTIPLE = 16
# Keys of one product in torch's fused kernel on CPU, which reads longer sequences in stretches of so many.
KEY_STRETCH = 512
# On x86 MKL cuts a product over more keys into parts, at places that depend on their number: there are whole stretches
# then, whose parts are always the same. With AVX2 it begins at 192 keys, with AVX-512 above 256.
_UNCUT_KEYS = 192
_HAS_MKL = platform.machine() in ("x86_64", "AMD64")
_CUDA_SHARE = 0.8
_CPU_GIB = 2.0
_CUDA_PAGE = 64
# On CPU, blocks of this size replace slots if slots of the longest sequence would be too few.
_CPU_PAGE = 256
_FEWEST_SLOTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The engine's sizes."""

    max_length: int
    max_running: int
    prefill_tokens: int
    block_size: int
    num_blocks: int
    slots: bool  # a block holds a whole sequence

    @property
    def cache_tokens(self) -> int:
        """Tokens that the whole cache holds."""
        return self.num_blocks * self.block_size

    def sequences_of(self, length: int) -> int:
        """How many sequences of this length the whole cache holds."""
        return self.num_blocks // -(-min(length, self.max_length) // self.block_size)


def choose_sizes(section: EngineSection, *, context: int, token_bytes: int, cuda: bool, free_bytes: int) -> Sizes:
    """`context`: longest sequence of the model; `token_bytes`: keys and values of one token in all layers."""
    max_length = min(section.max_length or context, context)
    running = section.running_on("cuda" if cuda else "cpu")
    budget = _budget(section, cuda=cuda, free_bytes=free_bytes)
    block = section.block_size or (_CUDA_PAGE if cuda else max_length)
    slots = not cuda and block >= max_length
    if slots and section.block_size is None and budget // (block * token_bytes) < min(_FEWEST_SLOTS, running):
        block, slots = min(_CPU_PAGE, max_length), False
    # The kernel reads tiles that lie in one block each.
    block = max(16, 1 << (block - 1).bit_length()) if cuda else min(block, max_length)
    if slots:
        block = padded_keys(block)
    num_blocks = budget // (block * token_bytes)
    if slots:
        running = min(running, num_blocks)
        num_blocks = min(num_blocks, 2 * running)  # as many again to remember finished ones
    else:
        most = -(-max_length // block) * running
        num_blocks = min(num_blocks - 1, 2 * most)  # one is the engine's own, for idle lanes
    if num_blocks < 1:
        raise RolloutError(
            f"rollout.memory_gib: {budget / GIB:.3g} GiB do not hold a single page of the cache "
            f"({block} tokens of {token_bytes} bytes each). Raise rollout.memory_gib, or lower rollout.max_length."
        )
    return Sizes(
        max_length=max_length,
        max_running=running,
        prefill_tokens=section.prefill_tokens or (8192 if cuda else 1024),
        block_size=block,
        num_blocks=num_blocks,
        slots=slots,
    )


def padded_keys(keys: int, *, has_mkl: bool = _HAS_MKL) -> int:
    """So many keys and more that attention on CPU reads, the surplus ones masked, for a sequence of this length. A
    token's result then has the same bits wherever in a sequence, and beside whatever lengths, it is computed."""
    multiple = KEY_STRETCH if has_mkl and keys > _UNCUT_KEYS else _KEY_MULTIPLE
    return -(-keys // multiple) * multiple


def _budget(section: EngineSection, *, cuda: bool, free_bytes: int) -> int:
    if section.memory_gib is None:
        return int(_CUDA_SHARE * free_bytes) if cuda else min(int(_CPU_GIB * GIB), free_bytes // 2)
    wanted_bytes = int(section.memory_gib * GIB)
    if wanted_bytes > free_bytes:
        raise RolloutError(
            f"rollout.memory_gib: {section.memory_gib:g} GiB are asked for and {free_bytes / GIB:.2f} GiB are free. "
            "Lower it, or leave it out for a share of what is free."
        )
    return wanted_bytes
