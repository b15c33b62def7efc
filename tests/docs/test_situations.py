# SPDX-License-Identifier: Apache-2.0
"""Every fragment on the page of situations makes a valid recipe together with a plain one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from helpers.pages import DOCS
from podium.recipe import parse_recipe

PAGE = (DOCS / "situations.md").read_text(encoding="utf-8")
SITUATIONS = re.findall(r"^### (.*?)\n(.*?)(?=^##|\Z)", PAGE, flags=re.DOTALL | re.MULTILINE)
BASE: dict[str, Any] = {
    "program": "sft",
    "model": {"path": "models/base"},
    "data": {"train": [{"path": "data/train.jsonl"}], "heldout": [{"path": "data/heldout.jsonl"}]},
    "optimizer": {"lr": 1e-6},
    "steps": 100,
    "run": {"name": "situation"},
}
REWARD = {"reward": [{"verifier": "numeric"}]}


def merged(base: Mapping[str, Any], fragment: Mapping[str, Any]) -> dict[str, Any]:
    """The fragment's keys over the base's, section by section."""
    result = dict(base)
    for key, value in fragment.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


@pytest.mark.parametrize(("title", "text"), SITUATIONS, ids=[title for title, _ in SITUATIONS])
def test_a_fragment_makes_a_recipe_and_has_a_reason(title: str, text: str) -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    fragment = yaml.safe_load(block)
    programs = [fragment["program"]] if "program" in fragment else ["sft", "grpo"]

    for program in programs:
        base = BASE | {"program": program} | (REWARD if program == "grpo" else {})
        parse_recipe(merged(base, fragment))

    assert text.partition("```yaml")[2].partition("\n```\n")[2].strip()


def test_every_fragment_is_found() -> None:
    assert len(SITUATIONS) == PAGE.count("```yaml") > 15
