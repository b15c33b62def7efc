# SPDX-License-Identifier: Apache-2.0
"""What a program in a sandbox may use, and what became of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StoppedBy = Literal["wall_s", "cpu_s", "memory_mib", "processes", "output_kib"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """The most that one program may use; the keys of the recipe's section `sandbox`."""

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_mib: int = 512
    processes: int = 32
    output_kib: int = 1024
    tmp_mib: int = 64

    def resources(self) -> dict[str, int]:
        """Limits of each process inside, by the names of `resource` without RLIMIT_. Address space that is only
        reserved is no memory, so it has more room than data."""
        memory_bytes = self.memory_mib << 20
        return {
            "DATA": memory_bytes, "AS": 4 * memory_bytes + (1 << 30), "CPU": self.cpu_s, "CORE": 0, "NOFILE": 256,
            "FSIZE": self.tmp_mib << 20,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """What a program wrote, and how it ended. `stopped_by` is the limit that ended it, if one did.

    `exit_code` is 128 + N after signal N, as shells say; None: it was ended from outside."""

    stdout: bytes
    stderr: bytes
    exit_code: int | None
    stopped_by: StoppedBy | None
    wall_s: float

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit code 0. A program may always do that: it does not mean that it is
        right."""
        return self.stopped_by is None and self.exit_code == 0

    @property
    def text(self) -> str:
        """Its standard output as text."""
        return self.stdout.decode(errors="replace")

    @property
    def error_text(self) -> str:
        """Its standard error as text."""
        return self.stderr.decode(errors="replace")
