# SPDX-License-Identifier: Apache-2.0
"""Tokens added to a vocabulary: how their rows begin, on one rank and sharded, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from helpers.tiny import save_tiny_model, tiny_tokenizer
from podium.data.tokenizer import load_tokenizer
from podium.engine.mesh import adopt
from podium.engine.sharding import place, place_scalar
from podium.errors import ModelError, RecipeError
from podium.models.new_tokens import grown_vocabulary, new_rows
from podium.recipe import ModelSection, parse_recipe

ALONE = adopt(rank=0, world=1, device="cpu", devices=None)


def folder_of(path: Path, name: str, rows: int | None = None) -> Path:
    """A checkpoint whose embedding has exactly the tokenizer's rows, or more."""
    tokenizer = tiny_tokenizer()
    save_tiny_model(name, path, vocab_size=rows or len(tokenizer))
    tokenizer.save_pretrained(path)
    return path


def section(folder: Path, **new_tokens: object) -> ModelSection:
    return ModelSection.model_validate({"path": str(folder), "new_tokens": {"tokens": ["<a1>", "b2"], **new_tokens}})


@pytest.mark.parametrize("name", ["qwen3", "llama"])  # a tied head, and one of its own
def test_a_new_row_is_the_mean_of_its_pieces_in_embedding_and_head_and_old_rows_stay(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path / "model", name)
    before = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model, _ = place(section(folder), folder, ALONE, seed=0)
    old = len(tiny_tokenizer())
    assert model.vocab_size == old + 2
    ids = load_tokenizer(section(folder)).convert_tokens_to_ids(["<a1>", "b2"])
    assert ids == [old, old + 1]
    # "b2" was written with the characters b and 2; "<" and ">" are not in the vocabulary, so "<a1>" was a and 1.
    pieces = tiny_tokenizer().convert_tokens_to_ids(["b", "2"])
    for find in ("get_input_embeddings", "get_output_embeddings"):
        was, now = getattr(before, find)().weight, getattr(model.hf, find)().weight
        torch.testing.assert_close(now[:old], was, rtol=0, atol=0)
        torch.testing.assert_close(now[ids[1]], was[pieces].mean(0))
        assert not now[old + 2 :].any(), "padding rows stay zero"


def test_the_mean_of_all_leaves_rows_of_no_token_out(tmp_path: Path) -> None:
    known = len(tiny_tokenizer())
    folder = folder_of(tmp_path / "model", "llama", rows=known + 10)  # as checkpoints that were padded have it
    before = transformers.AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight
    grown = section(folder, init="mean")
    model, _ = place(grown, folder, ALONE, seed=0)
    assert grown_vocabulary(grown, known + 10) == model.vocab_size == known + 10
    weight = model.hf.get_input_embeddings().weight
    torch.testing.assert_close(weight[known], before[:known].mean(0))
    torch.testing.assert_close(weight[known + 2 : known + 10], before[known + 2 :], rtol=0, atol=0)


def test_a_model_that_scores_grows_too(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "qwen3")
    model, _ = place_scalar(section(folder), folder, ALONE, labels=1)
    assert model.hf.get_input_embeddings().weight.shape[0] == len(tiny_tokenizer()) + 2


def test_a_token_that_is_there_already_keeps_its_id_and_row(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "qwen3")
    assert list(new_rows(section(folder, tokens=["7", "new"]))) == [len(tiny_tokenizer())]


def test_tokens_of_a_file_come_behind_those_of_the_recipe_and_special_ones_are_left_out_of_text(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "qwen3")
    (tmp_path / "items.txt").write_text("item-1\n\n item-2 \n", encoding="utf-8")
    tokenizer = load_tokenizer(section(folder, file=str(tmp_path / "items.txt"), special=True))
    old = len(tiny_tokenizer())
    assert tokenizer.convert_tokens_to_ids(["<a1>", "b2", "item-1", "item-2"]) == [old, old + 1, old + 2, old + 3]
    assert tokenizer("b2 item-2")["input_ids"][-1] == old + 3
    assert tokenizer.decode([old, old + 3], skip_special_tokens=True) == ""


@pytest.mark.parametrize(
    ("new_tokens", "message"),
    [
        ({"tokens": ["x1", "x1"]}, r"model\.new_tokens: 'x1' .*twice"),
        ({"tokens": [], "file": "nowhere.txt"}, r"model\.new_tokens\.file: nowhere\.txt "),
    ],
)
def test_what_cannot_be_added_is_named(tmp_path: Path, new_tokens: dict[str, object], message: str) -> None:
    folder = folder_of(tmp_path / "model", "qwen3")
    with pytest.raises(ModelError, match=message):
        load_tokenizer(section(folder, **new_tokens))


def test_an_adapter_and_new_tokens_exclude_each_other() -> None:
    values = {
        "program": "sft",
        "model": {"path": "m", "lora": {}, "new_tokens": {"tokens": ["x1"]}},
        "data": {"train": [{"path": "d"}]},
        "optimizer": {"lr": 1e-3},
        "steps": 1,
    }
    with pytest.raises(RecipeError, match=r"model\.new_tokens: .*model\.lora\b"):
        parse_recipe(values)
