# SPDX-License-Identifier: Apache-2.0
"""A bounded cache of tokenized rows: small data is tokenized once, not in every epoch."""

from __future__ import annotations

from collections.abc import Sequence

from podium.data.results import MadeExample, RowResult
from podium.data.rows import LinePlace, Row
from podium.recipe import SourceSection

# Number of tokens that are cached: about 80 MB at 5 bytes a token, including object overhead.
_MOST_TOKENS = 16_000_000
_TOKENS_PER_ENTRY = 150


class RememberedRows:
    """Results of rows, by source and place. When the cache is full, further rows are not added. Rows of a source with
    a `map` never are: the plug-in sees every row in every epoch."""

    def __init__(self, sections: Sequence[SourceSection]) -> None:
        self._is_remembered = [section.map is None for section in sections]
        self._results: dict[tuple[int, str | LinePlace], RowResult] = {}
        self._num_tokens = 0

    def get(self, source: int, row: Row) -> RowResult | None:
        """The result of a row that was added before."""
        return self._results.get((source, row.place)) if self._is_remembered[source] else None

    def add(self, source: int, row: Row, result: RowResult) -> None:
        """Adds a row, if there is room."""
        if not self._is_remembered[source] or self._num_tokens >= _MOST_TOKENS:
            return
        self._results[source, row.place] = result
        self._num_tokens += _TOKENS_PER_ENTRY + (result.example.num_inputs if isinstance(result, MadeExample) else 0)
