# SPDX-License-Identifier: Apache-2.0
"""What the groups of a process allow: its own limit and those around it, less what is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from podium.cgroups import free_memory, memory_limit
from podium.planning import devices

GIB = 1 << 30
V1_NO_LIMIT = 9223372036854771712  # as the kernel writes it


class System:
    """The files of a machine, below a folder of the test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc/self").mkdir(parents=True)

    def belongs_to(self, *groups: str) -> None:
        (self.root / "proc/self/cgroup").write_text("".join(f"{each}\n" for each in groups))

    def mounts(self, *lines: str) -> None:
        (self.root / "proc/self/mountinfo").write_text("".join(f"{each}\n" for each in lines))

    def group(self, folder: str, **files: int | str) -> None:
        path = self.root / folder
        path.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (path / name.replace("memory_", "memory.")).write_text(f"{value}\n")


def v2(at: str = "/sys/fs/cgroup", root: str = "/") -> str:
    return f"30 23 0:26 {root} {at} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"


def v1(root: str = "/", controller: str = "memory") -> str:
    return f"35 31 0:32 {root} /sys/fs/cgroup/{controller} rw,relatime - cgroup cgroup rw,{controller}"


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


def both(system: System) -> tuple[int | None, int | None]:
    return memory_limit(system.root), free_memory(system.root)


def test_a_container_that_sees_its_own_group_as_the_root(system: System) -> None:
    system.belongs_to("0::/")
    system.mounts(v2())
    stat = f"anon {2 * GIB}\ninactive_file {GIB}\nactive_file {GIB}\nshmem {GIB}"
    system.group("sys/fs/cgroup", memory_max=8 * GIB, memory_high="max", memory_current=5 * GIB, memory_stat=stat)

    assert both(system) == (8 * GIB, 4 * GIB)  # of the 5 GiB that are taken, 1 can be had back


def test_groups_around_it_limit_it_too(system: System) -> None:
    """The innermost allows 16 GiB, the one around it 10, of which others take most."""
    system.belongs_to("0::/job/task/step")
    system.mounts(v2())
    system.group("sys/fs/cgroup")  # the root has no files of this kind
    system.group("sys/fs/cgroup/job", memory_max=10 * GIB, memory_current=9 * GIB, memory_stat="inactive_file 0")
    system.group("sys/fs/cgroup/job/task", memory_max="max", memory_current=GIB, memory_stat="inactive_file 0")
    system.group("sys/fs/cgroup/job/task/step", memory_max=16 * GIB, memory_current=GIB, memory_stat="inactive_file 0")

    assert both(system) == (10 * GIB, GIB)


def test_memory_high_is_a_limit(system: System) -> None:
    system.belongs_to("0::/")
    system.mounts(v2())
    system.group("sys/fs/cgroup", memory_max=8 * GIB, memory_high=6 * GIB, memory_current=GIB)

    assert both(system) == (6 * GIB, 5 * GIB)


def test_version_1_with_a_group_around_it(system: System) -> None:
    system.belongs_to("9:name=systemd:/", "4:cpu,memory:/docker/ab", "3:cpuset:/docker/ab", "0::/")
    system.mounts(v1(controller="cpuset"), v1(), v2("/sys/fs/cgroup/unified"))
    files = {"memory_usage_in_bytes": 3 * GIB, "memory_stat": f"inactive_file 0\ntotal_inactive_file {GIB}"}
    system.group("sys/fs/cgroup/memory", memory_limit_in_bytes=V1_NO_LIMIT, **files)
    system.group("sys/fs/cgroup/memory/docker", memory_limit_in_bytes=4 * GIB, **files)
    system.group("sys/fs/cgroup/memory/docker/ab", memory_limit_in_bytes=7 * GIB, **files)

    assert both(system) == (4 * GIB, 2 * GIB)


@pytest.mark.parametrize("own", ["/docker/ab", "/../../elsewhere"])
def test_a_container_whose_group_is_mounted_as_the_top(system: System, own: str) -> None:
    """The path counts from a root that the container does not see."""
    system.belongs_to(f"4:memory:{own}")
    system.mounts(v1(root="/docker/ab"))
    system.group("sys/fs/cgroup/memory", memory_limit_in_bytes=2 * GIB, memory_usage_in_bytes=GIB)
    system.group("sys/fs/cgroup/elsewhere", memory_limit_in_bytes=1, memory_usage_in_bytes=0)

    assert both(system) == (2 * GIB, GIB)


def test_more_than_the_limit_is_nothing_free(system: System) -> None:
    system.belongs_to("0::/")
    system.mounts(v2())
    system.group("sys/fs/cgroup", memory_max=GIB, memory_current=2 * GIB)

    assert both(system) == (GIB, 0)


def test_no_limit_and_no_groups(system: System) -> None:
    assert both(system) == (None, None)

    system.belongs_to("0::/user.slice", "nonsense")
    system.mounts(v2(), "short - line", "")
    system.group("sys/fs/cgroup/user.slice", memory_max="max", memory_high="max", memory_current=GIB)

    assert both(system) == (None, None)


@pytest.mark.parametrize(("limit", "expected"), [(3 * GIB, 3 * GIB), (1 << 60, None), (None, None)])
def test_the_planner_counts_with_the_limit(
    limit: int | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "memory_limit", lambda: None)
    whole = devices.host_memory()
    monkeypatch.setattr(devices, "memory_limit", lambda: limit)

    assert devices.host_memory() == (expected or whole)
