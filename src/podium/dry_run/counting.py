# SPDX-License-Identifier: Apache-2.0
"""Counts the collectives that a rank calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.distributed_c10d import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from podium.engine.mesh import Mesh
from podium.planning.collectives import EXPERT_SHARD, Collective, Kind, added_up, span_of
from podium.recipe.policy_mesh import MeshSizes

ALL_RANKS = "all"


@dataclass(frozen=True, slots=True)
class _Operator:
    """One of torch's operators for collectives: its kind, which argument is the whole tensor (-1: the result), and
    which one is the group."""

    kind: Kind
    tensor: int
    group: int


# Of torch 2.11 to 2.13: operators of torch.distributed, and of its functional collectives.
_OPERATORS: Mapping[str, _Operator] = {
    "c10d.allreduce_": _Operator("all-reduce", 0, 1),
    "c10d._allgather_base_": _Operator("all-gather", 0, 2),
    "c10d.allgather_": _Operator("all-gather", 0, 2),
    "c10d._reduce_scatter_base_": _Operator("reduce-scatter", 1, 2),
    "c10d.reduce_scatter_": _Operator("reduce-scatter", 1, 2),
    "c10d.alltoall_base_": _Operator("all-to-all", 1, 2),
    "c10d.alltoall_": _Operator("all-to-all", 1, 2),
    "c10d.broadcast_": _Operator("broadcast", 0, 1),
    "c10d.send": _Operator("send", 0, 1),
    "_c10d_functional.all_reduce": _Operator("all-reduce", 0, 2),
    "_c10d_functional.all_reduce_": _Operator("all-reduce", 0, 2),
    "_c10d_functional.all_gather_into_tensor": _Operator("all-gather", -1, 2),
    "_c10d_functional.reduce_scatter_tensor": _Operator("reduce-scatter", 0, 3),
    "_c10d_functional.all_to_all_single": _Operator("all-to-all", 0, 3),
}
_SILENT = ("c10d.barrier", "c10d.recv_", "c10d.recv_any_source_", "_c10d_functional.wait_tensor")


class CollectiveCounter(TorchDispatchMode):
    """Notes every collective below it. An operator that it does not know raises an error: none is left out."""

    def __init__(self, mesh: Mesh, sizes: MeshSizes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._axes, self._sizes = axes_of(mesh), sizes
        self._noted: list[Collective] = []

    @property
    def noted(self) -> tuple[Collective, ...]:
        """Every call, also in groups of one rank."""
        return tuple(self._noted)

    @property
    def num_noted(self) -> int:
        """How many calls there were."""
        return len(self._noted)

    def between(self, start: int = 0, stop: int | None = None) -> tuple[Collective, ...]:
        """The calls with these numbers, added up by kind and axis."""
        return added_up(self._noted[start:stop])

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(func, args, result)
        return result

    def _note(self, func: Any, args: Sequence[Any], result: Any) -> None:
        name = f"{func.namespace}.{func.overloadpacket.__name__}"
        if name in _SILENT:
            return
        assert name in _OPERATORS, f"{name} is a collective that is not counted"
        operator = _OPERATORS[name]
        whole = result if operator.tensor < 0 else args[operator.tensor]
        group = _group(args[operator.group])
        axis = self._axes.get(group.group_name, "other")
        span = span_of(axis, group.size(), self._sizes)
        self._noted.append(
            Collective(
                kind=operator.kind,
                axis=axis,
                ranks=group.size(),
                span=span,
                calls=1,
                num_bytes=_num_bytes(whole),
            )
        )


def axes_of(mesh: Mesh) -> dict[str, str]:
    """Names of this rank's process groups -> the axis of each."""
    axes: dict[str, str] = {dist.group.WORLD.group_name: ALL_RANKS} if dist.group.WORLD is not None else {}
    if mesh.devices is not None:
        names = mesh.devices.mesh_dim_names or ()
        axes |= {mesh.devices.get_group(name).group_name: name for name in names}
    if mesh.expert_devices is not None:  # ranks that hold the same experts: those of `replicate` are the same ranks
        names = mesh.expert_devices.mesh_dim_names or ()
        of_name = {"shard": EXPERT_SHARD, "replicate": "replicate"}
        axes |= {mesh.expert_devices.get_group(name).group_name: of_name[name] for name in names}
    for field in fields(mesh):
        group = getattr(getattr(mesh, field.name), "group", None)
        if isinstance(group, ProcessGroup):
            axes[group.group_name] = field.name
    if mesh.experts is not None and mesh.experts.exchange is not None:
        axes[mesh.experts.exchange.group.group_name] = "experts"
    return axes


def _group(argument: Any) -> ProcessGroup:
    if isinstance(argument, str):
        return _resolve_process_group(cast("Any", argument))
    return argument if isinstance(argument, ProcessGroup) else ProcessGroup.unbox(argument)


def _num_bytes(whole: Any) -> int:
    return sum(each.numel() * each.element_size() for each in tree_leaves(whole) if isinstance(each, Tensor))
