# SPDX-License-Identifier: Apache-2.0
"""One local Ray for all tests of the cluster layer, and the proof that none of them leaves a process behind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager

import pytest

from helpers.processes import descendants, ray_workers, wait_until
from podium.cluster import Cluster, RayCluster, open_inline, open_ray

Opener = Callable[[], AbstractAsyncContextManager[Cluster]]


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """Eight CPUs that are not there: the tests' workers sleep most of the time. Ray starts a process for each."""
    import ray

    from podium.cluster.ray_transport import RayTransport

    settings = RayCluster(cpus=8, object_store_bytes=200 * 2**20, show_output=False, preload=("podium.roles.learner",))
    transport = asyncio.run(RayTransport.open(settings))
    assert ray.is_initialized()
    yield
    asyncio.run(transport.close())
    wait_until(lambda: not _ray_processes(), f"the end of Ray's processes ({_ray_processes()})", deadline_s=30)


@pytest.fixture(params=["inline", "ray"])
def open_cluster(request: pytest.FixtureRequest) -> Opener:
    """Both clusters, for what must hold in both."""
    if request.param == "ray":
        request.getfixturevalue("local_ray")
        return open_ray
    return open_inline


@pytest.fixture
def open_on_ray(local_ray: None) -> Opener:
    """Ray only, for what threads cannot do."""
    return open_ray


@pytest.fixture(autouse=True)
def _no_orphans() -> Iterator[None]:
    """No worker process outlives its test."""
    yield
    wait_until(lambda: not ray_workers(), f"the end of the worker processes {ray_workers()}", deadline_s=20)


def _ray_processes() -> dict[int, str]:
    names = ("ray::", "raylet", "gcs_server")
    found = descendants(os.getpid())
    return {process: name for process, name in found.items() if name.startswith(names) or "/raylet" in name}
