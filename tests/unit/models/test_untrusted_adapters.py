# SPDX-License-Identifier: Apache-2.0
"""Adapter folders and tokenizers that would train something else than was meant are refused, with what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models

from helpers.adapters import save_peft_adapter
from helpers.engines import one_rank
from helpers.tiny import save_tiny_model
from podium.engine.sharding import place
from podium.errors import ModelError
from podium.models.new_tokens import new_rows
from podium.recipe import ModelSection


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("attacked") / "llama")


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    return save_peft_adapter(base, base.parent / "adapter")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"r": "4"}, r"adapter_config\.json .*\br '4'"),
        ({"r": 0}, r"adapter_config\.json .*\br 0\b"),
        ({"lora_alpha": 0}, r"adapter_config\.json .*\blora_alpha 0\b"),
        ({"lora_alpha": None}, r"adapter_config\.json .*\blora_alpha None\b"),
        ({"peft_type": "UNHEARD_OF"}, r"adapter_config\.json \(KeyError"),
    ],
)
def test_a_config_that_no_adapter_can_have_is_refused(
    base: Path, adapter: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    folder = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    section = ModelSection(path=str(base), lora={"adapter": str(folder)})  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=said):
        place(section, base, one_rank(), seed=0)


def test_a_new_token_never_takes_the_row_of_an_old_one(base: Path, tmp_path: Path) -> None:
    """Four tokens, ids 0, 1, 2 and 5: the tokenizer counts on from 4, so the second new one would be token d."""
    core = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "c": 2, "d": 5}, merges=[], unk_token=None))
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="a").save_pretrained(tmp_path)

    def section(*tokens: str) -> ModelSection:
        return ModelSection(path=str(base), tokenizer=str(tmp_path), new_tokens={"tokens": tokens})  # type: ignore[arg-type]

    assert list(new_rows(section("<x>"))) == [4]
    with pytest.raises(ModelError, match=r"model\.new_tokens: .*'<y>' .* 5\b.*'d'"):
        new_rows(section("<x>", "<y>"))
