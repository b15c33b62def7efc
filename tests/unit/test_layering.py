# SPDX-License-Identifier: Apache-2.0
"""Imports run only downward, ray stays in its room, and the torch-free rooms stay torch-free."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import podium

SOURCE = Path(podium.__file__).parent
LAYERS = (
    "errors", "disk", "cgroups", "importing", "progress", "stack_dumps", "recipe", "observe", "algorithms", "data",
    "environments", "models", "engine", "weights", "rollout", "gateway", "runs", "cluster", "roles", "controller",
    "spmd", "programs", "planning", "dry_run", "ui", "mesh_checks", "checks", "memory_checks",
    "pipeline_checks", "python_hints", "python_objects", "recipe_arguments", "generating", "following", "serving",
    "lm_evaluating", "execution", "evaluating", "replaying", "drafting", "trying", "api", "commands", "cli",
    "supervising",
)  # fmt: skip
HEAVY = ("torch", "transformers")
TORCH_FREE = (
    "errors",
    "disk",
    "cgroups",
    "importing",
    "progress",
    "stack_dumps",
    "recipe",
    "observe",
    "runs",
    "ui",
    "data",
    "environments",
    "planning",
    "checks",
    "memory_checks",
    "mesh_checks",
    "pipeline_checks",
    "python_hints",
    "python_objects",
    "recipe_arguments",
    "gateway",
    "following",
    "serving",
    "lm_evaluating",
    "generating",
    "execution",
    "evaluating",
    "replaying",
    "drafting",
    "trying",
    "api",
    "commands",
    "cli",
    "supervising",
    "spmd.launch",
    "spmd.own_hang",
    "spmd.rank_processes",
    "spmd.restart_budget",
    "spmd.on_ray",
    "models.adapter_folder",
    "models.folder",
    "models.context_plan",
    "models.expert_plan",
    "models.tensor_plan",
    "models.cost",
    "models.cpu_settings",
    "algorithms.advantages",
    "algorithms.behavior_check",
    "algorithms.kl",
    "algorithms.router_statistics",
    "algorithms.staleness",
    "algorithms.statistics",
    "algorithms.sums",
    "algorithms.turn_advantages",
    "engine.addresses",
    "engine.checkpoint_files",
    "engine.schedule",
    "engine.snapshot_pace",
    "cluster",
    "weights.canary",
    "weights.weight_transfers",
    "weights.versions",
    "rollout.native.sizing",
    "rollout.requests",
    "rollout.engine",
    "rollout.jobs",
    "rollout.answers_file",
    "rollout.progress",
    "roles.agent_sessions",
    "roles.blocks",
    "roles.carriers",
    "roles.episode_runner",
    "roles.episode_states",
    "roles.episode_stream",
    "roles.grader",
    "roles.grading_handle",
    "roles.handles",
    "roles.interfaces",
    "roles.lost_workers",
    "roles.mini_batches",
    "roles.placed_rewards",
    "roles.runner_handle",
    "roles.samples",
    "roles.stages",
    "roles.state_handle",
    "roles.texts",
    "controller",
    "programs.controlled",
    "programs.estimators",
    "programs.expert_iteration",
    "programs.grpo",
    "programs.on_policy_distill",
    "programs.ppo",
)
# Rooms that are torch-free but for these files, and files that importing a torch-free one of their room runs too.
NOT_TORCH_FREE = ("cluster.rendezvous",)
FREE_PACKAGES = ("algorithms", "spmd", "models", "engine", "weights", "rollout", "rollout.native", "roles", "programs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One import statement's target; `eager` when importing the module runs it."""

    module: str
    line: int
    eager: bool


def imports_of(code: str, known: set[str]) -> Iterator[Import]:
    """All imports of a file, those inside functions and TYPE_CHECKING blocks too; `known` are podium's modules."""
    tree = ast.parse(code)
    lazy = {id(inner) for node in ast.walk(tree) if _runs_later(node) for inner in ast.walk(node) if inner is not node}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                for alias in aliases:
                    yield Import(module=alias.name, line=node.lineno, eager=id(node) not in lazy)
            case ast.ImportFrom(module=module, names=aliases, level=level):
                assert level == 0, f"line {node.lineno}: a relative import hides where it goes"
                for alias in aliases:
                    submodule = f"{module}.{alias.name}"
                    name = submodule if submodule in known else str(module)
                    yield Import(module=name, line=node.lineno, eager=id(node) not in lazy)


def _runs_later(node: ast.AST) -> bool:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.If(test=ast.Attribute(attr="TYPE_CHECKING")):
            return True
    return False


def violations(source: Path) -> list[str]:
    """One sentence for each arrow that points the wrong way."""
    files = {_module_name(file, source): file for file in sorted(source.rglob("*.py"))}
    found: list[str] = []
    for module, file in files.items():
        for each in imports_of(file.read_text(encoding="utf-8"), set(files)):
            where = f"{file.relative_to(source)}:{each.line}"
            found += [f"{where} {problem}" for problem in _problems(module, each)]
    return found


def _problems(module: str, each: Import) -> Iterator[str]:
    top = each.module.split(".")[0]
    if top == "podium":
        mine, theirs = layer(module), layer(each.module)
        if mine is None or theirs is None:
            yield f"{module} imports {each.module}, and one of them has no layer: add it to LAYERS"
        elif theirs > mine:
            yield f"{module} imports upward: {each.module}"
        elif each.eager and is_torch_free(module) and not is_torch_free(each.module):
            yield f"{module} is torch-free and imports {each.module}, which is not"
    if top == "ray" and not module.startswith("podium.cluster."):
        yield f"{module} imports ray, which only cluster/ may"
    if top in HEAVY and each.eager and is_torch_free(module):
        yield f"{module} is torch-free and imports {top} at module level"


def layer(module: str) -> int | None:
    """0 is the lowest. The package itself is the user's API, and `python -m podium` is the command line."""
    room = module.split(".")[1] if "." in module else "api"
    room = LAYERS[-1] if room == "__main__" else room
    return LAYERS.index(room) if room in LAYERS else None


def is_torch_free(module: str) -> bool:
    inside = module.partition(".")[2]
    if inside in ("", "__main__"):
        return True
    if inside in NOT_TORCH_FREE:
        return False
    return inside in FREE_PACKAGES or any(inside == room or inside.startswith(room + ".") for room in TORCH_FREE)


def _module_name(file: Path, source: Path) -> str:
    parts = ["podium", *file.relative_to(source).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_imports_of_the_package_run_only_downward() -> None:
    assert violations(SOURCE) == []


@pytest.mark.parametrize(
    ("file", "code", "complaint"),
    [
        ("recipe/schema.py", "import podium.data.files", "recipe/schema.py:1 podium.recipe.schema imports upward"),
        ("engine/mesh.py", "def f():\n    from podium.spmd import run", "engine/mesh.py:2 podium.engine.mesh imports"),
        ("data/rows.py", "if TYPE_CHECKING:\n    from podium.api import train", "podium.data.rows imports upward"),
        ("models/head.py", "from podium import cli", "imports upward: podium.cli"),
        ("models/head.py", "from podium import Recipe", "imports upward: podium"),
        ("spmd/rank.py", "def f():\n    import ray", "podium.spmd.rank imports ray"),
        ("spmd/rank.py", "from ray.util import queue", "podium.spmd.rank imports ray"),
        ("data/rows.py", "try:\n    import torch.nn\nexcept ImportError:\n    pass", "imports torch at module level"),
        ("observe/console.py", "from transformers import logging", "imports transformers at module level"),
        ("models/folder.py", "import torch", "imports torch at module level"),
        ("models/__init__.py", "import torch", "imports torch at module level"),
        ("checks.py", "from podium.models import causal_lm", "imports podium.models.causal_lm, which is not"),
        ("garage/car.py", "import podium.errors", "add it to LAYERS"),
    ],
)  # fmt: skip
def test_a_planted_violation_is_caught(tmp_path: Path, file: str, code: str, complaint: str) -> None:
    for name in (file, "cli.py", "spmd/run.py", "models/causal_lm.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / file).write_text(code)

    found = violations(tmp_path)

    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("api.py", "def f():\n    from podium.spmd.rank import run_rank\n    import torch"),
        ("api.py", "if TYPE_CHECKING:\n    import torch\n    from podium.spmd.run import RunResult"),
        ("models/head.py", "import torch\nfrom podium.data.documents import pack\nfrom podium import errors"),
        ("spmd/rank.py", "import torch"),
        ("cluster/worker.py", "import ray"),
        ("__main__.py", "from podium.cli import main"),
    ],
)
def test_what_is_allowed_is_not_complained_of(tmp_path: Path, file: str, code: str) -> None:
    for name in (file, "errors.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / file).write_text(code)

    assert violations(tmp_path) == []
