# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs. Pages are written for GitHub; these hooks make a site of the same files.

- A link to a file or folder of the repository outside of docs/ leads to a page of the site that shows it.
- Lists and tables may follow a paragraph at once, and code may be part of a list. Python-Markdown wants blank lines and
  four spaces there.
- A pipe in the code of a table is escaped for GitHub, and must not be for Python-Markdown.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
_FENCE = re.compile(r"^ *(```+|~~~+)")
_CODE = re.compile(r"`[^`]*`")
_ITEM = re.compile(r"^([-*]|\d+\.) ")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".md": "markdown"}
_SOURCES = "source"  # folder of the site in which files of the repository are shown


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for every file or folder of the repository that a page links to."""
    from mkdocs.structure.files import File, InclusionLevel

    docs = Path(config.docs_dir)
    linked: set[str] = set()
    for file in files.documentation_pages():
        for line, is_code in lines_of(file.content_string):
            targets = [] if is_code else _LINK.findall(line)
            linked.update(path for each in targets if (path := repository_path(each, file.src_uri, docs)))
    for path in sorted(linked):
        content = shown(docs.parent / path, path)
        level = InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, page_of(path), content=content, inclusion=level))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites a page for Python-Markdown, with links to the pages of the repository's files."""
    own = page.file.src_uri
    if own.startswith(f"{_SOURCES}/"):
        return markdown

    def redirected(link: re.Match[str]) -> str:
        path = repository_path(link[1], own, Path(config.docs_dir))
        return link[1] if path is None else os.path.relpath(page_of(path), os.path.dirname(own))

    return for_python_markdown(markdown, lambda line: _LINK.sub(redirected, line))


def repository_path(link: str, page: str, docs: Path) -> str | None:
    """The path in the repository that a page's link names. None: the link stays within docs/, or leads nowhere."""
    if "://" in link or link.startswith("#"):
        return None
    there = Path(os.path.normpath((docs / page).parent / link.partition("#")[0]))
    is_inside = there.is_relative_to(docs) or not there.is_relative_to(docs.parent)
    return None if is_inside or not there.exists() else str(there.relative_to(docs.parent))


def page_of(path: str) -> str:
    """The page of the site that shows a file or folder of the repository."""
    return f"{_SOURCES}/{path}.md"


def shown(place: Path, path: str) -> str:
    """A page with the content of a file, or of the files of a folder."""
    files = [place] if place.is_file() else sorted(each for each in place.iterdir() if each.suffix in _LANGUAGES)
    parts = [f"# {path}"]
    for file in files:
        title = "" if place.is_file() else f' title="{file.name}"'
        language = _LANGUAGES.get(file.suffix, "text")
        parts.append(f"``````{language}{title}\n{file.read_text(encoding='utf-8').rstrip()}\n``````")
    return "\n\n".join(parts) + "\n"


def for_python_markdown(markdown: str, rewrite: Callable[[str], str] = str) -> str:
    """The same page with a blank line before each list and table, and code of list items indented by four. `rewrite`
    is applied to the lines that are no code."""
    result: list[str] = []
    in_list = False
    indent = ""
    was_code = False
    for line, is_code in lines_of(markdown):
        before = result[-1].strip() if result else ""
        if is_code:
            if not was_code:
                spaces = len(line) - len(line.lstrip())
                indent = " " * (4 - spaces) if in_list and 0 < spaces < 4 else ""
                result += [""] if indent and before else []
            result.append(indent + line)
        else:
            is_item, is_row = bool(_ITEM.match(line)), line.startswith("|")
            begins = (is_item and not in_list) or (is_row and not before.startswith("|"))
            result += [""] if (begins and before) or (was_code and indent and line.strip()) else []
            in_list = is_item or (in_list and (not line.strip() or line.startswith(" ") or bool(before)))
            result.append(rewrite(_CODE.sub(lambda code: code[0].replace("\\|", "|"), line) if is_row else line))
        was_code = is_code
    return "\n".join(result)


def lines_of(markdown: str) -> Iterator[tuple[str, bool]]:
    """Each line, and whether it belongs to a fenced block of code."""
    fence = ""
    for line in markdown.split("\n"):
        mark = _FENCE.match(line)
        if not fence and mark:
            fence = mark[1]
            yield line, True
        elif fence:
            yield line, True
            if mark and mark[1].startswith(fence) and line.strip() == mark[1]:
                fence = ""
        else:
            yield line, False
