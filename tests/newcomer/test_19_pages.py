# SPDX-License-Identifier: Apache-2.0
"""A newcomer gave SFT chats without answers and read "every row was dropped (0, 0, 0)", and did not see the tool calls
of held-out chats in the samples of an evaluation. Pages are compared with the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.made_batches import make_graded
from helpers.workspace import Workspace
from podium.controller.evaluation import DEFAULT_PROMPTS, heldout_limit
from podium.data.chat import Dropped
from podium.data.chat_text import as_text
from podium.data.dropping import no_trained_token
from podium.programs import estimators

DOCS = Path(__file__).parents[2] / "docs"
CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "paris"}}}
ASK = {"role": "user", "content": "how is it?"}


@pytest.mark.parametrize("part", ["train", "heldout"])
def test_chats_without_an_answer_say_what_is_missing(workspace: Workspace, part: str) -> None:
    workspace.rows("asked.jsonl", [{"messages": [ASK]}] * 3)
    outcome = workspace.podium("train", workspace.recipe(data={part: [{"path": "asked.jsonl"}]}))
    workspace.refused(outcome, "asked.jsonl", "assistant turn", "data.trained", "grpo", "3 dropped")


@pytest.mark.parametrize(
    ("reason", "key"),
    [(Dropped.OVERLONG, "data.max_length"), (Dropped.BY_MAP, "`map`"), (Dropped.UNTRAINED, "data.trained")],
)
def test_every_reason_says_what_to_do(reason: Dropped, key: str) -> None:
    text = str(no_trained_token("x.jsonl", {reason: 4}))
    assert key in text
    assert f"4 dropped ({reason.value})" in text


def test_tool_calls_are_shown_in_samples(workspace: Workspace) -> None:
    """The first held-out chat is answered by a call, the second one after the call's result."""
    called = [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    result = [{"role": "tool", "content": "sunny"}, {"role": "assistant", "content": "it is sunny"}]
    workspace.rows("heldout.jsonl", [{"messages": called}, {"messages": called + result}])
    (workspace.path / "calls.jinja").write_text(CALLS)
    recipe = workspace.recipe(
        model={"chat_template": "calls.jinja"}, steps=1,
        data={"heldout": [{"path": "heldout.jsonl"}]},
        evaluation={"generation": {"prompts": 2, "max_new_tokens": 4, "score": "exact_match"}},
    )  # fmt: skip
    outcome = workspace.podium("train", recipe)

    assert outcome.code == 0, outcome
    lines = (workspace.path / "runs/sums/samples.jsonl").read_text().splitlines()
    first, second = (json.loads(line) for line in lines)
    assert first["prompt"] == "how is it?"
    # What the model is to write: the tiny tokenizer has neither quotes nor braces.
    assert re.fullmatch(r"weather .*city.*paris.*", first["reference"])
    assert second["prompt"] == 'user: how is it?\nassistant: weather({"city": "paris"})\ntool: sunny'
    assert second["reference"] == "it is sunny"
    assert 'weather({"city": "paris"})' in outcome.out


def test_prompts_of_on_policy_programs_show_calls() -> None:
    messages = [ASK, {"role": "assistant", "content": "let me see", "tool_calls": [CALL]}]
    assert as_text(messages) == 'user: how is it?\nassistant: let me see weather({"city": "paris"})'
    assert as_text([ASK]) == "how is it?"


def test_the_page_has_the_default_number_of_heldout_prompts() -> None:
    page = (DOCS / "on_policy.md").read_text(encoding="utf-8")
    section = page.partition("## Evaluation\n")[2].partition("\n## ")[0]
    assert heldout_limit(None, None) == DEFAULT_PROMPTS
    assert heldout_limit(None, 7) == 7
    for part in (str(DEFAULT_PROMPTS), "`rollout.max_new_tokens`", "`evaluation.max_documents`", "`show`"):
        assert part in section


def test_the_page_has_the_dtypes_that_a_custom_estimator_gets() -> None:
    page = (DOCS / "methods.md").read_text(encoding="utf-8")
    names = {torch.float64: "float64", torch.float32: "float32", torch.int64: "int64"}
    given: list[str] = []

    def custom(rewards_N: torch.Tensor, group_N: torch.Tensor) -> torch.Tensor:
        given.append(f"rewards_N {names[rewards_N.dtype]}, group_N {names[group_N.dtype]}")
        return rewards_N

    estimators._custom(custom, "mine.py:custom")(np.array([1.0, 0.0], np.float32), make_graded([1.0, 0.0], [0, 0]))
    assert given[0] in page
