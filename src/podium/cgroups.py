# SPDX-License-Identifier: Apache-2.0
"""How much memory the control groups (cgroups, versions 1 and 2) of this process allow: those of its container, of a
batch system's job, and all groups around them. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# Version 1 writes "no limit" as the largest number of whole pages.
_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class _Version:
    """Names of the files of a group."""

    limits: tuple[str, ...]
    used: str
    reclaimable: str  # in memory.stat, with the groups inside


# Above memory.high processes are slowed down until they hardly advance.
_V2 = _Version(limits=("memory.max", "memory.high"), used="memory.current", reclaimable="inactive_file")
_V1 = _Version(limits=("memory.limit_in_bytes",), used="memory.usage_in_bytes", reclaimable="total_inactive_file")


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes that the processes of this one's groups may take together; None: there is no limit. `root`: where `proc`
    and the groups are."""
    limits = [limit for folder, version in _groups(root) if (limit := _limit(folder, version)) is not None]
    return min(limits, default=None)


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that the groups of this process allow beyond what they take now; None: there is no limit. Pages of files
    that were not used lately count as free, since the system drops them first. Files in tmpfs are not among these."""
    free = []
    for folder, version in _groups(root):
        limit = _limit(folder, version)
        used = _number(folder / version.used)
        if limit is not None and used is not None:
            free.append(max(0, limit - max(0, used - _reclaimable(folder, version))))
    return min(free, default=None)


def _limit(folder: Path, version: _Version) -> int | None:
    limits = [number for name in version.limits if (number := _number(folder / name)) is not None]
    return min((each for each in limits if each < _NO_LIMIT), default=None)


def _reclaimable(folder: Path, version: _Version) -> int:
    with suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == version.reclaimable:
                return int(value)
    return 0


def _number(file: Path) -> int | None:
    """None: there is no such file, or it says `max`."""
    with suppress(OSError, ValueError):
        return int(file.read_text())
    return None


def _groups(root: Path) -> Iterator[tuple[Path, _Version]]:
    """Folders of the groups that this process is in, each with all groups around it that can be seen."""
    for path, version in _own_groups(root):
        for above, mounted in _mounts(root, version):
            # A container may see its own group as the root, and a path that is outside of what it sees.
            is_seen = path.is_relative_to(above) and ".." not in path.parts
            folder = mounted / path.relative_to(above) if is_seen else mounted
            yield from ((each, version) for each in (folder, *folder.parents) if each.is_relative_to(mounted))


def _own_groups(root: Path) -> Iterator[tuple[PurePosixPath, _Version]]:
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield PurePosixPath(path), _V2
        elif "memory" in controllers.split(","):
            yield PurePosixPath(path), _V1


def _mounts(root: Path, version: _Version) -> Iterator[tuple[PurePosixPath, Path]]:
    """The group at the top of each mounted tree, and where it is mounted."""
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, kind = line.partition(" - ")
        words, kinds = fields.split(), kind.split()
        if len(words) < 5 or len(kinds) < 3:
            continue
        is_v1 = kinds[0] == "cgroup" and "memory" in kinds[2].split(",")
        if kinds[0] == "cgroup2" if version is _V2 else is_v1:
            yield PurePosixPath(words[3]), root / words[4].lstrip("/")


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:  # another kind of system
        return []
