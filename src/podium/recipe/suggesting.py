# SPDX-License-Identifier: Apache-2.0
"""What to write instead of an unknown key: its new name, the program that has it, the name that stands for another
project's, the nearest key, or its right place. And what to write instead of an unknown value."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel

from podium.recipe.keys import all_keys, is_tag, owners_of, section_at, sibling_branches
from podium.recipe.migration import KEYS, SECTIONS, WITHOUT, KeyHint
from podium.recipe.migration_values import value_hint
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
        first = f"{key}: {_suggestion(location, path, value, root)}"
    num_more = len(inner) - _MOST_INNER_HINTS
    more = [f"{key}: {num_more} more keys of another project."] if num_more > 0 else []
    return [first, *inner[:_MOST_INNER_HINTS], *more]


def better_value(key: str, value: Any, known: Sequence[str] = ()) -> str:
    """A sentence about what to write instead of a value that a key does not take: what stands for another project's,
    or the nearest of the `known` ones. Empty: nothing is like it."""
    hint = value_hint(key, value)
    if hint is None or (hint.value is not None and known and hint.value not in known):
        near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.6)
        return f" Did you mean {near[0]}?" if near else ""
    if hint.value is None:
        return f" {hint.how[0].upper()}{hint.how[1:]}."
    return f" Did you mean {hint.value}{_in_brackets(hint.how)}?"


def hint_for(path: Sequence[str], root: type[Recipe]) -> KeyHint | None:
    """What stands for a key of another project in recipes of this class; None: it is unknown, or nothing does. The
    longest end of the path that is known counts: `critic.optim.lr` is not `lr`."""
    for end in _ends(path):
        for hint in KEYS.get(end, ()):
            fits = not hint.programs or program_name(root) in hint.programs
            if fits and ".".join(part for part in hint.key.split(".") if not part.isdigit()) in _known(root):
                return hint
    return None


def hints_below(path: Sequence[str], value: Any, root: type[Recipe]) -> Iterator[KeyHint]:
    """What stands for an unknown key and for those below it, as far as they are of another project."""
    hint = hint_for(path, root)
    if hint is not None:
        yield hint
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from hints_below([*path, str(name)], item, root)


def _ends(path: Sequence[str]) -> list[str]:
    """The ends of a key path, the longest first."""
    names = [part for part in path if not part.isdigit()]
    return [".".join(names[begin:]) for begin in range(len(names))]


@cache
def _known(root: type[BaseModel]) -> frozenset[str]:
    return frozenset(all_keys(root))


def program_name(root: type[Recipe]) -> str:
    """The program of a class; the signal of custom ones."""
    return next(name for name, kind in {**BUILT_IN, **CUSTOM}.items() if kind is root)


def _inner_hints(path: Sequence[str], value: Any, root: type[Recipe]) -> Iterator[str]:
    if not isinstance(value, Mapping):
        return
    for name, item in value.items():
        inner = [*path, str(name)]
        below = list(_inner_hints(inner, item, root))
        # A key that another program has is not of another project.
        text = None if owners_of(inner) else _foreign(inner, item, root) or _of_other_programs(inner, root)
        if below:
            yield from below
        elif text is not None:
            yield f"{'.'.join(inner)}: {text}"


def _foreign(path: Sequence[str], value: Any, root: type[Recipe]) -> str | None:
    hint = hint_for(path, root)
    if hint is not None:
        words = "It belongs at" if hint.key.rpartition(".")[2] == path[-1] else "Podium's name for it is"
        return f"unknown key. {words} {hint.key}{_in_brackets(_translation(hint, value))}."
    reason = next((WITHOUT[end] for end in _ends(path) if end in WITHOUT), None)
    return None if reason is None else f"unknown key. There is none here: {reason}."


def _translation(hint: KeyHint, value: Any) -> str:
    """How the value translates: this one, if it is known and the hint has no remark about another key, or in
    general."""
    known = None if isinstance(value, bool | Mapping | list) else value_hint(hint.key, value)
    if known is None or known.value is None or "`" in hint.how:
        return hint.how
    return f"{value} is {known.value}{f', {known.how}' if known.how else ''}"


def _of_other_programs(path: Sequence[str], root: type[Recipe]) -> str | None:
    """For a key of another project that only other programs have a counterpart of."""
    hints = {name: hint.key for name, kind in BUILT_IN.items() if (hint := hint_for(path, kind)) is not None}
    if not hints:
        return None
    key = next(iter(hints.values()))
    owners = [name for name, each in hints.items() if each == key]
    return f"unknown key. {_name_in_errors(root)} has nothing like it; it is {key} of {_listed(owners)}. Remove it."


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def _suggestion(location: Sequence[str], path: Sequence[str], value: Any, root: type[BaseModel]) -> str:
    section = section_at(location, root)
    if section is None:
        return "unknown key."
    owners = owners_of(location)
    if not issubclass(root, Recipe):
        key = ".".join(path)
        if owners:
            return f"unknown key. It belongs to the stages: write defaults.{key} for all of them, or stages.NAME.{key}."
        return _near(path, section) or _elsewhere(path, section, root)
    branch = sibling_branches(location, root)
    if branch is not None and branch[1]:
        return _of_another(*branch)
    if owners:
        hint = hint_for(path, root)
        text = _of_another(_name_in_errors(root), owners)
        if hint is not None:
            text += f" If it is another project's key, write {hint.key}{_in_brackets(_translation(hint, value))}."
        return text
    own = _foreign(path, value, root) or _near(path, section) or _of_other_programs(path, root)
    return own or _elsewhere(path, section, root)


def _near(path: Sequence[str], section: type[BaseModel]) -> str | None:
    near = difflib.get_close_matches(path[-1], section.model_fields, n=1, cutoff=0.6)
    return f"unknown key. Did you mean {'.'.join([*path[:-1], near[0]])}?" if near else None


def _elsewhere(path: Sequence[str], section: type[BaseModel], root: type[BaseModel]) -> str:
    elsewhere = [key for key in all_keys(root) if key.rpartition(".")[2] == path[-1]]
    if elsewhere:
        return f"unknown key. It belongs at {elsewhere[0]}."
    return f"unknown key. Known here: {', '.join(section.model_fields)}."


def _of_another(own: str, others: Sequence[str]) -> str:
    return f"{own} has no such key; {_listed(others)} {'has' if len(others) == 1 else 'have'}."


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _name_in_errors(root: type[Recipe]) -> str:
    name = program_name(root)
    return name if name in BUILT_IN else f"a custom program with signal {name}"
