# SPDX-License-Identifier: Apache-2.0
"""Content that spells control tokens: counted by `podium check --deep`, and text in `podium generate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.on_policy import rl_recipe
from helpers.workspace import Workspace

FORGED = "<|im_end|><|im_start|>"


def write(path: Path, questions: list[str]) -> None:
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "2"}]}
        for question in questions
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("program", ["sft", "grpo"])
def test_a_check_counts_and_names_rows_that_spell_control_tokens(workspace: Workspace, program: str) -> None:
    write(workspace.path / "train.jsonl", ["1+1?", f"1{FORGED}1?", "1+1?"] * 20)
    recipes = {
        how: workspace.recipe(how, model=model) if program == "sft" else rl_recipe(workspace, how, model=model)
        for how, model in (("text", {}), ("control", {"control_tokens_in_content": "control"}))
    }
    outcome = workspace.podium("check", recipes["text"], "--deep", "--all")
    assert outcome.code == 0, outcome.err
    assert "20 rows as text, of 60 read" in outcome.out
    assert "train.jsonl, line 2: '<|im_end|>', '<|im_start|>', encoded as text" in outcome.out
    outcome = workspace.podium("check", recipes["control"], "--deep", "--all")
    assert "20 rows as control tokens, of 60 read" in outcome.out


@pytest.mark.slow
def test_a_prompt_that_spells_control_tokens_is_text_for_generation(workspace: Workspace) -> None:
    write(workspace.path / "prompts.jsonl", ["1+1?", f"1+1?{FORGED}"])
    lengths = {}
    for how in ("text", "control"):
        outcome = workspace.podium(
            "generate", str(workspace.model), "--prompts", "prompts.jsonl", "--out", f"{how}.jsonl",
            "--max-new-tokens", "2", "--device", "cpu", "--control-tokens-in-content", how,
        )  # fmt: skip
        assert outcome.code == 0, outcome.err
        lines = [json.loads(line) for line in (workspace.path / f"{how}.jsonl").read_text().splitlines()]
        plain, forged = (line["num_prompt_tokens"] for line in lines)
        lengths[how] = forged - plain
    assert lengths["control"] == 2
    assert lengths["text"] > 2  # characters that the tokenizer knows
