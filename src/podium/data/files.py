# SPDX-License-Identifier: Apache-2.0
"""JSONL, CSV and Parquet files, split into blocks that can be read independently, so that files of any size stream."""

from __future__ import annotations

import csv
import gzip
import io
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, BinaryIO, Literal, Protocol, cast

from podium.data.json_lines import LazyObject, parse_object
from podium.data.null_fields import NullFields
from podium.data.rows import LinePlace, Row, place_text
from podium.data.storage import open_binary, size_bytes
from podium.errors import BadRowError, DataError

FileFormat = Literal["jsonl", "csv", "parquet"]

BLOCK_BYTES = 4 << 20
_SUFFIXES: dict[str, FileFormat] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "csv",
    ".parquet": "parquet", ".pq": "parquet",
}  # fmt: skip
# The csv module refuses fields above 128 KiB unless the process-wide limit is raised; long documents are common here.
_LONGEST_CSV_FIELD = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """Ranks that read the same rows, each of which uses a part of them."""

    rank: int
    world: int


ONE_READER = Readers(rank=0, world=1)


class DataFile(Protocol):
    """One file of a source. Blocks are read independently and in any order; some may be empty."""

    name: str

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""

    def read_block(self, index: int) -> list[Row]:
        """The rows of one block."""

    def first_row(self) -> Row | None:
        """The first row, read without touching the rest of the file."""


def format_of(name: str) -> FileFormat | None:
    """The format of a file's suffix (ignoring a `.gz` after it), or None."""
    return _SUFFIXES.get(os.path.splitext(name.removesuffix(".gz"))[1].lower())


def known_suffixes() -> str:
    """The supported file suffixes, for error messages."""
    return ", ".join(_SUFFIXES)


def open_file(
    name: str, file_format: FileFormat, key: str, block_bytes: int = BLOCK_BYTES, *, keep_bad: bool = False,
    readers: Readers = ONE_READER,
) -> DataFile:  # fmt: skip
    """Opens a file with the reader of its format. `keep_bad`: a line that cannot be read becomes a row with a
    `problem`, and is no error."""
    match file_format:
        case "jsonl":
            return JsonlFile(name, key, block_bytes, keep_bad=keep_bad, readers=readers)
        case "csv":
            return CsvFile(name, key, block_bytes, keep_bad=keep_bad)
        case "parquet":
            return ParquetFile(name, key)


class JsonlFile:
    """One JSON object per line. A block is the lines that begin in its range of bytes; a .gz file is one block.

    With several `readers` each parses an equal part of a block's lines when it reads them. So a malformed line is found
    at once, by one of them. The other lines are parsed when they are used."""

    def __init__(
        self, name: str, key: str, block_bytes: int, *, keep_bad: bool = False, readers: Readers = ONE_READER
    ) -> None:
        self.name = name
        self._readers = readers
        self._key = key
        self._keep_bad = keep_bad
        self._block_bytes = block_bytes
        self._gzipped = name.endswith(".gz")

    @cached_property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return 1 if self._gzipped else max(1, -(-size_bytes(self.name) // self._block_bytes))

    def read_block(self, index: int) -> list[Row]:
        """The rows of the lines that begin in one range of bytes."""
        if self._gzipped:
            return self._rows(_unzipped(self.name, self._key), None)
        begin, end = index * self._block_bytes, (index + 1) * self._block_bytes
        with open_binary(self.name) as stream:
            if begin:
                # From one byte before: a line that begins exactly at `begin` belongs to this block.
                stream.seek(begin - 1)
                begin += len(stream.readline()) - 1
            if begin >= end:
                return []
            data = stream.read(end - begin)
            if not data.endswith(b"\n"):
                data += stream.readline()
        return self._rows(data, begin)

    def first_row(self) -> Row | None:
        """The first row, read without the rest of the file."""
        with _text_start(self.name, self._key) as stream:
            byte = 0
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    place = f"{self.name}, line {number}" if self._gzipped else LinePlace(self.name, byte)
                    return self._row(line, place)
                byte += len(line)
        return None

    def _rows(self, data: bytes, begin: int | None) -> list[Row]:
        rows: list[Row] = []
        byte = 0
        for number, line in enumerate(data.split(b"\n"), start=1):
            if line.strip():
                place = f"{self.name}, line {number}" if begin is None else LinePlace(self.name, begin + byte)
                is_parsed = number % self._readers.world == self._readers.rank
                rows.append(self._row(line, place) if is_parsed else Row(LazyObject(line, place, self._key), place))
            byte += len(line) + 1
        return rows

    def _row(self, line: bytes, place: str | LinePlace) -> Row:
        try:
            return Row(parse_object(line, place, self._key), place)
        except BadRowError as error:
            if not self._keep_bad:
                raise
            return Row({}, place, str(error))


class CsvFile:
    """Comma (or, for .tsv, tab) separated values under a header. Blocks are split between records, so quoted newlines
    stay whole. Finding the splits takes one pass over the file in constant memory."""

    def __init__(self, name: str, key: str, block_bytes: int, *, keep_bad: bool = False) -> None:
        self.name = name
        self._key = key
        self._keep_bad = keep_bad
        self._block_bytes = block_bytes
        self._delimiter = "\t" if name.removesuffix(".gz").lower().endswith(".tsv") else ","
        csv.field_size_limit(_LONGEST_CSV_FIELD)

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self._cuts) - 1

    def read_block(self, index: int) -> list[Row]:
        """The rows of one block."""
        if self.name.endswith(".gz"):
            with _text_start(self.name, self._key) as stream:
                return list(self._rows(stream, header=None, first_line=1))
        (begin, first_line), (end, _) = self._cuts[index], self._cuts[index + 1]
        with open_binary(self.name) as stream:
            stream.seek(begin)
            data = stream.read(end - begin)
        return list(self._rows(io.BytesIO(data), header=self._header, first_line=first_line))

    def first_row(self) -> Row | None:
        """The first row, read without the rest of the file."""
        with _text_start(self.name, self._key) as stream:
            return next(self._rows(stream, header=None, first_line=1), None)

    @cached_property
    def _header(self) -> list[str]:
        with _text_start(self.name, self._key) as stream:
            return next(self._records(stream, first_line=1))[1]

    @cached_property
    def _cuts(self) -> list[tuple[int, int]]:
        """(byte, line number) where each block begins, and the end of the file."""
        size = size_bytes(self.name)
        if self.name.endswith(".gz"):
            return [(0, 1), (size, 0)]
        cuts: list[tuple[int, int]] = []
        with open_binary(self.name) as stream:
            counted = _CountedLines(stream)
            records = self._records(counted, first_line=1)
            next(records, None)
            next_cut = 0
            byte, line = counted.num_bytes, counted.num_lines + 1
            for _ in records:
                if byte >= next_cut:
                    cuts.append((byte, line))
                    next_cut = byte + self._block_bytes
                byte, line = counted.num_bytes, counted.num_lines + 1
        return [*(cuts or [(size, 1)]), (size, 0)]

    def _rows(self, lines: Iterable[bytes], header: list[str] | None, first_line: int) -> Iterator[Row]:
        records = self._records(lines, first_line)
        if header is None:
            _, header = next(records, (1, []))
        for line, record in records:
            if not record:
                continue
            place = f"{self.name}, line {line}"
            if len(record) != len(header):
                yield _bad_row(
                    place,
                    f"{self._key}: {place}: {len(record)} fields, and the header has {len(header)} "
                    f"({', '.join(header)}). Put fields that hold the separator or a newline in double quotes.",
                    keep=self._keep_bad,
                )
                continue
            yield Row(dict(zip(header, record, strict=True)), place)

    def _records(self, lines: Iterable[bytes], first_line: int) -> Iterator[tuple[int, list[str]]]:
        """(number of its first line, fields) of each record."""
        reader = csv.reader(_decoded(lines), delimiter=self._delimiter, strict=True)
        line = first_line
        while True:
            try:
                record = next(reader)
            except StopIteration:
                return
            except (csv.Error, UnicodeDecodeError) as error:
                raise DataError(
                    f"{self._key}: {self.name}, line {line}: not valid CSV in UTF-8 ({error}). Fix the quotes of "
                    "this record, or save the file as UTF-8."
                ) from error
            yield line, record
            line = first_line + reader.line_num


class ParquetFile:
    """A Parquet file; its row groups are the blocks. Null fields of messages and tools are left out."""

    def __init__(self, name: str, key: str) -> None:
        self.name = name
        self._key = key
        self._nulls = NullFields(name)

    @property
    def note(self) -> str | None:
        """What reading changed in the rows so far."""
        return self._nulls.note

    @cached_property
    def _rows_before(self) -> list[int]:
        with open_binary(self.name) as stream:
            metadata = self._parquet(stream).metadata
            before = [0]
            for group in range(metadata.num_row_groups):
                before.append(before[-1] + metadata.row_group(group).num_rows)
        return before

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self._rows_before) - 1

    def read_block(self, index: int) -> list[Row]:
        """The rows of one block."""
        with open_binary(self.name) as stream, _broken_parquet(self.name, self._key):
            values = self._parquet(stream).read_row_group(index).to_pylist()
        first = self._rows_before[index] + 1
        places = [place_text(self.name, "row", first + offset) for offset in range(len(values))]
        return [Row(self._nulls.without(row, place), place) for row, place in zip(values, places, strict=True)]

    def first_row(self) -> Row | None:
        """The first row, read without the rest of the file."""
        with open_binary(self.name) as stream, _broken_parquet(self.name, self._key):
            batches = self._parquet(stream).iter_batches(batch_size=1)
            rows = [row for batch in islice(batches, 1) for row in batch.to_pylist()]
        place = place_text(self.name, "row", 1)
        return Row(self._nulls.without(rows[0], place), place) if rows else None

    def _parquet(self, stream: Any) -> Any:
        import pyarrow.parquet

        with _broken_parquet(self.name, self._key):
            return pyarrow.parquet.ParquetFile(stream)


def _bad_row(place: str | LinePlace, problem: str, *, keep: bool) -> Row:
    """A row without values that says what is wrong with it, or an error."""
    if not keep:
        raise BadRowError(problem)
    return Row({}, place, problem)


@contextmanager
def _broken_parquet(name: str, key: str) -> Iterator[None]:
    """Turns pyarrow's error about a broken file into an error that names the file."""
    import pyarrow

    try:
        yield
    except FileNotFoundError:
        raise
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{key}: {name}: cannot be read as Parquet ({error}). Check that the file is whole and its suffix true, "
            f"or set {key}.format."
        ) from error


class _CountedLines:
    """Lines of a stream, with a count of lines and bytes read."""

    def __init__(self, stream: Iterable[bytes]) -> None:
        self._stream = stream
        self.num_bytes = 0
        self.num_lines = 0

    def __iter__(self) -> Iterator[bytes]:
        for line in self._stream:
            self.num_bytes += len(line)
            self.num_lines += 1
            yield line


def _decoded(lines: Iterable[bytes]) -> Iterator[str]:
    for number, line in enumerate(lines):
        yield line.decode("utf-8-sig" if number == 0 else "utf-8")


def _unzipped(name: str, key: str) -> bytes:
    with _text_start(name, key) as stream:
        return stream.read()


@contextmanager
def _text_start(name: str, key: str) -> Iterator[BinaryIO]:
    """Opens a file at its beginning, decompressing gzip; a broken archive is an error that names it."""
    with open_binary(name) as raw:
        try:
            yield cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if name.endswith(".gz") else raw
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{key}: {name}: not a whole gzip file ({error}). Compress it again.") from error
