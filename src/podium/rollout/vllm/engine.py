# SPDX-License-Identifier: Apache-2.0
"""vLLM as a rollout engine."""

# L new tokens of one answer

from __future__ import annotations

import gc
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch

from podium.data.routed_experts import Experts
from podium.data.trajectories import TrajectoryId
from podium.errors import RolloutError, WeightMismatchError
from podium.progress import mark_progress
from podium.rollout.engine import Capacity, InFlight, Load, MemoryChange
from podium.rollout.fair_lock import FairLock
from podium.rollout.requests import Completion, Finish, Request, failed
from podium.rollout.vllm import compat
from podium.rollout.vllm.installing import load_weights
from podium.rollout.vllm.sampling import limits, sampling_params
from podium.rollout.vllm.settings import VllmSettings, has_tokenizer, make_engine

if TYPE_CHECKING:
    from podium.weights.transports import Delivery
    from podium.weights.versions import WeightVersion


@dataclass(slots=True, eq=False)
class _RunningSequence:
    """One running request, and its sampled tokens."""

    request: Request
    handle: str  # its name inside vLLM
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reused_tokens: int = 0

    def completion(self, finish: Finish, *, stop: int | str | None = None, error: str | None = None) -> Completion:
        return Completion(
            id=self.request.id,
            prompt=self.request.prompt,
            tokens_L=np.array(self.tokens, np.int32),
            logprobs_L=np.array(self.logprobs, np.float32),
            versions_L=np.array(self.versions, np.int32),
            finish=finish,
            stop=stop,
            error=error,
            reused_tokens=self.reused_tokens,
        )


class VllmEngine:
    """The protocol of `podium.rollout.engine.RolloutEngine` on vLLM's engine core, stepped by `results`.

    Every method and every step holds a `FairLock`, so each method takes effect between two steps, from any thread. Only
    one engine can exist in a process at a time, because vLLM's process groups are global."""

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._has_tokenizer = has_tokenizer(settings.folder)
        self._lock = FairLock()
        self._answers: dict[TrajectoryId, _RunningSequence] = {}
        self._by_handle: dict[str, _RunningSequence] = {}
        self._ready: deque[Completion] = deque()
        self._handles = itertools.count()
        self._version = settings.version
        self._paused = self._asleep = self._closed = False
        self._cache_is_soiled = False  # with NaN
        self._refusal: str | None = None  # why the weights in place must not sample
        self._failure: str | None = None  # the error that broke the engine for good
        self._finished = self._generated = self._prefilled = self._reused = self._preemptions = 0
        self._steps = self._lane_steps = 0
        self._engine = make_engine(settings)
        self._capacity = self._measure()

    def submit(self, requests: Sequence[Request]) -> None:
        """Takes requests; one that cannot be served completes with an error."""
        ids = [request.id for request in requests]
        with self._lock:
            self._require_open()
            taken = sorted(each for each, times in Counter(ids).items() if times > 1 or each in self._answers)
            if taken:
                raise RolloutError(
                    f"request {taken[0]} is already under way{f' (and {len(taken) - 1} more)' if taken[1:] else ''}: "
                    "two answers of one id could not be told apart. Give a new attempt a new id; nothing was taken."
                )
            for request in requests:
                self._admit(request)

    @overload
    def results(self, *, deadline_s: float) -> Iterator[Completion]: ...

    @overload
    def results(self, *, deadline_s: float, tick_s: float) -> Iterator[Completion | None]: ...

    def results(self, *, deadline_s: float, tick_s: float | None = None) -> Iterator[Completion | None]:
        """Steps the engine. While it is paused or asleep, this waits for another caller: `resume`, `wake`, `cancel`,
        `install` and `close` unblock it."""
        progress, mark = time.monotonic(), None
        ticked = progress
        while True:
            with self._lock:
                self._require_open()
                reason = self._why_still()
                if not self._ready and not self._answers:
                    return
                if not self._ready and reason is None:
                    self._require_weights()
                    self._step()
                ready = self._ready.popleft() if self._ready else None
                if reason is None and mark != (now := self._mark()):
                    progress, mark = time.monotonic(), now
                    mark_progress()
                seen = self._lock.taken + 1  # read here, so that a caller before the wait is not missed
            if ready is not None:
                yield ready
                progress = time.monotonic()  # what the caller did meanwhile is not the engine's
            elif reason is None and tick_s is not None and time.monotonic() - ticked >= tick_s:
                yield None
                ticked = time.monotonic()
            else:
                self._wait(reason, seen, until=progress + deadline_s, deadline_s=deadline_s)

    def cancel(self, ids: Iterable[TrajectoryId]) -> None:
        """Ends requests; they complete with their tokens so far."""
        with self._lock:
            self._require_open()
            for each in ids:
                if (answer := self._answers.get(each)) is not None:
                    self._abort(answer)
                    self._end(answer, answer.completion("cancelled"))

    def pause(self) -> None:
        """Stops stepping until `resume`."""
        with self._lock:
            self._paused = True

    def resume(self) -> None:
        """Continues stepping."""
        with self._lock:
            self._paused = False

    def install(self, version: WeightVersion, delivery: Delivery | None, *, in_flight: InFlight = "recompute") -> None:
        """Loads a weight version between two steps. When this raises, nothing is generated until an install
        succeeds."""
        if delivery is None:
            raise RolloutError(
                f"version {version.number} was to be installed without a delivery, and vLLM has its own copy of the "
                "weights: nothing would have changed. Hand over the receiving end of a transport."
            )
        with self._lock:
            self._require_open()
            if self._asleep:
                raise RolloutError("weights cannot be installed while the engine sleeps: wake it first.")
            try:
                load_weights(self._engine, version, delivery, self._settings.folder)
            except BaseException as error:
                self._refusal = f"version {version.number} was not installed ({error})"
                raise
            self._version, self._refusal = version.number, None
            self._forget_cache(in_flight)

    @property
    def version(self) -> int:
        """Number of the weights in place."""
        return self._version

    def sleep(self) -> MemoryChange:
        """On a GPU vLLM frees cache and weights. On a CPU it cannot, and only clears the cache."""
        with self._lock:
            self._require_open()
            if self._asleep:
                return MemoryChange(measured_bytes=0, accounted_bytes=0)
            before = _free_bytes()
            self._engine.sleep(level=self._settings.sleep_level, mode="keep")
            self._asleep = True
            return MemoryChange(measured_bytes=_free_bytes() - before, accounted_bytes=self._sleeping_bytes())

    def wake(self) -> MemoryChange:
        """Takes the memory that `sleep` freed."""
        with self._lock:
            self._require_open()
            if not self._asleep:
                return MemoryChange(measured_bytes=0, accounted_bytes=0)
            before = _free_bytes()
            self._engine.wake_up()
            self._asleep = False
            if self._settings.sleep_level == 2 and torch.cuda.is_available():
                self._refusal = "the weights were dropped in sleep (sleep_level 2)"
            return MemoryChange(measured_bytes=before - _free_bytes(), accounted_bytes=self._sleeping_bytes())

    @property
    def capacity(self) -> Capacity:
        """Sizes that requests must fit."""
        return self._capacity

    def load(self) -> Load:
        """Requests, cache and counters, now."""
        with self._lock:
            self._require_open()
            state = compat.scheduler_state(self._engine)
            return Load(
                waiting=state.waiting,
                running=state.running,
                cache_tokens=self._capacity.cache_tokens,
                cache_tokens_used=state.cache_tokens_used,
                cache_tokens_kept=state.cache_tokens_kept,
                finished=self._finished,
                generated_tokens=self._generated,
                prefilled_tokens=self._prefilled,
                reused_tokens=self._reused,
                preemptions=self._preemptions + state.preemptions,
                steps=self._steps,
                lane_steps=self._lane_steps,
            )

    def close(self) -> None:
        """Ends the engine and frees its model. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._answers.clear()
            self._by_handle.clear()
            self._ready.clear()
            compat.shut_down(self._engine)
            del self._engine
            gc.collect()

    # Everything below runs while holding the lock.

    def _admit(self, request: Request) -> None:
        problem = self._problem(request)
        if problem is None:
            # A copy: the caller's array may be written to later.
            answer = _RunningSequence(replace(request, prompt=request.prompt.astype(np.int32)), "")
            try:
                self._start(answer)
            except ValueError as error:  # errors that only vLLM detects
                problem = f"vLLM refuses this request: {error}"
            else:
                self._answers[request.id] = answer
        if problem is not None:
            self._finished += 1
            self._ready.append(failed(request, problem))

    def _problem(self, request: Request) -> str | None:
        capacity = self._capacity
        problem = request.problem(vocab_size=capacity.vocab_size, max_length=capacity.max_length)
        if problem is not None:
            return problem
        if request.begun is not None:
            return "vLLM cannot continue an answer that another engine has begun. Use rollout.engine native."
        length = min(len(request.prompt) + request.sampling.max_new_tokens, capacity.max_length)
        if length > capacity.cache_tokens:
            return (
                f"prompt and answer take up to {length} tokens of cache, and all of it holds {capacity.cache_tokens}. "
                "Ask for fewer new tokens, or give the engine more memory."
            )
        return limits(request, has_tokenizer=self._has_tokenizer)

    def _start(self, answer: _RunningSequence) -> None:
        answer.handle = f"{next(self._handles)}"
        # The version is part of the salt, so that answers under other weights never find a cached prefix.
        prompt = compat.token_prompt(answer.request.prompt.tolist(), cache_salt=f"version {self._version}")
        params = sampling_params(answer.request, max_length=self._capacity.max_length, handle=answer.handle)
        self._engine.add_request(answer.handle, prompt, params)
        self._by_handle[answer.handle] = answer

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            self._failure = f"vLLM failed within a step ({type(error).__name__}: {error})"
            self._require_open()
        self._steps += 1
        self._lane_steps += len(outputs)
        for output in outputs:
            if (answer := self._by_handle.get(output.request_id)) is not None:
                self._advance(answer, output)
        if self._cache_is_soiled:  # before its blocks are reassigned
            self._engine.reset_prefix_cache(reset_running_requests=True)
            self._engine.collective_rpc("podium_clean_cache")
            self._cache_is_soiled = False

    def _advance(self, answer: _RunningSequence, output: Any) -> None:
        [part] = output.outputs
        sampled, logprobs = list(part.token_ids), part.logprobs.logprobs if part.token_ids else []
        if sampled and not answer.tokens:
            answer.reused_tokens = output.num_cached_tokens or 0
            self._reused += answer.reused_tokens
            self._prefilled += len(answer.request.prompt) - answer.reused_tokens
        if not all(map(math.isfinite, logprobs)):
            self._end_broken(answer, is_nan=any(map(math.isnan, logprobs)), still_inside=part.finish_reason is None)
            return
        answer.tokens += sampled
        answer.logprobs += logprobs
        answer.versions += [self._version] * len(sampled)
        self._generated += len(sampled)
        if part.finish_reason is not None:
            self._end(answer, _finished(answer, part))

    def _end_broken(self, answer: _RunningSequence, *, is_nan: bool, still_inside: bool) -> None:
        if still_inside:
            self._abort(answer)
        if is_nan:
            self._cache_is_soiled = True
            why = "the model's logits were not numbers (NaN): its weights have diverged or were damaged."
        else:
            why = "logit_bias and allowed_tokens leave nothing to sample. Allow some token."
        self._end(answer, answer.completion("error", error=f"at token {len(answer.tokens)} of the answer {why}"))

    def _abort(self, answer: _RunningSequence) -> None:
        self._preemptions += compat.num_preemptions(self._engine, answer.handle)
        self._engine.abort_request([answer.handle])

    def _end(self, answer: _RunningSequence, completion: Completion) -> None:
        del self._answers[answer.request.id], self._by_handle[answer.handle]
        self._finished += 1
        if self._settings.records_experts:
            completion = replace(completion, experts=self._take_experts(answer))
        self._ready.append(completion)

    def _take_experts(self, answer: _RunningSequence) -> Experts | None:
        found: list[list[Experts | None]]  # of each rank, and all have the same
        found = self._engine.collective_rpc("podium_take_experts", args=([answer.handle],))
        return found[0][0]

    def _forget_cache(self, in_flight: InFlight) -> None:
        if in_flight == "recompute":
            self._engine.reset_prefix_cache(reset_running_requests=True)
            return
        self._engine.reset_prefix_cache()
        # Answers that have not begun keep nothing: they start again, and find no prefix of older weights.
        for answer in [each for each in self._answers.values() if not each.tokens]:
            self._abort(answer)
            del self._by_handle[answer.handle]
            if self._settings.records_experts:
                self._take_experts(answer)
            self._start(answer)

    def _mark(self) -> tuple[int, int]:
        """Changes with every step that computes something: samples, or prefill."""
        return self._generated, compat.computed_tokens(self._engine)

    def _why_still(self) -> str | None:
        if self._asleep:
            return "asleep: call wake"
        return "paused: call resume" if self._paused else None

    def _require_open(self) -> None:
        if self._closed:
            raise RolloutError("this engine is closed and has freed its model. Make a new one.")
        if self._failure is not None:  # no install fixes that
            raise RolloutError(
                f"{self._failure}. Its state is not to be trusted any more: close this engine and make a new one."
            )

    def _require_weights(self) -> None:
        if self._refusal is not None:
            raise WeightMismatchError(
                f"the engine does not generate: {self._refusal}. Answers under way are kept; install weights that are "
                "right, then ask for results again."
            )

    def _wait(self, reason: str | None, seen: int, *, until: float, deadline_s: float) -> None:
        """Waits without holding the lock. Returns at once unless there is nothing to do."""
        left = until - time.monotonic()
        if left <= 0:
            raise RolloutError(
                f"no answer advanced for {deadline_s:g} s, and {len(self._answers)} are under way. The engine is "
                f"{reason or 'running, and vLLM schedules nothing'}."
            )
        if reason is not None:
            self._lock.wait_for_another(seen, timeout_s=left)

    def _measure(self) -> Capacity:
        cache_tokens, cache_bytes = compat.kv_cache_size(self._engine)
        return Capacity(
            vocab_size=compat.vocab_size(self._engine),
            max_length=self._settings.max_length,
            max_running=self._settings.max_running,
            cache_tokens=cache_tokens,
            cache_bytes=cache_bytes,
        )

    def _sleeping_bytes(self) -> int:
        if not torch.cuda.is_available():
            return 0
        weights: list[int] = self._engine.collective_rpc("podium_weight_bytes")
        return self._capacity.cache_bytes + sum(weights)


def _finished(answer: _RunningSequence, part: Any) -> Completion:
    match part.finish_reason:
        case "stop":
            return answer.completion("stop", stop=part.stop_reason)
        case "length":
            return answer.completion("length")
        case other:
            return answer.completion("error", error=f"vLLM ended the answer by itself ({other}).")


def _free_bytes() -> int:
    """Free bytes of the device; 0 if it does not report them."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    return int(free)
