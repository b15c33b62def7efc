# SPDX-License-Identifier: Apache-2.0
"""Runs one rank: joins the others, builds what the program needs, runs the program, and leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from podium.data.documents import Document
from podium.data.endings import missing_stop_token
from podium.data.examples import MakerSpec
from podium.data.files import Readers
from podium.data.loader import LoaderState, StepLoader, StepSize, decode
from podium.data.skipping import SkipPolicy
from podium.data.source_names import source_names
from podium.data.sources import open_source
from podium.data.tokenizer import load_tokenizer, require_embeddings, stop_tokens
from podium.engine.checkpoint import CheckpointReader, CheckpointWriter, newest_usable
from podium.engine.checkpoint_files import bring_back, set_aside_later
from podium.engine.mesh import Mesh, check_devices, check_tensor_groups, join, leave
from podium.engine.optimizer import AdamW
from podium.engine.parameters import TrainedParameter
from podium.engine.resuming import restore_optimizer
from podium.engine.sharding import PackedModel, compute_dtype, place, place_scalar
from podium.engine.train_step import TrainEngine
from podium.errors import CheckpointError, UnsupportedModelError, counted
from podium.models.cost import model_cost
from podium.models.cpu_settings import CpuSettings
from podium.models.device import choose_cpu_settings, matrix_peak
from podium.models.folder import local_folder
from podium.models.verify import random_batch, self_check
from podium.observe import Console, Stopwatch, open_console, open_run_console
from podium.observe.timing import RESTART
from podium.progress import waiting_at_most
from podium.recipe import RewardModelRecipe, SpmdRecipe
from podium.runs.failing import all_failed_after
from podium.runs.folder import RunFolder
from podium.runs.header import header_lines, model_line
from podium.runs.host_memory import claim_launch, remove_memory
from podium.runs.log import open_log
from podium.runs.milestones import Milestones
from podium.runs.program_errors import named_program
from podium.runs.result import RunResult
from podium.spmd.evaluation import Evaluator
from podium.spmd.exchanging import RankExchange
from podium.spmd.kept_examples import kept_examples
from podium.spmd.launch import RankPlace, StopRequest
from podium.spmd.restarting import (
    newest_state,
    open_snapshots,
    report_restart,
    restarted_milestones,
    snapshot_folder,
)
from podium.spmd.run import SpmdParts, SpmdProgress, SpmdRun
from podium.spmd.step_snapshots import StepSnapshots

SpmdProgram = Callable[[SpmdRun[Any]], None]

# Most time until a rank advances first: it reads a model and may tune its kernels.
_START_S = 600.0
# Default for the most tokens of one forward.
_DEFAULT_MICRO_BATCH = {"cuda": 16_384, "cpu": 4096}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """Arguments of every rank: the run, how to load its program by name, and the checkpoint to begin from (None: start
    from scratch). With `evaluates_only` the program takes no step: its held-out data is evaluated once."""

    recipe: SpmdRecipe
    folder: Path
    resume_step: int | None
    load_program: Callable[[str], SpmdProgram]  # called in the rank: a custom program's function is not pickled
    evaluates_only: bool = False
    launch_id: str | None = None  # names the snapshots of this launch in host memory; None: there are none


def run_rank(where: RankPlace, task: RankTask) -> RunResult:
    """Runs a rank from joining the process group to leaving it. Collective."""
    recipe = task.recipe
    check_devices(recipe.placement, where.local_world or 1)
    sizes = recipe.placement.sizes_of(where.world)
    if where.local_world is not None:
        check_tensor_groups(sizes, first_rank=where.rank - where.local_rank, local_world=where.local_world)
    mesh = join(
        recipe.placement, rank=where.rank, world=where.world, local_rank=where.local_rank, meeting=where.meeting,
        sizes=sizes,
    )  # fmt: skip
    try:
        return run_joined(where, mesh, task)
    finally:
        leave(mesh)


def run_joined(where: RankPlace, mesh: Mesh, task: RankTask) -> RunResult:
    """Runs a rank that has already joined the others. Collective."""
    recipe, folder = task.recipe, RunFolder(path=task.folder)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with ExitStack() as stack:
        # An evaluation has nothing to save, so Ctrl-C ends it at once.
        stop = None if task.evaluates_only else stack.enter_context(StopRequest(where, folder.stop_file))
        console = _console(where, recipe, folder)
        stack.callback(console.close)
        memory = snapshot_folder(folder.path, task.launch_id)
        if memory is not None and (claim := claim_launch(memory)) is not None:
            stack.enter_context(claim)  # what a killed launch leaves on this node, the next run here removes
        with waiting_at_most(_START_S):
            begin = _begin(task, folder, where, mesh, memory, console)
        # At once: a restart must not take later checkpoints of an earlier life for its own.
        later: list[int] = []
        if mesh.is_main and task.resume_step is not None and where.attempt == 0 and not task.evaluates_only:
            later = set_aside_later(folder.checkpoints, task.resume_step)
        try:
            watch = Stopwatch()
            if where.restart is not None:
                watch.note_before(RESTART, where.restart.seconds)
            with watch.span("start-up"), waiting_at_most(_START_S):
                run = _build(
                    stack, task, folder, mesh, console, begin, where, memory,
                    lambda: stop is not None and stop.requested, watch,
                )  # fmt: skip
        except BaseException:
            if not where.restarts_left:
                bring_back(folder.checkpoints, later)
            raise
        report_restart(where, folder, console, 0 if begin is None else begin.step)
        try:
            with run.before_steps():
                with waiting_at_most(_START_S):
                    program = task.load_program(recipe.program)
                with named_program(recipe, folder, is_followed=where.is_followed):
                    program(run)
            run.require_finished()
        except Exception as error:
            _save_before_failing(run, error, where, folder, lambda: stop is not None and stop.signalled)
            raise
        if memory is not None:
            _remove_snapshots(memory, mesh)  # the launcher may be on another node
        return run.result()


def _remove_snapshots(memory: Path, mesh: Mesh) -> None:
    mesh.barrier()
    if mesh.is_main:
        remove_memory(memory)


def _save_before_failing(
    run: SpmdRun[SpmdRecipe], error: Exception, where: RankPlace, folder: RunFolder, is_ended: Callable[[], bool]
) -> None:
    """The failure is what the user must see, so an error of the save is only added to it."""
    if isinstance(error, UnsupportedModelError | CheckpointError):
        return  # found after the update: the weights are wrong; or saving is what failed
    try:
        run.save_before_failing(
            lambda step: all_failed_after(
                step, folder.path, rank=where.rank, world=where.world, attempt=where.attempt, is_ended=is_ended
            )
        )
    except Exception as failure:
        error.add_note(f"the last recorded step cannot be saved: {failure}")


def _begin(
    task: RankTask, folder: RunFolder, where: RankPlace, mesh: Mesh, memory: Path | None, console: Console
) -> CheckpointReader | None:
    """The checkpoint to begin from; a restarted group uses the newest one that is whole, or a later snapshot."""
    if where.attempt > 0 and not task.evaluates_only:
        newest = newest_state(folder, memory, mesh, console.warning)
        if newest is not None:
            return newest
    return newest_usable(folder.checkpoints, task.resume_step) if task.resume_step is not None else None


def _console(where: RankPlace, recipe: SpmdRecipe, folder: RunFolder) -> Console:
    """The console of a rank. Everything that it shows is in the run's console.log too."""
    if where.is_followed:
        return open_console(rank=where.rank, log_every=recipe.run.log_every)
    return open_run_console(rank=where.rank, log_every=recipe.run.log_every, file=folder.console_file)


def _build(
    stack: ExitStack,
    task: RankTask,
    folder: RunFolder,
    mesh: Mesh,
    console: Console,
    checkpoint: CheckpointReader | None,
    where: RankPlace,
    memory: Path | None,
    stop_requested: Callable[[], bool],
    watch: Stopwatch,
) -> SpmdRun[SpmdRecipe]:
    recipe = task.recipe
    model_folder = local_folder(recipe.model.path, "model.path")
    torch.set_num_threads(recipe.placement.threads or 1)
    engine = _engine(recipe, model_folder, mesh, checkpoint)
    model = engine.model
    progress = _restore(engine, checkpoint, task) if checkpoint is not None else SpmdProgress()
    settings = _cpu_settings(recipe, folder, engine)
    if recipe.model.self_check:
        dtype = compute_dtype(recipe.model, mesh.device)
        self_check(model, mesh.device, dtype, max_length=recipe.data.max_length)
    tokenizer = load_tokenizer(recipe.model)
    require_embeddings(tokenizer, model.vocab_size)
    peak = matrix_peak(mesh.device, compute_dtype(recipe.model, mesh.device))
    loader = None if task.evaluates_only else _loader(stack, recipe, progress.loader, mesh)
    max_tokens = _micro_batch(recipe, mesh)
    evaluator = (
        Evaluator(recipe, engine, tokenizer, model_folder, max_tokens=max_tokens) if recipe.data.heldout else None
    )
    log = open_log(stack, recipe, folder, console, step=progress.step, rank=mesh.rank)
    writer = _writer(stack, recipe, folder, mesh)
    if evaluator is not None:
        log.skipped_rows(0, evaluator.skipped)
    milestones = (
        Milestones(recipe, progress.step, evaluates=evaluator is not None)
        if where.attempt == 0
        else restarted_milestones(recipe, progress.step, folder, mesh, evaluates=evaluator is not None)
    )
    if task.launch_id is not None and memory is None:
        console.note(
            "no snapshots in memory: there is no /dev/shm to write to. A restart goes on from the last checkpoint"
        )
    cost = model_cost(model.hf, model.split)
    if not task.evaluates_only:
        console.header(_header(recipe, folder, mesh, model, settings, progress.step, peak))
    parts = SpmdParts(
        recipe=recipe, folder=folder, engine=engine, loader=loader, evaluator=evaluator, writer=writer, log=log,
        cost=cost, peak_flops=peak, max_tokens=max_tokens,
        hard_cap=recipe.micro_batch_tokens is not None, stop_requested=stop_requested, watch=watch,
        check_endings=_endings_check(recipe, tokenizer, model_folder), milestones=milestones,
        show_examples=partial(kept_examples, sources=source_names(recipe.data.train), tokenizer=tokenizer),
        snapshots=StepSnapshots(open_snapshots(where, memory, engine), engine, console, watch),
        evaluates_only=task.evaluates_only,
    )  # fmt: skip
    return SpmdRun(parts, progress)


def _engine(recipe: SpmdRecipe, model_folder: Path, mesh: Mesh, checkpoint: CheckpointReader | None) -> TrainEngine:
    model, trained = _place(recipe, model_folder, mesh, checkpoint)
    return TrainEngine(
        model, trained, AdamW(trained, recipe.optimizer), mesh, recipe.optimizer.clip_norm,
        router_aux_loss_coef=recipe.model.router_aux_loss_coef,
    )  # fmt: skip


def _writer(stack: ExitStack, recipe: SpmdRecipe, folder: RunFolder, mesh: Mesh) -> CheckpointWriter:
    """Of the run's checkpoints; `stack` waits for the last one."""
    section = recipe.checkpoint
    writer = CheckpointWriter(
        folder.checkpoints, mesh, keep=section.keep, keep_best=section.keep_best, background=section.background,
        timeout_s=section.timeout_s,
    )  # fmt: skip
    stack.callback(writer.settle)
    return writer


def _endings_check(recipe: SpmdRecipe, tokenizer: Any, folder: Path) -> Callable[[Sequence[Document]], str | None]:
    """The check for stop tokens. A reward model scores texts and learns no tokens, so it needs no check."""
    if isinstance(recipe, RewardModelRecipe):
        return lambda documents: None
    stops = stop_tokens(tokenizer, folder)
    return lambda documents: missing_stop_token(documents, tokenizer, stops)


def _place(
    recipe: SpmdRecipe, folder: Path, mesh: Mesh, checkpoint: CheckpointReader | None
) -> tuple[PackedModel, list[TrainedParameter]]:
    """The model that the program trains: a language model, or one that scores."""
    section, seed = recipe.model, recipe.run.seed
    if isinstance(recipe, RewardModelRecipe):
        return place_scalar(section, folder, mesh, labels=1, seed=seed, checkpoint=checkpoint)
    return place(section, folder, mesh, seed=seed, checkpoint=checkpoint)


def _restore(engine: TrainEngine, checkpoint: CheckpointReader, task: RankTask) -> SpmdProgress:
    if task.evaluates_only:
        return SpmdProgress(step=checkpoint.step)
    restore_optimizer(engine, checkpoint)
    extras = checkpoint.extras()
    loader = decode(extras.values["loader"], extras.arrays)
    return SpmdProgress(
        step=checkpoint.step,
        skipped=extras.values["skipped"],
        skipped_in_a_row=extras.values["skipped_in_a_row"],
        loader=loader,
    )


def _loader(stack: ExitStack, recipe: SpmdRecipe, state: LoaderState | None, mesh: Mesh) -> StepLoader:
    """The loader of the run's steps. Several ranks share the work of tokenizing. Collective."""
    data = recipe.data
    exchange = None
    if mesh.world > 1:
        exchange = stack.enter_context(RankExchange(mesh, timeout_s=recipe.placement.collective_s))
    policy, readers = SkipPolicy.of(data), Readers(rank=mesh.rank, world=mesh.world)
    sources = [
        open_source(section, f"data.train.{index}", keep_bad=policy.skips, readers=readers)
        for index, section in enumerate(data.train)
    ]
    loader = StepLoader(
        sources, MakerSpec.of(recipe), seed=recipe.run.seed, shuffle=data.shuffle, shuffle_rows=data.shuffle_rows,
        size=StepSize(tokens=recipe.tokens_per_step, rows=recipe.rows_per_step), window=data.packing_window,
        workers=data.workers, prefetch=data.prefetch, state=state, policy=policy, exchange=exchange,
    )  # fmt: skip
    return stack.enter_context(loader)


def _micro_batch(recipe: SpmdRecipe, mesh: Mesh) -> int:
    """Tokens of one forward: the recipe's, or the rank's share of a step in equal parts under the default limit. The
    ranks of a context group divide them."""
    if recipe.micro_batch_tokens is not None:
        return recipe.micro_batch_tokens
    limit = _DEFAULT_MICRO_BATCH[mesh.device.type] * (1 if mesh.context is None else mesh.context.size)
    if recipe.rows_per_step is not None:
        return limit
    parts = -(-recipe.tokens_per_step // (mesh.data_ranks * limit))
    return -(-recipe.tokens_per_step // (mesh.data_ranks * parts))


def _cpu_settings(recipe: SpmdRecipe, folder: RunFolder, engine: TrainEngine) -> CpuSettings | None:
    """Rank 0's choice for all ranks. A resumed run keeps its own, because threads change the order of sums."""
    mesh, placement = engine.mesh, recipe.placement
    if mesh.device.type != "cpu":
        return None
    settings = folder.cpu_settings(mesh.world)
    if (
        settings is None
        or placement.threads not in (None, settings.threads)
        or placement.onednn not in (None, settings.onednn)
    ):
        batch = random_batch(engine.model.vocab_size, lengths=(16,) * 8 + (128,))
        settings = choose_cpu_settings(
            lambda: engine.trial(batch),
            ranks=mesh.world,
            threads=placement.threads,
            onednn=placement.onednn,
        )
        settings = mesh.gather(settings)[0]
        if mesh.is_main:
            folder.note_cpu_settings(mesh.world, settings)
    settings.apply()
    return settings


def _header(
    recipe: SpmdRecipe, folder: RunFolder, mesh: Mesh, model: Any, settings: CpuSettings | None, step: int, peak: float
) -> list[str]:
    rows = recipe.rows_per_step
    name = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "CPU"
    return header_lines(
        recipe,
        folder,
        resume_step=step,
        step_size=f"{recipe.tokens_per_step} tokens" if rows is None else counted(rows, "row"),
        model=model_line(
            type(model.hf).__name__,
            model.num_parameters(),
            model.num_parameters(trained=recipe.model.lora is not None),
            str(compute_dtype(recipe.model, mesh.device)).removeprefix("torch."),
        ),
        devices=f"{mesh.world} x {name}{_axes(recipe, mesh)}, measured peak {peak / 1e12:.3g} TFLOP/s each",
        cpu=settings,
    )


def _axes(recipe: SpmdRecipe, mesh: Mesh) -> str:
    """The axes of placement.policy and `experts`; nothing without them."""
    placement = recipe.placement
    return "" if placement.policy is None and placement.experts == 1 else f" {placement.sizes_of(mesh.world)}"
