# SPDX-License-Identifier: Apache-2.0
"""A training engine on one rank, random documents, and gradients as one flat vector."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from podium.algorithms.dense import token_cross_entropy
from podium.data.documents import Document, PackedBatch, pack
from podium.engine.checkpoint import CheckpointReader
from podium.engine.mesh import Mesh
from podium.engine.optimizer import AdamW
from podium.engine.sharding import place
from podium.engine.train_step import TrainEngine
from podium.recipe import ModelSection, OptimizerSection

LENGTHS = (3, 9, 9, 17, 2, 31, 5, 12, 40, 9)


def one_rank() -> Mesh:
    return Mesh(rank=0, world=1, device=torch.device("cpu"), devices=None)


def make_engine(
    folder: Path,
    mesh: Mesh | None = None,
    *,
    optimizer: OptimizerSection | None = None,
    checkpoint: CheckpointReader | None = None,
    **model: Any,
) -> TrainEngine:
    """As a run builds it: placed on the mesh, AdamW, clipping as the section says."""
    mesh = mesh or one_rank()
    section = optimizer or OptimizerSection(lr=1e-2)
    placed, trained = place(ModelSection(path=str(folder), **model), folder, mesh, seed=0, checkpoint=checkpoint)
    return TrainEngine(placed, trained, AdamW(trained, section), mesh, section.clip_norm)


def random_documents(lengths: Sequence[int] = LENGTHS, *, vocabulary: int = 250, seed: int = 0) -> list[Document]:
    """Documents of `length` inputs each; about two in three tokens are trained, the last always."""
    draw = np.random.default_rng(seed)
    documents = []
    for length in lengths:
        trained = draw.random(length + 1) < 0.67
        trained[0], trained[-1] = False, True
        tokens = draw.integers(0, vocabulary, length + 1).astype(np.int32)
        documents.append(Document(tokens=tokens, trained=trained))
    return documents


def num_trained(documents: Sequence[Document]) -> int:
    return sum(document.num_trained for document in documents)


def flat_gradient(engine: TrainEngine, batches: Sequence[PackedBatch], normalizer: float) -> Tensor:
    """The whole gradient of one rank's model as one vector, in the order of the parameters."""
    _, gradients = engine.gradients(batches, token_cross_entropy, normalizer=normalizer)
    return torch.cat([gradients[id(each)].flatten() for each in engine.optimizer.trained])


def full_gradient(engine: TrainEngine, documents: Sequence[Document]) -> Tensor:
    """Of all documents in one micro-batch, over their global count: what every other layout must reproduce."""
    return flat_gradient(engine, [pack(documents)], float(num_trained(documents)))


def relative_l2(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
