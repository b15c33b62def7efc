# SPDX-License-Identifier: Apache-2.0
"""The pages for users of verl and TRL: their recipes pass `podium check` on rows and reward functions as verl and TRL
have them, and a step can be trained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from helpers.pages import DOCS, write_files
from helpers.workspace import Workspace
from podium.recipe import GrpoRecipe, PpoRecipe, load_recipe, parse_recipe
from podium.recipe.programs import BUILT_IN
from podium.recipe.suggesting import hint_for

VERL, TRL = DOCS / "migrate_verl.md", DOCS / "migrate_trl.md"
SUMS = [(1, 2), (30, 4), (15, 6), (7, 80)]
# The page's sizes are those of a cluster.
SMALL = [
    "data.max_length=120", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "rollout.max_new_tokens=8",
    "steps=1", "optimizer.lr=1e-4", "placement.devices=1", "placement.launcher=inline", "placement.device=cpu",
    "placement.threads=1", "placement.onednn=false",
]  # fmt: skip


def verl_row(left: int, right: int, index: int) -> dict[str, Any]:
    """A row as verl's examples/data_preprocess/gsm8k.py writes it."""
    question = f"what is {left}+{right}?"
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(left + right)},
        "extra_info": {"split": "train", "index": index, "answer": "...", "question": question},
    }


def trl_chat(left: int, right: int) -> list[dict[str, str]]:
    question = {"role": "user", "content": f"what is {left}+{right}?"}
    return [question, {"role": "assistant", "content": str(left + right)}]


@pytest.fixture
def verl(workspace: Workspace) -> Workspace:
    write_files(VERL, workspace.path)
    rows = [verl_row(*pair, index) for index, pair in enumerate(SUMS)]
    (workspace.path / "data/gsm8k").mkdir(parents=True)
    for name in ("train", "test"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), workspace.path / f"data/gsm8k/{name}.parquet")
    return workspace


@pytest.fixture
def trl(workspace: Workspace) -> Workspace:
    write_files(TRL, workspace.path)
    (workspace.path / "data").mkdir()
    chats = [trl_chat(*pair) for pair in SUMS]
    workspace.rows("data/chats.jsonl", [{"messages": chat} for chat in chats])
    workspace.rows("data/chats-heldout.jsonl", [{"messages": chat} for chat in chats])
    workspace.rows("data/questions.jsonl", [{"prompt": chat[:1], "solution": chat[1]["content"]} for chat in chats])
    wrong = [{"role": "assistant", "content": "0"}]
    pairs = [{"prompt": chat[:1], "chosen": chat[1:], "rejected": wrong} for chat in chats]
    workspace.rows("data/pairs.jsonl", pairs)
    return workspace


def accepted(workspace: Workspace, recipe: str) -> None:
    """As the page has it, and with a model that is here, so that the data is read too."""
    assert workspace.podium("check", recipe).code == 0
    small = ["data.max_length=120", *(["rollout.max_new_tokens=8"] if recipe == "grpo.yaml" else [])]
    deep = ["--deep", *(part for text in [f"model.path={workspace.model}", *small] for part in ("--set", text))]
    outcome = workspace.podium("check", recipe, *deep)
    assert outcome.code == 0, outcome.err


def test_the_recipe_for_verl_passes_the_check_on_verls_rows(verl: Workspace) -> None:
    accepted(verl, "grpo.yaml")


def test_batch_sizes_of_verl_count_prompts(verl: Workspace) -> None:
    command = VERL.read_text(encoding="utf-8")
    values = {key: int(value) for key, value in re.findall(r"([\w.]+)=(\d+) ", command)}
    recipe = load_recipe(verl.path / "grpo.yaml")
    assert isinstance(recipe, GrpoRecipe)

    assert recipe.rollout.prompts_per_step == values["data.train_batch_size"]
    assert recipe.rollout.samples_per_prompt == values["actor_rollout_ref.rollout.n"]
    mini_batch = values["actor_rollout_ref.actor.ppo_mini_batch_size"]
    assert recipe.algorithm.mini_batches == values["data.train_batch_size"] // mini_batch
    assert recipe.data.max_length == values["data.max_prompt_length"] + values["data.max_response_length"]
    assert recipe.rollout.max_new_tokens == values["data.max_response_length"]
    assert recipe.steps == values["trainer.total_epochs"] * (7473 // values["data.train_batch_size"])


@pytest.mark.parametrize("recipe", ["sft.yaml", "grpo.yaml", "dpo.yaml"])
def test_recipes_for_trl_pass_the_check_on_trls_rows(trl: Workspace, recipe: str) -> None:
    accepted(trl, recipe)


def test_batch_sizes_of_trl_count_completions_per_device(trl: Workspace) -> None:
    recipe = load_recipe(trl.path / "grpo.yaml")
    assert isinstance(recipe, GrpoRecipe)
    assert recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt == 8 * 4 * recipe.placement.devices


@pytest.mark.parametrize("page", [VERL, TRL], ids=["verl", "trl"])
def test_keys_and_names_of_the_tables_exist(page: Path) -> None:
    common = {
        "model": "m", "data": {"train": [{"path": "d"}]}, "optimizer": {"lr": 1}, "steps": 9, "run": {"name": "n"},
        "reward": [{"verifier": "numeric"}],
    }  # fmt: skip
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`advantage: (\w+)`", text):
        assert parse_recipe({**common, "program": "grpo", "algorithm": {"advantage": name}})
    for name in re.findall(r"`reduction: (\w+)`|^\| `[a-z-]+` \| `(\w+)` \|$", text, flags=re.MULTILINE):
        assert parse_recipe({**common, "program": "grpo", "algorithm": {"reduction": name[0] or name[1]}})
    for name in re.findall(r"`loss: (clipped\w*|sequence_clipped)`", text):
        assert parse_recipe({**common, "program": "grpo", "algorithm": {"loss": name}})
    assert set(re.findall(r"`program: (\w+)`", text)) <= set(BUILT_IN)
    assert parse_recipe({**common, "program": "ppo"}).__class__ is PpoRecipe


@pytest.mark.parametrize(("page", "count"), [(VERL, 30), (TRL, 20)], ids=["verl", "trl"])
def test_a_page_and_the_hints_of_recipes_name_the_same_keys(page: Path, count: int) -> None:
    """Of a setting that both know, by the rows of the page that name it."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \| .*\|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    translations: dict[str, str] = {}
    for theirs, ours in rows:
        for name in re.findall(r"`([\w.]+)[^`]*`", theirs):
            name = name.rpartition(".")[2]
            translations[name] = f"{translations.get(name, '')} {ours}"
    hints = {name: hint_for([name], GrpoRecipe) for name, ours in translations.items() if "`" in ours}
    known = {name: hint.key.rpartition(".")[2] for name, hint in hints.items() if hint is not None}

    assert len(known) >= count
    assert [name for name, key in known.items() if key not in translations[name]] == []


def test_reductions_of_trl_are_those_of_the_hint() -> None:
    hint = hint_for(["loss_type"], GrpoRecipe)
    rows = re.findall(r"`loss_type=\"(\w+)\"`.*?`(?:algorithm\.)?reduction: (\w+)`", TRL.read_text(encoding="utf-8"))

    assert hint is not None
    assert {"dapo", "grpo", "dr_grpo", "bnpo"} == {theirs for theirs, _ in rows}
    assert {name for row in rows for name in row} <= set(re.findall(r"\w+", hint.how))


@pytest.mark.slow
def test_a_reward_of_verl_trains_a_step_unchanged(verl: Workspace) -> None:
    change = [part for text in [*SMALL, "algorithm.mini_batches=1"] for part in ("--set", text)]
    outcome = verl.podium("train", "grpo.yaml", "--set", f"model.path={verl.model}", *change)
    assert outcome.code == 0, outcome.err
    assert verl.metric("grpo", "reward/compute_score/mean").keys() == {1}


@pytest.mark.slow
def test_rewards_of_trl_train_a_step_unchanged(trl: Workspace) -> None:
    change = [part for text in SMALL for part in ("--set", text)]
    outcome = trl.podium("train", "grpo.yaml", "--set", f"model.path={trl.model}", *change)
    assert outcome.code == 0, outcome.err
    assert trl.metric("grpo", "reward/correct/mean").keys() == {1}
    assert trl.metric("grpo", "reward/short/mean")[1] == 1.0
