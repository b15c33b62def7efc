# SPDX-License-Identifier: Apache-2.0
"""Computes the outputs of a reference or of teachers for every document before training. Runs with the same models and
data share the result. An interrupted pass continues where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podium.data.chat import Overlong
from podium.data.control_tokens import ControlRule
from podium.data.document_store import DocumentStore, document_key
from podium.data.documents import Document, Example, PackedExamples, pack_examples
from podium.data.examples import ExampleMaker, MakerSpec
from podium.data.fingerprints import files_fingerprint, source_fingerprint, text_fingerprint
from podium.data.reading import OrderedRows
from podium.data.skipping import SkipPolicy
from podium.data.splitting import split_step
from podium.data.tokenizer import load_tokenizer
from podium.engine.mesh import Mesh
from podium.errors import RunStoppedError
from podium.recipe import SourceSection, SpmdRecipe, plugins
from podium.spmd.run import SpmdRun

# Micro-batches of one rank in a part. An interrupted pass loses at most one part.
_PART_MICRO_BATCHES = 16

Compute = Callable[[PackedExamples], tuple[Sequence[int], Mapping[str, NDArray[Any]]]]
"""A micro-batch -> rows of the columns of each of its documents, in their packed order, and the columns."""


def cache_folder(recipe: SpmdRecipe, purpose: str, models: Sequence[str]) -> Path:
    """One folder per combination of models and data. `models` holds fingerprints and settings of the models; the data
    is the recipe's."""
    spec = MakerSpec.of(recipe)
    sources = [
        source_fingerprint(section, f"data.{part}.{index}")
        for part, sections in (("train", recipe.data.train), ("heldout", recipe.data.heldout))
        for index, section in enumerate(sections)
    ]
    tokenizing = _tokenizing(load_tokenizer(recipe.model))
    content = (
        f"control tokens in content, tags of results in what users say too: {recipe.model.control_tokens_in_content}"
    )
    how = [spec.trained, str(spec.max_length), spec.overlong, spec.shape, tokenizing, content]
    maps = [_reading(section) for section in (*spec.sections, *recipe.data.heldout)]
    key = text_fingerprint("\n".join([purpose, *models, *sources, *how, *maps]))
    return Path(recipe.run.cache or Path(recipe.run.folder) / ".cache") / f"{purpose}-{key[:16]}"


def _tokenizing(tokenizer: Any) -> str:
    """Everything that determines the tokens of a text: the vocabulary with its rules, special tokens, and the chat
    template."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    rules = str(sorted(tokenizer.get_vocab().items())) if core is None else core.to_str()
    return text_fingerprint(f"{rules} {tokenizer.special_tokens_map} {tokenizer.chat_template}")


def _reading(section: SourceSection) -> str:
    """How a source's rows are read: its renamed columns, and the code of its `map`."""
    code = "" if section.map is None else files_fingerprint([plugins.source_file(section.map, "map")])
    return f"{sorted(section.columns.items())} {section.map} {code}"


def stored_pass(run: SpmdRun[SpmdRecipe], folder: Path, what: str, prepare: Callable[[], Compute]) -> DocumentStore:
    """The folder's store, with every document of data.train and data.heldout. Missing documents are computed with the
    result of `prepare`, which loads a model only then. Collective."""
    mesh, store = run.engine.mesh, DocumentStore(folder)
    if mesh.gather(store.is_complete)[0]:
        return store
    with run.preparing(f"{what}, once for this model and data ({folder})") as tell, ExitStack() as stack:
        if mesh.is_main:
            stack.enter_context(store.held())
        mesh.barrier()
        store = DocumentStore(folder)  # another run may have continued it in the meantime
        _fill(store, run, prepare(), tell)
    return store


def _fill(store: DocumentStore, run: SpmdRun[SpmdRecipe], compute: Compute, tell: Callable[[str], None]) -> None:
    mesh = run.engine.mesh
    batch: dict[tuple[int, int], Document] = {}
    budget, held = _PART_MICRO_BATCHES * mesh.data_ranks * run.max_tokens, 0
    for document in _documents(run.recipe):
        if (key := document_key(document)) in batch or key in store:
            continue
        batch[key] = document
        held += document.num_inputs
        if held >= budget:
            _part(store, list(batch.values()), mesh, compute, run.max_tokens)
            tell(f"{len(store)} documents")
            _stop_together(run, store)
            batch, held = {}, 0
    if batch:
        _part(store, list(batch.values()), mesh, compute, run.max_tokens)
    if mesh.is_main:
        store.finish()
    mesh.barrier()


def _documents(recipe: SpmdRecipe) -> Iterator[Document]:
    spec, tokenizer = MakerSpec.of(recipe), load_tokenizer(recipe.model)
    # Held-out documents that are too long are truncated instead of refused.
    lenient: Overlong = "truncate" if spec.overlong == "error" else spec.overlong
    data, policy = recipe.data, SkipPolicy.of(recipe.data)
    for part, sections, overlong in (("train", data.train, spec.overlong), ("heldout", data.heldout, lenient)):
        maker = ExampleMaker(
            tokenizer, spec.shape, spec.trained, spec.max_length, overlong, ControlRule.of(recipe.model)
        )
        for example in OrderedRows(sections, f"data.{part}", policy).iterate(maker):
            yield from example.documents


def _part(store: DocumentStore, documents: list[Document], mesh: Mesh, compute: Compute, max_tokens: int) -> None:
    plan = split_step(
        [document.num_inputs for document in documents],
        num_ranks=mesh.data_ranks,
        max_tokens=max_tokens,
        hard_cap=False,
    )
    mine: list[Document] = []
    lengths: list[int] = []
    columns: dict[str, list[NDArray[Any]]] = {}
    for part in plan.rows(mesh.data_rank)[0]:
        packed = pack_examples([Example(documents=(documents[row],)) for row in part.tolist()])
        sizes, batch_columns = compute(packed)
        mine += packed.documents
        lengths += sizes
        for name, values in batch_columns.items():
            columns.setdefault(name, []).append(values)
    if mesh.speaks_for_data:
        store.write(mesh.data_rank, mine, lengths, {name: np.concatenate(each) for name, each in columns.items()})
    mesh.barrier()
    store.finish_part(mesh.data_ranks, is_main=mesh.is_main)
    mesh.barrier()


def _stop_together(run: SpmdRun[SpmdRecipe], store: DocumentStore) -> None:
    if any(run.engine.mesh.gather(run.stop_requested)):
        raise RunStoppedError(
            f"stopped before the first step, after {len(store)} documents of the pass over the data. The same command "
            f"continues from there ({store.folder})."
        )
