# SPDX-License-Identifier: Apache-2.0
"""Names of data sources in metrics and ledgers: the names of their files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from podium.data.files import format_of
from podium.data.storage import is_glob
from podium.recipe.schema import SourceSection


def source_names(sections: Sequence[SourceSection]) -> list[str]:
    """File names without folder and suffix; sources that would share one also get the folder."""
    parts = [_folder_and_name(section.path) for section in sections]
    counts = Counter(name for _, name in parts)
    return [f"{folder}/{name}" if counts[name] > 1 and folder else name for folder, name in parts]


def mixed_names(sections: Sequence[SourceSection]) -> tuple[str, ...]:
    """Unique names of several sources: those that still share one also get a number. None for a single source, which
    needs no metrics of its own."""
    if len(sections) < 2:
        return ()
    seen: Counter[str] = Counter()
    names = []
    for name in source_names(sections):
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return tuple(names)


def _folder_and_name(path: str) -> tuple[str, str]:
    parts = [part for part in path.split("/") if part] or [path]
    while len(parts) > 1 and is_glob(parts[-1]):  # data/math/*.parquet is math
        parts.pop()
    folder, last = parts[-2] if len(parts) > 1 else "", parts[-1]
    return folder, os.path.splitext(last.removesuffix(".gz"))[0] if format_of(last) is not None else last
