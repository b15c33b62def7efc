# SPDX-License-Identifier: Apache-2.0
"""Steps of dpo, reward_model and distill: the gradient of a plain padded implementation, on any number of ranks."""

# N rows · L tokens of the longest · V vocabulary · K largest

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import logsigmoid

from helpers.adapters import save_peft_adapter, with_peft
from helpers.dense_steps import (
    VOCABULARY,
    Case,
    DenseTask,
    Stepped,
    dense_on,
    dense_rank,
    random_rows,
    scored,
    step_of,
)
from helpers.engines import one_rank
from helpers.meshes import name_of
from helpers.tiny import save_tiny_model, tiny_config
from podium.data.document_store import DocumentStore
from podium.data.documents import Document, Example
from podium.engine.scoring import summed_logprobs
from podium.programs.dpo import mismatched
from podium.recipe.dense import (
    DistillSection,
    IpoPreference,
    KtoPreference,
    OrpoPreference,
    RewardModelSection,
    SigmoidPreference,
    SimpoPreference,
)
from podium.recipe.policy_mesh import MeshSizes
from podium.spmd.launch import launch

SAME = 1e-5
MESHES = [
    pytest.param(sizes, marks=pytest.mark.slow, id=name_of(sizes))
    for sizes in (
        MeshSizes(shard=2),
        MeshSizes(shard=4),
        MeshSizes(tensor=2),
        MeshSizes(replicate=2, tensor=2),
        MeshSizes(context=2),
        MeshSizes(shard=2, context=2),
        MeshSizes(context=2, tensor=2),
    )
]
TOP = 7

CASES = {
    "sigmoid": Case(
        section=SigmoidPreference(beta=0.3, label_smoothing=0.1, cross_entropy=0.2), source="live"
    ),
    "ipo": Case(section=IpoPreference(beta=0.4), source="live"),
    "simpo": Case(section=SimpoPreference(beta=2.0, gamma=0.7, label_smoothing=0.05)),
    "orpo": Case(section=OrpoPreference(beta=0.3)),
    "kto": Case(
        section=KtoPreference(beta=0.2, desirable_weight=1.5, undesirable_weight=0.7), source="live"
    ),
    "ranked": Case(section=RewardModelSection(center=0.05)),
    "scores": Case(section=RewardModelSection(learns="scores")),
    "forward": Case(section=DistillSection(temperature=1.5)),
    "reverse": Case(section=DistillSection(divergence="reverse_kl", cross_entropy=0.3)),
    "jsd": Case(section=DistillSection(divergence="jsd", jsd_beta=0.3), teachers=(3.0, 1.0)),
    "top": Case(section=DistillSection(targets="cached", top_k=TOP, temperature=1.5), source="stored"),
    # The same in other ways.
    "sigmoid stored": Case(
        section=SigmoidPreference(beta=0.3, label_smoothing=0.1, cross_entropy=0.2), source="stored"
    ),
    "adapter live": Case(section=SigmoidPreference(beta=0.3), source="live", adapted=True),
    "adapter base": Case(section=SigmoidPreference(beta=0.3), source="base", adapted=True),
    # Fewer rows than ranks, so that some have nothing at all.
    "one pair": Case(section=SigmoidPreference(beta=0.3), source="live", rows=(4,)),
    "one label": Case(section=KtoPreference(beta=0.3), source="live", rows=(4,)),
    "one ranked": Case(section=RewardModelSection(), rows=(4,)),
    "one score": Case(section=RewardModelSection(learns="scores"), rows=(4,)),
    "one document": Case(section=DistillSection(), rows=(4,)),
}  # fmt: skip
PLAIN = ("sigmoid", "ipo", "simpo", "orpo", "kto", "ranked", "scores", "forward", "reverse", "jsd", "top")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> DenseTask:
    folder = tmp_path_factory.mktemp("dense")
    # Rows that do not divide by 4 ranks; a soft cap and a scale in the teachers' heads, but not in the student's.
    policy = save_tiny_model("qwen3", folder / "policy", intermediate_size=50)
    reference = save_tiny_model("qwen3", folder / "reference", seed=1)
    teacher = save_tiny_model("gemma2", folder / "teacher", seed=2)
    torch.manual_seed(3)
    scalar = transformers.AutoModelForSequenceClassification.from_config(tiny_config("qwen3", num_labels=1))
    with torch.no_grad():
        for parameter in scalar.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    scalar.save_pretrained(folder / "scalar")
    pairs, scores = random_rows("pairs", seed=0), random_rows("scores", seed=2)
    # With a baseline of KTO above 0, and without padding longer than the teacher's window: transformers' own forward
    # has no numbers there.
    labels = random_rows("labels", seed=37)
    adapter = save_peft_adapter(reference, folder / "adapter")
    task = DenseTask(
        policy=policy, scalar=folder / "scalar", others=(reference, teacher), adapter=adapter, stores=folder / "stores",
        pairs=pairs, labels=labels, scores=scores, cases=CASES,
    )  # fmt: skip
    keep_reference(task)
    keep_top(task, TOP, 1.5, task.stores / "teachers")
    return task


# --- the plain implementation: padded rows, float64, transformers and torch alone ----------------------------------


def model_of(folder: Path, kind: Any = transformers.AutoModelForCausalLM) -> Any:
    return kind.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()


def padded(documents: Sequence[Document]) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens [N, L], attention mask, which tokens are trained), padded on the right."""
    longest = max(len(each.tokens) for each in documents)
    tokens, mask, trained = (torch.zeros(len(documents), longest, dtype=torch.long) for _ in range(3))
    for row, each in enumerate(documents):
        tokens[row, : len(each.tokens)] = torch.from_numpy(each.tokens.astype(np.int64))
        mask[row, : len(each.tokens)] = 1
        trained[row, : len(each.tokens)] = torch.from_numpy(each.trained.astype(np.int64))
    return tokens, mask, trained


def next_logits(model: Any, documents: Sequence[Document]) -> tuple[Tensor, Tensor, Tensor]:
    """(logits [N, L - 1, V], targets, 1 where the target is trained)."""
    tokens, mask, trained = padded(documents)
    logits = model(input_ids=tokens, attention_mask=mask).logits[:, :-1]
    return logits, tokens[:, 1:], trained[:, 1:].double()


def completions(model: Any, documents: Sequence[Document]) -> tuple[Tensor, Tensor]:
    """Of each: the summed log-prob, and of how many tokens."""
    logits, targets, trained = next_logits(model, documents)
    logprobs = torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]
    return (logprobs * trained).sum(1), trained.sum(1)


def pair_loss(loss: str, policy: Any, reference: Any, rows: Sequence[Example]) -> Tensor:
    (chosen, n), (rejected, m) = (completions(policy, [row.documents[side] for row in rows]) for side in (0, 1))
    with torch.no_grad():
        (ref_chosen, _), (ref_rejected, _) = (
            completions(reference, [row.documents[side] for row in rows]) for side in (0, 1)
        )
    if loss == "sigmoid":
        lead = 0.3 * ((chosen - ref_chosen) - (rejected - ref_rejected))
        each = -0.9 * logsigmoid(lead) - 0.1 * logsigmoid(-lead) - 0.2 * chosen / n
    elif loss == "ipo":
        each = ((chosen - ref_chosen) / n - (rejected - ref_rejected) / m - 1 / (2 * 0.4)) ** 2
    elif loss == "simpo":
        lead = 2.0 * (chosen / n - rejected / m) - 0.7
        each = -0.95 * logsigmoid(lead) - 0.05 * logsigmoid(-lead)
    else:
        odds = [mean - torch.log1p(-mean.exp()) for mean in (chosen / n, rejected / m)]
        each = -chosen / n - 0.3 * logsigmoid(odds[0] - odds[1])
    return each.mean()


def swapped(rows: Sequence[Example]) -> list[Document]:
    """Every prompt with the whole completion of the next row."""
    found = []
    for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        mine, theirs = row.documents[0], other.documents[0]
        start, said = int(mine.trained.argmax()), int(theirs.trained.argmax())
        tokens = np.concatenate([mine.tokens[:start], theirs.tokens[said:]])
        trained = np.concatenate([np.zeros(start, bool), theirs.trained[said:]])
        found.append(Document(tokens=tokens, trained=trained))
    return found


def plain_baseline(policy: Any, reference: Any, rows: Sequence[Example]) -> Tensor:
    with torch.no_grad():
        far = completions(policy, swapped(rows))[0] - completions(reference, swapped(rows))[0]
        return far.mean().clamp(min=0)


def kto_loss(policy: Any, reference: Any, rows: Sequence[Example]) -> Tensor:
    documents = [row.documents[0] for row in rows]
    with torch.no_grad():
        known = completions(reference, documents)[0]
    ahead = 0.2 * (completions(policy, documents)[0] - known - plain_baseline(policy, reference, rows))
    good = torch.tensor([row.value == 1 for row in rows])
    return torch.where(good, 1.5 * (1 - torch.sigmoid(ahead)), 0.7 * (1 - torch.sigmoid(-ahead))).mean()


def last_scores(model: Any, documents: Sequence[Document]) -> Tensor:
    """Read at the last token but the one that the model never sees."""
    tokens, mask, _ = padded(documents)
    states = model.model(input_ids=tokens, attention_mask=mask).last_hidden_state
    return model.score(states)[torch.arange(len(documents)), mask.sum(1) - 2, 0]


def ranked_loss(model: Any, rows: Sequence[Example]) -> Tensor:
    chosen, rejected = (last_scores(model, [row.documents[side] for row in rows]) for side in (0, 1))
    margins = torch.tensor([row.value for row in rows], dtype=torch.float64)
    return (-logsigmoid(chosen - rejected - margins) + 0.05 * (chosen + rejected) ** 2).mean()


def score_loss(model: Any, rows: Sequence[Example]) -> Tensor:
    wanted = torch.tensor([row.value for row in rows], dtype=torch.float64)
    return ((last_scores(model, [row.documents[0] for row in rows]) - wanted) ** 2).mean()


def kl(left: Tensor, right: Tensor) -> Tensor:
    return (left.exp() * (left - right)).sum(-1)


def distill_loss(kind: str, student: Any, teachers: Sequence[Any], rows: Sequence[Example]) -> Tensor:
    documents = [row.documents[0] for row in rows]
    logits, targets, trained = next_logits(student, documents)
    heat = 1.5 if kind in ("forward", "top") else 1.0
    with torch.no_grad():
        said = [torch.log_softmax(next_logits(each, documents)[0] / heat, -1) for each in teachers]
    mine = torch.log_softmax(logits / heat, -1)
    if kind == "forward":
        each = kl(said[0], mine)
    elif kind == "reverse":
        entropy = -torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]
        each = 0.7 * kl(mine, said[0]) + 0.3 * entropy
    elif kind == "jsd":
        theirs = (0.75 * said[0].exp() + 0.25 * said[1].exp()).log()
        middle = (0.3 * theirs.exp() + 0.7 * mine.exp()).log()
        each = 0.3 * kl(theirs, middle) + 0.7 * kl(mine, middle)
    else:
        known, ids = said[0].topk(TOP, -1)
        matching = mine.gather(-1, ids)
        rest = (1 - known.exp().sum(-1)).log(), (1 - matching.exp().sum(-1)).log()
        each = kl(known, matching) + rest[0].exp() * (rest[0] - rest[1])
    return (each * trained).sum() / trained.sum()


def plain(task: DenseTask, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradient by name of the parameter."""
    if name in ("ranked", "scores"):
        model = model_of(task.scalar, transformers.AutoModelForSequenceClassification)
        loss = ranked_loss(model, scored(task.pairs)) if name == "ranked" else score_loss(model, task.scores)
    else:
        model, reference = model_of(task.policy), model_of(task.others[0])
        if name == "kto":
            loss = kto_loss(model, reference, task.labels)
        elif name in ("sigmoid", "ipo", "simpo", "orpo"):
            loss = pair_loss(name, model, reference, task.pairs)
        else:
            loss = distill_loss(name, model, [reference, model_of(task.others[1])], task.labels)
    loss.backward()
    return loss.detach(), {each: parameter.grad for each, parameter in model.named_parameters()}


def keep_reference(task: DenseTask) -> None:
    """The reference's log-probs as the plain implementation has them, where a pass would keep them."""
    documents = [document for row in task.pairs for document in row.documents]
    with torch.no_grad():
        sums = completions(model_of(task.others[0]), documents)[0]
    (task.stores / "reference").mkdir(parents=True)
    store = DocumentStore(task.stores / "reference")
    store.write(0, documents, [1] * len(documents), {"logprob": sums.float().numpy()})
    store.finish_part(1, is_main=True)


def keep_top(task: DenseTask, top: int, heat: float, folder: Path) -> None:
    """The first teacher's largest log-probs, likewise."""
    documents = [row.documents[0] for row in task.labels]
    with torch.no_grad():
        logits, _, trained = next_logits(model_of(task.others[0]), documents)
    known, ids = torch.log_softmax(logits / heat, -1).topk(top, -1)
    chosen = trained.bool()
    folder.mkdir(parents=True)
    store = DocumentStore(folder)
    columns = {"ids": ids[chosen].int().numpy(), "logprobs": known[chosen].float().numpy()}
    store.write(0, documents, [each.num_trained for each in documents], columns)
    store.finish_part(1, is_main=True)


# --- what must hold ------------------------------------------------------------------------------------------------


def flat_like(found: Stepped, wanted: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Both as one vector, without the padding rows of the vocabulary; those have no gradient."""
    assert set(found.gradient) == set(wanted)
    parts = []
    for name, tensor in found.gradient.items():
        rows = len(wanted[name])
        assert not tensor[rows:].any()
        parts.append(tensor[:rows].flatten().double())
    return torch.cat(parts), torch.cat([wanted[name].flatten() for name in found.gradient])


def distance(left: Tensor, right: Tensor) -> float:
    return float((left - right).norm() / right.norm())


@pytest.fixture(scope="module")
def alone(task: DenseTask) -> dict[str, Stepped]:
    """One rank, in this process."""
    return dense_on(one_rank(), task)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_the_gradient_is_that_of_a_plain_padded_implementation(
    task: DenseTask, alone: dict[str, Stepped], name: str
) -> None:
    loss, gradient = plain(task, name)
    found, wanted = flat_like(alone[name], gradient)
    # A divergence of some thousandths is the sum of log-probs of some units: float32 leaves it a few 1e-7.
    assert alone[name].loss == pytest.approx(loss.item(), rel=1e-5, abs=5e-7)
    assert alone[name].measured["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=5e-7)
    assert wanted.norm() > 1e-3
    assert distance(found, wanted) < SAME


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("sigmoid", "ranked", "reverse") else pytest.param(name, marks=pytest.mark.slow)
        for name in PLAIN
    ],
)
def test_neither_the_budget_of_a_micro_batch_nor_the_order_of_rows_changes_it(
    task: DenseTask, alone: dict[str, Stepped], name: str
) -> None:
    # KTO pairs neighbours, so there the order is turned, which keeps who is next to whom.
    turned, mixed = (4, 5, 6, 7, 8, 0, 1, 2, 3), (3, 8, 0, 5, 1, 7, 2, 6, 4)
    order = turned if name == "kto" else mixed
    changed = {
        str(tokens): replace(CASES[name], max_tokens=tokens, rows=rows) for tokens, rows in ((1, order), (10_000, None))
    }
    for found in dense_on(one_rank(), replace(task, cases=changed)).values():
        assert distance(found.flat, alone[name].flat) < SAME
        assert found.loss == pytest.approx(alone[name].loss, rel=1e-5)
        assert found.averages == pytest.approx(alone[name].averages, rel=1e-4, abs=1e-5)
        assert found.measured == pytest.approx(alone[name].measured, rel=1e-4, abs=1e-5)


def test_a_head_that_looks_at_a_few_tokens_at_a_time_changes_nothing(
    task: DenseTask, alone: dict[str, Stepped]
) -> None:
    """A loss of whole rows then needs all log-probs before the first gradient; one of tokens slices its teacher's."""
    names = ("sigmoid", "kto", "reverse", "top")
    cases = {name: replace(CASES[name], chunk=3, max_tokens=10_000) for name in names}
    for name, found in dense_on(one_rank(), replace(task, cases=cases)).items():
        assert distance(found.flat, alone[name].flat) < SAME
        assert found.loss == pytest.approx(alone[name].loss, rel=1e-5)
        assert found.averages == pytest.approx(alone[name].averages, rel=1e-4, abs=1e-5)
        assert found.measured == pytest.approx(alone[name].measured, rel=1e-4, abs=1e-5)


def test_a_stored_reference_and_the_base_of_an_adapter_are_the_live_one(
    task: DenseTask, alone: dict[str, Stepped]
) -> None:
    for same, live in (("sigmoid stored", "sigmoid"), ("adapter base", "adapter live")):
        assert alone[same].loss == pytest.approx(alone[live].loss, rel=1e-5)
        assert distance(alone[same].flat, alone[live].flat) < SAME
        assert alone[same].averages == pytest.approx(alone[live].averages, rel=1e-4, abs=1e-5)
    adapted = with_peft(task.others[0], task.adapter).double()
    reference = model_of(task.others[0])
    with torch.no_grad():
        (chosen, _), (rejected, _) = (completions(adapted, [r.documents[s] for r in task.pairs]) for s in (0, 1))
        (known, _), (other, _) = (completions(reference, [r.documents[s] for r in task.pairs]) for s in (0, 1))
        loss = -logsigmoid(0.3 * (chosen - known - rejected + other)).mean()
    assert alone["adapter base"].loss == pytest.approx(loss.item(), rel=1e-5)
    assert abs(loss.item() - math.log(2)) > 1e-2  # the adapter says something


@pytest.mark.parametrize(
    "section",
    [
        DistillSection(temperature=1.5),
        DistillSection(divergence="reverse_kl", temperature=1.5, cross_entropy=0.4),
        DistillSection(divergence="jsd", jsd_beta=0.7, temperature=1.5),
    ],
    ids=lambda section: section.divergence,
)
def test_a_stored_top_of_the_whole_vocabulary_is_the_live_teacher(
    task: DenseTask, section: DistillSection, tmp_path: Path
) -> None:
    keep_top(task, VOCABULARY, 1.5, tmp_path / "teachers")
    stored = section.model_copy(update={"targets": "cached", "top_k": VOCABULARY})
    cases = {"live": Case(section=section), "stored": Case(section=stored, source="stored")}
    found = dense_on(one_rank(), replace(task, stores=tmp_path, cases=cases))
    assert found["stored"].loss == pytest.approx(found["live"].loss, rel=1e-5)
    assert distance(found["stored"].flat, found["live"].flat) < SAME
    assert found["stored"].averages == pytest.approx(found["live"].averages, rel=1e-4)


def test_a_teacher_that_is_named_twice_is_the_teacher(task: DenseTask) -> None:
    one = Case(section=DistillSection())
    cases = {"once": one, "twice": replace(one, teachers=(0.2, 5.0))}
    same = replace(task, others=(task.others[1], task.others[1]), cases=cases)
    found = dense_on(one_rank(), same)
    assert distance(found["twice"].flat, found["once"].flat) < SAME


def test_ktos_baseline_is_the_clipped_mean_over_swapped_completions(task: DenseTask, alone: dict[str, Stepped]) -> None:
    wanted = plain_baseline(model_of(task.policy), model_of(task.others[0]), task.labels)
    assert wanted > 0  # else the clip would hide it
    assert alone["kto"].averages["kl"] == pytest.approx(wanted.item(), rel=1e-4)


def row_of(prompt: Sequence[int], completion: Sequence[int]) -> Example:
    tokens = np.array([*prompt, *completion], np.int32)
    return Example(documents=(Document(tokens=tokens, trained=np.arange(len(tokens)) >= len(prompt)),))


def test_a_mismatched_row_has_the_whole_completion_of_the_other() -> None:
    long_prompt, long_completion = row_of([1, 2, 3, 4, 5], [6]), row_of([7], [8, 9, 10, 11])
    (mixed,) = mismatched(long_prompt, long_completion, max_length=20).documents
    assert mixed.tokens.tolist() == [1, 2, 3, 4, 5, 8, 9, 10, 11]  # longer than either row
    assert mixed.trained.tolist() == [False] * 5 + [True] * 4
    (mixed,) = mismatched(long_completion, long_prompt, max_length=20).documents
    assert (mixed.tokens.tolist(), mixed.trained.tolist()) == ([7, 6], [False, True])


def test_a_mismatched_row_ends_at_the_longest_document_that_the_run_takes() -> None:
    """And where only tokens follow there that are not trained, before them."""
    (mixed,) = mismatched(row_of([1, 2, 3], [4]), row_of([5], [6, 7, 8]), max_length=4).documents
    assert mixed.tokens.tolist() == [1, 2, 3, 6, 7]
    gap = Document(tokens=np.array([5, 6, 7, 8], np.int32), trained=np.array([False, True, False, True]))
    (mixed,) = mismatched(row_of([1, 2, 3], [4]), Example(documents=(gap,)), max_length=4).documents
    assert (mixed.tokens.tolist(), mixed.trained.tolist()) == ([1, 2, 3, 6], [False, False, False, True])


def test_ktos_baseline_keeps_to_the_budget_of_a_micro_batch(task: DenseTask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts meet long completions: rows that fit a forward one by one would not fit it any more."""
    rows = tuple(row_of(range(1, 20), [5]) if at % 2 else row_of([5], range(1, 20)) for at in range(8))
    sizes: list[int] = []

    def watched(model: Any, mesh: Any, batch: Any) -> Tensor:
        sizes.append(batch.packed.num_tokens)
        return summed_logprobs(model, mesh, batch)

    monkeypatch.setattr("podium.programs.dpo.summed_logprobs", watched)
    case = Case(section=KtoPreference(), source="live", max_tokens=45)
    step_of(one_rank(), replace(task, labels=rows), case)
    assert sizes
    assert max(sizes) <= 45


# --- several ranks -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def groups() -> dict[MeshSizes, dict[str, Stepped]]:
    """Filled as worlds are asked for."""
    return {}


@pytest.fixture(params=MESHES)
def several(
    request: pytest.FixtureRequest, task: DenseTask, groups: dict[MeshSizes, dict[str, Stepped]], tmp_path: Path
) -> dict[str, Stepped]:
    if request.param not in groups:
        groups[request.param] = launch(
            dense_rank, (task, request.param), ranks=request.param.devices, restarts=0, stop_file=tmp_path / "stop"
        )
    return groups[request.param]


@pytest.mark.parametrize("name", CASES)
def test_ranks_together_have_the_step_of_one(alone: dict[str, Stepped], several: dict[str, Stepped], name: str) -> None:
    found, wanted = several[name], alone[name]
    assert distance(found.flat, wanted.flat) < SAME
    # As above: the small divergence of large log-probs.
    assert found.loss == pytest.approx(wanted.loss, rel=1e-5, abs=5e-7)
    assert found.averages == pytest.approx(wanted.averages, rel=1e-4, abs=1e-5)
    assert found.measured == pytest.approx(wanted.measured, rel=1e-4, abs=1e-5)
