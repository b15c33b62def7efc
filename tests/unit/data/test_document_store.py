# SPDX-License-Identifier: Apache-2.0
"""Numbers about documents on disk: found again by content, gone on with after a break, never taken half."""

import json

import numpy as np
import pytest

from podium.data.document_store import DocumentStore, document_key
from podium.data.documents import Document
from podium.errors import DataError, RunFolderError


def document(*tokens, trained=1):
    return Document(tokens=np.array(tokens, np.int32), trained=np.arange(len(tokens)) >= len(tokens) - trained)


DOCUMENTS = [document(*range(n, 2 * n), trained=n // 2) for n in range(2, 10)]


def tokens_of(each):
    """A made-up answer for each trained token: two columns of different types."""
    marked = each.tokens[each.trained]
    return {"ids": np.stack([marked, marked + 1], 1).astype(np.int32), "logprobs": -marked.astype(np.float32)}


def write(store, rank, documents):
    found = [tokens_of(each) for each in documents]
    empty = tokens_of(document(1, 2, trained=0))
    columns = {name: np.concatenate([empty[name], *(each[name] for each in found)]) for name in empty}
    store.write(rank, documents, [each.num_trained for each in documents], columns)


def part(folder, documents, world):
    """The next part, written by `world` ranks; each has a store of its own."""
    folder.mkdir(exist_ok=True)
    stores = [DocumentStore(folder) for _ in range(world)]
    for rank, store in enumerate(stores):
        write(store, rank, documents[rank::world])
    for rank, store in enumerate(stores):
        store.finish_part(world, is_main=rank == 0)
    return stores


def assert_holds(store, documents):
    for each in documents:
        found, wanted = store.read(each), tokens_of(each)
        assert set(found) == set(wanted)
        for name in wanted:
            np.testing.assert_array_equal(found[name], wanted[name])
            assert found[name].dtype == wanted[name].dtype


def test_numbers_come_back_document_by_document(tmp_path):
    (store,) = part(tmp_path / "s", DOCUMENTS, 1)
    assert_holds(store, reversed(DOCUMENTS))
    assert_holds(DocumentStore(tmp_path / "s"), DOCUMENTS)
    assert len(store) == len(DOCUMENTS)


def test_a_document_is_known_by_its_tokens_and_by_what_is_trained_in_it(tmp_path):
    (store,) = part(tmp_path / "s", [document(1, 2, 3)], 1)
    assert document_key(document(1, 2, 3)) in store
    for other in (document(1, 2, 4), document(1, 2, 3, trained=2), document(1, 2), document(1, 2, 3, 0)):
        assert document_key(other) not in store
    wide = Document(tokens=np.array([1, 2, 3], np.int64), trained=np.array([False, False, True]))
    assert document_key(wide) in store


def test_every_rank_reads_what_the_others_wrote(tmp_path):
    for store in part(tmp_path / "s", DOCUMENTS, 3):
        assert_holds(store, DOCUMENTS)
        assert store._num_parts == 1


def test_a_rank_may_have_nothing_to_write(tmp_path):
    for store in part(tmp_path / "s", DOCUMENTS[:1], 2):
        assert_holds(store, DOCUMENTS[:1])


def test_an_interrupted_pass_continues_behind_its_last_part(tmp_path):
    folder = tmp_path / "s"
    part(folder, DOCUMENTS[:3], 2)
    broken = DocumentStore(folder)
    write(broken, 0, DOCUMENTS[3:5])  # rank 1 never wrote, so the part was never finished

    again = DocumentStore(folder)
    assert again._num_parts == 1
    assert not again.is_complete
    assert [document_key(each) in again for each in DOCUMENTS] == [True] * 3 + [False] * 5

    (store,) = part(folder, DOCUMENTS[5:], 1)  # other documents, and another number of ranks
    assert [document_key(each) in store for each in DOCUMENTS] == [True] * 3 + [False] * 2 + [True] * 3
    part(folder, DOCUMENTS[3:5], 4)
    DocumentStore(folder).finish()
    store = DocumentStore(folder)
    assert store.is_complete
    assert_holds(store, DOCUMENTS)
    assert json.loads((folder / "complete.json").read_text()) == {"parts": 3, "documents": 8}


def test_a_note_that_was_not_yet_renamed_does_not_count(tmp_path):
    folder = tmp_path / "s"
    part(folder, DOCUMENTS, 1)
    (folder / "part-00000.json").rename(folder / "part-00000.json.tmp")
    (folder / "complete.json.tmp").write_text("{}")
    store = DocumentStore(folder)
    assert (store._num_parts, len(store), store.is_complete) == (0, 0, False)


def test_a_part_that_is_written_again_replaces_what_was_left_of_it(tmp_path):
    folder = tmp_path / "s"
    folder.mkdir()
    broken = DocumentStore(folder)
    write(broken, 0, DOCUMENTS[:4])
    (store,) = part(folder, DOCUMENTS[2:6], 1)
    assert len(store) == 4
    assert_holds(store, DOCUMENTS[2:6])


def test_a_document_that_it_does_not_know_says_what_to_do(tmp_path):
    (store,) = part(tmp_path / "s", DOCUMENTS[:2], 1)
    with pytest.raises(DataError, match=r"preference\.reference.*distill\.targets.*live") as message:
        store.read(DOCUMENTS[5])
    assert str(tmp_path / "s") in str(message.value)


def damaged(folder, name, content):
    part(folder, DOCUMENTS, 1)
    path = folder / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content(path.read_bytes()))


NUMBERS = "part-00000-rank-00000.safetensors"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (NUMBERS, lambda old: old[: len(old) // 2]),
        (NUMBERS, lambda old: b""),
        (NUMBERS, lambda old: b"\xff" * len(old)),
        (NUMBERS, None),
        ("part-00000.json", lambda old: b"{"),
        ("part-00000.json", lambda old: b"[]"),
    ],
)
def test_a_damaged_file_is_named_with_the_way_out(tmp_path, name, content):
    folder = tmp_path / "s"
    damaged(folder, name, content)
    with pytest.raises(DataError, match=rf"{folder}/{name} .*{folder} "):
        DocumentStore(folder)


def test_two_runs_cannot_compute_it_at_once(tmp_path):
    first, second = DocumentStore(tmp_path / "s"), DocumentStore(tmp_path / "s")
    with first.held():
        with pytest.raises(RunFolderError, match=r"another run.*run\.cache"), second.held():
            raise AssertionError("held twice")
        assert not second.is_complete
    with second.held():
        pass


def test_who_fails_lets_go_of_it(tmp_path):
    store = DocumentStore(tmp_path / "s")
    with pytest.raises(ZeroDivisionError), store.held():
        raise ZeroDivisionError
    with DocumentStore(tmp_path / "s").held():
        pass


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    store = DocumentStore(tmp_path / "file" / "s")
    with pytest.raises(RunFolderError, match=r"file/s .*run\.cache"), store.held():
        raise AssertionError("held")
