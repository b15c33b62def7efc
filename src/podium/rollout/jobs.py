# SPDX-License-Identifier: Apache-2.0
"""Input and report of `podium generate`. Torch-free: a mistake is reported before anything is loaded."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from podium.data.prompts import PromptRows
from podium.data.storage import is_glob, is_url
from podium.errors import RolloutError
from podium.observe.formats import duration, rate
from podium.recipe import ModelSection, RolloutSection, SourceSection
from podium.rollout.answers_file import check_place
from podium.rollout.requests import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """Settings of a generation job. `model.path` is a local folder."""

    model: ModelSection
    prompts: SourceSection
    out: Path
    sampling: Sampling
    samples: int = 1
    seed: int = 0
    limit: int | None = None
    logprobs: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    rollout: RolloutSection

    def open_prompts(self) -> PromptRows:
        """Opens the prompts. Raises every error that can be found before anything heavy is loaded."""
        self._check_numbers()
        check_place(self.out)
        if _would_be_read(self.out, self.prompts.path):
            raise RolloutError(
                f"--out: {self.out} is, or would be at the next start, one of the files that the prompts are read "
                f"from. Choose another, outside of {self.prompts.path}."
            )
        return PromptRows(self.prompts, "--prompts")

    def _check_numbers(self) -> None:
        problems = list(self.sampling.problems(sys.maxsize))
        if self.samples < 1:
            problems.append(f"samples is {self.samples}; at least one is needed.")
        if self.seed < 0:
            problems.append(f"seed is {self.seed}; it is 0 or more.")
        if self.limit is not None and self.limit < 1:
            problems.append(f"limit is {self.limit}; at least one row is needed.")
        if problems:
            raise RolloutError(" ".join(problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSummary:
    """The content of the file, and the work of this start."""

    out: Path
    answers: int  # all requested answers
    finishes: Mapping[str, int]  # finish reason -> number of all answers
    new_answers: int  # of this start, as all that follows
    new_tokens: int = 0
    prefilled_tokens: int = 0  # prompt tokens that were computed
    reused_tokens: int = 0  # prompt tokens that were cached already
    seconds: float = 0.0  # without loading

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    @property
    def errors(self) -> int:
        """Number of answers that failed."""
        return self.finishes.get("error", 0)

    def lines(self) -> list[str]:
        """Lines for the user."""
        ends = ", ".join(f"{finish} {count}" for finish, count in sorted(self.finishes.items()))
        if not self.new_answers:
            return [f"nothing left to do: answers asked for and in {self.out}: {self.answers} ({ends})"]
        earlier = f" ({self.answers - self.new_answers} of an earlier start)" if self.answers > self.new_answers else ""
        prompts = self.prefilled_tokens + self.reused_tokens
        return [
            f"answers: {self.answers}{earlier}",
            f"finished by: {ends}",
            f"tokens: {self.new_tokens} in {duration(self.seconds)}, {rate(self.tokens_per_s)}/s",
            f"prompt tokens: {prompts}, of which {self.reused_tokens / max(prompts, 1):.0%} were reused",
            f"file: {self.out}",
            *([f"{self.errors} could not be answered; their lines say why (`error`)"] if self.errors else []),
        ]


def _would_be_read(out: Path, prompts: str) -> bool:
    """Whether `prompts` (a file, a folder or a glob) includes the file `out`."""
    if is_url(prompts):
        return False
    mine, theirs = out.resolve(), Path(prompts).resolve()
    if mine == theirs or (theirs.is_dir() and mine.is_relative_to(theirs)):
        return True
    same_depth = "**" in prompts or len(mine.parts) == len(theirs.parts)
    return is_glob(prompts) and same_depth and fnmatch.fnmatch(str(mine), str(theirs))
