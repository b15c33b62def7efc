# SPDX-License-Identifier: Apache-2.0
"""Every causal language model that transformers knows: compared with it, or refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from helpers.architectures import MODEL_TYPES, small_config
from helpers.engines import make_engine
from helpers.poison import poison_empty_memory
from podium import api
from podium.errors import PodiumError
from podium.models.buffers import computed_buffers

_MOST_PARAMETERS = 30e6


def config_of(model_type: str) -> Any:
    """Skips what transformers itself does not build at this size."""
    try:
        config = small_config(model_type)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:
        pytest.skip(f"transformers does not build a small one: {type(error).__name__}")
    if model.num_parameters() > _MOST_PARAMETERS:
        pytest.skip("not small")
    return config


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_it_is_compared_or_refused_and_what_agrees_has_every_tensor(
    tmp_path: Path, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anything else than a PodiumError fails the test."""
    poison_empty_memory(monkeypatch)
    config = config_of(model_type)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    try:
        found = api.verify(tmp_path)
    except PodiumError:
        return
    if not found.agrees:
        return
    for dtype in (torch.float32, torch.bfloat16):
        wanted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        model = make_engine(tmp_path, dtype=str(dtype).removeprefix("torch."), pad_vocab_to=1).model.hf
        ours, theirs = ({**each.state_dict(), **computed_buffers(each)} for each in (model, wanted))
        assert {name: each.dtype for name, each in ours.items()} == {name: each.dtype for name, each in theirs.items()}
        assert [name for name, each in theirs.items() if not torch.equal(ours[name], each)] == []
