# SPDX-License-Identifier: Apache-2.0
"""Documents over a context axis over gloo: one of many thousand tokens, and heads that do not divide, whose keys travel
around the ranks. Loss and gradient are those of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.context_ranks import ContextStep, context_rank, context_step
from helpers.engines import one_rank, relative_l2
from helpers.tiny import save_tiny_model
from podium.spmd.launch import launch

pytestmark = pytest.mark.slow
LONGEST = 16_384
FAMILIES = ("llama", "qwen3", "gemma3", "gpt_oss")  # with sliding windows and sinks
FEW = (3, 9, 37, 2, 6)
LENGTHS = {"long": (7, LONGEST, 300), "six_heads": (3, 9, 37, 2, 6), "two_tokens": (2,)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("context")
    save_tiny_model("llama", folder / "long", num_hidden_layers=1, max_position_embeddings=LONGEST)
    # Four ranks do not divide six heads.
    heads = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
    save_tiny_model("gemma3", folder / "six_heads", **heads)
    save_tiny_model("gemma3", folder / "two_tokens", **heads)
    for name in FAMILIES:
        save_tiny_model(
            name, folder / f"{name}_2", hidden_size=24, num_attention_heads=3, num_key_value_heads=1, head_dim=8
        )
        save_tiny_model(name, folder / f"{name}_3")  # three ranks do not divide four heads
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, ContextStep]:
    cases = {folder / name: lengths for name, lengths in LENGTHS.items()}
    return launch(context_rank, (cases,), ranks=4, restarts=0, stop_file=folder / "stop")


@pytest.mark.parametrize("name", LENGTHS)
def test_four_ranks_have_the_loss_and_gradient_of_one(folder: Path, found: dict[str, ContextStep], name: str) -> None:
    wanted = context_step(one_rank(), folder / name, LENGTHS[name])
    require_same(found[name], wanted)


def require_same(found: ContextStep, wanted: ContextStep) -> None:
    assert found.loss == pytest.approx(wanted.loss, rel=1e-5)
    assert found.gradient.keys() == wanted.gradient.keys()
    for parameter, tensor in wanted.gradient.items():
        assert relative_l2(found.gradient[parameter], tensor) < 1e-5, parameter


@pytest.fixture(scope="module", params=[2, 3])
def around(request: pytest.FixtureRequest, folder: Path) -> tuple[int, dict[str, ContextStep]]:
    size = request.param
    cases = {folder / f"{name}_{size}": FEW for name in FAMILIES}
    return size, launch(context_rank, (cases,), ranks=size, restarts=0, stop_file=folder / "stop")


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_that_travel_give_the_loss_and_gradient_of_one_rank(
    folder: Path, around: tuple[int, dict[str, ContextStep]], name: str
) -> None:
    size, found = around
    require_same(found[f"{name}_{size}"], context_step(one_rank(), folder / f"{name}_{size}", FEW))
