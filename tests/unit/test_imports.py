# SPDX-License-Identifier: Apache-2.0
"""What importing Podium costs: a look at a recipe imports no torch, and the SPMD path never imports ray."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import podium
from helpers.made_batches import on_policy_recipe
from helpers.tiny import save_tiny_folder, write_chats
from podium.observe import read_metrics
from podium.runs.folder import RunFolder

CHECKING = """
import json, sys, time
import podium, podium.cli
began = time.perf_counter()
podium.cli.app(["check", sys.argv[1]], standalone_mode=False)
seconds = time.perf_counter() - began
print(json.dumps({"seconds": seconds, "modules": sorted({name.split(".")[0] for name in sys.modules})}))
"""

TRAINING = """
import json, sys
import podium
result = podium.train(sys.argv[1])
print(json.dumps({"step": result.step, "modules": sorted({name.split(".")[0] for name in sys.modules})}))
"""


CONTROLLING = """
import json, sys
import podium.controller.drive, podium.programs.controlled, podium.controller.assembly
print(json.dumps({"modules": sorted(sys.modules)}))
"""

GOING_ON = """
import json, os, sys, time
from pathlib import Path
from podium import api
from podium.controller import start_up
from podium.runs.supervised import SUPERVISION, Predecessor, Supervision

class Stop(Exception): pass

def early_start(*args):
    raise Stop

start_up.early_start = early_start
folder = Path(sys.argv[1])
killed = Predecessor(cause="killed", ended_s=time.monotonic(), is_recorded=True)
SUPERVISION.set(Supervision(os.pipe()[1], killed, folder))
try:
    api.resume(folder)
except Stop:
    print(json.dumps({"modules": sorted(sys.modules)}))
"""

SERVING = """
import json, sys
import podium.environments.user_main, podium.environments.reward_service, podium.environments.environment_service
print(json.dumps({"modules": sorted(sys.modules)}))
"""

READING = """
import json, sys
from podium.importing import import_transformers_without_torch
from podium.data.tokenizer import load_tokenizer
from podium.recipe import ModelSection
if sys.argv[1] == "without":
    import_transformers_without_torch()
tokenizer = load_tokenizer(ModelSection(path=sys.argv[2]))
chat = [{"role": "user", "content": "what is 7 + 5?"}]
text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
tokens = tokenizer(text)["input_ids"]
print(json.dumps({"kind": type(tokenizer).__name__, "text": text, "tokens": tokens, "decoded": tokenizer.decode(tokens),
    "torch": "torch" in sys.modules}))
"""


def _recipe(folder: Path) -> Path:
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"program: sft\nmodel: {{path: {folder / 'model'}}}\n"
        f"data: {{train: [{{path: {folder / 'train.jsonl'}}}]}}\n"
        "optimizer: {lr: 1e-3}\nsteps: 1\ntokens_per_step: 64\nplacement: {device: cpu, threads: 1, onednn: false}\n"
        f"run: {{folder: {folder / 'runs'}}}\n"
    )
    write_chats(folder / "train.jsonl", count=40)
    return recipe


def _answer(script: str, *arguments: str | Path) -> dict[str, Any]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "PyTorch" not in done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_checking_a_recipe_imports_nothing_heavy_and_answers_at_once(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "model" / "model.safetensors").touch()

    answer = _answer(CHECKING, _recipe(tmp_path))

    assert {"torch", "transformers", "ray", "datasets", "pyarrow"}.isdisjoint(answer["modules"])
    assert answer["seconds"] < 1.0


@pytest.mark.slow
def test_the_controller_imports_neither_torch_nor_a_model() -> None:
    answer = _answer(CONTROLLING)

    assert {"torch", "transformers", "podium.roles.learner", "podium.engine.sharding"}.isdisjoint(answer["modules"])


@pytest.mark.slow
def test_a_controller_that_replaces_one_attaches_to_ray_before_it_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    recipe = on_policy_recipe(f"model.path={tmp_path / 'model'}", f"run.folder={tmp_path / 'runs'}")
    folder = RunFolder.create(recipe)

    answer = _answer(GOING_ON, folder.path)

    assert {"torch", "transformers", "ray"}.isdisjoint(answer["modules"])


@pytest.mark.slow
def test_a_process_of_user_code_imports_little_of_podium() -> None:
    """Every run waits for it to start."""
    answer = _answer(SERVING)

    assert {"torch", "podium.api", "podium.cluster", "podium.checks", "podium.observe"}.isdisjoint(answer["modules"])


def test_the_package_offers_its_names_when_they_are_asked_for() -> None:
    assert [name for name in podium.__all__ if getattr(podium, name).__module__.split(".")[0] != "podium"] == []
    assert {*podium.__all__, "__all__"} <= {*dir(podium)}
    assert podium.observe.read_metrics is read_metrics
    for name in ("nothing", "__nothing__", "__main__"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(podium, name)


@pytest.mark.slow
def test_a_tokenizer_is_the_same_where_transformers_was_kept_from_importing_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_folder(tmp_path / "model")
    script = tmp_path / "reading.py"
    script.write_text(READING)

    without = _answer(READING, "without", tmp_path / "model")
    monkeypatch.setattr(sys, "argv", [str(script), "with", str(tmp_path / "model")])
    capsys.readouterr()
    runpy.run_path(str(script), run_name="__main__")  # here, where torch is imported
    whole = json.loads(capsys.readouterr().out.splitlines()[-1])

    assert (without.pop("torch"), whole.pop("torch")) == (False, True)
    assert without == whole


@pytest.mark.slow
def test_a_training_run_never_imports_ray(tmp_path: Path) -> None:
    save_tiny_folder(tmp_path / "model")

    answer = _answer(TRAINING, _recipe(tmp_path))

    assert answer["step"] == 1
    assert "torch" in answer["modules"]
    assert "ray" not in answer["modules"]
