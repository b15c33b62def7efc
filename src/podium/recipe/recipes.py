# SPDX-License-Identifier: Apache-2.0
"""The frozen description of one run, one class per program. A recipe has only the keys that its program reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, JsonValue, model_validator
from pydantic.config import JsonDict

from podium.recipe.algorithm import (
    AlgorithmSection,
    CorrectionSection,
    CustomAlgorithm,
    ExpertAlgorithm,
    GrpoAlgorithm,
    PolicySection,
    PpoAlgorithm,
    SftAlgorithm,
    UpdateSection,
)
from podium.recipe.dense import (
    AnyPreference,
    DistillSection,
    ReferencedPreference,
    RewardModelSection,
    SigmoidPreference,
)
from podium.recipe.fields import Count, Real
from podium.recipe.judges import JudgeSection
from podium.recipe.on_policy import (
    CriticSection,
    EnvironmentSection,
    GradingSection,
    JudgeReward,
    ModelReward,
    Rewards,
    RolloutSection,
    SandboxSection,
    Teachers,
    TeacherSection,
    VerifierReward,
)
from podium.recipe.on_policy_rules import on_policy_rules
from podium.recipe.plugins import Plugin
from podium.recipe.rules import shared_rules
from podium.recipe.schema import (
    CheckpointSection,
    DataSection,
    DocumentDataSection,
    EngineSection,
    EvaluationSection,
    GeneratedEvaluationSection,
    GenerationSection,
    ModelSection,
    OnPolicyEvaluationSection,
    OnPolicyPlacementSection,
    OnPolicyRunSection,
    OptimizerSection,
    PackedDataSection,
    PlacementSection,
    RunSection,
    SampledGenerationSection,
    SpmdPlacementSection,
)
from podium.recipe.solving import Solving, solving_of
from podium.recipe.spmd_rules import distill_rules, length_rules, mesh_rules, reward_model_rules
from podium.recipe.variables import WholeRecipe

Execution = Literal["spmd", "controlled"]
_DOCUMENT_COLUMNS = frozenset({"messages", "prompt", "completion", "text"})
_PAIR_COLUMNS = frozenset({"prompt", "chosen", "rejected", "tools"})


def _without_default(schema: JsonDict) -> None:
    """For a key whose default only means that it is not given."""
    del schema["default"]


class Recipe(WholeRecipe):
    """What all recipes share. `parse_recipe` and `load_recipe` give the class of the program."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["steps"]}, {"required": ["epochs"]}]})

    execution: ClassVar[Execution]  # every rank runs the program, or a controller does
    learns_dropout: ClassVar[bool] = False  # its loss compares log-probs with none that were computed without dropout

    program: str
    model: ModelSection
    data: DataSection
    optimizer: OptimizerSection
    steps: Count = Field(
        0,
        validate_default=False,
        json_schema_extra=_without_default,
        description="Fixed data: optimizer steps. On-policy: rounds of generating and updating. The data repeats.",
    )
    epochs: Real | None = Field(
        None,
        gt=0,
        description="Passes over the rows of data.train, instead of steps, which are counted before the run begins.",
    )
    micro_batch_tokens: Count | None = Field(
        None,
        description="Most tokens of one forward on one rank. Changes speed and memory, never the result. "
        "Default: the rank's share of the step, cut into parts of at most 16384 (CUDA) or 4096 (CPU).",
    )
    placement: PlacementSection = PlacementSection()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()
    run: RunSection = RunSection()

    def stored_values(self) -> dict[str, Any]:
        """The values as they are written to disk: `${env:NAME}` and not the variable's value."""
        values = super().stored_values()
        if self.steps == 0:
            del values["steps"]  # they are not counted yet
        return values

    @property
    def length(self) -> str:
        """Steps or epochs as a text."""
        return f"{self.steps} steps" if self.epochs is None else f"{self.epochs:g} epochs"

    @property
    def columns(self) -> frozenset[str]:
        """Columns that rows of this program may have."""
        return _DOCUMENT_COLUMNS

    @property
    def generation(self) -> GenerationSection | None:
        """The section of generated answers in an evaluation; None: there are none."""
        return None

    @model_validator(mode="before")
    @classmethod
    def _needs_a_mapping(cls, value: Any) -> Any:
        if value is None:
            raise ValueError("the recipe is empty")
        if isinstance(value, Mapping) and "steps" in value and value["steps"] is None:
            return {key: item for key, item in value.items() if key != "steps"}
        return value

    @property
    def gives_rewards(self) -> bool:
        """Whether anything rewards episodes."""
        return False

    def problems(self) -> list[str]:
        """Every violated rule about values of several keys, as a sentence with the fix."""
        return [*mesh_rules(self), *shared_rules(self)]

    @model_validator(mode="after")
    def _cross_checks(self) -> Self:
        problems = self.problems()
        if type(self) in (Recipe, SpmdRecipe, OnPolicyRecipe):
            problems = ["program: this class is what several programs share. Use parse_recipe, or the program's class."]
        if problems:
            raise ValueError("\n".join(problems))
        return self


# --- fixed data: every rank runs the program ---


class SpmdRecipe(Recipe):
    """Programs that learn from fixed data."""

    execution: ClassVar[Execution] = "spmd"

    data: PackedDataSection
    tokens_per_step: Count = Field(16_384, description="Tokens of one optimizer step, over all ranks.")
    rows_per_step: Count | None = Field(
        None, description="Exactly so many rows a step, however long, instead of tokens_per_step."
    )
    placement: SpmdPlacementSection = SpmdPlacementSection()

    @property
    def documents_per_row(self) -> int:
        """Two if rows are pairs: both documents go through the model together."""
        return 1

    @property
    def trained(self) -> Literal["assistant", "last_turn", "everything"]:
        """Which tokens of a chat are trained."""
        return "assistant"

    def problems(self) -> list[str]:
        """Problems of all programs, and of lengths."""
        return [*length_rules(self), *super().problems()]


class LanguageModelRecipe(SpmdRecipe):
    """Programs with fixed data whose model writes text, so that an evaluation can generate answers."""

    evaluation: GeneratedEvaluationSection = GeneratedEvaluationSection()
    rollout: EngineSection = Field(EngineSection(), description="The engine that answers for evaluation.generation.")

    @property
    def generation(self) -> GenerationSection | None:
        """The recipe's `evaluation.generation`."""
        return self.evaluation.generation


class SftRecipe(LanguageModelRecipe):
    """Supervised fine-tuning."""

    learns_dropout: ClassVar[bool] = True

    program: Literal["sft"]
    data: DocumentDataSection
    algorithm: SftAlgorithm = SftAlgorithm()

    @property
    def trained(self) -> Literal["assistant", "last_turn", "everything"]:
        """The recipe's `data.trained`."""
        return self.data.trained


class DpoRecipe(LanguageModelRecipe):
    """Preferences: DPO, IPO, SimPO and ORPO on pairs, KTO on labelled rows."""

    program: Literal["dpo"]
    preference: AnyPreference = SigmoidPreference()

    @property
    def columns(self) -> frozenset[str]:
        """Columns of pairs, or of single answers with a label."""
        return _PAIR_COLUMNS if self.preference.is_paired else frozenset({"prompt", "completion", "label", "tools"})

    @property
    def documents_per_row(self) -> int:
        """Two for pairs, one for labelled answers."""
        return 2 if self.preference.is_paired else 1

    @property
    def reference_model(self) -> str | None:
        """The checkpoint that the loss compares with, if it is not model.path."""
        preference = self.preference
        return preference.reference_model if isinstance(preference, ReferencedPreference) else None

    @property
    def reference_source(self) -> Literal["cached", "live", "base"] | None:
        """The source of the reference's log-probs; `base` is an adapter switched off. None: the loss has no
        reference."""
        preference, lora = self.preference, self.model.lora
        if not isinstance(preference, ReferencedPreference) or not preference.reads_reference:
            return None
        is_base = lora is not None and lora.adapter is None and preference.reference_model is None
        is_cached = preference.reference == "cached"
        if preference.reference == "auto":
            is_cached = not is_base and preference.is_paired
        return "cached" if is_cached else "base" if is_base else "live"


class RewardModelRecipe(SpmdRecipe):
    """A model that scores texts."""

    learns_dropout: ClassVar[bool] = True

    program: Literal["reward_model"]
    reward_model: RewardModelSection = RewardModelSection()

    @property
    def columns(self) -> frozenset[str]:
        """Columns of pairs with a margin, or of documents with a score."""
        is_paired = self.reward_model.learns == "pairs"
        return _PAIR_COLUMNS | {"margin"} if is_paired else _DOCUMENT_COLUMNS | {"score", "tools"}

    @property
    def documents_per_row(self) -> int:
        """Two for pairs, one for scored documents."""
        return 2 if self.reward_model.learns == "pairs" else 1

    def problems(self) -> list[str]:
        """Problems of fixed data, and of the reward model."""
        return [*reward_model_rules(self.reward_model), *super().problems()]


class DistillRecipe(LanguageModelRecipe):
    """Teachers' distributions on fixed data."""

    program: Literal["distill"]
    data: DocumentDataSection
    teachers: Teachers = Field(min_length=1, description="Models to learn from: {path: FOLDER}.")
    distill: DistillSection = DistillSection()

    @property
    def trained(self) -> Literal["assistant", "last_turn", "everything"]:
        """The recipe's `data.trained`."""
        return self.data.trained

    def problems(self) -> list[str]:
        """Problems of fixed data, and of the divergence."""
        return [*distill_rules(self.distill), *super().problems()]


class CustomSpmdRecipe(LanguageModelRecipe):
    """A custom program with fixed data: a function that every rank runs."""

    learns_dropout: ClassVar[bool] = True

    program: Plugin = Field(description="`file.py:function`.")
    signal: Literal["fixed"] = Field(
        description="fixed: the data is known in advance, and every rank runs the program."
    )
    data: DocumentDataSection
    teachers: Teachers = Field((), description="Frozen models that the program may use.")
    options: dict[str, JsonValue] = Field(default_factory=dict, description="Settings of the program's own.")

    @property
    def trained(self) -> Literal["assistant", "last_turn", "everything"]:
        """The recipe's `data.trained`."""
        return self.data.trained


# --- on-policy: a controller runs the program ---


class OnPolicyRecipe(Recipe):
    """Programs that learn from what the current weights generate."""

    execution: ClassVar[Execution] = "controlled"
    learns_from_rewards: ClassVar[bool] = False  # so that it needs some
    only_logs_rewards: ClassVar[bool] = False
    uses_estimator: ClassVar[bool] = False  # of algorithm.advantage
    can_be_stale: ClassVar[bool] = True  # its loss says by ratios how likely the trained weights find old tokens

    placement: OnPolicyPlacementSection = OnPolicyPlacementSection()
    evaluation: OnPolicyEvaluationSection = OnPolicyEvaluationSection()
    run: OnPolicyRunSection = OnPolicyRunSection()
    rollout: RolloutSection = RolloutSection()
    reward: Rewards = Field((), description="What makes an episode good.")
    grading: GradingSection = GradingSection()
    algorithm: UpdateSection = UpdateSection()
    environment: EnvironmentSection | None = Field(None, description="Episodes of several turns.")
    sandbox: SandboxSection | None = Field(
        None, description="How programs that a model has written are run. Rewards and tools that run some need it; the "
        "verifier `code` also works with the defaults.",
    )  # fmt: skip

    @property
    def sandbox_section(self) -> SandboxSection:
        """The recipe's `sandbox`, or its defaults."""
        return self.sandbox or SandboxSection()

    @property
    def runs_programs(self) -> bool:
        """Whether the recipe says that it runs programs which a model has written."""
        verifiers = [reward.verifier for reward in self.reward if isinstance(reward, VerifierReward)]
        return self.sandbox is not None or "code" in verifiers

    @property
    def keeps_generating(self) -> bool:
        """Whether streams of episodes stay open over steps: with staleness, or where devices change sides."""
        return self.rollout.staleness > 0 or self.placement.layout == "elastic"

    @property
    def may_replay_routers(self) -> bool:
        """Whether engines record which experts tokens went to, if the model has any: imitated tokens count like
        data. vLLM records without captured graphs, so only if the recipe asks for it."""
        wanted = ("on",) if self.rollout.engine == "vllm" else ("auto", "on")
        return self.rollout.router_replay in wanted and self.can_be_stale

    @property
    def keeps_snapshots(self) -> bool:
        """Whether the newest steps stay in memory, for workers that replace dead ones."""
        return self.placement.restarts > 0 and self.placement.launcher != "inline"

    @property
    def needs_prompts(self) -> bool:
        """Whether every row needs a prompt. An environment may begin an episode by itself."""
        return self.environment is None or not self.environment.is_self_contained

    @property
    def columns(self) -> frozenset[str]:
        """Columns of prompts, and those that rewards may read."""
        return _DOCUMENT_COLUMNS | {"reference", "data_source", "tools"}

    @property
    def generation(self) -> SampledGenerationSection | None:
        """The recipe's `evaluation.generation`."""
        return self.evaluation.generation

    @property
    def correction(self) -> CorrectionSection | None:
        """The off-policy correction that applies, also where the recipe says auto; None: there is none."""
        rollout = self.rollout
        return self.algorithm.correction_of(is_stale=rollout.staleness > 0, is_truncated=bool(rollout.truncated_by))

    @property
    def full_algorithm(self) -> AlgorithmSection:
        """The algorithm with every key, and with the correction that applies. Keys that the program does not have are
        at their defaults, which is off."""
        return AlgorithmSection.model_validate({**self.algorithm.model_dump(), "correction": self.correction})

    @property
    def reward_models(self) -> dict[int, str]:
        """Position among the rewards -> checkpoint, of those that are reward models."""
        return {index: reward.model for index, reward in enumerate(self.reward) if isinstance(reward, ModelReward)}

    @property
    def local_judges(self) -> dict[int, JudgeSection]:
        """Position among the rewards -> judge, of those that the run itself has."""
        judges = ((index, reward.judge) for index, reward in enumerate(self.reward) if isinstance(reward, JudgeReward))
        return {index: judge for index, judge in judges if judge.is_local}

    @property
    def device_rewards(self) -> tuple[int, ...]:
        """Positions of the rewards that models on the run's devices give: reward models and local judges."""
        return tuple(index for index, reward in enumerate(self.reward) if reward.needs_device)

    @property
    def policy_judges(self) -> bool:
        """Whether the policy itself is a judge."""
        return any(judge.is_policy for judge in self.local_judges.values())

    def judging_s(self, num_episodes: int) -> float:
        """Longest time in which one grader's judges judge so many episodes; judges are asked at the same time."""
        size, workers = self.rollout.samples_per_prompt, self.grading.workers
        judges = [reward.judge for reward in self.reward if isinstance(reward, JudgeReward)]
        return max((judge.longest_s(num_episodes, size, share=workers) for judge in judges), default=0.0)

    @property
    def gives_rewards(self) -> bool:
        """Whether the recipe has rewards or an environment."""
        return bool(self.reward) or self.environment is not None

    @property
    def solving(self) -> Solving:
        """What counts as a solved episode."""
        return solving_of(self.reward, self.grading, self.environment)

    @property
    def critic_section(self) -> CriticSection | None:
        """The value model; None: the program has none."""
        return None

    @property
    def teacher_sections(self) -> tuple[TeacherSection, ...]:
        """Teachers of the policy; empty: the program has none."""
        return ()

    def problems(self) -> list[str]:
        """Problems of all programs, and of on-policy ones."""
        return [*on_policy_rules(self), *super().problems()]


class GrpoRecipe(OnPolicyRecipe):
    """GRPO and its relatives: episodes of a prompt are compared with each other."""

    learns_from_rewards: ClassVar[bool] = True
    uses_estimator: ClassVar[bool] = True

    program: Literal["grpo"]
    algorithm: GrpoAlgorithm = GrpoAlgorithm()


class PpoRecipe(OnPolicyRecipe):
    """PPO with a critic."""

    learns_from_rewards: ClassVar[bool] = True

    program: Literal["ppo"]
    algorithm: PpoAlgorithm = PpoAlgorithm()
    critic: CriticSection = CriticSection()

    @property
    def critic_section(self) -> CriticSection:
        """The recipe's `critic`."""
        return self.critic


class OnPolicyDistillRecipe(OnPolicyRecipe):
    """Teachers say of each generated token how likely they find it. Rewards are only logged."""

    only_logs_rewards: ClassVar[bool] = True

    program: Literal["on_policy_distill"]
    algorithm: PolicySection = PolicySection()
    teachers: Teachers = Field(min_length=1, description="Models to learn from: {path: FOLDER}.")

    @property
    def teacher_sections(self) -> tuple[TeacherSection, ...]:
        """The recipe's `teachers`."""
        return self.teachers


class ExpertIterationRecipe(OnPolicyRecipe):
    """Solved episodes are imitated."""

    learns_from_rewards: ClassVar[bool] = True
    can_be_stale: ClassVar[bool] = False

    program: Literal["expert_iteration"]
    algorithm: ExpertAlgorithm = ExpertAlgorithm()

    @property
    def solving(self) -> Solving:
        """The total decides unless `grading.solved_by` is set: these episodes are trained on."""
        if self.grading.solved_by is not None:
            return super().solving
        return Solving(reward=None, at=self.grading.solved_at)


class CustomOnPolicyRecipe(OnPolicyRecipe):
    """A custom program that generates: an async function that the controller runs. It has every on-policy section."""

    program: Plugin = Field(description="`file.py:function`.")
    signal: Literal["on_policy"] = Field(description="on_policy: the weights generate the data, and a controller runs.")
    algorithm: CustomAlgorithm = CustomAlgorithm()
    critic: CriticSection | None = None
    teachers: Teachers = Field((), description="Frozen models that the program may use.")
    options: dict[str, JsonValue] = Field(default_factory=dict, description="Settings of the program's own.")

    @property
    def critic_section(self) -> CriticSection | None:
        """The recipe's `critic`, if it has one."""
        return self.critic

    @property
    def teacher_sections(self) -> tuple[TeacherSection, ...]:
        """The recipe's `teachers`, which may be empty."""
        return self.teachers
