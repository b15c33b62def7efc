# SPDX-License-Identifier: Apache-2.0
"""Vocabulary growth: embedding and head rows for tokens that a checkpoint lacks, initialised from its existing rows."""

# V rows of the vocabulary · E hidden width

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from podium.data.tokenizer import load_tokenizer, without_new_tokens
from podium.errors import ModelError
from podium.models.tensor_shards import Box
from podium.models.weights import WeightSource
from podium.recipe import ModelSection


def new_rows(section: ModelSection) -> dict[int, list[int]]:
    """For each token that model.new_tokens adds: its id, and the ids that encoded its text before. Tokens that the
    tokenizer already has keep their embeddings."""
    if section.new_tokens is None:
        return {}
    before, after = load_tokenizer(without_new_tokens(section)), load_tokenizer(section)
    known = before.get_vocab()
    added = sorted((number, token) for token, number in after.get_vocab().items() if token not in known)
    _require_free(added, known)
    return {
        number: list(before(token, add_special_tokens=False, verbose=False)["input_ids"]) for number, token in added
    }


def _require_free(added: Sequence[tuple[int, str]], known: Mapping[str, int]) -> None:
    """A tokenizer uses its number of tokens as the next id. If its ids have gaps, that id may be taken, and a new token
    would overwrite the embedding of an old one."""
    owners = {number: token for token, number in known.items()}
    for number, token in added:
        if number in owners:
            raise ModelError(
                f"model.new_tokens: the tokenizer gives {token!r} the id {number}, which {owners[number]!r} has "
                "already: its ids have gaps. Add the tokens to the tokenizer yourself with ids of their own, save it, "
                "and set model.tokenizer to it."
            )


def grown_vocabulary(section: ModelSection, vocab_size: int) -> int:
    """Number of rows that the model needs: the checkpoint's, and more if new tokens have ids beyond them."""
    return max([vocab_size, *(number + 1 for number in new_rows(section))])


class GrownWeights:
    """A checkpoint's weights including the rows of new tokens."""

    def __init__(self, source: WeightSource, section: ModelSection, model: nn.Module) -> None:
        """`model` already has the grown vocabulary: its embedding and head are the tensors that grow."""
        assert section.new_tokens is not None
        self._source = source
        self._rows = new_rows(section)
        self._init = section.new_tokens.init
        self._known = len(load_tokenizer(without_new_tokens(section)))
        embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]  # type: ignore[operator]
        weights = [each.weight for each in embeddings if each is not None]
        named = dict(model.named_parameters())
        self._names = {name for name, value in named.items() if any(value is weight for weight in weights)}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes with the rows of the new tokens."""
        shapes = dict(self._source.shapes())
        for name in self._names & shapes.keys():
            rows, *rest = shapes[name]
            shapes[name] = (max([rows, *(number + 1 for number in self._rows)]), *rest)
        return shapes

    def read(self, name: str, box: Box) -> Tensor:
        """A part of a tensor, with the new rows where it has any."""
        if name not in self._names:
            return self._source.read(name, box)
        old = self._source.read(name, Box.whole(self._source.shapes()[name])).float()
        values_VE = torch.zeros(self.shapes()[name])
        values_VE[: len(old)] = old
        mean_E = old[: self._known].mean(0)
        for number, pieces in self._rows.items():
            # A token whose text the tokenizer could not encode starts as the mean of all.
            is_written = self._init == "pieces" and len(pieces) > 0
            values_VE[number] = old[pieces].mean(0) if is_written else mean_E
        return values_VE[box.slices()]


def with_new_tokens(source: WeightSource, section: ModelSection, model: nn.Module) -> WeightSource:
    """The source itself, or with new rows."""
    return source if section.new_tokens is None else GrownWeights(source, section, model)
