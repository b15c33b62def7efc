# SPDX-License-Identifier: Apache-2.0
"""Errors advise commands. For callers of the Python API, a note on the error says what the same is in Python."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from podium.errors import PodiumError

P = ParamSpec("P")
Result = TypeVar("Result")

# In a text a command is in backticks; in a note it follows a colon, and ends with its folder.
_COMMAND = re.compile(r"`podium (?P<quoted>[^`]+)`|: podium (?P<last>\w+ \S+(?: OUT)?)")
_SETTING = re.compile(r"--set '?([\w.]+)=")
_FLAGS = {
    "--overwrite": "overwrite=True",
    "--ignore-memory": "ignore_memory=True",
    "--accept-changed-data": "accept_changed_data=True",
    "--best": "which='best'",
    "--stage": "stage=...",
    "--recipe": "recipe=...",
    "--deep": "deep=True",
    "--all": "all_rows=True",
}
_FLAG = re.compile(rf"(?:{'|'.join(_FLAGS)})\b")
_FUNCTIONS = ("check", "evaluate", "export", "resume", "show", "train", "verify")


class PythonNote(str):
    """A note on an error that is for callers of the Python API. The command line leaves it out."""

    __slots__ = ()


def for_python(function: Callable[P, Result]) -> Callable[P, Result]:
    """Adds a PythonNote to errors of the function that advise a command or an option of one."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except PodiumError as error:
            notes = getattr(error, "__notes__", ())
            hint = python_hint("\n".join([str(error), *notes]))
            if hint is not None and not any(isinstance(note, PythonNote) for note in notes):
                error.add_note(PythonNote(f"in Python: {hint}"))
            raise

    return called


def python_hint(text: str) -> str | None:
    """The commands and options of a text as calls and arguments of the Python API; None if it has none."""
    rest = _COMMAND.sub("", text)
    hints = [
        *(call for match in _COMMAND.finditer(text) if (call := _call(match["quoted"] or match["last"])) is not None),
        *(f"overrides={{'{key}': ...}}" for key in _SETTING.findall(rest)),
        *(_FLAGS[flag] for flag in _FLAG.findall(rest)),
    ]
    return "; ".join(dict.fromkeys(hints)) or None


def _call(command: str) -> str | None:
    """`resume runs/a --step 3` as podium.resume('runs/a', step=3)."""
    verb, *words = shlex.split(command)
    return f"podium.{verb}({', '.join(_arguments(verb, words))})" if verb in _FUNCTIONS else None


def _arguments(verb: str, words: list[str]) -> Iterator[str]:
    rest = iter(words)
    for word in rest:
        match word:
            case "--step":
                yield f"{'step' if verb == 'resume' else 'which'}={next(rest, '...')}"
            case "--recipe" | "--stage":
                yield f"{word.removeprefix('--')}={next(rest, '...')!r}"
            case "--set":
                yield f"overrides=[{next(rest, '...')!r}]"
            case _:
                yield _FLAGS.get(word) or repr(word)
