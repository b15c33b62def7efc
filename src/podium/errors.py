# SPDX-License-Identifier: Apache-2.0
"""The one exception tree. Every error that a user can cause says what happened, why it matters and what to do."""

import contextlib
import functools
import inspect
import os
from types import TracebackType
from typing import Any


class PodiumError(Exception):
    """Root of all errors that Podium raises on purpose; the command line prints them without a traceback."""


class RecipeError(PodiumError):
    """The recipe is wrong: carries the path of keys in its text."""


class DataError(PodiumError):
    """A data source is missing, empty, malformed, or cannot be tokenized: names file and row."""


class BadRowError(DataError):
    """One row cannot be used, and others may be: `data.on_error: skip` leaves it out. Names file and row."""


class ModelError(PodiumError):
    """A model folder is incomplete or its weights do not fit its config."""


class UnsupportedModelError(ModelError):
    """Podium's packed forward does not reproduce this model: it is refused, never trained silently wrong."""


class CheckpointError(PodiumError):
    """A checkpoint is missing, incomplete or corrupt: names the file and the newest usable one."""


class RunFolderError(PodiumError):
    """A run folder already exists, is finished, or is not a run folder."""


class StepRecordError(PodiumError):
    """The record of a run's steps is missing or incomplete, or a file of it is not what the run wrote: names the file
    and what differs."""


class LaunchError(PodiumError):
    """The ranks could not be started, or one of them died: carries the first failure."""


class ProgramError(PodiumError):
    """A custom program is wrong: it cannot be loaded, or it uses a run in a way that cannot work."""


class ProgramRaisedError(ProgramError):
    """A custom program raised: names its file and line. The traceback is in the run's console.log."""

    traceback_text: str | None = None  # set where the process that launched the ranks writes it to console.log


class TrainingDivergedError(PodiumError):
    """Too many steps in a row had a non-finite loss or gradient."""


class RunStoppedError(PodiumError):
    """The user stopped a run before its first step. Says how to continue; computed results are kept."""


class MissingExtraError(PodiumError):
    """An optional dependency is asked for and not installed: says what to install."""


class TrackerError(PodiumError):
    """A tracker of experiments does not take what it was given. A run goes on without it."""


class ClusterError(PodiumError):
    """The cluster cannot be reached or does not do what was asked of it."""


class RayDiedError(ClusterError):
    """A process of the Ray that the run started is gone, and Ray does not work without it. Another Ray can be
    started."""


class PlacementError(ClusterError):
    """A layout is wrong in itself, or does not fit the cluster: says what is asked, what there is, what would fit."""


class RendezvousError(ClusterError):
    """Workers could not form their process group in time: says who was missing, and over which interface."""


class WorkerDiedError(ClusterError):
    """A worker's process or node is gone, or its pool was broken by one that is: names the workers."""


class RoleError(ClusterError):
    """A role's own code raised on a worker: carries the worker's traceback."""


class DeadlineError(ClusterError):
    """A wait outlived its deadline: says what was waited for, and where each worker was."""


class StartTimeoutError(WorkerDiedError, DeadlineError):
    """Processes that were started did not become workers in time, and were ended. In a recovery that is one more death;
    at the start of a run nothing has worked before, and it ends."""


class AttachError(ClusterError):
    """A new controller cannot go on with the Ray and the workers of the one that died: they have to be started
    again."""


class ResultError(ClusterError):
    """Answers do not add up: names the missing, foreign or repeated trajectories and the workers."""


class StoreError(ClusterError):
    """An object of the store is gone or does not come in time."""


class InvariantError(PodiumError):
    """A schedule broke one of its invariants, so what was trained on what cannot be trusted: a defect of Podium. Names
    the group, its history and the event."""


class RewardError(PodiumError):
    """Rewards could not be computed for too many episodes: says what went wrong in the first of them."""


class SandboxError(PodiumError):
    """Programs cannot be run in a sandbox here."""


class RolloutError(PodiumError):
    """A rollout engine cannot do what was asked of it: says in which state it is and what to do."""


class WeightMismatchError(RolloutError):
    """Weights arrived that are not those of their version: names the tensors that differ."""


class OffloadError(PodiumError):
    """Tensors are asked to leave the device twice, or to come back without having left."""


# Of the text of an exception of the user's code, in characters.
_LONGEST_TEXT = 500
_NOT_THE_USERS = (
    os.path.dirname(__file__) + os.sep,
    os.path.join(os.path.dirname(os.__file__), "asyncio", ""),
    "<frozen ",  # Python's import system
)


def what_raised(error: BaseException) -> str:
    """An exception of the user's code in one phrase: "raised KeyError: 'x' (rewards.py, line 12)"."""
    return f"raised {exception_text(error)}"


def exception_text(error: BaseException) -> str:
    """An exception of the user's code: "KeyError: 'x' (rewards.py, line 12)"."""
    try:
        text = str(error)
    except Exception:  # its __str__ is user code too
        text = "(its text is unavailable)"
    text = text[:_LONGEST_TEXT] + ("..." if len(text) > _LONGEST_TEXT else "")
    place = raised_at(error)
    return f"{type(error).__name__}{f': {text}' if text else ''}{f' ({place})' if place else ''}"


def counted(count: int, noun: str) -> str:
    """A number with its noun: "1 row", "3 rows"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def type_phrase(value: object) -> str:
    """The type of a value with its article: "an int", "a list"; "None" for None."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def defined_at(function: Any) -> str:
    """Where a function, method or callable object of the user is defined: "rewards.py, line 12". Empty where that is
    unknown, and for Podium's own."""
    while isinstance(function, functools.partial):
        function = function.func
    with contextlib.suppress(ValueError):  # it wraps itself
        function = inspect.unwrap(function)
    if not inspect.isroutine(function):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    if code is None or code.co_filename.startswith(_NOT_THE_USERS):
        return ""
    return f"{code.co_filename}, line {code.co_firstlineno}"


def with_place(name: str, function: Any) -> str:
    """The name of a function of the user, with its file and line in brackets where they are known."""
    place = defined_at(function)
    return f"{name} ({place})" if place else name


def raised_at(error: BaseException) -> str:
    """The deepest line in the file of the user's function: "rewards.py, line 12". Empty where there is none."""
    traceback: TracebackType | None = error.__traceback__
    frames: list[tuple[str, int]] = []
    while traceback is not None:
        frames.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    users = [file for file, _ in frames if not file.startswith(_NOT_THE_USERS)]
    if not users:
        return ""
    line = [line for file, line in frames if file == users[0]][-1]
    return f"{users[0]}, line {line}"
