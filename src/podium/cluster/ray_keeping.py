# SPDX-License-Identifier: Apache-2.0
"""Actors and placement groups of Ray that outlive the controller that made them, and how the next one finds them."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import get_placement_group, placement_group_table, remove_placement_group

from podium.cluster.placement import Bundle, NodeState
from podium.cluster.ray_compat import ActorProcess, actor_processes
from podium.cluster.transport import BundlePlace

# Names are unique, also while an earlier owner of a name is still being ended.
_SEPARATOR = " "
# The actor that keeps the others of its namespace, in a cluster of others.
KEEPALIVE = "keepalive"


def actor_options(name: str, namespace: str) -> Mapping[str, Any]:
    """For an actor that outlives its controller."""
    return {"name": _unique(name), "namespace": namespace, "lifetime": "detached"}


def place_options(bundle: Bundle, namespace: str) -> Mapping[str, Any]:
    """For a placement group that outlives its controller."""
    return {"name": _unique(_place_name(bundle, namespace)), "lifetime": "detached"}


def kept_actors(namespace: str) -> Mapping[str, tuple[Any, ActorProcess]]:
    """Actors that live and their processes, by the names that they were given."""
    actors: dict[str, tuple[Any, ActorProcess]] = {}
    processes = actor_processes()
    for name in _named_actors(namespace):
        with contextlib.suppress(ValueError):  # it has died meanwhile
            if name in processes:
                actors[name.rpartition(_SEPARATOR)[0]] = ray.get_actor(name, namespace), processes[name]
    return actors


def remove_kept(namespace: str) -> None:
    """Ends all actors of a namespace but the one that keeps them, and removes its placement groups."""
    for name in _named_actors(namespace):
        with contextlib.suppress(ValueError):  # it has died meanwhile
            if name != KEEPALIVE:
                ray.kill(ray.get_actor(name, namespace))
    for each in placement_group_table().values():
        if each["name"].startswith(f"{namespace}{_SEPARATOR}") and each["state"] != "REMOVED":
            with contextlib.suppress(ValueError):
                remove_placement_group(get_placement_group(each["name"]))


def _named_actors(namespace: str) -> list[str]:
    found = ray.util.list_named_actors(all_namespaces=True)
    return [each["name"] for each in found if each["namespace"] == namespace]


def kept_places(bundles: Sequence[Bundle], nodes: Sequence[NodeState], namespace: str) -> list[BundlePlace]:
    """Placement groups that are reserved for these bundles."""
    by_name = {_place_name(bundle, namespace): bundle for bundle in bundles}
    by_node = {node.id: node for node in nodes}
    places = []
    for each in placement_group_table().values():
        bundle = by_name.get(each["name"].rpartition(_SEPARATOR)[0])
        node = by_node.get(next(iter(each["bundles_to_node_id"].values()), ""))
        if bundle is not None and node is not None and each["state"] == "CREATED":
            places.append(BundlePlace(bundle=bundle, node=node, handle=get_placement_group(each["name"])))
    return places


def _unique(name: str) -> str:
    return f"{name}{_SEPARATOR}{secrets.token_hex(8)}"


def _place_name(bundle: Bundle, namespace: str) -> str:
    return f"{namespace}{_SEPARATOR}{bundle.pool}[{bundle.slots[0]}]"
