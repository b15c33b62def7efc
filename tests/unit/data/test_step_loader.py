# SPDX-License-Identifier: Apache-2.0
"""The background loader: the same steps for any number of workers, exact resume, errors and an orderly end."""

import json
import logging
import multiprocessing
import subprocess
import sys
import threading

import numpy as np
import pytest
from chat_tokenizers import CHATML, byte_tokenizer

from podium.data import loader as loader_module
from podium.data.examples import MakerSpec
from podium.data.loader import StepLoader, StepSize
from podium.data.sources import open_source
from podium.data.state import decode, encode
from podium.errors import DataError, ModelError
from podium.recipe import ModelSection, SourceSection


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer and two sources: chats of very different lengths, and raw texts."""
    folder = tmp_path_factory.mktemp("loader")
    byte_tokenizer(CHATML).save_pretrained(folder / "model")
    lengths = np.random.default_rng(0).lognormal(2.5, 0.8, 60).clip(1, 90).astype(int).tolist()
    chats = [
        {"messages": [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": "a" * length}]}
        for number, length in enumerate(lengths)
    ]
    write(folder / "chats.jsonl", chats)
    write(folder / "texts.jsonl", [{"text": f"text {number} " + "b" * (number % 40)} for number in range(25)])
    return folder


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def spec_of(folder, *sections, **changed):
    sections = sections or (
        SourceSection(path=str(folder / "chats.jsonl"), weight=3.0),
        SourceSection(path=str(folder / "texts.jsonl"), weight=1.0),
    )
    values = {"trained": "assistant", "max_length": 100, "overlong": "truncate", **changed}
    return MakerSpec(model=ModelSection(path=str(folder / "model")), sections=sections, key="data.train", **values)


def open_loader(spec, **changed):
    sources = [open_source(section, f"{spec.key}.{index}") for index, section in enumerate(spec.sections)]
    values = {"seed": 5, "shuffle": True, "shuffle_rows": 20, "tokens_per_step": 300, "window": 16}
    values |= {"workers": 0, "prefetch": 2, **changed}
    size = StepSize(tokens=values.pop("tokens_per_step"), rows=values.pop("rows", None))
    return StepLoader(sources, spec, size=size, **values)


def documents_of(step):
    return [document for example in step.examples for document in example.documents]


def shown(step):
    documents = [(document.tokens.tolist(), document.trained.tolist()) for document in documents_of(step)]
    return documents, step.counts


def take(loader, count):
    return [next(loader) for _ in range(count)]


def test_steps_are_well_filled_and_never_over_budget(folder):
    with open_loader(spec_of(folder)) as loader:
        totals = [sum(example.num_inputs for example in step.examples) for step in take(loader, 20)]
    assert max(totals) <= 300
    assert np.mean(totals) > 0.95 * 300


def test_counts_say_what_became_of_every_row(folder):
    with open_loader(spec_of(folder, max_length=40, overlong="truncate")) as loader:
        counts = take(loader, 12)[-1].counts
    assert counts.read == counts.trained + counts.dropped_untrained == sum(counts.drawn)
    assert counts.truncated > 0
    assert 0.6 < counts.drawn[0] / counts.read < 0.9
    assert counts.epochs[0] >= 1
    with open_loader(spec_of(folder, max_length=40, overlong="drop")) as loader:
        dropped = take(loader, 12)[-1].counts
    assert dropped.dropped_overlong > 0
    assert dropped.truncated == 0


# fast, with workers: test_a_map_plug_in_runs_in_the_workers_too
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loader_resumed_after_any_step_gives_exactly_the_steps_that_follow(folder, workers):
    spec = spec_of(folder)
    with open_loader(spec) as loader:
        unbroken = take(loader, 12)
    for cut in range(11) if workers == 0 else [4]:
        values, arrays = encode(unbroken[cut].state)
        state = decode(json.loads(json.dumps(values)), arrays)
        with open_loader(spec, workers=workers, state=state) as loader:
            resumed = take(loader, 11 - cut)
        assert [shown(step) for step in resumed] == [shown(step) for step in unbroken[cut + 1 :]]


@pytest.mark.slow
def test_the_number_of_workers_and_the_prefetch_change_nothing(folder):
    spec = spec_of(folder)
    with open_loader(spec) as inline, open_loader(spec, workers=2, prefetch=5) as pooled:
        for first, second in zip(take(inline, 8), take(pooled, 8), strict=True):
            assert shown(first) == shown(second)
            assert encode(first.state)[0] == encode(second.state)[0]


@pytest.mark.slow
def test_an_error_in_the_background_reaches_the_consumer_as_itself_and_stays(folder, tmp_path):
    file = tmp_path / "bad.jsonl"
    write(file, [{"text": "fine " * 5}] * 30 + [{"body": "oops"}])
    for workers in (0, 1):
        spec = spec_of(folder, SourceSection(path=str(file)))
        with open_loader(spec, shuffle=False, workers=workers, tokens_per_step=100, window=2) as loader:
            take(loader, 6)  # what comes before the bad row is delivered
            for _ in range(2):
                with pytest.raises(DataError, match=r"bad\.jsonl, line 31: .*`messages`"):
                    take(loader, 100)


def test_malformed_json_reaches_the_consumer_with_its_line(folder, tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"text": "fine"}\noops\n')
    spec = spec_of(folder, SourceSection(path=str(file)))
    with open_loader(spec) as loader, pytest.raises(DataError, match=r"bad\.jsonl, line 2: .*JSON"):
        next(loader)


def test_a_source_without_any_trained_token_is_an_error_after_one_epoch(folder, tmp_path):
    file = tmp_path / "questions.jsonl"
    write(file, [{"messages": [{"role": "user", "content": "why?"}]}] * 10)
    sections = (SourceSection(path=str(folder / "texts.jsonl")), SourceSection(path=str(file)))
    message = r"questions\.jsonl.*data\.trained"
    with open_loader(spec_of(folder, *sections)) as loader, pytest.raises(DataError, match=message):
        take(loader, 50)


@pytest.mark.slow
def test_a_map_plug_in_runs_in_the_workers_too(folder, tmp_path):
    plugin = tmp_path / "shape.py"
    plugin.write_text("def shape(row):\n    return {'text': row['text'].upper()} if 'b' in row['text'] else None\n")
    section = SourceSection(path=str(folder / "texts.jsonl"), map=f"{plugin}:shape")
    spec = spec_of(folder, section)
    with open_loader(spec) as inline, open_loader(spec, workers=1) as pooled:
        first, second = take(inline, 3), take(pooled, 3)
    assert [shown(step) for step in first] == [shown(step) for step in second]
    assert first[-1].counts.dropped_by_map > 0


def test_documents_that_cannot_fit_a_step_are_refused_before_anything_starts(folder):
    with pytest.raises(DataError, match=r"data\.max_length: .* 100 tokens .*tokens_per_step 50"):
        open_loader(spec_of(folder), tokens_per_step=50)


def test_a_missing_tokenizer_reaches_the_consumer(folder, tmp_path):
    spec = MakerSpec(
        model=ModelSection(path=str(tmp_path)), sections=spec_of(folder).sections, key="data.train",
        trained="assistant", max_length=100, overlong="truncate",
    )  # fmt: skip
    with open_loader(spec) as loader, pytest.raises(ModelError, match=r"tokenizer\.json.*model\.tokenizer"):
        next(loader)


@pytest.mark.slow
def test_closing_ends_the_thread_and_the_workers(folder):
    for workers in (0, 2):
        loader = open_loader(spec_of(folder), workers=workers, prefetch=1)
        next(loader)
        loader.close()
        loader.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "podium-loader"]
        assert not [child for child in multiprocessing.active_children() if "podium" in child.name]
    with pytest.raises(RuntimeError, match="closed"):
        take(loader, 10)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_reported_and_not_waited_for(folder):
    with open_loader(spec_of(folder), workers=1, prefetch=1) as loader:
        next(loader)
        (worker,) = [child for child in multiprocessing.active_children() if "podium" in child.name]
        worker.kill()
        with pytest.raises(DataError, match=r"process 0 .*code -9\).*data\.workers"):
            take(loader, 50)


def test_a_long_wait_is_logged_with_its_reason(folder, caplog, monkeypatch):
    spec = spec_of(folder)
    release = threading.Event()
    source = open_source(spec.sections[0], "data.train.0")

    class Stalled:
        name = source.name
        num_blocks = source.num_blocks
        fingerprint = source.fingerprint

        def read_block(self, index):
            release.wait(timeout=30)
            return source.read_block(index)

    class ReleasingHandler(logging.Handler):
        def emit(self, record):
            release.set()

    monkeypatch.setattr(loader_module, "_WARN_AFTER_S", 0.3)
    handler = ReleasingHandler()
    logging.getLogger(loader_module.__name__).addHandler(handler)
    try:
        with caplog.at_level(logging.WARNING), StepLoader(
            [Stalled()], spec_of(folder, spec.sections[0]), seed=0, shuffle=False, shuffle_rows=1,
            size=StepSize(tokens=200), window=4, workers=0, prefetch=1,
        ) as loader:  # fmt: skip
            step = next(loader)
    finally:
        logging.getLogger(loader_module.__name__).removeHandler(handler)
    assert "reading rows" in caplog.text
    assert step.wait_s >= 0.3


def test_workers_end_when_their_parent_is_killed(folder):
    code = (
        "import sys, multiprocessing\n"
        "from podium.data.workers import TokenizerPool\n"
        "from podium.data.examples import MakerSpec\n"
        "from podium.recipe import ModelSection, SourceSection\n"
        "if __name__ == '__main__':\n"
        "    spec = MakerSpec(model=ModelSection(path=sys.argv[1]), sections=(SourceSection(path='x.jsonl'),),\n"
        "                     key='data.train', trained='assistant', max_length=9, overlong='drop')\n"
        "    pool = TokenizerPool(spec, 1)\n"
        "    pool.submit([])\n"
        "    assert pool.result(lambda: False) == []\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(folder / "model")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    assert parent.stdout.readline().strip() == b"ready"
    parent.kill()
    parent.wait()
    # The worker inherited the pipe: end of file comes only once the last process that holds it is gone.
    assert parent.stdout.read() == b""
    parent.stdout.close()
    parent.stdin.close()


def test_a_damaged_state_is_refused(folder):
    with open_loader(spec_of(folder)) as loader:
        values, arrays = encode(next(loader).state)
    with pytest.raises(DataError, match=r"ValueError: \d+ tokens"):
        decode(values, {**arrays, "tokens": arrays["tokens"][:-1]})
    with pytest.raises(DataError, match="KeyError: 'draw'"):
        decode({key: value for key, value in values.items() if key != "draw"}, arrays)
