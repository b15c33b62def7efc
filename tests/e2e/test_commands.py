# SPDX-License-Identifier: Apache-2.0
"""The commands as a user types them: check, schema, train, resume, export, verify."""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import podium
from helpers.engines import make_engine
from helpers.tiny import save_tiny_model, tiny_tokenizer
from helpers.workspace import Workspace
from podium.engine.checkpoint import CheckpointReader
from podium.models.packing import to_device
from podium.models.verify import random_batch
from podium.recipe import SftRecipe, load_recipe

HELDOUT = {"heldout": [{"path": "heldout.jsonl"}]}
STOP_AT_2 = """
import signal

class StopAt2:
    def __init__(self, folder):
        pass
    def log(self, metrics):
        if metrics.step == 2:
            signal.raise_signal(signal.SIGINT)
    def text(self, step, name, text):
        pass
    def close(self):
        pass
"""


def test_check_answers_and_leaves_nothing(workspace: Workspace) -> None:
    outcome = workspace.podium("check", workspace.recipe())

    assert (outcome.code, outcome.err) == (0, "")
    first, memory, last = outcome.out.splitlines()
    assert (first, last) == ("program sft: spmd execution, 4 steps", "sums.yaml: ok")
    assert memory.startswith("memory: training step (learner) takes about ")
    assert not (workspace.path / "runs").exists()


def test_check_deep_reads_tokenizer_model_and_data(workspace: Workspace) -> None:
    outcome = workspace.podium("check", "--deep", workspace.recipe(data=HELDOUT))

    assert outcome.code == 0, outcome
    assert re.search(r"model: qwen3\b.*vocabulary 47\b.*\b47 tokens\b.*\b256 tokens\b", outcome.out)
    assert re.search(r"data\.train\.0: 64 rows .*64 documents", outcome.out)
    assert re.search(r"data\.heldout\.0: 8 rows .*8 documents", outcome.out)
    assert not (workspace.path / "runs").exists()


def test_the_version_is_reported(workspace: Workspace) -> None:
    outcome = workspace.podium("--version")

    assert outcome.code == 0
    assert outcome.out.strip() == importlib.metadata.version("podium")


def test_schema_is_the_json_schema_of_recipes_and_pipelines(workspace: Workspace) -> None:
    outcome = workspace.podium("schema")

    assert outcome.code == 0
    found = json.loads(outcome.out)
    programs, pipeline = found["anyOf"]
    assert {"$ref": "#/$defs/GrpoRecipe"} in programs["oneOf"]
    assert pipeline == {"$ref": "#/$defs/PipelineRecipe"}
    assert found["$defs"]["SftRecipe"]["properties"].keys() == SftRecipe.model_fields.keys()
    stages = found["$defs"]["PipelineRecipe"]["properties"]["stages"]
    (stage,) = stages["patternProperties"].values()
    assert {"$ref": "#/$defs/SftRecipeInStage"} in stage["anyOf"]
    assert stages["additionalProperties"] is False


@pytest.mark.parametrize("verb", ["check", "train"])
def test_what_is_seldom_meant_is_warned_of(workspace: Workspace, verb: str) -> None:
    outcome = workspace.podium(verb, workspace.recipe(model={"lora": {"rank": 2}, "init": "random"}, steps=1))

    assert outcome.code == 0, outcome
    assert outcome.out.count("warning: model.lora: ") == 1


def test_train_learns_and_says_where_the_run_is(workspace: Workspace) -> None:
    outcome = workspace.podium("train", workspace.recipe(steps=12), "--set", "optimizer.lr=1e-2", "--set", "run.name=a")

    assert outcome.code == 0, outcome
    assert "step 12: runs/a" in outcome.out
    assert "podium export runs/a OUT" in outcome.out
    losses = workspace.metric("a", "loss")
    assert list(losses) == list(range(1, 13))
    assert losses[12] < losses[1] - 0.5
    assert set(workspace.metric("a", "lr").values()) == {1e-2}
    state = json.loads((workspace.path / "runs/a/run.json").read_text())
    assert (state["status"], state["step"]) == ("finished", 12)


def test_the_resolved_recipe_is_saved_in_the_run_folder(workspace: Workspace) -> None:
    workspace.podium("train", workspace.recipe(), "--set", "steps=1")

    saved = load_recipe(workspace.path / "runs/sums/recipe.yaml")

    assert saved.steps == 1
    assert saved.data.train[0].path == str(workspace.path / "train.jsonl")
    assert saved.data.max_length == 256
    assert saved.run.name == "sums"


def test_a_recipe_object_and_a_file_give_the_same_losses(workspace: Workspace) -> None:
    recipe = load_recipe(workspace.path / workspace.recipe(data=HELDOUT), ["run.name=object"])

    by_object = podium.train(recipe)
    by_file = podium.train("sums.yaml", overrides=["run.name=file"])

    assert workspace.metric("object", "loss") == workspace.metric("file", "loss")
    assert by_object.heldout_loss == by_file.heldout_loss
    assert (by_object.status, by_object.step, by_object.folder) == ("finished", 4, Path("runs/object"))


def test_ctrl_c_saves_and_resume_continues_exactly(workspace: Workspace) -> None:
    (workspace.path / "mine.py").write_text(STOP_AT_2)
    recipe = workspace.recipe(data=HELDOUT, optimizer={"schedule": "cosine", "warmup_steps": 2}, steps=6)
    whole = workspace.podium("train", recipe, "--set", "run.name=whole")

    stopped = workspace.podium("train", recipe, "--set", "run.loggers=['mine.py:StopAt2']", "--set", "run.name=broken")
    resumed = workspace.podium("resume", "runs/broken", "--set", "run.loggers=[]")

    assert whole.code == stopped.code == resumed.code == 0, (stopped, resumed)
    assert "podium resume runs/broken" in stopped.out
    assert "resumed" in resumed.out
    assert "step 6: runs/broken" in resumed.out
    for name in ("loss", "grad_norm", "lr", "heldout/loss", "tokens"):
        assert workspace.metric("broken", name) == workspace.metric("whole", name), name
    assert _weights(workspace, "broken", 6) == _weights(workspace, "whole", 6)


def _weights(workspace: Workspace, run: str, step: int) -> bytes:
    return (workspace.path / f"runs/{run}/checkpoints/step-{step:08d}/rank-00000.safetensors").read_bytes()


def test_a_finished_run_is_not_resumed_unless_it_gets_more_steps(workspace: Workspace) -> None:
    recipe = workspace.recipe(steps=2)
    workspace.podium("train", recipe)
    workspace.podium("train", recipe, "--set", "steps=4", "--set", "run.name=whole")

    refused = workspace.podium("resume", "runs/sums")
    further = workspace.podium("resume", "runs/sums", "--set", "steps=4")

    assert refused.code == 2
    assert re.search(r"runs/sums .*finished.*step 2 of 2\b", refused.err)
    assert "--set steps=4" in refused.err
    assert further.code == 0, further
    assert workspace.metric("sums", "loss") == workspace.metric("whole", "loss")


def test_resume_refuses_what_would_break_exactness_and_says_what_changed(workspace: Workspace) -> None:
    workspace.podium("train", workspace.recipe(checkpoint={"every": 2}))
    before = (workspace.path / "runs/sums/recipe.yaml").read_bytes()

    outcome = workspace.podium(
        "resume", "runs/sums", "--step", "2", "--set", "optimizer.lr=1e-4", "--set", "checkpoint.every=1"
    )

    workspace.refused(outcome, "runs/sums ", "optimizer.lr: 0.003 -> 0.0001", left=("sums",))
    assert "checkpoint.every" not in outcome.err
    assert (workspace.path / "runs/sums/recipe.yaml").read_bytes() == before
    assert json.loads((workspace.path / "runs/sums/run.json").read_text())["status"] == "finished"


def test_resume_refuses_a_longer_cosine_schedule(workspace: Workspace) -> None:
    workspace.podium("train", workspace.recipe(steps=2, optimizer={"schedule": "cosine"}))

    outcome = workspace.podium("resume", "runs/sums", "--set", "steps=4")

    workspace.refused(outcome, "steps: 2 -> 4 ", "cosine", left=("sums",))


def test_resume_refuses_data_that_changed(workspace: Workspace) -> None:
    workspace.podium("train", workspace.recipe(checkpoint={"every": 2}))
    with (workspace.path / "train.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')

    outcome = workspace.podium("resume", "runs/sums", "--step", "2")

    workspace.refused(outcome, f"{workspace.path / 'train.jsonl'}: its content ", left=("sums",))


def test_harmless_changes_are_taken_and_change_no_loss(workspace: Workspace) -> None:
    workspace.podium("train", workspace.recipe(checkpoint={"every": 2}))
    before = workspace.metric("sums", "loss")

    outcome = workspace.podium(
        "resume", "runs/sums", "--step", "2", "--set", "checkpoint.keep=1", "--set", "data.prefetch=1"
    )

    assert outcome.code == 0, outcome
    assert workspace.metric("sums", "loss") == before
    assert [path.name for path in (workspace.path / "runs/sums/checkpoints").iterdir()] == ["step-00000004"]


def test_an_unknown_step_names_those_there_are(workspace: Workspace) -> None:
    workspace.podium("train", workspace.recipe(checkpoint={"every": 2}))

    for arguments in (("resume", "runs/sums", "--step", "3"), ("export", "runs/sums", "out", "--step", "3")):
        outcome = workspace.podium(*arguments)
        workspace.refused(outcome, "3", "2", "4", left=("sums",))
    assert not (workspace.path / "out").exists()


def test_a_damaged_checkpoint_is_named_with_the_one_to_use_instead(workspace: Workspace) -> None:
    workspace.podium("train", workspace.recipe(checkpoint={"every": 2}))
    file = workspace.path / "runs/sums/checkpoints/step-00000004/rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))

    outcome = workspace.podium("export", "runs/sums", "out")

    workspace.refused(outcome, "rank-00000.safetensors", "damaged", "--step 2", left=("sums",))
    assert workspace.podium("export", "runs/sums", "out", "--step", "2").code == 0


def test_an_export_is_the_model_of_the_run_in_plain_transformers(workspace: Workspace) -> None:
    trained = podium.train(workspace.recipe(data=HELDOUT, steps=6, checkpoint={"every": 3}))

    outcome = workspace.podium("export", "runs/sums", "out")

    assert re.fullmatch(r"step 6 .*runs/sums .*\bout\n", outcome.out)
    model = transformers.AutoModelForCausalLM.from_pretrained("out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained("out")
    assert model.config.vocab_size == model.get_input_embeddings().weight.shape[0] == 47
    assert model.config.tie_word_embeddings
    assert model.config._attn_implementation == "sdpa"
    checkpoint = workspace.path / "runs/sums/checkpoints/step-00000006"
    _same_weights(model, checkpoint)
    _same_logits(model, workspace.model, checkpoint)
    assert trained.heldout_loss is not None
    assert math.isclose(_heldout_loss(model, tokenizer), trained.heldout_loss, rel_tol=1e-5)
    assert sorted(path.name for path in workspace.path.glob("out*")) == ["out"]


def _same_weights(model: transformers.PreTrainedModel, checkpoint: Path) -> None:
    """Bit by bit: the run's float32 masters without their padding rows."""
    assert CheckpointReader(checkpoint).shapes()["weight/model.embed_tokens.weight"][0] == 64
    stored = load_file(checkpoint / "rank-00000.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stored[f"weight/{name}"][: parameter.shape[0]]), name


def _same_logits(model: transformers.PreTrainedModel, base: Path, checkpoint: Path) -> None:
    """The run's own packed model, filled from its checkpoint, against the exported one, document by document."""
    engine = make_engine(base, checkpoint=CheckpointReader(checkpoint))
    batch = to_device(random_batch(47), torch.device("cpu"))
    with torch.no_grad():
        ours = engine.model.eval()(batch, None, kind="scores")
        theirs = [
            model(input_ids=batch.tokens_T[None, start:stop]).logits[0]
            for start, stop in pairwise(batch.packing.boundaries.tolist())
        ]
    torch.testing.assert_close(ours, torch.cat(theirs), rtol=1e-5, atol=1e-5)


def _heldout_loss(model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase) -> float:
    """By hand: one chat at a time, the mean over the tokens that the assistant wrote."""
    total, count = 0.0, 0
    for line in Path("heldout.jsonl").read_text().splitlines():
        encoded = tokenizer.apply_chat_template(
            json.loads(line)["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        tokens, marks = torch.tensor(encoded["input_ids"]), torch.tensor(encoded["assistant_masks"]).bool()
        with torch.no_grad():
            logprobs = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
        picked = -logprobs[:-1].gather(1, tokens[1:, None])[:, 0][marks[1:]]
        total, count = total + float(picked.sum()), count + len(picked)
    return total / count


def test_an_export_never_writes_over_what_is_there(workspace: Workspace) -> None:
    workspace.podium("train", workspace.recipe(steps=1))
    (workspace.path / "out").mkdir()
    (workspace.path / "out" / "precious.txt").write_text("mine")

    outcome = workspace.podium("export", "runs/sums", "out")

    workspace.refused(outcome, "out ", "not empty", left=("sums",))
    assert [path.name for path in (workspace.path / "out").iterdir()] == ["precious.txt"]
    assert not (workspace.path / "out.partial").exists()


def test_an_export_that_fails_half_way_leaves_nothing(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace.podium("train", workspace.recipe(steps=1))

    def save(self: object, folder: Path) -> None:
        folder.mkdir()
        (folder / "half.safetensors").touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.Qwen3ForCausalLM.save_pretrained", save)

    outcome = workspace.podium("export", "runs/sums", "out")

    workspace.refused(outcome, "out ", ": No space left on device", left=("sums",))
    assert list(workspace.path.glob("out*")) == []


def test_an_export_in_bfloat16_and_of_the_best_step(workspace: Workspace) -> None:
    recipe = workspace.recipe(
        data=HELDOUT,
        evaluation={"every": 1},
        checkpoint={"every": 1, "keep": 1, "keep_best": True},
        optimizer={"lr": 3.0},
    )
    assert workspace.podium("train", recipe).code == 0
    losses = workspace.metric("sums", "heldout/loss")
    best = min(losses, key=lambda step: (losses[step], -step))

    outcome = workspace.podium("export", "runs/sums", "out", "--best", "--dtype", "bfloat16")

    assert re.fullmatch(rf"step {best} .*runs/sums .*\bout\n", outcome.out)
    assert transformers.AutoModelForCausalLM.from_pretrained("out", dtype="auto").dtype == torch.bfloat16


def test_an_export_of_the_best_needs_a_held_out_loss(workspace: Workspace) -> None:
    workspace.podium("train", workspace.recipe(steps=1))

    workspace.refused(
        workspace.podium("export", "runs/sums", "out", "--best"), "runs/sums ", "held-out loss", left=("sums",)
    )  # fmt: skip
    assert workspace.podium("export", "runs/sums", "out", "--best", "--step", "1").code == 2
    assert workspace.podium("export", "runs/sums", "out", "--dtype", "int4").code == 2


def test_an_export_is_a_model_to_train_from(workspace: Workspace) -> None:
    first = podium.train(workspace.recipe(data=HELDOUT))
    podium.export("runs/sums", "out")

    recipe = workspace.recipe("more", model={"path": "out"}, data=HELDOUT, evaluation={"at_start": True}, steps=1)
    assert workspace.podium("train", recipe).code == 0

    assert first.heldout_loss is not None
    assert math.isclose(workspace.metric("more", "heldout/loss")[0], first.heldout_loss, rel_tol=1e-5)


def test_verify_agrees_with_transformers_and_leaves_nothing(workspace: Workspace) -> None:
    outcome = workspace.podium("verify", str(workspace.model), "--device", "cpu")

    assert outcome.code == 0, outcome
    assert "Qwen3ForCausalLM agrees" in outcome.out
    assert sorted(path.name for path in workspace.path.iterdir()) == ["heldout.jsonl", "train.jsonl"]


def test_verify_refuses_what_is_no_model(workspace: Workspace) -> None:
    (workspace.path / "empty").mkdir()

    workspace.refused(workspace.podium("verify", "empty"), "empty", "config.json")
    workspace.refused(workspace.podium("verify", "./none"), "./none")


@pytest.mark.parametrize("option", [("--device", "tpu"), ("--dtype", "float8")])
def test_verify_with_an_option_that_does_not_exist_gets_no_traceback(
    workspace: Workspace, option: tuple[str, str]
) -> None:
    outcome = workspace.podium("verify", str(workspace.model), *option)

    assert outcome.code == 2
    assert option[1] in outcome.err


def test_an_untied_head_is_exported_too(workspace: Workspace) -> None:
    save_tiny_model("llama", workspace.path / "llama", vocab_size=47, tie_word_embeddings=False)
    tiny_tokenizer().save_pretrained(workspace.path / "llama")

    podium.train(workspace.recipe(model={"path": "llama"}, steps=1))
    podium.export("runs/sums", "out")

    model = transformers.AutoModelForCausalLM.from_pretrained("out")
    assert model.lm_head.weight.shape[0] == model.model.embed_tokens.weight.shape[0] == 47
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
