# SPDX-License-Identifier: Apache-2.0
"""The SQLite file behind the index of rollouts: one block per Parquet file. A block has a packed array for every column
that rows are sorted or filtered by, and the rest of its rows, compressed.

There is no row and no B-tree entry per episode: taking in a file appends a few blobs, whatever the index has already.
A column of all blocks is read in one pass, and sorted in memory. An episode costs 36 bytes, and what its preview and
rewards are compressed to."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow

_FORMAT = 2
_BUSY_S = 5.0
_PAGE_BYTES = 16_384
NO_ROW, NO_LENGTH, NO_SOURCE = -(1 << 63), -1, -1
"""Values of rows that have none. A missing reward is NaN."""
COLUMNS: Mapping[str, type[np.generic]] = {
    "grp": np.int64, "sample": np.int32, "row": np.int64, "reward": np.float64, "length": np.int32, "source": np.int32,
}  # fmt: skip
_DETAILS = ("preview", "ending", "trained", "rewards")
# Names of data sources; a run has a few.
_MOST_SOURCES = 500
_TABLES = (
    """
CREATE TABLE IF NOT EXISTS files (
  block INTEGER PRIMARY KEY AUTOINCREMENT, step INTEGER NOT NULL UNIQUE, stamp TEXT NOT NULL, rows INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS sources (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS details (block INTEGER PRIMARY KEY, content BLOB NOT NULL);
"""
    + "".join(f"CREATE TABLE IF NOT EXISTS column_{name} (block INTEGER PRIMARY KEY, content BLOB NOT NULL);\n"
              for name in COLUMNS)
)  # fmt: skip
_PARTS = ("details", *(f"column_{name}" for name in COLUMNS))
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Block:
    """The rows of one file of a step. Rows are in the order of group and sample."""

    step: int
    stamp: str
    rows: int
    block: int

    @property
    def content(self) -> tuple[int, str]:
        """Differs if the content does."""
        return self.step, self.stamp


@contextlib.contextmanager
def opened(file: Path) -> Iterator[sqlite3.Connection]:
    """A connection of its own for every use: threads share none. A file of another format is made again."""
    connection = sqlite3.connect(file, timeout=_BUSY_S)
    try:
        if connection.execute("PRAGMA user_version").fetchone()[0] != _FORMAT:
            connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            connection.execute("PRAGMA journal_mode = WAL")
            dropped = "".join(f"DROP TABLE IF EXISTS {name};" for name in ("files", "episodes", "sources", *_PARTS))
            connection.executescript(f"BEGIN; {dropped} {_TABLES} PRAGMA user_version = {_FORMAT}; COMMIT;")
        connection.execute("PRAGMA synchronous = OFF")
        yield connection
    finally:
        connection.close()


def blocks_of(connection: sqlite3.Connection) -> list[Block]:
    """All files that were taken in, in the order of their steps."""
    return [Block(*row) for row in connection.execute("SELECT step, stamp, rows, block FROM files ORDER BY step")]


def version_of(connection: sqlite3.Connection) -> tuple[int, int]:
    """Changes with the blocks: numbers of blocks are never used again."""
    count, last = connection.execute("SELECT COUNT(*), COALESCE(MAX(block), 0) FROM files").fetchone()
    return count, last


def num_rows_of(connection: sqlite3.Connection) -> int:
    """Episodes of all blocks."""
    return int(connection.execute("SELECT COALESCE(SUM(rows), 0) FROM files").fetchone()[0])


def remove_block(connection: sqlite3.Connection, step: int) -> None:
    """Forgets the file of a step. The caller commits."""
    for (block,) in connection.execute("SELECT block FROM files WHERE step = ?", (step,)).fetchall():
        for table in ("files", *_PARTS):
            connection.execute(f"DELETE FROM {table} WHERE block = ?", (block,))


def add_block(connection: sqlite3.Connection, step: int, stamp: str, table: pyarrow.Table | None) -> None:
    """Takes in the rows of a file, as `summary_table` gives them, in place of what its step had. None: it cannot be
    read. The caller commits."""
    remove_block(connection, step)
    rows = 0 if table is None else table.num_rows
    packed = _packed(connection, table) if table is not None and rows else {}
    cursor = connection.execute("INSERT INTO files (step, stamp, rows) VALUES (?, ?, ?)", (step, stamp, rows))
    for name, content in packed.items():
        connection.execute(f"INSERT INTO {name} VALUES (?, ?)", (cursor.lastrowid, content))


def _packed(connection: sqlite3.Connection, table: pyarrow.Table) -> dict[str, bytes]:
    """Contents of a block by the name of their table."""
    import pyarrow as pa

    order = np.lexsort((table.column("sample").to_numpy(), table.column("group").to_numpy()))
    if not np.array_equal(order, np.arange(len(order))):
        table = table.take(order)

    def numbers(name: str, missing: int | None = None) -> Array:
        column = table.column(name)
        return np.asarray((column if missing is None else column.fill_null(missing)).to_numpy())

    values = {
        "grp": numbers("group"), "sample": numbers("sample"), "row": numbers("row", NO_ROW),
        "reward": numbers("reward"), "length": numbers("length", NO_LENGTH),
        "source": _source_numbers(connection, table.column("source")),
    }  # fmt: skip
    (batch,) = table.select(_DETAILS).combine_chunks().to_batches()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(batch)
    columns = {f"column_{name}": values[name].astype(kind).tobytes() for name, kind in COLUMNS.items()}
    return {"details": sink.getvalue().to_pybytes(), **columns}


def _source_numbers(connection: sqlite3.Connection, column: Any) -> Array:
    """The numbers of the rows' sources; new names get one. Names after the first 500 count as none."""
    encoded = column.dictionary_encode().combine_chunks()
    known: list[int] = []
    for name in encoded.dictionary.to_pylist():
        query = "INSERT OR IGNORE INTO sources (name) SELECT ? WHERE (SELECT COUNT(*) FROM sources) < ?"
        connection.execute(query, (name, _MOST_SOURCES))
        number = source_number(connection, name)
        known.append(NO_SOURCE if number is None else number)
    codes: Array = encoded.indices.fill_null(len(known)).to_numpy(zero_copy_only=False)
    numbers: Array = np.asarray([*known, NO_SOURCE])[codes]
    return numbers


def source_number(connection: sqlite3.Connection, name: str) -> int | None:
    """The number of a source in the column; None if no row has it."""
    found = connection.execute("SELECT id FROM sources WHERE name = ?", (name,)).fetchone()
    return None if found is None else int(found[0])


def source_names(connection: sqlite3.Connection) -> dict[int, str]:
    """The names of all sources by their numbers."""
    return dict(connection.execute("SELECT id, name FROM sources"))


def read_column(connection: sqlite3.Connection, name: str, since: int) -> dict[int, bytes]:
    """The packed values of a column by block, from a block on."""
    return dict(connection.execute(f"SELECT block, content FROM column_{name} WHERE block >= ?", (since,)))


def read_details(connection: sqlite3.Connection, block: int, names: Sequence[str] = _DETAILS) -> pyarrow.RecordBatch:
    """Those columns of a block that nothing is sorted by."""
    import pyarrow as pa

    (content,) = connection.execute("SELECT content FROM details WHERE block = ?", (block,)).fetchone()
    options = pa.ipc.IpcReadOptions(included_fields=[_DETAILS.index(name) for name in names], use_threads=False)
    return pa.ipc.open_stream(content, options=options).read_next_batch()


def read_rows(connection: sqlite3.Connection, block: Block, places: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of a block as the page shows them, but for the names of their sources."""
    values = {}
    for name, kind in COLUMNS.items():
        query = f"SELECT content FROM column_{name} WHERE block = ?"
        (content,) = connection.execute(query, (block.block,)).fetchone()
        values[name] = np.frombuffer(content, kind)[np.asarray(places)].tolist()
    details = read_details(connection, block.block).take(np.asarray(places)).to_pylist()
    rows = []
    for at, detail in enumerate(details):
        row = {name: column[at] for name, column in values.items()}
        reward, length, number = row["reward"], row["length"], row["row"]
        rows.append({
            "step": block.step, "group": row["grp"], "sample": row["sample"], "source": row["source"],
            "row": None if number == NO_ROW else number, "reward": None if reward != reward else reward,
            "rewards": dict(detail["rewards"] or ()), "length": None if length == NO_LENGTH else length,
            "ending": detail["ending"], "trained": detail["trained"], "preview": detail["preview"] or "",
        })  # fmt: skip
    return rows
