# SPDX-License-Identifier: Apache-2.0
"""Sections of programs that learn from generations of the current weights: rollout, rewards, environment, teachers."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic.json_schema import JsonSchemaValue

from podium.recipe.field_environments import AnyGymnasium, AnyOpenEnv, AnyVerifiers
from podium.recipe.fields import (
    Count,
    NonNegative,
    OneOrMore,
    PathSection,
    Place,
    Real,
    Section,
    Shorthand,
    Switch,
    Text,
)
from podium.recipe.judges import JudgeSection
from podium.recipe.plugins import PLUGIN_SCHEMA, Plugin
from podium.recipe.schema import EngineSection

# An agent's deadline, if none is given.
_AGENT_S = 600.0
# Kinds of environments that ask the model themselves.
_AGENT_KEYS = ("verifiers", "agent", "agent_command")

VerifierName = Literal["exact_match", "numeric", "regex", "json_schema", "math_verify", "length", "code"]


class RolloutSection(EngineSection):
    """How episodes are generated."""

    engine: Literal["native", "vllm"] = Field(
        "native", description="`native` generates with the learner's own weights; `vllm` needs the extra of that name."
    )
    prompts_per_step: Count = Field(32, description="Prompts of one step.")
    samples_per_prompt: Count = Field(8, description="Episodes of one prompt; together they are a group.")
    max_new_tokens: Count = Field(256, description="Longest answer (of one turn).")
    temperature: Real = Field(1.0, gt=0, description="Of sampling, and of the learner's log-probs.")
    top_p: Real = Field(1.0, gt=0, le=1, description="Sample from the smallest set of tokens of this probability.")
    top_k: NonNegative = Field(0, description="Sample from so many of the likeliest tokens; 0: from all.")
    min_p: Real = Field(0.0, ge=0, le=1, description="Leave out tokens below this share of the likeliest one's.")
    stop: Annotated[tuple[str, ...], OneOrMore()] = Field(
        (), description="Texts that end an answer, beside the tokenizer's end tokens."
    )
    staleness: NonNegative = Field(
        0,
        description="An update may use tokens that weights up to so many versions older sampled, so that generation "
        "goes on during the update. 0: strictly on-policy; generation waits.",
    )
    on_new_weights: Literal["finish", "keep", "recompute"] = Field(
        "keep",
        description="With staleness, what running sequences do when new weights arrive. finish: they end with the old "
        "weights first; keep: they go on with the new weights and the old KV cache; recompute: they go on with the new "
        "weights, and their cache is computed again.",
    )
    router_replay: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Mixtures of experts: the learner's routers choose the experts that the engine's chose while "
        "sampling. auto: where the model can and the engine is native; on: else it is an error.",
    )
    adapter: Literal["apart", "merged", "auto"] = Field(
        "apart",
        description="With model.lora, what generators compute with. apart: base and adapter, as the learner does; "
        "merged: weights into which the adapter is merged with every version, copies of those of the adapted layers; "
        "auto: merged on CUDA where memory allows, else apart.",
    )
    record: Switch | None = Field(
        None,
        description="Records what every step is trained on, so that `podium replay` can run the updates again. "
        "Default: where staleness is above 0.",
    )

    @property
    def is_recorded(self) -> bool:
        """Whether the run records what its steps are trained on."""
        return self.staleness > 0 if self.record is None else self.record

    @property
    def merges_adapter(self) -> bool:
        """Whether generators compute with an adapter that is merged into its base."""
        return self.adapter == "merged"

    @property
    def truncated_by(self) -> tuple[str, ...]:
        """The keys that leave tokens out when a token is sampled; empty: it is sampled from the whole distribution."""
        is_set = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": self.min_p > 0}
        return tuple(key for key, leaves_out in is_set.items() if leaves_out)


class RewardSection(Section):
    """One reward: a function, a verifier, a reward model or a judge."""

    name: Text | None = Field(
        None,
        description="What it is called in the metrics; default: its function's, verifier's or folder's name, or "
        "`judge`.",
    )
    weight: Real = Field(1.0, description="The total is the weighted sum of all rewards; 0 only logs it.")

    @property
    def needs_device(self) -> bool:
        """Whether a model on the run's devices gives it, and no grader."""
        return False

    @property
    def metric_name(self) -> str:
        """The name of the reward in metrics."""
        return self.name or self._default_name

    @property
    def _default_name(self) -> str:
        raise TypeError(f"{type(self).__name__} is no reward")


class FunctionReward(RewardSection):
    """A custom function."""

    function: Plugin = Field(
        description="`file.py:function`; Podium's own signature, verl's or TRL's (see docs/rewards.md)."
    )
    style: Literal["auto", "podium", "verl", "trl"] = Field(
        "auto", description="Whose signature the function has; auto tells by the names of its parameters."
    )
    per: Literal["sample", "batch", "group"] = Field(
        "sample", description="Podium's own style: what one call of the function is given."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Further keyword arguments of the function.")

    @property
    def _default_name(self) -> str:
        return self.function.name


class VerifierReward(RewardSection):
    """One of the verifiers that Podium ships."""

    verifier: VerifierName = Field(description="Name of the verifier; see docs/rewards.md for what each accepts.")
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the verifier.")

    @property
    def _default_name(self) -> str:
        return self.verifier


class ModelReward(RewardSection):
    """A reward model."""

    model: Place = Field(
        description="Folder or hub id of a Hugging Face sequence-classification checkpoint that scores episodes."
    )

    @property
    def needs_device(self) -> bool:
        """Always."""
        return True

    @property
    def _default_name(self) -> str:
        return os.path.basename(self.model.rstrip("/")) or self.model


class JudgeReward(RewardSection):
    """A model that judges by a rubric."""

    judge: JudgeSection

    @property
    def needs_device(self) -> bool:
        """Whether the run itself has the model."""
        return self.judge.is_local

    @property
    def _default_name(self) -> str:
        return "judge"


def _reward_tag(value: Any) -> str | None:
    """The kind of reward. None: there is not exactly one source."""
    keys = type(value).model_fields if isinstance(value, RewardSection) else value if isinstance(value, dict) else ()
    named = [name for name in ("function", "verifier", "model", "judge") if name in keys]
    return f"reward={named[0]}" if len(named) == 1 else None


class RewardByName(Shorthand):
    """A reward by its function or verifier alone. A folder is not enough: it might be misspelt for one of them."""

    def in_full(self, value: Any) -> Any:
        """`{function: ...}` or `{verifier: ...}`, for a text that is one of them."""
        if value in get_args(VerifierName):
            return {"verifier": value}
        return {"function": value} if Plugin.has_shape(value) else value

    def short_schema(self, schema: JsonSchemaValue) -> JsonSchemaValue:
        """A verifier's name, or an import path."""
        return {"anyOf": [{"enum": list(get_args(VerifierName))}, dict(PLUGIN_SCHEMA)]}


AnyReward = Annotated[
    Annotated[FunctionReward, Tag("reward=function")]
    | Annotated[VerifierReward, Tag("reward=verifier")]
    | Annotated[ModelReward, Tag("reward=model")]
    | Annotated[JudgeReward, Tag("reward=judge")],
    Discriminator(
        _reward_tag,
        custom_error_type="reward_source",
        custom_error_message="Needs exactly one of function, verifier, model and judge",
    ),
    RewardByName(),
]
Rewards = Annotated[tuple[AnyReward, ...], OneOrMore()]


class GradingSection(Section):
    """How rewards are computed, and what becomes of episodes whose reward is unavailable."""

    workers: Count = Field(1, description="Processes that run reward functions.")
    timeout_s: Real = Field(30.0, gt=0, description="Longest time of one call of a reward function.")
    memory_gib: Real | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Most memory of a process that runs reward functions, together with all processes that they start; "
        "a call that needs more fails. Default: no limit.",
    )
    on_error: Literal["drop_group", "zero", "fail"] = Field(
        "drop_group",
        description="When a reward raises, hangs or gives no finite number: leave the prompt's whole group out, count "
        "the episode's reward as 0, or stop the run. A group with an episode that the engine did not answer is left "
        "out also with zero.",
    )
    max_failed_share: Real = Field(
        0.5, ge=0, le=1, description="The run stops when more than this share of a step's episodes failed."
    )
    solved_at: Real = Field(1.0, description="A value of solved_by from which on an episode counts as solved.")
    solved_by: Text | None = Field(
        None,
        description="Name of the reward that says whether an episode is solved (unweighted), or `total`, the weighted "
        "sum. Default: the only reward with a weight, or the only one of several that is exact_match, numeric, "
        "math_verify or code, or the total. expert_iteration: the total.",
    )


class CriticSection(Section):
    """PPO's value model."""

    path: Place | None = Field(
        None,
        description="A language model (its value head begins at 0) or a classifier of one label; default: model.path.",
    )
    lr: Real | None = Field(None, gt=0, description="Default: optimizer.lr.")
    value_clip: Real | None = Field(0.2, gt=0, description="Values may move this far from the old ones; null: freely.")
    warmup_steps: NonNegative = Field(0, description="First steps that train the critic only.")


class TeacherSection(PathSection):
    """A model whose distribution the student or policy is drawn towards."""

    path: Place = Field(description="Folder of a Hugging Face checkpoint, or a hub id.")
    weight: Real = Field(1.0, gt=0, description="Relative to the other teachers.")


Teachers = Annotated[tuple[TeacherSection, ...], OneOrMore()]


class EnvironmentSection(Section):
    """Episodes of several turns: a custom environment, tools that the model may call, an environment of another
    package, or an agent that asks for answers itself. Exactly one of `environment`, `tools`, `gymnasium`, `openenv`,
    `verifiers`, `agent` and `agent_command`."""

    environment: Plugin | None = Field(None, description="`file.py:Class` with async reset and step.")
    gymnasium: AnyGymnasium | None = Field(
        None, description="An environment with Gymnasium's interface; needs the extra of that name."
    )
    openenv: AnyOpenEnv | None = Field(
        None, description="An environment of an OpenEnv server; needs the extra of that name."
    )
    verifiers: AnyVerifiers | None = Field(
        None, description="An environment of the package verifiers; needs the extra of that name."
    )
    tools: Annotated[tuple[Plugin, ...], OneOrMore()] = Field(
        (), description="Python functions that the model may call."
    )
    agent: Plugin | None = Field(
        None,
        description="`file.py:function`, an agent: called with the task, a base URL and a key for a client of OpenAI's "
        "API. It returns the episode's reward, or None if the recipe's rewards grade it.",
    )
    agent_command: tuple[Text, ...] = Field(
        (),
        description="An agent as a command: arguments, in which {task} is the task as JSON and {task_file} the name of "
        "a file with it. OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY are set for it.",
    )
    hidden_tools: Switch = Field(False, description="Allow a chat template that does not show the tools to the model.")
    max_turns: Count = Field(8, description="Answers of the model in one episode.")
    max_episode_tokens: Count | None = Field(
        None, description="Tokens behind the prompt, the environment's too; default: what the engine's context allows."
    )
    runners: Count = Field(1, description="Processes that run episodes.")
    concurrency: Count = Field(256, description="Episodes that one runner has under way at the same time.")
    timeout_s: Real = Field(
        60.0,
        gt=0,
        description="Longest time of one call of reset, step or a tool. Of an agent: of its whole episode, with what "
        "the model generates; its default is 600.",
    )
    memory_gib: Real | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Most memory of a process that runs environments or tools, together with all processes that they "
        "start; the episode that needs more fails. Default: no limit.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Keyword arguments of the environment's class; with tools: max_chars, max_calls, role; with "
        "verifiers: keys of the environment's own config.",
    )

    @model_validator(mode="before")
    @classmethod
    def _agents_have_more_time(cls, value: Any) -> Any:
        """An agent's deadline is one of a whole episode."""
        is_agent = isinstance(value, dict) and any(value.get(key) for key in _AGENT_KEYS)
        return {"timeout_s": _AGENT_S, **value} if is_agent else value

    @property
    def kinds(self) -> tuple[str, ...]:
        """The keys that say which environment it is; a valid recipe has one."""
        keys = ("environment", "tools", "gymnasium", "openenv", *_AGENT_KEYS)
        return tuple(key for key in keys if getattr(self, key))

    @property
    def is_agent(self) -> bool:
        """Whether an agent asks for answers itself, through the gateway."""
        return any(getattr(self, key) for key in _AGENT_KEYS)

    @property
    def is_self_contained(self) -> bool:
        """Whether the environment may begin episodes and reward them by itself: any but tools."""
        return self.kinds != ("tools",)

    @property
    def reply_role(self) -> str:
        """The role of the environment's messages."""
        if self.tools:
            return str(self.options.get("role", "tool"))
        return "tool" if self.openenv is not None and self.openenv.answer == "tool_call" else "user"


class SandboxSection(Section):
    """How programs that a model has written are run: by the verifier `code`, and by rewards and tools that use
    `podium.environments.sandbox`."""

    wall_s: Real = Field(10.0, gt=0, allow_inf_nan=False, description="Longest time of one program.")
    cpu_s: Count = Field(10, description="Most processor time of each process of a program, in seconds.")
    memory_mib: Count = Field(512, description="Most memory of a program, all its processes together.")
    processes: Count = Field(32, description="Most processes and threads of a program.")
    output_kib: Count = Field(1024, description="Most output of a program; one that writes more is ended.")
    tmp_mib: Count = Field(64, description="Size of /tmp and of /dev/shm, and of the largest file.")
    workers: Count | None = Field(
        None, description="Programs at the same time, in each process that grades or runs tools. Default: one for each "
        "core, 16 at most.",
    )  # fmt: skip
    python: Text | None = Field(
        None, description="Interpreter of the programs, with its packages. Default: the one that runs Podium, with the "
        "standard library alone.",
    )  # fmt: skip
    paths: Annotated[tuple[str, ...], OneOrMore()] = Field(
        (), description="Further files and folders that programs may read, by their absolute paths."
    )
    allow_unsafe: Switch = Field(
        False, description="Where programs cannot be isolated, run them with limits only: they can then read your "
        "files and use the network.",
    )  # fmt: skip
