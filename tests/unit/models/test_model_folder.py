# SPDX-License-Identifier: Apache-2.0
"""What is said about a model folder before anything is loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from podium.errors import ModelError
from podium.models.folder import check_model_folder, read_config

KEY = "model.path"


def look(path: Path | str, *, weights: bool = True, tokenizer: bool = True) -> None:
    check_model_folder(str(path), KEY, weights=weights, tokenizer=tokenizer)


def made(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_a_whole_folder_passes(tiny_folder: Path) -> None:
    look(tiny_folder)


def test_a_hub_id_passes_unseen() -> None:
    look("some-owner/some-model")


@pytest.mark.parametrize("path", ["/no/such/folder", "./owner/name", "no-such-folder", "a/b/c", "~/model"])
def test_a_path_that_is_not_there_is_named_with_its_key(path: str) -> None:
    with pytest.raises(ModelError, match=rf"model\.path: .*no folder {re.escape(path)}"):
        look(path)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.path: .*/config\.json .*\bfile\b"):
        look(made(tmp_path, "config.json") / "config.json")


def test_a_folder_without_config_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"model\.path: {tmp_path} .*\bconfig\.json"):
        look(tmp_path)


def test_a_folder_without_weights_offers_random_ones(tmp_path: Path) -> None:
    made(tmp_path, "config.json", "tokenizer.json")
    with pytest.raises(ModelError, match=r"\*\.safetensors.*model\.init: random"):
        look(tmp_path)
    look(tmp_path, weights=False)


def test_weights_of_another_format_are_named(tmp_path: Path) -> None:
    made(tmp_path, "config.json", "tokenizer.json", "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"\*\.safetensors.* pytorch_model\.bin\b"):
        look(tmp_path)


def test_a_folder_without_tokenizer_says_where_to_give_one(tmp_path: Path) -> None:
    made(tmp_path, "config.json", "model.safetensors")
    with pytest.raises(ModelError, match=r"tokenizer\.json.*model\.tokenizer"):
        look(tmp_path)
    look(tmp_path, tokenizer=False)


@pytest.mark.parametrize(("text", "said"), [("{", "JSON"), ("[1]", "object")])
def test_a_broken_config_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=rf"model\.path: {tmp_path}/config\.json .*{said}\b"):
        read_config(tmp_path, KEY)


def test_a_config_in_another_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ModelError, match=r"config\.json .*JSON"):
        read_config(tmp_path, KEY)
