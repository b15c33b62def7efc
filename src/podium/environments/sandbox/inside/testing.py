# SPDX-License-Identifier: Apache-2.0
"""The tests' side: names of the tested program are stand-ins here, whose calls run in the program's own sandbox.

What comes back are plain values, so `==` is Python's own and not the program's. Operators between a numbered object of
the program and a plain value are not asked of the program: they would show it what the tests expect. Such an object
never equals a plain value, and its elements are searched here."""

from __future__ import annotations

import _socket
import builtins
import importlib
import json
import os
import sys
import types

from podium.environments.sandbox.inside import values

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn


# Methods of text and sets that compare. A result that has them as its own would judge itself.
_COMPARING = frozenset({"startswith", "endswith", "issubset", "issuperset", "isdisjoint"})


class ProgramLostError(BaseException):
    """The tested program is gone, or answers nonsense. No Exception: tests that expect one must not pass by it."""


def run_tests(channel_fd: int, report_fd: int, order: dict[str, Any]) -> None:
    """Runs tests `first` and on, and reports each. `channel_fd`: to the program; `report_fd`: to the outside."""
    sys.path[0] = os.getcwd()
    program, report = Program(_socket.socket(fileno=channel_fd)), _socket.socket(fileno=report_fd)
    why = program.load()
    report.sendall(json.dumps({"loaded": why is None}).encode() + b"\n")
    for number, test in enumerate(order["tests"][order["first"] :], order["first"]):
        failure = why if why is not None else _failure(test, order["setup"], program)
        report.sendall(json.dumps({"test": number, "failure": failure}).encode() + b"\n")
        if program.is_lost and why is None:
            return  # the others get a new one


def _failure(test: str, setup: str, program: Program) -> str | None:
    """Why the test fails. None: it passes."""
    module = types.ModuleType("__main__")
    module.__dict__.update(program.names)
    sys.modules["__main__"] = module
    try:
        exec(compile(setup, "setup.py", "exec"), module.__dict__)
        before = set(vars(module))
        exec(compile(test, "test.py", "exec"), module.__dict__)
        for name in [each for each in vars(module) if each.startswith("test") and each not in before]:
            if isinstance(vars(module)[name], types.FunctionType):
                vars(module)[name]()
    except BaseException as error:  # exit() in a test is no way to pass
        return f"{type(error).__name__}: {_text(error)}"
    return "the program ended" if program.is_lost else None


def _text(error: BaseException) -> str:
    try:
        return str(error)[:300]
    except BaseException:
        return ""


class Program:
    """The tested program: its names, and calls of what they stand for."""

    def __init__(self, channel: _socket.socket) -> None:
        self._channel = channel
        self._exceptions: dict[str, type[Exception]] = {}
        self.names: dict[str, Any] = {}
        self.is_lost = False

    def load(self) -> str | None:
        """Waits until the program has run. Returns why it has nothing to test."""
        try:
            answer = self._received()
            if "raised" in answer:
                return f"the program raised {answer['raised'][0]}: {answer['text']}"
            for name, kind, content in answer["defined"]:
                self._define(str(name), kind, content)
        except ProgramLostError as lost:
            return str(lost)
        except Exception as error:
            return f"the program's answer cannot be read ({type(error).__name__})"
        module = types.ModuleType("solution")
        module.__dict__.update(self.names)
        sys.modules["solution"] = module
        return None

    def _define(self, name: str, kind: str, content: Any) -> None:
        """A program that could replace `abs` or `math` would decide what the tests compute. Names are as the program's
        process sends them, which need not be names that it has."""
        if not name.isidentifier() or name.startswith("__") or name in vars(builtins):
            return
        if kind == "module":
            if content in sys.stdlib_module_names and (name == content or name not in sys.stdlib_module_names):
                self.names[name] = importlib.import_module(content)
        elif name in sys.stdlib_module_names:
            return
        elif kind == "exception":
            self.names[name] = self._stand_in(name, content)
        else:
            self.names[name] = self._unpack(content)

    def do(self, what: str, *args: Any, **named: Any) -> Any:
        """Does this to an object of the program, in the program's sandbox."""
        order = {
            "do": what,
            "args": [values.pack(each, _number) for each in args],
            "named": {name: values.pack(each, _number) for name, each in named.items()},
        }
        try:
            values.send(self._channel, order)
        except OSError:
            self._lose("the program ended")
        answer = self._received()
        if "raised" in answer:
            self._raise(answer, ends_iteration=what == "next")
        try:
            value = self._unpack(answer["value"])
            changed = [(args[at], self._unpack(packed)) for at, packed in answer["changed"]]
        except Exception as error:
            self._lose(f"its answer cannot be read ({error})")
        for mine, after in changed:
            _copy(after, mine)
        return value

    def _received(self) -> dict[str, Any]:
        try:
            answer = values.receive(self._channel)
        except (OSError, EOFError):
            self._lose("the program ended")
        except (ValueError, RecursionError) as error:
            self._lose(f"its answer cannot be read ({error})")
        if not isinstance(answer, dict):
            self._lose("its answer cannot be read")
        return answer

    def _lose(self, why: str) -> NoReturn:
        self.is_lost = True
        raise ProgramLostError(why)

    def _unpack(self, packed: Any) -> Any:
        return values.unpack(packed, lambda content: RemoteObject(self, int(content["number"]), str(content["type"])))

    def _raise(self, answer: dict[str, Any], *, ends_iteration: bool) -> NoReturn:
        """`ends_iteration`: a StopIteration of another call would end loops of the tests that have not ended."""
        kinds, text = answer["raised"], str(answer.get("text", ""))
        for name in kinds if isinstance(kinds, list) else ():
            kind = self._exceptions.get(str(name)) or getattr(builtins, str(name), None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                try:
                    error = kind(text)
                except TypeError:  # UnicodeDecodeError needs five arguments
                    continue
                if isinstance(error, StopIteration | StopAsyncIteration) and not ends_iteration:
                    raise RuntimeError(f"the program raised {name}: {text}")
                raise error
        self._lose(f"a call ended with {kinds}")  # SystemExit and the like

    def _stand_in(self, name: str, bases: list[str]) -> type[Exception]:
        """A class for `except` and `pytest.raises` in tests, instead of one that the program defines."""
        for base in bases[1:]:
            kind = self._exceptions.get(base) or getattr(builtins, str(base), None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                self._exceptions[name] = type(name, (kind,), {})
                return self._exceptions[name]
        self._exceptions[name] = type(name, (Exception,), {})
        return self._exceptions[name]


def _copy(after: Any, mine: Any) -> None:
    """What a call did to its argument."""
    if type(after) is not type(mine):
        raise ProgramLostError("its answer cannot be read")
    match mine:
        case list() | bytearray():
            mine[:] = after
        case dict() | set():
            mine.clear()
            mine.update(after)


def _number(value: Any) -> int:
    if isinstance(value, RemoteObject):
        return object.__getattribute__(value, "_number")  # type: ignore[no-any-return]
    raise TypeError(f"a {type(value).__name__} of the tests cannot be passed to the tested program")


def _forward(what: str) -> Any:
    def method(self: RemoteObject, *args: Any) -> Any:
        return _program(self).do(what, self, *args)

    return method


def _between(what: str) -> Any:
    def method(self: RemoteObject, other: Any) -> Any:
        if not isinstance(other, RemoteObject):
            return NotImplemented  # a plain value may be what the tests expect
        return _program(self).do(what, self, other)

    return method


def _compared(what: str) -> Any:
    def method(self: RemoteObject, other: Any) -> Any:
        if not isinstance(other, RemoteObject):
            return False if what == "eq" else NotImplemented
        return _program(self).do(what, self, other) is True

    return method


def _typed(what: str, kind: type) -> Any:
    def method(self: RemoteObject) -> Any:
        value = _program(self).do(what, self)
        if type(value) is not kind:
            raise ProgramLostError("its answer cannot be read")
        return value

    return method


def _program(each: RemoteObject) -> Program:
    return object.__getattribute__(each, "_program")  # type: ignore[no-any-return]


class RemoteObject:
    """An object of the tested program: a function, a class or an instance of one, an iterator."""

    __slots__ = ("_number", "_program", "_type_name")

    def __init__(self, program: Program, number: int, type_name: str) -> None:
        for name, value in (("_program", program), ("_number", number), ("_type_name", type_name)):
            object.__setattr__(self, name, value)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return _program(self).do("call", self, *args, **named)

    def __getattr__(self, name: str) -> Any:
        if name in _COMPARING:
            raise TypeError(f"{name} of an object of the program is not called: it would judge itself")
        return _program(self).do("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _program(self).do("setattr", self, name, value)

    def __instancecheck__(self, each: Any) -> bool:
        return isinstance(each, RemoteObject) and _program(self).do("isinstance", self, each) is True

    def __contains__(self, wanted: Any) -> bool:
        if isinstance(wanted, RemoteObject):
            return _program(self).do("contains", self, wanted) is True
        return any(each == wanted for each in self)

    def __exit__(self, *raised: object) -> None:
        _program(self).do("exit", self)

    def __hash__(self) -> int:
        return hash(_number(self))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __str__, __repr__ = _typed("str", str), _typed("repr", str)
    __bool__, __len__, __int__, __float__ = (
        _typed("bool", bool), _typed("len", int), _typed("int", int), _typed("float", float)
    )  # fmt: skip
    __eq__, __lt__, __le__, __gt__, __ge__ = map(_compared, ("eq", "lt", "le", "gt", "ge"))
    __iter__, __next__, __abs__, __round__, __reversed__, __enter__ = map(
        _forward, ("iter", "next", "abs", "round", "reversed", "enter")
    )
    __getitem__, __setitem__, __delitem__, __neg__, __pos__, __invert__, __index__ = map(
        _forward, ("getitem", "setitem", "delitem", "neg", "pos", "invert", "index")
    )
    __add__, __sub__, __mul__, __truediv__, __floordiv__, __mod__, __pow__, __matmul__ = map(
        _between, ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
    )
    __and__, __or__, __xor__, __lshift__, __rshift__ = map(_between, ("and_", "or_", "xor", "lshift", "rshift"))
