# SPDX-License-Identifier: Apache-2.0
"""Values between the tests and the tested program, as JSON: reading them runs no code, so a forged one does no harm.

Plain values travel as copies, as exactly these types. A subclass travels as its base, so an overridden `__eq__` stays
behind. Every other object stays where it is, and its number travels."""

from __future__ import annotations

import importlib
import json
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from collections.abc import Callable
    from typing import Any

_LENGTH_BYTES = 4
MOST_BYTES = 16 << 20
"""The largest message."""
_MOST_JSON_INT = 1 << 63


class ValueTooLargeError(ValueError):
    """A value does not fit in one message."""


def pack(value: Any, number_of: Callable[[Any], Any]) -> Any:
    """A value as JSON. `number_of` gives what stands for an object that is no plain value."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        value = int.__int__(value)
        return value if -_MOST_JSON_INT < value < _MOST_JSON_INT else ["int", hex(value)]
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list | tuple | set | frozenset):
        base = next(each for each in (list, tuple, set, frozenset) if isinstance(value, each))
        return [base.__name__, [pack(each, number_of) for each in base.__iter__(value)]]  # type: ignore[arg-type]
    if isinstance(value, dict):
        return ["dict", [[pack(key, number_of), pack(each, number_of)] for key, each in dict.items(value)]]
    name = type(value).__name__
    if name in _OTHERS and _is_of(value, _OTHERS[name][0], name):
        return [name, _OTHERS[name][1](value)]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return pack(value.tolist(), number_of)
    return ["object", number_of(value)]


def unpack(packed: Any, object_of: Callable[[Any], Any]) -> Any:
    """The value again. `object_of` gives what belongs to the number of an object. ValueError: that is no value."""
    if not isinstance(packed, list):
        if isinstance(packed, dict):
            raise ValueError("a dict stands for no value")
        return packed
    if len(packed) != 2 or not isinstance(packed[0], str):
        raise ValueError("a list of another shape stands for no value")
    kind, content = packed
    if kind == "object":
        return object_of(content)
    if kind == "int" and isinstance(content, str):
        return int(content, 16)
    if kind in _SEQUENCES and isinstance(content, list):
        return _SEQUENCES[kind](unpack(each, object_of) for each in content)
    if kind == "dict" and isinstance(content, list):
        return {unpack(key, object_of): unpack(each, object_of) for key, each in content}
    if kind in _OTHERS:
        module, _, from_json = _OTHERS[kind]
        return from_json(getattr(importlib.import_module(module), kind), content)
    raise ValueError(f"unknown kind {kind!r}")


_SEQUENCES: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
# Types by name: their module, to JSON, and from JSON with the type. Importing all of them would take 20 ms each time.
_OTHERS: dict[str, tuple[str, Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "bytes": ("builtins", bytes.hex, lambda kind, text: kind.fromhex(text)),
    "bytearray": ("builtins", bytearray.hex, lambda kind, text: kind.fromhex(text)),
    "complex": ("builtins", lambda value: [value.real, value.imag], lambda kind, parts: kind(*parts)),
    "range": ("builtins", lambda value: [value.start, value.stop, value.step], lambda kind, parts: kind(*parts)),
    "Decimal": ("decimal", str, lambda kind, text: kind(str(text))),
    "Fraction": (
        "fractions", lambda value: [hex(value.numerator), hex(value.denominator)],
        lambda kind, parts: kind(int(parts[0], 16), int(parts[1], 16)),
    ),
    "datetime": ("datetime", lambda value: value.isoformat(), lambda kind, text: kind.fromisoformat(text)),
    "date": ("datetime", lambda value: value.isoformat(), lambda kind, text: kind.fromisoformat(text)),
    "time": ("datetime", lambda value: value.isoformat(), lambda kind, text: kind.fromisoformat(text)),
    "timedelta": (
        "datetime", lambda value: [value.days, value.seconds, value.microseconds], lambda kind, parts: kind(*parts)
    ),
}  # fmt: skip


def _is_of(value: Any, module: str, name: str) -> bool:
    """Whether it has exactly this type, which nobody can have a value of who has not imported its module."""
    known = sys.modules.get(module)
    return known is not None and type(value) is getattr(known, name, None)


def send(channel: _socket.socket, message: Any) -> None:
    """Sends one message."""
    data = json.dumps(message).encode()
    if len(data) > MOST_BYTES:
        raise ValueTooLargeError(f"a message of {len(data)} bytes is above the limit of {MOST_BYTES}")
    channel.sendall(len(data).to_bytes(_LENGTH_BYTES, "little") + data)


def receive(channel: _socket.socket) -> Any:
    """The next message. EOFError: there is none; ValueError: it is none."""
    length = int.from_bytes(_exactly(channel, _LENGTH_BYTES), "little")
    if length > MOST_BYTES:
        raise ValueTooLargeError(f"a message of {length} bytes is above the limit of {MOST_BYTES}")
    return json.loads(_exactly(channel, length))


def _exactly(channel: _socket.socket, count: int) -> bytes:
    parts, left = [], count
    while left:
        part = channel.recv(min(left, 1 << 20))
        if not part:
            raise EOFError("the other side is gone")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
