# SPDX-License-Identifier: Apache-2.0
"""A newcomer with a data file and a model had to write a recipe from the reference. `podium init` writes one that is
accepted at once."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from helpers.workspace import Workspace
from podium import api
from podium.drafting.columns import (
    METHODS,
    fitting_method,
    read_data,
    reference_column,
    renamed_columns,
    unread_columns,
)
from podium.drafting.measuring import Lengths, fixed_sizes, on_policy_sizes
from podium.drafting.texts import functions_text
from podium.errors import DataError, ModelError, RecipeError, RunFolderError
from podium.recipe import GrpoRecipe, SpmdRecipe, load_recipe

QUESTION = {"role": "user", "content": "what is 1+1?"}
ANSWER, WRONG = ({"role": "assistant", "content": text} for text in "23")
# Columns of a row -> the method, and what is renamed.
FILES: dict[str, tuple[dict[str, Any], str, dict[str, str]]] = {
    "chats": ({"messages": [QUESTION, ANSWER]}, "sft", {}),
    "conversations": ({"conversations": [QUESTION, ANSWER], "id": 1}, "sft", {"messages": "conversations"}),
    "text": ({"text": "1+1=2"}, "sft", {}),
    "completions": ({"prompt": "1+1=", "completion": "2"}, "sft", {}),
    "alpaca": ({"instruction": "1+1=", "output": "2"}, "sft", {"prompt": "instruction", "completion": "output"}),
    "two kinds": ({"messages": [QUESTION, ANSWER], "text": "1+1=2"}, "sft", {"messages": "messages"}),
    "pairs": ({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, "dpo", {}),
    "conversation pairs": (
        {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, {**ANSWER, "content": "3"}]},
        "dpo",
        {},
    ),
    "labels": ({"prompt": "1+1=", "completion": "2", "label": True}, "kto", {}),
    "scores": ({"messages": [QUESTION, ANSWER], "score": 0.5}, "reward_model", {}),
    "tasks": ({"prompt": "what is 1+1?", "answer": "2"}, "grpo", {}),
    "questions": ({"question": "what is 1+1?", "answer": "2"}, "grpo", {"prompt": "question"}),
    "chat tasks": ({"prompt": [QUESTION], "ground_truth": 2}, "grpo", {}),
    "open chats": ({"messages": [QUESTION], "answer": "2"}, "grpo", {}),
    "prompts": ({"prompt": "what is 1+1?"}, "grpo", {}),
}


def write_rows(path: Path, row: dict[str, Any], count: int = 8) -> str:
    path.write_text("".join(json.dumps({**row, "number": n}) + "\n" for n in range(count)))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_columns_choose_the_program_and_the_check_accepts_it(workspace: Workspace, name: str) -> None:
    row, method, _ = FILES[name]
    write_rows(Path("rows.jsonl"), row)

    outcome = workspace.podium("init", "--data", "rows.jsonl", "--model", str(workspace.model))

    assert outcome.code == 0, outcome
    assert "podium train recipe.yaml" in outcome.out
    assert workspace.podium("check", "--deep", "recipe.yaml").code == 0
    recipe = load_recipe("recipe.yaml")
    assert recipe.program == {"kto": "dpo"}.get(method, method)
    assert Path("recipe_functions.py").exists() == (method == "grpo")
    assert recipe.run.name == f"{method}-rows"


@pytest.mark.parametrize("name", FILES)
def test_columns_of_other_names_are_renamed(tmp_path: Path, name: str) -> None:
    row, method, columns = FILES[name]
    data = read_data(write_rows(tmp_path / "rows.jsonl", row))

    assert fitting_method(data) == method
    assert renamed_columns(data, method) == columns  # type: ignore[arg-type]
    assert "number" in unread_columns(data, method)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_program_can_be_named(workspace: Workspace, method: str) -> None:
    row = {"prompt": "1+1=", "completion": "2"}
    row |= {"chosen": "2", "rejected": "3"} if method in ("dpo", "reward_model") else {}
    row |= {"label": True} if method == "kto" else {}
    write_rows(Path("rows.jsonl"), row)
    teacher = ["--teacher", str(workspace.model)] if "distill" in method else []

    outcome = workspace.podium("init", method, "--data", "rows.jsonl", "--model", str(workspace.model), *teacher)

    assert outcome.code == 0, outcome
    assert workspace.podium("check", "--deep", "recipe.yaml").code == 0


def test_a_drafted_recipe_trains(workspace: Workspace) -> None:
    outcome = workspace.podium(
        "init", "--data", "train.jsonl", "--model", str(workspace.model), "--heldout", "heldout.jsonl"
    )
    assert outcome.code == 0, outcome

    trained = workspace.podium("train", "recipe.yaml", "--set", "placement.device=cpu", "--set", "steps=10")

    assert trained.code == 0, trained
    assert 10 in workspace.metric("sft-train", "heldout/loss")


@pytest.mark.slow
def test_a_drafted_grpo_recipe_trains(workspace: Workspace) -> None:
    write_rows(Path("rows.jsonl"), {"question": "what is 1+1?", "answer": "2"})
    workspace.podium("init", "--data", "rows.jsonl", "--model", str(workspace.model))
    small = ("steps=1", "rollout.max_new_tokens=4", "placement.launcher=inline", "placement.device=cpu")

    trained = workspace.podium("train", "recipe.yaml", *(part for text in small for part in ("--set", text)))

    assert trained.code == 0, trained


def test_lengths_follow_the_data(workspace: Workspace) -> None:
    api.init("train.jsonl", workspace.model)
    recipe = load_recipe("recipe.yaml")
    assert isinstance(recipe, SpmdRecipe)
    # Chats of 39 to 47 characters, of which each is a token.
    assert recipe.data.max_length == 64
    assert (recipe.tokens_per_step, recipe.steps) == (256, 30)


@pytest.mark.parametrize(
    ("longest", "rows", "context", "expected"),
    [
        (100, 10, None, (128, 256, 10)),  # little data: one step holds more than all of it
        (1000, 10_000, None, (1024, 16_384, 916)),
        (5000, 10_000, 4096, (4096, 16_384, 916)),  # cut to the context
        (30_000, 10_000, None, (30_016, 32_768, 458)),  # a step holds the longest document
    ],
)
def test_sizes_of_steps(longest: int, rows: int, context: int | None, expected: tuple[int, int, int]) -> None:
    lengths = Lengths(num_measured=rows, mean=500.0 if longest > 100 else 50.0, longest=longest)
    sizes = fixed_sizes(lengths, rows, context, documents_per_row=1, epochs=3)
    assert (sizes.max_length, sizes.tokens_per_step, sizes.steps) == expected


def test_the_comment_on_steps_has_the_epochs_that_they_are(workspace: Workspace) -> None:
    """Few rows make more epochs than is usual, because there are at least 20 steps; many make fewer."""
    write_rows(Path("rows.jsonl"), {"prompt": "what is 1+1?", "answer": "2"})

    api.init("rows.jsonl", workspace.model)

    recipe = load_recipe("recipe.yaml")
    assert isinstance(recipe, GrpoRecipe)
    assert (recipe.steps, recipe.rollout.prompts_per_step) == (20, 8)
    (comment,) = (line for line in Path("recipe.yaml").read_text().splitlines() if line.startswith("steps:"))
    assert "20 epochs of 8 rows" in comment
    lengths = Lengths(num_measured=9, mean=50, longest=90)
    assert on_policy_sizes(lengths, 160_000, 4096, "x").epochs == pytest.approx(0.1)
    assert fixed_sizes(lengths, 10, None, documents_per_row=1, epochs=1).epochs == pytest.approx(10 * 256 / 500)


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"reward_model": {"style": "rule", "ground_truth": "2"}}, "reward_model.ground_truth"),
        ({"reward_model": {"style": "model"}, "answer": "2"}, "answer"),
        ({"reward_model": {"style": "model"}}, None),
    ],
)
def test_rows_of_verl_have_their_right_answer_below_reward_model(
    tmp_path: Path, row: dict[str, Any], column: str | None
) -> None:
    data = read_data(write_rows(tmp_path / "rows.jsonl", {"prompt": [QUESTION], **row}))

    assert reference_column(data) == column
    assert f"`{column or 'row'}`" in functions_text(has_reward=True, reference=column, as_chat=False)


def test_prompts_leave_room_for_answers() -> None:
    lengths = Lengths(num_measured=9, mean=50, longest=90)
    wide, narrow = on_policy_sizes(lengths, 1000, 4096, "x"), on_policy_sizes(lengths, 8, 128, "x")

    assert (wide.max_length, wide.max_new_tokens, wide.prompts_per_step, wide.steps) == (96 + 512, 512, 32, 63)
    assert (narrow.max_length, narrow.max_new_tokens, narrow.prompts_per_step, narrow.steps) == (128, 64, 8, 20)
    with pytest.raises(DataError, match="context"):
        on_policy_sizes(lengths, 8, 20, "x")


def test_the_reward_that_is_written_compares_final_answers(workspace: Workspace) -> None:
    write_rows(Path("rows.jsonl"), {"question": "what is 1+1?", "answer": "1 and 1 make\n#### 1,002"})
    api.init("rows.jsonl", workspace.model, out="math.yaml")
    spec = importlib.util.spec_from_file_location("written", "math_functions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    recipe = load_recipe("math.yaml")
    assert isinstance(recipe, GrpoRecipe)
    assert recipe.reward[0].function == "math_functions.py:reward"  # type: ignore[union-attr]
    assert recipe.data.train[0].map == "math_functions.py:as_chat"
    assert module.reward("so it is 1002.", "1 and 1 make\n#### 1,002") == 1.0
    assert module.reward("so it is 12", "#### 1,002") == 0.0
    assert module.reward("Paris ", "paris") == 1.0
    assert module.reward("2", None) == 0.0
    assert module.as_chat({"prompt": "hi"})["prompt"] == [{"role": "user", "content": "hi"}]


def test_the_last_turn_of_a_chat_is_its_right_answer(workspace: Workspace) -> None:
    api.init("train.jsonl", workspace.model, program="grpo")

    assert "NotImplementedError" not in Path("recipe_functions.py").read_text()
    assert load_recipe("recipe.yaml").data.train[0].map is None


def test_without_right_answers_the_reward_has_to_be_written(workspace: Workspace) -> None:
    write_rows(Path("rows.jsonl"), {"prompt": "what is 1+1?"})

    outcome = workspace.podium("init", "--data", "rows.jsonl", "--model", str(workspace.model))

    assert "recipe_functions.py" in outcome.out.splitlines()[-2]
    assert "NotImplementedError" in Path("recipe_functions.py").read_text()


def test_nothing_is_overwritten_unless_asked(workspace: Workspace) -> None:
    Path("recipe.yaml").write_text("mine")
    with pytest.raises(RecipeError, match="--overwrite"):
        api.init("train.jsonl", workspace.model)
    assert Path("recipe.yaml").read_text() == "mine"

    api.init("train.jsonl", workspace.model, overwrite=True)

    assert load_recipe("recipe.yaml").program == "sft"
    write_rows(Path("rows.jsonl"), {"prompt": "what is 1+1?", "answer": "2"})
    Path("other_functions.py").write_text("mine")
    with pytest.raises(RecipeError, match=r"other_functions\.py"):
        api.init("rows.jsonl", workspace.model, out="other.yaml")
    assert not Path("other.yaml").exists()


@pytest.mark.parametrize("existing", [False, True])
def test_a_refused_draft_leaves_everything_as_it_was(workspace: Workspace, existing: bool) -> None:
    rows = Path("train.jsonl").read_text().splitlines()
    Path("heldout.jsonl").write_text('{"messages": "not a list"}\n')
    Path("train.jsonl").write_text("\n".join(rows))
    if existing:
        Path("recipe.yaml").write_text("mine")

    outcome = workspace.podium(
        "init", "--data", "train.jsonl", "--model", str(workspace.model), "--heldout", "heldout.jsonl", "--overwrite"
    )

    workspace.refused(outcome, "heldout.jsonl, line 1")
    assert Path("recipe.yaml").exists() == existing
    assert not existing or Path("recipe.yaml").read_text() == "mine"


def test_wrong_data_is_refused_with_what_to_do(workspace: Workspace) -> None:
    Path("empty.jsonl").touch()
    Path("blank.jsonl").write_text("\n")
    write_rows(Path("odd.jsonl"), {"a": 1, "b": 2})
    write_rows(Path("asked.jsonl"), {"messages": [QUESTION]})
    for arguments, parts in [
        (("--data", "missing.jsonl"), ("--data", "missing.jsonl")),
        (("--data", "empty.jsonl"), ("--data", "empty.jsonl")),
        (("--data", "blank.jsonl"), ("--data", "blank.jsonl")),
        (("--data", "odd.jsonl"), ("`a`, `b`", "`messages`", "`chosen`")),
        (("dpo", "--data", "train.jsonl"), ("`chosen`", "`messages`")),
        (("sft", "--data", "asked.jsonl"), ("asked.jsonl", "assistant")),
        (("distill", "--data", "train.jsonl"), ("--teacher",)),
        (("sft", "--data", "train.jsonl", "--teacher", "x"), ("--teacher",)),
        (("rlhf", "--data", "train.jsonl"), ("rlhf", "grpo")),
        (("--data", "train.jsonl", "--out", "no/where.yaml"), ("--out",)),
    ]:
        workspace.refused(workspace.podium("init", *arguments, "--model", str(workspace.model)), *parts)
        assert not Path("recipe.yaml").exists()


def test_wrong_models_are_refused_with_what_to_do(workspace: Workspace, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in workspace.model.iterdir():
        if file.suffix in (".safetensors", ".json") and not file.name.startswith("tokenizer"):
            (bare / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match="save_pretrained"):
        api.init("train.jsonl", bare)
    with pytest.raises(ModelError, match="nowhere"):
        api.init("train.jsonl", "./nowhere")
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "run.json").write_text("{}")
    with pytest.raises(RunFolderError, match="podium export"):
        api.init("train.jsonl", "runs/x")
    tokenizer = transformers.AutoTokenizer.from_pretrained(workspace.model)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(bare)
    with pytest.raises(ModelError, match="--chat-template"):
        api.init("train.jsonl", bare)

    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    api.init("train.jsonl", bare, chat_template="chat.jinja")

    assert load_recipe("recipe.yaml").model.chat_template == "chat.jinja"
