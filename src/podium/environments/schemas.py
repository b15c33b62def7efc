# SPDX-License-Identifier: Apache-2.0
"""JSON Schema, draft 2020-12, validated by `jsonschema`. Unknown keywords and remote references are refused."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

Schema = Mapping[str, Any] | bool

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_FORMATS = Draft202012Validator.FORMAT_CHECKER
_UNSUPPORTED = ("$dynamicRef", "contentSchema")
# Keywords that have no check of their own: they annotate, or another keyword reads them.
_ANNOTATIONS = (
    "$schema", "$id", "$anchor", "$defs", "$comment", "title", "description", "default", "examples", "deprecated",
    "readOnly", "writeOnly", "then", "else", "minContains", "maxContains",
)  # fmt: skip
_KEYWORDS = sorted({*Draft202012Validator.VALIDATORS, *_ANNOTATIONS} - {*_UNSUPPORTED})
# An explicit registry: jsonschema's default one downloads references that it does not have.
_LOCAL: Registry[Any] = Registry()
_LOCAL_REF = "^#"
_MAX_PROBLEMS, _MAX_CHARS = 8, 200

# The metaschema, and what it leaves open: at every level, only these keywords, formats that are checked, local $ref.
_STRICT_METASCHEMA = Draft202012Validator(
    {
        "$schema": _DIALECT,
        "$id": "urn:podium:strict-metaschema",
        "$dynamicAnchor": "meta",
        "$ref": _DIALECT,
        "propertyNames": {"enum": _KEYWORDS},
        "properties": {
            "$schema": {"const": _DIALECT},
            "$ref": {"pattern": _LOCAL_REF},
            "format": {"enum": sorted(_FORMATS.checkers)},
        },
    },
    registry=_LOCAL,
    format_checker=_FORMATS,
)


def schema_problems(schema: Any) -> list[str]:
    """Why this is not a schema that `fits` supports, one sentence each; empty if it is."""
    errors = (best_match([error]) for error in _STRICT_METASCHEMA.iter_errors(schema))
    problems = sorted({_describe(error) for error in errors if error is not None})
    if not problems:
        root = DRAFT202012.create_resource(schema)
        problems = list(_unresolved(root, _LOCAL.resolver_with_root(root)))
    more = len(problems) - _MAX_PROBLEMS
    return [*problems[:_MAX_PROBLEMS], *([f"{more} more problems"] if more > 0 else [])]


def fits(value: Any, schema: Schema) -> bool:
    """Whether parsed JSON matches the schema, which must have no problems."""
    return Draft202012Validator(schema, registry=_LOCAL, format_checker=_FORMATS).is_valid(value)


def _describe(error: ValidationError) -> str:
    path = ".".join(str(part) for part in error.absolute_path)
    if error.validator == "enum" and error.validator_value is _KEYWORDS:
        similar = difflib.get_close_matches(error.instance, _KEYWORDS, n=1)
        advice = f"did you mean {similar[0]!r}?" if similar else "remove it"
        message = f"the keyword {_clip(repr(error.instance))} is not supported; {advice}"
    elif error.validator_value == _LOCAL_REF:
        message = f"{_clip(repr(error.instance))} is not in this schema; references are local (#/$defs/NAME)"
    else:  # `type` is a name or a list of names: the first is nearly always meant
        message = _clip(error.context[0].message if error.context else error.message)
    return f"{path}: {message}" if path else message


def _unresolved(resource: Resource[Any], resolver: Any) -> Iterator[str]:
    resolver = resolver.in_subresource(resource)
    if isinstance(resource.contents, Mapping) and "$ref" in resource.contents:
        try:
            resolver.lookup(resource.contents["$ref"])
        except Unresolvable:
            yield f"$ref: {_clip(repr(resource.contents['$ref']))} is not in this schema"
    for part in resource.subresources():
        yield from _unresolved(part, resolver)


def _clip(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."
