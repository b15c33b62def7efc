# SPDX-License-Identifier: Apache-2.0
"""Who holds which page of the cache, and which pages can be reused. Pure bookkeeping: no tensor is touched here.

A sequence holds a list of pages. A page that is full never changes again and may be held by several sequences; the one
page behind them is written by its only holder. What has been computed is remembered in a tree of pages keyed by their
tokens, so that a later sequence with the same beginning takes the full pages as they are and copies the part of one
more. Where a page is as long as the longest sequence (a slot, as on CPU), all reuse is by that copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from podium.data.documents import Tokens

# How many remembered pages, the newest first, are looked at for one that shares part of itself.
_CANDIDATES = 256


@dataclass(frozen=True, slots=True)
class PageCopy:
    """The first `tokens` positions of one page go into another before the next forward."""

    source: int
    target: int
    tokens: int


@dataclass(slots=True, eq=False)
class Lease:
    """The pages of one sequence, in order."""

    pages: list[int]
    reused: int  # tokens at the beginning whose keys and values are (or will be, after the copies) in place
    age: int = 0  # how often all had been forgotten when it began


@dataclass(slots=True, eq=False)
class _Node:
    """One remembered page. A partial one can only be copied from."""

    tokens: Tokens
    page: int
    parent: _Node | None
    children: dict[bytes, _Node] = field(default_factory=dict)


class PageBook:
    """`num_pages` pages of `page_tokens` positions each."""

    def __init__(self, num_pages: int, page_tokens: int, *, remember: bool = True) -> None:
        self.num_pages, self.page_tokens = num_pages, page_tokens
        self._remember = remember
        self._age = 0
        self.reset()

    def reset(self) -> None:
        """As at the beginning: whoever had pages has none."""
        self._free = list(range(self.num_pages - 1, -1, -1))  # the lowest page first
        self._holders = [0] * self.num_pages
        self._root = _Node(tokens=np.empty(0, np.int32), page=-1, parent=None)
        self._nodes: dict[int, _Node] = {}
        # Remembered pages that nobody holds and no other remembered page builds on, the longest unused first.
        self._spare: OrderedDict[int, None] = OrderedDict()
        self._num_kept = 0
        self._pins: list[int] = []
        self._copies: list[PageCopy] = []

    @property
    def num_held(self) -> int:
        """Pages that sequences under way hold, each counted once."""
        return self.num_pages - len(self._free) - self._num_kept

    @property
    def num_kept(self) -> int:
        """Remembered pages that nobody holds."""
        return self._num_kept

    @property
    def num_available(self) -> int:
        """Pages that can be had: free ones and those that are only remembered."""
        return len(self._free) + self._num_kept

    @property
    def remembers(self) -> bool:
        """Whether anything computed is kept for later."""
        return self._remember

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def begin(self, tokens: Tokens, room: int) -> Lease | None:
        """Pages for a sequence that starts with `tokens`, at least `room` positions of them; what was computed before
        is reused, all but the last token (which must be fed for its logits). None: there are too few pages."""
        full, source, copied = self._longest_match(tokens[: len(tokens) - 1])
        pages = [node.page for node in full]
        for page in pages:
            self._hold(page)
        lease = Lease(pages=pages, reused=len(pages) * self.page_tokens, age=self._age)
        if source is not None and self._can_take_over(source, copied):
            self._take_over(lease, source, copied)
        elif source is not None:
            self._pin(source.page)  # it must outlive the allocations until it is copied
            if self.grow(lease, max(room, lease.reused + copied)):
                self._copies.append(PageCopy(source.page, lease.pages[len(full)], copied))
                lease.reused += copied
                return lease
            self._unpin(source.page)  # without it there may be a page more
        if not self.grow(lease, max(room, lease.reused)):
            self._give_back(lease)
            return None
        return lease

    def grow(self, lease: Lease, tokens: int) -> bool:
        """Room for `tokens` positions in all. False, and nothing has changed: there are too few pages."""
        missing = self.pages_for(tokens) - len(lease.pages)
        if missing <= 0:
            return True
        if missing > self.num_available:
            return False
        for _ in range(missing):
            page = self._take()
            self._holders[page] = 1
            lease.pages.append(page)
        return True

    def remember(self, lease: Lease, tokens: Tokens) -> None:
        """`tokens` have been computed into the pages of a sequence that goes on: later ones may reuse them."""
        if self._remember:
            self._insert(lease, tokens)

    def release(self, lease: Lease, tokens: Tokens | None) -> None:
        """The sequence ends. `tokens`: what is computed in its pages, to be remembered; None: nothing worth it."""
        if tokens is not None and self._remember:
            self._insert(lease, tokens)
        self._give_back(lease)

    def disown(self, lease: Lease) -> list[int]:
        """What is in these pages is not to be trusted: neither they nor what was built on them is reused. Returns the
        pages that nobody else holds."""
        for page in lease.pages:
            node = self._nodes.get(page)
            if node is not None:
                self._unlink_with_all_behind(node)
        return [page for page in lease.pages if self._holders[page] == 1]

    def forget(self) -> None:
        """What has been computed is worthless from now on (the weights changed)."""
        for page, node in self._nodes.items():
            node.children.clear()
            if self._holders[page] == 0:
                self._free.append(page)
        self._nodes.clear()
        self._spare.clear()
        self._num_kept = 0
        self._root.children.clear()
        self._age += 1

    def take_copies(self) -> list[PageCopy]:
        """The copies to make before the next forward; from here on their sources may be given away."""
        copies, self._copies = self._copies, []
        for page in self._pins:
            self._drop(page)
        self._pins = []
        return copies

    def rename(self, target_of: dict[int, int], leases: list[Lease]) -> None:
        """Pages were moved in memory: a permutation of pages. `leases` are all that are under way."""
        assert not self._pins
        assert sorted(target_of) == sorted(target_of.values())
        for lease in leases:
            lease.pages = [target_of.get(page, page) for page in lease.pages]
        holders = list(self._holders)
        for source, target in target_of.items():
            self._holders[target] = holders[source]
        self._free = sorted((target_of.get(page, page) for page in self._free), reverse=True)
        self._nodes = {target_of.get(page, page): node for page, node in self._nodes.items()}
        for page, node in self._nodes.items():
            node.page = page
        self._spare = OrderedDict((target_of.get(page, page), None) for page in self._spare)

    def longest_remembered(self, pages: Iterable[int]) -> int:
        """Most tokens that one of these pages is remembered with."""
        return max((len(self._nodes[page].tokens) for page in pages if page in self._nodes), default=0)

    def holders(self, page: int) -> int:
        return self._holders[page]

    def common_with_remembered(self, tokens: Tokens) -> int:
        """How many leading tokens a sequence would find computed."""
        full, _, copied = self._longest_match(tokens)
        return len(full) * self.page_tokens + copied

    def _can_take_over(self, source: _Node, copied: int) -> bool:
        """A page that nobody holds need not be copied when this sequence goes on where it ends, or when it would have
        to be given up anyway."""
        unheld = self._holders[source.page] == 0 and not source.children
        return unheld and (copied == len(source.tokens) or self.num_available == 1)

    def _take_over(self, lease: Lease, source: _Node, copied: int) -> None:
        self._unlink(source)
        self._num_kept -= 1
        self._holders[source.page] = 1
        lease.pages.append(source.page)
        lease.reused += copied

    # The tree

    def _longest_match(self, tokens: Tokens) -> tuple[list[_Node], _Node | None, int]:
        """(full pages that match, the page behind them that shares most, how many tokens of it)."""
        node, found, at = self._root, list[_Node](), 0
        while at + self.page_tokens <= len(tokens):
            child = node.children.get(tokens[at : at + self.page_tokens].tobytes())
            if child is None:
                break
            node, at = child, at + self.page_tokens
            found.append(child)
        rest, best, most = tokens[at:], None, 0
        if len(rest):
            first = rest[0]
            for child in islice(reversed(node.children.values()), _CANDIDATES):
                if child.tokens[0] != first:  # most differ at once, and this is cheaper than comparing arrays
                    continue
                shared = common_prefix(child.tokens, rest)
                if shared > most:
                    best, most = child, shared
        return found, best, most

    def _insert(self, lease: Lease, tokens: Tokens) -> None:
        if lease.age != self._age:  # part of it was computed before all was forgotten
            return
        parent = self._root
        for index, page in enumerate(lease.pages):
            part = tokens[index * self.page_tokens : (index + 1) * self.page_tokens]
            if len(part) == 0:
                return
            mine = self._nodes.get(page)
            if mine is not None and len(part) > len(mine.tokens):  # it was remembered when it held less
                self._unlink(mine)
                mine = None
            if mine is not None:
                parent = mine
                continue
            # The same tokens in another page: only that one is remembered, and nothing is built on a page that this
            # sequence does not hold, so that whoever holds a page holds all before it.
            if part.tobytes() in parent.children:
                return
            node = _Node(tokens=part.copy(), page=page, parent=parent)
            parent.children[part.tobytes()] = node
            self._nodes[page] = node
            parent = node

    def _unlink(self, node: _Node) -> None:
        """Forgets one page that nothing builds on."""
        assert not node.children
        parent = node.parent
        assert parent is not None
        parent.children.pop(node.tokens.tobytes(), None)
        self._nodes.pop(node.page, None)
        self._spare.pop(node.page, None)
        self._maybe_spare(parent)

    def _unlink_with_all_behind(self, node: _Node) -> None:
        for child in list(node.children.values()):
            self._unlink_with_all_behind(child)
        self._unlink(node)
        if self._holders[node.page] == 0:
            self._num_kept -= 1
            self._free.append(node.page)

    def _maybe_spare(self, node: _Node) -> None:
        if node.page >= 0 and not node.children and self._holders[node.page] == 0 and node.page in self._nodes:
            self._spare[node.page] = None
            self._spare.move_to_end(node.page)

    # Pages

    def _take(self) -> int:
        if not self._free:
            page = next(iter(self._spare))
            self._unlink(self._nodes[page])
            self._num_kept -= 1
            self._free.append(page)
        return self._free.pop()

    def _hold(self, page: int) -> None:
        self._num_kept -= self._holders[page] == 0
        self._holders[page] += 1
        self._spare.pop(page, None)

    def _pin(self, page: int) -> None:
        self._hold(page)
        self._pins.append(page)

    def _unpin(self, page: int) -> None:
        self._pins.remove(page)
        self._drop(page)

    def _drop(self, page: int) -> None:
        assert self._holders[page] > 0, f"page {page} was given back twice"
        self._holders[page] -= 1
        if self._holders[page]:
            return
        node = self._nodes.get(page)
        if node is None:
            self._free.append(page)
        else:
            self._num_kept += 1
            self._maybe_spare(node)

    def _give_back(self, lease: Lease) -> None:
        # The last page first, so that the beginning of a sequence stays remembered longest.
        for page in reversed(lease.pages):
            self._drop(page)
        lease.pages = []

    def check(self) -> Iterator[str]:
        """What is wrong with the books; for tests."""
        if len(set(self._free)) != len(self._free):
            yield "a page is free twice"
        for page in self._free:
            if self._holders[page] or page in self._nodes:
                yield f"page {page} is free and in use"
        for page, node in self._nodes.items():
            if node.page != page:
                yield f"page {page} is filed under another"
            if (page in self._spare) != (self._holders[page] == 0 and not node.children):
                yield f"page {page} is spare and should not be, or the other way round"
        accounted = len(self._free) + sum(
            1 for page in range(self.num_pages) if self._holders[page] or page in self._nodes
        )
        if accounted != self.num_pages:
            yield f"{self.num_pages - accounted} pages are lost"
        if self._num_kept != sum(1 for page in self._nodes if self._holders[page] == 0):
            yield "the count of kept pages is wrong"


def common_prefix(left: Tokens, right: Tokens) -> int:
    """How many leading tokens are the same."""
    size = min(len(left), len(right))
    differs = np.flatnonzero(left[:size] != right[:size])
    return int(differs[0]) if len(differs) else size
