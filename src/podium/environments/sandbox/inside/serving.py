# SPDX-License-Identifier: Apache-2.0
"""The tested program's side: it runs the program, and then calls its functions as the tests ask. The tests themselves
are in another sandbox: their expected values never come here."""

from __future__ import annotations

import _socket
import operator
import os
import sys
import types

from podium.environments.sandbox.inside import values

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

_MUTABLE = (list, dict, set, bytearray)


def _special(name: str) -> Callable[..., Any]:
    return getattr(operator, name)  # type: ignore[no-any-return]


SPECIAL: dict[str, Callable[..., Any]] = {
    "call": lambda target, *args, **named: target(*args, **named),
    "getattr": getattr, "setattr": setattr, "delattr": delattr, "isinstance": lambda kind, each: isinstance(each, kind),
    "len": len, "iter": iter, "next": next, "str": str, "repr": repr, "bool": bool, "int": int, "float": float,
    "abs": abs, "round": round, "reversed": reversed, "enter": lambda each: each.__enter__(),
    "exit": lambda each: each.__exit__(None, None, None),
    **{name: _special(name) for name in (
        "eq", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_",
        "or_", "xor", "lshift", "rshift", "neg", "pos", "invert", "getitem", "setitem", "delitem", "contains", "index",
    )},
}  # fmt: skip
"""What can be asked of an object."""


def serve(channel_fd: int, program: str) -> None:
    """Runs the program, and then answers until the tests are over."""
    sys.path[0] = os.getcwd()
    Server(_socket.socket(fileno=channel_fd)).serve(program)


class Server:
    """Objects of the program by number; the tests only know the numbers."""

    def __init__(self, channel: _socket.socket) -> None:
        self._channel = channel
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def serve(self, program: str) -> None:
        """Runs the program, says what it defines, and answers calls."""
        module = types.ModuleType("solution")  # so a part under `if __name__ == "__main__"` does not run
        module.__file__ = "solution.py"
        sys.modules["solution"] = module
        try:
            exec(compile(program, "solution.py", "exec"), module.__dict__)
        except BaseException as error:  # also exit(): then there is nothing to test
            values.send(self._channel, self._raised(error))
            return
        names = {name: value for name, value in vars(module).items() if not name.startswith("__")}
        defined = [[name, *self._described(value)] for name, value in names.items()]
        values.send(self._channel, {"defined": defined})
        while True:
            try:
                order = values.receive(self._channel)
            except EOFError:
                return
            self._answer(order)

    def _answer(self, order: dict[str, Any]) -> None:
        try:
            args = [values.unpack(each, self._object) for each in order["args"]]
            named = {name: values.unpack(each, self._object) for name, each in order["named"].items()}
            result = SPECIAL[order["do"]](*args, **named)
            answer = {"value": self._pack(result), "changed": self._changed(order["args"], args)}
        except BaseException as error:  # exit() in a function fails the call like an exception
            answer = self._raised(error)
        try:
            values.send(self._channel, answer)
        except ValueError as error:
            values.send(self._channel, self._raised(error))

    def _changed(self, before: Sequence[Any], args: Sequence[Any]) -> list[list[Any]]:
        """Arguments that the call has changed in place, as callers see too."""
        packed = ((at, self._pack(each)) for at, each in enumerate(args) if type(each) in _MUTABLE)
        return [[at, after] for at, after in packed if after != before[at]]

    def _pack(self, value: Any) -> Any:
        return values.pack(value, self._number)

    def _number(self, value: Any) -> dict[str, Any]:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return {"number": self._numbers[id(value)], "type": type(value).__name__}

    def _object(self, number: int) -> Any:
        return self._objects[number]

    def _described(self, value: Any) -> list[Any]:
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["exception", [each.__name__ for each in value.__mro__]]
        return ["value", self._pack(value)]

    def _raised(self, error: BaseException) -> dict[str, Any]:
        try:
            text = str(error)
        except Exception:
            text = ""
        return {"raised": [each.__name__ for each in type(error).__mro__], "text": text[:2000]}
