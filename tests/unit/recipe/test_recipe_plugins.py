# SPDX-License-Identifier: Apache-2.0
"""Custom pieces are found by parsing alone; their files run only when they are loaded."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers.recipes import make_recipe
from podium.errors import RecipeError
from podium.recipe import plugins
from podium.recipe.definitions import definition_of

CODE = """
from math import sqrt as root
import json
raise_on_import = {marker!r}
open(raise_on_import, "w").close()
LIMIT = 3

def keep(row):
    return row

async def later(row):
    return row

class Listing:
    def __init__(self, folder):
        self.folder = folder
"""


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that appears when a plug-in's code is run."""
    return tmp_path / "was-run"


@pytest.fixture
def file(tmp_path: Path, marker: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(CODE.format(marker=str(marker)))
    return path


@pytest.fixture
def package(tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """`outer.inner` on the import path; both leave the marker when they are run."""
    folder = tmp_path / "somewhere" / "podium_test_outer"
    folder.mkdir(parents=True)
    for name in ("__init__.py", "inner.py"):
        (folder / name).write_text(CODE.format(marker=str(marker)))
    monkeypatch.syspath_prepend(str(folder.parent))
    yield "podium_test_outer.inner"
    for name in [name for name in sys.modules if name.startswith("podium_test_outer")]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["keep", "later", "Listing", "root", "json"])
def test_what_a_file_defines_or_imports_is_found_without_running_it(file: Path, marker: Path, name: str) -> None:
    plugins.locate(f"{file}:{name}", "data.train.0.map")

    assert not marker.exists()


def test_a_module_is_found_without_importing_it_or_its_package(package: str, marker: Path) -> None:
    plugins.locate(f"{package}:keep", "run.loggers.0")

    assert not marker.exists()
    assert "podium_test_outer" not in sys.modules


def test_a_missing_file_is_named_with_the_key() -> None:
    with pytest.raises(RecipeError, match=r"data\.train\.0\.map: .* nowhere/mine\.py\b"):
        plugins.locate("nowhere/mine.py:keep", "data.train.0.map")


@pytest.mark.parametrize("module", ["podium_test_nothing", "podium_test_outer.nothing"])
def test_a_missing_module_is_named_with_the_key(package: str, module: str) -> None:
    with pytest.raises(RecipeError, match=rf"run\.loggers\.0: .*'{module}'"):
        plugins.locate(f"{module}:f", "run.loggers.0")


def test_a_module_without_source_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"run\.loggers\.0: .*'math'"):
        plugins.locate("math:sqrt", "run.loggers.0")


def test_a_syntax_error_is_reported_with_file_and_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def fine(row):\n    return row\n\ndef keep(row:\n    return row\n")

    with pytest.raises(RecipeError, match=r"evaluation\.generation\.score: .*broken\.py, line 4: "):
        plugins.locate(f"{broken}:fine", "evaluation.generation.score")


def test_a_missing_function_lists_what_there_is(file: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        plugins.locate(f"{file}:kept", "data.train.0.map")

    assert re.match(rf"data\.train\.0\.map: {file} .*'kept'", str(caught.value))
    assert ": LIMIT, Listing, keep, later, raise_on_import." in str(caught.value)


def test_an_empty_file_defines_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.py").touch()

    with pytest.raises(RecipeError, match=r"empty\.py .*'f'.*nothing"):
        plugins.locate(f"{tmp_path}/empty.py:f", "data.train.0.map")


@pytest.mark.parametrize(
    "code",
    [
        "try:\n    import fast\nexcept ImportError:\n    def keep(row):\n        return row\n",
        "keep: object = print\n",
        "if True:\n    def keep(row):\n        return row\n",
    ],
    ids=["in a try", "annotated", "in an if"],
)
def test_a_name_bound_in_another_way_at_the_top_is_found(tmp_path: Path, code: str) -> None:
    (tmp_path / "other.py").write_text(code)

    plugins.locate(f"{tmp_path}/other.py:keep", "data.train.0.map")


def test_a_file_that_is_not_utf8_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_bytes(b"# S\xfcm\ndef f(row):\n    return row\n")

    with pytest.raises(RecipeError, match=r"data\.train\.0\.map: .*latin\.py"):
        plugins.locate(f"{tmp_path}/latin.py:f", "data.train.0.map")


def test_loading_runs_the_file_and_gives_the_function(file: Path, marker: Path) -> None:
    keep = plugins.load(f"{file}:keep", "data.train.0.map")

    assert marker.exists()
    assert keep({"a": 1}) == {"a": 1}


def test_a_class_is_a_plugin_too(file: Path) -> None:
    made = plugins.load(f"{file}:Listing", "run.loggers.0")("runs/a")

    assert made.folder == "runs/a"


def test_loading_from_a_module_imports_it(package: str) -> None:
    assert plugins.load(f"{package}:keep", "data.train.0.map")(5) == 5


def test_two_files_of_one_name_do_not_get_in_each_others_way(tmp_path: Path) -> None:
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"def f():\n    return {value}\n")

    first, second = (plugins.load(f"{tmp_path}/{folder}/mine.py:f", "data.train.0.map") for folder in "ab")

    assert (first(), second()) == (1, 2)


def test_what_cannot_be_called_is_refused(file: Path) -> None:
    with pytest.raises(RecipeError, match=r"run\.loggers\.0: .*:LIMIT .*callable"):
        plugins.load(f"{file}:LIMIT", "run.loggers.0")


@pytest.mark.parametrize("path", ["mine.py", "mine.py:", ":keep", "mine.py:not a name", "mine.py:a.b"])
def test_what_is_not_an_import_path_is_refused_by_the_recipe(path: str) -> None:
    with pytest.raises(RecipeError, match=rf"data\.train\.0\.map: {re.escape(repr(path))} .*file\.py:function"):
        make_recipe(f"data.train.0.map='{path}'")


def test_a_path_with_a_colon_is_split_at_the_last_one() -> None:
    assert plugins.split_plugin("C:/mine.py:keep") == ("C:/mine.py", "keep")


DEFINED = """
from somewhere import imported
def plain(a, /, b, c=1, *rest, d, e="x", **more): ...
@imported
def decorated(a): ...
def twice(a): ...
def twice(b): ...
if imported:
    def conditional(a): ...
class Own:
    def __init__(self, a, *, b=None): ...
    async def __call__(self, answer): ...
class Bare: ...
class Child(Own): ...
class Grandchild(Child, object): ...
class Plain(object): ...
class Further(Plain): ...
class Mixed(Own, Plain): ...
class Foreign(imported.Base): ...
class Itself(Itself): ...
class ChildWithOwn(Own):
    def __init__(self, z): ...
class New:
    def __new__(cls, a): ...
class Meta(metaclass=imported):
    def __init__(self, a): ...
@imported
class Record:
    a: int
"""


@pytest.mark.parametrize(
    ("name", "signature", "call"),
    [
        ("plain", "(a, /, b, c=1, *rest, d, e='x', **more)", None),
        ("Own", "(a, *, b=None)", "(answer)"),
        ("Bare", "()", None),
        ("Child", "(a, *, b=None)", "(answer)"),
        ("Plain", "()", None),
        ("Further", "()", None),
        ("ChildWithOwn", "(z)", "(answer)"),
        *((name, None, None) for name in ("imported", "decorated", "twice", "conditional", "New", "Meta", "Record")),
        *((name, None, None) for name in ("Grandchild", "Mixed", "Foreign", "Itself")),
    ],
)
def test_how_a_plug_in_is_called_is_read_from_its_text_where_that_tells(
    tmp_path: Path, name: str, signature: str | None, call: str | None
) -> None:
    (tmp_path / "mine.py").write_text(DEFINED)

    definition = definition_of(f"{tmp_path}/mine.py:{name}", "reward.0.function")

    assert (None if definition is None else str(definition.signature)) == signature
    if definition is not None:
        assert (None if definition.call is None else str(definition.call)) == call
        begins = re.compile(rf"(def|class) {name}\b")
        line = next(number for number, line in enumerate(DEFINED.splitlines(), start=1) if begins.match(line))
        assert definition.place.endswith(f"mine.py, line {line}")


def test_threads_that_load_one_file_at_the_same_time_get_all_of_it(tmp_path: Path) -> None:
    file = tmp_path / "slow.py"
    file.write_text("import time\ntime.sleep(0.1)\n\ndef f(row):\n    return row\n")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: plugins.load(f"{file}:f", "data.train.0.map"), range(4)))
    assert len(set(found)) == 1
