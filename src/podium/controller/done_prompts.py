# SPDX-License-Identifier: Apache-2.0
"""Where a resumed run continues in the data. Groups end in another order than their prompts have there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any


class DonePrompts:
    """Prompts that are trained or void, above that of the oldest live group."""

    def __init__(self) -> None:
        self._indices: set[int] = set()

    def add(self, prompt_indices: Iterable[int]) -> None:
        """No group will be made of these again."""
        self._indices.update(prompt_indices)

    def state(
        self, live: Iterable[tuple[int, Mapping[str, Any]]], position: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """The state of a prompt source before the oldest live group, without the prompts after it that are done.
        `live`: prompt indices of live groups, and the source's state before each. `position`: its state now."""
        oldest = min(live, key=lambda each: each[0], default=None)
        if oldest is None:
            self._indices.clear()
            return position()
        index, before = oldest
        self._indices = {each for each in self._indices if each > index}
        return {**before, "done": sorted({*self._indices, *before.get("done", ())})}
