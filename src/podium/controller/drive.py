# SPDX-License-Identifier: Apache-2.0
"""A controlled run from the first worker to the last: opens the cluster, builds the roles, runs the program."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from podium.cluster import Cluster, RayCluster, Workers, open_inline, open_ray
from podium.cluster.blocking import in_thread
from podium.cluster.crew import Patience
from podium.controller.evaluation import heldout_limit
from podium.controller.layout import GRADER, LINK, RUNNER, layout_of, num_learners, role_names
from podium.controller.ledger import Ledger
from podium.controller.parts import Parts, Progress, Roles
from podium.controller.phases import GENERATOR, who_leaves
from podium.controller.prompts import PromptSource
from podium.controller.run import OnPolicyRun
from podium.controller.start_up import StartUp
from podium.data.tasks import PromptEncoder, read_tasks
from podium.data.tokenizer import load_tokenizer
from podium.engine.checkpoint import CheckpointReader, set_aside_later
from podium.errors import PlacementError, PodiumError, RoleError
from podium.models.cpu_settings import CpuSettings
from podium.observe import MetricsFile, Stopwatch, open_console, open_loggers
from podium.recipe import Recipe
from podium.roles.critic import Critic
from podium.roles.episode_runner import EpisodeRunner
from podium.roles.generator import Generator
from podium.roles.grader import Grader
from podium.roles.grading_handle import GraderHandle, RewardModelHandle
from podium.roles.handles import CriticHandle, GeneratorHandle, LearnerHandle, ScorerHandle
from podium.roles.learner import POLICY, Learner, LearnerFacts
from podium.roles.reward_model import RewardModel
from podium.roles.runner_handle import RunnerHandle
from podium.roles.scorer import Scorer
from podium.spmd.folder import RunFolder
from podium.spmd.launch import InterruptHandler
from podium.spmd.result import RunResult

_SETTLE_S = 60.0
ControlledProgram = Callable[[OnPolicyRun], Awaitable[None]]


def run_controlled(
    program: ControlledProgram,
    recipe: Recipe,
    folder: RunFolder,
    *,
    resume_step: int | None,
    start_up: StartUp | None = None,
) -> RunResult:
    """Runs the program on Ray (or inline, where the recipe says so), which may be `start_up`'s. The first Ctrl-C saves
    and stops at the end of the step, the second ends at once."""
    interrupts = InterruptHandler(folder.stop_file)
    with interrupts:
        try:
            return asyncio.run(_drive(program, recipe, folder, resume_step, interrupts, start_up or StartUp()))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        except RoleError as error:
            raise _told(error) from error


async def _drive(
    program: ControlledProgram,
    recipe: Recipe,
    folder: RunFolder,
    resume_step: int | None,
    interrupts: InterruptHandler,
    start_up: StartUp,
) -> RunResult:
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None
    interrupts.on_end(lambda: loop.call_soon_threadsafe(this.cancel))
    watch = Stopwatch()
    with ExitStack() as stack:
        console = open_console(rank=0, log_every=recipe.run.log_every)
        stack.callback(console.close)
        with watch.span("start-up"):
            reader = None
            if resume_step is not None:
                reader = CheckpointReader(folder.checkpoints / f"step-{resume_step:08d}")
                for part in (folder.checkpoints, folder.path / "critic", folder.path / "reference"):
                    set_aside_later(part, resume_step)
            saved: Mapping[str, Any] = reader.record["extras"] if reader is not None else {}
            encoder = PromptEncoder(load_tokenizer(recipe.model))
            prompts = PromptSource(recipe, encoder, saved.get("cursor"))
            generation = recipe.evaluation.generation
            limit = heldout_limit(generation, recipe.evaluation.max_documents)
            heldout = read_tasks(recipe.data.heldout, "data.heldout", limit) if recipe.data.heldout else []
        async with _opened(recipe, watch, start_up) as cluster:
            with watch.span("start-up"):
                workers = await _started(recipe, folder, cluster, resume_step)
                roles = await _roles(recipe, workers, console.warning)
                start_up.tell("ready")
            ledger = Ledger(folder.path / "episodes.sqlite")
            stack.callback(ledger.close)
            ledger.rewind(resume_step or 0)
            loggers = open_loggers(recipe.run.loggers, folder.path, resume_step=resume_step)
            for logger in loggers:
                stack.callback(logger.close)
            metrics = stack.enter_context(MetricsFile.resume(folder.metrics_file, step=resume_step or 0))
            folder.forget_samples_after(resume_step or 0)
            facts = roles.policy.facts
            if facts.cpu is not None:
                folder.update(
                    cpu={"ranks": roles.policy.num_ranks, "threads": facts.cpu.threads, "onednn": facts.cpu.onednn}
                )
            parts = Parts(
                recipe=recipe, folder=folder, cluster=cluster, workers=workers, roles=roles, names=role_names(recipe),
                prompts=prompts, heldout=heldout, ledger=ledger, console=console, metrics=metrics, loggers=loggers,
                watch=watch, stop_requested=folder.stop_file.exists,
                leaving=who_leaves(
                    role_names(recipe).on_devices, colocated=recipe.placement.layout == "colocated",
                    optimizer_bytes=facts.optimizer_bytes, device_bytes=facts.device_bytes,
                    asked=recipe.rollout.offload_optimizer,
                ),
            )  # fmt: skip
            progress = Progress(
                step=resume_step or 0,
                kl_coefficient=saved.get("kl_coefficient"),
                skipped_in_a_row=saved.get("skipped_in_a_row", 0),
                version=saved.get("version"),
            )
            console.header(_header(recipe, folder, roles, resume_step))
            run = OnPolicyRun(parts, progress)
            try:
                await program(run)
            except Exception:
                # What was being saved is saved, as far as the learners still answer.
                with contextlib.suppress(Exception):
                    async with asyncio.timeout(_SETTLE_S):
                        await roles.policy.finish_saving()
                raise
            return _result(run, folder, watch)


@asynccontextmanager
async def _opened(recipe: Recipe, watch: Stopwatch, start_up: StartUp) -> AsyncIterator[Cluster]:
    settings = RayCluster(heartbeat_timeout_s=recipe.placement.heartbeat_timeout_s)
    inline = recipe.placement.launcher == "inline"
    opening = open_inline() if inline else open_ray(settings, starting=start_up.ray, tell=start_up.tell)
    with ExitStack() as spans:
        spans.enter_context(watch.span("start-up"))
        async with opening as cluster:
            spans.close()
            try:
                yield cluster
            finally:
                spans.enter_context(watch.span("shut-down"))


async def _started(recipe: Recipe, folder: RunFolder, cluster: Cluster, resume_step: int | None) -> Workers:
    placement = recipe.placement
    device, gpus = placement.device, await in_thread(cluster.total, "GPU")
    if device == "auto":
        device = "cuda" if gpus > 0 else "cpu"
    if device == "cuda" and gpus == 0:
        raise PlacementError("placement.device: cuda is asked for and the cluster has no GPU. Use cpu or auto.")
    known = folder.state().get("cpu", {})
    # Threads change the order of sums, so a run that goes on keeps what it was measured to be fastest with.
    kept = known.get("ranks") == num_learners(recipe)
    cpu = CpuSettings(threads=known["threads"], onednn=known["onednn"], measured="as before") if kept else None
    layout = layout_of(recipe, folder, device=device, resume_step=resume_step, cpu=cpu)
    patience = Patience(collective_s=placement.timeout_s, heartbeat_timeout_s=placement.heartbeat_timeout_s)
    try:
        workers = await cluster.start(layout, patience, deadline_s=max(600.0, placement.timeout_s))
    except PlacementError as error:
        raise PlacementError(f"placement.devices: {placement.devices} devices have no place. {error}") from error
    if recipe.environment is not None:
        await workers.introduce(GENERATOR, to=RUNNER)
    if placement.layout == "split":
        await workers.connect(LINK, [POLICY, GENERATOR])
    return workers


async def _roles(recipe: Recipe, workers: Workers, warn: Callable[[str], None]) -> Roles:
    names = role_names(recipe)
    policy = await LearnerHandle.open(workers.role(POLICY, Learner))
    functions = tuple(index for index, reward in enumerate(recipe.reward) if reward.model is None)
    grader = GraderHandle(
        workers, workers.role(GRADER, Grader), functions, timeout_s=recipe.grading.timeout_s, warn=warn
    )
    generator = GeneratorHandle(workers.role(GENERATOR, Generator))
    runner = None
    if recipe.environment is not None:
        runner = RunnerHandle(workers, workers.role(RUNNER, EpisodeRunner), generator, warn=warn)
    return Roles(
        policy=policy,
        generator=generator,
        runner=runner,
        grader=grader,
        reward_models=tuple(
            (index, RewardModelHandle(workers.role(name, RewardModel))) for index, name in names.reward_models
        ),
        critic=CriticHandle(workers.role(names.critic, Critic), policy) if names.critic is not None else None,
        reference=ScorerHandle(workers.role(names.reference, Scorer)) if names.reference is not None else None,
        teachers=tuple(ScorerHandle(workers.role(name, Scorer)) for name in names.teachers),
    )


def _header(recipe: Recipe, folder: RunFolder, roles: Roles, resume_step: int | None) -> list[str]:
    facts, rollout, placement = roles.policy.facts, recipe.rollout, recipe.placement
    episodes = f"{rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples"
    lines = [
        f"run: {folder.path}" + (f" (resumed after step {resume_step})" if resume_step else ""),
        f"program: {recipe.program}, {recipe.steps} steps of {episodes}, up to {rollout.max_new_tokens} new tokens",
        f"model: {facts.architecture}, {facts.num_parameters / 1e6:.2f}M parameters{_adapter(facts)}, {facts.dtype} "
        "compute, float32 masters",
        f"devices: {placement.devices} x {facts.device}, {placement.layout}: {roles.policy.num_ranks} learn, "
        f"{roles.generator.num_engines} generate ({rollout.engine})",
    ]
    if facts.cpu is not None:
        lines.append(f"cpu: {facts.cpu} per worker ({facts.cpu.measured})")
    return lines


def _adapter(facts: LearnerFacts) -> str:
    count = facts.trained_parameters
    return "" if count is None else f" ({count / 1e6:.3g}M of them an adapter's, the others frozen)"


def _result(run: OnPolicyRun, folder: RunFolder, watch: Stopwatch) -> RunResult:
    return RunResult(
        folder=folder.path,
        status="finished" if run.step >= run.recipe.steps else "stopped",
        step=run.step,
        loss=run.last_loss,
        heldout_loss=None,
        score=run.evaluation.score if run.evaluation is not None else None,
        time=watch.summary(),
    )


def _told(error: RoleError) -> PodiumError:
    """A mistake of the user's, found by a worker, is told in its own words."""
    return error.__cause__ if isinstance(error.__cause__, PodiumError) else error
