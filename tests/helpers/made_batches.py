# SPDX-License-Identifier: Apache-2.0
"""Recipes, answers and graded batches for tests of the controller, built by hand and without a model."""

# N episodes

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from podium.algorithms.behavior_check import BehaviorCheck
from podium.algorithms.statistics import Moments, PolicyStatistics
from podium.cluster.identity import WorkerId
from podium.cluster.objects import InlineStored
from podium.cluster.results import Metric, ShardResult, reduce_metrics
from podium.data.tasks import Task
from podium.data.trajectories import TrajectoryBlock, TrajectoryId
from podium.recipe import Recipe, apply_overrides, parse_recipe
from podium.roles.blocks import block_of
from podium.roles.carriers import TurnRewards
from podium.roles.stages import Advantages, GradedRollouts, Rollouts, TrainBatch, UpdateReport
from podium.rollout.requests import Completion, Finish
from podium.weights.canary import LogprobGap

WORKER = WorkerId("train", 0, "here", "cpu")
PROMPT = (40, 41)  # tokens of a prompt where a test does not care


def on_policy_values(*overrides: str) -> dict[str, Any]:
    """Plain values of a valid GRPO recipe, with `key.path=value` overrides on top."""
    values = {
        "program": "grpo",
        "model": {"path": "models/base"},
        "data": {"train": [{"path": "data/train.jsonl"}], "max_length": 64},
        "reward": [{"verifier": "exact_match"}],
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 8},
        "optimizer": {"lr": 0.5},
        "steps": 100,
        "run": {"name": "bandit"},
    }
    return apply_overrides(values, overrides)


def on_policy_recipe(*overrides: str) -> Recipe:
    return parse_recipe(on_policy_values(*overrides))


def make_task(draw: int = 0, *, source: str = "sums", **row: Any) -> Task:
    return Task(
        source=source, messages=None, text=f"{draw}+1=", tools=None, reference=str(draw + 1), row=row,
        place=f"sums.jsonl:{draw + 1}",
    )  # fmt: skip


def make_answer(
    draw: int,
    sample: int = 0,
    *,
    tokens: Sequence[int] = (1,),
    logprobs: Sequence[float] | None = None,
    prompt: Sequence[int] = PROMPT,
    version: int = 0,
    finish: Finish = "stop",
    error: str | None = None,
) -> Completion:
    return Completion(
        id=TrajectoryId(draw, sample),
        prompt=np.array(prompt, np.int32),
        tokens_L=np.array(tokens, np.int32),
        logprobs_L=np.array([-0.5] * len(tokens) if logprobs is None else logprobs, np.float32),
        versions_L=np.full(len(tokens), version, np.int32),
        finish=finish,
        error=error,
    )


def make_result(
    answers: Sequence[Completion], *, metrics: tuple[Metric, ...] = (), worker: WorkerId = WORKER
) -> ShardResult[TrajectoryBlock]:
    """What a generator's stream has for the controller: a stored block and a note."""
    block, note = block_of(answers)
    return ShardResult(
        worker=worker, rank=0, ids=block.ids, lengths_N=block.lengths_N,
        stored=InlineStored(block), metrics=metrics, note=note,
    )  # fmt: skip


def make_rollouts(
    answers: Sequence[Completion],
    *,
    step: int = 1,
    version: int = 0,
    sources: Mapping[int, str] | None = None,
    metrics: tuple[Metric, ...] = (),
) -> Rollouts:
    tasks = {
        each.id.prompt_index: make_task(each.id.prompt_index, source=(sources or {}).get(each.id.prompt_index, "sums"))
        for each in answers
    }
    return Rollouts.of(
        [make_result(answers)], tasks, step=step, version=version,
        metrics=reduce_metrics([(WORKER, metric) for metric in metrics]),
    )  # fmt: skip


def make_graded(
    rewards: Sequence[float],
    groups: Sequence[int],
    *,
    lengths: Sequence[int] | None = None,
    turns: Sequence[tuple[int, int, float]] = (),
    answers: Sequence[Completion] | None = None,
    **changes: Any,
) -> GradedRollouts:
    """One answer a reward, in the groups named; `lengths` are those of the answers. `turns` are rewards that came on
    the way: (row, token of the row, reward)."""
    assert list(groups) == sorted(groups), "rows are in ascending order of id"
    if answers is None:
        seen: dict[int, int] = {}
        answers = []
        for row, group in enumerate(groups):
            sample = seen[group] = seen.get(group, -1) + 1
            answers.append(make_answer(group, sample, tokens=[1] * (lengths[row] if lengths is not None else 1)))
    rollouts = make_rollouts(answers, **{name: changes.pop(name) for name in list(changes) if name in _OF_ROLLOUTS})
    if turns:
        rows, tokens, values = zip(*turns, strict=True)
        given = TurnRewards(row_K=np.array(rows), token_K=np.array(tokens), reward_K=np.array(values, np.float64))
        rollouts = replace(rollouts, note=replace(rollouts.note, turn_rewards=given))
    values_N = np.array(rewards, np.float64)
    plain = GradedRollouts(
        rollouts=rollouts, rewards_N=values_N, values_NR=values_N[:, None], shaping_N=np.zeros(len(values_N)),
        names=("correct",), num_failed=0, num_dropped=0, first_error=None, extras={},
    )  # fmt: skip
    return replace(plain, **changes)


_OF_ROLLOUTS = ("step", "version", "sources", "metrics")


def make_report(**changes: Any) -> UpdateReport:
    """An update of one optimizer step in which nothing was out of the ordinary."""
    plain = UpdateReport(
        statistics=PolicyStatistics.merge([]), gap=LogprobGap(count=16, sum_abs=0.0, sum_ratio=16.0, largest=0.0),
        sampling=None, kept_mass=None, ages={}, behavior=BehaviorCheck(),
        entropy=0.7, kl_reference=None, advantages=Moments.merge([]), losses=(0.25,), grad_norms=(2.0,), skipped=0,
        num_tokens=16, num_sequences=8, imbalance=1.0, micro_steps=1, seconds=0.5, proximal_s=0.0, flops=1e6,
    )  # fmt: skip
    return replace(plain, **changes)


def make_batch(graded: GradedRollouts, advantages_N: Sequence[float] | np.ndarray) -> TrainBatch:
    """A batch with one advantage for each episode."""
    values_N = np.asarray(advantages_N, np.float64)
    return TrainBatch(step=1, lr=0.0, kl_coefficient=0.0, graded=graded, advantages=Advantages(values_N=values_N))


def advantages_of(train_batch: TrainBatch) -> np.ndarray:
    """Of each episode; fails where the batch has other advantages."""
    assert isinstance(train_batch.advantages, Advantages)
    assert train_batch.advantages.values_N is not None
    return train_batch.advantages.values_N
