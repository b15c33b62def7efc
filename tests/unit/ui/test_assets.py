# SPDX-License-Identifier: Apache-2.0
"""The files of the page: nothing makes HTML from text, nothing comes from elsewhere, everything is used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import podium.ui

ASSETS = Path(podium.ui.__file__).parent / "assets"
MODULES = sorted(path for path in ASSETS.glob("*.js") if path.name != "uplot.js")
# What parses text as HTML or as a program.
_PARSES = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|createContextualFragment|DOMParser|setHTML|srcdoc|document\.write|"
    r"\beval\b|new Function|setTimeout\(\s*[\"'`]|javascript:"
)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_no_module_makes_html_or_code_from_text(path: Path) -> None:
    assert _PARSES.findall(path.read_text()) == []


@pytest.mark.parametrize("path", [*MODULES, ASSETS / "index.html", ASSETS / "style.css"], ids=lambda path: path.name)
def test_nothing_is_loaded_from_elsewhere(path: Path) -> None:
    text = path.read_text().replace("http://report/", "")  # a base to parse addresses with, never asked
    assert re.findall(r"(?:https?:)?//[\w.-]+\.\w+|url\(|@import", text) == []


def test_the_document_has_no_inline_script_style_or_listener() -> None:
    text = (ASSETS / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", text) == []


def test_every_module_is_imported_and_every_import_exists() -> None:
    exported: dict[str, set[str]] = {}
    for path in MODULES:
        names = re.findall(r"^export (?:async )?(?:function|const|let|class) (\w+)", path.read_text(), re.MULTILINE)
        exported[path.name] = set(names)
    used: dict[str, set[str]] = {name: set() for name in exported}
    for path in MODULES:
        for names, module in re.findall(r'^import \{([^}]*)\} from "\./([\w.]+)";', path.read_text(), re.MULTILINE):
            imported = {name.strip() for name in names.split(",") if name.strip()}
            assert imported <= exported[module], f"{path.name} imports what {module} does not have"
            used[module] |= imported
            body = path.read_text().partition(f'from "./{module}";')[2]
            assert all(re.search(rf"\b{name}\b", body) for name in imported), (
                f"{path.name} does not use all of {module}"
            )
    unused = {(module, name) for module in exported for name in exported[module] - used[module]}
    assert unused == {("chart.js", "smoothed")}  # for tests/browser
    assert [name for name in used if not used[name] and name != "app.js"] == []


def test_modules_begin_with_licence_and_purpose() -> None:
    for path in MODULES:
        first, second = path.read_text().splitlines()[:2]
        assert first == "// SPDX-License-Identifier: Apache-2.0"
        assert second.startswith("// ")
    assert "MIT License" in (ASSETS / "uplot-license.txt").read_text()
