# SPDX-License-Identifier: Apache-2.0
"""What engines on one rank and on several are asked to compare their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from podium.data.trajectories import TrajectoryId
from podium.recipe import RolloutSection
from podium.rollout.engine import RolloutEngine
from podium.rollout.requests import Completion
from rollout.judge import DEADLINE_S, answers, ask, collected

Answers = dict[TrajectoryId, Completion]
SHARED = tuple(range(3, 43))


@dataclass(frozen=True, kw_only=True)
class Script:
    """Requests, and the sizes of the engine that they are for."""

    run: Callable[[RolloutEngine], Answers]
    max_running: int = 4
    cache_kib: int = 4096  # of all ranks together
    sizes: Mapping[str, int] = field(default_factory=dict)


def section_of(script: Script, ranks: int, *, entry: int = 1) -> RolloutSection:
    """The same number of tokens fits the cache for any number of ranks. `entry`: how many times that of a tiny Llama a
    token takes in the cache."""
    return RolloutSection(
        max_length=128, max_running=script.max_running, memory_gib=entry * script.cache_kib / 2**20 / ranks,
        **script.sizes,  # type: ignore[arg-type]
    )  # fmt: skip


def require_same(found: Answers, wanted: Answers) -> None:
    """Tokens are equal, and log-probs but for rounding."""
    assert found.keys() == wanted.keys()
    for id, completion in wanted.items():
        other = found[id]
        assert other.tokens_L.tolist() == completion.tokens_L.tolist()
        assert (other.finish, other.stop, other.error) == (completion.finish, completion.stop, completion.error)
        assert other.versions_L.tolist() == completion.versions_L.tolist()
        assert other.reused_tokens == completion.reused_tokens
        np.testing.assert_allclose(other.logprobs_L, completion.logprobs_L, atol=1e-5)


def _batches(engine: RolloutEngine) -> Answers:
    """More than run at a time, of unequal lengths, greedy, sampled, truncated and penalized."""
    how = [{"temperature": 0.0}, {}, {"top_p": 0.8, "top_k": 20}, {"repetition_penalty": 1.2, "temperature": 0.7}]
    requests = [ask(n, range(1 + n, 4 + 4 * n), new=5 + 3 * n, **how[n % 4]) for n in range(9)]
    return answers(engine, requests)


def _prefixes(engine: RolloutEngine) -> Answers:
    """Groups of one prompt, and a later prompt that begins like it."""
    found = answers(engine, [ask(0, SHARED, new=6, sample=sample) for sample in range(6)])
    found |= answers(engine, [ask(1, (*SHARED, 7, 8), new=6, temperature=0.0)])
    assert engine.load().reused_tokens > 5 * 30
    return found


def _preemption(engine: RolloutEngine) -> Answers:
    found = answers(engine, [ask(n, range(n, n + 20), new=60, temperature=0.0) for n in range(5)])
    assert engine.load().preemptions > 0
    return found


def _stops(engine: RolloutEngine) -> Answers:
    """Stop tokens and strings, of which some are sampled for sure; and one that is cancelled after so many tokens."""
    strings = tuple("0123456789")
    engine.submit(
        [
            ask(0, new=100, stop_tokens=frozenset(range(100))),
            ask(1, new=100, stop_strings=strings),
            ask(2, new=100, stop_strings=("never",), temperature=0.0),
        ]
    )
    found = collected(engine.results(deadline_s=DEADLINE_S))
    assert [found[ask(n).id].finish for n in range(3)] == ["stop", "stop", "length"]
    return found


SCRIPTS = (
    Script(run=_batches),  # slots, which are moved
    Script(run=_batches, sizes={"block_size": 16, "prefill_tokens": 12}),  # prompts in chunks
    Script(run=_prefixes),
    Script(run=_prefixes, max_running=8, sizes={"block_size": 16}),
    Script(run=_preemption, max_running=8, cache_kib=60, sizes={"block_size": 16}),
    Script(run=_stops),
)
