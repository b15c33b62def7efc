# SPDX-License-Identifier: Apache-2.0
"""Places the bundles of a layout on nodes, and explains why they do not fit; pure.

A bundle is a set of slots that must share a node. Ray then gets exactly this placement, node by node, so that no
request stays pending for a reason that was known before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from podium.cluster.layout import Pool

# Ray keeps resources in ten-thousandths: sums of fractions are compared with a tolerance of half of one.
_GRAIN = 5e-5
_MOST_TRIALS = 20_000
# Resources that every node has besides, requested or not.
_EVERYWHERE = ("CPU", "memory", "object_store_memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """The total and the free resources of a node."""

    id: str
    name: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    is_draining: bool = False  # it takes no new workers, and will be gone soon


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Neighbouring slots of a pool that share a node."""

    pool: str
    slots: tuple[int, ...]
    needs: Mapping[str, float]
    spread: bool = False

    def __str__(self) -> str:
        return f"{self.pool}{list(self.slots)} ({_amounts(self.needs)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits:
    """Every bundle has a node, in order."""

    nodes: tuple[NodeState, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """The nodes are large enough, but other runs hold the resources, which may become free."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLarge:
    """The layout would not fit even if the cluster were empty."""

    reason: str


Preflight = Fits | Busy | TooLarge


def bundles_of(pool: Pool) -> tuple[Bundle, ...]:
    """The bundles of a pool: slots that must share a node."""
    width = pool.slots if pool.one_node else pool.together
    return tuple(
        Bundle(
            pool=pool.name,
            slots=tuple(range(first, first + width)),
            needs=pool.each.times(width),
            spread=pool.spread,
        )
        for first in range(0, pool.slots, width)
    )


def preflight(bundles: Sequence[Bundle], nodes: Sequence[NodeState]) -> Preflight:
    """Finds a node for every bundle, or explains per node what is needed, what is available, and what would fit. Nodes
    that are being drained take none."""
    nodes = [node for node in nodes if not node.is_draining]
    fit = _fit(bundles, {node.id: dict(node.free) for node in nodes})
    if isinstance(fit, tuple):
        by_id = {node.id: node for node in nodes}
        return Fits(nodes=tuple(by_id[each] for each in fit))
    empty = _fit(bundles, {node.id: dict(node.total) for node in nodes})
    if isinstance(empty, tuple):
        return Busy(reason=_explain(bundles, fit, nodes, busy=True))
    return TooLarge(reason=_explain(bundles, empty, nodes, busy=False))


def message(outcome: Preflight) -> str:
    """The outcome as text for the user."""
    match outcome:
        case Fits():
            return "everything fits"
        case Busy(reason=reason) | TooLarge(reason=reason):
            return reason
        case other:
            assert_never(other)


def _fit(bundles: Sequence[Bundle], room: dict[str, dict[str, float]]) -> tuple[str, ...] | Bundle:
    """Finds a node for each bundle by backtracking: the hardest bundles first, each on its best node. Without a
    solution, returns the first bundle that never found a place. Gives up after so many trials that a solution is
    unlikely."""
    order = sorted(range(len(bundles)), key=lambda at: (-_weight(bundles[at].needs), at))
    turns: list[_Turn] = []
    deepest = 0
    for _ in range(_MOST_TRIALS + len(bundles)):
        if len(turns) == len(order):
            chosen = dict(zip(order, (turn.node for turn in turns), strict=True))
            return _neighbours_together(bundles, tuple(chosen[at] for at in range(len(bundles))))
        bundle = bundles[order[len(turns)]]
        before = [turn for turn in turns if turn.bundle.pool == bundle.pool]
        # Bundles of a pool are alike: a node that failed for the previous one fails for this one too.
        barred = before[-1].in_vain if before and turns[-1].bundle.pool == bundle.pool else frozenset[str]()
        rest = sum(1 for at in order[len(turns) :] if bundles[at].pool == bundle.pool)
        nodes = _ranked(bundle, room, [turn.node for turn in before], rest, barred)
        deepest = max(deepest, len(turns))
        turn = _Turn(bundle=bundle, untried=nodes)
        while not turn.next(room):
            if not turns:
                return bundles[order[deepest]]
            turn = turns.pop()
            turn.undo(room)
        turns.append(turn)
    return bundles[order[deepest]]


class _Turn:
    """One bundle's state in the search: its node, and the nodes still to try."""

    def __init__(self, *, bundle: Bundle, untried: list[str]) -> None:
        self.bundle, self._untried, self.node = bundle, untried, ""
        self.in_vain: frozenset[str] = frozenset()

    def next(self, room: dict[str, dict[str, float]]) -> bool:
        """Takes the next node; False if none is left."""
        if not self._untried:
            return False
        self.node = self._untried.pop(0)
        for name, amount in self.bundle.needs.items():
            room[self.node][name] -= amount
        return True

    def undo(self, room: dict[str, dict[str, float]]) -> None:
        for name, amount in self.bundle.needs.items():
            room[self.node][name] += amount
        self.in_vain |= {self.node}


def _ranked(
    bundle: Bundle, room: Mapping[str, Mapping[str, float]], used: Sequence[str], rest: int, barred: frozenset[str]
) -> list[str]:
    """The nodes that have room, the best first. Packed: a node that the pool already uses, else the smallest that holds
    all the rest of it, else the one that holds most; resources that were not requested are left to others. Spread: the
    node with least of the pool, then the one with most free."""
    able = {name: _how_many(free, bundle.needs) for name, free in room.items() if name not in barred}

    def packed(name: str) -> tuple[bool, bool, float, float, float]:
        whole = able[name] >= rest
        unasked = sum(amount for what, amount in room[name].items() if what not in (*bundle.needs, *_EVERYWHERE))
        return name not in used, not whole, -able[name] if not whole else 0, unasked, _weight(room[name])

    def spread(name: str) -> tuple[int, float]:
        return used.count(name), -_weight(room[name])

    fit = [name for name, count in able.items() if count >= 1]
    return sorted(fit, key=spread) if bundle.spread else sorted(fit, key=packed)


def _neighbours_together(bundles: Sequence[Bundle], nodes: tuple[str, ...]) -> tuple[str, ...]:
    """Reorders nodes within a pool so that equal nodes are adjacent, because bundles of one pool are alike.
    Neighbouring ranks then share a node as often as possible."""
    dealt = list(nodes)
    for pool in dict.fromkeys(bundle.pool for bundle in bundles):
        places = [at for at, bundle in enumerate(bundles) if bundle.pool == pool]
        mine = [nodes[at] for at in places]
        order = sorted(mine, key=mine.index)
        for at, node in zip(places, order, strict=True):
            dealt[at] = node
    return tuple(dealt)


def _weight(amounts: Mapping[str, float]) -> float:
    """GPUs are scarce and come first; CPUs break ties."""
    return 1000 * amounts.get("GPU", 0.0) + amounts.get("CPU", 0.0)


def _explain(bundles: Sequence[Bundle], failed: Bundle, nodes: Sequence[NodeState], *, busy: bool) -> str:
    alike = [bundle for bundle in bundles if bundle.pool == failed.pool]
    width = len(failed.slots)
    together = f"{width} slots on one node" if width > 1 else "1 slot"
    request = f"pool {failed.pool} asks for {len(alike)} × {together}, each {_amounts(failed.needs)}"
    others = sorted({bundle.pool for bundle in bundles} - {failed.pool})
    beside = f" (beside {', '.join(others)})" if others else ""
    lines = [f"{request}{beside}, and the cluster {'has too little free now' if busy else 'is too small for it'}:"]
    for node in nodes:
        has, free = ({name: amounts.get(name, 0.0) for name in failed.needs} for amounts in (node.total, node.free))
        lines.append(f"  {node.name}: has {_amounts(has)}, free {_amounts(free)}")
    if not nodes:
        lines.append("  (no node is alive)")
    lines.append(_nearest(failed, nodes, busy=busy, num_slots=len(alike) * width))
    return "\n".join(lines)


def _nearest(failed: Bundle, nodes: Sequence[NodeState], *, busy: bool, num_slots: int) -> str:
    """What would fit instead, counting this pool alone."""
    each = {name: amount / len(failed.slots) for name, amount in failed.needs.items()}
    per_node = {node.name: _how_many(node.free if busy else node.total, each) for node in nodes}
    widest = max(per_node.values(), default=0)
    if widest == 0 and busy:
        return "Others hold all that a slot needs: wait until they are done, or add a node."
    if widest == 0:
        missing = [name for name in each if all(node.total.get(name, 0.0) < each[name] for node in nodes)]
        what = f"no node has {' and '.join(missing)}" if missing else "no node has room for a single slot"
        return f"{what}. Add a node that has, or ask for less per slot."
    slots = "1 slot fits" if widest == 1 else f"{widest} slots fit"
    width = len(failed.slots)
    most = sum(count - count % width if widest >= width else count for count in per_node.values())
    fits = f"At most {slots} on one node and {most} in the cluster (this pool alone)."
    if widest < width:
        return f"{fits} Make what shares a node {widest} or smaller, or add a larger node."
    return f"{fits} Ask for at most {min(num_slots, most)} slots, or add nodes" + (
        ", or wait until the others are done." if busy else "."
    )


def _how_many(has: Mapping[str, float], each: Mapping[str, float]) -> int:
    return int(min((has.get(name, 0.0) + _GRAIN) // amount for name, amount in each.items()))


def _amounts(needs: Mapping[str, float]) -> str:
    return " + ".join(f"{amount:g} {name}" for name, amount in needs.items()) or "nothing"
