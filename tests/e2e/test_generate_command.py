# SPDX-License-Identifier: Apache-2.0
"""`podium generate` as a user types it: answered, continued after a kill or Ctrl-C, refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from helpers.messages import facts
from helpers.processes import assert_gone, started, wait_until
from helpers.tiny import save_tiny_model, tiny_tokenizer
from helpers.workspace import Outcome, Workspace
from podium import api
from podium.errors import RolloutError
from podium.models.cpu_settings import CpuSettings
from podium.recipe import RolloutSection, SourceSection
from podium.rollout.requests import Sampling

SHORT = ("--max-new-tokens", "12")


@pytest.fixture(autouse=True)
def settings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread without oneDNN: only the first test measures what suits the model, as every start of a user does."""
    if request.function is not test_every_row_gets_its_answers_in_order:
        fixed = CpuSettings(threads=1, onednn=False)
        monkeypatch.setattr("podium.rollout.native.loading.choose_cpu_settings", lambda work, *, ranks: fixed)


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def generate(workspace: Workspace, *options: str, prompts: str = "heldout.jsonl", out: str = "a.jsonl") -> Outcome:
    return workspace.podium("generate", str(workspace.model), "--prompts", prompts, "--out", out, *options)


def refused(outcome: Outcome, *message: str) -> None:
    """Exit code 2 and the reason, without a traceback; what was read before may have been said before."""
    assert outcome.code == 2, outcome
    assert "\nerror: " in "\n" + outcome.err
    assert "Traceback" not in outcome.err + outcome.out
    for part in message:
        assert part in outcome.err


def test_every_row_gets_its_answers_in_order(workspace: Workspace) -> None:
    outcome = generate(workspace, "--samples", "3", *SHORT)

    assert outcome.code == 0, outcome
    found = answers(workspace.path / "a.jsonl")
    assert [(each["row"], each["sample"]) for each in found] == [
        (row, sample) for row in range(8) for sample in range(3)
    ]
    chats = answers(workspace.path / "heldout.jsonl")
    for each in found:
        question, reference = chats[each["row"]]["messages"]
        assert (each["prompt"], each["reference"]) == (question["content"], reference["content"])
        assert each["finish"] in ("stop", "length")
        assert each["num_tokens"] <= 12
        assert "<|" not in each["answer"]
    assert "answers: 24" in outcome.out
    assert "file: a.jsonl" in outcome.out
    assert "prompts: 8, answers: 24" in outcome.err


def test_greedy_answers_are_those_of_transformers(workspace: Workspace) -> None:
    outcome = generate(workspace, "--temperature", "0", "--logprobs", *SHORT)

    assert outcome.code == 0, outcome
    tokenizer = tiny_tokenizer()
    model = transformers.AutoModelForCausalLM.from_pretrained(workspace.model, attn_implementation="eager").eval()
    for each in answers(workspace.path / "a.jsonl"):
        chat = [{"role": "user", "content": each["prompt"]}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        with torch.no_grad():
            theirs = model.generate(**prompt, do_sample=False, max_new_tokens=12)[0, prompt["input_ids"].shape[1] :]
            whole = torch.cat([prompt["input_ids"][0], theirs])
            logprobs = model(whole[None]).logits[0].log_softmax(-1)[-len(theirs) - 1 : -1]
        assert each["tokens"] == theirs.tolist()
        assert each["num_prompt_tokens"] == prompt["input_ids"].shape[1]
        np.testing.assert_allclose(each["logprobs"], logprobs.gather(1, theirs[:, None])[:, 0], atol=1e-4)


@pytest.mark.slow
def test_an_answer_does_not_depend_on_its_company_and_a_file_grows_by_rows_and_samples(workspace: Workspace) -> None:
    assert generate(workspace, "--samples", "3", *SHORT, out="whole.jsonl").code == 0
    assert generate(workspace, "--limit", "2", *SHORT).code == 0
    assert len(answers(workspace.path / "a.jsonl")) == 2

    outcome = generate(workspace, "--samples", "3", "--max-running", "2", *SHORT)

    assert outcome.code == 0, outcome
    assert "answers: 24 (2 " in outcome.out
    assert answers(workspace.path / "a.jsonl") == answers(workspace.path / "whole.jsonl")


def test_a_finished_file_says_so_and_stays(workspace: Workspace) -> None:
    assert generate(workspace, *SHORT).code == 0
    before = (workspace.path / "a.jsonl").read_bytes()

    outcome = generate(workspace, *SHORT)

    assert outcome.code == 0
    assert "nothing left" in outcome.out
    assert (workspace.path / "a.jsonl").read_bytes() == before


def test_a_line_that_is_taken_out_is_generated_again(workspace: Workspace) -> None:
    assert generate(workspace, *SHORT).code == 0
    file = workspace.path / "a.jsonl"
    whole = file.read_bytes()
    file.write_bytes(b"".join(line for number, line in enumerate(whole.splitlines(keepends=True)) if number != 3))

    outcome = generate(workspace, *SHORT)

    assert "answers: 8 (7 " in outcome.out
    assert file.read_bytes() == whole


def test_a_stop_string_ends_the_answer_before_it(workspace: Workspace) -> None:
    assert generate(workspace, "--max-new-tokens", "60", out="free.jsonl").code == 0
    assert generate(workspace, "--max-new-tokens", "60", "--stop", "a", "--stop", r"\n").code == 0

    pairs = list(zip(answers(workspace.path / "free.jsonl"), answers(workspace.path / "a.jsonl"), strict=True))
    assert any(stopped["stop"] in ("a", "\n") for _, stopped in pairs)
    for free, stopped in pairs:
        ends = [free["answer"].find(end) for end in ("a", "\n") if end in free["answer"]]
        assert stopped["answer"] == free["answer"][: min(ends)] if ends else free["answer"]


def test_prompts_that_cannot_be_served_get_an_error_and_the_others_an_answer(workspace: Workspace) -> None:
    workspace.rows("rows.jsonl", [{"prompt": "1+1="}, {"prompt": ""}, {"prompt": "1" * 300}, {"text": "abc"}])

    outcome = generate(workspace, *SHORT, prompts="rows.jsonl")

    assert outcome.code == 0, outcome
    assert re.search(r"(?m)^2 .*`error`", outcome.out)
    good, empty, long, text = answers(workspace.path / "a.jsonl")
    assert "error" not in good
    assert "error" not in text
    assert "empty" in empty["error"]
    assert "300 tokens" in long["error"]
    assert (long["finish"], long["answer"], long["num_tokens"]) == ("error", "", 0)


def test_a_csv_with_renamed_columns_is_read(workspace: Workspace) -> None:
    (workspace.path / "sums.csv").write_text("question,answer\n1+1=,2\n2+2=,4\n")

    columns = ("--column", "prompt=question", "--column", "completion=answer")
    outcome = generate(workspace, *columns, *SHORT, prompts="sums.csv")

    assert outcome.code == 0, outcome
    found = answers(workspace.path / "a.jsonl")
    assert [(each["prompt"], each["reference"]) for each in found] == [("1+1=", "2"), ("2+2=", "4")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--temperature", "-1"), ("temperature ", "-1.0")),
        (("--max-new-tokens", "0"), ("max_new_tokens ", " 0")),
        (("--samples", "0"), ("samples ", " 0")),
        (("--top-p", "0"), ("top_p ", " 0.0")),
        (("--stop", ""), ("stop_strings ", "empty string")),
        (("--prompts", "gone.jsonl"), ("gone.jsonl",)),
        (("--prompts", "empty.jsonl"), ("empty.jsonl ", "empty (0 bytes)")),
        (("--column", "prompt=questoin"), ("heldout.jsonl, line 1: ", "column 'questoin'")),
        (("--out", "gone/a.jsonl"), ("folder gone",)),
        (("--out", "heldout.jsonl"), ("--out: ", "heldout.jsonl", "the prompts")),
        (
            ("--prompts", "held*.jsonl", "--out", "held-answers.jsonl"),
            ("--out: ", "held-answers.jsonl", "the prompts"),
        ),
        (("--prompts", "."), ("--out: ", "a.jsonl", "the prompts")),
        (("--out", "train.jsonl"), ("train.jsonl ", "train.jsonl.settings.json")),
        (("--memory-gib", "1e-9"), ("rollout.memory_gib: ", "256 tokens")),
        (("--tokenizer", "."), ("no tokenizer",)),
    ],
)
def test_what_is_wrong_is_reported_and_leaves_nothing(
    workspace: Workspace, options: tuple[str, ...], message: tuple[str, ...]
) -> None:
    (workspace.path / "empty.jsonl").touch()
    before = {file.name: file.read_bytes() for file in workspace.path.iterdir()}

    outcome = generate(workspace, *options)

    refused(outcome, *message)
    assert {file.name: file.read_bytes() for file in workspace.path.iterdir()} == before


MISTAKES = """
import sys
from podium import cli
given = [sys.argv[1], "--prompts", "heldout.jsonl", "--out", "a.jsonl"]
for options in (["--temperature", "-1"], ["--prompts", "gone.jsonl"], ["--out", "gone/a.jsonl"]):
    sys.argv = ["podium", "generate", *given, *options]
    try:
        cli.main()
    except SystemExit as end:
        assert end.code == 2
assert {"torch", "transformers", "ray"}.isdisjoint(sys.modules)
"""


@pytest.mark.slow
def test_mistakes_are_reported_before_anything_heavy_is_imported(workspace: Workspace) -> None:
    command = [sys.executable, "-c", MISTAKES, str(workspace.model)]
    done = subprocess.run(command, cwd=workspace.path, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("error: ") == 3


def test_other_settings_over_a_begun_file_are_refused(workspace: Workspace) -> None:
    assert generate(workspace, *SHORT).code == 0
    other = workspace.path / "other"
    shutil.copytree(workspace.model, other)
    save_tiny_model("qwen3", other, seed=1, vocab_size=len(tiny_tokenizer()))

    changed = generate(workspace, *SHORT, "--seed", "1", "--top-k", "5")
    another = workspace.podium("generate", "other", "--prompts", "train.jsonl", "--out", "a.jsonl", *SHORT)

    refused(changed, "--out")
    assert re.search(r"\bseed: 0 .*\b1 .*\btop_k: 0 .*\b5 ", changed.err, re.DOTALL)
    refused(another, "the model: ", "the prompts: ")
    assert "tokenizer" not in another.err


def test_models_that_cannot_generate_are_refused(workspace: Workspace) -> None:
    bare = workspace.path / "bare"
    shutil.copytree(workspace.model, bare, ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    linear = save_tiny_model("qwen3_next", workspace.path / "linear", vocab_size=len(tiny_tokenizer()))
    weightless = workspace.path / "weightless"
    shutil.copytree(workspace.model, weightless, ignore=shutil.ignore_patterns("*.safetensors"))
    run = workspace.path / "a-run"
    run.mkdir()
    (run / "recipe.yaml").touch()
    message = {
        "bare": "no tokenizer",
        "weightless": "*.safetensors",
        "a-run": "`podium export a-run OUT`",
        "gone": "folder gone",
    }

    for model, reason in message.items():
        refused(workspace.podium("generate", model, "--prompts", "heldout.jsonl", "--out", "a.jsonl"), reason)
    options = ("--prompts", "heldout.jsonl", "--out", "a.jsonl", "--tokenizer", str(workspace.model))
    refused(workspace.podium("generate", str(linear), *options), "Qwen3NextForCausalLM DIFFERS")
    assert workspace.podium("generate", "bare", *options, *SHORT).code == 0


def test_python_gets_a_summary(workspace: Workspace) -> None:
    summary = api.generate(
        workspace.model,
        SourceSection(path="heldout.jsonl"),
        "a.jsonl",
        sampling=Sampling(max_new_tokens=6, min_new_tokens=6, logit_bias={4: 2.0}),
        samples=2,
        rollout=RolloutSection(max_running=4),
        progress=False,
    )

    assert (summary.answers, summary.new_answers, summary.new_tokens) == (16, 16, 96)
    assert summary.finishes == {"length": 16}
    assert summary.reused_tokens > 0
    with pytest.raises(RolloutError, match=r"stop_tokens .*\b99\b"):
        api.generate(
            workspace.model,
            "heldout.jsonl",
            "b.jsonl",
            sampling=Sampling(max_new_tokens=6, stop_tokens=frozenset({99})),
            progress=False,
        )


LONG = ("--samples", "8", "--max-new-tokens", "120", "--temperature", "1.5")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_a_start_that_is_killed_is_continued_to_the_same_answers(
    workspace: Workspace, number: signal.Signals, code: int
) -> None:
    assert generate(workspace, *LONG, prompts="train.jsonl", out="whole.jsonl").code == 0
    out, words = workspace.path / "a.jsonl", workspace.path / "words"
    command = ("generate", str(workspace.model), "--prompts", "train.jsonl", "--out", str(out), *LONG)
    with started(["-m", "podium", *command], words) as process:
        wait_until(lambda: out.exists() and out.read_bytes().count(b"\n") > 20, "the first answers")
        os.kill(process.pid, number)
        assert process.wait(60) == code
        assert_gone(process.pid)
    begun = out.read_bytes().count(b"\n")
    assert begun < 512
    if number == signal.SIGINT:
        assert re.search(facts("stopped: ", str(out), "same command"), words.read_text())
        assert "Traceback" not in words.read_text()

    outcome = generate(workspace, *LONG, prompts="train.jsonl")

    assert outcome.code == 0, outcome
    assert f"answers: 512 ({begun} " in outcome.out
    assert answers(out) == answers(workspace.path / "whole.jsonl")
