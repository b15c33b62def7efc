# SPDX-License-Identifier: Apache-2.0
"""The generator: an engine that answers prompts, with the learner's weights or its own copy."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence

import torch
import transformers

from podium.cluster import Computed, Metric, WorkerContext
from podium.data.control_tokens import ControlRule
from podium.data.prompts import PromptTokenizer
from podium.data.tokenizer import answer_text, load_tokenizer, parted_stops, stop_tokens
from podium.data.trajectories import TrajectoryBlock, TrajectoryId
from podium.engine.mesh import adopt
from podium.engine.sharding import compute_dtype
from podium.errors import InvariantError
from podium.models.causal_lm import load_config
from podium.observe.causes import FOR_PROMPTS, FOR_REQUESTS
from podium.progress import mark_progress
from podium.roles.admissions import Admissions
from podium.roles.blocks import block_of, sampled_so_far
from podium.roles.carriers import PromptShard, Residency, SamplingPlan
from podium.roles.engine_summaries import EngineSummaries
from podium.roles.generator_part import GeneratorPartRank
from podium.roles.interfaces import Generator, GeneratorSpec, GeneratorUsage
from podium.roles.learner import LearnerRank
from podium.roles.mailboxes import Mailboxes
from podium.rollout.checkpoints import merged_copy, open_engine
from podium.rollout.engine import InFlight, Load, MemoryChange, RolloutEngine, speculation_counts
from podium.rollout.native.engine import NativeEngine
from podium.rollout.native.speculation import require_speculation
from podium.rollout.requests import Completion, Request, Sampling, given_back
from podium.weights.transports import received
from podium.weights.versions import WeightVersion
from podium.weights.weight_transfers import WeightTransfer
from podium.weights.whole_copy import WholeCopy

_IDLE_S = 0.05
_RANK_DIED = 70  # exit code
# Episodes are sent as they end, but not more often than this: each block costs the controller a message.
_BLOCK_EVERY_S = 0.05


def check_cache_mode(in_flight: InFlight, on_new_weights: str) -> None:
    """Raises an InvariantError if running sequences would keep a cache that the recipe does not let them keep."""
    if in_flight == "keep" and on_new_weights != "keep":
        raise InvariantError(
            f"weights are to be installed under running sequences that keep their cache, and rollout.on_new_weights is "
            f"{on_new_weights} (invariant: explicit cache). This is a defect of Podium: please report it with the run "
            "folder. What was committed before is as it should be."
        )


class GeneratorRank(Generator):
    """One engine, on one device or on several."""

    def __init__(self, context: WorkerContext, spec: GeneratorSpec) -> None:
        transformers.logging.set_verbosity_error()
        self._context, self._spec = context, spec
        self._tokenizer = load_tokenizer(spec.model)
        self._prompts = PromptTokenizer(self._tokenizer, ControlRule.of(spec.model))
        self._stops = stop_tokens(self._tokenizer, spec.folder)
        self._copy: WholeCopy | None = None
        self._learner: LearnerRank | None = None
        self._part: GeneratorPartRank | None = None
        self._engine: RolloutEngine = self._open()
        self._peak_tokens = 0
        self._admissions, self._mailboxes = Admissions(), Mailboxes()
        self._summaries = EngineSummaries(context, lambda: self._engine.load())
        self._install_s = 0.0

    def admit(self, shard: PromptShard, plan: SamplingPlan) -> None:
        """Submits the prompts to the engine, which goes on meanwhile."""
        requests = self._requests(shard, plan)
        self._admissions.add([request.id for request in requests])
        try:
            self._engine.submit(requests)
        except BaseException:
            self._admissions.end([request.id for request in requests])
            raise

    def finish_stream(self, abandon: bool) -> None:
        """Ends `stream` when all admitted prompts are answered, or cancelled."""
        self._admissions.finish()
        if abandon:
            self._engine.cancel(self._admissions.open_ids)

    def give_back(self, ids: tuple[TrajectoryId, ...]) -> None:
        """Cancels them."""
        self._engine.cancel(ids)

    def stream(self, plan: SamplingPlan) -> Iterator[Computed[TrajectoryBlock]]:
        """Answers admitted prompts and yields episodes as they end, several at a time."""
        before, began = self._engine.load(), time.perf_counter()
        self._peak_tokens = 0
        self._summaries.begin_stream()
        ready: list[Completion] = []
        try:
            while self._has_work(self._admissions, FOR_PROMPTS):
                mark_progress()
                sent = time.perf_counter()
                for answer in self._engine.results(deadline_s=self._spec.deadline_s, tick_s=_BLOCK_EVERY_S):
                    self._summaries.look()
                    if answer is not None:
                        self._peak_tokens = max(self._peak_tokens, self._engine.load().cache_tokens_used)
                        self._admissions.end([answer.id])
                        ready.append(answer)
                    if ready and time.perf_counter() - sent > _BLOCK_EVERY_S and not self._admissions.is_over:
                        yield self._computed(ready, ())
                        ready, sent = [], time.perf_counter()
                if ready and not self._admissions.is_over:
                    yield self._computed(ready, ())
                    ready = []
            self._summaries.end()
            yield self._computed(ready, self._metrics(before, time.perf_counter() - began))
        finally:
            self._admissions.reset()

    @property
    def engine(self) -> RolloutEngine:
        """For roles of the same worker, while no stream runs."""
        return self._engine

    def lanes(self) -> int:
        """Number of sequences that the engine generates at the same time."""
        return self._engine.capacity.max_running

    def serve(self) -> tuple[Metric, ...]:
        """Answers requests of episode runners until `stop_serving` is called."""
        before, began = self._engine.load(), time.perf_counter()
        self._peak_tokens = 0
        self._summaries.begin_stream()
        try:
            while self._has_work(self._mailboxes, FOR_REQUESTS):
                mark_progress()
                for answer in self._engine.results(deadline_s=self._spec.deadline_s, tick_s=_BLOCK_EVERY_S):
                    self._summaries.look()
                    if answer is not None:
                        self._peak_tokens = max(self._peak_tokens, self._engine.load().cache_tokens_used)
                        self._mailboxes.deliver(answer)
            self._summaries.end()
        except BaseException as error:
            self._mailboxes.fail(error)
            raise
        return self._metrics(before, time.perf_counter() - began)

    def _has_work(self, work: Admissions | Mailboxes, what: str) -> bool:
        """Waits for work, with a span if there is none now. False: none will come."""
        if work.is_idle:
            self._summaries.end()
            with self._context.span(what):
                while work.is_idle:
                    mark_progress()
                    work.wait_for_work(_IDLE_S)
        has_work = work.wait_for_work(0.0)
        if has_work and not self._summaries.is_open:
            self._summaries.begin()
        return has_work

    def begin_serving(self, keeps_answers: bool = False) -> None:
        """Accepts requests of runners from now on."""
        self._mailboxes.open(keeps_answers)

    def stop_serving(self, give_back: bool = False) -> None:
        """Ends `serve`."""
        self._mailboxes.close()
        if give_back:
            self._engine.cancel(self._mailboxes.open_ids)

    def exchange(self, runner: str, requests: tuple[Request, ...], wait_s: float) -> list[Completion]:
        """Submits a runner's new requests and returns its finished ones."""
        if requests:
            ids = [request.id for request in requests]
            if not self._mailboxes.expect(runner, ids):  # before an answer can arrive
                return [given_back(request) for request in requests]
            try:
                self._engine.submit(requests)
            except BaseException:
                self._mailboxes.withdraw(ids)
                raise
        return self._mailboxes.fetch(runner, wait_s)

    def forget(self, runner: str) -> None:
        """Cancels the requests of a dead runner."""
        self._engine.cancel(self._mailboxes.of(runner))

    def install(self, transfer: WeightTransfer, in_flight: InFlight = "recompute") -> int:
        """Receives and installs weights; returns the bytes received."""
        check_cache_mode(in_flight, self._spec.rollout.on_new_weights)
        device = torch.device(self._context.device)
        delivery, began = received(transfer, device=device, link=self._context.transfer), time.perf_counter()
        with self._context.span("installing weights"):  # streams go on meanwhile, and wait for it
            self._engine.install(transfer.version, delivery, in_flight=in_flight)
        self._install_s += time.perf_counter() - began
        return delivery.moved_bytes if delivery is not None else 0

    def check_base(self, version: WeightVersion) -> None:
        """Raises unless the engine's frozen weights are the learner's."""
        assert isinstance(self._engine, NativeEngine)
        self._engine.check_frozen(version)

    def share(self, number: int) -> str:
        """Takes the weights of the colocated learner as version `number`; returns their fingerprint."""
        assert self._learner is not None
        assert isinstance(self._engine, NativeEngine)
        self._engine.wake()
        if self._part is not None:  # all parts have been refilled
            version = self._part.version(number)
            self._engine.install(version, None)
            return version.fingerprint
        if self._copy is not None:
            self._copy.refill()
        version = self._learner.weights.describe(number)
        if self._copy is not None:
            self._engine.install(version, None)
        else:
            self._engine.adopt(version)
        return version.fingerprint

    def hold(self, residency: Residency) -> MemoryChange:
        """Puts the engine to sleep, or wakes it."""
        if residency == "offloaded":
            return self._engine.sleep()
        return self._engine.wake()

    def usage(self) -> GeneratorUsage:
        """The state of the engine, and what it waited for."""
        idle_s = self._admissions.idle_s + self._mailboxes.idle_s
        return GeneratorUsage(
            load=self._engine.load(), idle_s=idle_s, install_s=self._install_s, version=self._engine.version
        )

    def abandon(self) -> None:
        """Ends `stream` and `serve`."""
        self.finish_stream(abandon=True)
        self.stop_serving(give_back=True)

    def reset(self) -> None:
        """Gives up what the engine has left, and forgets its answers."""
        self._engine.cancel((*self._admissions.open_ids, *self._mailboxes.open_ids))
        for _ in self._engine.results(deadline_s=self._spec.deadline_s):
            pass
        self._admissions.reset()
        self._mailboxes.reset()

    def close(self) -> None:
        """Closes the engine."""
        self._engine.close()

    def _open(self) -> RolloutEngine:
        spec, context = self._spec, self._context
        section = spec.rollout.model_copy(update={"max_length": spec.max_length})
        if spec.learner is None:
            mesh = adopt(rank=0, world=1, device=context.device, devices=None)
            opened = open_engine(
                spec.model, spec.folder, mesh, section, tokenizer=self._tokenizer, max_length=spec.max_length,
                cpu=spec.cpu, records_experts=spec.records_experts, tensor=spec.tensor, timeout_s=spec.deadline_s,
                on_death=_end_with_a_rank, merges_adapter=spec.rollout.merges_adapter,
            )  # fmt: skip
            return opened.engine
        self._learner = learner = context.colocated_role(spec.learner, LearnerRank)
        mesh, model, group = learner.mesh, learner.engine.language_model, None
        if spec.parts is not None:
            self._part = context.colocated_role(spec.parts, GeneratorPartRank)
            self._copy, group = self._part.copy, self._part.leader
            group.on_death = _end_with_a_rank
            model = self._copy.model
        elif mesh.is_sharded:
            config = load_config(spec.folder, trust_remote_code=spec.model.trust_remote_code)
            dtype = compute_dtype(spec.model, mesh.device)
            self._copy = WholeCopy(learner.weights, spec.model, config, device=mesh.device, dtype=dtype)
            self._copy.refill()
            model = self._copy.model
        require_speculation(mesh.device.type, section.speculation.tokens)
        merged = merged_copy(model, spec.model, spec.folder, mesh.device) if spec.rollout.merges_adapter else None
        with torch.no_grad():
            return NativeEngine(
                model, mesh.device, section, decode=self._decode, copy=self._copy,
                records_experts=spec.records_experts, group=group, merged=merged,
            )  # fmt: skip

    def _requests(self, shard: PromptShard, plan: SamplingPlan) -> list[Request]:
        stops, strings = parted_stops(self._tokenizer, plan.stop)
        sampling = Sampling(
            max_new_tokens=plan.max_new_tokens,
            temperature=plan.temperature,
            top_p=plan.top_p,
            top_k=plan.top_k,
            min_p=plan.min_p,
            stop_tokens=self._stops | stops,
            stop_strings=strings,
        )
        requests, begun = [], {} if shard.begun is None else sampled_so_far(shard.begun.read())
        for prompt in shard.prompts:
            tokens = prompt.task.encode(self._prompts)
            for sample in shard.samples:
                id = TrajectoryId(prompt.prompt_index, sample, 0, shard.attempt)
                so_far = begun.get((prompt.prompt_index, sample))
                requests.append(Request(id=id, prompt=tokens, sampling=sampling, seed=plan.seed, begun=so_far))
        return requests

    def _computed(self, answers: Sequence[Completion], metrics: tuple[Metric, ...]) -> Computed[TrajectoryBlock]:
        block, note = block_of(answers)
        return Computed(rows=block, note=note, metrics=metrics)

    def _metrics(self, before: Load, seconds: float) -> tuple[Metric, ...]:
        after = self._engine.load()
        sampled = after.generated_tokens - before.generated_tokens
        held = self._engine.capacity.cache_tokens
        speculated = speculation_counts(before, after)
        return (
            Metric(name="generated_tokens", value=float(sampled), reduction="sum"),
            Metric(
                name="prefilled_tokens", value=float(after.prefilled_tokens - before.prefilled_tokens), reduction="sum"
            ),
            Metric(name="reused_tokens", value=float(after.reused_tokens - before.reused_tokens), reduction="sum"),
            Metric(name="preemptions", value=float(after.preemptions - before.preemptions), reduction="sum"),
            *(Metric(name=name, value=count, reduction="sum") for name, count in speculated.items()),
            Metric(name="cache_used", value=self._peak_tokens / max(1, held), reduction="max"),
            Metric(name="seconds", value=seconds, reduction="max"),
        )

    def _decode(self, tokens: Sequence[int]) -> str:
        return answer_text(self._tokenizer, tokens)


def _end_with_a_rank(reason: str) -> None:
    """Ends this process: without one of its devices a generator is dead, and the controller replaces it."""
    print(f"the generator ends: {reason}", file=sys.stderr, flush=True)
    os._exit(_RANK_DIED)
