# SPDX-License-Identifier: Apache-2.0
"""What a recipe may have beside layout, devices and staleness: lanes, micro-batch and the sharding of the learner. What
fits the memory of a device, and what it costs there. Torch-free.

Without placement.policy the learner is sharded over all its devices, so that the number of them decides it. With it, a
number of devices that its axes do not give is no choice. How long values of tensor parallelism take between devices is
not known here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from podium.controller.simulation.costs import CostModel
from podium.errors import PlacementError
from podium.planning.devices import Device
from podium.planning.memory import TOLERANCE, MemoryPlan, gib, memory_of
from podium.planning.mesh_choice import MeshChoice, with_chosen_mesh, with_sizes
from podium.planning.model_shape import shape_of
from podium.planning.prediction import Configuration, Workload
from podium.planning.shape_costs import Episodes, UpdateShape, cost_model, gathering_s
from podium.recipe import OnPolicyRecipe
from podium.recipe.policy_mesh import PolicyMeshSection
from podium.roles.interfaces import MICRO_BATCH

# A lane needs room for a sequence that is so much longer than the mean one.
_ROOM = 1.25
# Micro-batches that are looked at: powers of two times the recipe's own.
_SMALLER, _LARGER = 4, 3
_LANE_DOUBLINGS = 4
_UPDATE_TERMS = ("activations", "logits", "gradients", "gathered layers")
_GENERATION_TERMS = ("KV cache", "weight copies", "merged weights")


def recipe_with(recipe: OnPolicyRecipe, one: Configuration) -> OnPolicyRecipe:
    """The recipe with the keys of a configuration, not validated."""
    placement = recipe.placement.model_copy(
        update={
            "devices": one.devices, "layout": one.layout, "rollout_devices": one.rollout_devices,
            "max_rollout_devices": one.max_rollout_devices,
        }
    )  # fmt: skip
    rollout = recipe.rollout.model_copy(update={"staleness": one.staleness, "max_running": one.lanes})
    return recipe.model_copy(update={"placement": placement, "rollout": rollout, "micro_batch_tokens": one.micro_batch})


def recipe_changes(recipe: OnPolicyRecipe, base: Configuration, one: Configuration) -> dict[str, str]:
    """Keys and values that turn the recipe, whose configuration is `base`, into one of another configuration."""
    changes = {key: new for key, (_, new) in base.changes_to(one).items()}
    if not one.staleness and recipe.rollout.on_new_weights != "keep":
        changes["rollout.on_new_weights"] = "keep"  # without staleness new weights meet no running sequence
    return changes


class RecipeChoices:
    """Configurations of one recipe on one kind of device. What was computed once is kept."""

    def __init__(
        self, recipe: OnPolicyRecipe, device: Device, episodes: Episodes, base: Configuration, workload: Workload
    ) -> None:
        """`base`: the recipe's own configuration."""
        self._recipe, self._device, self._episodes = recipe, device, episodes
        self._base, self._workload = base, workload
        self.shape = shape_of(recipe.model)
        policy = recipe.placement.policy
        context = policy.context if isinstance(policy, PolicyMeshSection) else 1
        self._default_micro_batch = MICRO_BATCH[device.kind] * context
        self._plans: dict[tuple[Any, ...], MemoryPlan] = {}
        self._costs: dict[tuple[Any, ...], CostModel] = {}
        self._meshes: dict[tuple[Any, ...], MeshChoice] = {}

    def costs(self, one: Configuration) -> CostModel:
        """Costs of a configuration, by the shape of the model."""
        key = (*_memory_key(one), one.staleness > 0)
        if key not in self._costs:
            self._costs[key] = cost_model(
                self.shape, self._device, self._episodes, layout=one.layout, update=self.update_shape(one),
                devices=one.devices,
            )  # fmt: skip
        return self._costs[key]

    def running(self, one: Configuration) -> Configuration:
        """The same with the lanes that run: as many as the KV cache holds sequences of a usual length."""
        return replace(one, lanes=max(1, min(one.lanes, self._lanes_in_cache(one))))

    def variants(self, one: Configuration) -> Sequence[Configuration]:
        """The configuration with other lanes and micro-batches, as far as they fit; its own first, if that does. Empty:
        nothing fits, or the axes of placement.policy do not give its learners. A smaller micro-batch is one of them
        only where the recipe's own does not fit."""
        try:
            _ = self._placed(one).placement.mesh_sizes
        except PlacementError:
            return []
        found = (
            replace(one, lanes=lanes, micro_batch=micro)
            for micro in self._micro_batches(one)
            for lanes in self._lanes(one)
        )
        return [each for each in found if self.fits(each)]

    def fits(self, one: Configuration) -> bool:
        """Whether its memory suffices, with a margin for what the prediction does not know. The recipe as it is may be
        closer, and so may generation: its KV cache takes a share of what the rest leaves."""
        plan = self.memory(one)
        if self._lanes_in_cache(one) < 1:
            return False
        if _memory_key(one) == _memory_key(self._base):
            return not plan.cannot_fit
        return plan.fits

    def memory(self, one: Configuration) -> MemoryPlan:
        """Its memory by phase."""
        key = _memory_key(one)
        if key not in self._plans:
            self._plans[key] = memory_of(self._placed(one), self._device)
        return self._plans[key]

    def mesh(self, one: Configuration) -> MeshChoice | None:
        """The axes of its learners where the planner chooses them."""
        if self._recipe.placement.policy != "auto":
            return None
        key = _memory_key(one)
        if key not in self._meshes:
            self._meshes[key] = with_chosen_mesh(recipe_with(self._recipe, one), device=self._device)[1]
        return self._meshes[key]

    def _placed(self, one: Configuration) -> OnPolicyRecipe:
        """The recipe with the keys of a configuration, and with axes that are known."""
        recipe, choice = recipe_with(self._recipe, one), self.mesh(one)
        return recipe if choice is None else with_sizes(recipe, choice.sizes)

    def update_shape(self, one: Configuration) -> UpdateShape:
        """How its learners go through a batch."""
        recipe, algorithm = self._placed(one), self._recipe.full_algorithm
        episodes = self._workload.episodes / one.num_learners / algorithm.mini_batches
        micro = one.micro_batch or self._default_micro_batch
        proximal = algorithm.proximal == "always" or (algorithm.proximal == "auto" and recipe.correction is not None)
        sizes = recipe.placement.mesh_sizes
        together = sizes.devices // sizes.data_ranks  # devices that compute the same tokens, a part of each
        tokens = together * episodes * self._episodes.mean_length
        passes = max(1, math.ceil(tokens / micro))
        update_bytes = cache_bytes = 0
        if self._device.kind == "cuda" and one.layout != "split":
            plan = self.memory(one)
            update, rollout = plan.of("update", "learner"), plan.of("rollout", "learner")
            update_bytes = sum(update.of(name) for name in _UPDATE_TERMS)
            # The plan is of the largest micro-batch that there can be.
            longest = self._recipe.data.max_length or self.shape.context
            most = min(micro, math.ceil(together * self._workload.episodes * longest / one.num_learners))
            update_bytes -= int(update.of("activations") * max(0.0, 1.0 - tokens / passes / most))
            cache_bytes = sum(rollout.of(name) for name in _GENERATION_TERMS)
        return UpdateShape(
            num_learners=one.num_learners,
            episodes=episodes,
            passes=passes,
            optimizer_steps=algorithm.mini_batches,
            epochs=algorithm.epochs,
            scores=int(algorithm.kl is not None) + int(proximal),
            checkpointing=recipe.model.activation_checkpointing,
            update_bytes=update_bytes,
            cache_bytes=cache_bytes,
        )

    def reasons(self, one: Configuration) -> list[str]:
        """Why its micro-batch, its lanes and its sharding are as they are, where they differ from the recipe's."""
        base, plan = self._base, self.memory(one)
        reasons = []
        if one.micro_batch != base.micro_batch:
            before = replace(one, micro_batch=base.micro_batch)
            if self.fits(before):
                now, then = (self.update_shape(each).passes for each in (one, before))
                text = f"{now} instead of {then} micro-batches an update gather weights and add up gradients"
            else:
                text = f"with {base.micro_batch or self._default_micro_batch} {self.problem(before)}"
            reasons.append(f"micro_batch_tokens {one.micro_batch}: {text}; now {_peak(plan)}")
        if one.lanes != base.lanes:
            most = self._lanes_in_cache(one)
            reasons.append(
                f"rollout.max_running {one.lanes}: a decoding step reads the weights once for all of them. The KV "
                f"cache holds about {most} answers of a usual length"
            )
        if one.num_learners != base.num_learners:
            world, passes = one.num_learners, self.update_shape(one).passes
            moved_s = gathering_s(self.shape, self._device, world=world, passes=passes)
            state = sum(plan.of_learner.of(name) for name in ("weights", "float32 masters", "optimizer moments"))
            what = f"sharded over {world} devices" if world > 1 else "on one device"
            each = " of each" if world > 1 and self._device.kind == "cuda" else ""
            moved = f", and collectives of an update take {1e3 * moved_s:.3g} ms, hidden or not" if world > 1 else ""
            if (choice := self.mesh(one)) is not None:
                reasons.append(choice.text.removesuffix("."))
            reasons.append(f"the learner {what}: its weights and moments take {gib(state)}{each}{moved}")
        return reasons

    def problem(self, one: Configuration) -> str:
        """Why a configuration does not fit."""
        plan = self.memory(one)
        if self._lanes_in_cache(one) < 1:
            return "nothing is left for a KV cache"
        return f"the {plan.peak.phase} ({plan.peak.place}) takes about {_peak(plan)}, with a margin of {TOLERANCE:.0%}"

    def _lanes_in_cache(self, one: Configuration) -> int:
        engine = self.memory(one).engine
        if engine is None:
            return 0
        return engine.sequences_of(math.ceil(_ROOM * self._episodes.mean_length))

    def _lanes(self, one: Configuration) -> Iterator[int]:
        """The recipe's, and twice as many while all answers that there can be at a time do not run."""
        generators = one.devices if one.rollout_devices is None else one.rollout_devices
        needed = math.ceil(self._workload.episodes * (1 + one.staleness) / generators)
        lanes = one.lanes
        yield lanes
        for _ in range(_LANE_DOUBLINGS):
            if lanes >= needed:
                return
            lanes *= 2
            yield lanes

    def _micro_batches(self, one: Configuration) -> Iterator[int | None]:
        """Those that fit, the recipe's own first. An episode is never cut, so that none is below the longest."""
        own = one.micro_batch or self._default_micro_batch
        if self.fits(one):
            yield one.micro_batch
            for factor in (2**power for power in range(1, _LARGER + 1)):
                if self.update_shape(replace(one, micro_batch=own * factor // 2)).passes == 1:
                    return
                if not self.fits(larger := replace(one, micro_batch=own * factor)):
                    return
                yield larger.micro_batch
            return
        for smaller in (own >> power for power in range(1, _SMALLER + 1)):
            if smaller < max(1, self._recipe.data.max_length or 0):
                return
            if self.fits(replace(one, micro_batch=smaller)):
                yield smaller
                return


def _memory_key(one: Configuration) -> tuple[Any, ...]:
    """What decides memory."""
    return one.layout, one.devices, one.rollout_devices, one.lanes, one.micro_batch


def _peak(plan: MemoryPlan) -> str:
    return f"{gib(plan.peak.num_bytes)} of {gib(plan.device.memory_bytes)}"
