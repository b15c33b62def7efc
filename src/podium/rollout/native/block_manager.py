# SPDX-License-Identifier: Apache-2.0
"""Tracks which sequence holds which block of the KV cache, and which blocks can be reused. Pure bookkeeping without
tensors.

A sequence has a table of blocks. A full block never changes again and may be held by several sequences; the block after
the full ones has a single holder, which writes to it. Computed blocks are remembered in a tree keyed by their tokens
(prefix caching). A later sequence with the same prefix takes the full blocks as they are and copies part of one more.
If a block is as long as the longest sequence (a slot, as on CPU), all reuse is by that copy. Before new weights sample,
all blocks are forgotten. Each remembered one says when it was computed: to reuse an older one is a fatal error."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from podium.data.documents import Tokens
from podium.errors import InvariantError

# Number of remembered blocks, newest first, that are searched for one with a common prefix.
_CANDIDATES = 256


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copies the first `tokens` positions of one block into another before the next forward."""

    source: int
    target: int
    tokens: int


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence, in order."""

    blocks: list[int]
    reused: int  # leading tokens whose keys and values are (or will be, after the copies) in place
    age: int = 0  # how often all blocks had been forgotten when it began


@dataclass(slots=True, eq=False)
class _Node:
    """One remembered block. A partial one can only be copied from."""

    tokens: Tokens
    block: int
    parent: _Node | None
    age: int  # of the block table that it was computed for
    children: dict[bytes, _Node] = field(default_factory=dict)


class BlockManager:
    """`num_blocks` blocks of `block_size` positions each."""

    def __init__(self, num_blocks: int, block_size: int, *, remember: bool = True, version: int = 0) -> None:
        """`version`: of the weights that compute."""
        self.num_blocks, self.block_size, self._version = num_blocks, block_size, version
        self._remember = remember
        self._age = 0
        self.reset()

    def reset(self) -> None:
        """Resets to the initial state: no sequence holds a block."""
        self._free = list(range(self.num_blocks - 1, -1, -1))  # the lowest block first
        self._holders = [0] * self.num_blocks
        self._root = _Node(tokens=np.empty(0, np.int32), block=-1, parent=None, age=self._age)
        self._nodes: dict[int, _Node] = {}
        # Remembered blocks without a holder that no other remembered block builds on, least recently used first.
        self._spare: OrderedDict[int, None] = OrderedDict()
        self._num_kept = 0
        self._pins: list[int] = []
        self._copies: list[BlockCopy] = []

    @property
    def age(self) -> int:
        """How often all blocks have been forgotten."""
        return self._age

    @property
    def num_held(self) -> int:
        """Blocks held by running sequences, each counted once."""
        return self.num_blocks - len(self._free) - self._num_kept

    @property
    def num_kept(self) -> int:
        """Remembered blocks without a holder."""
        return self._num_kept

    @property
    def num_available(self) -> int:
        """Available blocks: free ones, and remembered ones without a holder."""
        return len(self._free) + self._num_kept

    @property
    def remembers(self) -> bool:
        """Whether any computed blocks are remembered."""
        return self._remember

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    def begin(self, tokens: Tokens, room: int) -> BlockTable | None:
        """Allocates blocks for a sequence that starts with `tokens`, at least `room` positions. Reuses computed blocks
        for all but the last token (which must be fed for its logits). None: there are too few blocks."""
        full, source, copied = self._longest_match(tokens[: len(tokens) - 1])
        self._check_current(full if source is None else [*full, source])
        blocks = [node.block for node in full]
        for block in blocks:
            self._hold(block)
        block_table = BlockTable(blocks=blocks, reused=len(blocks) * self.block_size, age=self._age)
        if source is not None and self._can_take_over(source, copied):
            self._take_over(block_table, source, copied)
        elif source is not None:
            self._pin(source.block)  # it must stay until it is copied
            if self.grow(block_table, max(room, block_table.reused + copied)):
                self._copies.append(BlockCopy(source.block, block_table.blocks[len(full)], copied))
                block_table.reused += copied
                return block_table
            self._unpin(source.block)  # without it one more block may be available
        if not self.grow(block_table, max(room, block_table.reused)):
            self._give_back(block_table)
            return None
        return block_table

    def grow(self, block_table: BlockTable, tokens: int) -> bool:
        """Grows to `tokens` positions in total. Returns False without a change if there are too few blocks."""
        missing = self.blocks_for(tokens) - len(block_table.blocks)
        if missing <= 0:
            return True
        if missing > self.num_available:
            return False
        for _ in range(missing):
            block = self._take()
            self._holders[block] = 1
            block_table.blocks.append(block)
        return True

    def remember(self, block_table: BlockTable, tokens: Tokens) -> None:
        """Registers that `tokens` are computed in the blocks of a running sequence: later sequences may reuse them."""
        if self._remember:
            self._insert(block_table, tokens)

    def release(self, block_table: BlockTable, tokens: Tokens | None) -> None:
        """Ends the sequence. `tokens`: computed tokens of its blocks, to be remembered; None: remember nothing."""
        if tokens is not None and self._remember:
            self._insert(block_table, tokens)
        self._give_back(block_table)

    def disown(self, block_table: BlockTable) -> list[int]:
        """Marks the content of these blocks as invalid: neither they nor blocks built on them are reused. Returns the
        blocks without another holder."""
        for block in block_table.blocks:
            node = self._nodes.get(block)
            if node is not None:
                self._unlink_with_all_behind(node)
        return [block for block in block_table.blocks if self._holders[block] == 1]

    def forget(self, version: int | None = None) -> None:
        """Forgets all computed blocks, because the weights changed to those of `version`, or with None because memory
        is given up."""
        for block, node in self._nodes.items():
            node.children.clear()
            if self._holders[block] == 0:
                self._free.append(block)
        self._nodes.clear()
        self._spare.clear()
        self._num_kept = 0
        self._root.children.clear()
        self._age += 1
        self._version = self._version if version is None else version

    def check_version(self, version: int) -> None:
        """Raises an InvariantError unless what is remembered was computed by the weights of `version`."""
        if version != self._version:
            raise cache_error(
                f"the engine samples with weights of version {version}, and its prefix cache is of version "
                f"{self._version}"
            )

    def take_copies(self) -> list[BlockCopy]:
        """The copies to make before the next forward. After this call their sources may be reassigned."""
        copies, self._copies = self._copies, []
        for block in self._pins:
            self._drop(block)
        self._pins = []
        return copies

    def rename(self, target_of: dict[int, int], block_tables: list[BlockTable]) -> None:
        """Applies a permutation after blocks were moved in memory. `block_tables` are those of all running
        sequences."""
        assert not self._pins
        assert sorted(target_of) == sorted(target_of.values())
        for block_table in block_tables:
            block_table.blocks = [target_of.get(block, block) for block in block_table.blocks]
        holders = list(self._holders)
        for source, target in target_of.items():
            self._holders[target] = holders[source]
        self._free = sorted((target_of.get(block, block) for block in self._free), reverse=True)
        self._nodes = {target_of.get(block, block): node for block, node in self._nodes.items()}
        for block, node in self._nodes.items():
            node.block = block
        self._spare = OrderedDict((target_of.get(block, block), None) for block in self._spare)

    def longest_remembered(self, blocks: Iterable[int]) -> int:
        """Largest number of tokens with which one of these blocks is remembered."""
        return max((len(self._nodes[block].tokens) for block in blocks if block in self._nodes), default=0)

    def common_with_remembered(self, tokens: Tokens) -> int:
        """Number of leading tokens of a sequence that are already computed."""
        full, _, copied = self._longest_match(tokens)
        return len(full) * self.block_size + copied

    def _can_take_over(self, source: _Node, copied: int) -> bool:
        """Whether a block without holders can be reused without a copy: this sequence continues at its end, or the
        block would be evicted anyway."""
        unheld = self._holders[source.block] == 0 and not source.children
        return unheld and (copied == len(source.tokens) or self.num_available == 1)

    def _take_over(self, block_table: BlockTable, source: _Node, copied: int) -> None:
        self._unlink(source)
        self._num_kept -= 1
        self._holders[source.block] = 1
        block_table.blocks.append(source.block)
        block_table.reused += copied

    # The tree

    def _check_current(self, nodes: list[_Node]) -> None:
        for node in nodes:
            if node.age != self._age:
                raise cache_error(
                    f"a new sequence would reuse block {node.block} of the prefix cache, which was computed before the "
                    f"weights of version {self._version} came ({self._age - node.age} updates or sleeps earlier)"
                )

    def _longest_match(self, tokens: Tokens) -> tuple[list[_Node], _Node | None, int]:
        """Returns (matching full blocks, the next block with the longest common prefix, number of its common
        tokens)."""
        node, matched, at = self._root, list[_Node](), 0
        while at + self.block_size <= len(tokens):
            child = node.children.get(tokens[at : at + self.block_size].tobytes())
            if child is None:
                break
            node, at = child, at + self.block_size
            matched.append(child)
        rest, best, most = tokens[at:], None, 0
        if len(rest):
            first = rest[0]
            for child in islice(reversed(node.children.values()), _CANDIDATES):
                if child.tokens[0] != first:  # most differ at once, and this is cheaper than comparing arrays
                    continue
                shared = common_prefix(child.tokens, rest)
                if shared > most:
                    best, most = child, shared
        return matched, best, most

    def _insert(self, block_table: BlockTable, tokens: Tokens) -> None:
        if block_table.age != self._age:  # part of it was computed before all blocks were forgotten
            return
        parent = self._root
        for index, block in enumerate(block_table.blocks):
            part = tokens[index * self.block_size : (index + 1) * self.block_size]
            if len(part) == 0:
                return
            mine = self._nodes.get(block)
            if mine is not None and len(part) > len(mine.tokens):  # it was remembered when it held less
                self._unlink(mine)
                mine = None
            if mine is not None:
                parent = mine
                continue
            # The same tokens in another block: only that one is remembered, and nothing is built on a block that this
            # sequence does not hold, so that the holder of a block holds all before it.
            if part.tobytes() in parent.children:
                return
            node = _Node(tokens=part.copy(), block=block, parent=parent, age=block_table.age)
            parent.children[part.tobytes()] = node
            self._nodes[block] = node
            parent = node

    def _unlink(self, node: _Node) -> None:
        """Forgets one block that no other builds on."""
        assert not node.children
        parent = node.parent
        assert parent is not None
        parent.children.pop(node.tokens.tobytes(), None)
        self._nodes.pop(node.block, None)
        self._spare.pop(node.block, None)
        self._maybe_spare(parent)

    def _unlink_with_all_behind(self, node: _Node) -> None:
        for child in list(node.children.values()):
            self._unlink_with_all_behind(child)
        self._unlink(node)
        if self._holders[node.block] == 0:
            self._num_kept -= 1
            self._free.append(node.block)

    def _maybe_spare(self, node: _Node) -> None:
        if node.block >= 0 and not node.children and self._holders[node.block] == 0 and node.block in self._nodes:
            self._spare[node.block] = None
            self._spare.move_to_end(node.block)

    # Blocks

    def _take(self) -> int:
        if not self._free:
            block = next(iter(self._spare))
            self._unlink(self._nodes[block])
            self._num_kept -= 1
            self._free.append(block)
        return self._free.pop()

    def _hold(self, block: int) -> None:
        self._num_kept -= self._holders[block] == 0
        self._holders[block] += 1
        self._spare.pop(block, None)

    def _pin(self, block: int) -> None:
        self._hold(block)
        self._pins.append(block)

    def _unpin(self, block: int) -> None:
        self._pins.remove(block)
        self._drop(block)

    def _drop(self, block: int) -> None:
        assert self._holders[block] > 0, f"page {block} was given back twice"
        self._holders[block] -= 1
        if self._holders[block]:
            return
        node = self._nodes.get(block)
        if node is None:
            self._free.append(block)
        else:
            self._num_kept += 1
            self._maybe_spare(node)

    def _give_back(self, block_table: BlockTable) -> None:
        # The last block first, so that the prefix of a sequence stays remembered longest.
        for block in reversed(block_table.blocks):
            self._drop(block)
        block_table.blocks = []


def cache_error(what: str) -> InvariantError:
    """The error for keys and values of other weights than they should be of."""
    return InvariantError(
        f"{what} (invariant: explicit cache). This is a defect of Podium: please report it with the run folder. What "
        "was committed before is as it should be."
    )


def common_prefix(left: Tokens, right: Tokens) -> int:
    """Number of equal leading tokens."""
    size = min(len(left), len(right))
    differs = np.flatnonzero(left[:size] != right[:size])
    return int(differs[0]) if len(differs) else size
