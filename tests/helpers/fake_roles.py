# SPDX-License-Identifier: Apache-2.0
"""All roles of an on-policy run as a bandit of one number: no model, no worker, and every call is written down.

The policy is the log-odds of answering right. A role that is asked to work while it is away from its device fails, as
the real one would.
"""

# N episodes

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from helpers.made_batches import WORKER, make_answer, make_report, make_result
from podium.algorithms.statistics import Moments, ValueStatistics
from podium.cluster.objects import InlineStored, RowRefs
from podium.cluster.results import ShardResult
from podium.data.costs import SequenceCost
from podium.data.tasks import IndexedTask
from podium.data.trajectories import Ints, TokenColumn, TrajectoryBlock, TrajectoryId, ValueColumns
from podium.engine.checkpoint_files import SaveFailure, SaveState
from podium.roles.blocks import empty_block
from podium.roles.carriers import (
    DistanceNote,
    EpisodeNote,
    GraderFacts,
    Residency,
    SamplingPlan,
    ScoreNote,
    UpdatePlan,
)
from podium.roles.grading_handle import Rewarded
from podium.roles.interfaces import GeneratorUsage, LearnerFacts
from podium.roles.mini_batches import joined_distance
from podium.roles.stages import (
    Advantages,
    CriticReport,
    Rollouts,
    TeacherAdvantages,
    TokenAdvantages,
    TrainBatch,
    UpdateReport,
)
from podium.rollout.engine import Load
from podium.rollout.requests import Completion
from podium.weights.versions import WeightVersion
from podium.weights.weight_transfers import ByStore

WRONG, RIGHT = 10, 11


def sampled(id: TrajectoryId, chance: float) -> bool:
    """The same episode draws the same number, whatever it is drawn with."""
    return bool(np.random.default_rng([7, id.prompt_index, id.sample]).random() < chance)


@dataclass(kw_only=True)
class Bandit:
    """What the fakes share, and what a test may change about them."""

    log_odds: float = 0.0
    is_right: Callable[[TrajectoryId, float], bool] = sampled
    is_truncated: Callable[[TrajectoryId], bool] = lambda id: False
    spoils: Callable[[TrajectoryId], str | None] = lambda id: None  # why the episode is unavailable
    fails: Callable[[TrajectoryId], str | None] = lambda id: None  # why its reward is unavailable
    environment: Callable[[EpisodeNote], EpisodeNote] = lambda note: note
    reports: Callable[[int], dict[str, Any]] = lambda step: {}  # what an update has to say beside the usual
    distance: float = 0.0  # log-prob of the policy less that of the reference, at every sampled token
    journal: list[tuple[Any, ...]] = field(default_factory=list)
    updates: list[tuple[UpdatePlan, TrainBatch]] = field(default_factory=list)
    saves: dict[str, dict[int, Any]] = field(default_factory=dict)  # by role and step
    save_states: Callable[[int], SaveState] = lambda step: "writing"  # what a save of the policy returns
    critic_states: Callable[[int], SaveState] = lambda step: "written"
    later_state: SaveState = "written"  # of a save of the policy that was "writing"

    @property
    def chance(self) -> float:
        return 1 / (1 + math.exp(-self.log_odds))

    def calls(self, *names: str) -> list[tuple[Any, ...]]:
        """Entries of the journal that begin with one of these."""
        return [entry for entry in self.journal if entry[0] in names]


class _Placed:
    """A role that has a device, and may be told to leave it."""

    def __init__(self, bandit: Bandit, name: str) -> None:
        self._bandit, self._name = bandit, name
        self.held: Residency = "resident"

    async def hold(self, residency: Residency) -> tuple[()]:
        self._bandit.journal.append(("hold", self._name, residency))
        self.held = residency
        return ()

    def _works(self, what: str, *facts: Any) -> None:
        assert self.held != "offloaded", f"{self._name} is away from its device and is asked to {what}"
        self._bandit.journal.append((what, self._name, *facts))


class FakeGenerator(_Placed):
    """Answers with the odds that it was given last, two prompts to a block, the last prompts first."""

    num_engines, ranks, workers = 1, (0,), ("the only one",)

    def __init__(self, bandit: Bandit) -> None:
        super().__init__(bandit, "generator")
        self._chance, self._version = 0.5, -1

    async def share(self, number: int) -> str:
        self.held = "active"  # sharing wakes it
        self._works("share", number)
        self._chance, self._version = self._bandit.chance, number
        return "fingerprint"

    async def install(self, transfer: Any) -> int:
        self._works("install", transfer.version)
        self._chance, self._version = self._bandit.chance, transfer.version
        return 4

    async def install_in_flight(self, rank: int, transfer: ByStore, in_flight: str) -> int:
        self._works("install_in_flight", transfer.version.number, in_flight)
        self._chance, self._version = self._bandit.chance, transfer.version.number
        return 4

    async def usage(self) -> dict[str, GeneratorUsage]:
        load = Load(**dict.fromkeys(Load.__slots__, 0))
        return {self.workers[0]: GeneratorUsage(load=load, idle_s=0.0, install_s=0.0)}

    @asynccontextmanager
    async def streaming(self, plan: SamplingPlan) -> AsyncIterator[FakeStream]:
        yield FakeStream(self, plan)

    async def lanes(self) -> dict[int, int]:
        return {0: 1000}

    async def replace(self, stream: Any, lost: Any) -> None:
        raise lost.error

    def blocks(
        self, prompts: Sequence[IndexedTask], samples: tuple[int, ...], plan: SamplingPlan
    ) -> Iterator[ShardResult[TrajectoryBlock]]:
        self._works("generate", tuple(prompt.prompt_index for prompt in prompts), len(samples), plan)
        for first in reversed(range(0, len(prompts), 2)):
            answers = [
                self._answer(TrajectoryId(prompt.prompt_index, sample), plan)
                for prompt in prompts[first : first + 2]
                for sample in samples
            ]
            result = make_result(answers)
            yield replace(result, note=self._bandit.environment(result.note))

    def _answer(self, id: TrajectoryId, plan: SamplingPlan) -> Completion:
        """One token that counts, and up to two behind it."""
        error = self._bandit.spoils(id)
        if error is not None:
            return make_answer(id.prompt_index, id.sample, tokens=(), finish="error", error=error)
        right = self._chance > 0.5 if plan.temperature == 0 else self._bandit.is_right(id, self._chance)
        chance = self._chance if right else 1 - self._chance
        behind = [9] * (id.sample % 3)
        return make_answer(
            id.prompt_index, id.sample, tokens=[RIGHT if right else WRONG, *behind], version=self._version,
            logprobs=[math.log(max(chance, 1e-9)), *(0.0 for _ in behind)],
            finish="length" if self._bandit.is_truncated(id) else "stop",
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """Prompts that a stream is given at once."""

    prompts: Sequence[IndexedTask]
    samples: tuple[int, ...]  # of each
    attempt: int


class FakeStream:
    """All that a generator is given is answered at once."""

    ranks = (0,)

    def __init__(self, generator: FakeGenerator, plan: SamplingPlan) -> None:
        self._generator, self._plan = generator, plan
        self._arrivals: asyncio.Queue[ShardResult[TrajectoryBlock] | None] = asyncio.Queue()
        self._num_tokens = 0.0
        self._num_open = 0  # blocks that are to come

    @property
    def metrics(self) -> dict[str, float]:
        return {"generated_tokens": self._num_tokens}

    def admit(
        self,
        rank: int,
        prompts: Sequence[IndexedTask],
        samples: tuple[int, ...],
        attempt: int = 0,
        begun: object = None,
    ) -> None:
        self.answer_all(Admitted(prompts=prompts, samples=samples, attempt=attempt))

    def answer_all(self, admitted: Admitted) -> None:
        """Answers what it is given. Tests replace it."""
        for block in self.promised(admitted.prompts, admitted.samples):
            self._arrivals.put_nowait(block)

    def promised(self, prompts: Sequence[IndexedTask], samples: tuple[int, ...]) -> list[ShardResult[TrajectoryBlock]]:
        """The blocks of these prompts, which the stream waits for."""
        blocks = list(self._generator.blocks(prompts, samples, self._plan))
        self._num_open += len(blocks)
        self._num_tokens += float(sum(block.note.sampled_N.sum() for block in blocks))
        return blocks

    async def finish(self) -> None:
        self._arrivals.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[ShardResult[TrajectoryBlock]]:
        is_finished = False
        while not is_finished or self._num_open:
            block = await self._arrivals.get()
            if block is None:
                is_finished = True
                continue
            self._num_open -= 1
            yield block


def answer_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, each prompt of a stream takes a few turns of the event loop, more or fewer by its number, and is
    answered with the weights that are there then."""
    tasks: set[asyncio.Task[None]] = set()

    def answer_all(self: FakeStream, admitted: Admitted) -> None:
        self._num_open += len(admitted.prompts)
        self._generator._bandit.journal.append(
            ("admit", "generator", [prompt.prompt_index for prompt in admitted.prompts])
        )
        for prompt in admitted.prompts:
            task = asyncio.create_task(answer(self, prompt, admitted.samples))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def answer(stream: FakeStream, prompt: IndexedTask, samples: tuple[int, ...]) -> None:
        for _ in range(5 + 7 * prompt.prompt_index % 11):
            await asyncio.sleep(0)
        for block in stream.promised([prompt], samples):
            stream._num_open -= 1  # counted by `admit` already
            stream._arrivals.put_nowait(block)

    monkeypatch.setattr(FakeStream, "answer_all", answer_all)


class FakeLearner(_Placed):
    """Moves the log-odds along the policy gradient of what it is given."""

    facts = LearnerFacts(
        architecture="Bandit", num_parameters=1, dtype="float32", device="CPU", cost=SequenceCost(per_token=1.0),
        peak_flops=1e9, max_tokens=64, optimizer_bytes=0, device_bytes=0, cpu=None,
    )  # fmt: skip

    def __init__(self, bandit: Bandit) -> None:
        super().__init__(bandit, "policy")
        self.num_ranks = 1

    async def update(self, train_batch: TrainBatch, plan: UpdatePlan, *, seed: int) -> UpdateReport:
        self._works("update", plan.step)
        self._bandit.updates.append((plan, train_batch))
        is_right_N = _is_right(train_batch.rollouts.rows.read())
        gradient = float(np.mean(_advantages(train_batch) * (is_right_N - self._bandit.chance)))
        self._bandit.log_odds += plan.lr * gradient
        lengths_N = train_batch.rollouts.rows.lengths_N
        known = {"losses": (-gradient,), "grad_norms": (abs(gradient),), "num_tokens": int(lengths_N.sum())}
        return make_report(**(known | self._bandit.reports(plan.step)))

    async def describe(self, number: int) -> int:
        self._works("describe", number)
        return number

    async def send(self, transfer: Any) -> int:
        self._works("send", transfer.version, transfer.link)
        return 4

    async def store(self, number: int) -> ByStore:
        self._works("store", number)
        return ByStore(version=WeightVersion(number=number, manifest=(), fingerprints=()))

    async def save(self, step: int, values: Any) -> SaveState:
        self._works("save", step)
        state = self._bandit.save_states(step)
        if not isinstance(state, SaveFailure):
            self._bandit.saves.setdefault("policy", {})[step] = values
        return state

    async def save_state(self) -> SaveState:
        self._bandit.journal.append(("save_state", "policy"))
        return self._bandit.later_state

    async def finish_saving(self) -> SaveState:
        self._bandit.journal.append(("finish_saving", "policy"))
        return self._bandit.later_state

    async def grade(self, step: int, loss: float) -> None:
        self._bandit.journal.append(("note_grade", "policy", step, loss))


class FakeGrader:
    """1 for what is right, 0 for what is wrong."""

    def __init__(self, bandit: Bandit, rewards: tuple[int, ...]) -> None:
        self._bandit, self._rewards = bandit, rewards

    num_graders = 1

    async def facts(self) -> GraderFacts:
        return GraderFacts(inputs=("sample",), overlaps=True)

    async def grade_on(self, rank: int, rollouts: Rollouts) -> Rewarded:
        return await self.grade(rollouts)

    async def grade(self, rollouts: Rollouts, purpose: str = "train", *, show: int = 0) -> Rewarded:
        self._bandit.journal.append(("grade", "grader", purpose, len(rollouts)))
        errors = {row: error for row, id in enumerate(rollouts.rows.ids) if (error := self._bandit.fails(id))}
        value_N = _is_right(rollouts.rows.read())
        value_N[list(errors)] = np.nan
        columns = len(self._rewards) if purpose == "train" else 1
        right = np.where(np.nan_to_num(value_N), "right", "wrong").tolist()
        return Rewarded(
            rewards=self._rewards,
            values_NR=np.repeat(value_N[:, None], columns, axis=1),
            errors=errors,
            extras={"correct/certain": np.ones(len(rollouts))},
            texts=tuple((row, f"prompt {row}", said) for row, said in enumerate(right[:show])),
        )


class FakeRewardModel(_Placed):
    """Likes long episodes."""

    async def score(self, rollouts: Rollouts) -> ScoreNote:
        self._works("score", len(rollouts))
        return ScoreNote(values_N=rollouts.note.sampled_N.astype(np.float64))


class FakeScorer(_Placed):
    """A reference or a teacher that is as far from the policy as the test says."""

    def __init__(self, bandit: Bandit, name: str, policy: FakeLearner) -> None:
        super().__init__(bandit, name)
        self._policy = policy

    async def score(
        self, rows: RowRefs[TrajectoryBlock], temperature: float
    ) -> tuple[RowRefs[TokenColumn], DistanceNote]:
        self._works("score", len(rows))
        block, d = _read(rows), self._bandit.distance
        column = TokenColumn.like(block, block.behavior_logprobs_T - np.where(block.versions_T >= 0, d, 0.0))
        tokens_N = _sampled(block)
        k1_N, k2_N, k3_N = (np.asarray(each * tokens_N, np.float64) for each in (d, d * d / 2, math.expm1(-d) + d))
        note = DistanceNote(k1_N=k1_N, k2_N=k2_N, k3_N=k3_N, tokens_N=tokens_N)
        stored = InlineStored(column)
        result: ShardResult[TokenColumn] = ShardResult(
            worker=WORKER, rank=0, ids=block.ids, lengths_N=block.lengths_N,
            stored=stored, metrics=(), note=note,
        )  # fmt: skip
        return RowRefs.whole(stored, block.ids, block.lengths_N), joined_distance([result], rows)

    async def copy_from(self, role: str) -> None:
        assert self._policy.held != "offloaded", "the policy is away from its device and is to be copied"
        self._works("copy_from", role)

    async def save(self, step: int) -> SaveState:
        self._works("save", step)
        return "written"


class FakeCritic(_Placed):
    """Expects nothing: every advantage is the reward of the whole episode."""

    def __init__(self, bandit: Bandit) -> None:
        super().__init__(bandit, "critic")
        self.estimates: list[dict[str, Any]] = []

    async def estimate(
        self, rows: RowRefs[TrajectoryBlock], rewards_N: np.ndarray, turn_rewards: Any, reference: Any, algorithm: Any,
        kl_coefficient: float,
    ) -> tuple[RowRefs[ValueColumns], Moments]:  # fmt: skip
        self._works("estimate", len(rows))
        self.estimates.append({"rewards_N": rewards_N, "turns": turn_rewards, "kl": kl_coefficient})
        block = _read(rows)
        values_T = np.repeat(rewards_N, block.lengths_N).astype(np.float32)
        columns = ValueColumns(
            ids=block.ids, offsets=block.offsets, values_T=values_T * 0, advantages_T=values_T, returns_T=values_T
        )
        held = RowRefs.whole(InlineStored(columns), block.ids, block.lengths_N)
        return held, Moments(float(len(rewards_N)), float(rewards_N.sum()), float((rewards_N**2).sum()))

    async def update(
        self, rows: RowRefs[TrajectoryBlock], columns: RowRefs[ValueColumns], algorithm: Any, *, lr: float, step: int,
        seed: int, prefixes: Any = None,
    ) -> CriticReport:  # fmt: skip
        self._works("update", step, lr)
        assert columns.ids.same_as(rows.ids)
        return CriticReport(statistics=ValueStatistics.merge([]), losses=(0.5,), grad_norms=(1.0,))

    async def save(self, step: int, values: Any) -> SaveState:
        self._works("save", step)
        return self._bandit.critic_states(step)


def _read(rows: RowRefs[TrajectoryBlock]) -> TrajectoryBlock:
    return rows.read() if len(rows) else empty_block()


def _sampled(block: TrajectoryBlock) -> Ints:
    return np.add.reduceat(np.append(block.versions_T >= 0, False), block.offsets[:-1]).astype(np.int64)


def _is_right(block: TrajectoryBlock) -> np.ndarray:
    """1 where a row has the right token somewhere."""
    return np.array(
        [
            float(RIGHT in block.tokens_T[begin:end])
            for begin, end in zip(block.offsets, block.offsets[1:], strict=False)
        ]
    )


def _advantages(train_batch: TrainBatch) -> np.ndarray:
    """One for each episode, from whatever weighs them."""
    rows = train_batch.rollouts.rows
    advantages = train_batch.advantages
    if isinstance(advantages, Advantages) and advantages.values_N is not None:
        return advantages.values_N
    if isinstance(advantages, TokenAdvantages):
        columns = advantages.columns.select(rows.ids).read()
        shift, scale = advantages.whitening
        return (columns.advantages_T[columns.offsets[1:] - 1] - shift) * scale
    if isinstance(advantages, TeacherAdvantages):
        block, total_N = rows.read(), np.zeros(len(rows))
        for column, weight in zip(advantages.logprobs, advantages.weights, strict=True):
            apart_T = column.select(rows.ids).read().values_T - block.behavior_logprobs_T
            total_N += weight * np.add.reduceat(apart_T, block.offsets[:-1])
        return total_N
    return train_batch.graded.rewards_N
