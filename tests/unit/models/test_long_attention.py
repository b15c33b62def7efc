# SPDX-License-Identifier: Apache-2.0
"""Attention of long documents without a variable-length kernel: by blocks of queries, with the same result."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.engines import full_gradient, make_engine, random_documents, relative_l2
from helpers.tiny import save_tiny_model
from podium.models import attention

LENGTHS = (40, 40, 17, 64, 5)


# mistral: a window; gemma2: a soft cap and a window in every second layer; gpt_oss: sinks and a window in some.
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize(
    "checkpointing", ["selective", *(pytest.param(each, marks=pytest.mark.slow) for each in ("none", "layers"))]
)
def test_blocks_of_queries_give_the_gradient_of_whole_documents(
    tmp_path: Path, family: str, checkpointing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, documents = save_tiny_model(family, tmp_path, sliding_window=9), random_documents(LENGTHS)
    wanted = full_gradient(make_engine(folder), documents)
    largest = []
    visible = attention._visible

    def noted(queries: slice, keys: slice, *rest: object) -> object:
        largest.append((queries.stop - queries.start) * (keys.stop - keys.start))
        return visible(queries, keys, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "_visible", noted)
    for name in ("_MASK_ELEMENTS", "SCORE_ELEMENTS"):
        monkeypatch.setattr(attention, name, 1)
    monkeypatch.setattr(attention, "LEAST_ROWS", 7)
    found = full_gradient(make_engine(folder, activation_checkpointing=checkpointing), documents)
    assert relative_l2(found, wanted) < 1e-6
    assert max(largest) <= 7 * 64


@pytest.mark.parametrize(
    ("window", "wanted"),
    [
        (None, [(0, 4, 0, 4), (4, 8, 0, 8), (8, 10, 0, 10)]),
        (3, [(0, 4, 0, 4), (4, 8, 2, 8), (8, 10, 6, 10)]),
    ],
)
def test_blocks_have_the_keys_that_their_queries_see(
    window: int | None, wanted: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "LEAST_ROWS", 1)
    found = list(attention._blocks(10, window, 4))
    assert [(queries.start, queries.stop, keys.start, keys.stop) for queries, keys in found] == wanted
    assert list(attention._blocks(10, window, 10)) == [(slice(0, 10), slice(0, 10))]
