# SPDX-License-Identifier: Apache-2.0
"""Gymnasium's environments as environments of episodes: texts become actions, and observations become texts."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from podium.data.tasks import Task
from podium.environments.field_packages import IllegalActionError, beginning, require_package
from podium.environments.protocol import Outcome, Turn
from podium.environments.signatures import require_options_of
from podium.errors import PodiumError, RecipeError, type_phrase, what_raised
from podium.recipe import plugins
from podium.recipe.field_environments import GymnasiumSection

_MOST_SYMBOLS = 80  # of a Text space, in a message to the model


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GymnasiumSpec:
    """How the environments of a recipe are made, read and answered."""

    section: GymnasiumSection
    make: Callable[[], Any]
    render: Callable[[Any, Mapping[str, Any]], Any] | None
    parse: Callable[[str], Any] | None
    key: str

    @classmethod
    def of(cls, section: GymnasiumSection, options: Mapping[str, Any], key: str) -> GymnasiumSpec:
        """Loads the package and the recipe's functions, makes one environment, and checks its spaces."""
        where = f"{key}.gymnasium"
        require_package("gymnasium", "gymnasium", where)
        spec = cls(
            section=section,
            make=_maker(section, options, key),
            render=None if section.render is None else plugins.load(section.render, f"{where}.render"),
            parse=None if section.parse is None else plugins.load(section.parse, f"{where}.parse"),
            key=where,
        )
        spec.require_readable(spec.made())
        return spec

    def made(self) -> Any:
        """A new environment. Raises a RecipeError if it cannot be made."""
        import gymnasium

        try:
            environment = self.make()
        except PodiumError:
            raise
        except Exception as error:  # the environment is the user's code
            raise RecipeError(f"{self.key}.id: making {self.section.id} {what_raised(error)}.") from error
        if not isinstance(environment, gymnasium.Env):
            raise RecipeError(
                f"{self.key}.id: {self.section.id} makes {type_phrase(environment)}, and not a gymnasium.Env."
            )
        return environment

    def require_readable(self, environment: Any) -> None:
        """Raises a RecipeError if observations or actions of this environment have no text; closes it."""
        observation_space, action_space = environment.observation_space, environment.action_space
        environment.close()
        if self.render is None and not _has_text(observation_space):
            raise RecipeError(
                f"{self.key}.render: observations of {self.section.id} are {observation_space}. Without a function, "
                "only Text, Discrete and Dict of these become text. Name a function (observation, info) -> str."
            )
        kind = _kind(action_space)
        if self.parse is None and kind not in ("Text", "Discrete"):
            raise RecipeError(
                f"{self.key}.parse: actions of {self.section.id} are {action_space}. Without a function, only Text and "
                "Discrete actions can be read from an answer. Name a function text -> action."
            )
        if self.section.actions and (kind != "Discrete" or len(self.section.actions) != action_space.n):
            raise RecipeError(
                f"{self.key}.actions: {len(self.section.actions)} names, and actions of {self.section.id} are "
                f"{action_space}. Name each action of a Discrete space once, in order."
            )

    def text_of(self, observation: Any, info: Mapping[str, Any]) -> str:
        """An observation as the model reads it."""
        if self.render is None:
            return _text(observation)
        text = self.render(observation, info)
        if not isinstance(text, str):
            raise TypeError(f"{self.key}.render returned {type_phrase(text)}; it returns a text")
        return text

    def action_of(self, text: str, space: Any) -> Any:
        """The action of an answer. Raises an IllegalActionError if it has none."""
        if self.parse is not None:
            try:
                action = self.parse(text)
            except ValueError as error:
                raise IllegalActionError(f"Illegal action: {error}") from error
        elif _kind(space) == "Discrete":
            action = self._numbered(text.strip(), space)
        else:
            action = text.strip()
        if action is None or not space.contains(action):
            raise IllegalActionError(f"Illegal action. {self._legal(space)}")
        return action

    def _numbered(self, text: str, space: Any) -> int | None:
        """The number of a Discrete action; None: it is none."""
        start = int(space.start)
        if not self.section.actions:
            return int(text) if text.isascii() and text.removeprefix("-").isdigit() else None
        names = [name.casefold() for name in self.section.actions]
        return start + names.index(text.casefold()) if text.casefold() in names else None

    def _legal(self, space: Any) -> str:
        """Which actions there are."""
        if self.section.actions:
            return f"Answer with one of: {', '.join(self.section.actions)}."
        match _kind(space):
            case "Discrete":
                start = int(space.start)
                return f"Answer with a whole number from {start} to {start + int(space.n) - 1}."
            case "Text":
                symbols = "".join(sorted(space.character_set))
                shown = symbols if len(symbols) <= _MOST_SYMBOLS else f"{symbols[:_MOST_SYMBOLS]}..."
                return f"Answer with {space.min_length} to {space.max_length} of the characters {shown}"
            case _:
                return f"Actions are {space}."

    def seed_of(self, task: Task) -> int:
        """The seed of an episode. Samples of one prompt have the same."""
        name = self.section.seed or "seed"
        if name not in task.row:
            if self.section.seed is not None:
                raise ValueError(f"{self.key}.seed: the row at {task.where} has no column {name!r}")
            return zlib.crc32(json.dumps(dict(task.row), sort_keys=True, default=str).encode())
        seed = task.row[name]
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"{self.key}.seed: the row at {task.where} has {seed!r}; it needs a whole number from 0")
        return seed

    def reset_options_of(self, task: Task) -> dict[str, Any] | None:
        """The options of `reset`; None: the recipe names no column, or the row has nothing in it."""
        name = self.section.reset_options
        options = None if name is None else task.row.get(name)
        if options is not None and not isinstance(options, Mapping):
            raise ValueError(
                f"{self.key}.reset_options: the row at {task.where} has {type_phrase(options)} in {name!r}; it needs "
                "a mapping"
            )
        return None if options is None else dict(options)


class GymnasiumEnvironment:
    """One episode of a Gymnasium environment. Its methods run in threads.

    Metrics: turns, illegal_actions, terminated, truncated."""

    def __init__(self, spec: GymnasiumSpec) -> None:
        self._spec = spec
        self._environment: Any = None

    def reset(self, task: Task, /) -> Any:
        """Makes and resets the environment with the row's seed. The model reads the row's prompt and the
        observation."""
        self._environment = self._spec.made()
        observation, info = self._environment.reset(
            seed=self._spec.seed_of(task), options=self._spec.reset_options_of(task)
        )
        return beginning(task, self._spec.text_of(observation, info))

    def step(self, turn: Turn, /) -> Outcome:
        """Takes the action of the answer; an illegal one is a message, and the environment stays as it is."""
        metrics = {"turns": 1.0, "illegal_actions": 0.0, "terminated": 0.0, "truncated": 0.0}
        try:
            action = self._spec.action_of(turn.text, self._environment.action_space)
        except IllegalActionError as error:
            metrics["illegal_actions"] = 1.0
            return Outcome(messages=_message(str(error)), reward=self._spec.section.illegal_reward, metrics=metrics)
        observation, reward, terminated, truncated, info = self._environment.step(action)
        metrics["terminated"], metrics["truncated"] = float(terminated), float(truncated)
        return Outcome(
            messages=_message(self._spec.text_of(observation, info)), reward=float(reward),
            done=bool(terminated or truncated), metrics=metrics,
        )  # fmt: skip

    def close(self) -> None:
        """Closes the environment, if it was made."""
        if self._environment is not None:
            self._environment.close()


def _message(text: str) -> str | list[Any]:
    """A text, which may be empty, as a message of the user; raw text continues with it."""
    return text or [{"role": "user", "content": ""}]


def _maker(section: GymnasiumSection, options: Mapping[str, Any], key: str) -> Callable[[], Any]:
    """Makes an environment by its class, or by its id at Gymnasium's registry."""
    if isinstance(section.id, plugins.Plugin):
        factory: Any = plugins.load(section.id, f"{key}.gymnasium.id")
        require_options_of(factory, options, f"{key}.options")
        return lambda: factory(**options)
    import gymnasium

    # The checker warns of spaces and types, once more for each of thousands of episodes.
    return lambda: gymnasium.make(section.id, **{"disable_env_checker": True, **options})


def _has_text(space: Any) -> bool:
    """Whether observations of a space become text without a function."""
    if _kind(space) == "Dict":
        return all(_has_text(part) for part in space.spaces.values())
    return _kind(space) in ("Text", "Discrete")


def _kind(space: Any) -> str | None:
    """The name of the space's class, or of the one that it inherits from; None: another space."""
    return next((each.__name__ for each in type(space).__mro__ if each.__name__ in ("Text", "Discrete", "Dict")), None)


def _text(observation: Any) -> str:
    if isinstance(observation, Mapping):
        return "\n".join(f"{name}: {_text(value)}" for name, value in observation.items())
    return observation if isinstance(observation, str) else str(int(observation))
