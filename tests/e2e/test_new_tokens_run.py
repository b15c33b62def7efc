# SPDX-License-Identifier: Apache-2.0
"""A vocabulary that grows, as a user does it: train, go on from a checkpoint, export, ask plain transformers."""

from __future__ import annotations

import pytest
import transformers

from helpers.tiny import tiny_tokenizer
from helpers.workspace import Workspace

ITEMS = ("<item_1>", "<item_2>", "<item_3>")


@pytest.mark.slow
def test_items_are_learned_resumed_exported_and_known_to_plain_transformers(workspace: Workspace) -> None:
    rows = [{"prompt": f"what is {number}?", "completion": item} for number, item in enumerate(ITEMS)]
    workspace.rows("items.jsonl", rows * 8)
    recipe = workspace.recipe(
        "items",
        model={"path": str(workspace.model), "new_tokens": {"tokens": list(ITEMS)}},
        data={"train": [{"path": "items.jsonl"}], "heldout": [{"path": "items.jsonl"}]},
        rows_per_step=8,
        steps=60,
        checkpoint={"every": 30},
        evaluation={"generation": {"prompts": 3, "max_new_tokens": 4, "score": "exact_match"}},
    )
    assert workspace.podium("train", recipe).code == 0
    losses = workspace.metric("items", "loss")
    assert workspace.metric("items", "heldout/score")[60] == 1.0
    assert workspace.podium("resume", "runs/items", "--step", "30").code == 0
    assert workspace.metric("items", "loss") == losses
    assert workspace.podium("export", "runs/items", "out").code == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(workspace.path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(workspace.path / "out")
    old = len(tiny_tokenizer())
    assert (model.config.vocab_size, len(tokenizer)) == (old + 3, old + 3)
    requested = tokenizer("what is 1?", return_tensors="pt")
    assert tokenizer.decode(model.generate(**requested, max_new_tokens=1, do_sample=False)[0, -1]) == "<item_2>"
