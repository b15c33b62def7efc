# SPDX-License-Identifier: Apache-2.0
"""On-policy updates on made-up episodes, on any number of ranks; recipes of tiny on-policy runs, and their records."""

# N episodes · T tokens of all of them

from __future__ import annotations

import sqlite3
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helpers.engines import make_engine
from helpers.processes import started, wait_until
from helpers.ranks import assembled, mesh_of
from podium.cluster import MeshShape, RowRefs, WorkerContext
from podium.cluster.identity import WorkerId
from podium.cluster.meshes import RoleMesh
from podium.cluster.objects import InlineStored
from podium.cluster.spans import SpanRecorder
from podium.data.splitting import split_rows
from podium.data.trajectories import Ints, TokenColumn, TrajectoryBlock, TrajectoryId, TrajectoryIds, ValueColumns
from podium.engine.mesh import Mesh, with_axes
from podium.engine.scoring import score
from podium.engine.train_step import PendingReport, TrainEngine
from podium.observe import read_metrics
from podium.recipe import AlgorithmSection, Recipe, parse_recipe
from podium.recipe.policy_mesh import MeshSizes
from podium.roles.carriers import TurnRewards, UpdatePlan, UpdateShard, ValueShard
from podium.roles.critic import CriticRank
from podium.roles.interfaces import POLICY, CriticShard, CriticSpec, UpdateNote
from podium.roles.learner import LearnerRank
from podium.roles.mini_batches import even_parts, rank_batches
from podium.roles.policy_update import PolicyUpdate
from podium.spmd.launch import RankPlace

# --- episodes ---

# Each: tokens of the prompt, then in turn tokens that the policy drew and tokens that came back.
SHAPES = ((3, 5), (4, 1), (2, 9), (6, 4, 3, 5), (3, 2), (5, 7, 4), (2, 12), (4,), (3, 3, 2, 2, 2, 1), (1, 6))
VOCABULARY, GROUPS, MAX_NEW_TOKENS = 250, 5, 12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Episodes:
    """A block and everything that may weigh its episodes. Pickles as it is, so that all ranks have the same numbers."""

    block: TrajectoryBlock
    advantages_N: np.ndarray
    rewards_N: np.ndarray
    reference_T: np.ndarray
    teachers: tuple[np.ndarray, np.ndarray]
    temperature: float


def block_of_rows(
    rows: Sequence[tuple[np.ndarray, np.ndarray]], logprobs_T: np.ndarray | None = None
) -> TrajectoryBlock:
    """(tokens, which of them were drawn) of each row, all drawn by version 0 and trained on; two samples a draw."""
    sampled_T = np.concatenate([sampled for _, sampled in rows])
    return TrajectoryBlock(
        ids=TrajectoryIds.of(TrajectoryId(number // 2, number % 2) for number in range(len(rows))),
        offsets=np.cumsum([0, *(len(tokens) for tokens, _ in rows)]).astype(np.int64),
        tokens_T=np.concatenate([tokens for tokens, _ in rows]).astype(np.int32),
        loss_mask_T=sampled_T,
        behavior_logprobs_T=np.zeros(len(sampled_T), np.float32) if logprobs_T is None else logprobs_T,
        versions_T=np.where(sampled_T, 0, -1).astype(np.int32),
    )


def make_episodes(folder: Path, *, temperature: float = 1.0, seed: int = 0) -> Episodes:
    """Drawn by something near the model: ratios lie on both sides of either clip."""
    draw = np.random.default_rng(seed)
    rows = []
    for shape in SHAPES:
        sampled = np.repeat(np.arange(len(shape)) % 2 == 1, shape)
        rows.append((draw.integers(0, VOCABULARY, len(sampled)), sampled))
    block = block_of_rows(rows)
    engine = make_engine(folder)
    own_T = score(engine.language_model, engine.mesh, block, temperature=temperature).values_T

    def near(spread: float) -> np.ndarray:
        noise_T = draw.normal(0, spread, len(own_T))
        return np.where(block.loss_mask_T, own_T + noise_T, 0).astype(np.float32)

    return Episodes(
        block=replace(block, behavior_logprobs_T=near(0.25)),
        advantages_N=draw.uniform(0.3, 2.0, len(rows)) * np.where(np.arange(len(rows)) % 3 == 0, -1, 1),
        rewards_N=draw.normal(size=len(rows)),
        reference_T=near(0.5),
        teachers=(near(0.5), near(0.5)),
        temperature=temperature,
    )


# --- updates ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is learned from the episodes, and by what of them."""

    algorithm: Mapping[str, Any] = field(default_factory=dict)
    signal: str = "advantages"  # or rewards, teachers, imitation
    whiten: bool = False
    kl_coefficient: float = 0.3

    @property
    def section(self) -> AlgorithmSection:
        return AlgorithmSection.model_validate(dict(self.algorithm))


def _masked(kind: str, low: float, cap: float) -> dict[str, Any]:
    return {"correction": {"kind": kind, "low": low, "cap": cap}}


CASES = {
    "clipped": Case(),
    "dual clip": Case(algorithm={"dual_clip": 1.1}),
    "cispo": Case(algorithm={"loss": "clipped_weights"}),
    "gspo": Case(
        algorithm={"loss": "sequence_clipped", "clip_low": 0.05, "clip_high": 0.05, "reduction": "sequence_mean_mean"}
    ),
    "gspo of tokens": Case(algorithm={"loss": "sequence_clipped", "clip_low": 0.05, "clip_high": 0.05}),
    "policy gradient": Case(algorithm={"loss": "policy_gradient", "reduction": "sequence_sum_mean"}),
    "sequence means": Case(algorithm={"reduction": "sequence_mean_mean"}),
    "constant": Case(algorithm={"reduction": "constant"}),
    "constant of its own": Case(algorithm={"reduction": "constant", "constant": 7.0}),
    "kl": Case(algorithm={"kl": {"coefficient": 0.3}}),
    "kl k2": Case(algorithm={"kl": {"coefficient": 0.3, "estimator": "k2"}}),
    "kl k3": Case(algorithm={"kl": {"coefficient": 0.3, "estimator": "k3"}, "reduction": "sequence_mean_mean"}),
    "entropy": Case(algorithm={"entropy": 0.1}),
    "proximal": Case(algorithm={"proximal": "always"}),
    "token truncate": Case(algorithm=_masked("token_truncate", 0.0, 1.1)),
    "sequence truncate": Case(algorithm=_masked("sequence_truncate", 0.0, 1.1)),
    "token mask": Case(algorithm={**_masked("token_mask", 0.8, 1.2), "reduction": "sequence_mean_mean"}),
    "sequence mask": Case(algorithm={**_masked("sequence_mask", 0.7, 1.5), "reduction": "sequence_sum_mean"}),
    "geometric mask": Case(algorithm=_masked("sequence_geometric_mask", 0.95, 1.1)),
    "mask, kl, entropy": Case(
        algorithm={**_masked("token_mask", 0.8, 1.2), "kl": {"coefficient": 0.3}, "entropy": 0.05}
    ),
    "reinforce++": Case(algorithm={"advantage": "reinforce_pp", "gamma": 0.9}, signal="rewards", whiten=True),
    "reinforce++, kl": Case(
        algorithm={"advantage": "reinforce_pp", "kl": {"coefficient": 0.3, "where": "reward"}},
        signal="rewards",
        whiten=True,
    ),
    "reinforce++ baseline": Case(algorithm={"advantage": "reinforce_pp_baseline"}, whiten=True),
    "teachers": Case(algorithm={"loss": "policy_gradient"}, signal="teachers"),
    "imitation": Case(signal="imitation"),
}  # fmt: skip
TEACHER_WEIGHTS = (0.75, 0.25)


class RecordingEngine(TrainEngine):
    """Keeps this rank's part of every gradient, by name of the parameter, before it is applied."""

    recorded: list[dict[str, Tensor]]

    def _apply(self, total: Tensor, gradients: dict[int, Tensor], **rest: Any) -> PendingReport:
        self.recorded.append({each.name: gradients[id(each)].clone() for each in self._trained})
        return super()._apply(total, gradients, **rest)


def recording_engine(folder: Path, mesh: Mesh | None = None, **model: Any) -> RecordingEngine:
    plain = make_engine(folder, mesh, **model)
    engine = RecordingEngine(plain.model, plain.optimizer.trained, plain.optimizer, plain.mesh, None)
    engine.recorded = []
    return engine


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Updated:
    """What an update did: gradients of its optimizer steps as whole tensors, and what was noted."""

    gradients: tuple[dict[str, Tensor], ...]
    note: UpdateNote

    @property
    def flat(self) -> Tensor:
        return torch.cat([each.flatten() for gradient in self.gradients for each in gradient.values()])


def refs_of(rows: Any) -> RowRefs[Any]:
    return RowRefs.whole(InlineStored(rows), rows.ids, rows.lengths_N)


def run_update(
    engine: RecordingEngine,
    episodes: Episodes,
    case: Case,
    *,
    max_tokens: int = 4096,
    order: Ints | None = None,
    steps: int = 1,
    lr: float = 0.0,
    is_truncated: bool = False,
    versions: tuple[int, ...] = (0,),
    keeps_cache: bool = False,
) -> Updated:
    """One update as learners make it, with the rows in any order; lr 0 leaves the weights. Collective."""
    mesh, engine.recorded = engine.mesh, []
    full = episodes.block
    everyone = np.arange(len(full.ids)) if order is None else order
    lengths_N = full.lengths_N[everyone]
    split = split_rows(
        lengths_N, lengths_N.astype(float), num_ranks=mesh.data_ranks, max_tokens=max(max_tokens, int(lengths_N.max())),
        mini_batch_N=np.arange(len(lengths_N)) * steps // len(lengths_N),
    )  # fmt: skip
    mine, batches = rank_batches(split, mesh.data_rank, range(steps))
    rows = everyone[mine]
    block = full.take(rows)

    def column(values_T: np.ndarray) -> RowRefs[TokenColumn]:
        return refs_of(TokenColumn.like(full, values_T)).select(block.ids)

    has_kl = case.section.kl is not None
    shard = UpdateShard(
        rows=refs_of(full).select(block.ids),
        batches=batches,
        advantages_N=episodes.advantages_N[rows] if case.signal in ("advantages", "imitation") else None,
        rewards_N=episodes.rewards_N[rows] if case.signal == "rewards" else None,
        teachers=(
            tuple((column(each), weight) for each, weight in zip(episodes.teachers, TEACHER_WEIGHTS, strict=True))
            if case.signal == "teachers"
            else ()
        ),
        reference=column(episodes.reference_T) if has_kl else None,
    )
    plan = UpdatePlan(
        step=1, lr=lr, algorithm=case.section, temperature=episodes.temperature, versions=versions,
        max_new_tokens=MAX_NEW_TOKENS, kl_coefficient=case.kl_coefficient if has_kl else 0.0, whiten=case.whiten,
        loss="imitation" if case.signal == "imitation" else "policy", is_truncated=is_truncated,
        keeps_cache=keeps_cache,
    )  # fmt: skip
    note = PolicyUpdate(engine, max_tokens=max_tokens).run(block, shard, plan)
    return Updated(gradients=tuple(assembled(engine, each) for each in engine.recorded), note=note)


# --- critics ---


def context_on(mesh: Mesh, role: str) -> WorkerContext:
    """A role's place on a worker of a pool that is this mesh, beside a learner."""
    learner = object.__new__(LearnerRank)
    learner.mesh = mesh
    return WorkerContext(
        worker=WorkerId("train", mesh.rank, "here", "cpu"),
        role=role,
        mesh=RoleMesh(role=role, pool="train", shape=MeshShape(shard=mesh.world), slots=tuple(range(mesh.world))),
        device="cpu",
        devices=mesh.devices,
        recorder=SpanRecorder(),
        transfers={},
        colocated_roles={POLICY: learner},
        channels={},
    )


def critic_recipe(folder: Path, **algorithm: Any) -> Recipe:
    return parse_recipe(
        {
            "program": "ppo", "model": {"path": str(folder)}, "data": {"train": [{"path": "none.jsonl"}]},
            "optimizer": {"lr": 1e-2, "clip_norm": None}, "steps": 2, "reward": [{"verifier": "exact_match"}],
            "algorithm": algorithm, "micro_batch_tokens": 256, "run": {"name": "critic"},
            "rollout": {"max_new_tokens": MAX_NEW_TOKENS}, "placement": {"device": "cpu"},
        }
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Estimated:
    """What a critic said of each row, by id, and what its update then did."""

    columns: ValueColumns  # of all ranks, ids ascending
    moments: tuple[float, float, float]
    loss: float
    grad_norm: float


def estimate_and_learn(mesh: Mesh, folder: Path, episodes: Episodes, **algorithm: Any) -> Estimated:
    """One round of a critic of a classifier's folder, its rows dealt out as the controller deals them. Collective."""
    recipe, full = critic_recipe(folder, **algorithm), episodes.block
    spec = CriticSpec(
        recipe=recipe, folder=folder, checkpoints=folder / "critic", beside=folder / "critic", resume_step=None
    )
    critic = CriticRank(context_on(mesh, "critic"), spec)
    mine = even_parts(full.lengths_N, mesh.data_ranks)[mesh.data_rank]
    rows = refs_of(full).take(mine)
    shard = ValueShard(
        rows=rows,
        rewards_N=episodes.rewards_N[mine],
        turn_rewards=TurnRewards.none(),
        reference=refs_of(TokenColumn.like(full, episodes.reference_T)).select(rows.ids),
    )
    found = critic.estimate(shard, recipe.algorithm, 0.3)
    parts = [part for part in mesh.gather((found.rows, found.note) if mesh.speaks_for_data else None) if part]
    columns = refs_of(ValueColumns.concatenate([part for part, _ in parts])).read()
    batches = ((np.arange(len(mine)),),)
    update = critic.update(CriticShard(rows=rows, columns=refs_of(columns).select(rows.ids), batches=batches), 0.0)
    return Estimated(
        columns=columns,
        moments=tuple(float(sum(getattr(note, name) for _, note in parts)) for name in ("count", "sum", "sum_squares")),
        loss=update.note.losses[0],
        grad_norm=update.note.grad_norms[0],
    )


# --- several ranks ---


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UpdateTask:
    """Cases for one group of ranks."""

    policy: Path
    critic: Path
    episodes: Episodes
    cases: Mapping[str, Case]
    model: Mapping[str, Any] = field(default_factory=dict)  # keys of the model's section


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UpdateResult:
    by_case: dict[str, Updated]
    lopsided: Updated  # a budget so small that some ranks have nothing in some micro-steps
    four_steps: Tensor  # the weights after four optimizer steps
    estimated: Estimated
    scored_T: np.ndarray  # log-probs of all rows


def update_rank(place: RankPlace, task: UpdateTask) -> UpdateResult:
    """All work of one group of ranks, in one start of processes."""
    with mesh_of(place) as mesh:
        return update_on(mesh, task)


def update_on_meshes(
    place: RankPlace, shapes: Sequence[MeshSizes], tasks: Mapping[str, UpdateTask]
) -> dict[str, dict[str, UpdateResult]]:
    """Shape -> name of a task -> its result, over one process group."""
    with mesh_of(place) as ranks:
        meshes = {str(sizes): with_axes(ranks, sizes, timeout_s=120) for sizes in shapes}
        return {shape: {name: update_on(mesh, task) for name, task in tasks.items()} for shape, mesh in meshes.items()}


def update_on(mesh: Mesh, task: UpdateTask) -> UpdateResult:
    """The same on a mesh that stands."""
    engine = _engine_of(mesh, task)
    scored_T = score(engine.language_model, mesh, task.episodes.block, temperature=task.episodes.temperature).values_T
    by_case = {name: run_update(engine, task.episodes, case) for name, case in task.cases.items()}
    lopsided = run_update(engine, task.episodes, CASES["clipped"], max_tokens=13)
    engine = _engine_of(mesh, task)  # updates with lr 0 change moments
    run_update(engine, task.episodes, CASES["entropy"], steps=4, lr=1e-3)
    weights = assembled(engine, {each.name: each.master for each in engine.optimizer.trained})
    return UpdateResult(
        by_case=by_case,
        lopsided=lopsided,
        four_steps=torch.cat([each.flatten() for each in weights.values()]),
        estimated=estimate_and_learn(mesh, task.critic, task.episodes, gamma=0.95, lam=0.9),
        scored_T=scored_T,
    )


def _engine_of(mesh: Mesh, task: UpdateTask) -> RecordingEngine:
    engine = recording_engine(task.policy, mesh, **task.model)
    with torch.no_grad():  # an adapter begins at zero, where half of its gradients are
        for each in engine.optimizer.trained:
            if ".lora_B." in each.name:
                whole = torch.linspace(-0.3, 0.3, each.shape[0] * each.shape[1]).view(each.shape)
                each.master.copy_(whole[each.box.slices()])
                each.publish()
    return engine


# --- whole runs ---


def session_of(leader: int) -> set[int]:
    """Living processes of a session. Ray's workers leave the process group of Ray's starter, and stay in its
    session."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                state, _, _, session = entry.joinpath("stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == leader and state != "Z":
                    found.add(int(entry.name))
    return found


@contextmanager
def podium(*arguments: str, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a session of its own; nothing of the session is left afterwards."""
    with started(["-m", "podium", *arguments], output) as process:
        yield process
    # Ray's own agents notice the end of their driver within a minute.
    wait_until(lambda: not session_of(process.pid), "the end of the session", deadline_s=90)


def said_by(*arguments: str, output: Path, code: int = 0, deadline_s: float = 240.0) -> str:
    """Runs to its end; returns what it said."""
    with podium(*arguments, output=output) as process:
        assert process.wait(deadline_s) == code, output.read_text()
    return output.read_text()


def rl_recipe(workspace: Any, name: str = "sums", /, **changes: Any) -> str:
    """Writes NAME.yaml: three steps of four prompts with four samples each, inline, on sums. What a change replaces is
    keys of its section; threads and oneDNN are fixed, because they change the order of sums."""
    values: dict[str, Any] = {
        "program": "grpo",
        "optimizer": {"lr": 3e-3},
        "steps": 3,
        "reward": [{"function": "rewards.py:digits"}],
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 6},
        "placement": {"launcher": "inline"},
        "checkpoint": {"background": False},
    }
    for key, change in changes.items():
        values[key] = {**values.get(key, {}), **change} if isinstance(change, dict) else change
    if not (workspace.path / "rewards.py").exists():
        (workspace.path / "rewards.py").write_text(REWARDS)
    return str(workspace.recipe(name, **values))


# A reward that an untrained model gets now and then, so that groups differ: the share of digits in its answer.
REWARDS = """
def digits(answer, reference):
    return sum(letter.isdigit() for letter in answer) / max(1, len(answer))
"""
# What a step computes, beside how long it took and how much of the work could be shared.
TIMES = ("_s", "mfu", "per_s", "cache_used", "reused_tokens", "prefilled_tokens", "preemptions")


def numbers(run: Path) -> dict[int, dict[str, float]]:
    """Step -> all metrics but times, exactly as recorded; lines of one step together."""
    found: dict[int, dict[str, float]] = {}
    for line in read_metrics(run / "metrics.jsonl"):
        kept = {name: value for name, value in line.values.items() if not name.endswith(TIMES)}
        assert not kept.keys() & found.get(line.step, {}).keys(), f"step {line.step} is recorded twice"
        found[line.step] = {**found.get(line.step, {}), **kept}
    return found


def ledger(run: Path) -> list[tuple[Any, ...]]:
    """(prompt_index, sample, branch, attempt, step, state, tokens, reward) of every episode, in order of id."""
    file = sqlite3.connect(run / "episodes.sqlite")
    try:
        return file.execute(
            "SELECT prompt_index, sample, branch, attempt, step, state, tokens, reward FROM episodes "
            "ORDER BY 1, 2, 3, 4"
        ).fetchall()
    finally:
        file.close()
