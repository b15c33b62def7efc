# SPDX-License-Identifier: Apache-2.0
"""Examples of a run on fixed data: the first rows of its first step, token by token, with those that are trained.

`examples.jsonl` has a line for each: {"source": "train", "value": 0.0, "documents": [{"tokens": [...], "texts": [...],
"loss_mask": [...], "length": 812}, ...]}. A row that compares two answers has two documents, chosen and rejected."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptDocument:
    """The first tokens of a document. `loss_mask`: those that are predicted and count in the loss."""

    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    loss_mask: tuple[bool, ...]
    length: int  # tokens of the whole document


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptExample:
    """One row of the data as it is trained on. `value`: what it has beside its text: a margin, a score or a label."""

    source: str
    value: float
    documents: tuple[KeptDocument, ...]


def write_examples(path: Path, examples: Sequence[KeptExample]) -> None:
    """Writes all examples as one file, which is complete when it has its name."""
    lines = (json.dumps(asdict(each), separators=(",", ":")) + "\n" for each in examples)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(lines), encoding="utf-8")
    os.replace(temporary, path)


def read_examples(path: Path) -> list[KeptExample]:
    """The examples of a file; lines that cannot be read are left out. Nothing if there is no file."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            row = json.loads(line)
            documents = tuple(_document(each) for each in row["documents"])
            found.append(KeptExample(source=str(row["source"]), value=float(row["value"]), documents=documents))
        except (ValueError, KeyError, TypeError):
            continue
    return found


def _document(row: Mapping[str, Any]) -> KeptDocument:
    return KeptDocument(
        tokens=tuple(int(token) for token in row["tokens"]),
        texts=tuple(str(text) for text in row["texts"]),
        loss_mask=tuple(bool(each) for each in row["loss_mask"]),
        length=int(row["length"]),
    )
