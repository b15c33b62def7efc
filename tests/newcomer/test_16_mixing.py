# SPDX-License-Identifier: Apache-2.0
"""A newcomer mixed two sources by weight and could not see what the model trained on, or which of the two it learned.
With several sources the metrics have rows, tokens and loss of each, and the held-out loss of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.workspace import Workspace
from podium.data.documents import Document, Example, SplitExamples, pack_examples
from podium.data.loader import decode, encode
from podium.data.source_names import mixed_names
from podium.data.state import DocumentCounts, LoaderState
from podium.data.stream import SourcePosition, StreamPosition
from podium.engine.train_step import source_sum
from podium.observe import read_metrics
from podium.recipe import SourceSection
from podium.spmd.by_source import heldout_losses, source_metrics

QUESTION = [{"role": "user", "content": "1+1?"}]


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def document(length: int, trained: int) -> Document:
    return Document(tokens=np.arange(length, dtype=np.int32), trained=np.arange(length) >= length - trained)


def example(source: int, length: int, trained: int) -> Example:
    return Example(documents=(document(length, trained),), source=source)


def lines_of(workspace: Workspace, run: str) -> list[dict[str, float]]:
    return [dict(line.values) for line in read_metrics(workspace.path / "runs" / run / "metrics.jsonl")]


def write(workspace: Workspace, program: str) -> None:
    """Two sources, and a held-out part of each. Rows of `words` have longer answers than those of `sums`."""
    for name, answers in (("sums", ("2", "3")), ("words", ("it is two", "it is three"))):
        good, bad = answers
        row: dict[str, Any] = {"messages": QUESTION + said(good)}
        if program in ("dpo", "reward_model"):
            row = {"prompt": QUESTION, "chosen": said(good), "rejected": said(bad)}
        elif program == "kto":
            row = {"prompt": QUESTION, "completion": said(good), "label": True}
        elif program == "scores":
            row = {"messages": QUESTION + said(good), "score": 1.0 if name == "sums" else 2.0}
        workspace.rows(f"{name}.jsonl", [row] * 8)
        workspace.rows(f"held-{name}.jsonl", [row] * (2 if name == "sums" else 5))


def recipe(workspace: Workspace, program: str, **changes: Any) -> str:
    write(workspace, program)
    values: dict[str, Any] = {
        "program": {"kto": "dpo", "scores": "reward_model"}.get(program, program),
        "data": {
            "train": [{"path": "sums.jsonl", "weight": 3}, {"path": "words.jsonl"}],
            "heldout": [{"path": "held-sums.jsonl"}, {"path": "held-words.jsonl"}],
        },
        "steps": 3,
        "checkpoint": {"every": 2},
    }
    values |= {"preference": {"loss": "kto"}} if program == "kto" else {}
    values |= {"reward_model": {"learns": "scores"}} if program == "scores" else {}
    values |= {"teachers": [{"path": str(workspace.model)}]} if program == "distill" else {}
    return workspace.recipe(program, **{**values, **changes})


def test_sources_have_unique_names() -> None:
    paths = ["a/chats.jsonl", "b/chats.jsonl", "math/*.parquet", "owner/name", "b/chats.jsonl"]
    sections = [SourceSection(path=path) for path in paths]
    assert mixed_names(sections) == ("a/chats", "b/chats", "math", "name", "b/chats-2")
    assert mixed_names(sections[:1]) == ()


def test_counts_and_losses_of_a_step_by_hand() -> None:
    rows = (example(0, 5, 2), example(1, 9, 3), example(0, 4, 1))
    split = SplitExamples(examples=rows, rows=((0, 1, 2),), sources=("a", "b", "c"))
    sums = {source_sum("a"): 6.0, source_sum("b"): 1.5, source_sum("c"): 0.0}

    assert source_metrics(split, sums, "tokens") == {
        "source/a/rows": 2.0, "source/a/tokens": 7.0, "source/a/loss": 2.0,
        "source/b/rows": 1.0, "source/b/tokens": 8.0, "source/b/loss": 0.5,
        "source/c/rows": 0.0, "source/c/tokens": 0.0,
    }  # fmt: skip
    assert heldout_losses(split, sums, "rows") == {"a/loss": 3.0, "b/loss": 1.5}
    assert source_metrics(SplitExamples(examples=rows, rows=((0, 1, 2),)), {}, "tokens") == {}


def test_every_trained_token_knows_its_source() -> None:
    packed = pack_examples([example(1, 9, 3), example(0, 4, 2), example(2, 6, 1)])
    assert packed.sources_S.tolist() == [0, 0, 2, 1, 1, 1]  # documents are packed by length


def test_waiting_examples_keep_their_source_in_a_checkpoint_and_old_ones_have_none() -> None:
    state = LoaderState(
        position=StreamPosition(draw=3, sources=(SourcePosition(), SourcePosition())),
        waiting=(example(1, 4, 2), example(0, 4, 2)), counts=DocumentCounts(drawn=(1, 2), epochs=(0, 0)),
        made_in_epoch=(1, 1),
    )  # fmt: skip
    values, arrays = encode(state)
    assert [each.source for each in decode(json.loads(json.dumps(values)), arrays).waiting] == [1, 0]
    old = {name: array for name, array in arrays.items() if name != "row_sources"}
    assert [each.source for each in decode(values, old).waiting] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("program", ["sft", "dpo", "kto", "reward_model", "scores", "distill"])
def test_losses_of_sources_make_up_the_loss(workspace: Workspace, program: str) -> None:
    outcome = workspace.podium("train", recipe(workspace, program))
    assert outcome.code == 0, outcome
    *steps, heldout = lines_of(workspace, program)

    trained = {"sums": 2.0, "words": 10.0}  # answer and end of turn
    for step in steps:
        counts = {name: step[f"source/{name}/rows"] for name in trained}
        assert sum(counts.values()) == step["rows"]
        assert sum(step[f"source/{name}/tokens"] for name in trained) == step["tokens"]
        if program in ("sft", "distill"):
            counts = {name: count * trained[name] for name, count in counts.items()}
            assert sum(counts.values()) == step["trained_tokens"]
        total = sum(count * step[f"source/{name}/loss"] for name, count in counts.items() if count)
        assert total / sum(counts.values()) == pytest.approx(step["loss"], rel=1e-4, abs=1e-6)
    weights = {"held-sums": 2.0, "held-words": 5.0}
    if program in ("sft", "distill"):
        weights = {"held-sums": 2 * 2.0, "held-words": 5 * 10.0}
    total = sum(weight * heldout[f"heldout/{name}/loss"] for name, weight in weights.items())
    assert total / sum(weights.values()) == pytest.approx(heldout["heldout/loss"], rel=1e-4, abs=1e-6)


def test_a_single_source_has_the_metrics_that_it_had(workspace: Workspace) -> None:
    data = {"train": [{"path": "sums.jsonl"}], "heldout": [{"path": "held-sums.jsonl"}]}
    assert workspace.podium("train", recipe(workspace, "sft", data=data)).code == 0
    names = {name for line in lines_of(workspace, "sft") for name in line}
    assert not [name for name in names if name.startswith("source/") or name.count("/") > 1]


def test_sources_do_not_change_what_is_trained_and_survive_a_resume(workspace: Workspace) -> None:
    assert workspace.podium("train", recipe(workspace, "sft")).code == 0
    before = lines_of(workspace, "sft")
    assert workspace.podium("resume", "runs/sft", "--step", "2").code == 0
    after = lines_of(workspace, "sft")
    for one, other in zip(before, after, strict=True):
        assert {n: v for n, v in one.items() if "source/" in n} == {n: v for n, v in other.items() if "source/" in n}
        assert one.get("loss") == other.get("loss")


@pytest.mark.slow
def test_two_ranks_write_the_sums_of_both(workspace: Workspace) -> None:
    assert workspace.podium("train", recipe(workspace, "sft")).code == 0
    one = lines_of(workspace, "sft")
    assert workspace.process("train", "sft.yaml", "--set", "run.name=two", "--devices", "2").code == 0
    for first, second in zip(one, lines_of(workspace, "two"), strict=True):
        names = [name for name in first if "source/" in name or "heldout/" in name]
        assert names
        for name in names:
            assert second[name] == pytest.approx(first[name], rel=1e-3), name


def test_the_page_defines_the_names() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    for name in ("source/SOURCE/rows", "source/SOURCE/tokens", "source/SOURCE/loss", "heldout/SOURCE/loss"):
        assert f"`{name}`" in page
