# SPDX-License-Identifier: Apache-2.0
"""The shipped verifiers, value by value, and that a wrong option is refused by name."""

from __future__ import annotations

import re
import time
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.messages import facts
from podium.environments.numerals import final_number
from podium.environments.schemas import fits, schema_problems
from podium.environments.verifiers import bind_verifier, exact_match, json_schema, length, numeric, regex
from podium.errors import DataError, RecipeError

PERSON = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 5, "pattern": "^[A-Z]"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 1]}},
    },
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("answer", "reference", "options", "score"),
    [
        (" yes\n", "yes", {}, 1.0),
        (" yes\n", "yes", {"strip": False}, 0.0),
        ("Yes", "yes", {}, 0.0),
        ("STRASSE", "straße", {"ignore_case": True}, 1.0),
        ("yes, of course", "yes", {}, 0.0),
        ("", "", {}, 1.0),
    ],
)  # fmt: skip
def test_an_exact_match(answer: str, reference: str, options: dict[str, Any], score: float) -> None:
    assert exact_match(answer, reference, **options) == score


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("first 3, then 4: 7 apples.", 7),
        ("It costs $1,234,567.50", Fraction("1234567.5")),
        ("1,2,3", 3),
        ("x = -3", -3),
        ("-$5", -5),
        ("(\u22128)", -8),
        ("3-4", 4),
        ("7 - 4", 4),
        (".5", Fraction(1, 2)),
        ("-.5", Fraction(-1, 2)),
        ("the end is 42.", 42),
        ("wait...42", 42),
        ("3/4", Fraction(3, 4)),
        ("-3 / 4", Fraction(-3, 4)),
        ("on 3/4/2025", 2025),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{ 1 }{ 2 }", Fraction(-1, 2)),
        (r"\frac{-3}{4}", Fraction(-3, 4)),
        (r"2\frac12", Fraction(5, 2)),
        ("1.5e3", 1500),
        ("2E-2", Fraction(1, 50)),
        ("1.5 × 10^3", 1500),
        (r"2.5\times 10^{-2}", Fraction(1, 40)),
        ("10**4", 10_000),
        (r"1{,}234", 1234),
        (r"1\,234", 1234),
        ("16 divided by 2 is 8\n#### 8", 8),
        ("#### 1,000\nThe year 2024", 1000),
        (r"\boxed{7} and not 9", 7),
        (r"\boxed{1}, no, \boxed{\frac{1}{2}}", Fraction(1, 2)),
        (r"\boxed{42\text{ cm}^2}", 42),
        (r"so 7 \boxed{4", 4),
        ("an area of 12 km2", 12),
        ("**9**", 9),
    ],
)  # fmt: skip
def test_the_last_number_of_a_text(text: str, value: Fraction | int) -> None:
    number = final_number(text)

    assert number is not None
    assert number.value == value
    assert not number.percent


@pytest.mark.parametrize("text", ["", "none", "x2", "1/0", "1e999999999", "10^{999999999}", "9" * 1000, r"\boxed{x} 3"])
def test_no_number_in_a_text(text: str) -> None:
    assert final_number(text) is None


@given(st.fractions(max_denominator=10_000))
def test_a_written_fraction_is_read_back(value: Fraction) -> None:
    number = final_number(f"so the answer is {value}.")

    assert number is not None
    assert number.value == value


@given(st.integers(-(10**15), 10**15))
def test_thousands_separators_change_nothing(value: int) -> None:
    assert numeric(f"it is {value:,}", str(value)) == 1.0


@given(st.text(alphabet="0123456789-+.,/%$ {}\\boxedfrac^*eE#\n", max_size=60))
def test_no_answer_makes_the_search_fail(text: str) -> None:
    assert numeric(text, "1") in (0.0, 1.0)


@pytest.mark.parametrize(
    "evil",
    ["1," * 20_000, "\\boxed{" * 20_000, "{" * 100_000, "1/" * 20_000, "-" * 50_000, "9" * 100_000, "1 x" * 20_000,
     "\\frac{" * 20_000, "1" + " " * 100_000, "10^" * 20_000, "####" * 20_000, ",111" * 20_000],
)  # fmt: skip
def test_an_answer_of_nonsense_takes_no_time(evil: str) -> None:
    began = time.perf_counter()
    final_number(evil)
    assert time.perf_counter() - began < 2.0  # a search that goes back and forth would take minutes


@pytest.mark.parametrize(
    ("answer", "reference", "options", "score"),
    [
        ("The answer is 0.5", "1/2", {}, 1.0),
        ("3.14", "3.14159", {}, 0.0),
        ("3.14", "3.14159", {"tolerance": 0.01}, 1.0),
        ("0.3333333333", "1/3", {}, 1.0),
        ("0.33", "1/3", {}, 0.0),
        ("50%", "50", {}, 1.0),
        ("50%", "0.5", {}, 1.0),
        ("0.5", "50%", {}, 1.0),
        ("5000%", "50%", {}, 0.0),
        ("5000", "50%", {}, 0.0),
        ("no idea", "50", {}, 0.0),
        ("so 18\n#### 18", "Janet sells 9 eggs, 9 * 2 = 18.\n#### 18", {}, 1.0),
        ("12345678901234567890", "12345678901234567891", {}, 0.0),
    ],
)  # fmt: skip
def test_numbers_are_compared_exactly_up_to_the_tolerance(
    answer: str, reference: str, options: dict[str, Any], score: float
) -> None:
    assert numeric(answer, reference, **options) == score


def test_a_reference_without_number_is_the_data_s_fault() -> None:
    with pytest.raises(DataError, match="'seven'"):
        numeric("7", "seven")


@pytest.mark.parametrize(
    ("answer", "reference", "options", "score"),
    [
        ("<think>a</think>b", None, {"pattern": r"<think>.*</think>"}, 1.0),
        ("b", None, {"pattern": r"<think>.*</think>"}, 0.0),
        ("<a>x", None, {"pattern": "<a>", "mode": "fullmatch"}, 0.0),
        (" <a> ", None, {"pattern": "<a>", "mode": "fullmatch"}, 1.0),
        ("<answer> B </answer>", "B", {"pattern": "<answer>(.*)</answer>", "group": 1}, 1.0),
        ("<answer>C</answer>", "B", {"pattern": "<answer>(.*)</answer>", "group": 1}, 0.0),
        ("answer: b", "B", {"pattern": "ANSWER: (?P<letter>.)", "group": "letter", "ignore_case": True}, 1.0),
        ("nothing", "B", {"pattern": "<answer>(.*)</answer>", "group": 1}, 0.0),
        ("y", "B", {"pattern": "(x)|y", "group": 1}, 0.0),
        ("B", "B", {"pattern": ".", "group": 0}, 1.0),
    ],
)  # fmt: skip
def test_patterns(answer: str, reference: str | None, options: dict[str, Any], score: float) -> None:
    assert regex(answer, reference, **options) == score


@pytest.mark.parametrize("verifier", [exact_match, numeric, lambda a, r: regex(a, r, pattern="(.)", group=1)])
def test_a_missing_reference_is_reported(verifier: Any) -> None:
    with pytest.raises(DataError, match="no reference"):
        verifier("7", None)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ('{"name": "Ann", "age": 3, "tags": ["a", 1]}', 1.0),
        ('{"name": "Ann", "age": 3.0}', 1.0),
        ('{"age": 3}', 0.0),
        ('{"name": "Ann", "age": true}', 0.0),
        ('{"name": "Ann", "age": 3.5}', 0.0),
        ('{"name": "Ann", "age": -1}', 0.0),
        ('{"name": "Ann", "age": 151}', 0.0),
        ('{"name": ""}', 0.0),
        ('{"name": "Annabel"}', 0.0),
        ('{"name": "ann"}', 0.0),
        ('{"name": "Ann", "tags": ["c"]}', 0.0),
        ('{"name": "Ann", "tags": [true]}', 0.0),
        ('{"name": "Ann", "shoes": 2}', 0.0),
        ('["Ann"]', 0.0),
        ("Ann", 0.0),
        ("", 0.0),
        ('{"name": "Ann"} and more', 0.0),
        ('{"name": "Ann", "age": NaN}', 0.0),
        ('{"name": "Ann", "age": 1e999}', 0.0),
        ("[" * 100_000, 0.0),
        ("9" * 10_000, 0.0),
    ],
)  # fmt: skip
def test_json_of_a_schema(answer: str, score: float) -> None:
    assert json_schema(answer, None, schema=PERSON) == score


def test_fenced_json_is_read_when_requested() -> None:
    answer = 'Here:\n```json\n{"x": 1}\n```\nor rather\n```json\n{"name": "Ann"}\n```\n'

    assert json_schema(answer, None, schema=PERSON, fenced=True) == 1.0
    assert json_schema(answer, None, schema=PERSON) == 0.0
    assert json_schema('{"name": "Ann"}', None, schema=PERSON, fenced=True) == 1.0


@pytest.mark.parametrize(
    ("value", "schema", "does"),
    [
        (1, {"const": 1.0}, True),
        (True, {"const": 1}, False),
        ([1, {"a": [True]}], {"const": [1, {"a": [True]}]}, True),
        ([1, {"a": [1]}], {"const": [1, {"a": [True]}]}, False),
        (None, {"type": ["string", "null"]}, True),
        (3, {"type": ["string", "null"]}, False),
        ({"a": 1}, {"additionalProperties": {"type": "integer"}}, True),
        ({"a": "x"}, {"additionalProperties": {"type": "integer"}}, False),
        ("anything", {}, True),
        ("anything", {"minimum": 3, "items": False}, True),
        ([1], {"items": False}, False),
        (2, {"type": "number", "description": "a number", "title": "n"}, True),
        (2, {"anyOf": [{"type": "string"}, {"exclusiveMinimum": 1}]}, True),
        (1, {"anyOf": [{"type": "string"}, {"exclusiveMinimum": 1}]}, False),
        ({"a": {"a": {}}}, {"$ref": "#/$defs/tree", "$defs": {"tree": {"additionalProperties": {"$ref": "#"}}}}, True),
        ({"a": 1}, {"additionalProperties": {"$ref": "#/$defs/s"}, "$defs": {"s": {"type": "string"}}}, False),
        ("2026-02-30", {"format": "date"}, False),
    ],
)  # fmt: skip
def test_values_and_schemas(value: Any, schema: Any, does: bool) -> None:
    assert schema_problems(schema) == []
    assert fits(value, schema) is does


def test_no_reference_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("a download"))
    schema = {"$ref": "https://example.org/s.json"}

    assert schema_problems(schema)
    with pytest.raises(Exception, match=re.escape("https://example.org/s.json")):
        fits(1, schema)


@pytest.mark.slow
def test_problems_of_a_schema_are_few_and_short() -> None:
    problems = schema_problems({"properties": {f"p{i}": {"x" * 1000: 1} for i in range(1000)}})

    assert len(problems) == 9
    assert all(len(problem) < 300 for problem in problems)


@pytest.mark.parametrize(
    ("answer", "schema"),
    [
        ("9" * 4000, {"multipleOf": 0.5}),
        ("[" * 900 + "]" * 900, {"items": {"$ref": "#"}, "type": "array"}),
        ('"(' + "(" * 5000 + '"', {"format": "regex"}),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_checked_does_not_fit(answer: str, schema: Any) -> None:
    assert json_schema(answer, None, schema=schema) == 0.0


@pytest.mark.parametrize(
    ("answer", "options", "score"),
    [
        ("x" * 10, {"max": 10}, 0.0),
        ("x" * 15, {"max": 10}, -0.5),
        ("x" * 30, {"max": 10}, -1.0),
        ("x" * 15, {"max": 10, "ramp": 20}, -0.25),
        ("x", {"max": 0}, -1.0),
        ("", {"min": 4}, -1.0),
        ("xxx", {"min": 4}, -0.25),
        ("x" * 12, {"target": 10}, -0.2),
        ("x" * 8, {"target": 10}, -0.2),
        ("three short words", {"unit": "words", "min": 2, "max": 3}, 0.0),
        ("one two three four", {"unit": "words", "max": 2}, -1.0),
    ],
)  # fmt: skip
def test_a_length_costs_linearly(answer: str, options: dict[str, Any], score: float) -> None:
    assert length(answer, None, **options) == pytest.approx(score)


def test_a_bound_verifier_has_its_options() -> None:
    assert bind_verifier("numeric", {"tolerance": 1}, "reward.0")("3", "4") == 1.0
    assert bind_verifier("json_schema", {"schema": {"type": "array"}}, "reward.0")("[1]", None) == 1.0


@pytest.mark.parametrize(
    ("name", "options", "key", "said"),
    [
        ("exact_match", {"ignorecase": True}, "ignorecase", ["exact_match", "ignore_case, strip"]),
        ("exact_match", {"strip": "no"}, "strip", ["boolean", "'no'"]),
        ("numeric", {"tolerance": -1}, "tolerance", ["0", "-1"]),
        ("numeric", {"tolerance": True}, "tolerance", ["True"]),
        ("regex", {}, "pattern", ["missing"]),
        ("regex", {"pattern": "("}, "pattern", ["unterminated"]),
        ("regex", {"pattern": "a", "group": 1}, "group", ["group 1", "0"]),
        ("regex", {"pattern": "a", "mode": "match"}, "mode", ["'search'", "'fullmatch'"]),
        ("json_schema", {}, "schema", ["missing"]),
        ("json_schema", {"schema": {"typ": "object"}}, "schema", ["'typ'", "'type'"]),
        ("json_schema", {"schema": {"properties": {"a": {"someOf": []}}}}, "schema", ["properties.a: ", "'someOf'"]),
        ("json_schema", {"schema": {"items": {"type": "text"}}}, "schema", ["items.type: 'text'", "['array'"]),
        ("json_schema", {"schema": {"pattern": "("}}, "schema", ["pattern: '('"]),
        ("json_schema", {"schema": {"required": "name"}}, "schema", ["required: 'name'"]),
        ("json_schema", {"schema": {"items": [1]}}, "schema", ["items: [1]"]),
        ("json_schema", {"schema": {"enum": [object]}}, "schema", ["not JSON"]),
        ("json_schema", {"schema": {"format": "phone"}}, "schema", ["format: 'phone'"]),
        ("json_schema", {"schema": {"$schema": "http://json-schema.org/draft-07/schema#"}}, "schema", ["$schema: "]),
        ("json_schema", {"schema": {"items": {"$ref": "https://example.org/s.json"}}}, "schema",
         ["items.$ref: 'https:"]),
        ("json_schema", {"schema": {"items": {"$ref": "#/$defs/a"}}}, "schema", ["$ref: '#/$defs/a'"]),
        ("json_schema", {"schema": "{}"}, "schema", ["dictionary", "'{}'"]),
        ("length", {}, "target", ["length"]),
        ("length", {"target": 3, "max": 4}, "target", ["min", "max"]),
        ("length", {"min": 5, "max": 4}, "min", ["5", "max 4"]),
        ("length", {"max": 2.5}, "max", ["integer", "2.5"]),
    ],
)  # fmt: skip
def test_wrong_options_are_refused_by_name(name: Any, options: dict[str, Any], key: str, said: list[str]) -> None:
    with pytest.raises(RecipeError, match=facts(f"reward.1.options.{key}: ", *said)):
        bind_verifier(name, options, "reward.1")


def test_all_wrong_options_are_reported_at_once() -> None:
    with pytest.raises(RecipeError) as refusal:
        bind_verifier("length", {"max": "x", "mim": 3}, "reward.0")

    assert [line.partition(":")[0] for line in str(refusal.value).split("\n")] == [
        "reward.0.options.max",
        "reward.0.options.mim",
    ]
