# SPDX-License-Identifier: Apache-2.0
"""The content of a training checkpoint, and how to resume from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from podium.engine.checkpoint import CheckpointReader
from podium.engine.checkpoint_files import Extras
from podium.engine.parameters import TrainedParameter
from podium.engine.sharding import reshard
from podium.engine.train_step import TrainEngine
from podium.models.buffers import persistent_buffers
from podium.models.tensor_shards import Box, TensorShard


def checkpoint_shards(engine: TrainEngine) -> list[TensorShard]:
    """Masters and moments of this rank, as parts of whole tensors. Also weights that are not trained: parameters that
    the architecture freezes, and persistent buffers. (The base of an adapter is not included: it is in the model's own
    folder.)"""
    return weight_pieces(engine.optimizer.trained) + _moment_pieces(engine) + [
        *weight_pieces(engine.frozen), *buffer_pieces(engine.model.hf)
    ]  # fmt: skip


def weight_pieces(parameters: Iterable[TrainedParameter]) -> list[TensorShard]:
    """This rank's parts of the weights."""
    return [
        TensorShard(name=f"weight/{each.name}", local=each.master, box=each.box, shape=each.shape, is_copy=each.is_copy)
        for each in parameters
    ]


def buffer_pieces(model: Any) -> list[TensorShard]:
    """This rank's parts of the persistent buffers."""
    return [
        TensorShard(name=f"buffer/{name}", local=buffer, box=Box.whole(buffer.shape), shape=tuple(buffer.shape))
        for name, buffer in persistent_buffers(model).items()
    ]


def training_extras(engine: TrainEngine, values: Mapping[str, Any]) -> Extras:
    """What a checkpoint holds beside the tensors: the caller's values, and the optimizer's counts of updates."""
    optimizer = engine.optimizer
    counts = {"updates": optimizer.updates, "missed_updates": optimizer.missed_updates()}
    return Extras(values={**values, **counts}, arrays={})


def restore_engine(engine: TrainEngine, checkpoint: CheckpointReader) -> None:
    """Gives a model that may have been trained since the weights and the optimizer state of a checkpoint."""
    reshard(engine.model)
    checkpoint.load(checkpoint_shards(engine))
    for each in (*engine.optimizer.trained, *engine.frozen):
        each.publish()
    _restore_counts(engine, checkpoint)


def restore_optimizer(engine: TrainEngine, checkpoint: CheckpointReader) -> None:
    """Restores moments and counts of updates. `place` has already read the weights from the same checkpoint."""
    checkpoint.load(_moment_pieces(engine))
    _restore_counts(engine, checkpoint)


def _restore_counts(engine: TrainEngine, checkpoint: CheckpointReader) -> None:
    values = checkpoint.record["extras"]
    engine.optimizer.set_updates(values["updates"], values.get("missed_updates"))


def _moment_pieces(engine: TrainEngine) -> list[TensorShard]:
    optimizer = engine.optimizer
    moments = (("first_moment", optimizer.first_moments), ("second_moment", optimizer.second_moments))
    return [
        TensorShard(name=f"{kind}/{each.name}", local=tensor, box=each.box, shape=each.shape, is_copy=each.is_copy)
        for kind, tensors in moments
        for each, tensor in zip(optimizer.trained, tensors, strict=True)
    ]
