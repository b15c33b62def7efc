# SPDX-License-Identifier: Apache-2.0
"""The grader: a CPU worker that turns trajectories into text and runs the recipe's reward functions on it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from podium.cluster import WorkerContext
from podium.data.skipping import RowSkipper, SkipPolicy
from podium.data.tasks import Task, read_tasks
from podium.data.tokenizer import load_tokenizer
from podium.environments.grading import Grade
from podium.environments.heldout_rows import require_scorable
from podium.environments.hosted_grading import HostedGrader
from podium.environments.output_cap import OutputCap
from podium.environments.reward_service import RewardSpec
from podium.environments.rewards import JudgingPlace, Sample
from podium.recipe import (
    FunctionReward,
    JudgeReward,
    ModelSection,
    OnPolicyRecipe,
    RewardSection,
    VerifierReward,
)
from podium.recipe.on_policy import SandboxSection
from podium.roles.carriers import Floats, GradeNote, GraderFacts, GradeShard
from podium.roles.samples import sample_of
from podium.roles.texts import EpisodeText, TextReader
from podium.runs.folder import RunFolder

_CLOSING_S = 10.0
# Training rows that are compared with held-out ones.
_FEW_ROWS = 16

Purpose = Literal["train", "evaluation"]
"""Which rewards to use: the recipe's, or evaluation.generation.score if the recipe has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraderSpec:
    """How a grader is built."""

    model: ModelSection
    rewards: tuple[RewardSection, ...]
    evaluation: tuple[RewardSection, ...]
    timeout_s: float
    also_scored: bool  # whether models on devices or an environment add to the total
    tools: bool  # whether the environment's turns are tool results
    memory_gib: float | None = None
    judging: JudgingPlace = field(default_factory=JudgingPlace)
    sandbox: SandboxSection = field(default_factory=SandboxSection)
    stacks: Path | None = None  # the file for stacks of rewards that hang

    @classmethod
    def of(cls, recipe: OnPolicyRecipe, run: Path | None = None) -> GraderSpec:
        """The grader of a recipe. `run`: the run folder, which may have judges' caches."""
        return cls(
            model=recipe.model,
            rewards=tuple(_with_absolute_key_file(reward) for reward in recipe.reward),
            evaluation=evaluation_rewards(recipe),
            timeout_s=recipe.grading.timeout_s,
            also_scored=recipe.environment is not None or bool(recipe.device_rewards),
            tools=recipe.environment is not None and bool(recipe.environment.tools),
            memory_gib=recipe.grading.memory_gib,
            judging=JudgingPlace(processes=recipe.grading.workers, folder=None if run is None else run / "judge_cache"),
            sandbox=recipe.sandbox_section,
            stacks=None if run is None else RunFolder(path=run).stacks_file,
        )


def _with_absolute_key_file(reward: RewardSection) -> RewardSection:
    """A worker may have been started in another folder than the run."""
    if not isinstance(reward, JudgeReward) or reward.judge.api_key_file is None:
        return reward
    judge = reward.judge.model_copy(update={"api_key_file": os.path.abspath(reward.judge.api_key_file)})
    return reward.model_copy(update={"judge": judge})


def evaluation_rewards(recipe: OnPolicyRecipe) -> tuple[RewardSection, ...]:
    """evaluation.generation.score as a reward; empty if the recipe's own rewards score held-out answers."""
    generation = recipe.evaluation.generation
    match generation.score if generation is not None else None:
        case None:
            return ()
        case "exact_match":
            return (VerifierReward(verifier="exact_match"),)
        case path:
            return (FunctionReward(function=path),)


def require_scorable_heldout(recipe: OnPolicyRecipe, heldout: Sequence[Task]) -> None:
    """Raises an error if held-out rows lack a column that scores them, while training rows have it."""
    rewards, key = evaluation_rewards(recipe), "evaluation.generation.score"
    if not rewards:
        rewards, key = recipe.reward, "reward"
    if heldout and rewards:
        skipper = RowSkipper(SkipPolicy.of(recipe.data), "data.train")
        train = read_tasks(
            recipe.data.train, "data.train", _FEW_ROWS, skipper=skipper, needs_prompt=recipe.needs_prompts
        )
        require_scorable(rewards, key, heldout, train)


class Grader:
    """Grades episodes. Reward functions run in a separate process, so that a hang, a crash or endless output affects
    nothing else.

    `grade` may be called by several threads at the same time: the work thread, and the control threads of its worker.
    Their batches are open together, so that the waiting of asynchronous rewards overlaps."""

    def __init__(self, context: WorkerContext, spec: GraderSpec) -> None:
        self._context, self._spec = context, spec
        self._output = output = OutputCap(f"the reward of {context.worker}")
        sections = {"train": (spec.rewards, "reward"), "evaluation": (spec.evaluation, "evaluation.generation.score")}
        rewards = RewardSpec(
            sections=sections,
            timeout_s=spec.timeout_s,
            also_scored=spec.also_scored,
            memory_gib=spec.memory_gib,
            judging=spec.judging,
            sandbox=spec.sandbox,
            stacks=spec.stacks,
        )
        self._thread = _GradingThread(lambda: HostedGrader(rewards, output=output))
        self._finalizer = weakref.finalize(self, self._thread.close)  # a role that is dropped with its worker
        try:
            tokenizer = load_tokenizer(spec.model)  # while the process starts
            self._reader, self._reading = TextReader(tokenizer), threading.Lock()
            self._thread.opened.result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the reward processes and the grader's thread."""
        self._finalizer()

    def facts(self) -> GraderFacts:
        """What a batch has to hold together, as far as the reward functions for training are concerned."""
        rewards = self._thread.opened.result().rewards["train"]
        return GraderFacts(inputs=tuple(each.per for each in rewards), overlaps=any(each.is_async for each in rewards))

    def grade(self, shard: GradeShard, purpose: Purpose) -> GradeNote:
        """Rewards of every row, and why some have none. Waits for user code, within the deadline of each call; calls of
        a synchronous reward also wait for those of the batches before."""
        with self._context.span("decoding"):
            block = shard.rows.read() if len(shard.rows) else None
            with self._reading:  # tokenizers need not be thread-safe
                texts = list(self._reader.read(block)) if block is not None else []
            samples = [sample_of(shard, row, text, tools=self._spec.tools) for row, text in enumerate(texts)]
        with self._context.span("rewards"):
            grades = self._thread.grade(purpose, samples)
        sections = self._spec.rewards if purpose == "train" else self._spec.evaluation
        return GradeNote(
            values_NR=_values(grades, sum(not section.needs_device for section in sections)),
            errors={row: grade.error for row, grade in enumerate(grades) if grade.error is not None},
            extras=_extras(grades),
            texts=tuple(
                (sample.prompt_text, _said(text)) for sample, text in zip(samples[: shard.show], texts, strict=False)
            ),
            warnings=() if self._output.warning is None else (self._output.warning,),
        )


class _GradingThread:
    """A thread with the event loop of a hosted grader and of its processes. It lasts until `close`."""

    def __init__(self, start: Callable[[], HostedGrader]) -> None:
        """Starts the thread, and in it the grader. `opened` tells when that is ready, or why it is not."""
        self._start = start
        self._loop, self._closing = asyncio.new_event_loop(), asyncio.Event()
        self._grader: HostedGrader | None = None
        self.opened: Future[HostedGrader] = Future()
        self._thread = threading.Thread(target=self._run, name="grading", daemon=True)
        self._thread.start()

    def grade(self, purpose: Purpose, samples: Sequence[Sample]) -> list[Grade]:
        """Grades a batch beside those of other threads, and waits for it. An error if it is closed meanwhile."""
        grading = self.opened.result().grade(purpose, samples)
        return asyncio.run_coroutine_threadsafe(grading, self._loop).result()

    def close(self) -> None:
        """Ends the grader's processes and the thread, and waits for that."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._end)
        if threading.current_thread() is not self._thread:  # where the garbage collector may be
            self._thread.join(_CLOSING_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # in the end it cancels the batches
            runner.run(self._serve())

    async def _serve(self) -> None:
        """Waits for `close`."""
        if self._closing.is_set():
            return
        try:
            self._grader = self._start()
            await self._grader.open()
        except BaseException as error:
            self.opened.set_exception(error)
            self._end()
            return
        self.opened.set_result(self._grader)
        await self._closing.wait()

    def _end(self) -> None:
        self._closing.set()
        if self._grader is not None:
            self._grader.close()


def _said(text: EpisodeText) -> str:
    return text.answer if len(text.turns) < 2 else " | ".join(said.strip() for _, said in text.turns)


def _values(grades: Sequence[Grade], num_rewards: int) -> np.ndarray:
    values = np.full((len(grades), num_rewards), np.nan)
    for row, grade in enumerate(grades):
        for at, value in enumerate(grade.values):
            if value is not None:
                values[row, at] = value
    return values


def _extras(grades: Sequence[Grade]) -> dict[str, Floats]:
    names = dict.fromkeys(name for grade in grades for name in grade.extras)
    return {name: np.array([grade.extras.get(name, np.nan) for grade in grades]) for name in names}
