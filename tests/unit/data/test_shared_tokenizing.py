# SPDX-License-Identifier: Apache-2.0
"""Loaders of several ranks: the same steps as one rank has, each row tokenized by one rank, and errors on all."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_tokenizers import CHATML, byte_tokenizer

from helpers.exchanges import ExchangeGroup, ThreadExchange
from podium.data.examples import ExampleMaker, MakerSpec
from podium.data.files import ONE_READER, JsonlFile, Readers
from podium.data.loader import StepExamples, StepLoader, StepSize
from podium.data.rows import Row
from podium.data.skipping import SkipPolicy
from podium.data.sources import FilesSource, open_source
from podium.data.state import decode, encode
from podium.errors import DataError, ModelError
from podium.recipe import ModelSection, SourceSection


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and two sources: chats of very different lengths, and raw texts."""
    folder = tmp_path_factory.mktemp("shared")
    byte_tokenizer(CHATML).save_pretrained(folder / "model")
    lengths = np.random.default_rng(0).lognormal(2.5, 0.8, 60).clip(1, 90).astype(int).tolist()
    chats = [
        {"messages": [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": "a" * length}]}
        for number, length in enumerate(lengths)
    ]
    write(folder / "chats.jsonl", chats)
    write(folder / "texts.jsonl", [{"text": f"text {number} " + "b" * (number % 40)} for number in range(25)])
    return folder


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def spec_of(folder: Path, *sections: SourceSection, **changed: Any) -> MakerSpec:
    sections = sections or (
        SourceSection(path=str(folder / "chats.jsonl"), weight=3.0),
        SourceSection(path=str(folder / "texts.jsonl"), weight=1.0),
    )
    values: dict[str, Any] = {"trained": "assistant", "max_length": 100, "overlong": "truncate", **changed}
    return MakerSpec(model=ModelSection(path=str(folder / "model")), sections=sections, key="data.train", **values)


def open_loader(spec: MakerSpec, exchange: ThreadExchange | None = None, **changed: Any) -> StepLoader:
    readers = ONE_READER if exchange is None else Readers(rank=exchange.rank, world=exchange.world)
    sources = changed.pop("sources", None) or [
        open_source(section, f"{spec.key}.{index}", keep_bad=spec.skips, readers=readers)
        for index, section in enumerate(spec.sections)
    ]
    values: dict[str, Any] = {"seed": 5, "shuffle": True, "shuffle_rows": 20, "tokens": 300, "rows": None, "window": 16}
    values |= {"workers": 0, "prefetch": 2, **changed}
    size = StepSize(tokens=values.pop("tokens"), rows=values.pop("rows"))
    return StepLoader(sources, spec, size=size, exchange=exchange, **values)


@contextlib.contextmanager
def loaders(spec: MakerSpec, world: int, **changed: Any) -> Iterator[list[StepLoader]]:
    """The loaders of all ranks."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(open_loader(spec, end, **changed)) for end in ExchangeGroup(world).ends()]


def everything(step: StepExamples) -> object:
    """All that a step is, its place in the data included."""
    values, arrays = encode(step.state)
    examples = [
        ([(each.tokens.tolist(), each.trained.tolist()) for each in example.documents], example.value, example.source)
        for example in step.examples
    ]
    return examples, values, {name: array.tolist() for name, array in arrays.items()}, step.skipped


def take(loader: StepLoader, count: int) -> list[object]:
    return [everything(next(loader)) for _ in range(count)]


def take_all(ranks: Sequence[StepLoader], count: int) -> list[list[object]]:
    """The next steps of each rank. Ranks take turns, as training makes them."""
    steps: list[list[object]] = [[] for _ in ranks]
    for _ in range(count):
        for loader, own in zip(ranks, steps, strict=True):
            own.append(everything(next(loader)))
    return steps


def until_errors(ranks: Sequence[StepLoader]) -> list[tuple[list[object], Exception]]:
    """The steps of each rank before an error, and the error. All ranks fail in the same turn."""
    steps: list[list[object]] = [[] for _ in ranks]
    errors: list[Exception] = []
    while not errors:
        for loader, own in zip(ranks, steps, strict=True):
            try:
                own.append(everything(next(loader)))
            except Exception as error:
                errors.append(error)
    return list(zip(steps, errors, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_every_rank_has_the_steps_of_a_single_rank(folder: Path, world: int) -> None:
    spec = spec_of(folder)
    with open_loader(spec) as alone:
        expected = take(alone, 14)
    with loaders(spec, world) as ranks:
        for steps in take_all(ranks, 14):
            assert steps == expected
    counts: Any = expected[-1]
    assert min(counts[1]["counts"]["epochs"]) >= 1, "the data is gone through more than once"


@pytest.mark.parametrize(
    "changed",
    [{"shuffle": False}, {"rows": 7}, {"window": 200, "tokens": 2000}, {"prefetch": 1, "shuffle_rows": 1}],
    ids=["in order", "rows per step", "chunks of 25", "small pools"],
)
def test_steps_of_every_kind_are_the_same(folder: Path, changed: dict[str, Any]) -> None:
    spec = spec_of(folder, max_length=40, overlong="drop")
    with open_loader(spec, **changed) as alone, loaders(spec, 3, **changed) as ranks:
        expected = take(alone, 6)
        assert take_all(ranks, 6) == [expected] * 3


@pytest.mark.parametrize("shape", ["pairs", "ranked", "labels", "scores"])
def test_rows_of_preferences_and_rewards_are_shared_too(folder: Path, shape: Any, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    rows: list[dict[str, Any]] = []
    for number in range(40):
        prompt, good, bad = (f"{number} " + word * int(random.integers(1, 30)) for word in "pgb")
        if shape in ("pairs", "ranked"):
            rows.append({"prompt": prompt, "chosen": good, "rejected": bad, "margin": number / 7})
        else:
            mark = {"label": number % 3 == 0} if shape == "labels" else {"score": number / 7}
            rows.append({"prompt": prompt, "completion": good, **mark})
    spec = spec_of(folder, SourceSection(path=str(write(tmp_path / "rows.jsonl", rows))), shape=shape)
    with open_loader(spec) as alone, loaders(spec, 2) as ranks:
        expected = take(alone, 6)
        assert take_all(ranks, 6) == [expected] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 4)])
def test_any_number_of_ranks_goes_on_after_any_step_of_another(folder: Path, before: int, after: int) -> None:
    spec = spec_of(folder)
    with open_loader(spec) as alone:
        expected = take(alone, 10)
    with loaders(spec, before) as ranks:
        states = [[next(loader).state for loader in ranks][-1] for _ in range(9)]
    for cut in (0, 3, 8):
        values, arrays = encode(states[cut])
        state = decode(json.loads(json.dumps(values)), arrays)
        with loaders(spec, after, state=state) as ranks:
            assert take_all(ranks, 9 - cut) == [expected[cut + 1 :]] * after


def test_each_row_is_tokenized_by_one_rank_and_only_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_of_threads: dict[int, list[str]] = defaultdict(list)
    make = ExampleMaker.make

    def recorded(self: ExampleMaker, row: Row, *args: Any) -> Any:
        rows_of_threads[threading.get_ident()].append(row.where)
        return make(self, row, *args)

    monkeypatch.setattr(ExampleMaker, "make", recorded)
    spec = spec_of(folder, SourceSection(path=str(folder / "chats.jsonl")))
    with loaders(spec, 3, prefetch=1, tokens=100) as ranks:
        take_all(ranks, 4)
        counts = next(ranks[0]).counts
    assert counts.epochs == (0,)
    rows = [row for rows in rows_of_threads.values() for row in rows]
    assert len(rows) == len(set(rows)) >= counts.read
    assert len(rows_of_threads) == 3
    assert max(map(len, rows_of_threads.values())) <= len(rows) / 3 + 2  # chunks of two rows


def test_data_that_was_gone_through_is_neither_tokenized_nor_exchanged_again(folder: Path) -> None:
    spec, ends = spec_of(folder, SourceSection(path=str(folder / "texts.jsonl"))), ExchangeGroup(2).ends()
    with open_loader(spec, ends[0], prefetch=1) as first, open_loader(spec, ends[1], prefetch=1) as second:
        take_all([first, second], 12)
        rounds = ends[0].num_rounds
        take_all([first, second], 12)
    assert 25 / 4 <= rounds <= 25 / 4 + 2, "25 rows, two chunks of two rows in a round"
    assert ends[0].num_rounds == ends[1].num_rounds == rounds


def test_rows_of_a_source_with_a_map_are_made_in_every_epoch(folder: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "shape.py"
    plugin.write_text("def shape(row):\n    return {'text': row['text'].upper()} if 'b' in row['text'] else None\n")
    spec = spec_of(folder, SourceSection(path=str(folder / "texts.jsonl"), map=f"{plugin}:shape"))
    ends = ExchangeGroup(2).ends()
    with open_loader(spec) as alone, open_loader(spec, ends[0]) as first, open_loader(spec, ends[1]) as second:
        expected = take(alone, 12)
        assert take_all([first, second], 12) == [expected] * 2
    assert ends[0].num_rounds > 2 * 25 / 4


@pytest.mark.parametrize("line", [0, 11, 17, 59])
def test_a_bad_row_is_the_error_of_all_ranks_after_the_same_steps(folder: Path, line: int, tmp_path: Path) -> None:
    rows = [{"text": f"{number} fine " * 4} for number in range(60)]
    rows[line] = {"body": "oops"}
    spec = spec_of(folder, SourceSection(path=str(write(tmp_path / "bad.jsonl", rows))))
    changed = {"shuffle": False, "tokens": 120, "window": 16}
    with open_loader(spec, **changed) as alone:
        [(expected, reason)] = until_errors([alone])
    with loaders(spec, 3, **changed) as ranks:
        for steps, error in until_errors(ranks):
            assert steps == expected
            assert type(error) is type(reason)
            assert str(error) == str(reason)
            assert f"bad.jsonl, line {line + 1}: " in str(error)


@pytest.mark.parametrize("num_good", [40, 41, 42, 43])
def test_malformed_json_is_the_error_of_all_ranks_after_the_same_steps(
    folder: Path, num_good: int, tmp_path: Path
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text("".join(json.dumps({"text": "fine " * 5}) + "\n" for _ in range(num_good)) + "oops\n")
    spec = spec_of(folder, SourceSection(path=str(file)))

    def opened(exchange: ThreadExchange | None) -> StepLoader:
        """With blocks of a few lines, so that the bad one is not read at the beginning."""
        readers = ONE_READER if exchange is None else Readers(rank=exchange.rank, world=exchange.world)
        source = FilesSource("bad", [JsonlFile(str(file), "data.train.0", 100, readers=readers)], "data.train.0")
        return open_loader(spec, exchange, shuffle=False, tokens=120, sources=[source])

    with opened(None) as alone:
        [(expected, reason)] = until_errors([alone])
    assert expected
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(opened(end)) for end in ExchangeGroup(3).ends()]
        for steps, error in until_errors(ranks):
            assert (steps, str(error)) == (expected, str(reason))
            assert f"bad.jsonl, line {num_good + 1}: not valid JSON" in str(error)


class BrokenSource:
    """A source whose block number `bad` cannot be read on this rank."""

    def __init__(self, section: SourceSection, bad: int) -> None:
        source = open_source(section, "data.train.0")
        self.rows, self.bad, self.note, self.name = source.read_block(0), bad, None, source.name
        self.num_blocks = len(self.rows)

    def read_block(self, index: int) -> list[Row]:
        if index == self.bad:
            raise DataError("nfs.jsonl cannot be read here")
        return [self.rows[index]]


@pytest.mark.parametrize("bad", [0, 5, 6, 13, 24])
def test_what_one_rank_alone_cannot_read_is_the_error_of_all(folder: Path, bad: int) -> None:
    section = SourceSection(path=str(folder / "texts.jsonl"))
    spec = spec_of(folder, section)
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                open_loader(
                    spec, end, sources=[BrokenSource(section, bad if end.rank == 1 else -1)], shuffle=False, tokens=100
                )
            )
            for end in ExchangeGroup(3).ends()
        ]
        results = until_errors(ranks)
    assert [str(error) for _, error in results] == ["nfs.jsonl cannot be read here"] * 3
    assert all(steps == results[0][0] for steps, _ in results)


def test_ranks_that_read_different_rows_refuse_to_share(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "texts.jsonl"
    other.write_text("".join((folder / "texts.jsonl").read_text().splitlines(keepends=True)[1:]))
    ends = ExchangeGroup(2).ends()
    specs = [spec_of(folder, SourceSection(path=str(path))) for path in (folder / "texts.jsonl", other)]
    with open_loader(specs[0], ends[0]) as first, open_loader(specs[1], ends[1]) as second:
        for loader in (first, second):
            with pytest.raises(DataError, match=r"rank \d reads other rows than rank \d.*same files"):
                next(loader)


def test_a_tokenizer_that_one_rank_does_not_find_is_the_error_of_all(folder: Path, tmp_path: Path) -> None:
    ends = ExchangeGroup(2).ends()
    missing = MakerSpec(
        model=ModelSection(path=str(tmp_path)), sections=spec_of(folder).sections, key="data.train",
        trained="assistant", max_length=100, overlong="truncate",
    )  # fmt: skip
    with open_loader(spec_of(folder), ends[0]) as first, open_loader(missing, ends[1]) as second:
        for loader in (first, second):
            with pytest.raises(ModelError, match=r"tokenizer\.json"):
                next(loader)


def test_skipped_rows_are_named_and_counted_on_all_ranks(folder: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"{number} fine " * 4}) for number in range(50)]
    lines[7], lines[31] = "no JSON", json.dumps({"body": "no text"})
    file = tmp_path / "some.jsonl"
    file.write_text("\n".join(lines) + "\n")
    spec = spec_of(folder, SourceSection(path=str(file)), skips=True)
    policy = SkipPolicy(skips=True, max_share=0.01)
    with open_loader(spec, policy=policy) as alone, loaders(spec, 3, policy=policy) as ranks:
        expected = take(alone, 12)
        assert take_all(ranks, 12) == [expected] * 3
    named = [row.place for step in expected for row in step[3]]  # type: ignore[index]
    assert sorted(named) == [f"{file}, line 32", f"{file}, line 8"]


def test_a_rank_that_runs_ahead_waits_for_one_whose_steps_are_not_taken(folder: Path) -> None:
    spec = spec_of(folder)
    with open_loader(spec) as alone, loaders(spec, 2, prefetch=1) as (first, second):
        expected = take(alone, 6)
        ahead = take(first, 2)
        behind = take(second, 4)  # two more than the other has taken: its loader is that far
        assert ahead + take(first, 4) == expected
        assert behind + take(second, 2) == expected


def test_closing_one_loader_ends_it_while_the_others_do_not_come(folder: Path) -> None:
    (end, _) = ExchangeGroup(2).ends()
    loader = open_loader(spec_of(folder), end)
    with end.group.changed:
        assert end.group.changed.wait_for(lambda: 0 in end.group.rounds.get(0, {}), 10), "it waits for the other"
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "podium-loader"]


@pytest.mark.slow
def test_worker_processes_of_several_ranks_give_the_same_steps(folder: Path) -> None:
    spec = spec_of(folder)
    with open_loader(spec) as alone, loaders(spec, 2, workers=2) as ranks:
        expected = take(alone, 10)
        assert take_all(ranks, 10) == [expected] * 2
