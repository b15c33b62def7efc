# SPDX-License-Identifier: Apache-2.0
"""A file of answers that survives an interruption: one JSON object per line, appended whole. The next start continues
it, and a complete file is sorted. Torch-free."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from podium.errors import RolloutError

Settings = Mapping[str, Any]

_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class AnswerKey(NamedTuple):
    """Identifies an answer: number of the input row, and of the sample."""

    row: int
    sample: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRecord:
    """One answer as a line of the file. None: not written."""

    row: int
    sample: int
    prompt: str
    answer: str
    finish: str
    stop: int | str | None
    num_prompt_tokens: int
    num_tokens: int
    reference: str | None = None
    error: str | None = None
    tokens: list[int] | None = None
    logprobs: list[float] | None = None

    def line(self) -> bytes:
        """The record as a JSON line."""
        always = ("row", "sample", "prompt", "answer", "finish", "stop", "num_prompt_tokens", "num_tokens")
        values: dict[str, Any] = {name: getattr(self, name) for name in always}
        for name in ("reference", "error", "tokens", "logprobs"):
            if getattr(self, name) is not None:
                values[name] = getattr(self, name)
        # Half a surrogate pair, which UTF-8 cannot encode, becomes a JSON escape.
        return json.dumps(values, ensure_ascii=False).encode("utf-8", errors="backslashreplace") + b"\n"


@dataclass(frozen=True, slots=True)
class _Line:
    begin: int
    size: int
    finish: str


@dataclass(slots=True, eq=False)
class AnswersFile:
    """The open file, locked by this process. `done` grows with every written answer."""

    path: Path
    _stream: FileIO
    _size: int = 0
    _lines: dict[AnswerKey, _Line] = field(default_factory=dict)

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path, settings: Settings, *, about: Mapping[str, str]) -> Iterator[AnswersFile]:
        """Locks the file, which is new or was begun with the same settings. `about` is stored beside them and not
        compared. If no answer was written, a new file is removed."""
        check_place(path)
        path = path.resolve()  # a link stays a link when the file is sorted
        with _held(path) as stream:
            file = cls(path, stream)
            if os.fstat(stream.fileno()).st_size:
                known = _read_settings(path)  # before anything is changed: the file may belong to somebody else
                file._read()
                if file._lines:
                    _compare(path, known["settings"], settings)
            try:
                if not file._lines:
                    _write_atomically(settings_file(path), _as_json({"settings": settings, "about": about}))
                yield file
            finally:
                if not file._lines:
                    # The settings first: a process that opens the file in between writes its own.
                    settings_file(path).unlink(missing_ok=True)
                    path.unlink(missing_ok=True)

    def __contains__(self, key: AnswerKey) -> bool:
        return key in self._lines

    def finish_of(self, key: AnswerKey) -> str:
        """How this answer ended."""
        return self._lines[key].finish

    def remembered(self, name: str) -> Any:
        """The value that an earlier start stored beside the settings; None: nothing."""
        return _read_settings(self.path).get(name)

    def remember(self, name: str, value: Any) -> None:
        """Stores a value for later starts. It is not compared."""
        _write_atomically(settings_file(self.path), _as_json({**_read_settings(self.path), name: value}))

    def write(self, record: AnswerRecord) -> None:
        """Appends one answer. It is in the file when this returns, even if the process dies later."""
        line = record.line()
        try:
            written = self._stream.write(line)
            if written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with contextlib.suppress(OSError):
                self._stream.truncate(self._size)  # an incomplete line is useless
            raise self._unwritable(error) from error
        self._lines[AnswerKey(record.row, record.sample)] = _Line(self._size, len(line), record.finish)
        self._size += len(line)

    def put_in_order(self) -> None:
        """Sorts the file by row and sample, and replaces it atomically."""
        lines = [each for _, each in sorted(self._lines.items())]
        begins = [each.begin for each in lines]
        if begins == sorted(begins) and sum(each.size for each in lines) == self._size:
            return
        temporary = self.path.with_name(self.path.name + ".tmp")
        try:
            with temporary.open("wb") as ordered:
                for each in lines:
                    self._stream.seek(each.begin)
                    ordered.write(self._stream.read(each.size))
                ordered.flush()
                os.fsync(ordered.fileno())
            temporary.replace(self.path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> RolloutError:
        room = " Make room on that disk." if error.errno in _ROOM else ""
        return RolloutError(
            f"{self.path} cannot be written: {error.strerror or error}.{room} The {len(self._lines)} answers in it are "
            "whole; the same command continues there."
        )

    def _read(self) -> None:
        """Reads the answers of earlier starts. An incomplete last line comes from a killed process, and is dropped."""
        with self.path.open("rb") as reader:
            for number, line in enumerate(reader, start=1):
                if not line.endswith(b"\n"):
                    self._stream.truncate(self._size)
                    break
                if line.strip():
                    key, finish = _parsed(line, self.path, number)
                    self._lines.setdefault(key, _Line(self._size, len(line), finish))
                self._size += len(line)


def settings_file(path: Path) -> Path:
    """The settings file of an answers file."""
    return path.with_name(path.name + ".settings.json")


def _parsed(line: bytes, path: Path, number: int) -> tuple[AnswerKey, str]:
    try:
        values = json.loads(line)
        return AnswerKey(int(values["row"]), int(values["sample"])), str(values["finish"])
    except (ValueError, TypeError, KeyError) as error:
        raise RolloutError(
            f"{path}, line {number}: not an answer that podium generate wrote ({type(error).__name__}: {error}). "
            "Remove that line and its answer is generated again, or choose another --out."
        ) from error


def check_place(path: Path) -> None:
    """Raises an error unless a file can be created there."""
    if path.is_dir():
        raise RolloutError(f"--out: {path} is a folder. Name a file, for instance {path / 'answers.jsonl'}.")
    if path.exists() and not path.is_file():
        raise RolloutError(
            f"--out: {path} is a device or a pipe, and answers are put in order at the end. Name a file."
        )
    if not path.parent.is_dir():
        raise RolloutError(f"--out: there is no folder {path.parent} to write {path.name} in. Make it first.")


@contextlib.contextmanager
def _held(path: Path) -> Iterator[FileIO]:
    """The file, open for reading and appending, unbuffered. Only one process holds it at a time; the operating system
    releases it when that process ends in any way."""
    while True:
        try:
            stream = path.open("a+b", buffering=0)
        except OSError as error:
            raise RolloutError(f"--out: {path} cannot be written: {error.strerror or error}.") from error
        with stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RolloutError(
                    f"{path} is being written by another process right now. Wait for it, end it, or choose another "
                    "--out."
                ) from error
            if _is_still_there(path, stream):
                yield stream
                return


def _is_still_there(path: Path, stream: FileIO) -> bool:
    """False if its last holder has sorted or removed the file since this process opened it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(stream.fileno()))
    except FileNotFoundError:
        return False


def _read_settings(path: Path) -> dict[str, Any]:
    sidecar = settings_file(path)
    try:
        values = json.loads(sidecar.read_text(encoding="utf-8"))
        assert isinstance(values["settings"], dict)
    except FileNotFoundError as error:
        raise RolloutError(
            f"{path} exists, and {sidecar.name}, which would say what made it, does not. Nothing is written over: "
            "choose another --out, or move the file away."
        ) from error
    except (ValueError, TypeError, KeyError, AssertionError) as error:
        raise RolloutError(
            f"{sidecar} is damaged ({error}), so what made {path} is unknown. Choose another --out, or move both "
            "files away."
        ) from error
    return dict(values)


def _compare(path: Path, before: Settings, wanted: Settings) -> None:
    now = json.loads(_as_json(wanted))
    differing = [
        f"  {name}: {_shown(before.get(name))} before, {_shown(now.get(name))} now"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
    if differing:
        raise RolloutError(
            f"{path} has answers that were made with other settings:\n" + "\n".join(differing) + "\nAnswers of both "
            "would stand in one file. Choose another --out, move this one away, or continue with its settings."
        )


def _shown(value: Any) -> str:
    return "not given" if value is None else json.dumps(value, ensure_ascii=False)


def _as_json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=1, ensure_ascii=False) + "\n"


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RolloutError(f"{path} cannot be written: {error.strerror or error}. Nothing was generated.") from error
