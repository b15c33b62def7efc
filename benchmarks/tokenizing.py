# SPDX-License-Identifier: Apache-2.0
"""The processor time of loading a step, for 1 to 8 ranks: ranks that share the work of tokenizing, and ranks that each
tokenize every row.

    .venv/bin/python benchmarks/tokenizing.py

Trains a byte-level BPE tokenizer on seeded text, writes chats of log-normal length, and starts real processes that
exchange over gloo. A step has the same number of tokens for each rank, so a step of 8 ranks is 8 times as long. The
time is that of the whole process (all its threads) between two moments at which the loader had prepared all steps that
it may prepare ahead, over the rows that it made in between, times the rows of a step; the mean over ranks and the
largest. It is processor time: the machine may have fewer cores than ranks. The script checks that ranks that share have
the same steps as ranks that do not.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import functools
import hashlib
import json
import multiprocessing
import platform
import random
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers

from podium.data.composing import chunk_rows
from podium.data.examples import MakerSpec
from podium.data.files import ONE_READER, Readers
from podium.data.loader import StepExamples, StepLoader, StepSize
from podium.data.sources import open_source
from podium.data.tokenizer import load_tokenizer
from podium.engine.addresses import FileMeeting
from podium.engine.mesh import Mesh, join, leave
from podium.recipe import ModelSection, PlacementSection, SourceSection
from podium.spmd.exchanging import RankExchange

END = "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Steps before the first moment: the window is full and the caches of the tokenizer are warm.
WARM_UP = 3
PREFETCH, WINDOW = 2, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What one group of ranks does."""

    folder: Path
    ranks: int
    shares: bool  # the ranks share the work
    tokens: int  # of a step, for each rank
    steps: int  # timed ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One rank's processor time of a step, what it sent, and its steps."""

    cpu_ms: float
    sent_bytes: float
    documents: float
    digests: tuple[str, ...]


class Words:
    """A language of some thousand words whose frequencies fall with their rank, as in real text."""

    def __init__(self, seed: int, *, size: int = 20_000) -> None:
        self._random = random.Random(seed)
        starts, vowels, ends = [*"bcdfghklmnprstvw", "st", "tr", "ch", "th"], "aeiou", list("nrstlmd")
        words: dict[str, None] = {}
        while len(words) < size:
            syllables = self._random.choices((1, 2, 3, 4), (2, 5, 4, 2))[0]
            words["".join(self._syllable(starts, vowels, ends) for _ in range(syllables))] = None
        self._words = list(words)
        self._weights = np.cumsum(1.0 / np.arange(2, size + 2)).tolist()

    def _syllable(self, starts: list[str], vowels: str, ends: list[str]) -> str:
        choose = self._random.choice
        return choose(starts) + choose(vowels) + (choose(ends) if self._random.random() < 0.4 else "")

    def text(self, num_words: int) -> str:
        """Sentences with capitals, commas, numbers and paragraphs."""
        parts: list[str] = []
        draw, begins = self._random.random, True
        for word in self._random.choices(self._words, cum_weights=self._weights, k=num_words):
            shown = str(int(10 ** (4 * draw()))) if draw() < 0.03 else word
            parts.append(shown.capitalize() if begins else shown)
            begins = draw() < 0.08
            parts.append((".\n\n" if draw() < 0.1 else ". ") if begins else ", " if draw() < 0.06 else " ")
        return "".join(parts).strip()


def make_data(folder: Path, *, rows: int, median: float, vocabulary: int) -> None:
    """Writes a tokenizer that is trained on text of the same language, and chats of one question and one answer."""
    words = Words(seed=0)
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<|im_start|>", END], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    core.train_from_iterator((words.text(2000) for _ in range(250)), trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    lengths = np.random.default_rng(0).lognormal(np.log(median), 0.8, rows).clip(8, 4000).astype(int).tolist()
    with (folder / "train.jsonl").open("w", encoding="utf-8") as file:
        for length in lengths:
            asked, answered = words.text(max(1, length // 5)), words.text(length)
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
            file.write(json.dumps({"messages": messages}) + "\n")


def run_case(case: Case) -> list[Figure]:
    """The figures of all ranks."""
    with tempfile.TemporaryDirectory() as scratch:
        context = multiprocessing.get_context("forkserver")  # which imports torch once
        with ProcessPoolExecutor(case.ranks, mp_context=context) as pool:
            return list(pool.map(functools.partial(_rank, case, Path(scratch) / "meeting"), range(case.ranks)))


def _rank(case: Case, meeting: Path, rank: int) -> Figure:
    torch.set_num_threads(1)
    placement = PlacementSection(device="cpu", timeout_s=600)
    mesh = join(placement, rank=rank, world=case.ranks, local_rank=0, meeting=FileMeeting(path=meeting))
    try:
        if case.ranks == 1 or not case.shares:
            return _measured(case, mesh, None)
        with RankExchange(mesh, timeout_s=600) as exchange:
            return _measured(case, mesh, exchange)
    finally:
        leave(mesh)


def _measured(case: Case, mesh: Mesh, exchange: RankExchange | None) -> Figure:
    section = SourceSection(path=str(case.folder / "train.jsonl"))
    spec = MakerSpec(
        model=ModelSection(path=str(case.folder)), sections=(section,), key="data.train", trained="assistant",
        max_length=4096, overlong="truncate",
    )  # fmt: skip
    counted = None if exchange is None else _CountedExchange(exchange)
    readers = ONE_READER if exchange is None else Readers(rank=mesh.rank, world=mesh.world)
    with StepLoader(
        [open_source(section, "data.train.0", readers=readers)], spec, seed=0, shuffle=True, shuffle_rows=4096,
        size=StepSize(tokens=case.tokens * case.ranks), window=WINDOW, workers=0, prefetch=PREFETCH, exchange=counted,
    ) as loader:  # fmt: skip
        first = [_taken(loader, mesh) for _ in range(WARM_UP)]
        before = _when_full(loader, mesh)
        made, sent = _num_made(loader, counted), 0 if counted is None else counted.num_bytes
        timed = [_taken(loader, mesh) for _ in range(case.steps)]
        after = _when_full(loader, mesh)
        assert timed[-1].counts.epochs == (0,), "more rows are needed: those of the second epoch are remembered"
        made, sent = _num_made(loader, counted) - made, 0 if counted is None else counted.num_bytes - sent
        mesh.barrier()
    documents = sum(len(step.examples) for step in timed) / case.steps
    return Figure(
        cpu_ms=1e3 * (after - before) / made * documents, sent_bytes=sent / made * documents, documents=documents,
        digests=tuple(map(_digest, (*first, *timed))),
    )  # fmt: skip


def _num_made(loader: StepLoader, exchange: _CountedExchange | None) -> int:
    """Rows whose results the loader has: those of whole rounds, or those that were added to the packing buffer."""
    if exchange is not None:
        return exchange.num_rounds * exchange.world * chunk_rows(WINDOW)
    return loader._composer._counts.read


class _CountedExchange:
    """An exchange that counts what this rank sends."""

    def __init__(self, exchange: RankExchange) -> None:
        self.rank, self.world, self.fail = exchange.rank, exchange.world, exchange.fail
        self._exchange, self.num_bytes, self.num_rounds = exchange, 0, 0

    def all_gather(self, payload, is_stopped):  # type: ignore[no-untyped-def]
        """Counts, and exchanges."""
        self.num_bytes, self.num_rounds = self.num_bytes + len(payload), self.num_rounds + 1
        return self._exchange.all_gather(payload, is_stopped)


def _taken(loader: StepLoader, mesh: Mesh) -> StepExamples:
    """The next step, at the pace of the slowest rank, as in training."""
    step = next(loader)
    mesh.barrier()
    return step


def _when_full(loader: StepLoader, mesh: Mesh) -> float:
    """Processor time when the loader waits for its steps to be taken."""
    while not (loader._steps.full() and loader._doing.startswith("waiting")):
        time.sleep(0.02)
    time.sleep(0.1)
    cpu_s = time.process_time()
    mesh.barrier()
    return cpu_s


def _digest(step: StepExamples) -> str:
    sha = hashlib.sha256(str(step.counts).encode())
    for example in step.examples:
        for document in example.documents:
            sha.update(document.tokens.tobytes() + document.trained.tobytes())
    return sha.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens of a step, for each rank")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of ranks that share")
    parser.add_argument("--steps-alone", type=int, default=3, help="timed steps of ranks that do not share; 0: none")
    parser.add_argument("--median", type=float, default=300, help="median words of an answer")
    parser.add_argument("--vocabulary", type=int, default=16_000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        mean_tokens = 1.2 * asked.median * 1.37 * 1.4  # of a document, roughly: of words, and of the distribution
        rows = int(max(asked.ranks) * asked.tokens * (asked.steps + WARM_UP + PREFETCH + 4) / mean_tokens) + 4096
        make_data(folder, rows=rows, median=asked.median, vocabulary=asked.vocabulary)
        size_mb = (folder / "train.jsonl").stat().st_size / 1e6
        tokenizer = load_tokenizer(ModelSection(path=str(folder)))
        print(
            f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, tokenizers "
            f"{tokenizers.__version__}; BPE of {len(tokenizer)} tokens; {rows} chats of {size_mb:.0f} MB; "
            f"{asked.tokens} tokens a step and rank"
        )
        print("| ranks | documents a step | each tokenizes all: ms | they share: ms (largest) | of one rank | sent |")
        print("|---|---|---|---|---|---|", flush=True)
        base = None
        for ranks in asked.ranks:
            case = Case(folder=folder, ranks=ranks, shares=True, tokens=asked.tokens, steps=asked.steps)
            base = _print_row(case, asked.steps_alone, base)


def _print_row(case: Case, steps_alone: int, base: float | None) -> float:
    shared = run_case(case)
    alone = run_case(replace(case, shares=False, steps=steps_alone)) if steps_alone and case.ranks > 1 else None
    for figure in (*shared, *(alone or ())):
        num_steps = len(figure.digests)
        assert figure.digests == shared[0].digests[:num_steps], "the steps differ between ranks"
    cpu_ms, largest_ms = np.mean([each.cpu_ms for each in shared]), max(each.cpu_ms for each in shared)
    base = base or float(cpu_ms)
    alone_ms = "" if alone is None else f"{np.mean([each.cpu_ms for each in alone]):.0f}"
    print(
        f"| {case.ranks} | {shared[0].documents:.0f} | {alone_ms or f'{cpu_ms:.0f}'} | {cpu_ms:.0f} ({largest_ms:.0f}) "
        f"| {cpu_ms / base:.2f} | {np.mean([each.sent_bytes for each in shared]) / 1e3:.0f} kB |",
        flush=True,
    )
    return base


if __name__ == "__main__":
    main()
