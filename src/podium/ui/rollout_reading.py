# SPDX-License-Identifier: Apache-2.0
"""Reads kept rollouts: Parquet files of one step each, in the folder `rollouts` of a run. Columns that a file does not
have are empty, and a file that is not readable is an error that names it."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.ui.answers import PageError

if TYPE_CHECKING:
    import pyarrow

FOLDER = "rollouts"
_NAME = re.compile(r"step-(\d{1,12})\.parquet")
# Characters of prompt and answer in a row of the table.
PREVIEW = 120
# Rows that are in memory with their whole texts.
_BATCH = 512
# How messages begin in the files of a run, and what only those of others have.
_ANSWER, _QUESTION, _OTHER_ORDER = '{"role": "assistant"', '{"role": "user"', ', "role": "'
# Times of files are counted in steps of this length: what changed within one cannot be told apart.
_TICK_S = 0.1
_DECODER = json.JSONDecoder()
Json = dict[str, Any]


def step_files(run: Path) -> dict[int, Path]:
    """Step -> file, in ascending order. Links are left out: they may lead out of the folder. So is what is no file:
    reading a pipe would never end."""
    try:
        with os.scandir(run / FOLDER) as entries:
            found = {
                int(name[1]): Path(each.path)
                for each in entries
                if (name := _NAME.fullmatch(each.name)) is not None and each.is_file(follow_symlinks=False)
            }
    except OSError:
        return {}
    return dict(sorted(found.items()))


class StepFiles:
    """The files of one run, looked at again and again. A folder that has not changed is not listed again, and a file
    that is known by name and inode is not opened or asked for anything. Used by several threads."""

    def __init__(self, run: Path) -> None:
        self._folder = run / FOLDER
        self._lock = threading.Lock()
        self._changed: tuple[int, float] | None = None  # of the folder, and since when this is known
        self._listed_s = 0.0
        self._known: dict[str, tuple[int, int]] = {}  # name -> inode, step
        self._files: dict[int, Path] = {}

    def look(self) -> Mapping[int, Path]:
        """As `step_files`."""
        with self._lock:
            try:
                changed = self._folder.stat().st_mtime_ns
            except OSError:
                self._changed, self._known, self._files = None, {}, {}
                return self._files
            if self._changed is None or self._changed[0] != changed:
                self._changed = changed, time.monotonic()
            elif self._listed_s - self._changed[1] > _TICK_S:
                return self._files
            self._listed_s = time.monotonic()
            self._list()
            return self._files

    def inode(self, path: Path) -> int:
        """Of a file of the last look; 0: it has none."""
        return self._known.get(path.name, (0, 0))[0]

    def _list(self) -> None:
        found: dict[str, tuple[int, int]] = {}
        try:
            with os.scandir(self._folder) as entries:
                for each in entries:
                    known, inode = self._known.get(each.name), each.inode()
                    if known is not None and known[0] == inode:
                        found[each.name] = known
                    elif (name := _NAME.fullmatch(each.name)) is not None and each.is_file(follow_symlinks=False):
                        found[each.name] = inode, int(name[1])
        except OSError:
            found = {}
        if found != self._known:
            paths = {path.name: path for path in self._files.values()}
            self._known = found
            ordered = sorted((step, name) for name, (_, step) in found.items())
            self._files = {step: paths.get(name) or self._folder / name for step, name in ordered}


def stamp_of(path: Path) -> str | None:
    """Identifies the content of a file; None if it is gone."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return f"{stat.st_ino}-{stat.st_size}-{stat.st_mtime_ns}"


def num_rows(path: Path) -> int:
    """Episodes of a file, from its footer."""
    import pyarrow.parquet as pq

    try:
        return int(pq.read_metadata(path).num_rows)
    except Exception:
        return 0


def summary_rows(path: Path, step: int, *, texts: bool = False) -> list[Json]:
    """All episodes of a file without their tokens. `texts`: with the whole messages as `messages`, to search in."""
    rows: list[Json] = summary_table(path, texts=texts).to_pylist()
    for row in rows:
        row |= {"step": step, "rewards": dict(row["rewards"] or ())}
        if texts:
            row["messages"] = row["messages"] or ""
    return rows


def summary_table(path: Path, *, texts: bool = False) -> pyarrow.Table:
    """The same as columns, each of one type whatever the file has."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            present = set(file.schema_arrow.names)
            # The smallest column with one value per token says how many there are.
            counted = next((name for name in ("loss_mask", "tokens") if name in present), None)
            wanted = [name for name in (*_types(), "messages", "prompt_tokens") if name in present]
            names = [*wanted, *([counted] if counted else [])]
            if not names:  # columns of something else: as many rows without a value
                names = file.schema_arrow.names[:1]
            previews, parts, num_read = Previews(), [], 0
            for batch in file.iter_batches(batch_size=_BATCH, columns=names):
                parts.append(_summary(batch, num_read, counted, previews, texts=texts))
                num_read += batch.num_rows
            return pa.concat_tables(parts) if parts else _summary(pa.table({}), 0, None, previews, texts=texts)
    except Exception as error:  # pyarrow raises many kinds
        raise unreadable(path, error) from error


def _types() -> dict[str, Any]:
    import pyarrow as pa

    return {
        "group": pa.int64(), "sample": pa.int64(), "source": pa.string(), "row": pa.int64(), "reward": pa.float64(),
        "rewards": pa.map_(pa.string(), pa.float64()), "ending": pa.string(), "trained": pa.bool_(),
    }  # fmt: skip


def _summary(batch: Any, begin: int, counted: str | None, previews: Previews, *, texts: bool) -> pyarrow.Table:
    """`begin`: rows of the file before this batch."""
    import pyarrow as pa
    import pyarrow.compute as pc

    count, present = batch.num_rows, set(batch.schema.names)

    def column(name: str, kind: Any) -> Any:
        return batch.column(name).cast(kind) if name in present else pa.nulls(count, kind)

    columns = {name: column(name, kind) for name, kind in _types().items()}
    columns["group"] = pc.coalesce(columns["group"], pa.array(range(begin, begin + count), pa.int64()))
    columns["sample"] = pc.fill_null(columns["sample"], 0)
    columns["length"] = pa.nulls(count, pa.int32())
    if counted is not None:
        prompts = pc.fill_null(column("prompt_tokens", pa.int64()), 0)
        lengths = pc.subtract(pc.list_value_length(batch.column(counted)).cast(pa.int64()), prompts)
        columns["length"] = pc.max_element_wise(lengths, 0, skip_nulls=False).cast(pa.int32())
    is_text = "messages" in present and _is_text(batch.schema.field("messages").type)
    messages = column("messages", pa.string()) if is_text else pa.nulls(count, pa.string())
    columns["preview"] = pa.array([previews.of(each) for each in messages.to_pylist()], pa.string())
    return pa.table({**columns, **({"messages": messages} if texts else {})})


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind))


def unreadable(path: Path, error: Exception) -> PageError:
    """What to say of a file that cannot be read."""
    if isinstance(error, FileNotFoundError):
        return PageError(404, f"{path} is gone: a resumed run has removed it. Reload the list of rollouts.")
    reason = str(error).splitlines()[0] if str(error) else ""
    return PageError(422, f"{path} cannot be read ({type(error).__name__}: {reason}). Remove it, or restore it.")


def messages_of(text: Any) -> list[Any]:
    """The messages of an episode; a text that is no JSON is shown as it is."""
    try:
        found = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return [{"role": "unknown", "content": text}]
    return found if isinstance(found, list) else []


class Previews:
    """Previews of many episodes, as `preview_of` makes them. Only the last question and answer are parsed, and the
    question once for all episodes of a group."""

    def __init__(self) -> None:
        self._before, self._asked = "", ""

    def of(self, messages: str | None) -> str:
        """Of one episode."""
        at = -1 if messages is None else messages.rfind(_ANSWER)
        if messages is None or at < 0 or messages.find(_QUESTION, at) >= 0 or _OTHER_ORDER in messages:
            return preview_of(messages)
        try:
            answered = _beginning(_DECODER.raw_decode(messages, at)[0])
            before = messages[:at]
            if before != self._before:
                place = before.rfind(_QUESTION)
                self._asked = "" if place < 0 else _beginning(_DECODER.raw_decode(messages, place)[0]) + " → "
                self._before = before
        except (ValueError, RecursionError):
            return preview_of(messages)
        return self._asked + answered


def preview_of(messages: Any) -> str:
    """The last prompt and the beginning of the last answer in one line."""
    found = [each for each in messages_of(messages) if isinstance(each, Mapping)]
    asked = next((each for each in reversed(found) if each.get("role") == "user"), None)
    answered = next((each for each in reversed(found) if each.get("role") == "assistant"), None)
    parts = [_beginning(each) for each in (asked, answered) if each is not None]
    return " → ".join(parts) if parts else " ".join(_beginning(each) for each in found)[:PREVIEW]


def _beginning(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
    line = " ".join(text[: PREVIEW + 8].split())
    if len(line) <= PREVIEW < len(text):  # it has much space between its words
        line = " ".join(text[: 4 * PREVIEW].split())
    line = line if len(line) <= PREVIEW else line[: PREVIEW - 1] + "…"
    return line if line.isascii() else line.encode("utf-8", "replace").decode("utf-8")


def texts_of(messages: str) -> Iterator[str]:
    """What one can search in: the contents, not the JSON around them."""
    for each in messages_of(messages):
        if isinstance(each, Mapping):
            content = each.get("content")
            yield content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
            if each.get("tool_calls"):
                yield json.dumps(each["tool_calls"], ensure_ascii=False)
