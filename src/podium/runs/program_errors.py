# SPDX-License-Identifier: Apache-2.0
"""What a custom program raises, as an error that names its file and line."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from podium.errors import PodiumError, ProgramError, ProgramRaisedError, raised_at, what_raised
from podium.observe.recording import LogFile
from podium.recipe import Recipe
from podium.recipe.programs import BUILT_IN
from podium.runs.folder import RunFolder


@contextmanager
def named_program(recipe: Recipe, folder: RunFolder, *, is_followed: bool = False) -> Iterator[None]:
    """Around the call of a program. An exception of a custom one is raised as a ProgramRaisedError, and its traceback
    is in the run's console.log. Podium's own errors stay as they are; those about the program name its line too.

    `is_followed`: a launcher shows on the terminal what is added to console.log. The error then carries the traceback,
    and the launcher writes it after it has shown the rest."""
    try:
        yield
    except ProgramError as error:
        if place := raised_at(error):
            error.add_note(f"in the program: {place}")
        raise
    except PodiumError:
        raise
    except Exception as error:
        if recipe.program in BUILT_IN:
            raise
        raised = ProgramRaisedError(f"program: {recipe.program} {what_raised(error)}")
        text = "".join(traceback.format_exception(error))
        if is_followed:
            raised.traceback_text = text
        else:
            LogFile(folder.console_file).write(text)
        raise raised from error
