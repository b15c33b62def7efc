# SPDX-License-Identifier: Apache-2.0
"""Faults of a simulated cluster: each happens to the worker of one slot, or to one node, at one time of the virtual
clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedDeath:
    """A worker is killed at this time, if it is there then."""

    at_s: float
    pool: str
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSilence:
    """A worker is stopped, as by SIGSTOP: it begins no call, sends no reply and no heartbeat. It goes on afterwards,
    unless the controller has declared it dead before."""

    at_s: float
    pool: str
    slot: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedDelay:
    """Replies that a worker sends within these seconds arrive `late_s` later. Blocks of one stream keep their order."""

    at_s: float
    pool: str
    slot: int
    seconds: float
    late_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLoss:
    """The first reply that a worker has from this time on is lost: the worker dies with its work done and unreported.
    Between two living processes nothing is lost: Ray sends over TCP, and a broken connection is a death."""

    at_s: float
    pool: str
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedNotice:
    """A worker gets SIGTERM: it goes on for `grace_s`, and dies then if the controller has not ended it before."""

    at_s: float
    pool: str
    slot: int
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedNodeLoss:
    """A node with room for generators dies with what it runs. One with its number joins after `seconds`."""

    at_s: float
    node: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedDrain:
    """A node with room for generators is drained: it takes no more workers, dies after `grace_s`, and one with its
    number joins `seconds` later."""

    at_s: float
    node: int
    grace_s: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedJoin:
    """A node with room for generators joins, beyond those of the start."""

    at_s: float


WorkerFault = SimulatedDeath | SimulatedSilence | SimulatedDelay | SimulatedLoss | SimulatedNotice
"""What can happen to a worker."""

NodeFault = SimulatedNodeLoss | SimulatedDrain | SimulatedJoin
"""What can happen to a node of the simulated cluster."""

GENERATOR_SLOT = "generator_slot"
"""The resource of which such a node has one for each of its generators. Slots that need it are on these nodes, and all
others on one that lives forever."""
