# SPDX-License-Identifier: Apache-2.0
"""Reference log-probs for preference losses: from a store, a second model, or the base under an adapter."""

# S trained tokens · D documents of a micro-batch

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.data.document_store import DocumentStore
from podium.data.documents import PackedExamples
from podium.data.fingerprints import folder_fingerprint
from podium.data.tokenizer import listed_tokens, load_tokenizer, require_same_tokens
from podium.engine.mesh import Mesh
from podium.engine.scoring import summed_logprobs
from podium.engine.sharding import compute_dtype, place
from podium.models.causal_lm import PackedCausalLM
from podium.models.folder import local_folder
from podium.programs.passes import Compute, cache_folder, stored_pass
from podium.recipe import DpoRecipe, ModelSection
from podium.spmd.run import SpmdRun

REFERENCE_KEY = "preference.reference_model"
_COLUMN = "logprob"


# Log-probs by the reference, summed over the trained tokens of each document [D], in packed order. Collective.
References = Callable[[PackedExamples], Tensor]


def open_references(run: SpmdRun[DpoRecipe]) -> References | None:
    """Opens the reference that the recipe names; None if the loss has no reference. Collective."""
    recipe, engine = run.recipe, run.engine
    if recipe.reference_model is not None:
        require_same_tokens(load_tokenizer(recipe.model), load_tokenizer(_section(recipe)), REFERENCE_KEY)
    match recipe.reference_source:
        case None:
            return None
        case "base":
            return partial(base_logprobs, engine.language_model, engine.mesh)
        case "live":
            with run.preparing("loading the reference"):
                return partial(summed_logprobs, _reference_model(run), engine.mesh)
        case _:
            return _stored(run)


def base_logprobs(model: PackedCausalLM, mesh: Mesh, batch: PackedExamples) -> Tensor:
    """Log-probs of the policy with its adapter switched off, which needs no second copy."""
    with model.without_adapter():
        return summed_logprobs(model, mesh, batch)


def stored_logprobs(store: DocumentStore, mesh: Mesh, batch: PackedExamples) -> Tensor:
    """Log-probs from a store that is computed once, before training."""
    sums = [float(store.read(document)[_COLUMN][0]) for document in batch.documents]
    return torch.tensor(sums, dtype=torch.float32).to(mesh.device)


def _stored(run: SpmdRun[DpoRecipe]) -> References:
    recipe, mesh = run.recipe, run.engine.mesh
    section = _section(recipe)
    adapter = [folder_fingerprint(Path(section.lora.adapter))] if section.lora and section.lora.adapter else []
    weights = folder_fingerprint(local_folder(section.path, REFERENCE_KEY))
    # The same folder gives different weights if they are random or if rows are added to its embeddings.
    seeds = [f"seed {recipe.run.seed}"] if section.init == "random" else []
    grown = [section.new_tokens.init, *listed_tokens(section.new_tokens)] if section.new_tokens is not None else []
    dtype = str(compute_dtype(section, mesh.device))
    folder = cache_folder(recipe, "reference", [weights, *adapter, *seeds, *grown, dtype])

    def prepare() -> Compute:
        # Before the first step the policy is its own reference, unless the recipe names another.
        is_policy = run.is_fresh and recipe.reference_model is None
        model = run.engine.language_model if is_policy else _reference_model(run)

        def compute(batch: PackedExamples) -> tuple[Sequence[int], Mapping[str, NDArray[Any]]]:
            return [1] * len(batch.documents), {_COLUMN: summed_logprobs(model, mesh, batch).cpu().numpy()}

        return compute

    store = stored_pass(run, folder, "computing the reference's log-probs", prepare)
    return partial(stored_logprobs, store, mesh)


def _section(recipe: DpoRecipe) -> ModelSection:
    """The reference's model: another checkpoint, or the policy's initial model."""
    path = recipe.reference_model
    if path is None:
        return recipe.model
    return recipe.model.for_checkpoint(path).model_copy(update={"tokenizer": None})


def _reference_model(run: SpmdRun[DpoRecipe]) -> PackedCausalLM:
    recipe, section = run.recipe, _section(run.recipe)
    folder = local_folder(section.path, REFERENCE_KEY)
    model, _ = place(section, folder, run.engine.mesh, seed=recipe.run.seed, masters=False)
    model.eval()
    return model
