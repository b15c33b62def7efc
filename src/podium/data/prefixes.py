# SPDX-License-Identifier: Apache-2.0
"""Prefixes that documents of one micro-batch share, as a tree: each shared stretch of tokens is computed once.

A segment is a stretch of tokens that one or more documents contain at the same position, behind the same tokens. It
continues its parent segment. Whether sharing pays is decided by cost, from the tokens and the model's shape alone: all
ranks that have the same micro-batch, and a run that is repeated, decide alike. NumPy only."""

# T packed tokens · U tokens of the tree · G segments · D documents

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podium.data.costs import SequenceCost
from podium.data.documents import Document
from podium.data.trajectories import TrajectoryBlock

Ints = NDArray[np.int64]

# Sharing changes the order of sums and costs some work on the host: it must save at least this part of the model's
# operations.
LEAST_SAVED = 0.05


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixTree:
    """The segments of a micro-batch, each behind its parent (depth first). Those of one parent that nothing continues
    come first, by length."""

    parents_G: Ints  # -1: a segment begins its documents
    starts_G: Ints  # the position in its documents of each segment's first token
    offsets_G: Ints  # [G + 1] boundaries of the segments in the tree's tokens
    ends_G: Ints  # where the last segment that continues this one ends, in the tree's tokens
    place_T: Ints  # the token of the tree that computes each packed token
    first_U: Ints  # a packed token that each token of the tree computes

    @property
    def lengths_G(self) -> Ints:
        """Tokens of each segment."""
        lengths: Ints = np.diff(self.offsets_G)
        return lengths

    @property
    def inner(self) -> Ints:
        """The segments that others continue."""
        return np.flatnonzero(self.ends_G > self.offsets_G[1:])

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed."""
        return int(self.offsets_G[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCost:
    """Whether it pays to share prefixes, for one model. Costs are floating-point operations of a forward pass; those of
    a backward pass are in the same ratio."""

    sequence: SequenceCost
    per_segment: float  # what a segment that others continue costs beside the operations of its tokens
    per_query: float = 0.0  # of each token that continues a segment: its attention to two parts is merged
    training: float = 3.0  # operations of forward and backward, as a multiple of those of a forward pass
    copies_keys: bool = False  # attention of some layers copies the keys of prefixes for each document

    def saved(self, length: int, times: int, following: int) -> float:
        """What is saved if the first `length` tokens of `times` sequences are computed once; negative if that costs
        more. `following`: the other tokens of these sequences."""
        return float(self.sequence.of(length)) * (times - 1) - self.per_segment - self.per_query * following

    def share(self, tokens_T: NDArray[np.int32], offsets_D: NDArray[np.int32]) -> PrefixTree | None:
        """The tree of these documents; None if it does not pay."""
        if len(offsets_D) < 3:
            return None
        least = int(np.ceil(self.per_segment / self.sequence.per_token)) if self.sequence.per_token > 0 else 1
        tree = prefix_tree(tokens_T, offsets_D, least_saved=max(1, least))
        if tree.num_tokens == len(tokens_T):
            return None
        plain = float(self.sequence.of(np.diff(offsets_D)).sum())
        return tree if self._of_tree(tree) <= (1 - LEAST_SAVED) * plain else None

    def _of_tree(self, tree: PrefixTree) -> float:
        ends_G = tree.starts_G + tree.lengths_G
        operations = float((self.sequence.of(ends_G) - self.sequence.of(tree.starts_G)).sum())
        inner = tree.inner
        following = float((tree.ends_G[inner] - tree.offsets_G[inner + 1]).sum())
        return operations + self.per_segment * len(inner) + self.per_query * following


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowPrefixes:
    """With what each trajectory begins, before its first sampled token. What the controller knows of tokens."""

    tokens_N: Ints  # how many these are
    key_N: Ints  # equal numbers: equal tokens

    @classmethod
    def of(cls, block: TrajectoryBlock) -> RowPrefixes:
        """Of each row of a block."""
        return cls._of(_before_first(block.tokens_T[row], block.versions_T[row] >= 0) for row in _rows(block))

    @classmethod
    def of_documents(cls, documents: Iterable[Document]) -> RowPrefixes:
        """Of documents: a row of a block has several where an episode has several sequences."""
        return cls._of(_before_first(document.tokens, document.trained) for document in documents)

    @classmethod
    def _of(cls, prefixes: Iterable[NDArray[np.integer[Any]]]) -> RowPrefixes:
        tokens, keys = [], []
        for prefix in prefixes:
            content = np.ascontiguousarray(prefix, "<i4").tobytes()
            tokens.append(len(prefix))
            keys.append(int.from_bytes(blake2b(content, digest_size=8).digest(), "little", signed=True))
        return cls(tokens_N=np.array(tokens, np.int64), key_N=np.array(keys, np.int64))

    def take(self, rows: Ints) -> RowPrefixes:
        """Those of these rows."""
        return RowPrefixes(tokens_N=self.tokens_N[rows], key_N=self.key_N[rows])

    @classmethod
    def concatenate(cls, parts: Sequence[RowPrefixes | None]) -> RowPrefixes | None:
        """One after another; None if they are not known of all."""
        known = [part for part in parts if part is not None]
        if not known or len(known) < len(parts):
            return None
        return cls(
            tokens_N=np.concatenate([part.tokens_N for part in known]),
            key_N=np.concatenate([part.key_N for part in known]),
        )


def _rows(block: TrajectoryBlock) -> Iterator[slice]:
    return (slice(start, stop) for start, stop in pairwise(block.offsets.tolist()))


def _before_first(tokens_T: NDArray[np.integer[Any]], mask_T: NDArray[np.bool_]) -> NDArray[np.integer[Any]]:
    """The tokens before the first that the mask has; none if it has none."""
    places = np.flatnonzero(mask_T)
    return tokens_T[: int(places[0]) if len(places) else 0]


def prefix_tree(tokens_T: NDArray[np.int32], offsets_D: NDArray[np.int32], *, least_saved: int = 1) -> PrefixTree:
    """The tree of packed documents. A stretch of tokens becomes a segment that others continue if it saves at least so
    many tokens."""
    documents = [tokens_T[start:stop] for start, stop in pairwise(offsets_D.tolist())]
    # Big-endian bytes sort like the tokens.
    keys = [np.ascontiguousarray(document, ">u4").tobytes() for document in documents]
    order = sorted(range(len(documents)), key=lambda at: keys[at])
    shared = [0] + [_common(documents[one], documents[other]) for one, other in pairwise(order)]
    nodes = _nodes([len(documents[at]) for at in order], np.array(shared), least_saved)
    return _laid_out(nodes, [int(offsets_D[at]) for at in order], offsets_D, order)


@dataclass(slots=True, eq=False)
class _Node:
    """A segment while the tree is built."""

    parent: int
    document: int  # one that contains it, in sorted order
    start: int
    stop: int


def _common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Number of tokens with which both begin."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


def _nodes(lengths: Sequence[int], shared: Ints, least_saved: int) -> tuple[list[_Node], list[int]]:
    """The segments, and the last segment of each document. Documents are sorted; each shares `shared` tokens with the
    one before it."""
    nodes: list[_Node] = []
    last = [-1] * len(lengths)
    waiting = [(0, len(lengths), -1, 0)]  # documents from, to; the segment that they continue, from this position on
    while waiting:
        low, high, parent, start = waiting.pop()
        if high - low == 1:
            if lengths[low] > start:
                nodes.append(_Node(parent, low, start, lengths[low]))
                parent = len(nodes) - 1
            last[low] = parent
            continue
        depth = int(shared[low + 1 : high].min())
        cuts = [low, *(low + 1 + np.flatnonzero(shared[low + 1 : high] == depth)).tolist(), high]
        if depth > start and (len(cuts) - 2) * (depth - start) >= least_saved:
            nodes.append(_Node(parent, low, start, depth))
            parent, start = len(nodes) - 1, depth
        waiting += [(first, end, parent, start) for first, end in pairwise(cuts)]
    return nodes, last


def _laid_out(
    built: tuple[list[_Node], list[int]], begins: Sequence[int], offsets_D: NDArray[np.int32], order: Sequence[int]
) -> PrefixTree:
    nodes, last = built
    number = _depth_first(nodes)  # of each node, in the order of the layout
    laid = sorted(range(len(nodes)), key=number.__getitem__)
    offsets_G = np.cumsum([0, *(nodes[at].stop - nodes[at].start for at in laid)]).astype(np.int64)
    ends_G = offsets_G[1:].copy()
    parents_G = np.array([number[nodes[at].parent] if nodes[at].parent >= 0 else -1 for at in laid], np.int64)
    for segment in range(len(laid) - 1, -1, -1):
        if (parent := parents_G[segment]) >= 0:
            ends_G[parent] = max(ends_G[parent], ends_G[segment])
    place_T = np.empty(int(offsets_D[-1]), np.int64)
    for at, segment in zip(order, last, strict=True):
        while segment >= 0:
            node, begin = nodes[segment], int(offsets_D[at])
            first = offsets_G[number[segment]]
            place_T[begin + node.start : begin + node.stop] = np.arange(first, first + node.stop - node.start)
            segment = node.parent
    first_U = np.concatenate(
        [
            np.arange(begins[node.document] + node.start, begins[node.document] + node.stop)
            for node in map(nodes.__getitem__, laid)
        ]
    )
    return PrefixTree(
        parents_G=parents_G,
        starts_G=np.array([nodes[at].start for at in laid], np.int64),
        offsets_G=offsets_G,
        ends_G=ends_G,
        place_T=place_T,
        first_U=first_U.astype(np.int64),
    )


def _depth_first(nodes: Sequence[_Node]) -> list[int]:
    """The place of each node: behind its parent, first the children that nothing continues, by length."""
    children: dict[int, list[int]] = {}
    for at, node in enumerate(nodes):
        children.setdefault(node.parent, []).append(at)
    number = [0] * len(nodes)
    waiting, placed = [-1], 0
    while waiting:
        parent = waiting.pop()
        if parent >= 0:
            number[parent] = placed
            placed += 1
        mine = children.get(parent, ())
        leaves = sorted((at for at in mine if at not in children), key=lambda at: (_length(nodes[at]), at))
        for at in leaves:
            number[at] = placed
            placed += 1
        waiting += [at for at in mine if at in children]
    return number


def _length(node: _Node) -> int:
    return node.stop - node.start
