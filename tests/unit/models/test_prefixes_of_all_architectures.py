# SPDX-License-Identifier: Apache-2.0
"""Every causal language model that transformers knows and Podium trains: shared prefixes change no log-prob."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from helpers.architectures import MODEL_TYPES, small_config
from helpers.engines import make_engine
from helpers.prefixes import ALWAYS, random_tree
from podium import api
from podium.data.documents import pack
from podium.errors import PodiumError
from podium.models.packing import to_device
from podium.models.prefix_sharing import COMPARED

_MOST_PARAMETERS = 30e6


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_model_that_shares_has_the_log_probs_of_whole_documents(model_type: str, tmp_path: Path) -> None:
    try:
        config = small_config(model_type)
        torch.manual_seed(0)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:
        pytest.skip(f"transformers does not build a small one: {type(error).__name__}")
    if model.num_parameters() > _MOST_PARAMETERS:
        pytest.skip("not small")
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    try:
        if not api.verify(tmp_path).agrees:
            pytest.skip("refused")
        engine = make_engine(tmp_path)
    except PodiumError as error:
        pytest.skip(f"refused: {error}")
    if config.model_type not in COMPARED:
        assert engine.prefixes is None
        return
    assert engine.prefixes is not None
    batch = pack(random_tree(0, vocabulary=min(250, engine.model.vocab_size)))
    engine.model.eval()
    with torch.no_grad():
        wanted, found = (
            engine.model(to_device(batch, torch.device("cpu"), prefixes=cost), None, kind="logprobs")
            for cost in (None, ALWAYS)
        )
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-5)
