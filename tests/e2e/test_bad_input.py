# SPDX-License-Identifier: Apache-2.0
"""Every mistake a user can make: reported with file, row or key, before a run folder is left behind."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

import podium
from helpers.tiny import TEMPLATE, tiny_tokenizer
from helpers.workspace import Workspace
from podium.errors import RecipeError, RunFolderError
from podium.recipe import load_recipe
from podium.runs.folder import RunFolder

VERBS = ("check", "train")


def chat(question: str, answer: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.mark.parametrize("verb", VERBS)
def test_a_misspelt_key(workspace: Workspace, verb: str) -> None:
    recipe = workspace.recipe(optimizer={"warmup_step": 3})

    outcome = workspace.podium(verb, recipe)

    workspace.refused(outcome, "sums.yaml", "optimizer.warmup_step: ", "optimizer.warmup_steps")


@pytest.mark.parametrize("verb", VERBS)
def test_a_value_of_the_wrong_type_in_a_file_or_an_override(workspace: Workspace, verb: str) -> None:
    outcome = workspace.podium(verb, workspace.recipe(steps="many"), "--set", "optimizer.lr=quick")

    workspace.refused(outcome, "(2 problems)", "steps:", "'many'", "optimizer.lr:", "'quick'")


@pytest.mark.parametrize("verb", VERBS)
def test_files_that_are_missing_are_all_reported_at_once(workspace: Workspace, verb: str) -> None:
    recipe = workspace.recipe(model={"path": "./no/model"}, data={"train": [{"path": "none.jsonl"}]})

    outcome = workspace.podium(verb, recipe)

    workspace.refused(outcome, "2 problems", "model.path: ", "./no/model", "data.train.0", "none.jsonl")


@pytest.mark.parametrize("verb", VERBS)
def test_a_recipe_that_is_not_there(workspace: Workspace, verb: str) -> None:
    workspace.refused(workspace.podium(verb, "nowhere.yaml"), "nowhere.yaml")


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("content", "message"), [("", "0 bytes"), ("\n\n", "no rows")])
def test_an_empty_dataset(workspace: Workspace, verb: str, content: str, message: str) -> None:
    (workspace.path / "train.jsonl").write_text(content)

    workspace.refused(workspace.podium(verb, workspace.recipe()), "data.train.0", "train.jsonl", message)


@pytest.mark.parametrize("arguments", [("train",), ("check", "--deep")])
def test_malformed_json_is_reported_with_its_line(workspace: Workspace, arguments: tuple[str, ...]) -> None:
    rows = (workspace.path / "train.jsonl").read_text().splitlines()
    rows[4] = '{"messages": ['
    (workspace.path / "train.jsonl").write_text("\n".join(rows))

    outcome = workspace.podium(*arguments, workspace.recipe())

    workspace.refused(outcome, "data.train.0", "train.jsonl, line 5: ", "JSON")


@pytest.mark.parametrize("arguments", [("train",), ("check", "--deep")])
def test_a_row_without_the_expected_fields_is_reported_with_its_line(
    workspace: Workspace, arguments: tuple[str, ...]
) -> None:
    workspace.rows("train.jsonl", [chat("1+1?", "2")] * 6 + [{"question": "1+2?", "answer": "3"}])

    outcome = workspace.podium(*arguments, workspace.recipe())

    workspace.refused(outcome, "train.jsonl, line 7: ", "`messages`", "`prompt`", "`completion`", "`text`", "question")


def test_a_first_row_without_the_expected_fields_is_found_by_the_quick_check(workspace: Workspace) -> None:
    workspace.rows("train.jsonl", [{"question": "1+2?", "answer": "3"}])

    outcome = workspace.podium("check", workspace.recipe())

    workspace.refused(
        outcome, "data.train.0", "train.jsonl, line 1: ", "`messages`", "`prompt`", "`completion`", "`text`"
    )


def test_a_bad_row_in_the_heldout_data_is_reported_too(workspace: Workspace) -> None:
    (workspace.path / "heldout.jsonl").write_text('{"text": "a"}\n{"text": 7}\n')

    outcome = workspace.podium("train", workspace.recipe(data={"heldout": [{"path": "heldout.jsonl"}]}))

    workspace.refused(outcome, "heldout.jsonl, line 2: ", "`text`", "string")


@pytest.mark.parametrize("arguments", [("train",), ("check", "--deep")])
def test_a_template_that_cannot_mark_assistant_turns(workspace: Workspace, arguments: tuple[str, ...]) -> None:
    unmarked = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    # Beginning with the number of turns, a chat's first part alone is not how the whole begins.
    (workspace.path / "chat.jinja").write_text("{{ messages | length }}" + unmarked)

    outcome = workspace.podium(*arguments, workspace.recipe(model={"chat_template": "chat.jinja"}))

    workspace.refused(outcome, "train.jsonl, line ", "assistant turns", "{% generation %}")


@pytest.mark.parametrize("arguments", [("train",), ("check", "--deep")])
def test_no_trained_token_in_a_whole_dataset(workspace: Workspace, arguments: tuple[str, ...]) -> None:
    workspace.rows("train.jsonl", [{"messages": [{"role": "user", "content": "1+1?"}]}] * 3)

    workspace.refused(workspace.podium(*arguments, workspace.recipe()), "train.jsonl", "trained token")


@pytest.mark.parametrize("verb", VERBS)
def test_a_model_folder_without_tokenizer(workspace: Workspace, verb: str) -> None:
    bare = workspace.path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(workspace.model / name, bare / name)

    outcome = workspace.podium(verb, workspace.recipe(model={"path": "bare"}))

    workspace.refused(outcome, "model.path: bare ", "no tokenizer", "model.tokenizer")


@pytest.mark.parametrize("verb", VERBS)
def test_a_model_folder_without_weights(workspace: Workspace, verb: str) -> None:
    shutil.copytree(workspace.model, workspace.path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))

    outcome = workspace.podium(verb, workspace.recipe(model={"path": "bare"}))

    workspace.refused(outcome, "model.path: bare ", "*.safetensors", "model.init: random")


def test_more_ranks_than_devices(workspace: Workspace) -> None:
    outcome = workspace.podium("train", workspace.recipe(), "--devices", "4096")

    workspace.refused(outcome, "placement.devices: 4096 ")


def test_a_cuda_device_on_a_machine_without_one(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)

    outcome = workspace.podium("train", workspace.recipe(), "--set", "placement.device=cuda")

    workspace.refused(outcome, "placement.device: cuda")


def test_a_run_folder_that_exists_already_is_left_alone(workspace: Workspace) -> None:
    kept = workspace.path / "runs" / "sums" / "precious.txt"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")

    outcome = workspace.podium("train", workspace.recipe())

    workspace.refused(outcome, "runs/sums ", "no checkpoint", "--set run.name=", left=("sums",))
    assert [path.name for path in kept.parent.iterdir()] == ["precious.txt"]


@pytest.mark.parametrize(
    ("where", "code", "message"),
    [
        ("map", "def other(row):\n    return row\n", ("mine.py ", "'keep'", ": other")),
        ("map", "def keep(row)\n    return row\n", ("mine.py, line 1: ", "':'")),
        ("map", None, ("file mine.py",)),
    ],
)
@pytest.mark.parametrize("verb", VERBS)
def test_a_plugin_that_is_not_there(
    workspace: Workspace, verb: str, where: str, code: str | None, message: tuple[str, ...]
) -> None:
    if code is not None:
        (workspace.path / "mine.py").write_text(code)

    recipe = workspace.recipe(data={"train": [{"path": "train.jsonl", where: "mine.py:keep"}]})

    workspace.refused(workspace.podium(verb, recipe), "data.train.0.map: ", *message)


def test_a_map_that_raises_is_reported_with_the_row(workspace: Workspace) -> None:
    (workspace.path / "mine.py").write_text("def keep(row):\n    return row['nothing']\n")

    outcome = workspace.podium(
        "train", workspace.recipe(data={"train": [{"path": "train.jsonl", "map": "mine.py:keep"}]})
    )

    workspace.refused(outcome, "train.jsonl, line ", "`map`", "KeyError: 'nothing'")


def test_a_score_that_is_no_number_leaves_nothing_behind(workspace: Workspace) -> None:
    (workspace.path / "mine.py").write_text("def score(answer, reference, row):\n    return float('nan')\n")

    recipe = workspace.recipe(
        data={"heldout": [{"path": "heldout.jsonl"}]},
        evaluation={"at_start": True, "generation": {"prompts": 1, "max_new_tokens": 1, "score": "mine.py:score"}},
    )

    workspace.refused(workspace.podium("train", recipe), "evaluation.generation.score: ", "nan")


def test_a_document_longer_than_the_models_context(workspace: Workspace) -> None:
    outcome = workspace.podium("train", workspace.recipe(data={"max_length": 257}, tokens_per_step=1024))

    workspace.refused(outcome, "data.max_length: 257 ", "256")


def test_an_overlong_document_when_the_recipe_says_error(workspace: Workspace) -> None:
    outcome = workspace.podium("train", workspace.recipe(data={"max_length": 8, "overlong": "error"}))

    workspace.refused(outcome, "train.jsonl, line ", " 8")


def test_a_dataset_that_cannot_be_opened_leaves_no_run_folder(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub id is not asked for by the quick check, so this is found only after the run folder was made."""

    def gone(section: object, key: str) -> object:
        raise podium.errors.DataError(f"{key}: no network")

    monkeypatch.setattr("podium.data.hub.open_dataset", gone)
    recipe = workspace.recipe(data={"train": [{"path": "owner/nothing", "format": "datasets"}]})

    workspace.refused(workspace.podium("train", recipe), "data.train.0: no network")


def test_a_run_folder_that_cannot_be_written(workspace: Workspace) -> None:
    (workspace.path / "file").write_text("in the way")

    outcome = workspace.podium("train", workspace.recipe(run={"folder": "file"}))

    workspace.refused(outcome, "file/sums ", ": Not a directory")


def test_no_permission_on_the_run_folder(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.mkdir

    def mkdir(path: Path, *args: object, **options: object) -> None:
        if "runs" in path.parts:
            raise PermissionError(13, "Permission denied", str(path))
        real(path, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", mkdir)

    outcome = workspace.podium("train", workspace.recipe())

    workspace.refused(outcome, "runs/sums ", ": Permission denied")


def test_a_full_disk_at_a_checkpoint_is_reported_and_leaves_the_last_one_usable(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from podium.engine import checkpoint

    real = checkpoint.save_tensors  # type: ignore[attr-defined]
    saved: list[Path] = []

    def save(tensors: dict[str, Tensor], path: Path) -> None:
        saved.append(path)
        if len(saved) > 1:
            raise OSError(28, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_tensors", save)

    outcome = workspace.podium("train", workspace.recipe(checkpoint={"every": 2, "background": False}))

    workspace.refused(outcome, "runs/sums/checkpoints", "No space left on device", left=("sums",))
    monkeypatch.setattr(checkpoint, "save_tensors", real)
    assert workspace.podium("resume", "runs/sums").code == 0
    assert sorted(workspace.metric("sums", "loss")) == [1, 2, 3, 4]


def test_an_unknown_run_folder(workspace: Workspace) -> None:
    workspace.refused(workspace.podium("resume", "runs/none"), "run folder runs/none")
    workspace.refused(workspace.podium("export", "runs/none", "out"), "run folder runs/none")
    workspace.refused(workspace.podium("resume", "."), "recipe.yaml", "run.json")


@pytest.mark.parametrize(
    "arguments", [("train",), ("nonsense",), ("train", "a.yaml", "--devices", "0"), ("export", "runs/a")]
)
def test_a_command_line_that_makes_no_sense(workspace: Workspace, arguments: tuple[str, ...]) -> None:
    outcome = workspace.podium(*arguments)

    assert outcome.code == 2
    assert "Traceback" not in outcome.err


def test_the_same_mistakes_in_python_raise_the_same_errors(workspace: Workspace) -> None:
    recipe = podium.parse_recipe(
        {
            "program": "sft",
            "model": {"path": str(workspace.model)},
            "data": {"train": [{"path": "train.jsonl"}]},
            "optimizer": {"lr": 1e-3},
            "steps": 1,
        }
    )

    with pytest.raises(RecipeError, match=r"^run\.name: "):
        podium.train(recipe)
    with pytest.raises(RecipeError, match=r"optimizer\.lrr: .*optimizer\.lr\b"):
        podium.check(recipe, overrides=["optimizer.lrr=1"])
    with pytest.raises(RunFolderError, match="runs/none"):
        podium.resume("runs/none")
    assert not (workspace.path / "runs").exists()


def test_a_budget_too_small_for_any_document(workspace: Workspace) -> None:
    workspace.refused(workspace.podium("train", workspace.recipe("sums", tokens_per_step=1)), "data.max_length: ")


def test_a_broken_score_does_not_cost_the_steps_taken(workspace: Workspace) -> None:
    """The checkpoint of a step is written before its evaluation, which runs the user's code."""
    (workspace.path / "mine.py").write_text("def score(answer, reference, row):\n    return 'x'\n")
    heldout = {"heldout": [{"path": "train.jsonl"}]}
    generation = {"prompts": 2, "max_new_tokens": 2, "score": "mine.py:score"}
    recipe = workspace.recipe(
        data=heldout, checkpoint={"every": 2}, evaluation={"every": 2, "max_documents": 4, "generation": generation}
    )

    outcome = workspace.podium("train", recipe)

    workspace.refused(outcome, "evaluation.generation.score", "podium resume runs/sums", left=("sums",))
    assert (workspace.path / "runs/sums/checkpoints/step-00000002").is_dir()
    (workspace.path / "mine.py").write_text("def score(answer, reference, row):\n    return 1.0\n")
    assert workspace.podium("resume", "runs/sums").code == 0


def test_half_a_surrogate_pair_is_named_with_its_row(workspace: Workspace) -> None:
    (workspace.path / "train.jsonl").write_text('{"text": "broken \\ud800 emoji"}\n')

    workspace.refused(workspace.podium("train", workspace.recipe()), "train.jsonl, line 1", "surrogate")


def test_what_a_killed_start_left_is_replaced(workspace: Workspace) -> None:
    recipe = workspace.recipe()
    assert RunFolder.create(load_recipe(recipe)).status == "starting"

    assert workspace.podium("train", recipe).code == 0


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows(workspace: Workspace) -> None:
    shutil.copytree(workspace.model, workspace.path / "grown")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["what"])
    tokenizer.save_pretrained(workspace.path / "grown")

    outcome = workspace.podium("train", workspace.recipe(model={"path": "grown"}))

    workspace.refused(outcome, "48 tokens", "47")


def test_a_chat_template_that_is_missing_or_broken(workspace: Workspace) -> None:
    recipe = workspace.recipe(model={"chat_template": "chat.jinja"})

    workspace.refused(workspace.podium("check", recipe), "model.chat_template: ", "chat.jinja")
    (workspace.path / "chat.jinja").write_text("{% for message in messages %}")
    workspace.refused(workspace.podium("train", recipe), "train.jsonl, line ", "chat template")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.safetensors", lambda data: data[:1000], "model.safetensors"),
        ("tokenizer.json", lambda data: data[:1000], "the tokenizer"),
        ("config.json", lambda data: data[:10], "damaged/config.json"),
        ("config.json", lambda data: data.replace(b'"qwen3"', b'"nonesuch"'), "nonesuch"),
    ],
)
def test_a_model_folder_with_a_damaged_file(
    workspace: Workspace, name: str, change: Callable[[bytes], bytes], message: str
) -> None:
    shutil.copytree(workspace.model, workspace.path / "damaged")
    file = workspace.path / "damaged" / name
    file.write_bytes(change(file.read_bytes()))

    workspace.refused(workspace.podium("train", workspace.recipe(model={"path": "damaged"})), "damaged", message)


def test_a_run_that_diverges_stops_with_a_report(workspace: Workspace) -> None:
    outcome = workspace.podium("train", workspace.recipe(steps=12), "--set", "optimizer.lr=1e38")

    workspace.refused(outcome, "steps 2 to 6 ", "optimizer.lr", left=("sums",))
    assert sum(workspace.metric("sums", "skipped").values()) == 5


@pytest.mark.parametrize("what", ["model", "map"])
def test_the_home_folder_may_be_written_as_a_tilde(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setenv("HOME", str(workspace.path))
    shutil.copytree(workspace.model, workspace.path / "model")
    (workspace.path / "mine.py").write_text("def keep(row):\n    return row\n")
    source = {"path": "~/train.jsonl", **({"map": "~/mine.py:keep"} if what == "map" else {})}
    model = {"path": "~/model"} if what == "model" else {}

    outcome = workspace.podium("check", workspace.recipe(model=model, data={"train": [source]}))

    assert outcome.code == 0, outcome
