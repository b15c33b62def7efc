# SPDX-License-Identifier: Apache-2.0
"""Objects that find no room, neither in Ray's store nor on the disk that Ray moves them to: the error says what is full
and what to do, wherever it happens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.disks import mounted
from helpers.processes import started

pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(180)]

TESTS = Path(__file__).parents[1]
# Fills a store of 80 MiB whose disk has 20 MiB: by rows that a worker makes, then by a value of the controller. `spill`
# is set where Ray's settings are: a recipe has no key for it.
FILL = """
import asyncio, json, sys
import numpy as np
sys.path.insert(0, sys.argv[2])
from helpers.clusters import one_role
from helpers.roles import Request, ids, make_block
from podium.cluster import Computed, RayCluster, open_ray, ray_compat, stored_rows
from podium.cluster.member import Timeouts
from podium.data.trajectories import TrajectoryBlock, TrajectoryId, TrajectoryIds
from podium.errors import StoreError

params = {"type": "filesystem", "params": {"directory_path": [sys.argv[1]]}}
ray_compat._SYSTEM_CONFIG["object_spilling_config"] = json.dumps(params)
TOKENS = 2 * 2**20

class Heavy:
    def __init__(self, context):
        pass

    def generate(self, request):
        for each in request.ids:
            block = TrajectoryBlock(
                ids=TrajectoryIds.of([each]), offsets=np.array([0, TOKENS]), tokens_T=np.zeros(TOKENS, np.int32),
                loss_mask_T=np.ones(TOKENS, np.bool_), behavior_logprobs_T=np.zeros(TOKENS, np.float32),
                versions_T=np.zeros(TOKENS, np.int32),
            )
            yield Computed(rows=block)

async def main():
    found, kept = {}, []
    settings = RayCluster(cpus=2, object_store_bytes=80 * 2**20, show_output=False)
    async with open_ray(settings) as cluster:
        workers = await cluster.start(one_role(Heavy, slots=1), Timeouts(), deadline_s=100)
        group = workers.role("counter", Heavy)
        try:
            async for block in group.stream_one(0, Heavy.generate, Request(ids=ids(range(20)))):
                kept.append(block)
        except StoreError as error:
            found["worker"] = [len(kept), str(error)]
        try:
            for _ in range(20):
                kept.append(cluster.store(np.zeros(20 * 2**20, np.uint8)))
        except StoreError as error:
            found["controller"] = [len(kept), str(error)]
    print(json.dumps(found))

asyncio.run(main())
"""


def test_a_full_store_is_named_with_what_to_do(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with mounted(tmp_path / "spilled", size="20m") as disk, started(["-c", FILL, str(disk), str(TESTS)], output) as run:
        assert run.wait(150) == 0, output.read_text()
    found = json.loads(output.read_text().splitlines()[-1])
    assert set(found) == {"worker", "controller"}, found
    for num_kept, text in found.values():
        assert num_kept > 0
        assert "object store is full" in text
        assert "RAY_TMPDIR" in text
        assert "rollout.prompts_per_step" in text
    assert "Traceback" not in output.read_text()
