# SPDX-License-Identifier: Apache-2.0
"""The scheduler: every request ends once, none starves, and every plan can be carried out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_steps import Simulation, Work, inconsistencies

from podium.data.trajectories import TrajectoryId

CONTEXT = 24


@st.composite
def some_work(draw: st.DrawFn) -> list[Work]:
    """Groups of samples, prompts over few tokens so that many begin alike."""
    work = []
    for group in range(draw(st.integers(1, 5))):
        prompt = draw(st.lists(st.integers(0, 1), min_size=1, max_size=12))
        new = draw(st.integers(1, 12))
        work += [
            Work(draw=group, sample=sample, prompt=tuple(prompt), new=new) for sample in range(draw(st.integers(1, 4)))
        ]
    return work


@st.composite
def tight_memory(draw: st.DrawFn) -> Simulation:
    """Just enough pages for the longest request, or a few more; slots, or pages and steps in flight."""
    work, slots = draw(some_work()), draw(st.sampled_from([False, False, False, True]))
    block_size = CONTEXT if slots else draw(st.sampled_from([1, 2, 3, 5, 24]))
    needed = max(-(-min(len(each.prompt) + each.new, CONTEXT) // block_size) for each in work)
    num_blocks = needed + draw(st.integers(0, 4))
    return Simulation(
        work=work,
        block_size=block_size,
        num_blocks=num_blocks,
        num_rows=draw(st.integers(1, num_blocks)) if slots else draw(st.integers(2, 6)),
        prefill_tokens=draw(st.sampled_from([1, 2, 3, 5, 7, 100])),
        lag=0 if slots else draw(st.integers(0, 1)),
        max_length=CONTEXT,
        slots=slots,
    )


def finish(simulation: Simulation, *, updates: int = 0) -> None:
    """The oldest sequence always advances, so the work of all, one after the other, bounds the steps; an update may
    cost all of it again."""
    most = (1 + updates) * sum(each.steps(simulation.prefill_tokens) for each in simulation.work)
    while not simulation.is_over:
        simulation.step()
        assert simulation.steps <= most, f"not over after {most} steps"
    simulation.take_in(lag=0)
    block_manager = simulation.block_manager
    assert (simulation.scheduler.num_running, len(simulation.scheduler.waiting), block_manager.num_held) == (0, 0, 0)
    block_manager.forget()
    assert block_manager.num_available == block_manager.num_blocks
    assert list(inconsistencies(block_manager)) == []


@pytest.mark.slow
@settings(max_examples=100)
@given(tight_memory())
def test_every_request_ends_once_with_the_tokens_that_it_gets_alone(simulation: Simulation) -> None:
    finish(simulation)
    assert simulation.ended == {each.request.id: each.sequence for each in simulation.work}


@pytest.mark.slow
@settings(max_examples=100)
@given(tight_memory(), st.data())
def test_cancels_and_updates_at_any_time_lose_nothing(simulation: Simulation, data: st.DataObject) -> None:
    cancelled, updates = set(), 0
    for _ in range(data.draw(st.integers(1, 6))):
        for _ in range(data.draw(st.integers(0, 8))):
            if not simulation.is_over:
                simulation.step()
        if data.draw(st.booleans()):
            simulation.update()
            updates += 1
        else:
            chosen = data.draw(st.sets(st.sampled_from([each.request.id for each in simulation.work])))
            cancelled |= chosen - simulation.ended.keys()
            simulation.cancel(chosen)
    finish(simulation, updates=updates)
    for each in simulation.work:
        sampled = simulation.ended[each.request.id]
        whole = each.request.id not in cancelled
        assert sampled == (each.sequence if whole else each.sequence[: len(sampled)])


def group(samples: int, prompt: int, *, new: int = 4) -> list[Work]:
    tokens = tuple(i % 3 for i in range(prompt))
    return [Work(draw=0, sample=sample, prompt=tokens, new=new) for sample in range(samples)]


def roomy(work: list[Work], **changes: int) -> Simulation:
    sizes = {"block_size": 4, "num_blocks": 400, "num_rows": 32, "prefill_tokens": 16, "lag": 0, "max_length": 200}
    return Simulation(work=work, **{**sizes, **changes})


@given(
    samples=st.integers(1, 12),
    prompt=st.integers(1, 90),
    rows=st.integers(1, 12),
    budget=st.integers(2, 64),
    block=st.sampled_from([1, 4, 16, 200]),
    lag=st.integers(0, 1),
)
def test_a_group_computes_its_prompt_once(
    samples: int, prompt: int, rows: int, budget: int, block: int, lag: int
) -> None:
    """What is fed as a prompt is one prompt and no more; each further sample feeds its last token as it draws."""
    simulation = roomy(group(samples, prompt), num_rows=rows, prefill_tokens=budget, block_size=block, lag=lag)
    finish(simulation)
    assert simulation.prefilled <= prompt + samples - 1


def test_prompts_that_share_a_long_beginning_compute_it_once() -> None:
    """A system prompt of 40 tokens and questions of 8: those that come later wait one step for it."""
    system = tuple(i % 3 for i in range(40))
    work = [Work(draw=i, sample=0, prompt=(*system, *([i % 4] * 8)), new=2) for i in range(4)]
    simulation = roomy(work, prefill_tokens=200)
    finish(simulation)
    assert simulation.prefilled <= 40 + 4 * 8 + 3


def test_a_long_prompt_is_fed_in_chunks_beside_the_answers() -> None:
    """A short request goes on drawing while 64 tokens of another come in, 16 a step."""
    short = Work(draw=1, sample=0, prompt=(0, 1), new=9)
    long = Work(draw=0, sample=0, prompt=tuple(i % 2 for i in range(64)), new=1)
    simulation = roomy([short, long])
    known = []
    for _ in range(4):
        simulation.step()
        known.append(int(simulation.rows.known_R[simulation.rows.active[0]]))
    assert known == [3, 4, 5, 6]
    assert simulation.prefilled == 2 + 14 + 16 + 16 + 16


@pytest.mark.parametrize("lag", [0, 1])
def test_memory_that_runs_out_puts_the_youngest_back(lag: int) -> None:
    """Three answers in four pages of four tokens each: none can grow past its first page until the last to come has
    given its own up; the first to come never waits."""
    work = [Work(draw=i, sample=0, prompt=(i, i, i), new=5) for i in (0, 3, 5)]
    assert [len(each.sequence) for each in work] == [5, 5, 5]
    simulation = roomy(work, num_blocks=4, max_length=16, lag=lag)
    simulation.step()
    assert simulation.scheduler.num_running == 3
    while TrajectoryId(0, 0) not in simulation.ended:
        simulation.step()
    assert simulation.steps == 5 + lag
    assert simulation.scheduler.preemptions == 1
    finish(simulation)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_place_is_taken_by_the_next_as_soon_as_it_is_free(lag: int) -> None:
    """One row, three requests of one token each: a step each, and with steps in flight one more each to know it."""
    work = [Work(draw=i, sample=0, prompt=(i % 3, 1), new=1) for i in range(3)]
    simulation = roomy(work, num_rows=1, lag=lag)
    finish(simulation)
    assert simulation.steps == 3 * (1 + lag)
