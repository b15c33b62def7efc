# SPDX-License-Identifier: Apache-2.0
"""How a custom function is called and a custom class is made, by parsing its file."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from podium.recipe.plugins import is_pickled, locate, source_file, split_plugin, top_level_names


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """How a function or a class is called, as the text of its file says."""

    place: str  # "rewards.py, line 3"
    signature: inspect.Signature  # of a class: that of making an instance
    is_class: bool = False
    call: inspect.Signature | None = None  # of a class: that of calling an instance, if the file defines it


class _Source(str):
    """A default value as it is written."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def definition_of(path: str, key: str) -> Definition | None:
    """How the plug-in is called, by parsing. None if only running its file can tell: it is pickled, imported,
    decorated, defined twice or under a condition, or inherits how it is made from another file or several classes."""
    if is_pickled(path):
        return None
    locate(path, key)
    name, file = split_plugin(path)[1], source_file(path, key)
    tree = ast.parse(file.read_text(encoding="utf-8"))
    nodes = [node for node in tree.body if name in top_level_names([node])]
    match nodes:
        case [ast.FunctionDef(decorator_list=[]) | ast.AsyncFunctionDef(decorator_list=[]) as node]:
            return Definition(place=f"{file}, line {node.lineno}", signature=_signature(node.args))
        case [ast.ClassDef(decorator_list=[], keywords=[]) as node]:
            classes, is_all = _inheritance(node, tree.body)
            making = _making(classes, is_all=is_all)
            calling = next((each for each in classes if "__call__" in top_level_names(each.body)), node)
            call = _method(calling, "__call__")
            return None if making is None else Definition(
                place=f"{file}, line {node.lineno}", signature=making, is_class=True,
                call=None if call is None else _signature(call.args, bound=True),
            )  # fmt: skip
    return None


def _inheritance(node: ast.ClassDef, body: Sequence[ast.stmt]) -> tuple[list[ast.ClassDef], bool]:
    """A class and those of its file that it inherits from, the nearest first, and whether these are all. Stops at a
    class with several bases."""
    classes = [node]
    while classes[-1].bases:
        match classes[-1].bases:
            case [ast.Name(id=name)]:
                bound = [each for each in body if name in top_level_names([each])]
            case _:
                return classes, False
        match bound:
            case [] if name == "object":
                return classes, True
            case [ast.ClassDef(decorator_list=[], keywords=[]) as base] if base not in classes:
                classes.append(base)
            case _:
                return classes, False
    return classes, True


def _making(classes: Sequence[ast.ClassDef], *, is_all: bool) -> inspect.Signature | None:
    """The signature of making an instance of the first class; None: it cannot be told from these."""
    for node in classes:
        names = top_level_names(node.body)
        if "__new__" in names:
            return None
        if "__init__" in names:
            method = _method(node, "__init__")
            return None if method is None else _signature(method.args, bound=True)
    return inspect.Signature() if is_all else None


def _method(node: ast.ClassDef, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The only definition of a plain method in a class's own body."""
    match [each for each in node.body if name in top_level_names([each])]:
        case [ast.FunctionDef(decorator_list=[]) | ast.AsyncFunctionDef(decorator_list=[]) as method]:
            return method
    return None


def _signature(arguments: ast.arguments, *, bound: bool = False) -> inspect.Signature:
    """The signature of a function; of a `bound` method without its first parameter."""
    kinds = inspect.Parameter
    found: list[tuple[str, Any, ast.expr | None]] = []  # name, kind, default
    found += [(each.arg, kinds.POSITIONAL_ONLY, None) for each in arguments.posonlyargs]
    found += [(each.arg, kinds.POSITIONAL_OR_KEYWORD, None) for each in arguments.args]
    for at, default in enumerate(reversed(arguments.defaults), start=1):
        found[-at] = (*found[-at][:2], default)
    found = found[1:] if bound else found
    found += [(arguments.vararg.arg, kinds.VAR_POSITIONAL, None)] if arguments.vararg is not None else []
    by_name = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    found += [(each.arg, kinds.KEYWORD_ONLY, default) for each, default in by_name]
    found += [(arguments.kwarg.arg, kinds.VAR_KEYWORD, None)] if arguments.kwarg is not None else []
    return inspect.Signature(
        [
            kinds(name, kind, default=kinds.empty if default is None else _Source(ast.unparse(default)))
            for name, kind, default in found
        ]
    )
