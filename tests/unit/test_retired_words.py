# SPDX-License-Identifier: Apache-2.0
"""Words that Podium once had of its own do not come back: the field has others for the same things."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import podium

SOURCE = Path(podium.__file__).parent
REPOSITORY = SOURCE.parents[1]

# Retired -> what it is called.
IDENTIFIERS = {
    "Seat": "WorkerContext",
    "roommate": "colocated_role",
    "introduce": "open_channel",
    "Line": "Channel",
    "Card": "WorkerHandle",
    "Crew": "WorkerPool",
    "crew": "worker_pool",
    "Patience": "Timeouts",
    "patience": "timeouts",
    "Hello": "Handshake",
    "hello": "handshake",
    "bury": "mark_dead",
    "raise_all": "start",
    "Envelope": "Reply",
    "envelope": "reply",
    "PageBook": "BlockManager",
    "PageCopy": "BlockCopy",
    "Lease": "BlockTable",
    "lease": "block_table",
    "page_tokens": "block_size",
    "put_back": "preempt",
    "seated": "admitted",
    "unseat": "release",
    "draw_rows": "sample_rows",
    "narrowed": "processed",
    "Turns": "FairLock",
    "Parcel": "WeightTransfer",
    "parcel": "transfer",
    "WeightedRollouts": "TrainBatch",
    "weigher": "advantage_estimator",
    "weigh": "compute_advantages",
}
# In docs, where they mean nothing else.
PROSE = ("roommate", "crew", "seat", "put back", "page book", "page_tokens", "parcel")


def names(text: str) -> Iterator[tuple[int, str]]:
    """Identifiers of a Python file with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE)))
def test_no_identifier_is_a_retired_word(file: Path) -> None:
    found = {
        f"line {line}: {name} is called {IDENTIFIERS[name]}"
        for line, name in names(file.read_text(encoding="utf-8"))
        if name in IDENTIFIERS
    }
    assert not found


@pytest.mark.parametrize(
    "page", sorted([REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]), ids=lambda page: page.name
)
def test_no_page_uses_a_retired_word(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [word for word in PROSE if re.search(rf"\b{word}\b", text, re.IGNORECASE)] == []


def test_a_retired_word_would_be_found() -> None:
    assert ("Seat", 2) in {(name, line) for line, name in names("x = 1\nclass Seat: ...\n")}
