# SPDX-License-Identifier: Apache-2.0
"""The pages about on-policy training are about this code: programs are quoted as they are, recipes and pieces of one's
own work, every key and name is documented, and links lead somewhere."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from pydantic import BaseModel

from podium.algorithms.corrections import CorrectionKind
from podium.algorithms.kl import KlEstimator
from podium.algorithms.policy import PolicyTokens
from podium.controller.ledger import Ledger
from podium.recipe import parse_recipe
from podium.recipe.algorithm import AdvantageName, LossName, ReductionName
from podium.recipe.pipeline_loading import parse_pipeline
from podium.recipe.programs import BUILT_IN, CUSTOM

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
PROGRAMS = ROOT / "src" / "podium" / "programs"
# What every recipe of the table of methods leaves out.
COMMON: dict[str, Any] = {
    "model": {"path": "models/base"},
    "data": {"train": [{"path": "data/train.jsonl"}]},
    "optimizer": {"lr": 1e-6},
    "steps": 100,
}


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def table(name: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading of a page."""
    part = page(name).split(f"\n{heading}\n")[1]
    found = re.search(r"\n\|---.*?\n((?:\|.*\n)+)", part)
    assert found is not None, f"{name} has no table below {heading}"
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in found[1].splitlines()]


def first_names(name: str, heading: str) -> set[str]:
    return {found for row in table(name, heading) for found in re.findall(r"`(\w+)`", row[0])}


def test_the_page_quotes_programs_word_for_word() -> None:
    quoted = blocks(page("docs/on_policy.md"), "python")
    assert len(quoted) == 2
    code = [file.read_text(encoding="utf-8") for file in PROGRAMS.glob("*.py")]
    for block in quoted:
        assert any(block in each for each in code)


def test_the_readme_quotes_grpo_without_its_docstring() -> None:
    (quoted,) = [block for block in blocks(page("README.md"), "python") if "def grpo" in block]
    code = (PROGRAMS / "grpo.py").read_text(encoding="utf-8")
    assert quoted in re.sub(r'\n    """[^\n]*"""', "", code)


@pytest.mark.parametrize("name", ["README.md", "docs/on_policy.md"])
def test_recipes_of_the_page_are_recipes(name: str) -> None:
    recipes = [yaml.safe_load(block) for block in blocks(page(name), "yaml")]
    assert recipes
    for values in recipes:
        parse = parse_pipeline if values["program"] == "pipeline" else parse_recipe
        assert parse({"run": {"name": "page"}, **values}).program == values["program"]


METHODS = table("docs/methods.md", "## By name")


@pytest.mark.parametrize("row", METHODS, ids=[row[0] for row in METHODS])
def test_the_lines_of_a_method_make_a_recipe(row: list[str]) -> None:
    lines = [yaml.safe_load(line) for line in re.findall(r"`(\w+: [^`]*)`", row[1])]
    values = {key: value for line in lines for key, value in line.items()}
    assert "program" in values
    signal = {} if "teachers" in values else {"reward": [{"verifier": "exact_match"}]}
    parse_recipe({**COMMON, **signal, "run": {"name": "method"}, **values})


def test_every_method_that_the_readme_names_is_in_the_table() -> None:
    named = {re.sub(r" as .*| with .*", "", row[0]).lower() for row in METHODS}
    message = re.search(r"\]\(docs/on_policy.md\)\*\*: (.*?), most of them", page("README.md"), flags=re.DOTALL)
    assert message is not None
    for method in re.split(r",\s+|\s+and\s+", message[1]):
        assert re.sub(r"\s+", " ", method).lower() in named


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("## Estimators: `algorithm.advantage`", AdvantageName),
        ("## Losses: `algorithm.loss`", LossName),
        ("## Reductions: `algorithm.reduction`", ReductionName),
        ("## KL to a reference: `algorithm.kl`", KlEstimator),
        ("## Old log-probs and corrections", CorrectionKind),
    ],
)
def test_every_piece_has_its_formula(heading: str, names: Any) -> None:
    assert first_names("docs/methods.md", heading) == set(get_args(names))


def test_a_custom_estimator_works_as_the_page_says() -> None:
    estimate = _defined(0)["against_the_median"]
    rewards_N, group_N = torch.tensor([1.0, 3.0, 8.0, 5.0]), torch.tensor([7, 7, 7, 2])
    assert estimate(rewards_N, group_N).tolist() == [-2.0, 0.0, 5.0, 0.0]


def test_a_custom_loss_works_as_the_page_says() -> None:
    loss = _defined(1)["soft_clip"]
    logprobs_S = torch.tensor([-1.0, -2.0], requires_grad=True)
    tokens = PolicyTokens(
        logprobs_S=logprobs_S, old_logprobs_S=torch.tensor([-1.0, -2.0]), advantages_S=torch.tensor([1.0, -0.5]),
        sequence_S=torch.tensor([0, 1]), num_sequences=2,
    )  # fmt: skip
    found_S = loss(tokens)
    assert found_S.tolist() == [-1.0, 0.5]
    found_S.sum().backward()
    assert logprobs_S.grad is not None
    assert logprobs_S.grad.tolist() == [-1.0, 0.5]


def _defined(number: int) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(blocks(page("docs/methods.md"), "python")[number], names)
    return names


def test_the_fields_of_policy_tokens_are_documented() -> None:
    assert first_names("docs/methods.md", "## A custom loss") == set(PolicyTokens.__dataclass_fields__)


def keys_of(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, str]]:
    """(section, key) of everything that a recipe may say."""
    for name, field in model.model_fields.items():
        inner = [part for part in _parts(field.annotation) if isinstance(part, type) and issubclass(part, BaseModel)]
        yield path or name, name
        for part in inner:
            yield from keys_of(part, path or name)


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)


def test_the_map_of_recipes_has_every_key_and_program() -> None:
    rows = [line for line in page("docs/recipe.md").splitlines() if line.startswith("| `")]
    kinds = [*BUILT_IN.values(), *CUSTOM.values()]
    for section, key in dict.fromkeys(each for kind in kinds for each in keys_of(kind)):
        mine = [row for row in rows if re.match(rf"\| `{section}[`.]", row)]
        assert mine, f"docs/recipe.md has no row for {section}"
        assert any(re.search(rf"`(\w+\.)*{key}`", row) for row in mine), f"{section}: {key} is not in its row"
    programs = next(row for row in rows if row.startswith("| `program`"))
    assert set(re.findall(r"`(\w+)`", programs)) - {"program"} == set(BUILT_IN)


def test_the_columns_of_the_ledger_are_documented(tmp_path: Path) -> None:
    Ledger(tmp_path / "episodes.sqlite").close()
    file = sqlite3.connect(tmp_path / "episodes.sqlite")
    columns = {row[1] for row in file.execute("PRAGMA table_info(episodes)")}
    file.close()
    assert first_names("docs/on_policy.md", "## The ledger") == columns


def anchors(file: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("file", PAGES, ids=[file.name for file in PAGES])
def test_links_lead_somewhere(file: Path) -> None:
    text = re.sub(r"```.*?```", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = (file.parent / path).resolve() if path else file
        assert there.exists(), f"{file.name}: {target}"
        assert not anchor or anchor in anchors(there), f"{file.name}: {target} has no such heading"
