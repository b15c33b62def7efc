# SPDX-License-Identifier: Apache-2.0
"""Answers of judges by the content of their requests, in memory and on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

_MOST_ENTRIES = 100_000


class JudgeCache:
    """The newest answers. With a folder, they are also written there, each process to its own file, and those of all
    files are read in the beginning."""

    def __init__(self, folder: Path | None = None, *, most: int = _MOST_ENTRIES) -> None:
        self._folder, self._most = folder, most
        self._answers: OrderedDict[str, str] = OrderedDict()
        self._file: TextIO | None = None
        if folder is not None:
            for path in sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
                self._read(path)

    def get(self, key: str) -> str | None:
        """The answer to a request with this content."""
        answer = self._answers.get(key)
        if answer is not None:
            self._answers.move_to_end(key)
        return answer

    def put(self, key: str, answer: str) -> None:
        """Keeps an answer. Where it cannot be written, for instance on a full disk, it is kept in memory only."""
        self._remember(key, answer)
        if self._folder is None:
            return
        try:
            if self._file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.jsonl"
                self._file = (self._folder / name).open("w", encoding="utf-8", errors="surrogatepass")
            self._file.write(json.dumps({"key": key, "answer": answer}) + "\n")
            self._file.flush()
        except OSError as error:
            print(f"The judge's cache cannot be written, and is kept in memory from here on: {error}", flush=True)
            self._folder = None

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _remember(self, key: str, answer: str) -> None:
        self._answers[key] = answer
        self._answers.move_to_end(key)
        if len(self._answers) > self._most:
            self._answers.popitem(last=False)

    def _read(self, path: Path) -> None:
        with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="surrogatepass") as lines:
            for line in lines:
                try:
                    entry = json.loads(line)
                except ValueError:  # the last line of a process that was killed
                    continue
                if isinstance(entry, dict) and isinstance(entry.get("answer"), str) and "key" in entry:
                    self._remember(str(entry["key"]), entry["answer"])


def content_key(base_url: str, body: Mapping[str, Any]) -> str:
    """The key of a request: a hash of all that the answer depends on. The API key is no part of it."""
    return hashlib.sha256(json.dumps([base_url, body], sort_keys=True).encode()).hexdigest()
