# SPDX-License-Identifier: Apache-2.0
"""Custom losses on fixed data: what a function may read, and how it declares it. Torch-free.

The names of a function's parameters say what it reads. Podium computes what is named and nothing else: without
`entropy_S` there is no pass for entropies, without `reference_chosen_R` no reference model."""

from __future__ import annotations

from collections.abc import Mapping

from podium.errors import RecipeError
from podium.recipe import plugins

# Parameter -> its content. The first of each must be named: without it there is no gradient.
TOKEN_INPUTS: Mapping[str, str] = {
    "logprobs_S": "log-probs of the trained tokens",
    "entropy_S": "entropy of the distribution at each of them; a constant",
    "targets_S": "ids of the trained tokens, int64",
    "sequence_S": "the document of each, int64, 0 .. num_sequences - 1",
    "num_sequences": "number of documents",
}
PAIR_INPUTS: Mapping[str, str] = {
    "chosen_R": "log-prob of each pair's chosen completion, summed over its tokens",
    "rejected_R": "that of the rejected one",
    "reference_chosen_R": "the chosen completion's under the reference; a constant",
    "reference_rejected_R": "the rejected one's under the reference; a constant",
    "chosen_tokens_R": "number of tokens of the chosen completion",
    "rejected_tokens_R": "number of tokens of the rejected one",
    "beta": "preference.beta",
}
_REFERENCES = ("reference_chosen_R", "reference_rejected_R")
# Those that depend on other tokens of a document: the loss then gets all tokens of a micro-batch at once.
_SPANNING = ("sequence_S", "num_sequences")


def declared_inputs(path: str, key: str, known: Mapping[str, str]) -> tuple[str, ...]:
    """The names of `known` that a custom loss takes. Raises a RecipeError about a parameter that is none of them, and
    about a loss without the first of them."""
    parameters = plugins.parameters(path, key)
    unknown = [each.name for each in parameters if each.is_required and each.name not in known]
    first = next(iter(known))
    names = tuple(each.name for each in parameters if each.name in known)
    if not unknown and first in names:
        return names
    problem = f"takes {', '.join(unknown)}" if unknown else f"does not take {first}"
    listed = ", ".join(f"{name} ({content})" for name, content in known.items())
    raise RecipeError(f"{key}: {path} {problem}. A loss names what it reads: {listed}.")


def spans_tokens(names: tuple[str, ...]) -> bool:
    """Whether the loss of a token may depend on other tokens, by what the loss takes."""
    return any(name in names for name in _SPANNING)


def reads_reference(names: tuple[str, ...]) -> bool:
    """Whether a loss on pairs compares with a reference, by what it takes."""
    return any(name in names for name in _REFERENCES)
