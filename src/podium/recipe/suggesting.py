# SPDX-License-Identifier: Apache-2.0
"""What to write instead of an unknown key: its new name, the program that has it, the name that stands for another
project's, the nearest key, or its right place."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from podium.recipe.keys import all_keys, is_tag, owners_of, section_at, sibling_branches
from podium.recipe.migration import KEYS, SECTIONS, WITHOUT, KeyHint
from podium.recipe.programs import BUILT_IN, CUSTOM
from podium.recipe.recipes import Recipe
from podium.recipe.retired import new_name

_MOST_INNER_HINTS = 64


def suggestions(location: Sequence[str], value: Any, root: type[BaseModel]) -> list[str]:
    """One line for an unknown key, and one for each key below it that another project has."""
    path = [part for part in location if not is_tag(part)]
    key = ".".join(path)
    if (now := new_name(key)) is not None:
        return [f"{key}: is called {now} now."]
    inner = list(_inner_hints(path, value, root)) if issubclass(root, Recipe) else []
    if inner and path[-1] in SECTIONS:
        first = f"{key}: unknown key. It is a section of another project; its keys have other places here."
    else:
        first = f"{key}: {_suggestion(location, path, root)}"
    num_more = len(inner) - _MOST_INNER_HINTS
    more = [f"{key}: {num_more} more keys of another project."] if num_more > 0 else []
    return [first, *inner[:_MOST_INNER_HINTS], *more]


def hint_for(path: Sequence[str], root: type[Recipe]) -> KeyHint | None:
    """What stands for a key of another project in recipes of this class; None: it is unknown, or nothing does. The
    longest end of the path that is known counts: `critic.optim.lr` is not `lr`."""
    names = [part for part in path if not part.isdigit()]
    known = {".".join(part for part in key.split(".") if not part.isdigit()) for key in all_keys(root)}
    for begin in range(len(names)):
        for hint in KEYS.get(".".join(names[begin:]), ()):
            fits = not hint.programs or program_name(root) in hint.programs
            if fits and ".".join(part for part in hint.key.split(".") if not part.isdigit()) in known:
                return hint
    return None


def program_name(root: type[Recipe]) -> str:
    """The program of a class; the signal of custom ones."""
    return next(name for name, kind in {**BUILT_IN, **CUSTOM}.items() if kind is root)


def _inner_hints(path: Sequence[str], value: Any, root: type[Recipe]) -> Iterator[str]:
    if not isinstance(value, Mapping):
        return
    for name, item in value.items():
        inner = [*path, str(name)]
        below = list(_inner_hints(inner, item, root))
        text = None if owners_of(inner) else _foreign(inner, root)  # of another program here, not of another project
        if below:
            yield from below
        elif text is not None:
            yield f"{'.'.join(inner)}: {text}"


def _foreign(path: Sequence[str], root: type[Recipe]) -> str | None:
    hint = hint_for(path, root)
    if hint is not None:
        words = "It belongs at" if hint.key.rpartition(".")[2] == path[-1] else "Podium's name for it is"
        return f"unknown key. {words} {hint.key}{_in_brackets(hint)}."
    if path[-1] in WITHOUT:
        return f"unknown key. There is none here: {WITHOUT[path[-1]]}."
    return None


def _in_brackets(hint: KeyHint) -> str:
    return f" ({hint.how})" if hint.how else ""


def _suggestion(location: Sequence[str], path: Sequence[str], root: type[BaseModel]) -> str:
    section = section_at(location, root)
    if section is None:
        return "unknown key."
    owners = owners_of(location)
    if not issubclass(root, Recipe):
        key = ".".join(path)
        if owners:
            return f"unknown key. It belongs to the stages: write defaults.{key} for all of them, or stages.NAME.{key}."
        return _nearest(path, section, root)
    branch = sibling_branches(location, root)
    if branch is not None and branch[1]:
        return _of_another(*branch)
    if owners:
        hint = hint_for(path, root)
        other = f" If it is another project's key, write {hint.key}{_in_brackets(hint)}." if hint is not None else ""
        return _of_another(_name_in_errors(root), owners) + other
    return _foreign(path, root) or _nearest(path, section, root)


def _nearest(path: Sequence[str], section: type[BaseModel], root: type[BaseModel]) -> str:
    near = difflib.get_close_matches(path[-1], section.model_fields, n=1, cutoff=0.6)
    if near:
        return f"unknown key. Did you mean {'.'.join([*path[:-1], near[0]])}?"
    elsewhere = [key for key in all_keys(root) if key.rpartition(".")[2] == path[-1]]
    if elsewhere:
        return f"unknown key. It belongs at {elsewhere[0]}."
    return f"unknown key. Known here: {', '.join(section.model_fields)}."


def _of_another(own: str, others: Sequence[str]) -> str:
    listed = others[0] if len(others) == 1 else f"{', '.join(others[:-1])} and {others[-1]}"
    return f"{own} has no such key; {listed} {'has' if len(others) == 1 else 'have'}."


def _name_in_errors(root: type[Recipe]) -> str:
    name = program_name(root)
    return name if name in BUILT_IN else f"a custom program with signal {name}"
