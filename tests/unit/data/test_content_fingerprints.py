# SPDX-License-Identifier: Apache-2.0
"""Fingerprints change with content that makes the weights, and with nothing else."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.tiny import write_chats
from podium.data.fingerprints import files_fingerprint, folder_fingerprint, recipe_fingerprint, recipe_inputs
from podium.recipe import Recipe, parse_recipe
from podium.recipe.loading import apply_overrides
from podium.recipe.resolving import resolved

MiB = 1 << 20


# --- files ---


def test_the_content_of_files_counts_in_their_order_and_their_names_do_not(tmp_path: Path) -> None:
    for name, text in (("a", "one"), ("b", "two"), ("c", "one"), ("d", "onetwo"), ("e", "")):
        (tmp_path / name).write_text(text)

    def of(names: str) -> str:
        return files_fingerprint([tmp_path / name for name in names])

    assert of("ab") == of("cb")
    assert len({of("a"), of("ab"), of("ba"), of("d"), of("de"), of("")}) == 6


@given(st.binary(max_size=200), st.data())
def test_any_changed_byte_of_a_small_file_is_noticed(content: bytes, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(content)))
    changed = content[:place] + b"x" + content[place + data.draw(st.integers(0, 1)) :]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file"
        file.write_bytes(content)
        before = files_fingerprint([file])
        file.write_bytes(changed)
        assert (files_fingerprint([file]) == before) == (changed == content)


def test_of_a_large_file_size_and_windows_from_end_to_end_count(tmp_path: Path) -> None:
    file = tmp_path / "large"
    size = 80 * MiB

    def with_byte_at(place: int | None, size: int = size) -> str:
        with file.open("wb") as stream:
            stream.truncate(size)
            if place is not None:
                stream.seek(place)
                stream.write(b"x")
        return files_fingerprint([file])

    untouched = with_byte_at(None)
    # 66 windows of 64 KiB that begin (80 MiB - 64 KiB) / 65 = 1,289,546.8 bytes apart.
    noticed = [0, 65_535, 1_289_546, 32 * 1_289_547 + 9, size - 65_536, size - 1]
    assert all(with_byte_at(place) != untouched for place in noticed)
    assert with_byte_at(65_536 + 4096) == untouched
    assert with_byte_at(None, size + 1) != untouched


# --- folders ---


def test_config_tokenizer_and_weights_of_a_model_folder_count(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    shutil.copytree(tiny_folder, folder)
    known = folder_fingerprint(tiny_folder)
    assert folder_fingerprint(folder) == known

    (folder / "README.md").write_text("a card")
    (folder / "podium.json").write_text("{}")
    assert folder_fingerprint(folder) == known

    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-1] + b" ")
        assert folder_fingerprint(folder) != known, name
        (folder / name).write_bytes(content)
    (folder / "tokenizer.json").rename(folder / "other.json")
    assert folder_fingerprint(folder) != known


def test_weights_can_be_left_out(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    shutil.copytree(tiny_folder, folder)
    (folder / "model.safetensors").unlink()
    assert folder_fingerprint(folder, weights=False) == folder_fingerprint(tiny_folder, weights=False)


# --- recipes ---


@pytest.fixture
def place(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_folder, tmp_path / "model")
    write_chats(tmp_path / "train.jsonl", count=4)
    write_chats(tmp_path / "heldout.jsonl", count=2, seed=1)
    (tmp_path / "maps.py").write_text("def same(row):\n    return row\n\ndef other(row):\n    return row\n")
    return tmp_path


def _recipe(*overrides: str) -> Recipe:
    values: dict[str, Any] = {
        "program": "sft", "model": {"path": "model"}, "steps": 4, "optimizer": {"lr": 1e-3},
        "data": {"train": [{"path": "train.jsonl", "map": "maps.py:same"}], "heldout": [{"path": "heldout.jsonl"}]},
    }  # fmt: skip
    return resolved(parse_recipe(apply_overrides(values, overrides)), {})


def _fingerprint(*overrides: str) -> str:
    recipe = _recipe(*overrides)
    return recipe_fingerprint(recipe, recipe_inputs(recipe, Path(recipe.model.path)))


def test_everything_that_a_recipe_reads_is_listed(place: Path) -> None:
    inputs = recipe_inputs(_recipe(), place / "model")
    assert [(each.key, each.kind, each.path) for each in inputs] == [
        ("model.path", "weights", str(place / "model")),
        ("data.train.0.path", "data", str(place / "train.jsonl")),
        ("data.train.0.map", "code", f"{place / 'maps.py'}:same"),
        ("data.heldout.0.path", "data", str(place / "heldout.jsonl")),
    ]


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.lr=2e-3", "steps=5", "run.seed=1", "data.train.0.map=maps.py:other", "model.init=random",
        "data.trained=everything",
    ],
)  # fmt: skip
def test_a_key_that_has_a_say_in_the_weights_counts(override: str, place: Path) -> None:
    assert _fingerprint(override) != _fingerprint()


@pytest.mark.parametrize(
    "override",
    [
        "placement.devices=2", "checkpoint.every=1", "evaluation.at_start=true", "data.heldout=[]", "run.name=other",
        "micro_batch_tokens=20000",
    ],
)  # fmt: skip
def test_a_key_that_changes_no_weights_does_not_count(override: str, place: Path) -> None:
    assert _fingerprint(override) == _fingerprint()


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        (lambda place: write_chats(place / "train.jsonl", count=4, seed=9), True),
        (lambda place: (place / "maps.py").write_text("def same(row):\n    return None\n"), True),
        (lambda place: (place / "model" / "tokenizer_config.json").write_text("{}"), True),
        (lambda place: write_chats(place / "heldout.jsonl", count=2, seed=9), False),
        (lambda place: (place / "model" / "README.md").write_text("a card"), False),
    ],
)
def test_content_counts_where_it_makes_the_weights(change: Callable[[Path], object], counts: bool, place: Path) -> None:
    before = _fingerprint()
    change(place)
    assert (_fingerprint() != before) == counts


def test_the_same_content_at_another_place_is_the_same(place: Path) -> None:
    before = _fingerprint()
    (place / "model").rename(place / "moved")
    (place / "train.jsonl").rename(place / "moved.jsonl")
    (place / "maps.py").rename(place / "moved.py")
    assert _fingerprint("model.path=moved", "data.train.0={path: moved.jsonl, map: 'moved.py:same'}") == before


def test_weights_of_a_randomly_begun_model_do_not_count(place: Path) -> None:
    before = _fingerprint("model.init=random")
    (place / "model" / "model.safetensors").write_bytes(b"")
    assert _fingerprint("model.init=random") == before
