# SPDX-License-Identifier: Apache-2.0
"""How much memory a recipe takes on each device, phase by phase and by named terms, before anything runs. Torch-free.

It follows what the engines allocate: engine/sharding.py (weights and masters), engine/train_step.py (gradients),
engine/optimizer.py (moments), models/head.py (logits by chunks), rollout/native/sizing.py (KV cache),
weights/whole_copy.py and rollout/native/merged_copy.py (weights of generators); and what torch's allocator keeps
beside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from podium.errors import PodiumError, RecipeError, RolloutError
from podium.planning.activations import activation_bytes, head_bytes, layer_bytes
from podium.planning.allocator import freed_logits, state_rounding
from podium.planning.devices import GIB, Device
from podium.planning.model_shape import ModelShape, shape_of
from podium.planning.tensor_shapes import divided, with_own_experts
from podium.recipe import (
    DistillRecipe,
    DpoRecipe,
    ModelSection,
    OnPolicyRecipe,
    Recipe,
    RewardModelRecipe,
    SpmdRecipe,
)
from podium.recipe.policy_mesh import MeshSizes
from podium.roles.interfaces import MICRO_BATCH, POLICY
from podium.rollout.native.sizing import Sizes, choose_sizes

if TYPE_CHECKING:
    from podium.planning.mesh_choice import MeshChoice

Place = Literal["learner", "generator"]
_MASTER_BYTES = 4  # masters, moments and sums of gradients are float32
STATE_PIECE = 1 << 25  # of PIECE_ELEMENTS in engine/state_streams.py
_STATE_PIECES = 3  # on the device at the same time
# A CUDA context with its libraries and graphs, and a Python process with torch, before they hold any tensor of a run.
CONTEXT_BYTES = {"cuda": int(0.8 * GIB), "cpu": int(0.45 * GIB)}
# Predictions are this good; what exceeds the memory by less is said and not refused.
TOLERANCE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTerm:
    """Bytes with a name."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMemory:
    """What one device holds at the peak of a phase."""

    phase: str
    place: Place
    terms: tuple[MemoryTerm, ...]
    kept: tuple[MemoryTerm, ...] = ()  # by torch's allocator, beyond live tensors

    @property
    def num_bytes(self) -> int:
        """All that is needed."""
        return sum(term.num_bytes for term in self.terms)

    @property
    def held_bytes(self) -> int:
        """What the process holds, as nvidia-smi shows it: also what torch's allocator keeps. It gives whole segments
        back where memory is short."""
        return self.num_bytes + sum(term.num_bytes for term in self.kept)

    @property
    def held_text(self) -> str:
        """A part of a sentence that says so; empty: it keeps nothing that is known."""
        if not self.kept:
            return ""
        return (
            f"; the process holds about {gib(self.held_bytes)} with what torch's allocator keeps: {_listed(self.kept)}"
        )

    @property
    def largest(self) -> tuple[MemoryTerm, ...]:
        """The three largest terms."""
        return tuple(sorted(self.terms, key=lambda term: -term.num_bytes)[:3])

    def of(self, name: str) -> int:
        """Bytes of the term with this name; 0 if there is none."""
        return sum(term.num_bytes for term in self.terms if term.name == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The phases of a run on their devices. On CPU all workers share the memory, and phases are sums over them."""

    device: Device
    phases: tuple[PhaseMemory, ...]
    host: tuple[MemoryTerm, ...]  # host memory beside a GPU, and snapshots, which are left out where they do not fit
    engine: Sizes | None = None  # with the smallest cache; None: none generates, or nothing is left for its cache

    @property
    def peak(self) -> PhaseMemory:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.num_bytes)

    @property
    def held_bytes(self) -> int:
        """The most that a process holds of a device."""
        return max(phase.held_bytes for phase in self.phases)

    @property
    def of_learner(self) -> PhaseMemory:
        """The learner's phase that takes most."""
        return max((each for each in self.phases if each.place == "learner"), key=lambda phase: phase.num_bytes)

    def of(self, phase: str, place: Place) -> PhaseMemory:
        """One phase at one place; without terms if there is none."""
        found = (each for each in self.phases if (each.phase, each.place) == (phase, place))
        return next(found, PhaseMemory(phase=phase, place=place, terms=()))

    @property
    def share(self) -> float:
        """Of the device's memory, at the peak."""
        return self.peak.num_bytes / self.device.memory_bytes

    @property
    def cannot_fit(self) -> bool:
        """Whether even a prediction that is too high by its tolerance would not fit."""
        return self.share > 1.0 + TOLERANCE

    @property
    def fits(self) -> bool:
        """Whether it fits with a margin for what the prediction does not know. Generation may fill the memory: its KV
        cache takes a share of what the rest leaves."""
        limits = {phase: 1.0 if phase.phase == "rollout" else 1.0 - TOLERANCE for phase in self.phases}
        return all(phase.num_bytes <= limit * self.device.memory_bytes for phase, limit in limits.items())

    def lines(self) -> list[str]:
        """One line for each phase, and one for the host."""
        lines = [
            f"memory, {each.phase} ({each.place}): {gib(each.num_bytes)} of {gib(self.device.memory_bytes)}: "
            f"{_listed(sorted(each.terms, key=lambda term: -term.num_bytes))}{each.held_text}"
            for each in self.phases
        ]
        return lines if not self.host else [*lines, f"memory of the host: {_listed(self.host)}"]


def memory_of(recipe: Recipe, device: Device) -> MemoryPlan:
    """The memory of a run. Raises UnsupportedModelError where the shape of a model is not known."""
    needs = _Needs(recipe, device)
    phases = needs.on_policy() if isinstance(recipe, OnPolicyRecipe) else needs.spmd()
    return MemoryPlan(device=device, phases=tuple(phases), host=tuple(needs.host()), engine=needs.engine)


NAME_THE_DEVICE = "If it runs on another device than was found here, name it with --device."
BEGIN_ANYHOW = "If you know better, `podium train --ignore-memory` begins it."


def refusal(
    plan: MemoryPlan, recipe: Recipe, otherwise: str = NAME_THE_DEVICE, choice: MeshChoice | None = None
) -> RecipeError | None:
    """Why a run cannot fit, with the largest terms and what to change; None if it can. `otherwise`: what to do where
    the prediction is wrong. `choice`: of the axes, where the planner chose them."""
    if not plan.cannot_fit:
        return None
    peak, device = plan.peak, plan.device
    what = "this machine's memory" if device.kind == "cpu" else f"one {device.name}"
    if choice is not None and choice.misfits:
        shapes = "the only shape" if choice.misfits == 1 else f"none of the {choice.misfits} shapes"
        least = "does not fit" if choice.misfits == 1 else "fits"
        return RecipeError(
            f"placement.policy: auto: {shapes} of {recipe.placement.training_devices} devices that train {least} "
            f"{what} of {gib(device.memory_bytes)}. {choice.sizes} takes {gib(peak.num_bytes)} in its {peak.phase} "
            f"({peak.place}){', the least' if choice.misfits > 1 else ''}: {_added_up(peak)}. "
            f"{_advice(peak, recipe, device)} {otherwise}"
        )
    return RecipeError(
        f"placement.devices: the run cannot fit {what} of {gib(device.memory_bytes)}. Its {peak.phase} "
        f"({peak.place}) takes about {gib(peak.num_bytes)}, most of it {_listed(peak.largest)}. "
        f"{_advice(peak, recipe, device)} {otherwise}"
    )


def _advice(peak: PhaseMemory, recipe: Recipe, device: Device) -> str:
    from podium.planning.memory_options import fitting_option

    names = {term.name for term in peak.largest}
    option = fitting_option(recipe, device)
    advice: list[str] = []
    if names & {"activations", "logits"}:
        advice.append("lower micro_batch_tokens")
    if "KV cache" in names:
        advice.append("lower rollout.memory_gib")
    if "merged weights" in names:
        advice.append("set rollout.adapter to apart")
    state = {"weights", "optimizer moments", "float32 masters", "gradients"}
    if names & state and recipe.model.lora is None:
        advice.append("train an adapter (model.lora)")
    if names & state and device.kind == "cuda":
        advice.append("shard over more placement.devices")
    if option is not None:
        others = f" You can also {', or '.join(advice)}." if advice else ""
        return f"With {option} it fits.{others}"
    if "activations" in names and recipe.model.activation_checkpointing != "layers":
        advice.insert(0, "set model.activation_checkpointing to layers")
    return f"To make it smaller: {', or '.join(advice)}." if advice else "It needs a device with more memory."


def mesh_sizes(recipe: Recipe, device: Device) -> MeshSizes:
    """The axes of placement.policy on such devices; without it, all ranks shard."""
    if recipe.placement.policy == "auto":
        from podium.planning.mesh_choice import choose_mesh

        return choose_mesh(recipe, device).sizes
    return recipe.placement.mesh_sizes


def merges_adapter(recipe: OnPolicyRecipe, device: Device) -> bool:
    """Whether generators compute with merged weights on such devices."""
    if recipe.rollout.adapter == "auto" and recipe.model.lora is not None:
        from podium.planning.adapter_choice import choose_adapter

        return choose_adapter(recipe, device).adapter == "merged"
    return recipe.rollout.merges_adapter


class _Needs:
    """Bytes of one recipe on one kind of device."""

    def __init__(self, recipe: Recipe, device: Device) -> None:
        self._recipe, self._device = recipe, device
        self._cuda = device.kind == "cuda"
        self._itemsize = compute_itemsize(recipe.model, device)
        self._world, sizes = recipe.placement.training_devices, mesh_sizes(recipe, device)
        # A tensor group divides layers and vocabulary; FSDP then shards the rows of what each of its ranks has.
        self._tensor, self._data_ranks, self._experts = sizes.tensor, sizes.data_ranks, sizes.experts
        self._parts = sizes.parts // sizes.tensor
        self._shape = shape_of(recipe.model)
        if isinstance(recipe, RewardModelRecipe):
            self._shape = self._shape.with_labels(1)
        self._whole, self._shape = self._shape, divided(self._shape, self._tensor)
        self._step_tokens = self._tokens_of_a_step()
        limit = recipe.micro_batch_tokens or MICRO_BATCH[device.kind] * sizes.context
        self._micro_batch = min(limit, self._step_tokens)
        self._tokens = -(-self._micro_batch // sizes.context)  # of it, on each rank
        # On CPU every worker's memory counts, because they share it.
        self._workers = 1 if self._cuda else self._world
        self._engines: list[Sizes | None] = []
        # On CPU host memory is the device's: nothing is saved.
        self._offloads_state = self._cuda and recipe.optimizer.offload
        self._offloads_inputs = self._cuda and recipe.model.offload_activations

    @property
    def engine(self) -> Sizes | None:
        """That with the smallest cache."""
        known = [each for each in self._engines if each is not None]
        return min(known, key=lambda each: each.cache_tokens) if known and None not in self._engines else None

    def spmd(self) -> list[PhaseMemory]:
        """Training, with the models beside it."""
        recipe, frozen = self._recipe, self._frozen_models()
        divergence = isinstance(recipe, DistillRecipe)
        terms = [*self._state(self._shape), *frozen, *self._update_terms(self._shape, divergence=divergence)]
        kept = self._kept(fused=not divergence)
        return [self._phase("training step", "learner", terms, self._workers, kept)]

    def on_policy(self) -> list[PhaseMemory]:
        """Rollout, scores and update, each with what the roles hold in it."""
        from podium.controller.phases import LENT, who_leaves

        recipe = self._recipe
        assert isinstance(recipe, OnPolicyRecipe)
        layout, ranks = recipe.placement.layout, self._world
        state, frozen, critic = self._state(self._shape), self._frozen_models(), self._critic()
        offloadable = _named(state, "optimizer moments", "float32 masters")
        leaving = who_leaves(
            (POLICY, "generator", LENT, "critic", "reference"),
            colocated=layout == "colocated",
            optimizer_bytes=sum(term.num_bytes for term in offloadable),
            device_bytes=self._device.memory_bytes if self._cuda else 0,
            offload_optimizer=recipe.rollout.offload_optimizer,
        )
        away = POLICY in leaving
        judges = self._judges()
        kept = [*(term for term in state if not (away and term in offloadable)), *judges]
        beside = [] if away else [*frozen, *critic]
        size = recipe.placement.generator_tensor
        own = [MemoryTerm(name="weights", num_bytes=self._whole.num_parameters * self._itemsize // size)]
        sleeps = bool(leaving & {"generator", LENT})
        merged = self._merged_weights(recipe)
        phases: list[PhaseMemory] = []
        cache_while_learning: list[MemoryTerm] = []
        if layout == "split":
            terms = self._with_cache([*own, *merged], size)
            phases.append(self._phase("rollout", "generator", terms, self._generators(recipe)))
        else:
            copies = [] if ranks == 1 else [MemoryTerm(name="weight copies", num_bytes=own[0].num_bytes)]
            copies += merged
            terms = self._with_cache([*kept, *beside, *copies], recipe.placement.learners_tensor)
            phases.append(self._phase("rollout", "learner", terms, self._workers))
            if not sleeps:
                cache_while_learning = [*copies, *_named(terms, "KV cache")]
            if layout == "elastic":
                own_terms = self._with_cache([*own, *merged], size)
                phases.append(self._phase("rollout", "generator", own_terms, self._generators(recipe)))
        update = [*state, *frozen, *critic, *judges, *cache_while_learning, *self._update_terms(self._shape)]
        phases.append(self._phase("update", "learner", update, self._workers, self._kept()))
        if not self._cuda and layout != "colocated":  # one machine's memory holds both sides at the same time
            phases = [self._together(phases)]
        return phases

    def host(self) -> list[MemoryTerm]:
        """Host memory of one machine that is not a device's: snapshots of the last two steps, and what is offloaded."""
        recipe, shape = self._recipe, self._whole
        restarts = recipe.placement.restarts  # type: ignore[attr-defined]
        snapshots = recipe.keeps_snapshots if isinstance(recipe, OnPolicyRecipe) else restarts > 0
        terms: list[MemoryTerm] = []
        if self._offloads_state:
            each = sum(term.num_bytes for term in self._optimizer_state(shape))
            terms.append(MemoryTerm(name="offloaded optimizer state", num_bytes=each * self._world))
        if self._offloads_inputs:
            inputs = self._tokens * shape.hidden * self._itemsize * shape.num_layers
            terms.append(MemoryTerm(name="offloaded activations", num_bytes=inputs * self._world))
        if snapshots:
            saved = shape.trained_parameters if shape.has_adapter else shape.num_parameters
            one = 3 * _MASTER_BYTES * saved
            terms.append(MemoryTerm(name="snapshots of two steps, if they fit", num_bytes=2 * one))
        return terms

    # Terms

    def _merged_weights(self, recipe: OnPolicyRecipe) -> list[MemoryTerm]:
        """Copies of the adapted layers' weights, with the adapter merged, beside each generator's."""
        if not merges_adapter(recipe, self._device):
            return []
        return [MemoryTerm(name="merged weights", num_bytes=self._whole.adapted_parameters * self._itemsize)]

    def _state(self, shape: ModelShape) -> list[MemoryTerm]:
        """Weights, masters and moments of a trained model on one rank."""
        trained, frozen = shape.of_rank(self._parts, trained=True), shape.of_rank(self._parts, trained=False)
        sharded = self._world > 1
        weight = _MASTER_BYTES if sharded else self._itemsize  # sharded parameters are their own masters
        weights = MemoryTerm(name="weights", num_bytes=trained * weight + frozen * self._itemsize)
        state = self._optimizer_state(shape)
        if self._offloads_state:
            held = sum(term.num_bytes for term in state)
            passing = min(held, _STATE_PIECES * STATE_PIECE * held // max(1, trained))
            return [weights, MemoryTerm(name="optimizer state in passing", num_bytes=passing)]
        return [weights, *state]

    def _optimizer_state(self, shape: ModelShape) -> list[MemoryTerm]:
        trained, terms = shape.of_rank(self._parts, trained=True), list[MemoryTerm]()
        if self._world == 1 and self._itemsize != _MASTER_BYTES:
            terms.append(MemoryTerm(name="float32 masters", num_bytes=trained * _MASTER_BYTES))
        return [*terms, MemoryTerm(name="optimizer moments", num_bytes=2 * _MASTER_BYTES * trained)]

    def _update_terms(self, shape: ModelShape, *, divergence: bool = False) -> list[MemoryTerm]:
        """What an update needs beyond weights and moments, at the larger of its two peaks: at the head of the last
        micro-batch, where all activations are kept; or at the end of its backward pass, where they have become
        gradients."""
        itemsize, tokens, compiled = self._itemsize, self._tokens, self._is_compiled
        length = min(self._recipe.data.max_length or self._micro_batch, self._micro_batch)
        activations = activation_bytes(
            shape, tokens, length=length, itemsize=itemsize, compiled=compiled,
            checkpointing=self._recipe.model.activation_checkpointing, offloaded=self._offloads_inputs,
        )  # fmt: skip
        # A loss of whole distributions gathers the logits of a tensor group.
        of_head = replace(shape, vocab_rows=self._whole.vocab_rows) if divergence else shape
        logits = head_bytes(of_head, tokens, itemsize=itemsize, compiled=compiled, divergence=divergence)
        trained, sharded = shape.of_rank(self._parts, trained=True), self._world > 1
        # Of one micro-batch in the dtype of the parameters; sums over several are float32.
        fresh = trained * (_MASTER_BYTES if sharded else itemsize)
        has_sums = self._step_tokens > self._micro_batch
        sums = trained * _MASTER_BYTES if has_sums else 0
        if has_sums and (sharded or itemsize == _MASTER_BYTES):
            fresh = 0  # torch adds to the sums in place
        last = int(tokens * layer_bytes(shape, length=length, itemsize=itemsize, compiled=compiled))
        at_head = {"activations": activations, "logits": logits, "gradients": sums}
        at_end = {"activations": last, "gradients": fresh + sums}
        chosen = max(at_head, at_end, key=lambda each: sum(each.values()))
        if sharded:
            layer = with_own_experts(shape, self._experts).layer_parameters
            gathered = 2 * layer + _outside_layers(shape)
            chosen["gathered layers"] = gathered * itemsize + layer * _MASTER_BYTES
        return [MemoryTerm(name=name, num_bytes=size) for name, size in chosen.items() if size]

    def _with_cache(self, held: Sequence[MemoryTerm], parts: int = 1) -> list[MemoryTerm]:
        """These terms and a KV cache in what they leave free. `parts`: devices over which its heads are divided."""
        from podium.controller.layout import longest_sequence

        recipe = self._recipe
        assert isinstance(recipe, OnPolicyRecipe)
        workers = 1 if self._cuda else recipe.placement.devices
        taken = sum(term.num_bytes for term in (*held, *self._of_process()))
        free = self._device.memory_bytes // workers - taken
        shape = self._whole  # generators do not divide what the learners do
        token_bytes = shape.cache_elements * self._itemsize // parts
        section = recipe.rollout.model_copy(update={"max_length": longest_sequence(recipe)}) if (
            recipe.data.max_length is not None
        ) else recipe.rollout  # fmt: skip
        try:
            sizes = choose_sizes(
                section, context=shape.context, token_bytes=token_bytes, cuda=self._cuda, free_bytes=max(free, 0)
            )
            size = (sizes.num_blocks + (0 if sizes.slots else 1)) * sizes.block_size * token_bytes
            self._engines.append(sizes)
        except RolloutError:  # nothing is left for it: one sequence is the least that generates
            size = min(section.max_length or shape.context, shape.context) * token_bytes
            self._engines.append(None)
        running = recipe.rollout.running_on("cuda" if self._cuda else "cpu")
        logits = MemoryTerm(name="logits", num_bytes=2 * running * shape.vocab_rows * 4)
        return [*held, MemoryTerm(name="KV cache", num_bytes=size), logits]

    def _frozen_models(self) -> list[MemoryTerm]:
        """References, teachers and reward models, each sharded like the policy and in the compute dtype."""
        recipe, found = self._recipe, list[tuple[str, str | None]]()
        if isinstance(recipe, DpoRecipe) and recipe.reference_source == "live":
            found.append(("reference", recipe.reference_model))
        if isinstance(recipe, DistillRecipe):
            found += [("teachers", teacher.path) for teacher in recipe.teachers]
        if isinstance(recipe, OnPolicyRecipe):
            from podium.controller.layout import reference_is_base

            kl = recipe.full_algorithm.kl
            if kl is not None and not reference_is_base(recipe):
                found.append(("reference", kl.reference))
            found += [("teachers", teacher.path) for teacher in recipe.teacher_sections]
            found += [("reward models", path) for path in recipe.reward_models.values()]
        terms = []
        for name, path in found:
            section = recipe.model.model_copy(update={"lora": None}) if path is None else (
                recipe.model.for_checkpoint(path)
            )  # fmt: skip
            shape = shape_of(section, key=name)
            if name == "reward models":
                shape = shape.with_labels(1)
            held = divided(shape, self._tensor).of_rank(self._parts)
            terms.append(MemoryTerm(name=name, num_bytes=held * self._itemsize))
        return terms

    def _judges(self) -> list[MemoryTerm]:
        """Weights of judges in the run, whole on every device. They stay there; their caches do not."""
        recipe = self._recipe
        assert isinstance(recipe, OnPolicyRecipe)
        return [
            MemoryTerm(
                name="judge",
                num_bytes=shape_of(
                    recipe.model.for_checkpoint(judge.folder), key=f"reward.{index}.judge.model"
                ).num_parameters
                * self._itemsize,
            )
            for index, judge in recipe.local_judges.items()
            if judge.folder is not None
        ]

    def _critic(self) -> list[MemoryTerm]:
        recipe = self._recipe
        if not isinstance(recipe, OnPolicyRecipe) or recipe.critic_section is None:
            return []
        path = recipe.critic_section.path
        section = recipe.model if path is None else recipe.model.for_checkpoint(path)
        state = self._state(divided(shape_of(section, key="critic.path").with_labels(1), self._tensor))
        return [MemoryTerm(name="critic", num_bytes=sum(term.num_bytes for term in state))]

    def _kept(self, *, fused: bool = True) -> list[MemoryTerm]:
        """What torch's allocator keeps in an update on CUDA beyond live tensors, as far as its rules say it: of state
        on a single device, and of chunks of the head. `fused`: the loss is of log-probs, not of distributions."""
        if not self._cuda:
            return []
        freed = rounding = 0
        if fused and self._is_compiled and self._shape.num_labels is None:
            freed = freed_logits(self._tokens, self._shape.vocab_rows, itemsize=self._itemsize)
        if self._world == 1:
            rounding = state_rounding(self._shape, self._itemsize, offloaded=self._offloads_state)
        terms = {"freed logits": freed, "rounded segments": rounding}
        return [MemoryTerm(name=name, num_bytes=size) for name, size in terms.items() if size]

    def _phase(
        self, name: str, place: Place, terms: Sequence[MemoryTerm], workers: int, kept: Sequence[MemoryTerm] = ()
    ) -> PhaseMemory:
        return PhaseMemory(
            phase=name, place=place, terms=_summed([*terms, *self._of_process()], workers), kept=tuple(kept)
        )

    def _of_process(self) -> list[MemoryTerm]:
        """What a process holds before any tensor of a run, and the libraries' own."""
        what, size = "CUDA context" if self._cuda else "processes", CONTEXT_BYTES[self._device.kind]
        terms = [MemoryTerm(name=what, num_bytes=size)]
        if self._device.workspace_bytes:
            terms.append(MemoryTerm(name="cuBLAS workspaces", num_bytes=self._device.workspace_bytes))
        return terms

    def _together(self, phases: Sequence[PhaseMemory]) -> PhaseMemory:
        """The generators' phase and the larger one of the learners."""
        generators = [term for phase in phases if phase.place == "generator" for term in phase.terms]
        learner = max((phase for phase in phases if phase.place == "learner"), key=lambda phase: phase.num_bytes)
        return PhaseMemory(
            phase=f"rollout and {learner.phase}", place="learner", terms=_summed([*generators, *learner.terms], 1)
        )

    # Sizes

    @property
    def _is_compiled(self) -> bool:
        compile = self._recipe.model.compile
        return compile == "on" or (compile == "auto" and self._cuda)

    def _tokens_of_a_step(self) -> int:
        """Of one rank, at most."""
        recipe = self._recipe
        if isinstance(recipe, SpmdRecipe):
            if recipe.rows_per_step is not None:
                longest = recipe.data.max_length or self._shape.context
                return -(-recipe.rows_per_step * recipe.documents_per_row * longest // self._data_ranks)
            return -(-recipe.tokens_per_step // self._data_ranks)
        assert isinstance(recipe, OnPolicyRecipe)
        episodes = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt
        longest = recipe.data.max_length or self._shape.context
        return -(-episodes * longest // self._data_ranks)

    def _generators(self, recipe: OnPolicyRecipe) -> int:
        return 1 if self._cuda else recipe.placement.devices - self._world


def compute_itemsize(section: ModelSection, device: Device) -> int:
    """Bytes of a number in the dtype that the model computes in."""
    if section.dtype == "auto":
        return 2 if device.kind == "cuda" else 4
    return 2 if section.dtype == "bfloat16" else 4


def _outside_layers(shape: ModelShape) -> int:
    return sum(each.numel for each in shape.tensors if not each.in_layer)


def _named(terms: Sequence[MemoryTerm], *names: str) -> list[MemoryTerm]:
    return [term for term in terms if term.name in names]


def _summed(terms: Sequence[MemoryTerm], workers: int) -> tuple[MemoryTerm, ...]:
    """One term for each name, of all workers."""
    sums: dict[str, int] = {}
    for term in terms:
        sums[term.name] = sums.get(term.name, 0) + term.num_bytes * workers
    return tuple(MemoryTerm(name=name, num_bytes=size) for name, size in sums.items())


def _listed(terms: Sequence[MemoryTerm]) -> str:
    return ", ".join(f"{term.name} {gib(term.num_bytes)}" for term in terms)


def _added_up(phase: PhaseMemory) -> str:
    """Its three largest terms and the others, as a sum."""
    largest = phase.largest
    terms = [f"{term.name} {gib(term.num_bytes)}" for term in largest]
    left = phase.num_bytes - sum(term.num_bytes for term in largest)
    return " + ".join([*terms, *([f"{len(phase.terms) - len(largest)} smaller terms {gib(left)}"] if left else [])])


def gib(num_bytes: float) -> str:
    """Bytes as a text."""
    value = num_bytes / GIB
    return f"{value:.1f} GiB" if value >= 0.1 else f"{num_bytes / 2**20:.1f} MiB"


def memory_lines(recipe: Recipe, device: Device, choice: MeshChoice | None = None) -> list[str]:
    """What `podium check` says of memory: the peak, or why it is not known. Raises an error if the run cannot fit.
    `choice`: of the axes, where the planner chose them."""
    try:
        plan = memory_of(recipe, device)
    except PodiumError as error:
        return [f"memory: not predicted. {error}"]
    problem = refusal(plan, recipe, choice=choice)
    if problem is not None:
        raise problem
    peak = plan.peak
    tight = " It is close: the prediction is good to 5%." if plan.share > 1.0 - TOLERANCE else ""
    return [
        f"memory: {peak.phase} ({peak.place}) takes about {gib(peak.num_bytes)} of {gib(device.memory_bytes)} of "
        f"{device.name}: {_listed(peak.largest)}{peak.held_text}.{tight}"
    ]
