# SPDX-License-Identifier: Apache-2.0
"""A judge in the run: a frozen checkpoint with an engine of its own, or the policy on the generator's engine."""

# N episodes

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from podium.cluster import Computed, WorkerContext
from podium.data.control_tokens import AS_TEXT
from podium.data.tokenizer import has_tokenizer, load_tokenizer, stop_tokens
from podium.data.trajectories import TokenColumn
from podium.engine.mesh import adopt
from podium.environments.judge_endpoint import JudgeError, JudgeTally, request_fields
from podium.environments.judge_prompts import ChatMessages
from podium.environments.judges import GroupReward, Judge, judge_reward
from podium.environments.reward_results import RewardResult
from podium.environments.signatures import Sample
from podium.errors import ModelError, RolloutError
from podium.gateway.backend import EngineThread
from podium.gateway.chat import ModelService
from podium.gateway.chat_wire import chat_call
from podium.gateway.conversation import Conversations
from podium.gateway.refusal import RequestRefusedError
from podium.progress import mark_progress
from podium.recipe import RolloutSection
from podium.recipe.judges import JudgeSection
from podium.roles.carriers import GradeShard, Residency, ScoreNote
from podium.roles.generator import GeneratorRank
from podium.roles.interfaces import POLICY, JudgeModel, JudgeModelSpec
from podium.roles.learner import LearnerRank
from podium.roles.samples import sample_of
from podium.roles.texts import TextReader
from podium.rollout.checkpoints import context_of, open_engine
from podium.rollout.engine import MemoryChange, RolloutEngine

_MEMORY_GIB = 2.0
_MOST_CONTEXT = 32_768
_LOOK_S = 0.2
_STOPPED = 503  # status of a refusal because the engine answers nothing any more


class JudgeModelRank(JudgeModel):
    """One judge on one device. Between its calls an engine of its own gives up its cache, if that is on a GPU."""

    def __init__(self, context: WorkerContext, spec: JudgeModelSpec) -> None:
        transformers.logging.set_verbosity_error()
        self._spec = spec
        self._reader = TextReader(load_tokenizer(spec.policy))
        is_policy = spec.generator is not None
        if not is_policy and not has_tokenizer(spec.folder):
            raise ModelError(
                f"{spec.key}.model: {spec.model.path} has no tokenizer, and a judge reads text. Save one there with "
                "tokenizer.save_pretrained."
            )
        self._tokenizer = load_tokenizer(spec.model)
        require_template(self._tokenizer, spec.key, "the policy" if is_policy else spec.model.path)
        self._stops = stop_tokens(self._tokenizer, spec.folder)
        self._sleeps = context.device.startswith("cuda") and not is_policy
        if spec.generator is not None:
            self._engine = context.colocated_role(spec.generator, GeneratorRank).engine
        else:
            self._engine = self._open(context)
        self._rest()
        self._service: ModelService | None = None
        self._judge = Judge(spec.section, None, folder=spec.cache, make=self._asked)
        self._reward = judge_reward(self._judge)

    def score(self, shard: GradeShard) -> Computed[TokenColumn]:
        """Judges the shard's episodes, of whole groups."""
        texts = list(self._reader.read(shard.rows.read())) if len(shard.rows) else []
        samples = [sample_of(shard, row, text, tools=self._spec.tools) for row, text in enumerate(texts)]
        results: list[RewardResult] = []
        if samples:
            self._engine.wake()
            try:
                results = asyncio.run(self._results(samples))
            finally:
                self._rest()
        return Computed(done=shard.ids, note=note_of(results))

    def hold(self, residency: Residency) -> MemoryChange:
        """Changes nothing: outside of `score` its engine has no cache on a GPU already."""
        return MemoryChange(measured_bytes=0, accounted_bytes=0)

    def close(self) -> None:
        """Closes its own engine."""
        self._judge.close()
        if self._spec.generator is None:
            self._engine.close()

    def _rest(self) -> None:
        if self._sleeps:
            self._engine.sleep()

    def _open(self, context: WorkerContext) -> RolloutEngine:
        spec, section = self._spec, self._spec.section
        mesh = adopt(rank=0, world=1, device=context.device, devices=None)
        most = min(context_of(spec.model, spec.folder) or _MOST_CONTEXT, section.max_length or _MOST_CONTEXT)
        rollout = RolloutSection(memory_gib=section.memory_gib or _MEMORY_GIB)
        # CPU settings hold for the whole process, and those of the learner decide about the order of its sums.
        learner = context.colocated_roles.get(POLICY)
        cpu = learner.cpu if isinstance(learner, LearnerRank) else None
        return open_engine(
            spec.model, spec.folder, mesh, rollout, tokenizer=self._tokenizer, max_length=most, cpu=cpu
        ).engine

    async def _results(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """The results of all samples, whose requests are under way together."""
        backend = EngineThread(self._engine, owns=False)
        conversations = Conversations(self._tokenizer, rule=AS_TEXT)
        self._service = ModelService("judge", conversations, backend, stop_tokens=self._stops)
        watching = asyncio.create_task(self._watch())
        try:
            return await judged(self._reward, samples)
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            self._service = None
            await asyncio.to_thread(backend.close)

    async def _watch(self) -> None:
        """Marks progress while the engine makes some."""
        before = (0, 0)
        while True:
            load = self._engine.load()
            now = (load.generated_tokens, load.prefilled_tokens)
            if now != before:
                mark_progress()
            before = now
            await asyncio.sleep(_LOOK_S)

    def _asked(self) -> LocalModel:
        assert self._service is not None, "a judge is asked while it scores"
        name = f"{self._spec.model.path} version {self._engine.version}" if self._spec.generator else str(
            self._spec.folder
        )  # fmt: skip
        return LocalModel(self._spec.section, self._service, identity=name, seed=self._spec.seed)


class LocalModel:
    """Asks a model of the run. Seeds depend on the run's seed and the request alone, so that equal requests to equal
    weights have equal answers, whatever else is judged beside them."""

    def __init__(self, section: JudgeSection, service: ModelService, *, identity: str, seed: int) -> None:
        self._section, self._service, self._seed = section, service, seed
        self.identity = identity
        self.asking: dict[str, asyncio.Lock] = {}

    def body(self, messages: ChatMessages) -> dict[str, Any]:
        """The request's content."""
        return {"model": self._section.model, "messages": messages, **request_fields(self._section)}

    async def ask(self, body: Mapping[str, Any], read: Callable[[str], Any], tally: JudgeTally) -> str:
        """The judge's answer. One that `read` refuses is asked for once more, unless it would be the same again."""
        text = await self._answer(body, 0, tally)
        try:
            read(text)
        except Exception:
            if body.get("temperature") == 0:
                return text
            text = await self._answer(body, 1, tally)
        return text

    def close(self) -> None:
        """Its engine goes on."""

    async def _answer(self, body: Mapping[str, Any], attempt: int, tally: JudgeTally) -> str:
        content = json.dumps([self._seed, attempt, body], sort_keys=True)
        seed = int.from_bytes(hashlib.sha256(content.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 2
        tally.requests += 1
        tally.retries += attempt
        try:
            answer = await self._service.chat(chat_call({**body, "seed": seed}))
        except RequestRefusedError as error:
            raise self._failure(error) from error
        tally.tokens_in += answer.prompt_tokens
        tally.tokens_out += answer.completion_tokens
        (choice,) = answer.choices
        if choice.completion.finish == "length":
            raise JudgeError(
                f"the judge's answer was cut off after {choice.completion.num_tokens} tokens. Raise "
                "judge.request.max_tokens, or judge.max_length"
            )
        return str(choice.message.get("content") or "")

    def _failure(self, error: RequestRefusedError) -> Exception:
        if error.status == _STOPPED:
            return RolloutError(f"the judge's engine has ended: {error}")
        if error.code == "context_length_exceeded":
            return JudgeError(
                f"the request is longer than the {self._service.backend.capacity.max_length} tokens that the judge "
                "reads. Shorten the rubric or the answers, or raise its max_length"
            )
        return JudgeError(f"the judge cannot be asked: {error}")


async def judged(reward: Any, samples: Sequence[Sample]) -> list[RewardResult]:
    """The results of all samples, in their order. Groups are compared as one."""
    if not isinstance(reward, GroupReward):
        return list(await asyncio.gather(*(reward(sample) for sample in samples)))
    groups: dict[int, list[int]] = {}
    for row, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(row)
    by_group = await asyncio.gather(*(reward([samples[row] for row in rows]) for rows in groups.values()))
    by_row = {
        row: result
        for rows, results in zip(groups.values(), by_group, strict=True)
        for row, result in zip(rows, results, strict=True)
    }
    return [by_row[row] for row in range(len(samples))]


def note_of(results: Sequence[RewardResult]) -> ScoreNote:
    """Results as columns."""
    names = sorted({name for result in results for name in result.extras or {}})
    return ScoreNote(
        values_N=np.array([np.nan if result.value is None else result.value for result in results], np.float64),
        errors={row: str(result.failure) for row, result in enumerate(results) if result.value is None},
        extras={
            name: np.array([(result.extras or {}).get(name, np.nan) for result in results], np.float64)
            for name in names
        },
    )


def require_template(tokenizer: Any, key: str, model: str | Path) -> None:
    """Raises an error if a judge has no chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError(
            f"{key}.model: {model} has no chat template, and a judge is asked in chats. Give a model that follows "
            "instructions."
        )
