# SPDX-License-Identifier: Apache-2.0
"""Held-out loss and generated answers during a run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from podium.data.chat import Prompt
from podium.data.chat_text import as_text
from podium.data.control_tokens import ControlRule
from podium.data.documents import SplitExamples, pack_examples
from podium.data.examples import ExampleMaker, shape_of
from podium.data.reading import OrderedRows
from podium.data.skipping import SkippedRow, SkipPolicy
from podium.data.source_names import mixed_names
from podium.data.splitting import split_step
from podium.data.tokenizer import answer_text, stop_tokens
from podium.engine.train_step import Tally, TrainEngine
from podium.errors import RecipeError, what_raised
from podium.models.head import TokenLoss
from podium.models.packing import on_device
from podium.observe import EvaluationView, SampleView
from podium.progress import mark_progress
from podium.recipe import GenerationSection, LanguageModelRecipe, SpmdRecipe
from podium.recipe.plugins import Plugin
from podium.recipe.plugins import load as load_plugin
from podium.spmd.answering import Answerer
from podium.spmd.by_source import heldout_losses

Score = Callable[[str, str, Mapping[str, Any]], float]
HeldoutMeasure = Callable[[SplitExamples], Mapping[str, float]]
"""Held-out examples -> metrics over all ranks, `loss` among them. Collective."""

# Default number of held-out prompts to answer, and default length of answers.
_PROMPTS, _NEW_TOKENS = 4, 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """One evaluation: metrics, and the text shown to a person. `answers` is empty without generation."""

    measured: Mapping[str, float]  # `loss`, and the program's other measurements
    score: float | None
    answers: tuple[SampleView, ...]
    view: EvaluationView

    @property
    def heldout_loss(self) -> float:
        """Mean loss on the held-out data."""
        return self.measured["loss"]


def mean_token_loss(engine: TrainEngine, loss: TokenLoss) -> HeldoutMeasure:
    """Mean loss per token, as is usual for language models."""

    def measure(split: SplitExamples) -> Mapping[str, float]:
        device = engine.mesh.device
        tally = Tally((), device, split.sources)
        total = torch.zeros((), dtype=torch.float32, device=device)
        for part in split.parts:
            batch = pack_examples(part)
            source_S = on_device(batch.sources_S, device) if tally.has_sources else None
            total += engine.loss_sum([batch.packed], _summed_by_source(loss, tally, source_S))
        num_trained = sum(example.num_trained for example in split.examples)
        whole, *rest = engine.mesh.sum_of_tokens(torch.cat([total[None], tally.sums_M])).tolist()
        sums = dict(zip(tally.names, rest, strict=True))
        return {"loss": whole / num_trained, **heldout_losses(split, sums, "tokens")}

    return measure


def _summed_by_source(loss: TokenLoss, tally: Tally, source_S: Tensor | None) -> TokenLoss:
    """The loss of all trained tokens of one micro-batch, which also adds to the sums of their sources."""

    def counted(logprobs_S: Tensor) -> Tensor:
        loss_S = loss(logprobs_S)
        tally.add_losses(loss_S, source_S)
        return loss_S

    return loss if source_S is None else counted


class Evaluator:
    """Holds the held-out examples of this rank, read once. The metrics are the same for any number of ranks."""

    def __init__(
        self, recipe: SpmdRecipe, engine: TrainEngine, tokenizer: Any, folder: Path, *, max_tokens: int
    ) -> None:
        self._engine, self._mesh = engine, engine.mesh
        self._generation = recipe.generation
        self._tokenizer = tokenizer
        assert recipe.data.max_length is not None
        # Held-out examples that are too long are truncated instead of refused.
        overlong = "truncate" if recipe.data.overlong == "error" else recipe.data.overlong
        maker = ExampleMaker(
            self._tokenizer, shape_of(recipe), recipe.trained, recipe.data.max_length, overlong,
            ControlRule.of(recipe.model),
        )  # fmt: skip
        policy = SkipPolicy.of(recipe.data)
        rows_of_heldout = OrderedRows(recipe.data.heldout, "data.heldout", policy)
        examples = tuple(rows_of_heldout.examples(maker, recipe.evaluation.max_documents))
        self.skipped: list[SkippedRow] = rows_of_heldout.skipper.rows
        plan = split_step(
            [example.num_inputs for example in examples],
            num_ranks=self._mesh.data_ranks, max_tokens=max_tokens, hard_cap=False,
        )  # fmt: skip
        rows = tuple(tuple(part.tolist()) for part in plan.rows(self._mesh.data_rank)[0])
        self._split = SplitExamples(examples=examples, rows=rows, sources=mixed_names(recipe.data.heldout))
        self._prompts: list[Prompt] = []
        self._answerer: Answerer | None = None
        self._score: Score | None = None
        if self._generation is not None and isinstance(recipe, LanguageModelRecipe):
            prompt_rows = OrderedRows(recipe.data.heldout, "data.heldout", policy)
            self._prompts = prompt_rows.prompts(maker, self._generation.prompts or _PROMPTS)
            self._answerer = Answerer(
                engine,
                recipe.model,
                recipe.rollout,
                folder,
                [prompt.tokens for prompt in self._prompts],
                max_new_tokens=self._generation.max_new_tokens or _NEW_TOKENS,
                stop_tokens=stop_tokens(self._tokenizer, folder),
                max_batch_tokens=max(max_tokens, 2048),
            )
            self._score = _score_function(self._generation)

    def run(self, step: int, measure: HeldoutMeasure) -> Evaluation:
        """Evaluates. Collective: all ranks evaluate together and get the same metrics."""
        began = time.perf_counter()
        measured = measure(self._split)
        answers = self._answers() if self._generation is not None else ()
        scores = [answer.score for answer in answers if answer.score is not None]
        score = sum(scores) / len(scores) if scores else None
        view = EvaluationView(
            step=step,
            heldout_loss=measured["loss"],
            measured={name: value for name, value in measured.items() if name != "loss"},
            score_name=self._score_name(),
            score=score,
            score_is_share=all(each in (0.0, 1.0) for each in scores),
            num_scored=len(scores),
            seconds=time.perf_counter() - began,
            samples=answers[: self._generation.show] if self._generation is not None else (),
        )
        return Evaluation(measured=measured, score=score, answers=answers, view=view)

    def _score_name(self) -> str | None:
        score = None if self._generation is None else self._generation.score
        return score.name if isinstance(score, Plugin) else score

    def _answers(self) -> tuple[SampleView, ...]:
        assert self._generation is not None
        assert self._answerer is not None
        views = []
        for prompt, tokens in zip(self._prompts, self._answerer.answers(), strict=True):
            answer = answer_text(self._tokenizer, tokens.tolist())
            score = None if self._score is None else _scored(self._score, answer, prompt)
            mark_progress()
            views.append(
                SampleView(
                    prompt=_question(prompt, self._tokenizer), answer=answer, reference=prompt.reference, score=score
                )
            )
        return tuple(views)


def exact_match(answer: str, reference: str, row: Mapping[str, Any]) -> float:
    """1 if the answer equals the reference, ignoring surrounding white space."""
    return float(answer.strip() == reference.strip())


def _score_function(generation: GenerationSection) -> Score | None:
    match generation.score:
        case None:
            return None
        case "exact_match":
            return exact_match
        case path:
            return load_plugin(path, "evaluation.generation.score")


def _scored(function: Score, answer: str, prompt: Prompt) -> float:
    try:
        score = function(answer, prompt.reference, prompt.values)
    except Exception as error:  # the function is the user's code
        raise RecipeError(
            f"evaluation.generation.score: the function {what_raised(error)} for the answer "
            f"{answer!r} (expected {prompt.reference!r})."
        ) from error
    return _checked(score)


def _checked(score: Any) -> float:
    if not isinstance(score, int | float) or not math.isfinite(score):
        raise RecipeError(
            f"evaluation.generation.score: the function returned {score!r}, and a finite number is needed."
        )
    return float(score)


def _question(prompt: Prompt, tokenizer: Any) -> str:
    """The question in readable form: a chat from its last user message on, with tool calls and results, or the prompt's
    text."""
    users = [at for at, message in enumerate(prompt.messages or ()) if message["role"] == "user"]
    if prompt.messages is not None and users:
        return as_text(prompt.messages[users[-1] :])
    text: str = tokenizer.decode(prompt.tokens.tolist(), skip_special_tokens=True)
    return text
