# SPDX-License-Identifier: Apache-2.0
"""The verifier `code`: runs the program of an answer against the tests of its row, in a sandbox."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from podium.environments.sandbox.pool import Language, Sandbox, recipe_sandbox
from podium.errors import DataError

Score = Literal["all", "fraction"]
Compare = Literal["lines", "tokens", "exact"]

DEFAULT_TESTS = "tests"
_SETUPS = ("test_setup", "test_setup_code", "test_imports")
_ENTRY_POINT = "entry_point"
_BLOCK = re.compile(r"```([^\n`]*)\n(.*?)```", re.DOTALL)
_LANGUAGES: dict[Language, tuple[str, ...]] = {
    "python": ("", "python", "py", "python3"),
    "shell": ("", "shell", "sh", "bash", "console"),
}
_INPUTS, _OUTPUTS = ("input", "stdin"), ("output", "stdout", "expected_output")
_CALLS_CHECK = re.compile(r"^def check\(", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Stdio:
    """A test by input and output."""

    stdin: str
    stdout: str


async def code(
    answer: str, reference: str | None, row: Mapping[str, Any], *, tests: str | None = None, setup: str | None = None,
    score: Score = "all", compare: Compare = "lines", language: Language = "python", most_s: float | None = None,
    sandbox: Sandbox | None = None,
) -> dict[str, float]:  # fmt: skip
    """Runs the program in the answer against the row's tests. `most_s`: for all tests of this answer; those that are
    left then fail."""
    box = sandbox or recipe_sandbox()
    program, wanted = program_of(answer, language), row_tests(row, reference, tests)
    if program is None:
        return {"score": 0.0, "passed": 0.0}
    is_all = score == "all"
    if isinstance(wanted[0], Stdio):
        cases = [each for each in wanted if isinstance(each, Stdio)]
        passed = await _run_stdio(box, program, cases, language, compare, is_all=is_all, most_s=most_s)
    else:
        if language != "python":
            raise DataError(
                f"the tests are Python, and options.language is {language}. Give tests by input and output."
            )
        snippets = [_completed(str(each), row) for each in wanted]
        result = await box.test_async(
            program, snippets, setup=setup_of(row, setup), stop_at_failure=is_all, most_s=most_s
        )
        passed = result.num_passed
    return {"score": float(passed == len(wanted)) if is_all else passed / len(wanted), "passed": passed / len(wanted)}


async def _run_stdio(
    box: Sandbox, program: str, cases: Sequence[Stdio], language: Language, compare: Compare, *, is_all: bool,
    most_s: float | None,
) -> int:  # fmt: skip
    end, passed = time.monotonic() + (most_s or float("inf")), 0
    for case in cases:
        left_s = end - time.monotonic()
        if left_s <= 0:
            break
        result = await box.run_async(
            program, language=language, stdin=case.stdin, wall_s=min(left_s, box.limits.wall_s)
        )
        is_right = result.ok and is_same(result.text, case.stdout, compare)
        passed += is_right
        if is_all and not is_right:
            break
    return passed


def program_of(answer: str, language: Language = "python") -> str | None:
    """The last fenced block of the language, or of none; without any block the whole answer. None: all blocks are of
    other languages."""
    blocks = _BLOCK.findall(answer)
    if not blocks:
        return answer
    known = [text for name, text in blocks if (name.split() or [""])[0].lower() in _LANGUAGES[language]]
    return known[-1] if known else None


def is_same(output: str, expected: str, compare: Compare) -> bool:
    """Whether an output is the expected one."""
    match compare:
        case "exact":
            return output == expected
        case "tokens":
            return output.split() == expected.split()
        case "lines":
            return _lines(output) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def row_tests(row: Mapping[str, Any], reference: str | None, column: str | None) -> list[Stdio] | list[str]:
    """The tests of a row: of the column, else of `tests`, else of the reference. At least one, all of one kind."""
    if column is not None and column not in row:
        raise DataError(f"the row has no column {column!r} (options.tests). It has {', '.join(map(str, row))}.")
    where = column or DEFAULT_TESTS
    value = row.get(where, reference)
    if value is None:
        raise DataError("the row has no tests. Give it a column `tests`, or name one in options.tests.")
    if isinstance(value, str):
        value = _parsed(value)
    if isinstance(value, Mapping):
        value = _pairs(value, where)
    elif isinstance(value, str):
        value = [value]
    if not isinstance(value, Sequence) or not value:
        raise DataError(f"column {where}: {_clipped(value)} is no list of tests.")
    if all(isinstance(each, str) for each in value):
        return list(value)
    return [_case(each, where) for each in value]


def setup_of(row: Mapping[str, Any], column: str | None) -> str:
    """What runs before each Python test."""
    if column is not None and column not in row:
        raise DataError(f"the row has no column {column!r} (options.setup). It has {', '.join(map(str, row))}.")
    found = column or next((name for name in _SETUPS if row.get(name)), None)
    value = row[found] if found is not None else ""
    return value if isinstance(value, str) else "\n".join(map(str, value or ()))


def _parsed(text: str) -> Any:
    """Tests as JSON text, or Python code."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, list | dict) else text


def _pairs(value: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    if value.get("fn_name"):
        raise DataError(f"column {where}: tests by fn_name are not supported. Write them as assert statements.")
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
        raise DataError(f"column {where}: a dict of tests has lists `inputs` and `outputs` of one length.")
    return [{"input": each, "output": output} for each, output in zip(inputs, outputs, strict=True)]


def _case(value: Any, where: str) -> Stdio:
    if isinstance(value, Mapping):
        stdin = next((value[name] for name in _INPUTS if name in value), "")
        stdout = next((value[name] for name in _OUTPUTS if name in value), None)
        if stdout is not None:
            return Stdio(_text(stdin), _text(stdout))
    raise DataError(f"column {where}: {_clipped(value)} is no test: give {{input, output}}, or Python code as text.")


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _completed(test: str, row: Mapping[str, Any]) -> str:
    """HumanEval's tests define `check(candidate)`, and name the function in another column."""
    name = row.get(_ENTRY_POINT)
    if isinstance(name, str) and name.isidentifier() and _CALLS_CHECK.search(test):
        return f"{test}\ncheck({name})\n"
    return test


def _clipped(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
