# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the package `gymnasium`: its base class, three spaces and a registry, as far as Podium reads them."""

from __future__ import annotations

from types import ModuleType
from typing import Any


class Env:
    """The base of environments."""

    def close(self) -> None:
        """Nothing to close."""


class Discrete:
    """Whole numbers from `start`."""

    def __init__(self, n: int, start: int = 0) -> None:
        self.n, self.start = n, start

    def contains(self, value: object) -> bool:
        return isinstance(value, int) and self.start <= value < self.start + self.n

    def __repr__(self) -> str:
        return f"Discrete({self.n})"


class Text:
    """Texts of some characters."""

    def __init__(self, max_length: int, charset: str) -> None:
        self.min_length, self.max_length, self.character_set = 1, max_length, frozenset(charset)

    def contains(self, value: object) -> bool:
        return isinstance(value, str) and 1 <= len(value) <= self.max_length and set(value) <= self.character_set


class Dict:
    """Spaces by name."""

    def __init__(self, spaces: dict[str, Any]) -> None:
        self.spaces = spaces


class Box:
    """A space that has no text."""

    def __repr__(self) -> str:
        return "Box(4,)"


def fake_module(registered: dict[str, Any]) -> Any:
    """A module with a registry of these classes."""
    module: Any = ModuleType("gymnasium")
    module.Env = Env
    module.make = lambda id, disable_env_checker, **options: registered[id](**options)
    return module
