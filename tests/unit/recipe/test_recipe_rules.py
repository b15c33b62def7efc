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
            r"data\.max_length: 200 .*micro_batch_tokens 100\b.*data\.max_length to 100\b.*micro_batch_tokens to 200\b",
        ),
        (
            ("data.max_length=200", "tokens_per_step=100"),
            r"data\.max_length: 200 .*tokens_per_step 100\b.*tokens_per_step .* 200\b",
        ),
        (("data.max_length=1",), r"data\.max_length: 1 .* 2\b"),
        (("optimizer.warmup_steps=100",), r"optimizer\.warmup_steps: 100 .*steps 100\b.* 10\b"),
        (
            ("optimizer.final_lr_ratio=0.1",),
            r"optimizer\.final_lr_ratio: 0\.1 .*constant.*optimizer\.schedule .*linear or cosine",
        ),
        (("model.fp8=true", "placement.device=cpu"), r"model\.fp8: CPUs have no products in fp8.*placement\.device"),
        (("rollout.fp8=true", "placement.device=cpu"), r"rollout\.fp8: CPUs have no products in fp8"),
        (("model.fp8=true", "model.dtype=float32"), r"model\.fp8: .*model\.dtype is float32"),
        (
            ("model.fp8=true", "placement.devices=2", "placement.policy={tensor: 2}"),
            r"model\.fp8: .*2 devices.*placement\.policy\.shard",
        ),
        (("evaluation.every=5",), r"evaluation: .*data\.heldout"),
        (("evaluation.at_start=true",), r"evaluation: .*data\.heldout"),
        (("evaluation.generation={}",), r"evaluation: .*data\.heldout"),
        (("checkpoint.keep_best=true", "checkpoint.every=4"), r"checkpoint\.keep_best: .*data\.heldout"),
        (
            ("checkpoint.keep_best=true", "checkpoint.every=4", HELDOUT),
            r"checkpoint\.keep_best: .*checkpoint\.every and evaluation\.every",
        ),
        (
            ("checkpoint.keep_best=true", "checkpoint.every=10", "evaluation.every=4", HELDOUT),
            r"checkpoint\.keep_best: checkpoint\.every 10 .*evaluation\.every 4\b.* 10\b",
        ),
        (
            ("data.train.0.columns={question: prompt}",),
            r"data\.train\.0\.columns\.question: .*[^,] completion, messages, prompt, text[^\w,]",
        ),
        ((HELDOUT, "data.heldout.0.columns={query: q}"), r"data\.heldout\.0\.columns\.query: "),
    ],
)  # fmt: skip
def test_a_broken_rule_says_what_to_change(overrides: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(RecipeError, match=rf"\n  {complaint}"):
        make_recipe(*overrides)


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
