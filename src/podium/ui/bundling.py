# SPDX-License-Identifier: Apache-2.0
"""The files of the page as one HTML file: styles, scripts and icon are put inside, and nothing else can be loaded.

The scripts are modules that import each other by `import { names } from "./file.js";`, one line each. They become one
script: their top-level names are unique, so that the imports can be left out."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Callable, Mapping, Sequence

from podium.errors import InvariantError

_LINK = re.compile(r"""<link\b[^>]*\brel="(\w+)"[^>]*>""")
_SCRIPT = re.compile(r"""<script\b([^>]*)\bsrc="([^"]+)"([^>]*)></script>""")
_HREF = re.compile(r"""\bhref="([^"#]+)\"""")
_IMPORT = re.compile(r"""^import \{[^}]*\} from "\./([\w.]+)";\n?""", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|let|class)\b)", re.MULTILINE)
_LEFT = re.compile(r"^(?:import|export)\b.*$", re.MULTILINE)
_TOP_LEVEL = re.compile(r"^(?:export )?(?:async )?(?:function\*?|const|let|class) (\w+)", re.MULTILINE)
_END = re.compile(r"</(?=script|style)|<!--", re.IGNORECASE)


def single_page(files: Mapping[str, bytes], data: str, note: Sequence[str]) -> str:
    """The page with everything inside. `data` is JSON without `<`; `note` is shown below the page as text."""
    assert "<" not in data, "JSON in HTML has no <: it could end its element"
    hashes: dict[str, list[str]] = {"script": [], "style": []}

    def hashed(kind: str, content: str) -> str:
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
        return content

    def link(found: re.Match[str]) -> str:
        target = _HREF.search(found[0])
        name = target[1] if target is not None else ""
        if found[1] == "stylesheet":
            return f"<style>{hashed('style', _escaped(_text(files, name)))}</style>"
        if found[1] == "icon":
            content = base64.b64encode(files[name]).decode()
            return f'<link rel="icon" href="data:image/svg+xml;base64,{content}">'
        raise _unknown(found[0])

    def script(found: re.Match[str]) -> str:
        is_module = 'type="module"' in found[1] + found[3]
        content = _escaped(_joined(files, found[2]) if is_module else _text(files, found[2]))
        begin = '<script type="module">' if is_module else "<script>"
        return f"{begin}{hashed('script', content)}</script>"

    page = _replace(_text(files, "index.html"), ((_LINK, link), (_SCRIPT, script)))
    embedded = f'<script type="application/json" id="podium-data">{data}</script>'
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in note)
    note_style = hashed("style", ".report-note { padding: 0 20px 20px; }")
    foot = f'<style>{note_style}</style><footer class="report-note dim small"><p>Left out:</p><ul>{lines}</ul></footer>'
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; style-src {' '.join(hashes['style'])}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    for place, before in (("<head>", head), ("</body>", foot + embedded)):
        if page.count(place) != 1:
            raise _unknown(f"index.html without one {place}")
        page = page.replace(place, place + before if place == "<head>" else before + place)
    return page


def _replace(page: str, rules: Sequence[tuple[re.Pattern[str], Callable[[re.Match[str]], str]]]) -> str:
    for pattern, replacement in rules:
        page = pattern.sub(replacement, page)
    return page


def _joined(files: Mapping[str, bytes], entry: str) -> str:
    """All modules that one needs, each after those that it imports. Functions may be used in a circle: all of them are
    there before the first line runs."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(name: str) -> None:
        if name in seen:
            return
        seen.add(name)
        for imported in _IMPORT.findall(_text(files, name)):
            visit(imported)
        order.append(name)

    visit(entry)
    owners: dict[str, str] = {}
    parts = []
    for name in order:
        source = _text(files, name)
        for declared in _TOP_LEVEL.findall(source):
            if owners.setdefault(declared, name) != name:
                raise _unknown(f"{declared} is declared in {owners[declared]} and in {name}: its name must be unique")
        source = _EXPORT.sub("", _IMPORT.sub("", source))
        left = _LEFT.search(source)
        if left is not None:
            raise _unknown(f"{name}: {left[0]}")
        parts.append(source)
    return "\n".join(parts)


def _text(files: Mapping[str, bytes], name: str) -> str:
    if name not in files:
        raise _unknown(f"no file {name!r}")
    return files[name].decode()


def _escaped(source: str) -> str:
    """Inside of an element, `</script` ends it, also in a string."""
    return _END.sub(lambda found: found[0].replace("<", "\\x3c"), source)


def _unknown(what: str) -> InvariantError:
    return InvariantError(f"the files of the page in podium/ui/assets cannot be put into one file: {what}.")
