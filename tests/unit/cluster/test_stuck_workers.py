# SPDX-License-Identifier: Apache-2.0
"""Of workers that do not advance, those that are not in a collective are what the others wait for."""

from __future__ import annotations

from dataclasses import replace

from podium.cluster.hangs import Hang, stuck_workers
from podium.cluster.health import WhereReport
from podium.cluster.identity import WorkerId
from podium.cluster.messages import Beat, Whereabouts
from podium.cluster.spans import ThreadPlace

FIRST, SECOND, THIRD = (WorkerId("train", slot, "node-a", "cpu", 0) for slot in range(3))
IN_COLLECTIVE = ("/code/update.py:7 run", "/lib/torch/distributed/distributed_c10d.py:2800 all_reduce")
IN_LOOP = ("/code/update.py:7 run", "/code/loss.py:3 endless")


def at(*stack: str) -> Whereabouts:
    work = ThreadPlace(thread="work", span="policy.update", stack=stack)
    return Whereabouts(threads=(work, ThreadPlace(thread="MainThread", span="", stack=("/lib/ray/main.py:1 main",))))


def test_the_one_outside_of_the_collective_is_stuck() -> None:
    report = WhereReport(answers={FIRST: at(*IN_COLLECTIVE), SECOND: at(*IN_LOOP), THIRD: at(*IN_COLLECTIVE)})
    assert stuck_workers(report, [FIRST, SECOND, THIRD]) == (SECOND,)


def test_one_that_does_not_say_where_it_is_is_stuck() -> None:
    report = WhereReport(answers={FIRST: at(*IN_COLLECTIVE), SECOND: None})
    assert stuck_workers(report, [FIRST, SECOND]) == (SECOND,)


def test_where_all_are_in_a_collective_all_are_stuck() -> None:
    report = WhereReport(answers={FIRST: at(*IN_COLLECTIVE), SECOND: at(*IN_COLLECTIVE)})
    assert stuck_workers(report, [FIRST, SECOND]) == (FIRST, SECOND)


def test_a_worker_that_advances_is_not_stuck() -> None:
    report = WhereReport(answers={FIRST: at(*IN_COLLECTIVE), SECOND: at(*IN_LOOP)})
    assert stuck_workers(report, [FIRST]) == (FIRST,)


def test_a_hang_says_where_and_shows_every_thread_of_every_process() -> None:
    report = WhereReport(answers={FIRST: at(*IN_COLLECTIVE), SECOND: at(*IN_LOOP)})
    other = WhereReport(answers={WorkerId("graders", 0, "node-a", "cpu", 0): None})
    hang = Hang.of(Beat(doing="policy.update", for_s=700.0, stalled_s=600.2), (SECOND,), report)
    hang = replace(hang, where={**hang.where, "graders": other})
    assert hang.cause == "it hangs: no progress in policy.update for 600 s, at /code/loss.py:3 endless"
    text = str(hang)
    assert text.startswith(f"{SECOND}: it hangs")
    assert text.count("/lib/ray/main.py:1 main") == 2
    assert "graders[0]@node-a/cpu#0\n  does not answer" in text
    assert "test_a_hang_says_where_and_shows_every_thread_of_every_process" in text.partition("controller\n")[2]
