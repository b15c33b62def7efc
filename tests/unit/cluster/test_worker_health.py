# SPDX-License-Identifier: Apache-2.0
"""What a pool needs after a death, what is known of a worker without asking, and the report of where everyone is."""

import sysconfig
from dataclasses import replace

import pytest

from podium.cluster.health import Died, Leave, Rebuild, Respawn, WhereReport, remedy, worker_health
from podium.cluster.identity import WorkerId
from podium.cluster.messages import Beat, Whereabouts
from podium.cluster.spans import ThreadPlace


def worker(slot):
    return WorkerId("gen", slot, "node-a", "cpu")


def beat(doing, for_s):
    return Beat(doing=doing, for_s=for_s)


def at(slot, span, *stack):
    work = ThreadPlace(thread="work", span=span, stack=stack)
    other = ThreadPlace(thread="pulse", span="", stack=("host.py:1 beats",))
    return Whereabouts(threads=(work, other))


@pytest.mark.parametrize("collectives", [True, False])
@pytest.mark.parametrize("num_slots", [1, 4])
def test_a_healthy_pool_is_left_alone(collectives, num_slots):
    assert remedy(collectives=collectives, num_slots=num_slots, dead=(), broken=False) == Leave()


@pytest.mark.parametrize("broken", [True, False])
def test_a_death_among_workers_that_meet_in_collectives_ends_them_all(broken):
    assert remedy(collectives=True, num_slots=4, dead=(2,), broken=broken) == Rebuild()


def test_a_pool_out_of_step_is_rebuilt_though_nobody_is_dead():
    assert remedy(collectives=True, num_slots=4, dead=(), broken=True) == Rebuild()


def test_without_collectives_only_the_dead_are_replaced():
    assert remedy(collectives=False, num_slots=4, dead=(3, 1), broken=False) == Respawn(slots=(1, 3))


def test_a_pool_of_one_is_replaced_in_place_though_it_has_collectives():
    assert remedy(collectives=True, num_slots=1, dead=(0,), broken=False) == Respawn(slots=(0,))


def test_a_busy_worker_has_been_at_it_since_before_its_last_beat():
    health = worker_health(worker(1), beat("gen.generate", 2.0), heard_s=100.0, died=None, now_s=100.4)
    assert health.silent_s == pytest.approx(0.4)
    assert health.for_s == pytest.approx(2.4)
    assert str(health) == "gen[1]@node-a/cpu#0: in gen.generate for 2.4 s, last heard 0.4 s ago"


def test_an_idle_worker_is_called_idle():
    health = worker_health(worker(1), beat("", 0.0), heard_s=100.0, died=None, now_s=101.0)
    assert health.for_s == 0.0
    assert str(health) == "gen[1]@node-a/cpu#0: idle, last heard 1.0 s ago"


def test_a_worker_that_has_not_beaten_yet_was_heard_when_it_was_started():
    health = worker_health(worker(1), None, heard_s=100.0, died=None, now_s=107.0)
    assert (health.silent_s, health.doing, health.for_s) == (7.0, "", 0.0)


def test_a_clock_that_seems_to_go_back_makes_no_negative_silence():
    health = worker_health(worker(1), beat("x", 1.0), heard_s=100.0, died=None, now_s=99.0)
    assert (health.silent_s, health.for_s) == (0.0, 1.0)


def test_a_dead_worker_says_what_it_died_of():
    died = Died(worker=worker(1), cause="process 7 is gone", at_s=0.0)
    health = worker_health(worker(1), beat("x", 1.0), heard_s=100.0, died=died, now_s=101.0)
    assert str(health) == str(died) == "gen[1]@node-a/cpu#0 died: process 7 is gone"


REPORT = WhereReport(
    answers={
        worker(0): at(0, "gen.sum > summing", "roles.py:10 sum", "roles.py:12 all_reduce"),
        worker(1): at(1, "gen.sum > staying away", "roles.py:20 nap"),
        worker(2): at(2, "gen.sum > summing", "roles.py:10 sum", "roles.py:12 all_reduce"),
        worker(3): None,
    }
)


def test_workers_in_the_same_place_stand_together_and_the_most_come_first():
    assert REPORT.groups() == [
        ("in gen.sum > summing, at roles.py:12 all_reduce", [worker(0), worker(2)]),
        ("does not answer (dead, or in a call that holds Python's lock)", [worker(3)]),
        ("in gen.sum > staying away, at roles.py:20 nap", [worker(1)]),
    ]


def test_the_report_shows_each_place_once_with_its_stack_and_points_at_the_odd_ones():
    assert str(REPORT) == (
        "gen[0]@node-a/cpu#0, gen[2]@node-a/cpu#0: in gen.sum > summing, at roles.py:12 all_reduce\n"
        "    roles.py:10 sum\n"
        "    roles.py:12 all_reduce\n"
        "gen[3]@node-a/cpu#0: does not answer (dead, or in a call that holds Python's lock)  <- differs from most\n"
        "gen[1]@node-a/cpu#0: in gen.sum > staying away, at roles.py:20 nap  <- differs from most\n"
        "    roles.py:20 nap"
    )


def test_an_idle_worker_shows_no_stack_and_only_the_innermost_frames_of_a_busy_one_are_shown():
    deep = [f"roles.py:{line} f" for line in range(9)]
    report = WhereReport(answers={worker(0): at(0, "", "threading.py:1 wait")})
    assert str(report) == "gen[0]@node-a/cpu#0: idle"
    shown = str(WhereReport(answers={worker(0): at(0, "gen.f", *deep)})).splitlines()
    assert shown[1:] == [f"    {frame}" for frame in deep[3:]]


def test_the_place_of_work_is_not_in_pythons_library_but_where_it_waits_for_data_where_that_is_made():
    library = sysconfig.get_paths()["stdlib"]
    waits = ("/p/run.py:2 step", "/x/podium/data/loader.py:112 __next__", f"{library}/queue.py:180 get")
    produces = ("/x/podium/data/loader.py:141 _produce", "/home/maps.py:3 clean", f"{library}/threading.py:355 wait")
    hands_on = ("/x/podium/data/loader.py:141 _produce", "/x/podium/data/workers.py:115 result")
    tokenizer = f"""Thread 0x01 (most recent call first):
  File "{library}/threading.py", line 355 in wait
  File "/home/maps.py", line 4 in split
  File "/x/podium/data/workers.py", line 160 in _work
"""
    idle = """Thread 0x01 (most recent call first):
  File "/x/podium/data/workers.py", line 157 in _work
"""
    answer = at(0, "rank.run", *waits)

    def place(*producer: str, **helpers: str) -> str:
        threads = (*answer.threads, ThreadPlace(thread="producer", span="", stack=producer))
        found = replace(answer, threads=threads, helpers=tuple(helpers.items()))
        return WhereReport(answers={worker(0): found}).innermost(worker(0))

    assert place() == "/x/podium/data/loader.py:112 __next__"
    assert place(*produces) == "/home/maps.py:3 clean"
    assert place(*hands_on) == "/x/podium/data/workers.py:115 result"
    assert place(*hands_on, first=idle, second=tokenizer) == 'File "/home/maps.py", line 4 in split'
    shown = WhereReport(answers={worker(0): replace(answer, helpers=(("tokenizer 1", tokenizer),))}).stacks()
    assert f"tokenizer 1 of {worker(0)}\nThread 0x01" in shown
    assert "in split" in shown


def test_a_worker_without_a_work_thread_yet_is_idle():
    report = WhereReport(answers={worker(0): Whereabouts(threads=())})
    assert str(report) == "gen[0]@node-a/cpu#0: idle"
