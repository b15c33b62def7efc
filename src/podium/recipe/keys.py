# SPDX-License-Identifier: Apache-2.0
"""The keys of recipes, read from their classes: all keys, their programs, and the class that holds one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, Tag
from pydantic.fields import FieldInfo

from podium.recipe.programs import BUILT_IN, CUSTOM

# Tags of unions inside a recipe are written `key=value`, to distinguish them from keys.
_TAG = "="


def is_tag(part: str) -> bool:
    """Whether a part of a pydantic location is a branch of a union and not a key."""
    kinds = ("literal[", "function-", "constrained-", "str", "nullable", "tuple[")
    return _TAG in part or part == "[key]" or part.startswith(kinds)


def all_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Key paths of a section and of all below it."""
    keys: list[str] = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        for inner in _models(field).values():
            keys += all_keys(inner, f"{prefix}{name}.")
    return list(dict.fromkeys(keys))


@cache
def program_keys() -> Mapping[str, frozenset[str]]:
    """Program -> its key paths. Custom programs count as one, under their name in errors."""
    custom = frozenset(key for kind in CUSTOM.values() for key in all_keys(kind))
    return {name: frozenset(all_keys(kind)) for name, kind in BUILT_IN.items()} | {"a custom program": custom}


def owners_of(location: Sequence[str]) -> list[str]:
    """The programs that have a key; custom ones only if no other has it."""
    key = ".".join(part for part in location if not part.isdigit() and not is_tag(part))
    names = [name for name, keys in program_keys().items() if key in keys]
    return [name for name in names if name in BUILT_IN] or names


def section_at(location: Sequence[str], root: type[BaseModel]) -> type[BaseModel] | None:
    """The class that holds the key at the end of a location, which may name branches of unions."""
    here: type[BaseModel] | None = root
    branches: Mapping[str, type[BaseModel]] = {}
    for part in location[:-1]:
        if part in branches:
            here, branches = branches[part], {}
        elif not part.isdigit() and not is_tag(part):
            field = here.model_fields.get(part) if here else None
            branches = _models(field) if field else {}
            here = next(iter(branches.values()), None)
    return here


def sibling_branches(location: Sequence[str], root: type[BaseModel]) -> tuple[str, list[str]] | None:
    """Returns (the union branch of the location, other branches that have its last key)."""
    tags = [index for index, part in enumerate(location[:-1]) if _TAG in part]
    if not tags or tags[-1] != len(location) - 2:
        return None
    tag, name = location[-2], location[-1]
    fields = [part for part in location[:-2] if not part.isdigit()]
    holder = section_at(fields, root)
    if holder is None or fields[-1] not in holder.model_fields:
        return None
    others = [each for each, model in _models(holder.model_fields[fields[-1]]).items() if name in model.model_fields]
    return tag.partition(_TAG)[2], [each.partition(_TAG)[2] for each in others]


def _models(field: FieldInfo) -> dict[str, type[BaseModel]]:
    """Union branch -> class, of all the classes that a field may hold."""
    return dict(_models_in(field.annotation, ""))


def _models_in(annotation: Any, tag: str) -> Iterator[tuple[str, type[BaseModel]]]:
    if isinstance(annotation, type) and get_origin(annotation) is None:
        if issubclass(annotation, BaseModel):
            yield tag or annotation.__name__, annotation
        return
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        yield from _models_in(inner, next((each.tag for each in metadata if isinstance(each, Tag)), tag))
        return
    for part in get_args(annotation):
        yield from _models_in(part, tag)
