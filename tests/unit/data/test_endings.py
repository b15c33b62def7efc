# SPDX-License-Identifier: Apache-2.0
"""Documents that end without a token that generation stops at are found, in `check --deep` and in a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import CHATML, CHATML_MARKED, LLAMA3, PLAIN, byte_tokenizer

from helpers.runs import tiny_recipe
from helpers.tiny import TEMPLATE, save_tiny_folder, write_chats
from podium import api
from podium.data.chat import DocumentMaker, Made, Trained
from podium.data.documents import Document
from podium.data.endings import missing_stop_token
from podium.data.rows import Row

# As in GLM-4.5: a turn has a token in front and none behind; generation stops where the next turn would begin.
NO_END = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What the warning asks for: the token is the assistant's, and the next turn does not repeat it.
FIXED = (
    "{% for message in messages %}"
    "{% if loop.first or loop.previtem.role != 'assistant' %}<|im_start|>{% endif %}{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_start|>{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "6"},
]


def documents(tokenizer: Any, trained: Trained = "assistant") -> list[Document]:
    maker = DocumentMaker(tokenizer, trained, 1000, "error")
    rows = [{"messages": CHAT}, {"messages": CHAT[:2]}]
    made = [maker.make(Row(row, f"line {at}")) for at, row in enumerate(rows)]
    return [each.document for each in made if isinstance(each, Made)]


def ids(tokenizer: Any, *texts: str) -> list[int]:
    return [int(tokenizer.convert_tokens_to_ids(text)) for text in texts]


@pytest.mark.parametrize(
    ("template", "stop"),
    [(CHATML, "<|im_end|>"), (CHATML_MARKED, "<|im_end|>"), (LLAMA3, "<|eot_id|>"), (FIXED, "<|im_start|>")],
)
@pytest.mark.parametrize("trained", ["assistant", "last_turn", "everything"])
def test_templates_that_end_a_turn_with_a_stop_token_pass(template: str, stop: str, trained: Trained) -> None:
    tokenizer = byte_tokenizer(template)
    assert missing_stop_token(documents(tokenizer, trained), tokenizer, ids(tokenizer, stop, "</s>")) is None


@pytest.mark.parametrize("template", [NO_END, PLAIN])
def test_a_turn_without_an_end_is_found(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    warning = missing_stop_token(documents(tokenizer), tokenizer, ids(tokenizer, "</s>", "<|im_start|>"))
    assert warning is not None
    assert " 2 trained documents" in warning
    assert "('</s>', '<|im_start|>')" in warning
    assert "model.chat_template" in warning


def test_an_end_that_generation_does_not_stop_at_is_found_by_name() -> None:
    tokenizer = byte_tokenizer(CHATML)
    warning = missing_stop_token(documents(tokenizer), tokenizer, ids(tokenizer, "</s>"))
    assert warning is not None
    (number,) = ids(tokenizer, "<|im_end|>")
    assert re.search(rf"'<\|im_end\|>'.* {number}, .*eos_token_id", warning)


def test_documents_of_which_some_end_are_not_warned_of() -> None:
    """Truncated ones, for instance, end anywhere."""
    ending, without = byte_tokenizer(CHATML), byte_tokenizer(NO_END)
    mixed = [*documents(without), *documents(ending)]
    assert missing_stop_token(mixed, ending, ids(ending, "<|im_end|>")) is None
    assert missing_stop_token([], ending, []) is None


@pytest.mark.parametrize(("template", "warned"), [(TEMPLATE, False), (NO_END, True)])
def test_a_check_and_a_run_say_it(
    tmp_path: Path, template: str, warned: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    model, data = save_tiny_folder(tmp_path / "model"), write_chats(tmp_path / "train.jsonl")
    (tmp_path / "template.jinja").write_text(template)
    stops = {"eos_token_id": [1, 2]}  # <|im_start|>, <|im_end|>
    (model / "generation_config.json").write_text(json.dumps(stops))
    section = {"path": str(model), "chat_template": str(tmp_path / "template.jinja")}
    recipe = tiny_recipe(model, data, tmp_path, "run", model=section, steps=3)
    lines = "\n".join(api.check(recipe, deep=True))
    assert bool(re.search(r"warning: .* 64 trained documents", lines)) == warned
    capfd.readouterr()
    api.train(recipe)
    said = " ".join("".join(capfd.readouterr()).split())
    assert ("{% generation %}" in said) == warned
