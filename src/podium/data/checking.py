# SPDX-License-Identifier: Apache-2.0
"""Checks a source quickly before a run: it exists, it is not empty, and its first row is of a known kind."""

from __future__ import annotations

from podium.data.comparisons import Shape, check_judged
from podium.data.kinds import named_values
from podium.data.sources import first_row
from podium.errors import BadRowError
from podium.recipe.schema import SourceSection


def check_source(section: SourceSection, key: str, shape: Shape = "documents", *, skips: bool = False) -> None:
    """Raises the error that a run would raise about its first row. Reads only the beginning, and needs neither a
    tokenizer nor, for a hub id, the network. The kind of rows after a `map` is not checked: that would run it.
    `skips`: a run that skips bad rows may begin with one."""
    row = first_row(section, key, keep_bad=skips)
    if row is None or section.map is not None:
        return
    try:
        values = named_values(row, section.columns, None)
        assert values is not None
        check_judged(values, section.columns, shape, row)
    except BadRowError as error:
        if not skips:
            raise BadRowError(f"{key}: {error}") from error
