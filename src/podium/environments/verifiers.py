# SPDX-License-Identifier: Apache-2.0
"""Verifiers that Podium ships: pure functions of an answer and its reference, and the checks of their options."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from podium.environments.code_tests import Compare, Score, code
from podium.environments.numerals import final_number
from podium.environments.sandbox.pool import Language, recipe_sandbox
from podium.errors import DataError, MissingExtraError, RecipeError
from podium.importing import import_all
from podium.recipe.fields import Count, NonNegative, Real, Section, Switch
from podium.recipe.on_policy import VerifierName

if TYPE_CHECKING:
    from podium.environments.schemas import Schema

Verifier = Callable[..., Any]
"""Takes answer and reference, and gives a number. `code` is asynchronous, takes the row too, and gives a dict."""

_MATH_DELIMITERS = ("$", r"\boxed", r"\(", r"\[")
# A call of `code` ends by itself before its deadline: an answer that hangs is wrong, and no failure of the reward.
_SHARE_OF_TIMEOUT = 0.8
_FENCED = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)


def exact_match(answer: str, reference: str | None, *, ignore_case: bool = False, strip: bool = True) -> float:
    """1 if the answer equals the reference."""
    expected = _required(reference)
    if strip:
        answer, expected = answer.strip(), expected.strip()
    if ignore_case:
        answer, expected = answer.casefold(), expected.casefold()
    return float(answer == expected)


def numeric(answer: str, reference: str | None, *, tolerance: float = 1e-6) -> float:
    """1 if the last number of the answer equals the reference's; see `numerals` for what a number is."""
    expected = final_number(_required(reference))
    if expected is None:
        raise DataError(f"the reference {_shortened(reference)} has no number. Use another verifier for such rows.")
    number = final_number(answer)
    return float(number is not None and number.is_near(expected, tolerance))


def regex(
    answer: str, reference: str | None, *, pattern: str, mode: Literal["search", "fullmatch"] = "search",
    group: int | str | None = None, ignore_case: bool = False,
) -> float:  # fmt: skip
    """1 if the pattern is found; with `group`, if that group's match equals the reference."""
    compiled = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    match = compiled.search(answer) if mode == "search" else compiled.fullmatch(answer.strip())
    if group is None:
        return float(match is not None)
    expected = _required(reference)
    text = match[group] if match is not None else None
    return 0.0 if text is None else exact_match(text, expected, ignore_case=ignore_case)


def json_schema(answer: str, reference: str | None = None, *, schema: Schema, fenced: bool = False) -> float:
    """1 if the answer is JSON that fits; `fenced` uses the content of its last ``` block, if it has one."""
    from podium.environments.schemas import fits  # takes 60 ms, and few recipes use it

    if fenced:
        blocks = _FENCED.findall(answer)
        answer = blocks[-1] if blocks else answer
    try:
        value = json.loads(answer, parse_constant=_not_json, parse_float=_finite)
        return float(fits(value, schema))
    except (ValueError, RecursionError, OverflowError):  # not JSON, nested too deeply, or a number of 400 digits
        return 0.0


def math_verify(
    answer: str, reference: str | None, *, float_rounding: int = 6, strict: bool = True
) -> float:  # fmt: skip
    """1 if answer and reference are the same expression, number, set or interval, as math-verify reads them.

    Its run time depends on the expression: the caller has a timeout."""
    from math_verify import parse, verify

    expected = _as_latex(_required(reference))
    # Its own timeouts are signals, which work in main threads only.
    gold = parse(expected, parsing_timeout=None)
    if not gold:
        raise DataError(
            f"the reference {_shortened(reference)} has no expression that math-verify can read. Use another verifier "
            "for such rows."
        )
    target = parse(answer, parsing_timeout=None)
    options = {"float_rounding": float_rounding, "strict": strict, "timeout_seconds": None}
    return float(verify(gold, target, **options))


def _as_latex(reference: str) -> str:
    """A reference is often LaTeX without delimiters, which math-verify does not look for in plain text."""
    final = reference.rpartition("####")[2].strip()
    return final if any(mark in final for mark in _MATH_DELIMITERS) else f"\\boxed{{{final}}}"


def length(
    answer: str, reference: str | None = None, *, unit: Literal["characters", "words"] = "characters",
    target: int | None = None, min: int | None = None, max: int | None = None, ramp: int | None = None,
) -> float:  # fmt: skip
    """0 if the length is right, down to -1 if it is wrong by `ramp` or more (default: by the bound itself)."""
    count = len(answer) if unit == "characters" else len(answer.split())
    low = target if target is not None else min
    high = target if target is not None else max
    if low is not None and count < low:
        return -_share(low - count, ramp or low)
    if high is not None and count > high:
        return -_share(count - high, ramp or high)
    return 0.0


def bind_verifier(name: VerifierName, options: Mapping[str, Any], key: str) -> Verifier:
    """The verifier with its options checked. A mistake raises a RecipeError that names `key`.options.X."""
    function, model = _VERIFIERS[name]
    try:
        checked = model.model_validate(dict(options))
    except ValidationError as error:
        raise RecipeError("\n".join(_explained(error, model, name, f"{key}.options"))) from None
    if name == "math_verify" and importlib.util.find_spec("math_verify") is None:
        raise MissingExtraError(
            f"{key}.verifier: math_verify needs the package math-verify, which is not installed. Install it with pip "
            "install 'podium[math]', or use verifier: numeric."
        )
    return partial(function, **checked.model_dump(by_alias=True))


def load_verifier(
    name: VerifierName, options: Mapping[str, Any], key: str, *, timeout_s: float | None = None
) -> Verifier:
    """Like `bind_verifier`, and imports the verifier's dependencies, so that imports do not count in the first call's
    timeout. `timeout_s`: longest time of one call, which a verifier that runs programs keeps within."""
    verifier = bind_verifier(name, options, key)
    if name == "code":
        recipe_sandbox().require()
        return partial(verifier, most_s=None if timeout_s is None else _SHARE_OF_TIMEOUT * timeout_s)
    if name == "math_verify":
        import_all(["math_verify"])
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off
    return verifier


class _Code(Section):
    tests: str | None = None
    setup: str | None = None
    score: Score = "all"
    compare: Compare = "lines"
    language: Language = "python"


class _ExactMatch(Section):
    ignore_case: Switch = False
    strip: Switch = True


class _Numeric(Section):
    tolerance: Real = Field(1e-6, ge=0)


class _Regex(Section):
    pattern: str
    mode: Literal["search", "fullmatch"] = "search"
    group: Annotated[int, Field(ge=0, strict=True)] | str | None = None
    ignore_case: Switch = False

    @model_validator(mode="after")
    def _compiles(self) -> Self:
        try:
            compiled = re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern: not a regular expression ({error})") from error
        known = [*range(compiled.groups + 1), *compiled.groupindex]
        if self.group is not None and self.group not in known:
            raise ValueError(f"group: the pattern has no group {self.group!r}; it has {', '.join(map(str, known))}")
        return self


def _is_schema(value: Any) -> Any:
    from podium.environments.schemas import schema_problems

    try:
        schema = json.loads(json.dumps(value))  # tuples become lists
    except (TypeError, ValueError) as error:
        raise ValueError(f"not JSON ({error})") from error
    if problems := schema_problems(schema):
        raise ValueError("; ".join(problems))
    return schema


class _JsonSchema(Section):
    schema_: Annotated[dict[str, Any], AfterValidator(_is_schema)] = Field(alias="schema")
    fenced: Switch = False


class _MathVerify(Section):
    float_rounding: NonNegative = 6
    strict: Switch = True


class _Length(Section):
    unit: Literal["characters", "words"] = "characters"
    target: Count | None = None
    min: Count | None = None
    max: NonNegative | None = None
    ramp: Count | None = None

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.target is None and self.min is None and self.max is None:
            raise ValueError("target: say which length is right: give target, or min, max or both")
        if self.target is not None and (self.min is not None or self.max is not None):
            raise ValueError("target: is min and max at once; remove it, or those")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min: {self.min} is above max {self.max}, so no length would be right")
        return self


_VERIFIERS: dict[VerifierName, tuple[Callable[..., Any], type[Section]]] = {
    "exact_match": (exact_match, _ExactMatch),
    "numeric": (numeric, _Numeric),
    "regex": (regex, _Regex),
    "json_schema": (json_schema, _JsonSchema),
    "math_verify": (math_verify, _MathVerify),
    "length": (length, _Length),
    "code": (code, _Code),
}


def _explained(error: ValidationError, model: type[Section], name: str, key: str) -> list[str]:
    known = ", ".join(field.alias or field_name for field_name, field in model.model_fields.items())
    lines: list[str] = []
    for detail in error.errors():
        where = str(detail["loc"][0]) if detail["loc"] else None
        message = str(detail["msg"]).removeprefix("Value error, ")
        match detail["type"]:
            case "extra_forbidden":
                line = f"{key}.{where}: {name} has no such option. It has: {known}."
            case "missing":
                line = f"{key}.{where}: {name} needs it, and it is missing."
            case "value_error":
                line = f"{key}.{message if where is None else f'{where}: {message}'}."
            case _:
                line = f"{key}.{where}: {message[0].lower() + message[1:]}, found {detail['input']!r}."
        if line not in lines:
            lines.append(line)
    return lines


def _required(reference: str | None) -> str:
    if reference is None:
        raise DataError(
            "the row has no reference to compare the answer with. Give it a column `answer`, or name one in the "
            "source's `columns`: {reference: COLUMN}."
        )
    return reference


def _share(distance: int, full: int) -> float:
    return min(1.0, distance / full) if full else 1.0


def _shortened(text: str | None) -> str:
    quoted = repr(text)
    return quoted if len(quoted) <= 60 else quoted[:57] + "..."


def _not_json(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    return value if abs(value) != float("inf") else _not_json(text)
