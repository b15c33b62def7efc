# SPDX-License-Identifier: Apache-2.0
"""A quick look at a source before a run: it is there, it is not empty, and its first row is of a known kind."""

from __future__ import annotations

from podium.data.comparisons import Shape, check_judged
from podium.data.kinds import named_values
from podium.data.sources import first_row
from podium.errors import DataError
from podium.recipe.schema import SourceSection


def check_source(section: SourceSection, key: str, shape: Shape = "documents") -> None:
    """Raises what a run would raise about its first row. Reads only the beginning, needs no tokenizer, and asks no
    network about a hub id. The kind of rows that a `map` makes is not checked: that would run it."""
    row = first_row(section, key)
    if row is None or section.map is not None:
        return
    values = named_values(row, section.columns, None)
    assert values is not None
    try:
        check_judged(values, section.columns, shape, row)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error
