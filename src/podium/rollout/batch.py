# SPDX-License-Identifier: Apache-2.0
"""`podium generate`: answers every prompt of a data source, into a file that the next start continues."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import torch
import transformers

from podium.data import storage
from podium.data.control_tokens import ControlRule
from podium.data.prompts import PromptRow, PromptRows
from podium.data.tokenizer import answer_text, load_tokenizer, parted_stops, stop_tokens
from podium.data.trajectories import TrajectoryId
from podium.engine.mesh import check_devices, device_kind, join
from podium.engine.sharding import compute_dtype
from podium.errors import RolloutError
from podium.models.cpu_settings import CpuSettings
from podium.recipe import ModelSection, PlacementSection
from podium.rollout.answers_file import AnswerKey, AnswerRecord, AnswersFile
from podium.rollout.checkpoints import OpenedEngine, context_of, open_engine, require_engine
from podium.rollout.engine import Load, RolloutEngine
from podium.rollout.jobs import GenerationJob, GenerationSummary
from podium.rollout.progress import Progress, Standing
from podium.rollout.requests import Completion, Request, Sampling

# Nothing else can pause the engine, so this wait never happens; a stall ends with an error instead of silence.
_DEADLINE_S = 600.0
# Requests queued in the engine, in multiples of its capacity: enough that it never runs dry.
_AHEAD = 4
_MODEL_FILES = ("config.json", "generation_config.json", "*.safetensors", "*.py")
_TOKENIZER_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*", "*.jinja",
    "spiece.model", "sentencepiece*.model", "tekken.json", "*.tiktoken",
)  # fmt: skip


def generate_file(job: GenerationJob, rows: PromptRows, *, stream: TextIO | None) -> GenerationSummary:
    """Runs the job, or the rest of it. `stream`: where progress is shown."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    placement = PlacementSection(device=job.device)
    check_devices(placement, 1)
    require_engine(job.rollout)
    about = {"model": str(job.model.path), "prompts": job.prompts.path}
    with AnswersFile.open(job.out, _settings(job, placement, rows), about=about) as file:
        return _Batch(job, placement, file, stream).run(rows)


class _Batch:
    """One start: generates missing answers and writes each as it finishes."""

    def __init__(
        self, job: GenerationJob, placement: PlacementSection, file: AnswersFile, stream: TextIO | None
    ) -> None:
        self._job, self._placement, self._file, self._stream = job, placement, file, stream
        self._folder = Path(job.model.path)
        self._finished = 0

    def run(self, rows: PromptRows) -> GenerationSummary:
        job = self._job
        tokenizer = load_tokenizer(job.model)
        prompts = rows.read(tokenizer, job.limit, ControlRule.of(job.model))
        wanted = [AnswerKey(prompt.row, sample) for prompt in prompts for sample in range(job.samples)]
        missing = [key for key in wanted if key not in self._file]
        with self._interrupts_told(wanted):
            load, seconds = self._generate(tokenizer, prompts, wanted, missing) if missing else (None, 0.0)
            self._file.put_in_order()
        finishes = Counter(self._file.finish_of(key) for key in wanted)
        return GenerationSummary(
            out=job.out,
            answers=len(wanted),
            finishes=dict(finishes),
            new_answers=len(missing),
            new_tokens=load.generated_tokens if load else 0,
            prefilled_tokens=load.prefilled_tokens if load else 0,
            reused_tokens=load.reused_tokens if load else 0,
            seconds=seconds,
        )

    def _generate(
        self, tokenizer: Any, prompts: Sequence[PromptRow], wanted: Sequence[AnswerKey], missing: Sequence[AnswerKey]
    ) -> tuple[Load, float]:
        """Writes missing answers. Returns the engine's counters and its seconds."""
        job, before = self._job, len(wanted) - len(missing)
        self._say(
            f"prompts: {len(prompts)}, answers: {len(wanted)}" + (f", of which {before} are there" if before else "")
        )
        if job.sampling.temperature == 0 and job.samples > 1:
            self._say(f"note: temperature 0 gives {job.samples} times the same answer to each prompt")
        opened = self._open(tokenizer, prompts)
        by_row = {prompt.row: prompt for prompt in prompts}
        with closing(opened.engine) as engine:
            self._say(f"{opened.words}; up to {engine.capacity.max_running} answers at a time")
            requests = self._requests(engine, tokenizer, by_row, missing)
            began = time.perf_counter()
            with self._shown(engine, before, len(wanted)):
                for completion in _answered(engine, requests):
                    prompt = by_row[completion.id.prompt_index]
                    self._file.write(_record(completion, prompt, tokenizer, job))
                    self._finished += 1
            return engine.load(), time.perf_counter() - began

    def _open(self, tokenizer: Any, prompts: Sequence[PromptRow]) -> OpenedEngine:
        job = self._job
        known = self._file.remembered("cpu")
        mesh = join(self._placement, rank=0, world=1, local_rank=0)
        opened = open_engine(
            job.model,
            self._folder,
            mesh,
            job.rollout,
            tokenizer=tokenizer,
            max_length=_max_length(
                job, [len(prompt.tokens) for prompt in prompts], context_of(job.model, self._folder)
            ),
            cpu=CpuSettings(threads=known["threads"], onednn=known["onednn"]) if known else None,
        )
        if opened.cpu is not None and not known:
            # A later start uses the same: threads and kernels change the order of sums, and so may change a token.
            self._file.remember("cpu", {"threads": opened.cpu.threads, "onednn": opened.cpu.onednn})
        return opened

    def _requests(
        self, engine: RolloutEngine, tokenizer: Any, by_row: Mapping[int, PromptRow], missing: Sequence[AnswerKey]
    ) -> Iterator[Request]:
        job, size = self._job, engine.capacity.vocab_size
        problems = list(job.sampling.problems(size))
        if problems:
            raise RolloutError(" ".join(problems))
        ends = {token for token in stop_tokens(tokenizer, self._folder) if token < size}
        named, strings = parted_stops(tokenizer, job.sampling.stop_strings)
        sampling = dataclasses.replace(
            job.sampling,
            stop_tokens=job.sampling.stop_tokens | ends | {token for token in named if token < size},
            stop_strings=strings,
        )
        return (
            Request(
                id=TrajectoryId(prompt_index=key.row, sample=key.sample),
                prompt=by_row[key.row].tokens,
                sampling=sampling,
                seed=job.seed,
            )
            for key in missing
        )

    @contextmanager
    def _shown(self, engine: RolloutEngine, before: int, wanted: int) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with Progress(
            self._stream, lambda: Standing(before=before, finished=self._finished, wanted=wanted), engine.load
        ):
            yield

    @contextmanager
    def _interrupts_told(self, wanted: Sequence[AnswerKey]) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt as error:
            done = sum(key in self._file for key in wanted)
            error.add_note(
                f"stopped: {done} of {len(wanted)} answers are in {self._job.out}; the same command continues there"
                if done
                else "stopped before the first answer; nothing was written"
            )
            raise

    def _say(self, text: str) -> None:
        if self._stream is not None:
            print(text, file=self._stream, flush=True)


def _answered(engine: RolloutEngine, requests: Iterator[Request]) -> Iterator[Completion]:
    """Yields answers as they finish. Submits a part of the requests at a time, so that millions cost no memory."""
    window = _AHEAD * engine.capacity.max_running
    first = list(islice(requests, window))
    engine.submit(first)
    under_way = len(first)
    for completion in engine.results(deadline_s=_DEADLINE_S):
        yield completion
        under_way -= 1
        if under_way <= window // 2 and (more := list(islice(requests, window - under_way))):
            engine.submit(more)
            under_way += len(more)


def _record(completion: Completion, prompt: PromptRow, tokenizer: Any, job: GenerationJob) -> AnswerRecord:
    tokens = completion.tokens_L.tolist()
    return AnswerRecord(
        row=prompt.row,
        sample=completion.id.sample,
        prompt=prompt.text,
        answer=_text(completion, tokens, tokenizer, job.sampling),
        finish=completion.finish,
        stop=completion.stop,
        num_prompt_tokens=len(prompt.tokens),
        num_tokens=len(tokens),
        reference=prompt.reference,
        error=completion.error,
        tokens=tokens if job.logprobs else None,
        # Through text: the shortest decimal that equals this float32.
        logprobs=[float(str(value)) for value in completion.logprobs_L] if job.logprobs else None,
    )


def _text(completion: Completion, tokens: list[int], tokenizer: Any, sampling: Sampling) -> str:
    """Readable text: without special tokens, and without the stop that ended it and the rest of its token."""
    ended_by_token = completion.finish == "stop" and isinstance(completion.stop, int)
    text = answer_text(tokenizer, tokens[:-1] if ended_by_token else tokens)
    if isinstance(completion.stop, str):
        # It ended at the first one, unless earlier ones did not count yet.
        at = text.find(completion.stop) if sampling.min_new_tokens == 0 else text.rfind(completion.stop)
        text = text[:at] if at >= 0 else text
    return text


def _max_length(job: GenerationJob, lengths: Sequence[int], context: int | None) -> int:
    """Length of the longest prompt that the model can take, and its answer."""
    limit = min(job.rollout.max_length or sys.maxsize, context or sys.maxsize)
    longest = max((length for length in lengths if length < limit), default=0)
    return min(job.rollout.max_length or longest + job.sampling.max_new_tokens, limit)


def _settings(job: GenerationJob, placement: PlacementSection, rows: PromptRows) -> dict[str, Any]:
    """Settings that must be the same for one file: everything that an answer depends on. More samples or rows only add
    to it."""
    kind = device_kind(placement)
    sampling = {
        name: sorted(value) if isinstance(value, frozenset) else value
        for name, value in dataclasses.asdict(job.sampling).items()
    }
    # Files that were begun before there was the option are continued.
    other = job.model.control_tokens_in_content
    content = {} if other == "text" else {"control_tokens_in_content": other}
    return {
        "content of the model": _fingerprint(Path(job.model.path), _MODEL_FILES),
        "content of the tokenizer": _tokenizer_fingerprint(job.model),
        "content of the prompts": rows.source.fingerprint(),
        "columns": job.prompts.columns,
        "map": job.prompts.map,
        "engine": job.rollout.engine,
        "device": kind,
        "dtype": str(compute_dtype(job.model, torch.device(kind))).removeprefix("torch."),
        "max_length": job.rollout.max_length,
        "seed": job.seed,
        "logprobs": job.logprobs,
        **content,
        **sampling,
    }


def _tokenizer_fingerprint(model: ModelSection) -> str:
    folder = Path(model.tokenizer or model.path)
    fingerprint = _fingerprint(folder, _TOKENIZER_FILES) if folder.is_dir() else str(folder)
    return fingerprint + (f" {storage.fingerprint([model.chat_template])}" if model.chat_template is not None else "")


def _fingerprint(folder: Path, patterns: Sequence[str]) -> str:
    files = {str(file) for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    return storage.fingerprint(sorted(files))
