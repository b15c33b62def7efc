# SPDX-License-Identifier: Apache-2.0
"""Reads a timeline that still grows: every call gives the spans that were written since the last one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from podium.observe.timeline import TimelineSpan, earlier_file, spans_in, timeline_file, timeline_files


@dataclass(slots=True)
class _Place:
    """How far a file was read. The inode tells a new file of the same name."""

    inode: int
    offset: int


class TimelineGrowth:
    """The files of one run. Not for several threads at once."""

    def __init__(self, run: Path, *, most_bytes: int) -> None:
        """`most_bytes`: what the first read takes of the end of each file."""
        self._run, self._most_bytes = run, most_bytes
        self._places: dict[str, _Place] = {}
        self._is_begun = False
        self.is_whole = True
        """Whether the first read had all that the files have."""
        self.was_rotated = False
        """Whether the last read came to the end of a full file of the controller or of rank 0, and began with its
        successor."""

    def read(self) -> list[TimelineSpan] | None:
        """New spans, in the order in which each file was written. A line that is not whole yet waits for its rest.
        None: a file was replaced or shortened, and all must be read again, by another instance."""
        found: list[TimelineSpan] = []
        self.was_rotated = False
        for path in timeline_files(self._run):
            try:
                stat = path.stat()
            except OSError:
                continue
            place = self._places.get(path.name)
            if place is None:
                self._places[path.name] = place = _Place(stat.st_ino, 0)
                if not self._is_begun:
                    place.offset = max(0, stat.st_size - self._most_bytes)
                    self.is_whole &= place.offset == 0 and not earlier_file(path).is_file()
            elif place.inode != stat.st_ino:
                if not _is_file(earlier_file(path), place.inode):
                    return None
                found += self._rest(earlier_file(path), place)
                self._places[path.name] = place = _Place(stat.st_ino, 0)
                self.was_rotated |= path == timeline_file(self._run)
            elif stat.st_size < place.offset:
                return None
            if stat.st_size > place.offset:
                found += self._rest(path, place)
        self._is_begun = True
        return found

    @staticmethod
    def _rest(path: Path, place: _Place) -> Iterator[TimelineSpan]:
        try:
            with path.open("rb") as file:
                file.seek(place.offset)
                content = file.read()
        except OSError:
            return
        end = content.rfind(b"\n") + 1
        place.offset += end
        for line in content[:end].splitlines():
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError):  # cut by a full disk, or by where reading began
                continue
            if isinstance(fields, dict):
                yield from spans_in(fields)


def _is_file(path: Path, inode: int) -> bool:
    try:
        return path.stat().st_ino == inode
    except OSError:
        return False
