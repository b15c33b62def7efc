# SPDX-License-Identifier: Apache-2.0
"""Options that save memory in predictions, and the one that a run which does not fit is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.recipes import make_recipe
from podium.engine import state_streams
from podium.errors import RecipeError
from podium.planning.devices import GIB, Device, device_named
from podium.planning.memory import STATE_PIECE, memory_lines, memory_of, refusal
from podium.planning.model_shape import shape_of
from podium.planning.shape_costs import training_step
from podium.recipe import Recipe

QWEN = {
    "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": True, "max_position_embeddings": 140_000,
}  # fmt: skip
TOKENS = 32_768
LONG = ("data.max_length=32768", "tokens_per_step=32768", "micro_batch_tokens=32768")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(QWEN))
    return folder


def recipe(folder: Path, *changes: str) -> Recipe:
    return make_recipe(f"model.path={folder}", *LONG, *changes)


def gpu(gib: float) -> Device:
    return replace(device_named("H200"), memory_bytes=int(gib * GIB))


def activations(folder: Path, *changes: str) -> int:
    return memory_of(recipe(folder, *changes), gpu(140)).peak.of("activations")


def test_activations_by_option_are_those_counted_by_hand(folder: Path) -> None:
    """Of one token: E 2048, I 6144, queries 2048, keys 1024, 16 heads, 28 layers, bfloat16."""
    layer = 2 * (5 * 2048 + 3 * 6144 + 3 * 2048 + 2 * 1024) + 4 * (16 + 2 + 16 + 8)
    ends = (4 + 3 * 2) * 2048
    attention = 2 * 2048 + 4 * 16
    products = 2 * (2048 + 2 * 1024 + 2048 + 2 * 6144 + 2048)

    assert activations(folder) == TOKENS * (28 * layer + ends)
    wanted = {
        "selective": 28 * (2 * 2048 + products + attention),
        "all_but_attention": 28 * (2 * 2048 + attention),
        "layers": 28 * 2 * 2048,
    }
    for name, kept in wanted.items():
        found = activations(folder, f"model.activation_checkpointing={name}")
        assert found == TOKENS * (kept + layer + ends)
    away = ("model.activation_checkpointing=layers", "model.offload_activations=true")
    assert activations(folder, *away) == TOKENS * (3 * 2 * 2048 + layer + ends)
    host = {term.name: term.num_bytes for term in memory_of(recipe(folder, *away), gpu(140)).host}
    assert host["offloaded activations"] == TOKENS * 28 * 2 * 2048


def test_offloaded_state_is_on_the_host_and_three_pieces_on_the_device(folder: Path) -> None:
    here, away = (memory_of(recipe(folder, *each), gpu(140)) for each in ((), ("optimizer.offload=true",)))
    parameters = shape_of(recipe(folder).model).trained_parameters

    assert here.peak.of("optimizer moments") + here.peak.of("float32 masters") == 12 * parameters
    assert away.peak.of("optimizer moments") == away.peak.of("float32 masters") == 0
    assert away.peak.of("optimizer state in passing") == 3 * 12 * STATE_PIECE
    assert {term.name: term.num_bytes for term in away.host}["offloaded optimizer state"] == 12 * parameters
    assert state_streams.PIECE_ELEMENTS == STATE_PIECE


@pytest.mark.parametrize(
    ("changes", "gib", "told"),
    [
        ((), 88, "With model.activation_checkpointing: selective (about "),
        ((), 60, "With model.activation_checkpointing: all_but_attention (about "),
        (("model.activation_checkpointing=all_but_attention",), 38, "With model.activation_checkpointing: layers (a"),
        ((), 35, "With model.activation_checkpointing: layers and model.offload_activations: true (about "),
        (("model.activation_checkpointing=layers",), 30, "With optimizer.offload: true (about "),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_the_fastest_option_with_which_it_does(
    folder: Path, changes: tuple[str, ...], gib: float, told: str
) -> None:
    asked = recipe(folder, *changes)
    problem = refusal(memory_of(asked, gpu(gib)), asked)
    assert problem is not None
    assert told in str(problem)
    assert "it fits." in str(problem)


def test_where_no_option_is_enough_the_old_advice_is_given(folder: Path) -> None:
    asked = recipe(folder)
    problem = refusal(memory_of(asked, gpu(8)), asked)
    assert "it fits" not in str(problem)
    assert "To make it smaller: set model.activation_checkpointing to layers, or lower micro_batch_tokens" in str(
        problem
    )


def test_on_cpu_only_recomputation_is_proposed(folder: Path) -> None:
    machine = Device(name="CPU", kind="cpu", memory_bytes=64 * GIB, matrix_flops=1e9, bandwidth=1e9)
    asked = recipe(folder)
    with pytest.raises(RecipeError, match=r"With model\.activation_checkpointing: \w+ \(about [0-9.]+ GiB\) it fits"):
        memory_lines(asked, machine)
    moved = recipe(folder, "optimizer.offload=true")
    assert memory_of(moved, machine).peak.num_bytes == memory_of(asked, machine).peak.num_bytes
    assert memory_of(moved, machine).host == memory_of(asked, machine).host


def test_time_counts_what_is_computed_again(folder: Path) -> None:
    shape, device = shape_of(recipe(folder).model), gpu(140)
    steps = {
        name: training_step(shape, device, [32_768.0], checkpointing=name)  # type: ignore[arg-type]
        for name in ("none", "selective", "all_but_attention", "layers")
    }
    assert steps["selective"].products_s == steps["none"].products_s
    assert steps["all_but_attention"].products_s == steps["layers"].products_s > steps["none"].products_s
    assert steps["all_but_attention"].attention_s == steps["none"].attention_s
    assert steps["layers"].attention_s == pytest.approx(4 / 3 * steps["none"].attention_s)


def test_offloading_activations_needs_recomputed_layers() -> None:
    with pytest.raises(RecipeError, match=r"model\.offload_activations.*Set that to layers"):
        make_recipe("model.offload_activations=true", "model.activation_checkpointing=selective")
