# SPDX-License-Identifier: Apache-2.0
"""Examples of one or two documents: packed together, composed into steps, and saved where a run stops."""

import json

import numpy as np
import pytest
from chat_tokenizers import CHATML, byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from podium.data.chat import Dropped
from podium.data.composing import StepComposer, StepSize, first_state
from podium.data.documents import Document, Example, SplitExamples, pack_examples
from podium.data.examples import ExampleMaker, MakerSpec, shape_of
from podium.data.loader import StepLoader
from podium.data.packing import compose_step
from podium.data.reading import OrderedRows
from podium.data.results import MadeExample
from podium.data.rows import Row
from podium.data.sources import open_source
from podium.data.state import decode, encode
from podium.data.stream import StreamPosition
from podium.errors import DataError
from podium.recipe import ModelSection, SourceSection


def document(*tokens, trained=1):
    """Tokens of which the last `trained` are trained."""
    return Document(tokens=np.array(tokens, np.int32), trained=np.arange(len(tokens)) >= len(tokens) - trained)


def pair(left, right, value=0.0):
    return Example(documents=(left, right), value=value)


# --- packing ------------------------------------------------------------------------------------------------------


def test_pairs_are_packed_by_length_and_say_where_their_documents_went():
    long, short, middle, tiny = (
        document(*range(1, 6)),
        document(7, 8, 9),
        document(1, 2, 3, 4, trained=2),
        document(5, 6),
    )
    packed = pack_examples([pair(long, short, 0.5), pair(middle, tiny, -1.0)])

    # Inputs: 4, 2, 3 and 1; packed shortest first: tiny, short, middle, long.
    assert [each.num_inputs for each in packed.documents] == [1, 2, 3, 4]
    assert packed.places.tolist() == [[3, 1], [2, 0]]
    assert packed.document_S.tolist() == [0, 1, 2, 2, 3]
    assert packed.values_R.tolist() == [0.5, -1.0]
    assert packed.packed.offsets.tolist() == [0, 1, 3, 6, 10]
    assert packed.packed.targets_T[packed.packed.weights_T > 0].tolist() == [6, 9, 3, 4, 5]


def test_documents_of_one_length_keep_the_order_of_their_rows():
    packed = pack_examples([pair(document(1, 2), document(3, 4)), pair(document(5, 6), document(7, 8))])
    assert packed.places.tolist() == [[0, 1], [2, 3]]


def test_no_example_is_one_token_of_no_weight():
    packed = pack_examples([])
    assert packed.packed.num_trained == 0
    assert packed.packed.num_tokens == 1
    assert len(packed.documents) == len(packed.document_S) == len(packed.values_R) == len(packed.places) == 0


def test_a_micro_batch_is_made_of_the_rows_that_the_split_names():
    first, second, third = (Example(documents=(document(*range(n)),)) for n in (2, 3, 4))
    split = SplitExamples(examples=(first, second, third), rows=((2, 0), ()))
    assert split.parts == ((third, first), ())


EXAMPLES = st.lists(
    st.tuples(st.integers(2, 9), st.integers(2, 9), st.floats(-2, 2, width=32)).map(
        lambda sizes: pair(document(*range(sizes[0])), document(*range(100, 100 + sizes[1]), trained=2), sizes[2])
    ),
    max_size=6,
)


@given(EXAMPLES)
def test_places_lead_back_to_every_document_and_its_trained_tokens(examples):
    packed = pack_examples(examples)
    for row, example in enumerate(examples):
        for side, wanted in enumerate(example.documents):
            place = packed.places[row, side]
            assert packed.documents[place] is wanted
            assert (packed.document_S == place).sum() == wanted.num_trained
    assert packed.values_R.tolist() == [np.float32(example.value) for example in examples]


# --- rows become examples -----------------------------------------------------------------------------------------


def maker(shape="pairs", max_length=1000, overlong="truncate", template=CHATML, trained="assistant"):
    return ExampleMaker(byte_tokenizer(template), shape, trained, max_length, overlong)


def made(maker, **values):
    return maker.make(Row(values, "rows.jsonl, line 3"))


def test_a_pair_that_is_cut_off_before_it_parts_is_dropped():
    values = {"prompt": "abc", "chosen": "0000001", "rejected": "0000002"}
    assert made(maker(max_length=7), **values) is Dropped.OVERLONG
    kept = made(maker(max_length=9), **values)  # the tenth token, the first that differs, is still a target
    assert isinstance(kept, MadeExample)
    assert kept.truncated
    assert [each.num_inputs for each in kept.example.documents] == [9, 9]


def test_a_ranked_pair_that_differs_only_in_its_truncated_beginning_is_dropped():
    values = {"chosen": "same ending", "rejected": "same ending", "prompt": "x"}
    with pytest.raises(DataError, match=r"`chosen` and `rejected`.*prefer"):
        made(maker("ranked", max_length=5), **values)
    values["rejected"] = "another beginning, same ending"
    assert made(maker("ranked", max_length=5), **values) is Dropped.OVERLONG


def test_a_pair_whose_difference_the_template_takes_away_is_reported_and_not_trained_on():
    trimming = CHATML.replace("message.content", "message.content.strip()").replace("m.content", "m.content.strip()")
    assert trimming != CHATML
    requested = [{"role": "user", "content": "2+2?"}]
    answers = ([{"role": "assistant", "content": text}] for text in ("4", "4 "))
    with pytest.raises(DataError, match=r"rows.jsonl, line 3: `chosen` and `rejected`.*chat template"):
        made(maker(template=trimming), prompt=requested, **dict(zip(("chosen", "rejected"), answers, strict=True)))


def test_a_pair_is_dropped_whole_when_one_side_is_too_long():
    values = {"prompt": "abc", "chosen": "0", "rejected": "1" * 50}
    assert made(maker(max_length=20, overlong="drop"), **values) is Dropped.OVERLONG
    with pytest.raises(DataError, match=r"line 3: 53 tokens.* 20\b"):
        made(maker(max_length=20, overlong="error"), **values)


def test_a_prompt_that_fills_the_longest_length_leaves_nothing_to_train():
    assert made(maker(max_length=3), prompt="abcdef", chosen="0", rejected="1") is Dropped.UNTRAINED


def test_completions_are_what_is_compared_whatever_is_trained_elsewhere():
    plain, everything = (
        made(maker(trained=which), prompt="ab", chosen="0", rejected="1") for which in ("assistant", "everything")
    )
    for left, right in zip(plain.example.documents, everything.example.documents, strict=True):
        assert left.trained.tolist() == right.trained.tolist()


def test_the_prompt_of_a_pair_is_what_comes_before_its_chosen_answer():
    values = {"prompt": "2+2=", "chosen": "4", "rejected": "5", "level": "easy"}
    prompt = maker().prompt_of(Row(values, "rows.jsonl, line 1"))
    assert prompt is not None
    assert prompt.reference == "4"
    assert prompt.values == values  # all of it, for the reward function
    assert byte_tokenizer(CHATML).decode(prompt.tokens) == "2+2="


@pytest.mark.parametrize(
    ("program", "changes", "shape"),
    [
        ("dpo", {}, "pairs"),
        ("dpo", {"preference": {"loss": "kto"}}, "labels"),
        ("reward_model", {}, "ranked"),
        ("reward_model", {"reward_model": {"learns": "scores"}}, "scores"),
        ("sft", {}, "documents"),
        ("distill", {"teachers": [{"path": "t"}]}, "documents"),
    ],
)
def test_a_program_says_what_its_rows_hold(program, changes, shape):
    from helpers.recipes import recipe_values
    from podium.recipe import parse_recipe

    assert shape_of(parse_recipe({**recipe_values(), "program": program, **changes})) == shape


# --- steps of examples --------------------------------------------------------------------------------------------


def test_a_pair_is_taken_whole_or_not_at_all():
    waiting = [pair(document(*range(n)), document(*range(n))) for n in (4, 6, 3, 2)]  # 6, 10, 4 and 2 inputs
    assert compose_step(waiting, 10) == (0, 2)
    assert compose_step(waiting, 9) == (0, 3)
    assert compose_step(waiting, 8) == (0, 3)


def test_a_step_of_rows_takes_so_many_in_their_order_however_long_they_are():
    state = first_state(StreamPosition(draw=0, sources=()))
    examples = tuple(pair(document(*range(n)), document(*range(2))) for n in (90, 2, 50, 3, 4))
    state = type(state)(position=state.position, waiting=examples, counts=state.counts, made_in_epoch=())
    composer = StepComposer([], StepSize(tokens=10, rows=2), 16, state)
    first, after = composer.take()
    assert first == examples[:2]
    second, after = composer.take()
    assert second == examples[2:4]
    assert after.waiting == examples[4:]
    assert not composer.is_ready


@given(EXAMPLES)
def test_waiting_pairs_are_saved_and_read_again_to_the_bit(examples):
    state = first_state(StreamPosition(draw=3, sources=()))
    state = type(state)(position=state.position, waiting=tuple(examples), counts=state.counts, made_in_epoch=())
    values, arrays = encode(state)
    found = decode(json.loads(json.dumps(values)), arrays)
    assert [_shown(each) for each in found.waiting] == [_shown(each) for each in examples]


def test_a_saved_buffer_whose_examples_do_not_add_up_is_refused():
    state = first_state(StreamPosition(draw=0, sources=()))
    state = type(state)(
        position=state.position, waiting=(pair(document(1, 2), document(3, 4)),), counts=state.counts, made_in_epoch=()
    )
    values, arrays = encode(state)
    with pytest.raises(DataError, match=r"2 documents.* 3\b"):
        decode(values, {**arrays, "sizes": np.array([3])})
    del arrays["sizes"]
    with pytest.raises(DataError, match="KeyError: 'sizes'"):
        decode(values, arrays)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer, and pairs of very different lengths with margins."""
    folder = tmp_path_factory.mktemp("pairs")
    byte_tokenizer(CHATML).save_pretrained(folder / "model")
    lengths = np.random.default_rng(1).integers(1, 40, (50, 2)).tolist()
    rows = [
        {"prompt": f"{number}: ", "chosen": "a" * left, "rejected": "b" * right, "margin": number / 4}
        for number, (left, right) in enumerate(lengths)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def loader_of(folder, *, size, state=None, workers=0):
    section = SourceSection(path=str(folder / "pairs.jsonl"))
    spec = MakerSpec(
        model=ModelSection(path=str(folder / "model")), sections=(section,), key="data.train", trained="assistant",
        max_length=50, overlong="truncate", shape="ranked",
    )  # fmt: skip
    sources = [open_source(section, "data.train.0")]
    return StepLoader(
        sources, spec, seed=3, shuffle=True, shuffle_rows=20, size=size, window=16, workers=workers, prefetch=2,
        state=state,
    )  # fmt: skip


def _shown(example):
    return [(each.tokens.tolist(), each.trained.tolist()) for each in example.documents], example.value


SIZES = [StepSize(tokens=300), StepSize(tokens=300, rows=7)]


@pytest.mark.parametrize(
    ("size", "workers"), [(SIZES[0], 0), (SIZES[1], 0), pytest.param(SIZES[1], 2, marks=pytest.mark.slow)]
)
def test_a_loader_of_pairs_resumed_after_any_step_gives_exactly_the_steps_that_follow(folder, size, workers):
    with loader_of(folder, size=size) as loader:
        unbroken = [next(loader) for _ in range(10)]
    for cut in range(0, 9, 2) if workers == 0 else [4]:
        values, arrays = encode(unbroken[cut].state)
        state = decode(json.loads(json.dumps(values)), arrays)
        with loader_of(folder, size=size, state=state, workers=workers) as loader:
            resumed = [next(loader) for _ in range(9 - cut)]
        for found, wanted in zip(resumed, unbroken[cut + 1 :], strict=True):
            assert [_shown(each) for each in found.examples] == [_shown(each) for each in wanted.examples]
            assert found.counts == wanted.counts


def test_steps_of_rows_have_so_many_and_every_row_once_an_epoch(folder):
    with loader_of(folder, size=SIZES[1]) as loader:
        steps = [next(loader) for _ in range(8)]
    assert {len(step.examples) for step in steps} == {7}
    margins = [example.value for step in steps for example in step.examples]
    assert sorted(margins[:50]) == [number / 4 for number in range(50)]


def test_held_out_pairs_are_read_in_file_order_and_give_prompts(folder):
    sections = [SourceSection(path=str(folder / "pairs.jsonl"))]
    reading = maker("ranked", max_length=50)
    examples = OrderedRows(sections, "data.heldout").examples(reading, 3)
    assert [example.value for example in examples] == [0.0, 0.25, 0.5]
    prompts = OrderedRows(sections, "data.heldout").prompts(reading, 2)
    assert [byte_tokenizer(CHATML).decode(prompt.tokens) for prompt in prompts] == ["0: ", "1: "]
