# SPDX-License-Identifier: Apache-2.0
"""The calculator example makes what its recipes read and can be solved with its tool; the page's environment plays."""

from __future__ import annotations

import asyncio
import filecmp
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedPolicy, byte_tokenizer, encoded
from transformers import AutoConfig, AutoTokenizer

from podium.data.chat import DocumentMaker, Made
from podium.data.rows import Row
from podium.data.tasks import Task, read_tasks
from podium.data.trajectories import TrajectoryId
from podium.environments.environment_factory import environment_maker
from podium.environments.episode import Episode, EpisodeLimits, run_episode
from podium.environments.protocol import Environment
from podium.environments.signatures import fit_signature
from podium.environments.tools import load_tools
from podium.environments.transcript import TurnTokenizer, check_template
from podium.recipe import plugins
from podium.recipe.loading import load_recipe
from podium.recipe.schema import SourceSection

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "calculator"
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "%s"}}</tool_call>'


def _maker() -> Any:
    spec = importlib.util.spec_from_file_location("make_calculator_task", EXAMPLE / "make_task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("calculator")
    _maker().make_task(out, seed=0)
    return out


@pytest.fixture(scope="module")
def tokenizer(made: Path) -> Any:
    return AutoTokenizer.from_pretrained(made / "model")


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_the_same_seed_makes_the_same_files(made: Path, tmp_path: Path) -> None:
    _maker().make_task(tmp_path, seed=0)
    names = [str(file.relative_to(made)) for file in made.rglob("*") if file.is_file()]
    assert filecmp.cmpfiles(made, tmp_path, names, shallow=False) == (names, [], [])


def test_three_in_ten_demonstrations_call_the_calculator_and_the_others_guess_wrong(made: Path) -> None:
    rows = _rows(made / "sft.jsonl")
    calling = [row for row in rows if len(row["messages"]) == 4]
    assert 0.28 < len(calling) / len(rows) < 0.32
    for row in rows:
        question, last = row["messages"][0]["content"], row["messages"][-1]["content"]
        assert (int(last) == eval(question.removesuffix("?"))) == (len(row["messages"]) == 4)


def test_no_heldout_operands_are_in_training(made: Path) -> None:
    def pairs(name: str) -> set[tuple[str, ...]]:
        requested = (row["messages"][0]["content"] for row in _rows(made / name))
        return {tuple(re.split(r"[-+*?]", text)[:2]) for text in requested}

    assert pairs("heldout.jsonl").isdisjoint(pairs("train.jsonl") | pairs("sft.jsonl"))


def test_the_model_is_tiny_and_the_template_fit_for_tools(made: Path, tokenizer: Any) -> None:
    config = AutoConfig.from_pretrained(made / "model")
    assert config.vocab_size == len(tokenizer) == 266
    assert TurnTokenizer(tokenizer).tool_format == "hermes"
    check_template(tokenizer, role="tool", tools=_schemas())
    text = TurnTokenizer(tokenizer).render([{"role": "user", "content": "?"}], _schemas())
    assert all(tool["function"]["name"] in text for tool in _schemas())


def test_a_demonstration_trains_the_calls_and_the_answers(made: Path, tokenizer: Any) -> None:
    row = next(row for row in _rows(made / "sft.jsonl") if len(row["messages"]) == 4)
    result = DocumentMaker(tokenizer, "assistant", 256, "error").make(Row(row, "sft.jsonl"))
    assert isinstance(result, Made)
    document = result.document
    question, answer = row["messages"][0]["content"], row["messages"][-1]["content"]
    call = (CALL % question.removesuffix("?")) + "<|end|>"
    assert tokenizer.decode(document.tokens) == (
        f"<|system|>calculate(expression)<|end|><|user|>{question}<|end|><|assistant|>{call}"
        f"<|tool|>{answer}<|end|><|assistant|>{answer}<|end|>"
    )
    assert tokenizer.decode(document.tokens[document.trained]) == f"{call}{answer}<|end|>"
    assert len(encoded(tokenizer, call)) == 10


def test_the_recipes_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert load_recipe("examples/calculator/sft.yaml").program == "sft"
    recipe = load_recipe("examples/calculator/grpo.yaml")
    assert recipe.environment is not None
    environment_maker(recipe.environment)()
    (reward,) = recipe.reward
    assert reward.function is not None
    fitted = fit_signature(plugins.load(reward.function, "reward.0"), {}, style="auto", per="sample", key="reward.0")
    assert (fitted.style, fitted.names) == ("podium", ("answer", "reference"))


def _schemas() -> list[dict[str, Any]]:
    return [tool.schema for tool in load_tools([f"{EXAMPLE / 'tools.py'}:calculate"])]


def _played(environment: Environment, task: Task, tokenizer: Any, lines: list[str], end: str, **named: int) -> Episode:
    limits = EpisodeLimits(**{"max_turns": 2, "max_new_tokens": 16, **named})

    async def main() -> Episode:
        policy = ScriptedPolicy(tokenizer, lines, end=end)
        return await run_episode(
            environment, task, policy, TurnTokenizer(tokenizer), id=TrajectoryId(0, 0), limits=limits
        )

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("expression", "said", "reward"),
    [("{}", "{answer}", 1.0), ("{}", "7", 0.0), ("1/0", "{answer}", 1.0), ("1/0", "error", 0.0)],
)
def test_a_policy_that_calls_and_repeats_the_result_is_rewarded(
    made: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, expression: str, said: str, reward: float
) -> None:
    monkeypatch.chdir(ROOT)
    recipe = load_recipe("examples/calculator/grpo.yaml")
    (task,) = read_tasks([SourceSection(path=str(made / "heldout.jsonl"))], "data.heldout", 1)
    assert task.messages is not None
    requested = task.messages[0]["content"].removesuffix("?")
    lines = [CALL % expression.format(requested), said.format(answer=task.reference)]
    episode = _played(environment_maker(recipe.environment)(), task, tokenizer, lines, "<|end|>")
    assert (episode.finish, episode.metrics["tool_calls"]) == ("done", 1.0)
    assert episode.metrics["failed_tool_calls"] == float(expression == "1/0")
    correct = plugins.load(str(recipe.reward[0].function), "reward.0")
    assert correct(answer=episode.answer, reference=task.reference) == reward


def test_the_calculator_looks_at_what_it_is_given_and_runs_nothing() -> None:
    (tool,) = load_tools([f"{EXAMPLE / 'tools.py'}:calculate"])
    assert tool.function(" 17*23 ") == 391
    assert tool.function("2-3*4") == -10
    for bad in ("__import__('os')", "2**9", "True+1", "1.5+1", "9" * 20):
        with pytest.raises(ValueError, match="whole numbers"):
            tool.function(bad)


def test_the_pages_environment_plays_as_it_says() -> None:
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    found: dict[str, Any] = {"calculate": plugins.load(f"{EXAMPLE / 'tools.py'}:calculate", "tools")}
    for code in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        exec(code, found)
    assert found["Calculator"]().step_timeout_s == 4 * 5.0 + 1
    environment = found["HigherLower"](largest=1)
    task = Task(
        source="page", messages=None, text="", tools=None, reference=None, row={"seed": 0}, place="here"
    )  # fmt: skip
    lines = ["what?", "0", "1"]
    episode = _played(environment, task, byte_tokenizer(), lines, "<|im_end|>", max_turns=5)
    assert episode.turn_rewards == (-0.1, 0.0, 1.0)
    assert [message["content"] for message in episode.messages][2::2] == ["A number, please.", "Higher."]
    assert (episode.finish, episode.metrics) == ("done", {"found": 1.0})
