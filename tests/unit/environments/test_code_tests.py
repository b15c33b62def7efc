# SPDX-License-Identifier: Apache-2.0
"""What the verifier `code` takes for the program and for its tests. It runs nothing here."""

from __future__ import annotations

from typing import Any

import pytest

from podium.checks import check_recipe
from podium.environments.code_tests import Stdio, is_same, program_of, row_tests, setup_of
from podium.environments.sandbox import isolation
from podium.environments.verifiers import bind_verifier
from podium.errors import DataError, PodiumError, RecipeError, SandboxError
from podium.recipe import parse_recipe
from podium.recipe.warnings import recipe_warnings


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("print(1)", "print(1)"),
        ("First:\n```python\na\n```\nbetter:\n```py\nb\n```\nrun it:\n```bash\npython x.py\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("```rust\nfn main() {}\n```", None),
        ("```python\ncut off", "```python\ncut off"),
    ],
)
def test_the_program_is_the_last_block_of_its_language_or_the_whole_answer(answer: str, program: str | None) -> None:
    assert program_of(answer) == program


def test_a_shell_script_is_in_a_block_of_a_shell() -> None:
    assert program_of("```python\na\n```\n```sh\nb\n```", "shell") == "b\n"


@pytest.mark.parametrize(
    ("output", "lines", "tokens", "exact"),
    [
        ("1\n2\n", True, True, True),
        ("1 \n2\n\n", True, True, False),
        ("1 2\n", False, True, False),
        ("1\n3\n", False, False, False),
    ],
)
def test_outputs_are_compared_by_lines_tokens_or_exactly(output: str, lines: bool, tokens: bool, exact: bool) -> None:
    expected = "1\n2\n"
    assert is_same(output, expected, "lines") is lines
    assert is_same(output, expected, "tokens") is tokens
    assert is_same(output, expected, "exact") is exact


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (["assert f(1) == 2", "assert f(2) == 3"], ["assert f(1) == 2", "assert f(2) == 3"]),
        ("assert f(1) == 2", ["assert f(1) == 2"]),
        ('["assert f(1) == 2"]', ["assert f(1) == 2"]),
        ([{"input": "1\n", "output": "2\n"}], [Stdio("1\n", "2\n")]),
        ([{"stdin": "1", "expected_output": 2}], [Stdio("1", "2")]),
        ({"inputs": ["1", ["2", "3"]], "outputs": ["4", "5"]}, [Stdio("1", "4"), Stdio("2\n3", "5")]),
        ('{"inputs": ["1"], "outputs": ["4"]}', [Stdio("1", "4")]),
        ([{"output": "hi"}], [Stdio("", "hi")]),
    ],
)
def test_tests_have_the_forms_of_common_datasets(value: Any, expected: list[Any]) -> None:
    assert row_tests({"tests": value}, None, None) == expected
    assert row_tests({"private": value}, None, "private") == expected


def test_the_reference_has_the_tests_where_the_row_has_no_such_column() -> None:
    assert row_tests({}, "assert f() == 1", None) == ["assert f() == 1"]


@pytest.mark.parametrize(
    ("row", "column", "says"),
    [
        ({}, None, "no tests"),
        ({"a": 1}, "b", "no column 'b'"),
        ({"tests": []}, None, "no list of tests"),
        ({"tests": [3]}, None, "3 is no test"),
        ({"tests": [{"input": "1"}]}, None, "is no test"),
        ({"tests": {"inputs": ["1"], "outputs": []}}, None, "of one length"),
        ({"tests": {"fn_name": "f", "inputs": [[1]], "outputs": [[2]]}}, None, "fn_name"),
    ],
)
def test_rows_without_usable_tests_are_named(row: dict[str, Any], column: str | None, says: str) -> None:
    with pytest.raises(DataError, match=says):
        row_tests(row, None, column)


def test_setup_comes_from_its_column_or_from_those_of_mbpp() -> None:
    assert setup_of({}, None) == ""
    assert setup_of({"test_imports": ["import math", "import re"]}, None) == "import math\nimport re"
    assert setup_of({"test_setup_code": "x = 1", "before": "y = 2"}, "before") == "y = 2"


def test_options_of_the_verifier_are_checked() -> None:
    bind_verifier("code", {"tests": "private", "score": "fraction", "compare": "tokens"}, "reward.0")
    with pytest.raises(RecipeError, match=r"reward\.0\.options\.scores: code has no such option"):
        bind_verifier("code", {"scores": "all"}, "reward.0")


def _recipe(**sandbox: Any) -> dict[str, Any]:
    recipe: dict[str, Any] = {
        "program": "grpo",
        "model": {"path": "nowhere"},
        "data": {"train": [{"path": "nowhere.jsonl"}]},
        "reward": ["code"],
        "optimizer": {"lr": 1e-5},
        "steps": 1,
    }
    return recipe | ({"sandbox": sandbox} if sandbox else {})


def _problems(recipe: dict[str, Any]) -> str:
    try:
        check_recipe(parse_recipe(recipe))
    except PodiumError as error:
        return str(error)
    return ""


def test_check_refuses_code_where_bubblewrap_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation.shutil, "which", lambda name: None)  # type: ignore[attr-defined]

    problems = _problems(_recipe())

    assert "bubblewrap (bwrap) is not installed" in problems
    assert "sandbox.allow_unsafe" in problems


def test_allow_unsafe_passes_the_check_and_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation.shutil, "which", lambda name: None)  # type: ignore[attr-defined]

    recipe = _recipe(allow_unsafe=True)

    assert "bubblewrap" not in _problems(recipe)
    assert any("sandbox.allow_unsafe" in text for text in recipe_warnings(parse_recipe(recipe)))


@pytest.mark.parametrize(("platform", "machine"), [("darwin", "arm64"), ("linux", "riscv64")])
def test_machines_that_cannot_isolate_are_named(monkeypatch: pytest.MonkeyPatch, platform: str, machine: str) -> None:
    monkeypatch.setattr(isolation.sys, "platform", platform)  # type: ignore[attr-defined]
    monkeypatch.setattr(isolation.platform, "machine", lambda: machine)  # type: ignore[attr-defined]

    with pytest.raises(SandboxError, match="Linux" if platform == "darwin" else machine):
        isolation.bubblewrap()
