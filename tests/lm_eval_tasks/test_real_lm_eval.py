# SPDX-License-Identifier: Apache-2.0
"""lm-eval, unchanged from PyPI, asks `podium serve`: its log-likelihoods are those of a forward of transformers, its
greedy answers those of `generate`. It has an environment of its own: `make test-lm-eval`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("lm_eval") is None:
    pytest.skip("lm-eval is not installed in this environment: run `make test-lm-eval`", allow_module_level=True)

import torch
import transformers

from helpers.processes import started, wait_until

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples" / "gymnasium"))
from make_task import make_task  # noqa: E402

pytestmark = [pytest.mark.lm_eval, pytest.mark.timeout(400)]

CHOICES = ["left", "down", "go right", "up!"]
ROWS = [{"question": f"where from {number}?", "choices": CHOICES, "answer": number % 4} for number in range(5)]
COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}"}
TASKS: dict[str, dict[str, Any]] = {
    "podium_choice": {
        "output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    },
    "podium_generate": {
        "output_type": "generate_until", "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 6, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
    "podium_rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in `model`, and tasks with local data in `tasks`."""
    made = tmp_path_factory.mktemp("lm-eval")
    make_task(made, seed=3)
    tasks = made / "tasks"
    tasks.mkdir()
    (tasks / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    files = {"data_files": {"test": str(tasks / "rows.jsonl")}, "cache_dir": str(made / "cache")}
    for name, task in TASKS.items():
        (tasks / f"{name}.yaml").write_text(json.dumps({"task": name, **COMMON, "dataset_kwargs": files, **task}))
    return made


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """`podium serve` of the model, as `tiny`."""
    output = folder / "server.txt"
    arguments = ["-m", "podium", "serve", str(folder / "model"), "--port", "0", "--name", "tiny", "--device", "cpu"]
    with started(arguments, output) as process:
        wait_until(lambda: " at http" in output.read_text() or process.poll() is not None, "the start of the server")
        found = re.search(r"serving \S+ at (\S+)", output.read_text())
        assert found is not None, output.read_text()
        yield found[1]
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def model(folder: Path) -> tuple[Any, Any]:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    return loaded, transformers.AutoTokenizer.from_pretrained(folder / "model")


def environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}


def lm_eval(folder: Path, name: str, arguments: Sequence[str]) -> Path:
    """The folder with its results."""
    out = folder / name
    command = [sys.executable, "-m", "lm_eval", "run", "--include_path", str(folder / "tasks"), *arguments]
    done = subprocess.run(
        [*command, "--output_path", str(out), "--log_samples"], cwd=folder, env=environment(), capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def samples(out: Path, task: str) -> list[dict[str, Any]]:
    (file,) = out.rglob(f"samples_{task}_*.jsonl")
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(found, key=lambda each: int(each["doc_id"]))


def forward_logprob(model: tuple[Any, Any], context: list[int], rest: list[int]) -> tuple[float, bool]:
    """Log-probability of tokens behind others, and whether each is the most likely one."""
    with torch.no_grad():
        logprobs = model[0](torch.tensor([[*context, *rest]])).logits[0].log_softmax(-1)
    rows = logprobs[len(context) - 1 : -1]
    return float(sum(rows[at, token] for at, token in enumerate(rest))), rows.argmax(-1).tolist() == rest


def require_choices(found: list[dict[str, Any]], model: tuple[Any, Any]) -> None:
    assert len(found) == len(ROWS)
    for sample, row in zip(found, ROWS, strict=True):
        for choice, ((logprob, is_greedy),) in zip(CHOICES, sample["resps"], strict=True):
            context, whole = (model[1](text)["input_ids"] for text in (row["question"], f"{row['question']} {choice}"))
            assert whole[: len(context)] == context
            wanted, wanted_greedy = forward_logprob(model, context, whole[len(context) :])
            assert float(logprob) == pytest.approx(wanted, abs=2e-4)
            assert str(is_greedy) == str(wanted_greedy)


def generated(model: tuple[Any, Any], prompt: list[int]) -> str:
    tokens = model[0].generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, len(prompt) :]
    return str(model[1].decode(tokens, skip_special_tokens=True)).split("\n\n")[0]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_completions_score_and_generate_as_transformers_does(
    folder: Path, url: str, model: tuple[Any, Any], batch_size: int
) -> None:
    arguments = f"model=tiny,base_url={url}/completions,tokenizer={folder / 'model'},max_length=256"
    given = ("--model", "local-completions", "--model_args", arguments, "--batch_size", str(batch_size))
    out = lm_eval(folder, f"completions-{batch_size}", [*given, "--tasks", ",".join(TASKS)])
    require_choices(samples(out, "podium_choice"), model)
    for sample, row in zip(samples(out, "podium_generate"), ROWS, strict=True):
        assert sample["resps"] == [[generated(model, model[1](row["question"])["input_ids"])]]
    for sample, row in zip(samples(out, "podium_rolling"), ROWS, strict=True):
        ((value,),) = sample["resps"]
        wanted, _ = forward_logprob(model, [model[1].eos_token_id], model[1](row["question"])["input_ids"])
        assert float(value if isinstance(value, str | float) else value[0]) == pytest.approx(wanted, abs=5e-4)


def test_chat_completions_answer_as_transformers_does(folder: Path, url: str, model: tuple[Any, Any]) -> None:
    arguments = f"model=tiny,base_url={url}/chat/completions"
    given = ("--model", "local-chat-completions", "--model_args", arguments, "--apply_chat_template")
    out = lm_eval(folder, "chats", [*given, "--tasks", "podium_generate"])
    for sample, row in zip(samples(out, "podium_generate"), ROWS, strict=True):
        chat = [{"role": "user", "content": row["question"]}]
        prompt = model[1].apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert sample["resps"] == [[generated(model, prompt)]]


def test_podium_evaluate_runs_tasks_of_lm_eval(folder: Path, model: tuple[Any, Any]) -> None:
    out = folder / "evaluated"
    command = [
        sys.executable, "-m", "podium", "evaluate", str(folder / "model"), "--tasks", "podium_choice,podium_generate",
        "--include", str(folder / "tasks"), "--limit", "5", "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "podium_choice" in done.stdout
    assert "exact_match" in done.stdout
    require_choices(samples(out, "podium_choice"), model)


def test_a_task_that_does_not_exist_is_an_error(folder: Path) -> None:
    command = [sys.executable, "-m", "podium", "evaluate", str(folder / "model"), "--tasks", "podium_nothing"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert "lm-eval ended with exit code" in done.stderr
    assert "podium_nothing" in done.stderr
