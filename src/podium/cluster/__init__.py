# SPDX-License-Identifier: Apache-2.0
"""The layer between a single controller and its SPMD roles; the only package that may import ray."""

from podium.cluster.cluster import Cluster, open_inline, open_ray, open_simulated
from podium.cluster.group import RoleGroup
from podium.cluster.identity import WorkerId
from podium.cluster.layout import Layout, Pool, RayCluster, Resources, RoleSpec
from podium.cluster.meshes import MeshRegistry, MeshShape, RoleMesh
from podium.cluster.objects import ObjectScope, RowRefs, Stored
from podium.cluster.results import CallResult, Computed, Merged, Metric, ShardResult, stored_rows
from podium.cluster.virtual_time import run_virtual
from podium.cluster.worker_context import Interruptible, WorkerContext
from podium.cluster.workers import Workers

__all__ = [
    "CallResult",
    "Cluster",
    "Computed",
    "Interruptible",
    "Layout",
    "Merged",
    "MeshRegistry",
    "MeshShape",
    "Metric",
    "ObjectScope",
    "Pool",
    "RayCluster",
    "Resources",
    "RoleGroup",
    "RoleMesh",
    "RoleSpec",
    "RowRefs",
    "ShardResult",
    "Stored",
    "WorkerContext",
    "WorkerId",
    "Workers",
    "open_inline",
    "open_ray",
    "open_simulated",
    "run_virtual",
    "stored_rows",
]
