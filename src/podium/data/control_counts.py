# SPDX-License-Identifier: Apache-2.0
"""Counts and names the rows of a source whose content spells control tokens, for `podium check --deep`."""

from __future__ import annotations

from dataclasses import dataclass, field

from podium.data.chat import load_map
from podium.data.control_tokens import ControlRule, ControlSearch
from podium.data.kinds import named_values
from podium.data.rows import Row
from podium.errors import counted
from podium.recipe.schema import SourceSection

_NAMED = 20
_NAMED_TOKENS = 5


@dataclass(slots=True, kw_only=True)
class ControlCounts:
    """Rows of a source by how what they spell is encoded; the first of them by name."""

    num_read: int = 0
    num_text: int = 0
    num_control: int = 0
    first: list[str] = field(default_factory=list)


class ControlCounter:
    """Looks at the rows of one source."""

    def __init__(self, search: ControlSearch, rule: ControlRule, section: SourceSection, key: str) -> None:
        self._search, self._rule, self._columns, self._key = search, rule, section.columns, key
        self._map = load_map(section, key)
        self.counts = ControlCounts()

    def look(self, row: Row) -> None:
        """Counts a row that can be used."""
        values = named_values(row, self._columns, self._map)
        if values is None:
            return
        self.counts.num_read += 1
        spelled = self._search.in_columns(values)
        raw = [each for each in spelled.raw if each not in spelled.chat]
        as_text, as_control = (spelled.chat, raw) if self._rule.as_text else ((), (*spelled.chat, *raw))
        self.counts.num_text += bool(as_text)
        self.counts.num_control += bool(as_control)
        for tokens, words in ((as_text, "text"), (as_control, "control tokens")):
            if tokens and len(self.counts.first) < _NAMED:
                shown = ", ".join(repr(each) for each in tokens[:_NAMED_TOKENS])
                more = f" and {len(tokens) - _NAMED_TOKENS} others" if len(tokens) > _NAMED_TOKENS else ""
                self.counts.first.append(f"{row.where}: {shown}{more}, encoded as {words}")

    def lines(self) -> list[str]:
        """What was found; nothing where there is nothing to say."""
        counts = self.counts
        found = [
            f"{counted(number, 'row')} as {words}"
            for number, words in ((counts.num_text, "text"), (counts.num_control, "control tokens"))
            if number
        ]
        if not found:
            return []
        left = counts.num_text + counts.num_control - len(counts.first)
        return [
            f"  content that spells control tokens: {' and '.join(found)}, of {counts.num_read} read "
            "(model.control_tokens_in_content; plain text has control tokens always)",
            *(f"    {line}" for line in counts.first),
            *([f"    and {left} more"] if left else []),
        ]
