# SPDX-License-Identifier: Apache-2.0
"""Keys and values of all layers in blocks: allocated once, copied and moved block by block, freed while asleep."""

# L layers · K key-value heads · P positions of a block · E head width · T tokens

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from podium.errors import RolloutError
from podium.models.causal_lm import PackedCausalLM
from podium.models.compiling import uncompiled
from podium.rollout.native.block_manager import BlockCopy
from podium.rollout.native.slots import Arrangement


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """The shapes that one attention layer stores for a token. Keys and values may differ in width."""

    heads: int
    key_width: int
    value_width: int

    @property
    def elements(self) -> int:
        """Numbers that one token takes in this layer."""
        return self.heads * (self.key_width + self.value_width)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerCache:
    """Keys and values of one layer: [blocks, K, P, E]."""

    keys: Tensor
    values: Tensor


class _Shapes:
    """Replaces the cache for one forward, and records the shapes of every attention layer."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.shapes: list[LayerShape] = []

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        self.modules.append(module)
        self.shapes.append(
            LayerShape(heads=key.shape[1], key_width=key.shape[-1], value_width=value.shape[-1]),
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])


@torch.no_grad()
def attention_layers(model: PackedCausalLM, device: torch.device) -> tuple[list[nn.Module], list[LayerShape]]:
    """The attention modules in the order in which they run, with their shapes. Found by running one token through the
    model, so that no architecture's config needs to be interpreted."""
    noted = _Shapes()
    one = torch.zeros(1, 1, dtype=torch.int64, device=device)
    with uncompiled():
        model.hf.get_decoder()(input_ids=one, position_ids=one, use_cache=False, packing=noted)
    if len(noted.modules) != len(model.layers) or len(set(map(id, noted.modules))) != len(noted.modules):
        raise RolloutError(
            f"{type(model.hf).__name__} has layers that do not attend exactly once (linear attention or state space, "
            "for instance); what they remember is not in the native engine's cache, so it would generate wrongly. Use "
            "another engine for it."
        )
    return noted.modules, noted.shapes


def bytes_per_token(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes that one token takes in all layers."""
    return sum(shape.elements for shape in shapes) * dtype.itemsize


class KVCache:
    """All layers in as few tensors as their shapes allow: a block is copied in one or two operations."""

    def __init__(
        self, shapes: Sequence[LayerShape], *, num_blocks: int, block_size: int, storage: Tensor, dtype: torch.dtype
    ) -> None:
        """`storage`: bytes on the device, as many as `bytes_needed` says; the caller keeps ownership."""
        self.num_blocks, self.block_size = num_blocks, block_size
        self._stores: list[Tensor] = []  # [layers of one shape, blocks, K, P, E]
        self.layers: list[LayerCache] = []
        keys: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}
        begin = 0
        for shape in dict.fromkeys(shapes):
            members = [index for index, each in enumerate(shapes) if each == shape]
            for width, tensors in ((shape.key_width, keys), (shape.value_width, values)):
                size = (len(members), num_blocks, shape.heads, block_size, width)
                end = begin + math.prod(size) * dtype.itemsize
                store = storage[begin:end].view(dtype).view(size)
                begin = end
                self._stores.append(store)
                tensors.update(zip(members, store.unbind(0), strict=True))
        self.layers = [LayerCache(keys=keys[index], values=values[index]) for index in range(len(shapes))]

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copies leading positions of blocks into other blocks. No block is read and written in one call."""
        if not copies:
            return
        if self.block_size <= 256:  # whole blocks in one operation; what lies behind the part is overwritten later
            device = self._stores[0].device
            pairs = torch.tensor([(copy.source, copy.target) for copy in copies], device=device)
            for store in self._stores:
                store.index_copy_(1, pairs[:, 1], store.index_select(1, pairs[:, 0]))
            return
        for copy in copies:
            for store in self._stores:
                store[:, copy.target, :, : copy.tokens] = store[:, copy.source, :, : copy.tokens]

    def clear(self, blocks: Sequence[int]) -> None:
        """Zeros blocks that hold NaN: a mask does not hide it from attention."""
        for store in self._stores:
            store[:, list(blocks)] = 0

    def move(self, moves: Arrangement) -> None:
        """Permutes slots."""
        # Slot by slot: this copies contiguous memory five times faster than an index.
        for store in self._stores:
            taken = {target: store[:, source, :, : moves.tokens].clone() for source, target in moves.target_of.items()}
            for target, part in taken.items():
                store[:, target, :, : moves.tokens] = part
