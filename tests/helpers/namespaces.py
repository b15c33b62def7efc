# SPDX-License-Identifier: Apache-2.0
"""Nodes with addresses of their own on one machine: network namespaces that are connected by a cable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from helpers.processes import wait_until

_RAY = ("--object-store-memory=83886080", "--disable-usage-stats", "--block")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A network namespace. Processes in it reach the others at their addresses, and nothing else."""

    name: str
    address: str
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *command: str, environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Starts a command on this node."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command], env=environment, cwd=log.parent, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    def start_ray(
        self, head: Node, *, cpus: int, port: int, environment: Mapping[str, str], folder: Path
    ) -> subprocess.Popen[bytes]:
        """Starts a node of Ray: the head, or one that joins it."""
        ray = str(Path(sys.executable).parent / "ray")
        role = (f"--address={head.address}:{port}",)
        if head is self:
            role = ("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder / 'ray'}")
        return self.start(
            ray, "start", *role, f"--node-ip-address={self.address}", f"--num-cpus={cpus}", *_RAY,
            environment=environment, log=folder / f"{self.name}.log",
        )  # fmt: skip

    def processes(self) -> list[int]:
        """All processes of this node."""
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, timeout=20)
        return [int(pid) for pid in listed.stdout.split()]

    def die(self) -> None:
        """Ends all its processes at once, as a loss of power does."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.started:
            process.wait(20)
        self.started.clear()
        wait_until(lambda: not self.processes(), f"the end of the processes of {self.name}", deadline_s=20)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Two nodes with a cable between them. Skips the test where namespaces cannot be made."""
    own = os.getpid()
    nodes = tuple(Node(name=f"pd{own}n{number}", address=f"10.83.{own % 250}.{number}") for number in (1, 2))
    made = []
    try:
        try:
            for node in nodes:
                _ip("netns", "add", node.name)
                made.append(node)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        first, second = nodes
        _ip("link", "add", "pd0", "netns", first.name, "type", "veth", "peer", "name", "pd0", "netns", second.name)
        for node in nodes:
            _ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", "pd0")
            for device in ("lo", "pd0"):
                _ip("-n", node.name, "link", "set", device, "up")
        yield first, second
    finally:
        for node in made:
            node.die()
            _ip("netns", "del", node.name)
