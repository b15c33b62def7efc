# SPDX-License-Identifier: Apache-2.0
"""Checks a source quickly before a run: it exists, it is not empty, and its first row is of a known kind."""

from __future__ import annotations

from podium.data.comparisons import Shape, check_judged
from podium.data.kinds import named_values
from podium.data.sources import first_row
from podium.errors import DataError
from podium.recipe.schema import SourceSection


def check_source(section: SourceSection, key: str, shape: Shape = "documents") -> None:
    """Raises the error that a run would raise about its first row. Reads only the beginning, and needs neither a
    tokenizer nor, for a hub id, the network. The kind of rows after a `map` is not checked: that would run it."""
    row = first_row(section, key)
    if row is None or section.map is not None:
        return
    values = named_values(row, section.columns, None)
    assert values is not None
    try:
        check_judged(values, section.columns, shape, row)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error
