# SPDX-License-Identifier: Apache-2.0
"""Private names of Ray and vLLM stay in one file each, which names the versions that it was tested with."""

from __future__ import annotations

import ast
import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import podium
from podium.cluster import ray_compat
from podium.rollout.vllm import compat as vllm_compat

SOURCE = Path(podium.__file__).parent
REPOSITORY = SOURCE.parents[1]
RAY_COMPAT, VLLM_COMPAT = SOURCE / "cluster" / "ray_compat.py", SOURCE / "rollout" / "vllm" / "compat.py"

PUBLIC_RAY_VARIABLES = ("RAY_ADDRESS", "RAY_USE_TLS")
# Names of processes and files, titles, options and phrases of errors.
PRIVATE_RAY_TEXTS = ("gcs_server", "raylet")
PRIVATE_RAY_PARTS = ("ray::", "--worker-type", "session_latest", "Worker exit detail", "The actor is dead because")
PUBLIC_VLLM_MODULES = ("vllm", "vllm.sampling_params")
PRIVATE_VLLM_ATTRIBUTES = (
    "engine_core", "scheduler", "output_processor", "model_runner", "input_batch", "vllm_config", "model_config",
    "cache_config", "parallel_config", "kv_cache_manager", "kv_cache_config", "kv_caches", "quant_method",
    "create_engine_config",
)  # fmt: skip


def private_ray_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines and names. A variable of Ray's that a function returned is not followed."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                yield from ((node.lineno, each.name) for each in aliases if _is_private("ray", each.name))
            case ast.ImportFrom(module=str(module), names=aliases):
                names = (f"{module}.{each.name}" for each in aliases)
                yield from ((node.lineno, name) for name in names if _is_private("ray", name))
            case ast.Attribute():
                if _is_private("ray", name := ast.unparse(node)):
                    yield node.lineno, name
            case ast.Call(func=function, keywords=keywords) if ast.unparse(function).startswith("ray."):
                options = (each.arg for each in keywords if each.arg is not None)
                yield from ((node.lineno, option) for option in options if option.startswith("_"))
            case ast.Constant(value=str() | bytes() as value):
                text = value if isinstance(value, str) else value.decode("latin-1")
                if _is_private_ray_text(text):
                    yield node.lineno, text


def private_vllm_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines and names. Attributes count in any object: the types of vLLM are unknown here."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                yield from ((node.lineno, each.name) for each in aliases if _is_private_vllm_module(each.name))
            case ast.ImportFrom(module=str(module)) if _is_private_vllm_module(module):
                yield node.lineno, module
            case ast.Constant(value=str(text)) if re.fullmatch("VLLM_[A-Z0-9_]+", text):
                yield node.lineno, text


def private_vllm_attributes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Insides of vLLM's engine and workers, by the names of the attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE_VLLM_ATTRIBUTES:
            yield node.lineno, node.attr


def _is_private(package: str, name: str) -> bool:
    first, *parts = name.split(".")
    return first == package and any(part.startswith("_") and not part.startswith("__") for part in parts)


def _is_private_ray_text(text: str) -> bool:
    is_variable = re.fullmatch("RAY_[A-Za-z0-9_]+", text) is not None and text not in PUBLIC_RAY_VARIABLES
    return is_variable or text in PRIVATE_RAY_TEXTS or any(part in text for part in PRIVATE_RAY_PARTS)


def _is_private_vllm_module(name: str) -> bool:
    return name.split(".")[0] == "vllm" and name not in PUBLIC_VLLM_MODULES


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE)))
def test_private_names_are_used_in_the_compat_files_only(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    uses: list[tuple[int, str]] = []
    if file != RAY_COMPAT:
        uses += private_ray_names(tree)
    if file != VLLM_COMPAT:
        uses += private_vllm_names(tree)
        uses += private_vllm_attributes(tree) if file.is_relative_to(VLLM_COMPAT.parent) else ()
    assert not uses, f"move these to {RAY_COMPAT.name} or vllm/{VLLM_COMPAT.name}: {uses}"


@pytest.mark.parametrize(
    "code",
    [
        "import ray._private.state",
        "from ray._raylet import ObjectRef",
        "from ray.util.state import _internal",
        "ray._private.worker.global_worker",
        "ray.util.placement_group._check()",
        "ray.init(_system_config={})",
        "os.environ['RAY_raylet_start_wait_time_s'] = '1'",
        "process.name == 'raylet'",
        "command.startswith(b'ray::IDLE_')",
    ],
)
def test_private_names_of_ray_are_noticed(code: str) -> None:
    assert list(private_ray_names(ast.parse(code)))


@pytest.mark.parametrize(
    "code", ["ray.init(address='local')", "ray.exceptions.RayError", "os.environ['RAY_ADDRESS']", "ray.__version__"]
)
def test_public_names_of_ray_are_not(code: str) -> None:
    assert not list(private_ray_names(ast.parse(code)))


def test_private_names_of_vllm_are_noticed() -> None:
    code = "import vllm.v1.engine\nfrom vllm.platforms import x\nos.environ['VLLM_USE_V1']\nfrom vllm import EngineArgs"
    assert [line for line, _ in private_vllm_names(ast.parse(code))] == [1, 2, 3]
    assert list(private_vllm_attributes(ast.parse("engine.engine_core.shutdown()")))


def test_the_installed_ray_is_one_that_the_compat_file_was_tested_with() -> None:
    installed = importlib.metadata.version("ray")
    assert installed in ray_compat.TESTED_VERSIONS, (
        f"Ray {installed} is not among the tested versions {ray_compat.TESTED_VERSIONS}. Compare each function of "
        "cluster/ray_compat.py with Ray's source (private modules, process titles, wording of errors), run "
        "tests/cluster with the slow ones, then add the version to TESTED_VERSIONS."
    )


def test_the_pinned_vllm_is_one_that_the_compat_file_was_tested_with() -> None:
    pins = re.findall(r"^vllm(?:-cpu)?==(\S+)$", (REPOSITORY / "constraints-vllm.txt").read_text(), re.MULTILINE)
    assert pins
    assert set(pins) <= set(vllm_compat.TESTED_VERSIONS), (
        f"constraints-vllm.txt pins vLLM {', '.join(pins)}, and the tested versions are {vllm_compat.TESTED_VERSIONS}. "
        "Compare each function of rollout/vllm/compat.py with vLLM's source, run `make test-vllm`, then add the "
        "version to TESTED_VERSIONS."
    )
