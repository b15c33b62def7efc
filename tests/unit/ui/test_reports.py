# SPDX-License-Identifier: Apache-2.0
"""`podium report`: one HTML file that has everything inside and cannot be taken over by a model's answer."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers.run_folders import UNSAFE, append_steps, make_run_folder
from podium.cli import app
from podium.errors import InvariantError, RunFolderError
from podium.runs.folder import RunFolder
from podium.ui import report
from podium.ui.bundling import single_page
from podium.ui.report import write_report

INDEX = (
    '<!doctype html><html><head><link rel="icon" href="icon.svg" type="image/svg+xml">'
    '<link rel="stylesheet" href="style.css"><script src="lib.js" defer></script>'
    '<script src="app.js" type="module"></script></head><body><main></main></body></html>'
)
FILES = {
    "index.html": INDEX.encode(),
    "icon.svg": b"<svg></svg>",
    "style.css": b"body { color: red }",
    "lib.js": b"var lib = '</script>';",
    "app.js": b'import { first, second } from "./one.js";\nimport { third } from "./two.js";\nfirst(second, third);\n',
    "one.js": b'import { third } from "./two.js";\nexport function first() { return 1 }\nexport const second = 2;\n',
    "two.js": b'import { first } from "./one.js";\nexport const third = 3;\nexport function early() { return first }\n',
}


class Parts(HTMLParser):
    """Elements of a page with their attributes, and the texts of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] in ("script", "style"):
            self.texts.append((self.elements[-1][0], data))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture
def written(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(report, "assets", lambda: FILES)
    write_report(runs / "one", tmp_path / "report.html")
    return (tmp_path / "report.html").read_text()


def data_of(page: str) -> dict[str, Any]:
    text = page.partition('<script type="application/json" id="podium-data">')[2].partition("</script>")[0]
    found: dict[str, Any] = json.loads(text)
    return found


def test_it_loads_nothing(written: str) -> None:
    parts = Parts(written)

    assert not any("src" in attributes for _, attributes in parts.elements)
    assert all(str(each["href"]).startswith("data:") for _, each in parts.elements if "href" in each)
    assert "http://" not in written and "https://" not in written  # noqa: PT018


def test_its_policy_allows_its_own_scripts_and_styles_only(written: str) -> None:
    parts = Parts(written)
    policy = next(each["content"] for each in parts.of("meta") if each.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    executed = [text for tag, text in parts.texts if tag == "script" and not text.startswith('{"/api/')]
    assert len(executed) == 2
    for kind, texts in (("script", executed), ("style", [text for tag, text in parts.texts if tag == "style"])):
        hashes = re.findall(r"'sha256-([^']+)'", policy.partition(f"{kind}-src ")[2].partition(";")[0])
        assert hashes == [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]


def test_an_answer_cannot_end_the_data(written: str) -> None:
    parts = Parts(written)

    assert written.count("<script") == 3
    assert not parts.of("img")
    episodes = data_of(written)["/api/runs/one/rollouts/4/7"]["episodes"]
    assert episodes[0]["messages"][1]["content"] == UNSAFE


def test_modules_become_one_script_in_the_order_of_their_imports(written: str) -> None:
    (_, library), (_, script) = (each for each in Parts(written).texts if each[0] == "script" and "api" not in each[1])

    assert library == "var lib = '\\x3c/script>';"
    assert script.index("const third = 3") < script.index("const second = 2") < script.index("first(second, third)")
    assert "import" not in script
    assert "export" not in script


@pytest.mark.parametrize(
    ("name", "source", "complaint"),
    [
        ("two.js", b"export const second = 1;", "second is declared in"),
        ("two.js", b"export default third;", "two.js: export default"),
        ("two.js", b'import * as all from "./one.js";', "two.js: import"),
        ("app.js", b'import { x } from "./none.js";', "no file 'none.js'"),
        ("index.html", b"<html></html>", "without one <head>"),
    ],
)
def test_files_that_cannot_be_joined(name: str, source: bytes, complaint: str) -> None:
    with pytest.raises(InvariantError, match=complaint):
        single_page({**FILES, name: source}, "{}", [])


def test_a_note_is_text() -> None:
    assert "<b>" not in single_page(FILES, "{}", ["<b>bold</b>"])


def test_it_has_what_the_page_asks_for(written: str) -> None:
    data = data_of(written)

    assert [row["id"] for row in data["/api/runs"]["runs"]] == ["one"]
    assert data["/api/runs/one"]["texts"]
    assert data["/api/runs/one/metrics"]["series"]["loss"]["step"] == list(range(1, 11))
    assert len(data["/api/runs/one/timeline"]["workers"]) == 3
    assert data["/api/runs/one/accounting"]["workers"]
    assert len(data["/api/runs/one/heldout"]["prompts"]) == 2
    # Of steps 1 to 3 the best, worst and longest are in both groups.
    groups = {path for path in data if re.fullmatch(r"/api/runs/one/rollouts/\d+/\d+", path)}
    assert len(groups) == 3 * 2 + 1
    assert data["/api/runs/one/rollouts"]["total"] == 13


def test_a_large_run_is_thinned_out_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "assets", lambda: FILES)
    run = make_run_folder(tmp_path, "long", steps=3)
    append_steps(RunFolder.open(run.path), range(4, 3001))
    run.update(step=3000)

    summary = write_report(run.path, tmp_path / "report.html")

    assert (
        len(data_of((tmp_path / "report.html").read_text())["/api/runs/long/metrics"]["series"]["loss"]["step"]) == 500
    )
    assert summary.left_out == ("long: curves have 500 points of 3000 steps (mean, least and greatest)",)
    assert "500 points of 3000 steps" in (tmp_path / "report.html").read_text()


def test_the_command_says_where_it_is(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "assets", lambda: FILES)
    out = tmp_path / "x.html"
    result = CliRunner().invoke(app, ["report", str(runs / "one"), "-o", str(out)])

    assert result.exit_code == 0, result.output
    assert "x.html" in result.output
    assert out.is_file()


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is not the folder of a run"):
        write_report(tmp_path, tmp_path / "report.html")


def test_a_place_that_cannot_be_written(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "assets", lambda: FILES)
    with pytest.raises(RunFolderError, match=r"report.html cannot be written"):
        write_report(runs / "one", tmp_path / "none" / "report.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(RunFolderError, match=r"folder cannot be written: .*--out"):
        write_report(runs / "one", tmp_path / "folder")
    assert not (tmp_path / "folder.tmp").exists()
