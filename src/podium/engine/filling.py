# SPDX-License-Identifier: Apache-2.0
"""Fills a placed model with values from a run's checkpoint or the base model, until every tensor has values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from podium.engine.checkpoint import CheckpointReader
from podium.engine.parameters import TrainedParameter
from podium.errors import CheckpointError, ModelError
from podium.models.buffers import persistent_buffers
from podium.models.causal_lm import PackedCausalLM
from podium.models.scalar import PackedScalarLM
from podium.models.tensor_shards import Box, TensorShard
from podium.models.weights import WeightSource, base_name, fill, is_adapter


class Filling:
    """Tracks the parameters and persistent buffers whose memory is allocated and whose values are still undefined.
    (Buffers that no checkpoint holds are computed when the model is sharded.)"""

    def __init__(self, model: PackedCausalLM | PackedScalarLM, parameters: Sequence[TrainedParameter]) -> None:
        self._owner = type(model.hf).__name__
        self._parameters = parameters
        self._buffers = persistent_buffers(model.hf)
        named = [name for name, _ in model.hf.named_parameters()]
        assert named == [each.name for each in parameters], "a parameter without an owner would never be filled"
        self._undefined = {
            each.name: TensorShard(name=each.name, local=each.master, box=each.box, shape=each.shape)
            for each in parameters
        } | {
            name: TensorShard(name=name, local=buffer, box=Box.whole(buffer.shape), shape=tuple(buffer.shape))
            for name, buffer in self._buffers.items()
        }

    def undefined(self, *, adapter: bool) -> list[str]:
        """Names (in the model) of tensors without values: those of an adapter, or all others."""
        return [name for name in self._undefined if is_adapter(name) == adapter]

    def piece(self, name: str) -> TensorShard:
        """This rank's part of a tensor, under its name in a checkpoint of the base."""
        return replace(self._undefined[name], name=base_name(name))

    def done(self, name: str) -> None:
        """Marks a tensor whose values the caller has set."""
        del self._undefined[name]

    def from_source(self, names: Sequence[str], source: WeightSource, padded_rows: Mapping[str, int]) -> None:
        """Fills from the base model or an adapter's folder; `padded_rows` as in `fill`."""
        fill([self.piece(name) if not is_adapter(name) else self._undefined[name] for name in names], source,
             padded_rows=padded_rows)  # fmt: skip
        for name in names:
            self.done(name)

    def from_checkpoint(
        self, reader: CheckpointReader, saved: Sequence[TrainedParameter], padded_rows: Mapping[str, int]
    ) -> None:
        """Fills from a checkpoint written by Podium. It must hold every trained parameter. Frozen parameters and
        buffers that it lacks (older checkpoints) stay undefined, and the base fills them. The number of padding rows
        may differ."""
        stored = reader.shapes()
        trained = {each.name for each in saved if not each.is_frozen}
        keys = {each.name: f"weight/{each.name}" for each in saved}
        keys |= {name: f"buffer/{name}" for name in self._buffers}
        pieces = []
        for name, key in keys.items():
            if key not in stored:
                if name in trained:
                    raise CheckpointError(f"{reader.folder} has no {key}: it belongs to another model.")
                continue
            piece = replace(self._undefined[name], name=key)
            if name in padded_rows and stored[key][0] >= padded_rows[name] and stored[key][1:] == piece.shape[1:]:
                piece.local.zero_()
                piece = replace(piece, shape=stored[key])
            pieces.append(piece)
            self.done(name)
        reader.load(pieces)

    def finish(self) -> None:
        """Refreshes the compute copies. Raises an error if some tensor never got values: it would contain uninitialised
        memory."""
        if self._undefined:
            names = ", ".join(list(self._undefined)[:5])
            raise ModelError(
                f"{len(self._undefined)} tensors of {self._owner} were given no values ({names}). This is a mistake in "
                "Podium: report it with the model's config.json."
            )
        for each in self._parameters:
            each.publish()
