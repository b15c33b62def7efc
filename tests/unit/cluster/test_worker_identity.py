# SPDX-License-Identifier: Apache-2.0
"""The names of workers and of their places in a mesh, as they stand in logs and errors."""

import pickle

from podium.cluster.identity import WorkerId

WORKER = WorkerId("learn", 3, "node-a", "gpu1")


def test_a_worker_prints_its_pool_slot_node_device_and_incarnation():
    assert str(WORKER) == "learn[3]@node-a/gpu1#0"
    assert f"{WorkerId('gen', 0, '10.0.0.7~ab12cd', 'cpu', 4)}" == "gen[0]@10.0.0.7~ab12cd/cpu#4"


def test_a_reborn_worker_is_another_worker_even_on_the_same_device():
    reborn = WorkerId("learn", 3, "node-a", "gpu1", 1)
    assert reborn != WORKER
    assert len({WORKER, reborn, WorkerId("learn", 3, "node-a", "gpu1")}) == 2


def test_workers_sort_by_pool_then_slot_then_age():
    young, old = WorkerId("b", 1, "n", "cpu", 1), WorkerId("b", 1, "n", "cpu", 0)
    last, first = WorkerId("b", 10, "n", "cpu"), WorkerId("a", 11, "z", "cpu")
    assert sorted([last, young, old, first]) == [first, old, young, last]


def test_identities_travel_between_processes():
    assert pickle.loads(pickle.dumps(WORKER)) == WORKER
