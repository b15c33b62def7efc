# SPDX-License-Identifier: Apache-2.0
"""The native engine: plans a step, runs it and processes its samples, until every request is finished."""

# B rows of one step

from __future__ import annotations

import time
from collections import Counter, abc, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray

from podium.data.documents import Tokens
from podium.data.splitmix import signed
from podium.data.trajectories import TrajectoryId
from podium.errors import RolloutError, WeightMismatchError
from podium.models.causal_lm import PackedCausalLM, longest_packable
from podium.progress import mark_progress
from podium.recipe import EngineSection
from podium.rollout.engine import Capacity, InFlight, Load, MemoryChange, TokenScores
from podium.rollout.fair_lock import FairLock
from podium.rollout.native.block_manager import BlockManager
from podium.rollout.native.cache import attention_layers, bytes_per_token
from podium.rollout.native.engine_memory import EngineMemory, free_on_each
from podium.rollout.native.engine_weights import EngineWeights, copies_in_fp8
from podium.rollout.native.expert_cache import ExpertCache
from podium.rollout.native.merged_copy import MergedCopy
from podium.rollout.native.rows import Rows, RowTable, Sequence
from podium.rollout.native.runner import Runner, SamplingTable, StepResult, StepSamples
from podium.rollout.native.runners import make_runner
from podium.rollout.native.scheduler import Drain, Scheduler, StepPlan
from podium.rollout.native.scoring import score_tokens
from podium.rollout.native.sizing import Sizes, choose_sizes
from podium.rollout.native.speculation import CPU_STEP, CUDA_STEP, Speculation, rounds
from podium.rollout.native.stop_strings import Decode, completed_string
from podium.rollout.native.tensor_group import Prepare, TensorLeader
from podium.rollout.randomness import stream_key
from podium.rollout.requests import Completion, PartialAnswer, Request, failed
from podium.weights.transports import Delivery
from podium.weights.versions import WeightVersion
from podium.weights.whole_copy import WholeCopy

# Most rows of a forward on CPU with proposals, where fewer sequences may run.
_CPU_ROWS = 64


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    plan: StepPlan
    version: int
    result: StepResult
    places: tuple[Rows, Rows] | None  # block and offset of each fed token, if experts are recorded


class NativeEngine:
    """Generates with `model` itself. On one device that is the learner's own module: the next step uses an update of
    the learner at once, and `install` only verifies it. If the learner is sharded, it is the module of a WholeCopy.
    With a MergedCopy of its adapter it generates with that, which is merged again with every version."""

    def __init__(
        self,
        model: PackedCausalLM,
        device: torch.device,
        section: EngineSection | None = None,
        *,
        decode: Decode | None = None,
        copy: WholeCopy | None = None,
        version: int = 0,
        records_experts: bool = False,
        group: TensorLeader | None = None,
        merged: MergedCopy | None = None,
    ) -> None:
        """`decode`: token ids to text, needed for stop strings only. `copy`: freed while the engine sleeps.
        `records_experts`: completions of a mixture say which experts their tokens went to. `group`: other ranks, which
        have the other parts of a divided model; the engine closes it. `merged`: of the adapter of `model`; the engine
        computes with it, takes weights into `model`, and closes it."""
        section = section or EngineSection()
        self._weights, self._merged = EngineWeights(model, group), merged
        if merged is not None:
            model = merged.model
            merged.fill()
        self._model, self._device, self._decode, self._copy = model, device, decode, copy
        self._version, self._group = version, group
        self._lock = FairLock()
        model.eval()
        fp8 = self._fp8 = copies_in_fp8(model, device, section)
        if group is not None:
            group.send(Prepare())
        modules, shapes = attention_layers(model, device)
        dtype = model.head_weight.dtype
        token_bytes = bytes_per_token(shapes, dtype)
        self._sizes = choose_sizes(
            section,
            context=_context(model),
            token_bytes=token_bytes,
            cuda=device.type == "cuda",
            free_bytes=free_on_each(device, group),
        )
        sizes = self._sizes
        # One block more than are allocated: idle lanes of a graph write there.
        num_blocks = sizes.num_blocks + (0 if sizes.slots else 1)
        self._memory = EngineMemory(
            shapes, dtype, device, num_blocks=num_blocks, block_size=sizes.block_size, copy=copy, group=group, fp8=fp8,
            merged=merged,
        )  # fmt: skip
        cache = self._cache = self._memory.cache
        self._block_manager = BlockManager(
            sizes.num_blocks, sizes.block_size, remember=section.reuse_prefixes, version=version
        )  # fmt: skip
        self._oldest_cache = 0  # age of the block manager from which on running sequences may have their cache
        self._experts: ExpertCache | None = None
        recorded = model.routers.shape if records_experts and model.routers is not None else None
        if recorded is not None:
            self._experts = ExpertCache(recorded, num_blocks=num_blocks, block_size=sizes.block_size)
        self._rows = RowTable(
            sizes.max_running, block_size=sizes.block_size, max_length=sizes.max_length, experts=self._experts
        )
        self._sampling = SamplingTable(sizes.max_running)
        self._speculation = _speculation(section, sizes, device)
        self._scheduler = Scheduler(
            self._block_manager, self._rows, prefill_tokens=sizes.prefill_tokens, slots=sizes.slots,
            speculation=self._speculation,
        )  # fmt: skip
        self._runner: Runner = make_runner(
            model, modules, cache, self._rows, self._sampling, device, slots=sizes.slots, decode=section.decode,
            recorded=recorded, group=group,
        )  # fmt: skip
        self._sequences: dict[TrajectoryId, Sequence] = {}
        self._launched: deque[_Launched] = deque()
        self._done: deque[Completion] = deque()
        self._arrivals = 0
        self._paused = self._asleep = self._closed = False
        self._refusal: str | None = None
        self._finished = self._generated = self._prefilled = self._reused = self._steps = self._lane_steps = 0
        self._prefill_s = 0.0

    # Requests

    def submit(self, requests: abc.Sequence[Request]) -> None:
        """Takes requests. One that cannot be served is answered with an error."""
        with self._lock:
            self._check_open()
            new = [request.id for request in requests]
            known = [id for id in new if id in self._sequences]
            if known or len(set(new)) != len(new):
                twice = known[0] if known else Counter(new).most_common(1)[0][0]
                raise RolloutError(
                    f"request {twice} is under way already; an id stands for one answer. Give a second attempt another "
                    "attempt number, or wait for the first."
                )
            problems = [self._problem(request) for request in requests]  # all are checked before any is accepted
            for request, problem in zip(requests, problems, strict=True):
                if problem is not None:
                    self._finish(failed(request, problem))
                    continue
                sequence = Sequence.of(request, arrival=self._arrivals)
                sequence.limit = min(sequence.limit, self._sizes.max_length)
                self._arrivals += 1
                self._sequences[request.id] = sequence
                if self._speculation is not None:
                    self._speculation.begin(sequence)
                self._scheduler.waiting.append(sequence)

    @overload
    def results(self, *, deadline_s: float) -> Iterator[Completion]: ...

    @overload
    def results(self, *, deadline_s: float, tick_s: float) -> Iterator[Completion | None]: ...

    def results(self, *, deadline_s: float, tick_s: float | None = None) -> Iterator[Completion | None]:
        """Yields sequences as they finish, until none is left, and None every `tick_s`. Works in the thread that
        iterates. Waits only while the engine is paused or asleep, for `resume`, `wake` or `cancel` from another thread,
        and at most `deadline_s`."""
        last = ticked = time.monotonic()
        while True:
            idle = None
            with self._lock:
                taken = self._lock.taken
                self._check_open()
                if self._done:
                    completion = self._done.popleft()
                elif not self._sequences:
                    return
                else:
                    completion = None
                    idle = self._why_idle()
                    if idle is None:
                        self._advance()
                        mark_progress()
            if completion is not None:
                yield completion
                last = time.monotonic()
            elif idle is None:
                last = time.monotonic()
                if tick_s is not None and last - ticked >= tick_s:
                    yield None
                    ticked = time.monotonic()
            else:
                left = last + deadline_s - time.monotonic()
                if left <= 0:
                    raise RolloutError(
                        f"the engine {idle}, and has been so for {deadline_s:g} s with {len(self._sequences)} answers "
                        "under way. Another thread must end that, or cancel them."
                    )
                self._lock.wait_for_another(taken + 1, timeout_s=left)  # this one is counted too

    def cancel(self, ids: Iterable[TrajectoryId]) -> None:
        """Ends these sequences with the tokens sampled so far."""
        with self._lock:
            self._take_in(lag=0)
            ending = [self._sequences[id] for id in dict.fromkeys(ids) if id in self._sequences]
            self._scheduler.cancel([sequence for sequence in ending if sequence.row < 0])
            for sequence in ending:
                if sequence.row >= 0:
                    self._distrust(sequence.row)
                    self._scheduler.end(sequence.row)
                self._finish(sequence.completion("cancelled"))

    def pause(self) -> None:
        """Samples no more tokens until `resume`."""
        with self._lock:
            self._paused = True

    def resume(self) -> None:
        """Continues after `pause`."""
        with self._lock:
            self._paused = False

    # Weights

    @property
    def version(self) -> int:
        """Version of the weights that sample now."""
        return self._version

    def install(self, version: WeightVersion, delivery: Delivery | None, *, in_flight: InFlight = "recompute") -> None:
        """Takes weights of `version` between two steps; see the protocol."""
        with self._lock:
            self._check_open()
            if self._asleep:
                raise RolloutError("the engine is asleep, so weights cannot be installed. Wake it first.")
            if in_flight not in ("recompute", "keep"):
                raise RolloutError(f"in_flight is {in_flight!r}; answers under way are `recompute`d, or `keep` theirs.")
            self._take_in(lag=0)
            if in_flight == "recompute":
                self._preempt_all()
            self._forget_cache(version, in_flight)
            try:
                self._weights.take(version, delivery)
                self._make_copies()
            except BaseException as error:
                self._refusal = str(error) if isinstance(error, WeightMismatchError) else "the last install failed"
                raise
            self._version, self._refusal = version.number, None

    def check_frozen(self, version: WeightVersion) -> None:
        """Whether the frozen weights (the base of an adapter) match `version`."""
        with self._lock:
            self._check_open()
            self._weights.check_frozen(version)

    def adopt(self, version: WeightVersion) -> None:
        """Takes the version number of weights that changed in place in these tensors. There is no other copy to compare
        with. The cache of running sequences is recomputed, as in `install`."""
        with self._lock:
            self._check_open()
            self._take_in(lag=0)
            self._preempt_all()
            self._forget_cache(version, "recompute")
            self._weights.check(version)
            self._make_copies()
            self._version, self._refusal = version.number, None

    def _forget_cache(self, version: WeightVersion, in_flight: InFlight) -> None:
        self._block_manager.forget(version.number)
        if in_flight == "recompute":
            self._oldest_cache = self._block_manager.age

    def _make_copies(self) -> None:
        """Computes what follows from the weights: those with the adapter merged, and those in fp8."""
        if self._asleep:
            return
        if self._merged is not None:
            self._merged.refill()
        if self._fp8 is not None:
            self._fp8.copy_weights()

    # Memory

    def sleep(self) -> MemoryChange:
        """Frees the cache, and the full copy of the weights if there is one."""
        with self._lock:
            self._check_open()
            if self._asleep:
                return MemoryChange(measured_bytes=0, accounted_bytes=0)
            self._take_in(lag=0)
            self._preempt_all()
            self._block_manager.forget()
            change = self._memory.release()
            self._asleep = True
            return change

    def wake(self) -> MemoryChange:
        """Takes the memory again."""
        with self._lock:
            self._check_open()
            if not self._asleep:
                return MemoryChange(measured_bytes=0, accounted_bytes=0)
            change, moved = self._memory.restore()
            if self._copy is not None:
                self._refusal = "its copy of the weights was given up while it slept, and none has been installed since"
            if moved:
                self._runner.forget_addresses()
            self._asleep = False
            if self._copy is None and self._fp8 is not None:
                self._make_copies()
            return change

    # State

    @property
    def capacity(self) -> Capacity:
        """What the engine can hold."""
        return Capacity(
            vocab_size=self._model.vocab_size,
            max_length=self._sizes.max_length,
            max_running=self._sizes.max_running,
            cache_tokens=self._sizes.cache_tokens,
            cache_bytes=self._memory.cache_bytes,
        )

    def load(self) -> Load:
        """What the engine is doing."""
        block = self._sizes.block_size
        return Load(
            waiting=len(self._scheduler.waiting),
            running=self._scheduler.num_running,
            cache_tokens=self._sizes.cache_tokens,
            cache_tokens_used=self._block_manager.num_held * block,
            cache_tokens_kept=self._block_manager.num_kept * block,
            finished=self._finished,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            reused_tokens=self._reused,
            preemptions=self._scheduler.preemptions,
            steps=self._steps,
            lane_steps=self._lane_steps,
            prefill_s=self._prefill_s,
            proposed_tokens=0 if self._speculation is None else self._speculation.num_proposed,
            accepted_tokens=0 if self._speculation is None else self._speculation.num_accepted,
        )

    def partial_answers(self, ids: Iterable[TrajectoryId]) -> dict[TrajectoryId, PartialAnswer]:
        """What has been sampled for these requests so far."""
        with self._lock:
            running = [self._sequences[id] for id in ids if id in self._sequences]
            return {sequence.id: self._rows.partial_answer(sequence) for sequence in running if sequence.row >= 0}

    @torch.inference_mode()
    def score(self, tokens_T: Tokens) -> TokenScores:
        """Log-probs of these tokens under the weights that sample now, by a packed forward pass."""
        with self._lock:
            self._check_open()
            idle = self._why_idle()
            if idle is not None:
                raise RolloutError(f"the engine {idle}, so it scores nothing.")
            if self._group is not None:
                raise RolloutError("an engine over several devices does not score given tokens. Use one device.")
            if len(tokens_T) > self._sizes.max_length:
                raise RolloutError(f"{len(tokens_T)} tokens are more than the context of {self._sizes.max_length}.")
            if self._merged is not None:
                self._merged.fill()
            return score_tokens(self._model, self._device, tokens_T)

    def close(self) -> None:
        """Ends the engine. The caller keeps the model."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._sequences.clear()
            self._launched.clear()
            self._runner.close()
            self._memory.close()
            if self._merged is not None:
                self._merged.close()
            if self._fp8 is not None:
                self._fp8.drop_copies()
            if self._group is not None:
                self._group.close()

    # One step

    @torch.inference_mode()
    def _advance(self) -> None:
        """Launches the next step and processes the samples of earlier ones. If it fails, all sequences restart from the
        tokens that the host has seen, so that a caller can fix the cause and continue."""
        if self._model.training:
            self._model.eval()
        if self._merged is not None:
            self._merged.fill()  # after a sleep with the same weights
        began_s = time.monotonic()
        self._block_manager.check_version(self._version)
        if self._speculation is not None and self._speculation.begin_step(self._scheduler.num_running):
            self._take_in(lag=0)  # what comes next is proposed from what came before
        try:
            plan = self._scheduler.plan()
            while isinstance(plan, Drain):
                self._take_in(lag=0)
                plan = self._scheduler.plan()
            if plan is None:
                # What was launched may have ended the last sequence.
                assert self._launched or not self._sequences, "answers are under way and none can be advanced"
                self._take_in(lag=0)
                return
            self._rows.check_caches(self._oldest_cache)
            self._note(plan)
            places = plan.places(self._rows) if self._experts is not None else None
            self._launched.append(_Launched(plan, self._version, self._runner.run(plan), places))
            self._take_in(lag=self._runner.lag)
            self._steps += 1
            self._lane_steps += int(plan.is_first_B.sum())
            self._prefill_s += time.monotonic() - began_s if plan.chunks or plan.admitted else 0.0
        except BaseException:
            self._launched.clear()
            self._scheduler.restart(self._sequences.values())
            raise

    def _note(self, plan: StepPlan) -> None:
        self._prefilled += sum(chunk.stop - chunk.start for chunk in plan.chunks)
        for row in plan.admitted:
            sequence = self._rows.sequences[row]
            assert sequence is not None
            assert sequence.block_table is not None
            sampling = sequence.request.sampling
            self._sampling.temperature_R[row] = sampling.temperature
            self._sampling.key_R[row] = signed(stream_key(sequence.request.seed, sequence.id))
            self._sampling.processed_R[row] = sampling.changes_the_policy
            self._sampling.wants_history_R[row] = sampling.repetition_penalty != 1.0
            self._reused += sequence.block_table.reused
            self._prefilled += len(sequence.tokens) - sequence.block_table.reused == 1  # fed beside the sequences

    def _take_in(self, lag: int) -> None:
        """Processes the results of launched steps, all but the newest `lag`."""
        while len(self._launched) > lag:
            self._take_in_one(self._launched.popleft())

    def _take_in_one(self, launched: _Launched) -> None:
        plan, table = launched.plan, self._rows
        sampled = launched.result.read()
        if self._experts is not None and launched.places is not None and sampled.experts_TLK is not None:
            self._experts.apply(plan.moves, plan.copies, launched.places, sampled.experts_TLK)
        # A row that has ended since then sampled one token too many, which does not count.
        sequences = [table.sequences[chunk.row] for chunk in plan.verified]
        broken = self._reject_broken(plan, sampled)
        num_accepted = np.zeros(table.num_rows, np.int64)
        for number, at_B in enumerate(rounds(plan.proposed_B, sampled.tokens_B)):
            rows_B = plan.sample_rows[at_B]
            counts_B = (table.epoch_R[rows_B] == plan.sample_epochs[at_B]) & ~np.isin(rows_B, broken)
            if number:
                table.accept(rows_B[counts_B])
                num_accepted[rows_B[counts_B]] += 1
            at_B = at_B[counts_B]
            self._append(plan.sample_rows[at_B], sampled.tokens_B[at_B], sampled.logprobs_B[at_B], launched.version)
        for sequence, chunk in zip(sequences, plan.verified, strict=True):
            assert self._speculation is not None
            assert sequence is not None
            accepted = int(num_accepted[chunk.row])
            self._speculation.note(sequence.id, proposed=chunk.samples - 1, accepted=accepted)
            if chunk.row in broken:
                self._speculation.stop(sequence.id)
                self._scheduler.preempt(chunk.row)

    def _reject_broken(self, plan: StepPlan, sampled: StepSamples) -> list[int]:
        """Rows whose logits are not numbers, with proposals among what was fed. Keys that are NaN are not hidden by a
        mask: not from the token before them, and not from later steps. So nothing of this step counts, the row's cache
        is computed again, and the sequence gets no more proposals."""
        verified_B = np.isin(plan.sample_rows, [chunk.row for chunk in plan.verified])
        rows: list[int] = np.unique(plan.sample_rows[verified_B & ~np.isfinite(sampled.logprobs_B)]).tolist()
        for row in rows:
            self._disown(row)
        return rows

    def _append(self, rows_B: Rows, tokens_B: Tokens, logprobs_B: NDArray[np.float32], version: int) -> None:
        """Appends one token to each of these sequences, and ends those that are complete."""
        table, all_B = self._rows, rows_B
        sound_B = np.isfinite(logprobs_B)
        rows_B = rows_B[sound_B]
        table.append(rows_B, tokens_B[sound_B], logprobs_B[sound_B], version)
        self._generated += len(rows_B)
        for row in all_B[~sound_B].tolist():
            self._end_broken(row)
        stopped_B = table.at_a_stop(rows_B)
        full_B = table.known_R[rows_B] >= table.limit_R[rows_B]
        for row in rows_B[stopped_B].tolist():
            sequence = self._scheduler.end(row)
            self._finish(sequence.completion("stop", stop=int(sequence.tokens[-1])))
        self._end_at_strings(rows_B[~stopped_B])
        for row in rows_B[full_B & ~stopped_B].tolist():
            if table.sequences[row] is not None:
                self._finish(self._scheduler.end(row).completion("length"))

    def _end_broken(self, row: int) -> None:
        self._disown(row)
        sequence = self._scheduler.end(row, keep=False)
        self._finish(
            sequence.completion(
                "error",
                error=f"after {len(sequence.tokens)} tokens the logits were not numbers, or what restricts sampling "
                "left nothing to sample. The weights may have diverged (look at the learner's loss), or allowed_tokens "
                "and logit_bias forbid every token.",
            )
        )

    def _disown(self, row: int) -> None:
        """Invalidates a row's blocks with NaN: nothing may read them, not even with weight zero."""
        sequence = self._rows.sequences[row]
        assert sequence is not None
        assert sequence.block_table is not None
        self._cache.clear(self._block_manager.disown(sequence.block_table))

    def _distrust(self, row: int) -> None:
        """Invalidates a row that has sampled nothing yet: it is unknown whether its blocks hold NaN."""
        if self._device.type == "cpu" and self._rows.known_R[row] == self._rows.admitted_R[row]:
            self._disown(row)

    def _end_at_strings(self, rows_B: Rows) -> None:
        table = self._rows
        may_end_B = table.has_strings_R[rows_B] & (table.known_R[rows_B] >= table.earliest_R[rows_B])
        for row in rows_B[may_end_B].tolist():
            sequence = table.sequences[row]
            assert sequence is not None
            assert self._decode is not None
            sampled = table.tokens_RL[row, table.prompt_R[row] : table.known_R[row]]
            try:
                stop_string = completed_string(sampled, sequence.request.sampling.stop_strings, self._decode)
            except Exception as error:  # user-supplied tokenizer
                broken = self._scheduler.end(row)
                why = f"the tokenizer cannot decode the answer to look for stop strings ({error!r})."
                self._finish(broken.completion("error", error=why))
                continue
            if stop_string is not None:
                self._finish(self._scheduler.end(row).completion("stop", stop=stop_string))

    def _finish(self, completion: Completion) -> None:
        self._sequences.pop(completion.id, None)
        if self._speculation is not None:
            self._speculation.end(completion.id, completion.tokens_L)
        self._done.append(completion)
        self._finished += 1

    def _preempt_all(self) -> None:
        for row in self._rows.active.tolist():
            self._distrust(row)
            self._scheduler.preempt(row)

    # Validation

    def _problem(self, request: Request) -> str | None:
        problem = request.problem(vocab_size=self._model.vocab_size, max_length=self._sizes.max_length)
        if problem is not None:
            return problem
        if request.sampling.stop_strings and self._decode is None:
            return "stop_strings need a tokenizer, and this engine was built without one. Use stop_tokens."
        length = min(len(request.prompt) + request.sampling.max_new_tokens, self._sizes.max_length)
        needed = self._block_manager.blocks_for(length)
        if needed > self._sizes.num_blocks:
            return (
                f"prompt and answer may take {length} tokens and the whole cache has room for "
                f"{self._sizes.cache_tokens}. Lower max_new_tokens, or raise rollout.memory_gib."
            )
        return None

    def _why_idle(self) -> str | None:
        if self._refusal is not None:
            raise WeightMismatchError(f"the engine does not generate: {self._refusal}")
        if self._asleep:
            return "is asleep"
        return "is paused" if self._paused else None

    def _check_open(self) -> None:
        if self._closed:
            raise RolloutError("the engine is closed.")
        if self._group is not None:
            self._group.check()


def _speculation(section: EngineSection, sizes: Sizes, device: torch.device) -> Speculation | None:
    if not section.speculation.tokens:
        return None
    is_cuda = device.type == "cuda"
    return Speculation(
        most=section.speculation.tokens,
        history_tokens=section.speculation.history_tokens,
        most_rows=sizes.max_running if is_cuda else max(_CPU_ROWS, sizes.max_running),
        cost=CUDA_STEP if is_cuda else CPU_STEP,
    )


def _context(model: PackedCausalLM) -> int:
    """The longest sequence whose result does not depend on the rest of its batch."""
    limits = [int(model.hf.config.get_text_config().max_position_embeddings), longest_packable(model.hf.config)]
    return min(limit for limit in limits if limit is not None)
