# SPDX-License-Identifier: Apache-2.0
"""Tries a recipe: generates and grades a few episodes in one process, and trains nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from podium.cluster import Workers, open_inline
from podium.cluster.member import Timeouts
from podium.controller.drive import cause_of, device_kind_of
from podium.controller.episodes import training_sampling
from podium.controller.grading import grade_rollouts
from podium.controller.layout import GRADER, RUNNER, role_names, trial_layout
from podium.controller.phases import GENERATOR
from podium.controller.prompts import PromptSource
from podium.controller.recovery import RecoveryPlan
from podium.controller.replacing import WorkerReplacements
from podium.data.control_tokens import ControlRule
from podium.data.prompts import PromptTokenizer
from podium.data.tasks import IndexedTask
from podium.data.tokenizer import load_tokenizer, marked_text
from podium.environments.tools import FAULTS
from podium.errors import RoleError, counted
from podium.recipe import OnPolicyRecipe
from podium.roles.carriers import FINISHES
from podium.roles.episode_runner import EpisodeRunner
from podium.roles.episode_stream import EpisodeWorkers, run_all
from podium.roles.grader import Grader
from podium.roles.grading_handle import GraderHandle, RewardModelHandle
from podium.roles.handles import GeneratorHandle
from podium.roles.interfaces import Generator, RewardModel
from podium.roles.runner_handle import RunnerHandle
from podium.roles.stages import GradedRollouts, Rollouts
from podium.roles.texts import TextReader

# How an episode ended, in words.
_ENDS = {
    "stop": "ended by itself",
    "length": "cut at rollout.max_new_tokens",
    "cancelled": "cancelled",
    "error": "failed",
    "unanswered": "not answered by the engine",
    "done": "ended by the environment",
    "turns": "cut at environment.max_turns",
    "tokens": "cut at a limit of tokens (rollout.max_new_tokens of a turn, or environment.max_episode_tokens)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedEpisode:
    """One episode of a trial."""

    where: str  # file and line of its row
    prompt: str
    sample: int
    turns: tuple[tuple[bool, str], ...]  # (whether the policy said it, text)
    marked: str  # all tokens as text, those that would be trained in double brackets
    num_tokens: int
    num_trained: int
    end: str
    reward: float | None  # None: it could not be generated or graded
    rewards: Mapping[str, float]  # by name; those that do not apply are absent
    error: str | None

    def lines(self) -> Iterator[str]:
        """The episode as the command line shows it."""
        yield f"  sample {self.sample + 1}: {self.num_trained} of {self.num_tokens} tokens are trained, {self.end}"
        for is_policy, text in self.turns:
            yield f"    {'model' if is_policy else 'environment'}: {text.strip()!r}"
        yield f"    tokens: {self.marked}"
        if self.error is not None:
            yield f"    no reward: {self.error}"
        else:
            parts = ", ".join(f"{name} {value:.4g}" for name, value in self.rewards.items())
            yield f"    reward {self.reward:.4g}" + (f" ({parts})" if parts else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What came of a trial."""

    episodes: tuple[TriedEpisode, ...]
    start_s: float
    generate_s: float
    grade_s: float
    warnings: tuple[str, ...] = ()  # of environments, tools and rewards
    num_tool_faults: int = 0  # episodes in which a tool raised, or returned a value without a text

    @property
    def errors(self) -> tuple[str, ...]:
        """Why episodes have no reward, each reason once."""
        return tuple(dict.fromkeys(each.error for each in self.episodes if each.error is not None))

    def lines(self) -> Iterator[str]:
        """The trial as the command line shows it."""
        before = None
        for episode in self.episodes:
            if episode.where != before:
                yield f"{episode.where}:"
                if episode.prompt:  # else the environment makes it, and the text below begins with it
                    yield f"  prompt: {episode.prompt!r}"
            before = episode.where
            yield from episode.lines()
        tokens = sum(episode.num_trained for episode in self.episodes)
        yield (
            f"{counted(len(self.episodes), 'episode')}: start-up {self.start_s:.1f} s, generation "
            f"{self.generate_s:.2f} s ({tokens} tokens), rewards {self.grade_s:.2f} s"
        )
        values = {episode.reward for episode in self.episodes if episode.error is None}
        if len(values) == 1 and len(self.episodes) > 1 and not self.errors:
            yield f"every reward is {values.pop():.4g}: from groups like these there is nothing to learn"


async def try_episodes(recipe: OnPolicyRecipe, *, num_prompts: int, samples: int, warn: Callable[[str], None]) -> Trial:
    """Generates `samples` episodes for each of the first prompts with the model of the recipe, and grades them with its
    rewards. Waits for generators and graders, which have their own deadlines."""
    began_s, warnings = time.perf_counter(), list[str]()

    def note(text: str) -> None:
        warnings.append(text)
        warn(text)

    tokenizer = load_tokenizer(recipe.model)
    prompts = PromptSource(recipe, PromptTokenizer(tokenizer, ControlRule.of(recipe.model)), None).take(num_prompts)
    try:
        async with open_inline() as cluster:
            layout = trial_layout(recipe, device=await device_kind_of(recipe, cluster))
            workers = await cluster.start(layout, Timeouts(), deadline_s=recipe.placement.timeout_s)
            start_s = time.perf_counter() - began_s
            with cluster.scope("the trial") as objects:
                began_s = time.perf_counter()
                plan = RecoveryPlan(recipe.placement.restarts, goes_back=False)
                replacements = WorkerReplacements(plan, warn=note, note=note, folder=None)
                rollouts = await _generate(recipe, workers, replacements, prompts, samples, note)
                objects.hold(rollouts.rows)
                generate_s, began_s = time.perf_counter() - began_s, time.perf_counter()
                graded, errors = await _grade(recipe, workers, replacements, rollouts, note)
                grade_s = time.perf_counter() - began_s
                episodes = tuple(_episodes(graded, errors, tokenizer))
    except RoleError as error:
        raise cause_of(error) from error
    faults_N = rollouts.note.counts.get(FAULTS, np.zeros(0))
    return Trial(
        episodes=episodes, start_s=start_s, generate_s=generate_s, grade_s=grade_s, warnings=tuple(warnings),
        num_tool_faults=int((faults_N > 0).sum()),
    )  # fmt: skip


async def _generate(
    recipe: OnPolicyRecipe, workers: Workers, replacements: WorkerReplacements, prompts: Sequence[IndexedTask],
    samples: int, warn: Callable[[str], None],
) -> Rollouts:  # fmt: skip
    generator = GeneratorHandle(workers.role(GENERATOR, Generator))
    source: EpisodeWorkers = generator
    if recipe.environment is not None:
        await workers.open_channel(GENERATOR, to=RUNNER)
        source = RunnerHandle(
            workers, workers.role(RUNNER, EpisodeRunner), generator, warn=warn, replacements=replacements
        )
    blocks, metrics = await run_all(source, prompts, samples, training_sampling(recipe))
    tasks = {prompt.prompt_index: prompt.task for prompt in prompts}
    return Rollouts.of(blocks, tasks, step=0, version=0, metrics=metrics)


async def _grade(
    recipe: OnPolicyRecipe, workers: Workers, replacements: WorkerReplacements, rollouts: Rollouts,
    warn: Callable[[str], None],
) -> tuple[GradedRollouts, Mapping[int, str]]:  # fmt: skip
    functions = tuple(index for index in range(len(recipe.reward)) if index not in recipe.device_rewards)
    grader = GraderHandle(
        workers, workers.role(GRADER, Grader), functions, timeout_s=recipe.grading.timeout_s, warn=warn,
        replacements=replacements, judging_s=recipe.judging_s,
    )  # fmt: skip
    models = tuple(
        (index, RewardModelHandle(workers.role(name, RewardModel), by_group=index in recipe.local_judges))
        for index, name in role_names(recipe).reward_models
    )
    return await grade_rollouts(rollouts, recipe, grader, models)


def _episodes(graded: GradedRollouts, errors: Mapping[int, str], tokenizer: Any) -> Iterator[TriedEpisode]:
    rollouts, block = graded.rollouts, graded.rollouts.rows.read()
    environment_N, bounds = rollouts.note.environment_N, block.offsets.tolist()
    for row, text in enumerate(TextReader(tokenizer).read(block)):
        id, places = rollouts.rows.ids[row], slice(bounds[row], bounds[row + 1])
        task, trained = rollouts.tasks[id.prompt_index], block.loss_mask_T[places]
        named = dict(zip(graded.names, graded.values_NR[row].tolist(), strict=True))
        if not np.isnan(environment_N[row]):
            named["environment"] = float(environment_N[row])
        if graded.shaping_N[row]:
            named["overlong"] = float(graded.shaping_N[row])
        yield TriedEpisode(
            where=task.where,
            prompt=task.prompt_text,
            sample=id.sample,
            turns=text.turns,
            marked=marked_text(tokenizer, block.tokens_T[places].tolist(), trained.tolist()),
            num_tokens=len(trained),
            num_trained=int(trained.sum()),
            end=_ENDS[FINISHES[int(rollouts.note.finish_N[row])]],
            reward=None if row in errors else float(graded.rewards_N[row]),
            rewards={name: value for name, value in named.items() if not np.isnan(value)},
            error=errors.get(row),
        )
