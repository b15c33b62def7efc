# SPDX-License-Identifier: Apache-2.0
"""A recipe's rewards, ready to be called: custom functions and verifiers, and checks of their return values."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from podium.environments.judge_endpoint import read_key
from podium.environments.judges import Judge, judge_reward
from podium.environments.protocol import is_async
from podium.environments.reward_results import RewardResult
from podium.environments.sandbox.pool import recipe_sandbox
from podium.environments.signatures import (
    Per,
    Sample,
    Signature,
    fit_parameters,
    fit_signature,
    require_options,
    require_options_of,
)
from podium.environments.verifiers import bind_verifier, load_verifier
from podium.errors import RecipeError, what_raised, with_place
from podium.recipe import FunctionReward, JudgeReward, RewardSection, VerifierReward, plugins
from podium.recipe.definitions import definition_of

__all__ = [
    "DeclaredReward",
    "Reward",
    "RewardResult",
    "Sample",
    "build_rewards",
    "check_rewards",
    "declared_reward",
    "reward_names",
]

_MAX_REPR = 60
_MOST_AT_ONCE = 256
_OF_CODE = Signature(style="podium", per="sample", names=("answer", "reference", "row"))
_OF_VERIFIERS = Signature(style="podium", per="sample", names=("answer", "reference"))
_OF_SAMPLES = Signature(style="podium", per="sample", names=("sample",))
_OF_GROUPS = Signature(style="podium", per="group", names=("samples",))
# A judge's call waits for the requests before it, and each judgement has a deadline of its own. Those of a whole batch
# are the deadline of the grader's call.
_JUDGING_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgingPlace:
    """Where judges are called: so many processes share their limits, and `folder` is for their caches on disk."""

    processes: int = 1
    folder: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reward:
    """One reward of the recipe, ready to be called."""

    index: int  # its place in the recipe's list, where reward models have one too
    name: str
    weight: float
    function: Callable[..., Any]
    signature: Signature
    options: Mapping[str, Any] = field(default_factory=dict)
    is_async: bool = False
    timeout_s: float | None = None  # of one call; None: grading.timeout_s
    most_at_once: int = _MOST_AT_ONCE  # asynchronous calls in flight: enough for a remote judge without overloading it

    @property
    def per(self) -> Per:
        """The input of one call: a sample, a batch or a group."""
        return self.signature.per

    def calls(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Positions of the samples of each call; a group is one call, wherever its samples are in the batch."""
        match self.per:
            case "sample":
                return [[position] for position in range(len(samples))]
            case "batch":
                return [list(range(len(samples)))] if samples else []
            case "group":
                groups: dict[int, list[int]] = {}
                for position, sample in enumerate(samples):
                    groups.setdefault(sample.group, []).append(position)
                return list(groups.values())

    def call(self, samples: Sequence[Sample]) -> Any:
        """The function's return value for one call's samples; an awaitable if it is asynchronous."""
        return self.function(**self.signature.arguments(samples), **self.options)

    def outcomes(self, returned: Any, count: int) -> list[RewardResult]:
        """Parses the return value for `count` samples."""
        if self.per == "sample":
            return [self._outcome(returned)]
        values = _as_list(returned)
        if values is None:
            failure = f"returned {_clipped(returned)} for {count} samples, and not a list with one number for each"
        elif len(values) != count:
            failure = f"returned {len(values)} values for {count} samples"
        else:
            return [self._outcome(value) for value in values]
        return [self._failed(failure)] * count

    def _failed(self, failure: str, extras: Mapping[str, float] | None = None) -> RewardResult:
        """A return value that is no reward: names where the function is defined."""
        return RewardResult(None, with_place(failure, self.function), extras)

    def _outcome(self, returned: Any) -> RewardResult:
        if type(returned) is float and math.isfinite(returned):  # nearly always
            return RewardResult(returned)
        if isinstance(returned, RewardResult):  # a judge's
            return returned
        extras = None
        if isinstance(returned, Mapping):
            if "score" not in returned:
                return self._failed(f"returned a dict without `score`; it has {', '.join(map(str, returned))}")
            numbers = {str(name): _number(value) for name, value in returned.items() if name != "score"}
            extras = {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}
            returned = returned["score"]
        if returned is None:
            # In TRL, None means that a reward does not apply to a sample; elsewhere it is a forgotten return.
            does_not_apply = self.signature.style == "trl"
            return RewardResult(None, None, extras) if does_not_apply else self._failed("returned None", extras)
        value = _number(returned)
        if value is None:
            return self._failed(f"returned {_clipped(returned)}, which is not a number", extras)
        if not math.isfinite(value):
            return self._failed(f"returned {'NaN' if math.isnan(value) else value}", extras)
        return RewardResult(value, None, extras)


def build_rewards(
    sections: Sequence[RewardSection],
    key: str = "reward",
    *,
    judging: JudgingPlace | None = None,
    timeout_s: float | None = None,
) -> tuple[Reward, ...]:
    """The rewards that are functions, verifiers and judges behind endpoints, with plug-ins loaded, options checked and
    keys read. Models in the run score elsewhere: they are left out, and the others keep their index.
    `timeout_s`: longest time of one call."""
    names = reward_names(sections, key)
    return tuple(
        _built(section, index, names[index], f"{key}.{index}", judging or JudgingPlace(), timeout_s)
        for index, section in enumerate(sections)
        if not section.needs_device
    )


def check_rewards(sections: Sequence[RewardSection], key: str = "reward") -> None:
    """Raises problems with names and with verifiers' options. Runs no user code: functions are not loaded."""
    reward_names(sections, key)
    for index, section in enumerate(sections):
        if isinstance(section, VerifierReward):
            bind_verifier(section.verifier, section.options, f"{key}.{index}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredReward:
    """How a reward function is called, as the text of its file says."""

    signature: Signature
    text: str  # for errors: file, line, name and parameters


def declared_reward(section: FunctionReward, key: str) -> DeclaredReward | None:
    """How a reward function is called, by parsing its file. Raises the RecipeError that building it would raise about
    its parameters and options. None: only running the file can tell, or there is no such function."""
    try:
        definition = definition_of(section.function, f"{key}.function")
    except RecipeError:  # reported where plug-ins are located
        return None
    if definition is None:
        return None
    name, signature, options = f"{definition.place}: {section.function.name}", definition.signature, section.options
    if definition.is_class:
        require_options(name, signature, options, f"{key}.options")
        if definition.call is None:
            return None
        signature, options = definition.call, {}
    fitted = fit_parameters(name, signature, options, style=section.style, per=section.per, key=key)
    return DeclaredReward(signature=fitted, text=f"{name}{signature}")


def reward_names(sections: Sequence[RewardSection], key: str = "reward") -> tuple[str, ...]:
    """The name of each reward in the metrics, reward models included."""
    names: list[str] = []
    for index, section in enumerate(sections):
        name = section.metric_name
        if name in names:
            raise RecipeError(
                f"{key}.{index}.name: {key}.{names.index(name)} is called {name!r} too, and metrics could not tell "
                f"them apart. Give {key}.{index} another name."
            )
        names.append(name)
    return tuple(names)


def _built(
    section: RewardSection, index: int, name: str, key: str, judging: JudgingPlace, timeout_s: float | None
) -> Reward:
    match section:
        case VerifierReward():
            verifier = load_verifier(section.verifier, section.options, key, timeout_s=timeout_s)
            if section.verifier == "code":
                return Reward(
                    index=index, name=name, weight=section.weight, function=verifier, signature=_OF_CODE, is_async=True,
                    most_at_once=recipe_sandbox().workers,
                )  # fmt: skip
            return Reward(index=index, name=name, weight=section.weight, function=verifier, signature=_OF_VERIFIERS)
        case FunctionReward():
            return _built_function(section, index, name, key)
        case JudgeReward():
            return _built_judge(section, index, name, f"{key}.judge", judging)
        case _:
            raise TypeError(f"{type(section).__name__} is not called")


def _built_judge(section: JudgeReward, index: int, name: str, key: str, judging: JudgingPlace) -> Reward:
    on_disk = section.judge.cache == "run_folder"
    folder = judging.folder if on_disk else None
    judge = Judge(section.judge, read_key(section.judge, key), share=judging.processes, folder=folder)
    return Reward(
        index=index, name=name, weight=section.weight, function=judge_reward(judge),
        signature=_OF_GROUPS if section.judge.compare == "group" else _OF_SAMPLES, is_async=True, timeout_s=_JUDGING_S,
    )  # fmt: skip


def _built_function(section: FunctionReward, index: int, name: str, key: str) -> Reward:
    function, options = plugins.load(section.function, f"{key}.function"), dict(section.options)
    if inspect.isclass(function):
        function, options = _instance(function, options, key), {}
    signature = fit_signature(function, options, style=section.style, per=section.per, key=key)
    return Reward(
        index=index, name=name, weight=section.weight, function=function, signature=signature, options=options,
        is_async=is_async(function),
    )  # fmt: skip


def _instance(factory: Callable[..., Any], options: Mapping[str, Any], key: str) -> Callable[..., Any]:
    name = getattr(factory, "__name__", "the class")
    require_options_of(factory, options, f"{key}.options")
    try:
        instance = factory(**options)
    except Exception as error:  # the class is the user's code
        raise RecipeError(f"{key}.function: making a {name} with {key}.options {what_raised(error)}.") from error
    if not callable(instance):
        raise RecipeError(f"{key}.function: a {name} cannot be called. Give the class a method __call__.")
    return instance  # type: ignore[no-any-return]


def _as_list(returned: Any) -> list[Any] | None:
    if isinstance(returned, list | tuple):
        return list(returned)
    if getattr(returned, "ndim", None) == 1 and hasattr(returned, "tolist"):  # an array, or a tensor
        return list(returned.tolist())
    return None


def _number(value: Any) -> float | None:
    """Python's, NumPy's and other libraries' scalars as a float; None for other values, including text."""
    scalar = isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating | Fraction | Decimal)
    if not scalar and (isinstance(value, str | bytes | complex) or getattr(value, "shape", None) != ()):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None


def _clipped(value: Any) -> str:
    text = repr(value)
    return f"{text[:_MAX_REPR]}{'...' if len(text) > _MAX_REPR else ''} ({type(value).__name__})"
