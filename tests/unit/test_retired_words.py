# SPDX-License-Identifier: Apache-2.0
"""Words that Podium once had of its own do not come back: the field has others for the same things."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import podium

SOURCE = Path(podium.__file__).parent
REPOSITORY = SOURCE.parents[1]
RETIRED_KEYS = SOURCE / "recipe" / "retired.py"  # names them, for recipes that still have them

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
    "DrawnTask": "IndexedTask",
    "draw_ahead": "take_ahead",
    "drawn_tokens": "generated_tokens",
    "ScoredRollouts": "TrainBatch",
    "Order": "Call",
    "order_all": "send_all",
    "bend": "entropy_gradient",
    "seated_R": "admitted_R",
    "Given": "SectionArguments",
    "load_given": "load_recipe_arguments",
    "given_rows": "python_rows",
}
# In docs, strings and comments, where they mean nothing else.
PROSE = (
    "roommate", "crew", "seat", "put back", "page book", "page_tokens", "parcel", "mend", "mended", "mending",
    "whoever", "one's own", "cannot be had", "drawn_tokens",
)  # fmt: skip
# Parts of f-strings are tokens of their own from Python 3.12 on.
TEXTS = (tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))


_PATTERNS = {word: r"\b" + word.replace(" ", r"\s+") + r"\b" for word in PROSE}
_ANY = re.compile("|".join(_PATTERNS.values()), re.IGNORECASE)


@cache  # two tests look at every file
def tokens(text: str) -> list[tuple[int, int, str]]:
    """(kind, line, text) of identifiers, strings and comments of a Python file."""
    kept = {tokenize.NAME, *TEXTS}
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    return [(each.type, each.start[0], each.string) for each in found if each.type in kept]


def names(text: str) -> Iterator[tuple[int, str]]:
    """Identifiers of a Python file with their lines."""
    return ((line, string) for kind, line, string in tokens(text) if kind == tokenize.NAME)


def texts(text: str) -> Iterator[tuple[int, str]]:
    """Strings and comments of a Python file with their lines."""
    return ((line, string) for kind, line, string in tokens(text) if kind in TEXTS)


def retired(text: str) -> list[str]:
    """Retired words of a text, also where a line ends between two of them."""
    if not _ANY.search(text):
        return []
    return [word for word, pattern in _PATTERNS.items() if re.search(pattern, text, re.IGNORECASE)]


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE)))
def test_no_identifier_is_a_retired_word(file: Path) -> None:
    problems = {
        f"line {line}: {name} is called {IDENTIFIERS[name]}"
        for line, name in names(file.read_text(encoding="utf-8"))
        if name in IDENTIFIERS
    }
    assert not problems


@pytest.mark.parametrize(
    "page", sorted([REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]), ids=lambda page: page.name
)
def test_no_page_uses_a_retired_word(page: Path) -> None:
    assert retired(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "file", sorted(set(SOURCE.rglob("*.py")) - {RETIRED_KEYS}), ids=lambda file: str(file.relative_to(SOURCE))
)
def test_no_string_or_comment_uses_a_retired_word(file: Path) -> None:
    problems = [
        f"line {line}: {word}" for line, text in texts(file.read_text(encoding="utf-8")) for word in retired(text)
    ]
    assert problems == []


def test_a_retired_word_would_be_found() -> None:
    assert ("Seat", 2) in {(name, line) for line, name in names("x = 1\nclass Seat: ...\n")}


def test_a_retired_word_in_prose_would_be_found() -> None:
    source = '"""I recommend a seatbelt."""\nx = f"{y} was put\\nback"  # Mend it.\nz = """put\n  back"""\n'
    assert [(line, word) for line, text in texts(source) for word in retired(text)] == [(2, "mend"), (3, "put back")]
