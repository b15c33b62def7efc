# SPDX-License-Identifier: Apache-2.0
"""A packed micro-batch as tensors: runs of equal documents, trained positions, padding."""

from __future__ import annotations

import numpy as np
import torch

from podium.data.documents import Document, pack
from podium.models.packing import runs_of, to_device

CPU = torch.device("cpu")


def document(tokens: list[int], trained: list[int]) -> Document:
    return Document(tokens=np.array(tokens, np.int32), trained=np.array(trained, np.bool_))


def test_neighbours_of_one_length_are_one_run() -> None:
    runs = runs_of(np.array([0, 2, 4, 7, 9]))
    assert [(run.num_documents, run.length) for run in runs] == [(2, 2), (1, 3), (1, 2)]


def test_only_trained_positions_reach_the_head() -> None:
    batch = to_device(pack([document([5, 6, 7], [0, 0, 1]), document([8, 9, 4], [0, 1, 1])]), CPU)
    assert batch.tokens_T.tolist() == [5, 6, 8, 9]
    assert batch.positions_T.tolist() == [0, 1, 0, 1]
    assert batch.trained_S.tolist() == [1, 2, 3]
    assert batch.targets_S.tolist() == [7, 9, 4]
    assert batch.weights_S.tolist() == [1.0, 1.0, 1.0]
    assert batch.packing.boundaries.tolist() == [0, 2, 4]
    assert batch.packing.longest == 2


def test_padding_to_a_multiple_is_a_document_of_its_own_that_trains_nothing() -> None:
    batch = to_device(pack([document([5, 6, 7, 8], [0, 1, 1, 1])]), CPU, multiple=8)
    assert batch.tokens_T.tolist() == [5, 6, 7, 0, 0, 0, 0, 0]
    assert batch.positions_T.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert batch.packing.boundaries.tolist() == [0, 3, 8]
    assert batch.packing.longest == 5
    assert batch.trained_S.tolist() == [0, 1, 2]


def test_a_multiple_that_fits_already_adds_nothing() -> None:
    batch = to_device(pack([document([5, 6, 7], [0, 1, 1])]), CPU, multiple=2)
    assert batch.packing.boundaries.tolist() == [0, 2]


def test_no_documents_at_all_is_one_token_that_trains_nothing() -> None:
    batch = to_device(pack([]), CPU)
    assert len(batch.tokens_T) == 1
    assert len(batch.trained_S) == 0
