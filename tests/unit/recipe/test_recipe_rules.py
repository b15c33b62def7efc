# SPDX-License-Identifier: Apache-2.0
"""Rules that span several keys: each is broken once, and its sentence says how to fix it."""

from __future__ import annotations

import pytest

from helpers.recipes import make_recipe
from podium.errors import RecipeError

HELDOUT = "data.heldout=[{path: h.jsonl}]"


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (
            ("data.max_length=200", "micro_batch_tokens=100"),
            "data.max_length: 200 does not fit micro_batch_tokens 100; a document is never cut over two micro-batches. "
            "Lower data.max_length to 100 or raise micro_batch_tokens to 200.",
        ),
        (
            ("data.max_length=200", "tokens_per_step=100"),
            "data.max_length: 200 is longer than tokens_per_step 100. Raise tokens_per_step to at least 200.",
        ),
        (("data.max_length=1",), "data.max_length: 1 leaves no token to predict. Use at least 2."),
        (
            ("optimizer.warmup_steps=100",),
            "optimizer.warmup_steps: 100 is not below steps 100, so the full learning rate would never be reached. "
            "Lower it to 10 or raise steps.",
        ),
        (
            ("optimizer.final_lr_ratio=0.1",),
            "optimizer.final_lr_ratio: 0.1 has no meaning with schedule constant. "
            "Remove it, or set optimizer.schedule to linear or cosine.",
        ),
        (("evaluation.every=5",), "evaluation: there is nothing to evaluate on, data.heldout is empty."),
        (("evaluation.at_start=true",), "evaluation: there is nothing to evaluate on, data.heldout is empty."),
        (("evaluation.generation={}",), "evaluation: there is nothing to evaluate on, data.heldout is empty."),
        (
            ("checkpoint.keep_best=true", "checkpoint.every=4"),
            "checkpoint.keep_best: needs held-out data to say which is best. Add a source to data.heldout.",
        ),
        (
            ("checkpoint.keep_best=true", "checkpoint.every=4", HELDOUT),
            "checkpoint.keep_best: needs checkpoint.every and evaluation.every, so that a saved step is also an "
            "evaluated one. Set both.",
        ),
        (
            ("checkpoint.keep_best=true", "checkpoint.every=10", "evaluation.every=4", HELDOUT),
            "checkpoint.keep_best: checkpoint.every 10 is not a multiple of evaluation.every 4, so some saved steps "
            "would have no held-out loss. Set evaluation.every to a divisor of 10.",
        ),
        (
            ("data.train.0.columns={question: prompt}",),
            "data.train.0.columns.question: not a column that Podium reads. "
            "The left side is one of completion, messages, prompt, text; the right side is your column's name.",
        ),
        ((HELDOUT, "data.heldout.0.columns={query: q}"), "data.heldout.0.columns.query: not a column"),
    ],
)  # fmt: skip
def test_a_broken_rule_says_what_to_change(overrides: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        make_recipe(*overrides)

    assert complaint in str(caught.value)


def test_several_broken_rules_are_reported_together_one_a_line() -> None:
    with pytest.raises(RecipeError, match=r"\(3 problems\)") as caught:
        make_recipe("optimizer.warmup_steps=200", "optimizer.final_lr_ratio=0.5", "evaluation.every=5")

    assert len(str(caught.value).splitlines()) == 4


@pytest.mark.parametrize(
    "overrides",
    [
        ("data.max_length=100", "micro_batch_tokens=100", "tokens_per_step=100"),
        ("data.max_length=2",),
        ("optimizer.warmup_steps=99",),
        ("steps=1", "optimizer.warmup_steps=0"),
        ("optimizer.final_lr_ratio=0.1", "optimizer.schedule=cosine"),
        ("checkpoint.keep_best=true", "checkpoint.every=8", "evaluation.every=4", HELDOUT),
        ("data.train.0.columns={prompt: question, completion: answer}",),
    ],
)
def test_the_border_of_a_rule_is_allowed(overrides: tuple[str, ...]) -> None:
    make_recipe(*overrides)
