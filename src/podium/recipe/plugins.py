# SPDX-License-Identifier: Apache-2.0
"""Custom functions by import path: `package.module:function` or `folder/file.py:function`.

`locate` finds a missing function or a syntax error by parsing, without running the file; `load` imports it. A function
that was given to the Python API as an object and has no import path is in a file of its own: `file.pickle:function`."""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import pickle
import sys
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from podium.errors import PodiumError, RecipeError, type_phrase, what_raised

PICKLED = ".pickle"  # what files of pickled objects end in
# Import path -> (the object, modification time of its file), of objects that were registered in this process.
_registered: dict[str, tuple[Callable[..., Any], int | None]] = {}
# Held while a file runs, also by the files that it loads.
_RUNNING = threading.RLock()
# JSON schema of an import path.
PLUGIN_SCHEMA: Mapping[str, str] = {"type": "string", "pattern": r"^.+:[A-Za-z_]\w*$"}


class Plugin(str):
    """An import path in a recipe: `file.py:function` or `package.module:function`. Where a key takes a built-in name
    or a custom function, only the custom one is a Plugin."""

    __slots__ = ()

    @classmethod
    def has_shape(cls, text: object) -> bool:
        """Whether a value is written as an import path."""
        module, _, name = text.rpartition(":") if isinstance(text, str) else ("", "", "")
        return bool(module) and name.isidentifier()

    @property
    def name(self) -> str:
        """The function's name."""
        return split_plugin(self)[1]

    @classmethod
    def _of(cls, text: str) -> Plugin:
        if not cls.has_shape(text):
            raise ValueError(f"{text!r} is not an import path; write file.py:function or package.module:function")
        return cls(os.path.expanduser(text))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(
            cls._of,
            core_schema.str_schema(),
            serialization=core_schema.plain_serializer_function_ser_schema(str, return_schema=core_schema.str_schema()),
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return dict(PLUGIN_SCHEMA)


def split_plugin(path: str) -> tuple[str, str]:
    """('file.py' or 'package.module', 'function')."""
    module, _, name = path.rpartition(":")
    return module, name


def source_file(path: str, key: str) -> Path:
    """The file that defines a plug-in's function."""
    return _source_file(split_plugin(path)[0], key)


def import_path(value: Callable[..., Any]) -> str | None:
    """The import path of a function or class at the top of a module's file; None: it has none, such as a lambda, or
    what a notebook or the script that is being run defines."""
    module, name = sys.modules.get(getattr(value, "__module__", None) or ""), getattr(value, "__qualname__", "")
    file = getattr(module, "__file__", None)
    if module is None or module.__name__ == "__main__" or getattr(module, name, None) is not value:
        return None
    if file is None or not file.endswith(".py"):
        return None
    path = f"{module.__name__}:{name}" if "." in module.__name__ else f"{os.path.abspath(file)}:{name}"
    try:
        locate(path, "")
        return path if os.path.samefile(source_file(path, ""), file) else None
    except (RecipeError, OSError):
        return None


def register(path: str, value: Callable[..., Any]) -> None:
    """From now on `load` returns this object for the path in this process, until the path's file changes."""
    _registered[path] = value, _modified_ns(path)


def _modified_ns(path: str) -> int | None:
    try:
        return source_file(path, "").stat().st_mtime_ns
    except (RecipeError, OSError):
        return None


def _registered_object(path: str) -> Callable[..., Any] | None:
    value, modified_ns = _registered.get(path, (None, None))
    return value if value is not None and modified_ns == _modified_ns(path) else None


def locate(path: str, key: str) -> None:
    """Raises a RecipeError that names `key` if the plug-in cannot be found by parsing."""
    if _registered_object(path) is not None:
        return
    name, file = split_plugin(path)[1], source_file(path, key)
    if file.suffix == PICKLED:
        return
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    except SyntaxError as error:
        raise RecipeError(
            f"{key}: {file}, line {error.lineno}: {error.msg}. The plug-in cannot be imported until this is fixed."
        ) from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{key}: {file} is not UTF-8 text (byte {error.start}). Save it as UTF-8.") from error
    names = top_level_names(tree.body)
    if name not in names:
        listed = ", ".join(sorted(names - _imported_names(tree.body))) or "nothing"
        raise RecipeError(f"{key}: {file} has no function or class {name!r}. It defines: {listed}.")


def is_async(path: str, key: str) -> bool | None:
    """Whether the plug-in is an `async def`, by parsing; None if its file does not define it as a function."""
    if is_pickled(path):
        return inspect.iscoroutinefunction(load(path, key))
    function = _function(path, key)
    return None if function is None else isinstance(function, ast.AsyncFunctionDef)


def takes(path: str, key: str, num_arguments: int) -> bool:
    """Whether the plug-in can be called with this many arguments, by parsing. True if its file does not define it as a
    plain function: loading it then decides."""
    if is_pickled(path):
        return _binds(load(path, key), num_arguments)
    function = _function(path, key)
    if function is None or function.decorator_list:
        return True
    arguments = function.args
    positional = len(arguments.posonlyargs) + len(arguments.args)
    needs_names = any(default is None for default in arguments.kw_defaults)
    fits = positional - len(arguments.defaults) <= num_arguments
    return fits and not needs_names and (num_arguments <= positional or arguments.vararg is not None)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter that a plug-in can be given by name."""

    name: str
    is_required: bool


def parameters(path: str, key: str) -> tuple[Parameter, ...]:
    """The named parameters of a plug-in, by parsing. One that its file does not define as a plain function is
    loaded."""
    function = None if is_pickled(path) else _function(path, key)
    if function is None or function.decorator_list:
        return _loaded_parameters(load(path, key), path, key)
    if function.args.posonlyargs:
        raise RecipeError(f"{key}: {path} has parameters before a /, which cannot be given by name. Remove the /.")
    return _parsed_parameters(function)


def _parsed_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[Parameter, ...]:
    arguments = function.args
    num_required = len(arguments.args) - len(arguments.defaults)
    by_place = [Parameter(each.arg, at < num_required) for at, each in enumerate(arguments.args)]
    by_name = [
        Parameter(each.arg, default is None)
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return (*by_place, *by_name)


def _loaded_parameters(function: Callable[..., Any], path: str, key: str) -> tuple[Parameter, ...]:
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{key}: {path} does not say which parameters it takes ({error}).") from error
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(Parameter(each.name, each.default is each.empty) for each in found if each.kind in named)


@dataclass(frozen=True, slots=True)
class Outline:
    """What the text of a function says."""

    required: tuple[str, ...]  # parameters without a default
    subscripts: tuple[str, ...]  # texts in square brackets, as in row["answer"]


def outline(path: str, key: str) -> Outline | None:
    """The plug-in's outline, by parsing. None if its file does not define it as a plain function: nothing is run."""
    function = None if is_pickled(path) else _function(path, key)
    if function is None or function.decorator_list:
        return None
    reads = [
        node.slice.value
        for node in ast.walk(function)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and isinstance(node.slice, ast.Constant)
    ]
    return Outline(
        required=tuple(each.name for each in _parsed_parameters(function) if each.is_required),
        subscripts=tuple(dict.fromkeys(text for text in reads if isinstance(text, str))),
    )


def _function(path: str, key: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    name = split_plugin(path)[1]
    tree = ast.parse(source_file(path, key).read_text(encoding="utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return next((node for node in functions if node.name == name), None)


def is_pickled(path: str) -> bool:
    """Whether an import path is that of an object in a file of its own."""
    return split_plugin(path)[0].endswith(PICKLED)


def _binds(function: Callable[..., Any], num_arguments: int) -> bool:
    try:
        inspect.signature(function).bind(*range(num_arguments))
    except TypeError:
        return False
    except ValueError:  # a function of C without a signature
        return True
    return True


def load(path: str, key: str) -> Callable[..., Any]:
    """Loads the plug-in, which runs its file. In the process that was given the plug-in as an object, it is that
    object."""
    if (registered := _registered_object(path)) is not None:
        return registered
    locate(path, key)
    module_name, name = split_plugin(path)
    if is_pickled(path):
        return _unpickled(source_file(path, key), key)
    try:
        if module_name.endswith(".py"):
            module = _module_of(Path(module_name).resolve())
        else:
            module = importlib.import_module(module_name)
    except PodiumError:
        raise
    except Exception as error:  # the file is the user's code
        raise RecipeError(
            f"{key}: running {module_name} {what_raised(error)}. Fix the file, or install what it imports."
        ) from error
    plugin = getattr(module, name, None)
    if not callable(plugin):
        raise RecipeError(f"{key}: {path} is not callable. A plug-in is a function or a class.")
    return plugin  # type: ignore[no-any-return]


def _unpickled(file: Path, key: str) -> Callable[..., Any]:
    try:
        value = pickle.loads(file.read_bytes())
    except Exception as error:  # of any kind: it imports what the function uses
        raise RecipeError(
            f"{key}: the object in {file} cannot be read here ({type(error).__name__}: {error}). It was written by the "
            "process that was given it. Use the same Python and the same packages, or put the function into a .py file "
            "and name it as file.py:function."
        ) from error
    if not callable(value):
        raise RecipeError(f"{key}: {file} holds {type_phrase(value)}, which is not callable.")
    return value  # type: ignore[no-any-return]


def _module_of(file: Path) -> ModuleType:
    """The file's module, run once, so that two plug-ins of one file share its state. Named by its whole path, so that
    two files of one name do not replace each other. A thread that asks while another runs the file waits for it."""
    name = f"podium_plugin_{file.stem}_{zlib.crc32(str(file).encode()):08x}_{file.stat().st_mtime_ns:x}"
    with _RUNNING:
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module


def _source_file(module: str, key: str) -> Path:
    if module.endswith(PICKLED):
        file = Path(module)
        if not file.is_file():
            raise RecipeError(
                f"{key}: there is no file {module}, which is for an object that was given in Python. Put it back; or, "
                "for a reward, an environment or a logger, give the object again (podium.resume(folder, reward=[...])) "
                f"or name a function in a file (--set {key}=file.py:function)."
            )
        return file
    if module.endswith(".py"):
        file = Path(module)
        if not file.is_file():
            raise RecipeError(
                f"{key}: there is no file {module}. Paths are relative to the folder you start podium in."
            )
        return file
    # Walk the packages by hand: importlib.util.find_spec("a.b") would import and so run package a.
    search: list[str] | None = None
    spec = None
    parts = module.split(".")
    for depth in range(len(parts)):
        name = ".".join(parts[: depth + 1])
        spec = importlib.machinery.PathFinder.find_spec(name, search)
        if spec is None:
            raise RecipeError(
                f"{key}: there is no module {name!r}. Install it, or give the file: folder/file.py:function."
            )
        search = list(spec.submodule_search_locations or [])
    assert spec is not None
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise RecipeError(f"{key}: module {module!r} has no Python source to look into. Name a .py module.")
    return Path(spec.origin)


def _imported_names(body: Sequence[ast.stmt]) -> set[str]:
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    return top_level_names(imports)


def top_level_names(body: Sequence[ast.stmt]) -> set[str]:
    """Names that a module binds when it is imported, also under `if`, `try` and `with`."""
    names: set[str] = set()
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Assign(targets=targets):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.ImportFrom(names=aliases) | ast.Import(names=aliases):
                names |= {(alias.asname or alias.name).split(".")[0] for alias in aliases}
            case ast.If(body=inner, orelse=other):
                names |= top_level_names([*inner, *other])
            case ast.With(body=inner):
                names |= top_level_names(inner)
            case ast.Try(body=inner, handlers=handlers, orelse=other, finalbody=last):
                names |= top_level_names([*inner, *other, *last])
                for handler in handlers:
                    names |= top_level_names(handler.body)
    return names
