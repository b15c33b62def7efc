# SPDX-License-Identifier: Apache-2.0
"""Recognises the signature of a reward function (Podium's, verl's or TRL's), and fills its arguments."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from podium.data.documents import Tokens
from podium.data.kinds import Message
from podium.data.trajectories import TrajectoryId
from podium.errors import DataError, RecipeError

Style = Literal["podium", "verl", "trl"]
Per = Literal["sample", "batch", "group"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One episode as a reward sees it.

    `answer` is the model's answer without its end token; with several turns, the last one. `turns` is then the whole
    conversation, the prompt's messages first."""

    id: TrajectoryId
    group: int  # the prompt's index: samples of one group answer the same task
    prompt_text: str
    messages: Sequence[Message] | None  # of the prompt, where it is a chat
    answer: str
    reference: str | None
    row: Mapping[str, Any]
    source: str
    num_tokens: int  # that the policy sampled
    truncated: bool = False
    tokens: Tokens | None = None  # of the answer
    turns: Sequence[Message] | None = None
    environment_reward: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """How a function is called: the input of one call, and the names of the arguments that samples fill."""

    style: Style
    per: Per
    names: tuple[str, ...]
    columns: tuple[str, ...] = ()  # trl: further parameters, filled from the columns of the rows
    required: tuple[str, ...] = ()  # of those columns
    all_columns: bool = False  # trl: the function takes **kwargs
    options: tuple[str, ...] = ()  # names that are not filled from columns: the recipe gives them

    def arguments(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """The keyword arguments of one call. With per sample there is one sample."""
        if self.per == "sample":
            [sample] = samples
            return {name: _OF_SAMPLE[name](sample) for name in self.names}
        filled = {name: _OF_BATCH[self.style][name](samples) for name in self.names}
        if self.style == "trl":
            filled.update(self._columns_of(samples))
        return filled

    def _columns_of(self, samples: Sequence[Sample]) -> dict[str, list[Any]]:
        present = dict.fromkeys(name for sample in samples for name in sample.row)
        missing = [name for name in self.required if name not in present]
        if missing:
            raise DataError(
                f"the function needs the column {missing[0]!r}, which rows of {samples[0].source} do not have. They "
                f"have: {', '.join(present)}. Rename one in the source's `columns`, or give it a default."
            )
        wanted = [name for name in present if name not in _NOT_A_COLUMN] if self.all_columns else self.columns
        return {
            name: [sample.row.get(name) for sample in samples]
            for name in wanted
            if name in present and name not in self.options and name not in self.names
        }


def fit_signature(
    function: Callable[..., Any], options: Mapping[str, Any], *, style: Style | Literal["auto"], per: Per, key: str
) -> Signature:
    """How to call `function`. Raises a RecipeError that names `key` and the parameters if it cannot be called."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"{key}.function: the parameters of {name} cannot be looked at ({error}), so it cannot be called by "
            "their names. Wrap it in a Python function."
        ) from error
    return fit_parameters(name, signature, options, style=style, per=per, key=key)


def fit_parameters(
    name: str, signature: inspect.Signature, options: Mapping[str, Any], *, style: Style | Literal["auto"], per: Per,
    key: str,
) -> Signature:  # fmt: skip
    """How to call a function with these parameters. `name` is its name in errors."""
    parameters = _Parameters.of(name, signature, options, key)
    whose = _style_of(parameters.named) if style == "auto" else style
    if whose != "podium" and per != "sample":
        raise RecipeError(
            f"{key}.per: {per} is about Podium's own style, and {parameters.text} has {whose}'s, which says itself "
            "what one call is given. Remove it."
        )
    match whose:
        case "podium":
            return _fit_podium(parameters, per, key)
        case "verl":
            return _fit_verl(parameters, key)
        case "trl":
            return _fit_trl(parameters, key)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameters:
    """Arguments that a function accepts by name."""

    text: str  # the function's name, with its parameters, for errors
    named: tuple[str, ...]
    required: tuple[str, ...]
    takes_rest: bool  # **kwargs
    options: tuple[str, ...]

    @classmethod
    def of(cls, name: str, signature: inspect.Signature, options: Mapping[str, Any], key: str) -> _Parameters:
        kinds = inspect.Parameter
        parameters = signature.parameters.values()
        fixed = [each.name for each in parameters if each.kind is kinds.POSITIONAL_ONLY and each.default is each.empty]
        if fixed:
            raise RecipeError(
                f"{key}.function: {name}{signature} takes {_listed(fixed)} by position only, and arguments are given "
                "by name. Remove the `/` from its parameters."
            )
        named = [each for each in parameters if each.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
        takes_rest = any(each.kind is kinds.VAR_KEYWORD for each in parameters)
        unknown = [option for option in options if option not in {each.name for each in named}]
        if unknown and not takes_rest:
            raise RecipeError(
                f"{key}.options.{unknown[0]}: {name}{signature} has no such parameter. Remove the option, or add it."
            )
        return cls(
            text=f"{name}{signature}",
            named=tuple(each.name for each in named),
            required=tuple(each.name for each in named if each.default is each.empty and each.name not in options),
            takes_rest=takes_rest,
            options=tuple(options),
        )

    def require_free(self, names: Sequence[str], key: str) -> None:
        """Options must not have the names of arguments that samples fill."""
        for option in self.options:
            if option in names:
                raise RecipeError(
                    f"{key}.options.{option}: Podium fills this argument from the sample itself. Remove the option, or "
                    "call the parameter something else."
                )


def _style_of(named: Sequence[str]) -> Style:
    # TRL before verl: `ground_truth` is an ordinary column there.
    if "completions" in named or "completion_ids" in named:
        return "trl"
    return "verl" if "solution_str" in named or "solution_strs" in named else "podium"


def _fit_podium(parameters: _Parameters, per: Per, key: str) -> Signature:
    known, other = (_PODIUM_SAMPLE, _PODIUM_BATCH) if per == "sample" else (_PODIUM_BATCH, _PODIUM_SAMPLE)
    parameters.require_free(known, key)
    names = tuple(name for name in parameters.named if name in known)
    missing = [name for name in parameters.required if name not in names]
    if missing or not names:
        wanted = f"needs {_listed(missing)}" if missing else "takes nothing"
        raise RecipeError(
            f"{key}.function: {parameters.text} {wanted}, and what Podium gives {_GIVES[per]} is {', '.join(known)}. "
            f"{_way_out(missing or parameters.named, other, per, key)}"
        )
    return Signature(style="podium", per=per, names=names, options=parameters.options)


def _way_out(names: Sequence[str], other: Sequence[str], per: Per, key: str) -> str:
    if any(name in other for name in names):
        value = "batch or group" if per == "sample" else "sample"
        return f"Set {key}.per to {value}, or name the parameters otherwise."
    columns = "row" if per == "sample" else "rows"
    return (
        f"Use these names (`{columns}` has the columns of the data), give further parameters a default, or give them "
        f"in {key}.options."
    )


def _fit_verl(parameters: _Parameters, key: str) -> Signature:
    plural = any(name in _VERL_BATCH for name in parameters.named)
    known = _VERL_BATCH if plural else _VERL_SAMPLE
    parameters.require_free(known, key)
    names = known if parameters.takes_rest else tuple(name for name in parameters.named if name in known)
    missing = [name for name in parameters.required if name not in names]
    if missing or not names:
        raise RecipeError(
            f"{key}.function: {parameters.text} {f'needs {_listed(missing)}' if missing else 'takes nothing'}, and "
            f"what verl gives is {', '.join(_VERL_SAMPLE)} (or {', '.join(_VERL_BATCH)}). Give further parameters in "
            f"{key}.options, or set {key}.style."
        )
    return Signature(style="verl", per="batch" if plural else "sample", names=tuple(names), options=parameters.options)


def _fit_trl(parameters: _Parameters, key: str) -> Signature:
    parameters.require_free(_TRL_LISTS, key)
    names = [name for name in _TRL_LISTS if name in parameters.named or parameters.takes_rest]
    names += [name for name in _TRL_TRAINER if name in parameters.named and name not in parameters.options]
    if not names:
        raise RecipeError(
            f"{key}.function: {parameters.text} takes none of {', '.join(_TRL_LISTS)}, which TRL gives. Set "
            f"{key}.style."
        )
    columns = tuple(name for name in parameters.named if name not in (*names, *parameters.options))
    return Signature(
        style="trl",
        per="batch",
        names=tuple(names),
        columns=columns,
        required=tuple(name for name in columns if name in parameters.required),
        all_columns=parameters.takes_rest,
        options=parameters.options,
    )


def require_options(name: str, signature: inspect.Signature, options: Mapping[str, Any], key: str) -> None:
    """Raises a RecipeError if a class or function of this signature cannot be called with the options at `key`."""
    kinds, parameters = inspect.Parameter, signature.parameters.values()
    named = [each for each in parameters if each.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    takes_rest = any(each.kind is kinds.VAR_KEYWORD for each in parameters)
    for option in options:
        if not takes_rest and option not in {each.name for each in named}:
            near = difflib.get_close_matches(option, [each.name for each in named], n=1, cutoff=0.6)
            instead = f"Did you mean {near[0]}?" if near else "Remove the option, or add the parameter."
            raise RecipeError(f"{key}.{option}: {name}{signature} has no such parameter. {instead}")
    missing = [each.name for each in named if each.default is each.empty and each.name not in options]
    if missing:
        raise RecipeError(f"{key}: {name}{signature} needs {_listed(missing)}. Give it here, or give it a default.")


def require_options_of(factory: Callable[..., Any], options: Mapping[str, Any], key: str) -> None:
    """The same of a class or function that is loaded. Passes one that does not say which parameters it takes."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return
    name = getattr(factory, "__name__", type(factory).__name__)
    try:
        file, line = inspect.getsourcefile(factory), inspect.getsourcelines(factory)[1]
        name = f"{file}, line {line}: {name}"
    except (OSError, TypeError):  # made in an interpreter, or no plain function or class
        pass
    require_options(name, signature, options, key)


def is_filled(name: str) -> bool:
    """Whether Podium fills a parameter of this name from the sample itself, in any style."""
    return name in (*_PODIUM_SAMPLE, *_PODIUM_BATCH, *_VERL_SAMPLE, *_VERL_BATCH, *_TRL_LISTS, *_TRL_TRAINER)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _ground_truth(sample: Sample) -> Any:
    """The ground truth as in verl's rows, which need not be text; else the reference."""
    column = sample.row.get("reward_model")
    value = column.get("ground_truth") if isinstance(column, Mapping) else None
    return sample.reference if value is None else value


def _extra_info(sample: Sample) -> dict[str, Any]:
    # A copy: functions write into it, and all samples of a prompt share the row.
    value = sample.row.get("extra_info")
    return dict(value) if isinstance(value, Mapping) else {}


def _trl_prompt(sample: Sample) -> Any:
    return sample.prompt_text if sample.messages is None else list(sample.messages)


def _trl_completion(sample: Sample) -> Any:
    if sample.messages is None:
        return sample.answer
    if sample.turns is None:
        return [{"role": "assistant", "content": sample.answer}]
    return list(sample.turns[len(sample.messages) :])


def _trl_tokens(sample: Sample) -> list[int] | None:
    return None if sample.tokens is None else [int(token) for token in sample.tokens.tolist()]


def _nothing(*arguments: Any, **named: Any) -> None:
    """Replaces TRL's logging functions, which Podium does not have."""


def _each(get: Callable[[Sample], Any]) -> Callable[[Sequence[Sample]], list[Any]]:
    return lambda samples: [get(sample) for sample in samples]


_GIVES: dict[Per, str] = {"sample": "for one sample", "batch": "for a batch", "group": "for a group"}
_PODIUM: dict[str, tuple[str, Callable[[Sample], Any]]] = {  # plural, and where it comes from
    "answer": ("answers", attrgetter("answer")),
    "reference": ("references", attrgetter("reference")),
    "row": ("rows", attrgetter("row")),
    "prompt": ("prompts", attrgetter("prompt_text")),
    "messages": ("messages", attrgetter("messages")),
    "source": ("sources", attrgetter("source")),
    "num_tokens": ("num_tokens", attrgetter("num_tokens")),
    "truncated": ("truncated", attrgetter("truncated")),
    "sample": ("samples", lambda sample: sample),
    "turns": ("turns", attrgetter("turns")),
}
_VERL: dict[str, tuple[str, Callable[[Sample], Any]]] = {
    "data_source": ("data_sources", attrgetter("source")),
    "solution_str": ("solution_strs", attrgetter("answer")),
    "ground_truth": ("ground_truths", _ground_truth),
    "extra_info": ("extra_infos", _extra_info),
}
_PODIUM_SAMPLE = tuple(_PODIUM)
_PODIUM_BATCH = tuple(plural for plural, _ in _PODIUM.values())
_VERL_SAMPLE = tuple(_VERL)
_VERL_BATCH = tuple(plural for plural, _ in _VERL.values())
_TRL_LISTS = ("prompts", "completions", "completion_ids")
_TRL_TRAINER = ("trainer_state", "log_extra", "log_metric")
_NOT_A_COLUMN = ("prompt", "completion", "completion_ids")

_OF_SAMPLE: dict[str, Callable[[Sample], Any]] = {name: get for name, (_, get) in (_PODIUM | _VERL).items()}
_OF_BATCH: dict[Style, dict[str, Callable[[Sequence[Sample]], Any]]] = {
    "podium": {plural: _each(get) for plural, get in _PODIUM.values()},
    "verl": {plural: _each(get) for plural, get in _VERL.values()},
    "trl": {
        "prompts": _each(_trl_prompt),
        "completions": _each(_trl_completion),
        "completion_ids": _each(_trl_tokens),
        "trainer_state": lambda samples: None,
        "log_extra": lambda samples: _nothing,
        "log_metric": lambda samples: _nothing,
    },
}
