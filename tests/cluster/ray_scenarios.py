# SPDX-License-Identifier: Apache-2.0
"""A run on a Ray of its own, for tests that kill or stop its processes: `ray_scenarios.py MOMENT FOLDER
HEARTBEAT_TIMEOUT_S [MODULE ...]`.

It stays at MOMENT until FOLDER/go exists. At "starting", "pools" (three of them) and "tokenizers" it does not stay.
Workers are forked with the modules imported, where any are given. What it prints last is how it ended, as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

from helpers.clusters import one_role
from helpers.roles import Counter
from podium.cluster import Layout, MeshShape, Pool, RayCluster, Resources, RoleSpec, WorkerContext, open_ray
from podium.cluster.blocking import is_any_left
from podium.cluster.member import Timeouts
from podium.errors import PodiumError

LIMIT_S = 120.0


class Librarian(Counter):
    """Its value says what its process has imported: 2 for transformers and 1 for torch."""

    def value(self) -> int:
        return 2 * ("transformers" in sys.modules) + ("torch" in sys.modules)


class WaitsToBeBuilt(Counter):
    """Its constructor says that it runs, and waits for a file."""

    def __init__(self, context: WorkerContext, folder: str) -> None:
        super().__init__(context)
        (Path(folder) / f"building-{context.rank}").touch()
        while not (Path(folder) / "go").exists():
            time.sleep(0.01)


def three_pools() -> Layout:
    """Two workers that meet, and helpers in pools of their own, as an on-policy run has them."""
    helper = Resources(cpus=0.1)
    return Layout(
        pools=(
            Pool(name="train", slots=2, each=Resources(cpus=0.9)),
            Pool(name="runners", slots=1, each=helper, collectives=False),
            Pool(name="graders", slots=1, each=helper, collectives=False),
        ),
        roles=(
            RoleSpec(name="counter", kind=Counter, pool="train", mesh=MeshShape(shard=2)),
            RoleSpec(name="runner", kind=Counter, pool="runners", mesh=MeshShape(replica=1)),
            RoleSpec(name="grader", kind=Counter, pool="graders", mesh=MeshShape(replica=1)),
        ),
    )


async def run(moment: str, folder: Path, heartbeat_timeout_s: float, preload: tuple[str, ...]) -> str:
    settings = RayCluster(
        cpus=2,
        object_store_bytes=80 * 2**20,
        show_output=False,
        heartbeat_timeout_s=heartbeat_timeout_s,
        preload=preload,
    )
    match moment:
        case "building":
            layout = one_role(WaitsToBeBuilt, (str(folder),))
        case "pools":
            layout = three_pools()
        case "tokenizers":
            layout = Layout(
                pools=(Pool(name="read", slots=1, collectives=False, tokenizers_only=True),),
                roles=(RoleSpec(name="counter", kind=Librarian, pool="read"),),
            )
        case _:
            layout = one_role(Counter)
    timeouts = Timeouts(heartbeat_timeout_s=heartbeat_timeout_s)
    async with open_ray(settings, tell=lambda what: print(what, flush=True)) as cluster:
        workers = await cluster.start(layout, timeouts, deadline_s=90)
        group = workers.role("counter", Counter)
        if moment == "calling":
            (folder / "calling").touch()
            await group.call_all(Counter.wait_for, str(folder / "go"))
        return " ".join(str(answer.value) for answer in await group.call_all(Counter.value))


def main() -> None:
    moment, folder, heartbeat_timeout_s, *preload = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:]
    try:
        ended = asyncio.run(asyncio.wait_for(run(moment, folder, heartbeat_timeout_s, tuple(preload)), LIMIT_S))
    except PodiumError as error:
        ended = f"{type(error).__name__}: {error}"
    print(json.dumps({"ended": ended}), flush=True)
    if is_any_left():
        os._exit(0)  # as the command line does


if __name__ == "__main__":
    main()
