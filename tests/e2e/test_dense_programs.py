# SPDX-License-Identifier: Apache-2.0
"""dpo, reward_model and distill as a user runs them: they learn, go on after a break, and keep what they computed."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from helpers.on_policy import rl_recipe
from helpers.processes import assert_gone, started, wait_until
from helpers.tiny import save_tiny_model, tiny_tokenizer
from helpers.workspace import Outcome, Workspace

HELDOUT = {"heldout": [{"path": "heldout.jsonl"}]}
# Stops the run as the step in its name is recorded; step 0 is before the first.
STOPPER = """
from pathlib import Path

class Stopper:
    def __init__(self, folder, step):
        self.file, self.step = Path(folder) / "stop-requested", step
        self.log_step(0)
    def log_step(self, step):
        if step == self.step:
            self.file.touch()
    def log(self, metrics):
        self.log_step(metrics.step)
    def text(self, step, name, text):
        pass
    def close(self):
        pass

def at_once(folder):
    return Stopper(folder, 0)

def after_3(folder):
    return Stopper(folder, 3)
"""
# Stays for ever behind the second part of a pass. A logger is loaded inside the rank, so it can reach into it.
STUCK = """
import threading
from podium.data.document_store import DocumentStore

class Nothing:
    def log(self, metrics): pass
    def text(self, step, name, text): pass
    def close(self): pass

def logger(folder):
    plain = DocumentStore.finish_part
    def finish_part(self, *args, **options):
        plain(self, *args, **options)
        if self._num_parts == 2:
            threading.Event().wait()
    DocumentStore.finish_part = finish_part
    return Nothing()
"""


def pairs(count: int, seed: int) -> list[dict[str, Any]]:
    """The chosen answer says a number, the rejected one has no idea."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        left, right = draw.randrange(100), draw.randrange(100)
        chosen, rejected = f"it is {left + right}.", f"no idea {draw.randrange(1000)}"
        rows.append(
            {
                "prompt": [{"role": "user", "content": f"what is {left}+{right}?"}],
                "chosen": [{"role": "assistant", "content": chosen}],
                "rejected": [{"role": "assistant", "content": rejected}],
            }
        )
    return rows


def judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same as single answers with a label and a score."""
    return [
        {
            "prompt": row["prompt"],
            "completion": row[side],
            "label": side == "chosen",
            "score": 1.0 if side == "chosen" else -1.0,
        }
        for row in rows
        for side in ("chosen", "rejected")
    ]


def write_pairs(workspace: Workspace, count: int = 200) -> None:
    workspace.rows("train.jsonl", pairs(count, 1))
    workspace.rows("heldout.jsonl", pairs(40, 2))


def dense(workspace: Workspace, name: str = "sums", program: str = "dpo", **changes: Any) -> str:
    """Six steps of 8 rows."""
    values: dict[str, Any] = {"program": program, "rows_per_step": 8, "steps": 6, **changes}
    return workspace.recipe(name, **values)


def trained(workspace: Workspace, recipe: str, *more: str) -> Outcome:
    outcome = workspace.podium("train", recipe, *more)
    assert outcome.code == 0, outcome
    assert "Traceback" not in outcome.out + outcome.err
    return outcome


def save_model(folder: Path, **changes: Any) -> Path:
    """A model with the tokenizer of all these tests, so that another may be its teacher."""
    tokenizer = tiny_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    save_tiny_model("qwen3", folder, **{"vocab_size": len(tokenizer), **ends, **changes})
    tokenizer.save_pretrained(folder)
    return folder


# --- learning ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss", ["sigmoid", *(pytest.param(each, marks=pytest.mark.slow) for each in ("ipo", "simpo", "orpo"))]
)
def test_dpo_goes_from_a_coins_accuracy_to_nearly_all_held_out_pairs(workspace: Workspace, loss: str) -> None:
    write_pairs(workspace)
    trained(workspace, dense(
        workspace, preference={"loss": loss}, data=HELDOUT, steps=15, rows_per_step=16, optimizer={"lr": 3e-3},
        evaluation={"at_start": True},
    ))  # fmt: skip

    accuracy, margin = (workspace.metric("sums", f"heldout/{name}") for name in ("accuracy", "reward_margin"))
    if loss in ("sigmoid", "ipo"):
        assert accuracy[0] == 0.5  # the policy is its own reference
        assert margin[0] == pytest.approx(0.0, abs=1e-5)
    assert accuracy[15] > 0.9
    assert margin[15] > margin[0]
    assert workspace.metric("sums", "accuracy")[15] > 0.9
    assert set(workspace.metric("sums", "rows").values()) == {16.0}


@pytest.mark.slow
def test_kto_learns_which_answers_are_wanted(workspace: Workspace) -> None:
    workspace.rows("train.jsonl", judged(pairs(150, 1)))
    workspace.rows("heldout.jsonl", judged(pairs(20, 2)))
    trained(workspace, dense(
        workspace, preference={"loss": "kto"}, data=HELDOUT, steps=12, rows_per_step=16, optimizer={"lr": 3e-3},
        evaluation={"at_start": True},
    ))  # fmt: skip

    margin = workspace.metric("sums", "heldout/reward_margin")
    assert margin[0] == pytest.approx(0.0, abs=1e-5)
    assert margin[12] > 0.3
    assert workspace.metric("sums", "heldout/loss")[12] < workspace.metric("sums", "heldout/loss")[0] - 0.05


def test_a_reward_model_is_learned_exported_and_grades_for_grpo(workspace: Workspace) -> None:
    write_pairs(workspace)
    trained(workspace, dense(
        workspace, program="reward_model", reward_model={"center": 0.01}, data=HELDOUT, steps=15, rows_per_step=16,
        optimizer={"lr": 3e-3}, evaluation={"at_start": True},
    ))  # fmt: skip
    accuracy = workspace.metric("sums", "heldout/accuracy")
    assert accuracy[0] == 0.5  # a new head says 0 of everything
    assert accuracy[15] > 0.9
    assert workspace.metric("sums", "heldout/brier_score")[15] < 0.1

    assert workspace.podium("export", "runs/sums", "judge").code == 0
    judge = transformers.AutoModelForSequenceClassification.from_pretrained("judge", dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained("judge")
    chosen, rejected = (plain_scores(judge, tokenizer, side) for side in ("chosen", "rejected"))
    margin = (chosen - rejected).mean().item()
    assert margin == pytest.approx(workspace.metric("sums", "heldout/score_margin")[15], rel=1e-4)
    assert (chosen > rejected).float().mean().item() == pytest.approx(accuracy[15])

    tasks = [{"messages": row["prompt"]} for row in pairs(16, 3)]
    workspace.rows("tasks.jsonl", tasks)
    recipe = rl_recipe(
        workspace, "graded", data={"train": [{"path": "tasks.jsonl"}]}, reward=[{"model": "judge"}], steps=1
    )
    trained(workspace, recipe)
    assert any(name.startswith("reward/") for name in _metric_names(workspace, "graded"))


def plain_scores(judge: Any, tokenizer: Any, side: str) -> torch.Tensor:
    """A padded batch of whole conversations, as any user of transformers would score them."""
    rows = [json.loads(line) for line in Path("heldout.jsonl").read_text().splitlines()]
    texts = [tokenizer.apply_chat_template(row["prompt"] + row[side], tokenize=False) for row in rows]
    with torch.no_grad():
        return judge(**tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)).logits[:, 0]


def _metric_names(workspace: Workspace, run: str) -> set[str]:
    lines = (workspace.path / "runs" / run / "metrics.jsonl").read_text().splitlines()
    return {name for line in lines for name in json.loads(line)}


@pytest.mark.slow
def test_a_reward_model_learns_scores(workspace: Workspace) -> None:
    workspace.rows("train.jsonl", judged(pairs(150, 1)))
    workspace.rows("heldout.jsonl", judged(pairs(20, 2)))
    trained(workspace, dense(
        workspace, program="reward_model", reward_model={"learns": "scores"}, data=HELDOUT, steps=25, rows_per_step=16,
        optimizer={"lr": 3e-3}, evaluation={"at_start": True},
    ))  # fmt: skip
    squared = workspace.metric("sums", "heldout/r_squared")
    assert squared[0] == pytest.approx(0.0, abs=1e-6)
    assert squared[25] > 0.9
    assert workspace.metric("sums", "heldout/correlation")[25] > 0.95


@pytest.fixture(scope="module")
def numbers() -> list[str]:
    words = [f"{number:03d}" for number in range(1000)]
    random.Random(0).shuffle(words)
    return words


@pytest.mark.slow  # fast: tests/golden[distill] and the gradients in tests/spmd/test_dense_gradients.py
def test_a_smaller_student_answers_as_its_teacher_whatever_the_data_says(
    workspace: Workspace, numbers: list[str]
) -> None:
    """The teacher learned to say the first digit. The student's data has answers drawn at random, so what it knows at
    the end it has from the teacher."""
    draw = random.Random(1)

    def chats(words: list[str], *, right: bool) -> list[dict[str, Any]]:
        answers = [word[0] if right else draw.choice("0123456789") for word in words]
        return [
            {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": answer}]}
            for word, answer in zip(words, answers, strict=True)
        ]

    workspace.rows("right.jsonl", chats(numbers[:800], right=True))
    workspace.rows("noise.jsonl", chats(numbers[:800], right=False))
    workspace.rows("heldout.jsonl", chats(numbers[800:860], right=True))
    save_model(workspace.path / "small", num_hidden_layers=1, intermediate_size=32, seed=4)
    generation = {"prompts": 60, "max_new_tokens": 3, "show": 0, "score": "exact_match"}
    learning = {
        "rows_per_step": 32,
        "optimizer": {"lr": 1e-2, "warmup_steps": 5, "schedule": "linear"},
        "evaluation": {"at_start": True, "generation": generation},
    }
    trained(
        workspace,
        dense(workspace, "teacher", "sft", steps=80, data={"train": [{"path": "right.jsonl"}], **HELDOUT}, **learning),
    )
    assert workspace.metric("teacher", "heldout/score")[80] > 0.95
    assert workspace.podium("export", "runs/teacher", "big").code == 0

    trained(workspace, dense(
        workspace, "student", "distill", model={"path": "small"}, teachers=[{"path": "big"}], steps=50,
        data={"train": [{"path": "noise.jsonl"}], **HELDOUT}, **learning,
    ))  # fmt: skip
    score, agreement = (workspace.metric("student", f"heldout/{name}") for name in ("score", "agreement"))
    assert score[0] < 0.3
    assert score[50] > 0.95
    assert agreement[50] > 0.95
    divergence = workspace.metric("student", "heldout/divergence")
    assert divergence[50] < 0.1 * divergence[0]


# --- going on ------------------------------------------------------------------------------------------------------

CACHED: dict[str, dict[str, Any]] = {
    "dpo": {},
    "distill": {"teachers": [{"path": "teacher"}], "distill": {"targets": "cached", "top_k": 8}},
}


def prepare(workspace: Workspace, program: str) -> None:
    if program == "dpo":
        write_pairs(workspace, 60)
    else:
        save_model(workspace.path / "teacher", seed=5)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["dpo", pytest.param("distill", marks=pytest.mark.slow)])
def test_a_stopped_run_continues_bit_for_bit_with_or_without_what_it_computed(
    workspace: Workspace, program: str
) -> None:
    prepare(workspace, program)
    (workspace.path / "stopper.py").write_text(STOPPER)
    every = {"every": 2, "background": False, "keep": 9}
    trained(workspace, dense(workspace, "whole", program, checkpoint=every, **CACHED[program]))
    whole = workspace.metric("whole", "loss")
    assert sorted(whole) == list(range(1, 7))

    outcome = workspace.podium("train", dense(
        workspace, "stopped", program, checkpoint=every, run={"loggers": ["stopper.py:after_3"]}, **CACHED[program]
    ))  # fmt: skip
    # Asked as step 3 is recorded, heard with step 4.
    assert re.search("stopped .*step 4; .*podium resume runs/stopped", outcome.out)
    assert workspace.podium("resume", "runs/stopped", "--set", "run.loggers=[]").code == 0
    assert workspace.metric("stopped", "loss") == whole

    # As after a kill: from the checkpoint of step 2, and what was computed is lost as well.
    shutil.rmtree(workspace.path / "runs/.cache")
    outcome = workspace.podium("resume", "runs/whole", "--step", "2")
    assert outcome.code == 0, outcome
    assert "computing the" in outcome.out
    assert workspace.metric("whole", "loss") == whole


@pytest.mark.slow
@pytest.mark.parametrize("program", ["dpo", pytest.param("distill", marks=pytest.mark.slow)])
def test_what_was_computed_is_used_again_until_data_or_model_change(workspace: Workspace, program: str) -> None:
    prepare(workspace, program)
    shutil.copytree(workspace.model, workspace.path / "mine")
    cache = workspace.path / "runs/.cache"

    def computes(name: str, **changes: Any) -> bool:
        values = {"model": {"path": "mine"}, "steps": 1, **CACHED[program], **changes}
        before = {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")}
        outcome = trained(workspace, dense(workspace, name, program, **values))
        after = {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")}
        assert before.items() <= after.items()
        assert ("computing the" in outcome.out) == (before != after)
        return before != after

    assert computes("first")
    assert not computes("second", optimizer={"lr": 1e-4}, rows_per_step=4, steps=2)
    (workspace.path / "train.jsonl").open("a").write(
        (workspace.path / "train.jsonl").read_text().splitlines()[0] + "\n"
    )
    assert computes("more-data")
    other = "teacher" if program == "distill" else "mine"
    shutil.rmtree(workspace.path / other)
    save_model(workspace.path / other, seed=9)
    assert computes("another-model")
    assert computes("shorter", data={"max_length": 60})
    (workspace.path / "other.jinja").write_text(tiny_tokenizer().chat_template.replace("user", "USER") + " ")
    assert computes("another-template", model={"path": "mine", "chat_template": "other.jinja"})
    if program == "dpo":
        assert computes("random", model={"path": "mine", "init": "random"})
        assert computes("random-again", model={"path": "mine", "init": "random"}, run={"seed": 1})
        assert workspace.metric("random-again", "loss")[1] == pytest.approx(0.6931, abs=1e-3)
    else:
        assert computes("hotter", distill={"targets": "cached", "top_k": 8, "temperature": 2.0})
        assert computes("wider", distill={"targets": "cached"})


@pytest.mark.slow
def test_a_stored_reference_or_teacher_gives_the_losses_of_a_live_one(workspace: Workspace) -> None:
    save_model(workspace.path / "teacher", seed=5)
    # More rows of embeddings than the tokenizer has tokens, as larger siblings of a model often have.
    save_model(workspace.path / "wide", seed=6, vocab_size=len(tiny_tokenizer()) + 9)
    for student, teacher in ((str(workspace.model), "teacher"), ("wide", "teacher"), ("teacher", "wide")):
        for name, distill in (("live", {}), ("cached", {"targets": "cached", "top_k": 1000})):  # more than there are
            changes = {"model": {"path": student}, "teachers": [{"path": teacher}], "distill": distill}
            trained(workspace, dense(workspace, name, "distill", **changes))
        assert workspace.metric("cached", "loss") == pytest.approx(workspace.metric("live", "loss"), rel=1e-4)
        assert workspace.metric("cached", "agreement") == workspace.metric("live", "agreement")
        for name in ("live", "cached"):
            shutil.rmtree(workspace.path / "runs" / name)
    write_pairs(workspace, 60)
    for name in ("live", "cached"):
        recipe = dense(workspace, f"{name}-dpo", preference={"reference": name, "reference_model": "teacher"})
        trained(workspace, recipe)
    assert workspace.metric("cached-dpo", "loss") == pytest.approx(workspace.metric("live-dpo", "loss"), rel=1e-5)


def long_pass(workspace: Workspace, name: str, **changes: Any) -> str:
    """A pass of several parts: each is 16 micro-batches of 200 tokens."""
    return dense(workspace, name, micro_batch_tokens=200, data={"max_length": 100}, steps=2, **changes)


def parts(workspace: Workspace) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (workspace.path / "runs/.cache").rglob("part-*.json")}


@pytest.mark.slow
def test_a_request_to_stop_is_heard_during_the_pass_and_the_same_command_continues(workspace: Workspace) -> None:
    write_pairs(workspace)
    (workspace.path / "stopper.py").write_text(STOPPER)
    trained(workspace, long_pass(workspace, "whole"))
    num_parts = len(parts(workspace))
    assert num_parts >= 3
    shutil.rmtree(workspace.path / "runs/.cache")

    outcome = workspace.podium("train", long_pass(workspace, "stopped", run={"loggers": ["stopper.py:at_once"]}))
    assert "Traceback" not in outcome.out + outcome.err
    assert outcome.code == 0
    assert "stopped" in outcome.out
    assert not (workspace.path / "runs/stopped/metrics.jsonl").exists()
    done = parts(workspace)
    assert len(done) == 1

    trained(workspace, long_pass(workspace, "stopped"))
    assert done.items() <= parts(workspace).items()
    assert len(parts(workspace)) == num_parts
    assert workspace.metric("stopped", "loss") == workspace.metric("whole", "loss")


@pytest.mark.slow
def test_a_pass_that_is_killed_continues_where_it_was(workspace: Workspace) -> None:
    write_pairs(workspace)
    (workspace.path / "stuck.py").write_text(STUCK)
    trained(workspace, long_pass(workspace, "whole"))
    shutil.rmtree(workspace.path / "runs/.cache")

    recipe = long_pass(workspace, "killed", run={"loggers": ["stuck.py:logger"]})
    with started(["-m", "podium", "train", recipe], workspace.path / "out") as process:
        wait_until(lambda: len(parts(workspace)) == 2, f"two parts: {(workspace.path / 'out').read_text()}")
        busy = workspace.podium("train", long_pass(workspace, "meanwhile"))
        assert busy.code == 2
        assert "another run" in busy.err
        os.killpg(process.pid, signal.SIGKILL)
        assert_gone(process.pid)
    done = parts(workspace)
    trained(workspace, long_pass(workspace, "killed"))  # the same command
    assert len(done) == 2
    assert done.items() < parts(workspace).items()
    assert workspace.metric("killed", "loss") == workspace.metric("whole", "loss")


@pytest.mark.slow
@pytest.mark.parametrize("program", ["dpo", "reward_model", "distill"])
def test_two_ranks_give_the_losses_of_one(workspace: Workspace, program: str) -> None:
    prepare(workspace, "distill" if program == "distill" else "dpo")
    # Three rows on two ranks, so that shares differ and micro-batches may be empty.
    values = {"rows_per_step": 3, "steps": 4, "data": HELDOUT, **CACHED.get(program, {})}
    for ranks in (1, 2):
        trained(workspace, dense(workspace, str(ranks), program, placement={"devices": ranks}, **values))
        shutil.rmtree(workspace.path / "runs/.cache", ignore_errors=True)
    for name in ("loss", "heldout/loss"):
        assert workspace.metric("2", name) == pytest.approx(workspace.metric("1", name), rel=1e-4)


# --- looking first -------------------------------------------------------------------------------------------------


def test_the_deep_check_shows_what_a_pair_trains(workspace: Workspace) -> None:
    write_pairs(workspace, 20)
    outcome = workspace.podium("check", dense(workspace), "--deep")
    assert outcome.code == 0, outcome
    assert re.search(r"program dpo: .*\b6 steps", outcome.out)
    assert re.search(r"data\.train\.0: 20 rows .*40 documents", outcome.out)
    assert "[[it is " in outcome.out
    assert "[[no idea " in outcome.out


def test_the_deep_check_knows_reward_models_and_distillation(workspace: Workspace) -> None:
    write_pairs(workspace, 20)
    save_model(workspace.path / "teacher", seed=5)
    assert workspace.podium("check", dense(workspace, program="reward_model"), "--deep").code == 0
    workspace.rows("train.jsonl", judged(pairs(10, 1)))
    scores = dense(workspace, program="reward_model", reward_model={"learns": "scores"})
    assert re.search(r"\b20 rows .*20 documents", workspace.podium("check", scores, "--deep").out)
    recipe = dense(workspace, program="distill", teachers=[{"path": "teacher"}])
    assert workspace.podium("check", recipe, "--deep").code == 0


# --- mistakes ------------------------------------------------------------------------------------------------------

VERBS = ("check", "train")


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("program", "changes", "message"),
    [
        ("distill", {}, ("teachers: ", "missing")),
        ("distill", {"teachers": [{"path": "./none"}]}, ("teachers.0.path: ", "./none")),
        ("dpo", {"preference": {"reference_model": "./none"}}, ("preference.reference_model: ", "./none")),
        ("dpo", {"distill": {"temperature": 2.0}}, ("distill: dpo ", "; distill ")),
        ("sft", {"preference": {"beta": 0.2}}, ("preference: sft ", "; dpo ")),
        (
            "reward_model", {"data": HELDOUT, "evaluation": {"generation": {}}},
            ("evaluation.generation: reward_model ",),
        ),
        ("dpo", {"preference": {"loss": "kto"}}, ("train.jsonl, line 1: ", "`prompt`, `completion` and `label`")),
        ("reward_model", {"reward_model": {"learns": "scores"}}, ("train.jsonl, line 1: ", "`score`")),
    ],
)  # fmt: skip
def test_a_recipe_that_cannot_work_is_reported_before_anything_runs(
    workspace: Workspace, verb: str, program: str, changes: dict[str, Any], message: tuple[str, ...]
) -> None:
    write_pairs(workspace, 4)
    workspace.refused(workspace.podium(verb, dense(workspace, program=program, **changes)), *message)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("program", ["dpo", "reward_model", "distill"])
def test_an_empty_file_is_reported(workspace: Workspace, verb: str, program: str) -> None:
    (workspace.path / "train.jsonl").write_text("")
    recipe = dense(
        workspace, program=program, **({"teachers": [{"path": str(workspace.model)}]} if program == "distill" else {})
    )
    workspace.refused(workspace.podium(verb, recipe), "data.train.0", "train.jsonl ", "0 bytes")


BAD_PAIRS = [
    ({"rejected": None}, "no `rejected`"),
    ({"rejected": [{"role": "assistant", "content": "it is 2."}]}, "the same"),
    ({"chosen": [{"role": "assistant", "content": ""}]}, "`chosen` is empty"),
]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("train",), ("check", "--deep")])
@pytest.mark.parametrize(
    ("program", "change", "message"), [*(("dpo", *bad) for bad in BAD_PAIRS), ("reward_model", *BAD_PAIRS[1])]
)
def test_a_bad_pair_in_the_middle_is_reported_with_its_line(
    workspace: Workspace, arguments: tuple[str, ...], program: str, change: dict[str, Any], message: str
) -> None:
    rows = pairs(8, 1)
    rows[5]["chosen"] = [{"role": "assistant", "content": "it is 2."}]
    rows[5] |= change
    workspace.rows("train.jsonl", rows)
    outcome = workspace.podium(*arguments, dense(workspace, program=program))
    left = (".cache",) if (workspace.path / "runs/.cache").exists() else ()
    workspace.refused(outcome, "train.jsonl, line 6: ", message, left=left)


@pytest.mark.slow
def test_a_teacher_or_reference_with_other_words_is_refused(workspace: Workspace) -> None:
    write_pairs(workspace, 8)
    save_model(workspace.path / "other")
    file = workspace.path / "other/tokenizer.json"
    content = json.loads(file.read_text())
    words = content["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    file.write_text(json.dumps(content))

    for name, reference in (("live", "live"), ("cached", "cached")):
        recipe = dense(workspace, name, preference={"reference": reference, "reference_model": "other"})
        outcome = workspace.podium("train", recipe)
        assert outcome.code == 2, outcome
        assert re.search(r"error: preference\.reference_model: .*tokenizer .*\b2\b", outcome.err)
        # Also where the recipe names a tokenizer, which is the policy's and not the reference's.
        recipe = dense(
            workspace, name, preference={"reference": reference, "reference_model": "other"},
            model={"path": str(workspace.model), "tokenizer": str(workspace.model)},
        )  # fmt: skip
        named = workspace.podium("train", recipe)
        assert re.search(r"error: preference\.reference_model: .*tokenizer .*\b2\b", named.err)
    workspace.rows("train.jsonl", [{"messages": row["prompt"] + row["chosen"]} for row in pairs(8, 1)])
    for distill in ({}, {"targets": "cached"}):
        recipe = dense(workspace, program="distill", teachers=[{"path": "other"}], distill=distill)
        outcome = workspace.podium("train", recipe)
        assert outcome.code == 2, outcome
        assert re.search(r"error: teachers\.0\.path: .*tokenizer .*\b2\b", outcome.err)
        assert "Traceback" not in outcome.err + outcome.out


def test_a_random_map_cannot_have_its_reference_computed_before(workspace: Workspace) -> None:
    write_pairs(workspace, 16)
    (workspace.path / "mine.py").write_text(
        "import itertools\ncount = itertools.count()\n\n"
        "def changing(row):\n"
        "    answer = [{'role': 'assistant', 'content': f'it is {next(count)}'}]\n"
        "    return {**row, 'chosen': answer}\n"
    )
    data = {"train": [{"path": "train.jsonl", "map": "mine.py:changing"}]}
    outcome = workspace.podium("train", dense(workspace, data=data))
    assert outcome.code == 2, outcome
    assert "runs/.cache/" in outcome.err
    assert "Traceback" not in outcome.err + outcome.out
    trained(workspace, dense(workspace, "live", data=data, preference={"reference": "live"}))


def test_a_teacher_that_changed_is_not_resumed_with(workspace: Workspace) -> None:
    shutil.copytree(workspace.model, workspace.path / "teacher")
    recipe = workspace.recipe(
        "far", program="distill", teachers=["teacher"], checkpoint={"every": 2}, rows_per_step=4, steps=4
    )
    assert workspace.podium("train", recipe).code == 0
    save_tiny_model("qwen3", workspace.path / "teacher", seed=5, vocab_size=len(tiny_tokenizer()))
    outcome = workspace.podium("resume", "runs/far", "--step", "2")
    assert outcome.code == 2
    assert "teacher: its content " in outcome.err
