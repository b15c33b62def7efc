# SPDX-License-Identifier: Apache-2.0
"""Actors and placement groups of Ray that outlive the controller that made them, and how the next one finds them."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import get_placement_group, placement_group_table

from podium.cluster.placement import Bundle, NodeState
from podium.cluster.processes import ProcessInfo, look
from podium.cluster.ray_compat import NAMESPACE, actor_pids
from podium.cluster.transport import BundlePlace

# Names are unique, also while an earlier owner of a name is still being ended.
_SEPARATOR = " "


def actor_options(name: str) -> Mapping[str, Any]:
    """For an actor that outlives its controller."""
    return {"name": _unique(name), "namespace": NAMESPACE, "lifetime": "detached"}


def place_options(bundle: Bundle) -> Mapping[str, Any]:
    """For a placement group that outlives its controller."""
    return {"name": _unique(_place_name(bundle)), "lifetime": "detached"}


def kept_actors() -> Mapping[str, tuple[Any, ProcessInfo | None]]:
    """Actors that live and their processes, by the names that they were given."""
    actors: dict[str, tuple[Any, ProcessInfo | None]] = {}
    pids = actor_pids()
    for each in ray.util.list_named_actors(all_namespaces=True):
        name = each["name"]
        if each["namespace"] == NAMESPACE:
            with contextlib.suppress(ValueError):  # it has died meanwhile
                process = look(pids[name]) if name in pids else None
                actors[name.rpartition(_SEPARATOR)[0]] = ray.get_actor(name, NAMESPACE), process
    return actors


def kept_places(bundles: Sequence[Bundle], nodes: Sequence[NodeState]) -> list[BundlePlace]:
    """Placement groups that are reserved for these bundles."""
    by_name, by_node = {_place_name(bundle): bundle for bundle in bundles}, {node.id: node for node in nodes}
    places = []
    for each in placement_group_table().values():
        bundle = by_name.get(each["name"].rpartition(_SEPARATOR)[0])
        node = by_node.get(next(iter(each["bundles_to_node_id"].values()), ""))
        if bundle is not None and node is not None and each["state"] == "CREATED":
            places.append(BundlePlace(bundle=bundle, node=node, handle=get_placement_group(each["name"])))
    return places


def _unique(name: str) -> str:
    return f"{name}{_SEPARATOR}{secrets.token_hex(8)}"


def _place_name(bundle: Bundle) -> str:
    return f"{bundle.pool}[{bundle.slots[0]}]"
