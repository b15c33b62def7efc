# SPDX-License-Identifier: Apache-2.0
"""Documents over a context axis of four ranks over gloo: one of many thousand tokens, and heads that do not divide.
Loss and gradient are those of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.context_ranks import ContextStep, context_rank, context_step
from helpers.engines import one_rank, relative_l2
from helpers.tiny import save_tiny_model
from podium.spmd.launch import launch

pytestmark = pytest.mark.slow
LONGEST = 16_384
LENGTHS = {"long": (7, LONGEST, 300), "six_heads": (3, 9, 37, 2, 6), "two_tokens": (2,)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("context")
    save_tiny_model("llama", folder / "long", num_hidden_layers=1, max_position_embeddings=LONGEST)
    # Four ranks do not divide six heads: they have all keys.
    heads = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
    save_tiny_model("gemma3", folder / "six_heads", **heads)
    save_tiny_model("gemma3", folder / "two_tokens", **heads)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, ContextStep]:
    cases = {folder / name: lengths for name, lengths in LENGTHS.items()}
    return launch(context_rank, (cases,), ranks=4, restarts=0, stop_file=folder / "stop")


@pytest.mark.parametrize("name", LENGTHS)
def test_four_ranks_have_the_loss_and_gradient_of_one(folder: Path, found: dict[str, ContextStep], name: str) -> None:
    wanted = context_step(one_rank(), folder / name, LENGTHS[name])
    assert found[name].loss == pytest.approx(wanted.loss, rel=1e-5)
    assert found[name].gradient.keys() == wanted.gradient.keys()
    for parameter, tensor in wanted.gradient.items():
        assert relative_l2(found[name].gradient[parameter], tensor) < 1e-5, parameter
