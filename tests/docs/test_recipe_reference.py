# SPDX-License-Identifier: Apache-2.0
"""The recipe reference is what its generator makes of the recipe's classes, and it describes every key."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import ModuleType

import pytest

from helpers.pages import DOCS, ROOT
from podium.recipe.keys import program_keys
from podium.recipe.pipeline_loading import recipe_schema


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_recipe_reference", DOCS / "make_recipe_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_generator_gives(generator: ModuleType) -> None:
    written = (DOCS / "recipe_reference.md").read_text(encoding="utf-8")
    assert written == generator.recipe_reference(), "run `make docs-reference`"


def test_every_key_has_a_row(generator: ModuleType) -> None:
    classes = {name: kind.__name__ for name, kind in generator.recipes().items()}
    tables = generator.section_tables(recipe_schema()["$defs"], classes).values()
    rows = {f"{table.path}.{key.name}" for table in tables for key in table.keys}
    rows |= {f"{table.path}.{table.form.partition(':')[0]}" for table in tables if table.form}

    described = {row.lstrip(".").replace("[]", "") for row in rows}

    assert described == {key for keys in program_keys().values() for key in keys}


def test_every_key_has_a_description() -> None:
    missing = [
        f"{name}.{key}"
        for name, part in recipe_schema()["$defs"].items()
        for branch in (part, *part.get("anyOf", ()))
        for key, value in branch.get("properties", {}).items()
        if "description" not in value and "const" not in value and "$ref" not in str(value)
    ]
    assert missing == []


def test_every_section_has_a_description() -> None:
    parts = recipe_schema()["$defs"].items()
    objects = [(name, branch) for name, part in parts for branch in (part, *part.get("anyOf", ()))]
    assert [name for name, part in objects if "properties" in part and not part.get("description")] == []


def test_the_generator_imports_no_torch() -> None:
    script = str(DOCS / "make_recipe_reference.py")
    code = f"import runpy, sys; runpy.run_path({script!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
