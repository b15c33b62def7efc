# SPDX-License-Identifier: Apache-2.0
"""Data that travels between controller and roles: shards of work, and notes about finished rows.

Token arrays are never in here: a shard has references to them, and a note has numbers of each row. Torch-free."""

# N episodes · G prompts · B optimizer steps

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from podium.cluster.objects import RowRefs
from podium.data.prefixes import RowPrefixes
from podium.data.tasks import IndexedTask, Task
from podium.data.trajectories import Ints, TokenColumn, TrajectoryBlock, TrajectoryIds, ValueColumns
from podium.environments.signatures import Per
from podium.recipe import AlgorithmSection, CorrectionSection

Floats = NDArray[np.float64]
Residency = Literal["active", "resident", "offloaded"]
"""State of a role on a worker in a phase: working, idle in device memory, or idle with its memory offloaded."""

FINISHES = ("stop", "length", "cancelled", "error", "done", "turns", "tokens", "unanswered")
"""How an episode ended: at a stop token, at the token limit of one answer, cancelled, in an error of its environment,
or without an answer of the engine. Episodes of several turns: by the environment, at the turn limit, or at the token
limit."""
CANCELLED = FINISHES.index("cancelled")
UNANSWERED = FINISHES.index("unanswered")
TRUNCATED = tuple(FINISHES.index(each) for each in ("length", "cancelled", "turns", "tokens"))


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplingPlan:
    """How the episodes of one call are sampled. Stop tokens come from the worker's tokenizer."""

    max_new_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptShard:
    """Prompts for one worker, each to be answered once for every number in `samples`."""

    prompts: tuple[IndexedTask, ...]
    samples: tuple[int, ...]
    attempt: int = 0
    begun: RowRefs[TrajectoryBlock] | None = None  # episodes that another worker has begun, with their tokens so far

    @cached_property
    def ids(self) -> TrajectoryIds:
        """Ids of all episodes: every sample of every prompt."""
        prompt_indices = np.array([prompt.prompt_index for prompt in self.prompts], np.int64)
        array = np.zeros((len(prompt_indices) * len(self.samples), 4), np.int64)
        array[:, 0] = np.repeat(prompt_indices, len(self.samples))
        array[:, 1] = np.tile(np.array(self.samples, np.int64), len(prompt_indices))
        array[:, 3] = self.attempt
        return TrajectoryIds(array)


@dataclass(frozen=True, kw_only=True, eq=False)
class TurnRewards:
    """Rewards of single turns, or their advantages: row, last token and amount of each, in the order of time. Of an
    environment's, every turn has one."""

    row_K: Ints
    token_K: Ints  # counted from the row's first token
    reward_K: Floats
    parent_K: Ints | None = None
    """Of an agent's turns: the one that each continues, by its place among those of the row; -1: it begins anew. None:
    every turn of a row continues the one before."""

    @property
    def is_tree(self) -> bool:
        """Whether the turns may branch: no order of an episode's tokens is one of time."""
        return self.parent_K is not None

    @property
    def parents_K(self) -> Ints:
        """The parent of each turn by its place among those of the row, also where each continues the one before."""
        if self.parent_K is not None:
            return self.parent_K
        return self._places_K - 1

    @property
    def parent_turns_K(self) -> Ints:
        """The parent of each turn by its place among all turns, -1 for none. Turns are sorted by row."""
        return np.where(self.parents_K < 0, -1, np.arange(len(self.row_K)) - self._places_K + self.parents_K)

    @property
    def _places_K(self) -> Ints:
        """Of each turn among those of its row."""
        order = np.argsort(self.row_K, kind="stable")
        rows = self.row_K[order]
        places_K = np.empty(len(rows), np.int64)
        places_K[order] = np.arange(len(rows)) - np.searchsorted(rows, rows)
        return places_K

    @classmethod
    def none(cls) -> TurnRewards:
        """No rewards at all."""
        return cls(row_K=np.empty(0, np.int64), token_K=np.empty(0, np.int64), reward_K=np.empty(0))

    def take(self, rows: Ints) -> TurnRewards:
        """The rewards of these rows, with rows renumbered."""
        place = np.full(int(max(rows.max(initial=-1), self.row_K.max(initial=-1))) + 1, -1, np.int64)
        place[rows] = np.arange(len(rows))
        is_kept_K = place[self.row_K] >= 0
        return TurnRewards(
            row_K=place[self.row_K[is_kept_K]],
            token_K=self.token_K[is_kept_K],
            reward_K=self.reward_K[is_kept_K],
            parent_K=None if self.parent_K is None else self.parent_K[is_kept_K],
        )

    def by_row(self) -> TurnRewards:
        """The same rewards sorted by row. The order within a row stays."""
        order = np.argsort(self.row_K, kind="stable")
        return TurnRewards(
            row_K=self.row_K[order],
            token_K=self.token_K[order],
            reward_K=self.reward_K[order],
            parent_K=None if self.parent_K is None else self.parent_K[order],
        )

    @classmethod
    def concatenate(cls, parts: Sequence[tuple[TurnRewards, int]]) -> TurnRewards:
        """Joins the rewards of consecutive blocks, given with the number of rows of each."""
        firsts = np.cumsum([0, *(count for _, count in parts)])[:-1]
        return cls(
            row_K=np.concatenate([part.row_K + first for (part, _), first in zip(parts, firsts, strict=True)]),
            token_K=np.concatenate([part.token_K for part, _ in parts]),
            reward_K=np.concatenate([part.reward_K for part, _ in parts]),
            parent_K=np.concatenate([part.parents_K for part, _ in parts])
            if any(part.is_tree for part, _ in parts)
            else None,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class EpisodeNote:
    """What the controller learns about each row of a block of episodes, in the block's order."""

    finish_N: NDArray[np.int8]  # position in FINISHES
    sampled_N: Ints  # tokens that the policy sampled
    trained_N: Ints  # tokens that count in the loss
    turns_N: Ints
    version_N: Ints  # the oldest version that sampled one of its tokens; -1 if none was sampled
    newest_version_N: Ints  # the newest one
    environment_N: Floats  # sum of the environment's rewards; NaN without an environment
    turn_rewards: TurnRewards = field(default_factory=TurnRewards.none)
    errors: Mapping[int, str] = field(default_factory=dict)  # by row
    counts: Mapping[str, Floats] = field(default_factory=dict)  # of each row: tool calls and the like
    warnings: tuple[str, ...] = ()  # for the console, which shows equal ones once
    prefixes: RowPrefixes | None = None  # None: not known

    def take(self, rows: Ints) -> EpisodeNote:
        """The note of these rows, in this order."""
        place = {int(row): at for at, row in enumerate(rows)}
        return EpisodeNote(
            finish_N=self.finish_N[rows],
            sampled_N=self.sampled_N[rows],
            trained_N=self.trained_N[rows],
            turns_N=self.turns_N[rows],
            version_N=self.version_N[rows],
            newest_version_N=self.newest_version_N[rows],
            environment_N=self.environment_N[rows],
            turn_rewards=self.turn_rewards.take(rows),
            errors={place[row]: error for row, error in self.errors.items() if row in place},
            counts={name: counts_N[rows] for name, counts_N in self.counts.items()},
            warnings=self.warnings,
            prefixes=None if self.prefixes is None else self.prefixes.take(rows),
        )

    @classmethod
    def in_order(cls, parts: Sequence[EpisodeNote], order: Ints) -> EpisodeNote:
        """The rows of all parts in this order. The result does not depend on the order in which the parts arrived."""
        joined = cls.concatenate(parts).take(order)
        return replace(joined, turn_rewards=joined.turn_rewards.by_row(), errors=dict(sorted(joined.errors.items())))

    @classmethod
    def concatenate(cls, parts: Sequence[EpisodeNote]) -> EpisodeNote:
        """The notes of several shards as one."""
        firsts = np.cumsum([0, *(len(part.finish_N) for part in parts)]).tolist()
        return cls(
            finish_N=np.concatenate([part.finish_N for part in parts]),
            sampled_N=np.concatenate([part.sampled_N for part in parts]),
            trained_N=np.concatenate([part.trained_N for part in parts]),
            turns_N=np.concatenate([part.turns_N for part in parts]),
            version_N=np.concatenate([part.version_N for part in parts]),
            newest_version_N=np.concatenate([part.newest_version_N for part in parts]),
            environment_N=np.concatenate([part.environment_N for part in parts]),
            turn_rewards=TurnRewards.concatenate([(part.turn_rewards, len(part.finish_N)) for part in parts]),
            errors={
                row + first: error
                for part, first in zip(parts, firsts, strict=False)
                for row, error in part.errors.items()
            },
            counts={
                name: np.concatenate([part.counts.get(name, np.zeros(len(part.finish_N))) for part in parts])
                for name in sorted({name for part in parts for name in part.counts})
            },
            warnings=tuple(dict.fromkeys(warning for part in parts for warning in part.warnings)),
            prefixes=RowPrefixes.concatenate([part.prefixes for part in parts]),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class GradeShard:
    """Episodes for one grader: references to their tokens, and their tasks."""

    rows: RowRefs[TrajectoryBlock]
    tasks: Mapping[int, Task]  # by prompt index
    truncated_N: NDArray[np.bool_]
    environment_N: Floats
    show: int = 0  # number of rows whose texts are reported too

    @property
    def ids(self) -> TrajectoryIds:
        """Ids of the episodes to grade."""
        return self.rows.ids


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreNote:
    """What a model in the run says of episodes, in their order: a score, or NaN and maybe a reason."""

    values_N: Floats
    errors: Mapping[int, str] = field(default_factory=dict)  # by row: why it has no score
    extras: Mapping[str, Floats] = field(default_factory=dict)  # further numbers of each row; NaN: it has none

    def __len__(self) -> int:
        return len(self.values_N)

    def take(self, rows: Ints) -> ScoreNote:
        """The scores of these rows, in this order."""
        return ScoreNote(
            values_N=self.values_N[rows],
            errors=take_errors(self.errors, rows),
            extras={name: values_N[rows] for name, values_N in self.extras.items()},
        )

    @classmethod
    def join(cls, parts: Sequence[ScoreNote]) -> ScoreNote:
        """The scores of several batches, one after the other."""
        sizes = [len(part) for part in parts]
        return cls(
            values_N=np.concatenate([np.empty(0), *(part.values_N for part in parts)]),
            errors=join_errors([part.errors for part in parts], sizes),
            extras=join_extras([part.extras for part in parts], sizes),
        )


def first_rows(sizes: Sequence[int]) -> list[int]:
    """Where each of several batches with so many rows begins, one after the other."""
    return [0, *accumulate(sizes)][: len(sizes)]


def take_errors(errors: Mapping[int, str], rows: Ints) -> dict[int, str]:
    """The errors of these rows, by their new places."""
    return {at: errors[row] for at, row in enumerate(rows.tolist()) if row in errors}


def join_errors(parts: Sequence[Mapping[int, str]], sizes: Sequence[int]) -> dict[int, str]:
    """The errors of several batches with so many rows, one after the other."""
    firsts = first_rows(sizes)
    return {row + first: error for part, first in zip(parts, firsts, strict=True) for row, error in part.items()}


def join_extras(parts: Sequence[Mapping[str, Floats]], sizes: Sequence[int]) -> dict[str, Floats]:
    """Further numbers of several batches with so many rows; NaN where a batch has none of a name."""
    return {
        name: np.concatenate([part.get(name, np.full(size, np.nan)) for part, size in zip(parts, sizes, strict=True)])
        for name in sorted({name for part in parts for name in part})
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class GradeNote:
    """Rewards of each row, in the shard's order; NaN where a reward does not apply or failed."""

    values_NR: Floats  # by reward of the recipe
    errors: Mapping[int, str]  # by row: why it has no total
    extras: Mapping[str, Floats] = field(default_factory=dict)  # further numbers of each row; NaN: it has none
    texts: tuple[tuple[str, str], ...] = ()  # (prompt, answer) of the first rows
    warnings: tuple[str, ...] = ()  # for the console, which shows equal ones once


@dataclass(frozen=True, slots=True, kw_only=True)
class GraderFacts:
    """What the controller must know to cut episodes into batches for graders."""

    inputs: tuple[Per, ...]  # of one call of each reward function for training
    overlaps: bool  # whether a function is asynchronous, so that a grader works on many episodes at a time

    @property
    def takes_single_episodes(self) -> bool:
        """Whether episodes may be graded one by one, because no function compares episodes. Otherwise all episodes of
        a group (and of the step, if a function takes a "batch") belong into one batch."""
        return all(each == "sample" for each in self.inputs)


@dataclass(frozen=True, kw_only=True, eq=False)
class DistanceNote:
    """Distance of the sampling policy from the scoring model: sums over each row's sampled tokens."""

    k1_N: Floats
    k2_N: Floats
    k3_N: Floats
    tokens_N: Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class ValueShard:
    """Episodes whose values and advantages the critic estimates."""

    rows: RowRefs[TrajectoryBlock]
    rewards_N: Floats  # on the last trained token
    turn_rewards: TurnRewards
    reference: RowRefs[TokenColumn] | None  # where KL is in the reward

    @property
    def ids(self) -> TrajectoryIds:
        """Ids of the episodes to estimate values of."""
        return self.rows.ids


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateShard:
    """One data rank's share of an update: its rows, their weights, and the micro-step that computes each."""

    rows: RowRefs[TrajectoryBlock]
    batches: tuple[tuple[Ints, ...], ...]  # [optimizer step][micro-step] -> positions among the rows
    advantages_N: Floats | None = None  # one for a whole episode
    advantages: RowRefs[ValueColumns] | None = None  # one for each token
    teachers: tuple[tuple[RowRefs[TokenColumn], float], ...] = ()  # log-probs of each, and its weight
    rewards_N: Floats | None = None  # where the learner computes returns from them
    turn_rewards: TurnRewards = field(default_factory=TurnRewards.none)
    turn_advantages: TurnRewards | None = None  # one for each turn
    reference: RowRefs[TokenColumn] | None = None
    absent: tuple[tuple[int, int], ...] = ()  # per optimizer step: tokens and episodes that count, uncomputed

    @property
    def ids(self) -> TrajectoryIds:
        """Ids of the episodes to train on."""
        return self.rows.ids


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """Settings of an update, the same for all ranks."""

    step: int
    lr: float
    algorithm: AlgorithmSection
    temperature: float
    versions: tuple[int, ...]  # of the weights that may have sampled the batch, ascending; the last begins the update
    max_new_tokens: int
    kl_coefficient: float = 0.0
    whitening: tuple[float, float] | None = None  # shift and scale of advantages that are given for each token
    whiten: bool = False  # shift and scale are computed over the whole step
    loss: Literal["policy", "imitation"] = "policy"
    is_truncated: bool = False  # top-k, top-p or min-p left tokens out when the batch was sampled
    keeps_cache: bool = False  # sequences that got new weights went on with the keys and values of older ones

    @property
    def version(self) -> int:
        """Of the weights before the update."""
        return self.versions[-1]

    @property
    def correction(self) -> CorrectionSection | None:
        """The correction of the loss. Imitated tokens count like data, however they were sampled."""
        return self.algorithm.correction if self.loss == "policy" else None
