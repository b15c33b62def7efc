# SPDX-License-Identifier: Apache-2.0
"""Tokenizers from a model folder, with a template of the user's own, or an error that says what is missing."""

import pytest
from chat_tokenizers import CHATML, LLAMA3, byte_tokenizer

from podium.data.tokenizer import load_tokenizer
from podium.errors import ModelError
from podium.recipe import ModelSection


def test_a_local_folder_gives_its_tokenizer_and_template(tmp_path):
    byte_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    tokenizer = load_tokenizer(ModelSection(path=str(tmp_path / "model")))
    assert tokenizer.chat_template == CHATML
    assert tokenizer.decode(tokenizer("2+2")["input_ids"]) == "2+2"


def test_the_recipes_template_and_tokenizer_folder_go_before_the_models_own(tmp_path):
    byte_tokenizer(CHATML).save_pretrained(tmp_path / "other")
    (tmp_path / "template.jinja").write_text(LLAMA3)
    (tmp_path / "model").mkdir()
    section = ModelSection(
        path=str(tmp_path / "model"), tokenizer=str(tmp_path / "other"), chat_template=str(tmp_path / "template.jinja")
    )
    assert load_tokenizer(section).chat_template == LLAMA3


def test_a_folder_without_tokenizer_says_what_was_looked_for(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"model\.path: .*tokenizer\.json.*model\.tokenizer"):
        load_tokenizer(ModelSection(path=str(tmp_path)))


def test_a_broken_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=rf"model\.path: .*{tmp_path} .*model\.trust_remote_code"):
        load_tokenizer(ModelSection(path=str(tmp_path)))


def test_a_missing_folder_is_not_requested_from_the_hub(tmp_path):
    with pytest.raises(ModelError, match=r"model\.path: .*no folder .*models/base\b"):
        load_tokenizer(ModelSection(path=str(tmp_path / "models" / "base")))


def test_a_missing_template_file_is_named(tmp_path):
    byte_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    section = ModelSection(path=str(tmp_path / "model"), chat_template=str(tmp_path / "no.jinja"))
    with pytest.raises(ModelError, match=r"model\.chat_template: .*no\.jinja "):
        load_tokenizer(section)
