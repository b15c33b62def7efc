# SPDX-License-Identifier: Apache-2.0
"""Chats with tools were trained silently wrong: Parquet put null arguments of other tools into the text, and a chat
template without tools trained empty answers (SFT) or hid the tools from the model (GRPO)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from helpers.tiny import TEMPLATE
from helpers.workspace import Workspace
from podium.data.masks import ChatRenderer, HiddenToolsError
from podium.data.sources import first_row, open_source
from podium.recipe import SourceSection
from unit.data.chat_tokenizers import CHATML, byte_tokenizer

CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHOWN = "{% for tool in tools or [] %}{{ tool.function.name }}: {{ tool.function.description }}\n{% endfor %}" + CALLS
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {}}}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def chat(*calls: dict[str, Any], content: str | None = None) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "how is it?"},
        {"role": "assistant", "content": content, "tool_calls": list(calls)},
    ]


PARIS, SUM = chat(call("weather", city="paris")), chat(call("add", left=1, right=2))


def parquet(folder: Path, rows: list[dict[str, Any]]) -> SourceSection:
    path = folder / "chats.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return SourceSection(path=str(path))


def arguments_of(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return messages[1]["tool_calls"][0]["function"]["arguments"]


def test_parquet_gives_a_call_only_its_own_arguments(tmp_path: Path) -> None:
    extra = {"margin": None, "tests": [{"input": None}]}
    section = parquet(tmp_path, [{"messages": PARIS, "info": extra}, {"messages": SUM, "info": extra}])
    source = open_source(section, "data.train.0")
    rows = source.read_block(0)

    assert [arguments_of(row.values["messages"]) for row in rows] == [{"city": "paris"}, {"left": 1, "right": 2}]
    assert rows[0].values["info"] == extra  # other columns stay as they are
    assert source.note is not None
    assert "chats.parquet, row 1" in source.note
    first = first_row(section, "data.train.0")
    assert first is not None
    assert arguments_of(first.values["messages"]) == {"city": "paris"}


def test_schemas_of_tools_lose_the_fields_of_other_tools(tmp_path: Path) -> None:
    properties = [{"city": {"type": "string"}}, {"left": {"type": "integer"}}]
    tools = [[{"name": f"f{at}", "parameters": {"properties": each}}] for at, each in enumerate(properties)]
    section = parquet(tmp_path, [{"messages": PARIS, "tools": each} for each in tools])
    assert [row.values["tools"] for row in open_source(section, "data.train.0").read_block(0)] == tools


def test_a_null_that_the_user_wrote_into_jsonl_stays(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": chat(call("weather", city=None))}) + "\n")
    source = open_source(SourceSection(path=str(path)), "data.train.0")
    assert arguments_of(source.read_block(0)[0].values["messages"]) == {"city": None}
    assert source.note is None


def test_plain_chats_of_parquet_need_no_note(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "a", "name": None}]}]
    source = open_source(parquet(tmp_path, rows), "data.train.0")
    source.read_block(0)
    assert source.note is None


def test_hugging_face_datasets_too(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"messages": PARIS}, {"messages": SUM}]).save_to_disk(str(tmp_path / "saved"))
    source = open_source(SourceSection(path=str(tmp_path / "saved")), "data.train.0")
    rows = source.read_block(0)
    assert [arguments_of(row.values["messages"]) for row in rows] == [{"city": "paris"}, {"left": 1, "right": 2}]
    assert source.note is not None


@pytest.mark.parametrize("content", [None, "let me look"])
@pytest.mark.parametrize("text_arguments", [False, True])
def test_a_template_that_leaves_out_calls_is_refused(content: str | None, text_arguments: bool) -> None:
    messages = chat(call("weather", city="paris"), content=content)
    if text_arguments:
        function = messages[1]["tool_calls"][0]["function"]
        function["arguments"] = json.dumps(function["arguments"])
    ChatRenderer(byte_tokenizer(CALLS)).require_tools_rendered(messages, None)
    with pytest.raises(HiddenToolsError, match=r"tool_calls.*model\.chat_template"):
        ChatRenderer(byte_tokenizer(CHATML)).require_tools_rendered(messages, None)


@pytest.mark.parametrize(
    ("written", "missing"), [("{{ call.function.name }}", "arguments"), ("{{ call.function.arguments }}", "name")]
)
def test_half_of_a_call_is_not_enough(written: str, missing: str) -> None:
    renderer = ChatRenderer(byte_tokenizer(CALLS.replace("{{ call.function | tojson }}", written)))
    with pytest.raises(HiddenToolsError, match=missing):
        renderer.require_tools_rendered(PARIS, None)


def test_calls_that_only_show_without_content_are_found_when_they_have_content() -> None:
    template = CALLS.replace(
        "{% for call in m.tool_calls or [] %}", "{% for call in m.tool_calls or [] if not m.content %}"
    )
    renderer = ChatRenderer(byte_tokenizer(template))
    renderer.require_tools_rendered(PARIS, None)
    with pytest.raises(HiddenToolsError):
        renderer.require_tools_rendered(chat(call("weather", city="paris"), content="so"), None)


def test_a_template_that_hides_tools_is_refused_unless_a_message_names_them() -> None:
    question = [{"role": "user", "content": "how is it?"}]
    ChatRenderer(byte_tokenizer(SHOWN)).require_tools_shown(question, [TOOL])
    hiding = ChatRenderer(byte_tokenizer(CALLS))
    with pytest.raises(HiddenToolsError, match=r"`tools`.*model\.chat_template"):
        hiding.require_tools_shown(question, [TOOL])
    hiding.require_tools_shown([{"role": "system", "content": "Use weather(city)."}, *question], [TOOL])


@pytest.mark.parametrize("arguments", [("train",), ("check", "--deep")])
def test_sft_refuses_a_template_without_tool_calls_even_when_rows_are_skipped(
    workspace: Workspace, arguments: tuple[str, ...]
) -> None:
    workspace.rows("train.jsonl", [{"messages": PARIS}] * 8)
    recipe = workspace.recipe(data={"on_error": "skip", "max_skipped_share": 1.0})
    workspace.refused(workspace.podium(*arguments, recipe), "train.jsonl, line", "tool_calls", "model.chat_template")


def test_deep_check_shows_that_nulls_were_left_out(workspace: Workspace) -> None:
    parquet(workspace.path, [{"messages": PARIS}, {"messages": SUM}])
    (workspace.path / "calls.jinja").write_text(CALLS.replace("<tool_call>", "").replace("</tool_call>", ""))
    recipe = workspace.recipe(data={"train": [{"path": "chats.parquet"}]}, model={"chat_template": "calls.jinja"})
    outcome = workspace.podium("check", recipe, "--deep")
    assert outcome.code == 0, outcome
    assert "note: " in outcome.out
    assert "null" not in outcome.out.partition("note: ")[0]


GRPO: dict[str, Any] = {
    "program": "grpo",
    "data": {"train": [{"path": "prompts.jsonl"}]},
    "reward": [{"function": "task.py:reward"}],
    "environment": {"tools": ["task.py:add"], "max_turns": 2},
    "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 8},
    "placement": {"launcher": "inline"},
    "steps": 1,
}
TASK = '''
def reward(answer, **_):
    return float(len(answer))


def add(left: int, right: int) -> int:
    """Adds two numbers."""
    return left + right
'''


@pytest.fixture
def agent(workspace: Workspace) -> Workspace:
    (workspace.path / "task.py").write_text(TASK)
    workspace.rows("prompts.jsonl", [{"messages": [{"role": "user", "content": f"{at}+1?"}]} for at in range(8)])
    shown = "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}" + TEMPLATE
    (workspace.path / "shown.jinja").write_text(shown)
    return workspace


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("train",), ("check", "--deep")])
def test_grpo_refuses_a_template_that_hides_the_tools_before_step_1(
    agent: Workspace, arguments: tuple[str, ...]
) -> None:
    agent.refused(agent.podium(*arguments, agent.recipe(**GRPO)), "model.chat_template", "environment.hidden_tools")


@pytest.mark.slow
@pytest.mark.parametrize("allowed", ["template", "key"])
def test_grpo_runs_with_tools_that_are_shown_or_meant_to_be_hidden(agent: Workspace, allowed: str) -> None:
    changes = {"model": {"chat_template": "shown.jinja"}}
    if allowed == "key":
        changes = {"environment": {**GRPO["environment"], "hidden_tools": True}}
    outcome = agent.podium("train", agent.recipe(**{**GRPO, **changes}))
    assert outcome.code == 0, outcome
