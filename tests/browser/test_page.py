# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser: what a reader sees and does."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from demo_runs import HOSTILE, STEP_S, metrics_line

pytestmark = pytest.mark.browser
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: run `make test-browser`")
expect = sync_api.expect
expect.set_options(timeout=15_000)
if TYPE_CHECKING:
    from playwright.sync_api import Page

    from conftest import OpenPage, Serve

VIEWS = {
    "runs": "#/",
    "overview": "#/run/agent",
    "curves": "#/run/agent/curves?smooth=0.6",
    "timeline": "#/run/agent/timeline",
    "rollouts": "#/run/agent/rollouts",
    "group": "#/run/agent/rollouts/6/33",
    "turns": "#/run/agent/rollouts/6/33?view=turns",
    "held-out": "#/run/agent/heldout",
    "rows": "#/run/imitation/examples",
    "system": "#/run/agent/system",
    "recipe": "#/run/agent/recipe",
    "compare": "#/compare?runs=agent,agent-higher-lr",
    "broken": "#/run/broken-recipe",
    "missing": "#/run/no-such-run",
}


def test_the_page_lists_runs_and_says_what_is_broken(open_page: OpenPage, address: str) -> None:
    page = open_page(address)
    expect(page.locator("tbody tr")).to_have_count(5)
    agent = page.locator("tbody tr", has=page.get_by_role("link", name="agent", exact=True))
    expect(agent).to_contain_text("grpo")
    expect(agent).to_contain_text("60/60")
    expect(page.locator("tbody tr", has_text="half-written")).to_contain_text("run.json is damaged")
    expect(page.locator("tbody tr", has_text="broken-recipe")).to_contain_text("not valid YAML")


def test_the_table_is_filtered_and_sorted(open_page: OpenPage, address: str) -> None:
    page = open_page(address)
    page.get_by_role("button", name="step", exact=True).click()
    expect(page.locator("tbody tr").first).to_contain_text("imitation")
    page.keyboard.press("/")
    page.keyboard.type("grpo higher")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.reload()  # the address has the filter
    expect(page.locator("tbody tr")).to_have_count(1)
    page.keyboard.press("/")
    page.keyboard.type(" no such run")
    expect(page.get_by_text("No run matches the filter")).to_be_visible()


def test_chosen_runs_are_compared(open_page: OpenPage, address: str) -> None:
    page = open_page(address)
    page.get_by_label("choose agent", exact=True).check()
    page.get_by_label("choose agent-higher-lr").check()
    page.get_by_role("link", name="Compare curves and recipes").click()
    row = page.locator("tr", has_text="optimizer.lr")
    expect(row).to_contain_text("0.000001")
    expect(row).to_contain_text("0.000003")
    expect(page.locator("tr", has_text="optimizer.betas")).to_have_count(0)
    chart = page.locator('[data-chart="reward/mean"]')
    expect(chart.locator(".legend li")).to_have_text([re.compile(r"agent \d"), re.compile(r"agent-higher-lr \d")])
    expect(page.get_by_role("heading", name="First differences")).to_be_visible()


def test_a_live_update_arrives(open_page: OpenPage, serve: Serve, runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "agent", tmp_path / "agent", ignore=shutil.ignore_patterns("rollouts"))
    with serve(tmp_path) as url:
        page = open_page(f"{url}#/run/agent/curves")
        legend = page.locator('[data-chart="reward/mean"] .legend')
        expect(legend).to_contain_text("reward/mean 0.")
        expect(page.locator("#connection")).to_have_text("connected")
        line = metrics_line("grpo", 61, random.Random(0)) | {"reward/mean": 7.25, "newly/logged": 3.5}
        with (tmp_path / "agent" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        expect(legend).to_contain_text("reward/mean 7.25")
        expect(page.locator(".run-head")).to_contain_text("step 61")
        page.get_by_text("All others").click()
        expect(page.locator('[data-chart="newly/logged"] .legend')).to_contain_text("3.5")


@contextmanager
def _command(runs: Path, port: int) -> Iterator[str]:
    """`podium ui` as a process; killed at the end."""
    command = [sys.executable, "-m", "podium", "ui", str(runs), "--port", str(port), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.search(r"http://127\.0\.0\.1:\d+/", line):
                    yield found[0]
                    return
            raise AssertionError("podium ui ended without an address")
        finally:
            process.kill()


def test_a_server_that_is_gone_is_said_and_its_return_is_noticed(open_page: OpenPage, runs: Path) -> None:
    with _command(runs, 0) as url:
        page = open_page(f"{url}#/run/agent/curves")
        expect(page.locator("#connection")).to_have_text("connected")
    expect(page.locator("#connection")).to_contain_text("no server")
    page.evaluate("location.hash = '#/run/imitation'")
    expect(page.get_by_text("No answer from the server")).to_be_visible()
    with _command(runs, int(url.rstrip("/").rpartition(":")[2])):
        expect(page.get_by_role("heading", name="imitation")).to_be_visible()
        expect(page.locator("#connection")).to_have_text("connected")


def _range(page: Page) -> tuple[float, float]:
    begin, end = page.locator("canvas.timeline").evaluate("node => [node.dataset.from, node.dataset.to]")
    return float(begin), float(end)


def test_the_timeline_zooms_from_the_whole_run_to_one_step(open_page: OpenPage, address: str) -> None:
    page = open_page(f"{address}#/run/agent/timeline")
    canvas = page.locator("canvas.timeline")
    expect(canvas).to_be_visible()
    assert _range(page) == (0.0, pytest.approx(20 + 60 * STEP_S, abs=0.01))
    canvas.focus()
    page.keyboard.press("+")
    assert _range(page) == (pytest.approx(65.0, abs=0.01), pytest.approx(195.0, abs=0.01))
    page.keyboard.press("ArrowRight")
    assert _range(page)[0] == pytest.approx(65 + 0.2 * 130, abs=0.01)
    page.get_by_role("button", name="Whole run").click()
    assert _range(page)[0] == 0.0
    box = canvas.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 2, box["y"] + 60)
    page.mouse.wheel(0, -400)
    expect(canvas).not_to_have_attribute("data-from", "0")
    assert _range(page)[1] == pytest.approx(260.0, rel=0.01)  # what is under the pointer stays there
    with page.expect_response(re.compile(r"/timeline\?from_s=")):
        page.get_by_label("Zoom to one step").fill("12")
        page.keyboard.press("Enter")
    begin, end = _range(page)
    assert end - begin == pytest.approx(1.1 * STEP_S, rel=0.1)
    assert begin < 20 + 12 * STEP_S < end  # metrics of the step are written at its end
    page.wait_for_url(re.compile(rf"from={int(begin)}\."))
    page.reload()
    expect(page.locator("canvas.timeline")).to_be_visible()
    assert _range(page) == (pytest.approx(begin, abs=0.01), pytest.approx(end, abs=0.01))


def test_the_timeline_names_phases_idle_causes_and_deaths(open_page: OpenPage, address: str) -> None:
    page = open_page(f"{address}#/run/agent/timeline?from=139&to=143")
    canvas = page.locator("canvas.timeline")
    expect(page.locator(".legend-box")).to_contain_text("recovery")
    box = canvas.bounding_box()
    assert box is not None
    tooltip = page.locator("#tooltip")
    left, width = 150, box["width"] - 150

    def point(seconds: float, lane_y: float) -> None:
        page.mouse.move(box["x"] + left + width * (seconds - 139) / 4, box["y"] + lane_y)

    point(140, 20)
    expect(tooltip).to_contain_text("rollout[1] was killed")
    point(141, 40)  # the controller's lane is the first
    expect(tooltip).to_contain_text("controller")
    expect(tooltip).to_contain_text("generation")
    trainers = page.locator(".account", has=page.get_by_role("heading", name="train"))
    expect(trainers).to_contain_text("2 workers, 8m 40s")
    idle = re.search(r"(\d+)% idle", trainers.inner_text())  # 2.6 s of the 4 of a step, and perhaps the start
    assert idle is not None
    assert 60 <= int(idle[1]) <= 70
    key = page.locator(".key.idle").first
    key.click()
    expect(key).to_have_attribute("aria-pressed", "false")


def test_the_overview_says_what_stands_out(open_page: OpenPage, address: str) -> None:
    """The demo's second generator takes twice as long for the same tokens."""
    page = open_page(f"{address}#/run/agent")
    found = page.locator(".findings li.alarm", has_text="rollout[1] is slow")
    expect(found).to_contain_text("139 tokens/s while it has work, and the other generator 267", timeout=60_000)
    expect(page.locator('.small-charts [data-chart="reward/mean"] .legend')).to_contain_text("reward/mean 0.")
    expect(page.locator('.small-charts [data-chart="staleness/mean"]')).to_be_visible()
    found.get_by_role("link", name="Timeline").click()
    generators = page.locator(".account", has=page.get_by_role("heading", name="rollout"))
    expect(generators).to_contain_text("Unequal: rollout[1] is idle")
    expect(page.locator(".findings")).to_contain_text("rollout[1] is slow")


def test_a_token_shows_its_version(open_page: OpenPage, address: str) -> None:
    page = open_page(f"{address}#/run/agent/rollouts/6/33?color=version")
    tokens = page.locator(".episode").first.locator(".token")
    tooltip = page.locator("#tooltip")
    tokens.last.hover()
    for text in ("version 5", "log-prob -", "loss mask trained", "advantage ", "id "):
        expect(tooltip).to_contain_text(text)
    first_sampled = page.locator(".episode").first.locator(".token:not(.of-prompt)").first
    first_sampled.hover()
    expect(tooltip).to_contain_text("version 4")
    colors = [each.evaluate("node => getComputedStyle(node).backgroundColor") for each in (first_sampled, tokens.last)]
    assert colors[0] != colors[1]
    tokens.first.focus()
    expect(tooltip).to_contain_text("version –")
    expect(tooltip).to_contain_text("prompt")
    page.keyboard.press("End")
    expect(tooltip).to_contain_text("version 5")
    page.get_by_label("colour").select_option("advantage")
    assert tokens.last.evaluate("node => node.style.background") != ""
    assert "color=advantage" in page.url


def test_rollouts_are_searched_sorted_and_paged(open_page: OpenPage, address: str) -> None:
    page = open_page(f"{address}#/run/agent/rollouts")
    expect(page.get_by_text("1,440 episodes").first).to_be_visible()
    expect(page.locator("tbody tr").first).to_contain_text("60")
    page.get_by_label("first").select_option("reward")
    expect(page.locator("tbody tr").first).to_contain_text("0.1")
    page.get_by_label("first").select_option("-reward")
    expect(page.locator("tbody tr").first).to_contain_text("1.1")
    page.keyboard.press("]")
    expect(page.get_by_text("page 2 of 29").first).to_be_visible()
    page.get_by_label("changed since step").fill("61")
    expect(page.get_by_text("No episode matches")).to_be_visible()
    page.get_by_label("changed since step").fill("")
    page.get_by_role("searchbox").fill("What is 21 plus 87?")
    expect(page.locator("tbody tr").first).to_contain_text("What is 21 plus 87?")
    page.locator("tbody tr").first.click()
    expect(page.locator(".prompt")).to_contain_text("What is 21 plus 87?")
    expect(page.locator(".episode")).to_have_count(4)


def test_the_rest_of_a_long_answer_is_a_click_away(
    open_page: OpenPage, serve: Serve, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("podium.ui.rollout_groups._MOST_OF_EPISODE", 12)
    monkeypatch.setattr("podium.ui.rollout_groups._MOST_EPISODES", 3)
    with serve(runs) as url:
        page = open_page(f"{url}#/run/agent/rollouts/6/33")
        answers = page.locator(".episode")
        expect(answers).to_have_count(3)
        expect(answers.first.locator(".token")).to_have_count(12)
        expect(answers.first.locator(".left-out")).to_contain_text("more tokens are left out.")
        page.get_by_role("link", name="Next answers").click()
        expect(answers).to_have_count(1)
        expect(page.get_by_text("Answers 4 to 4 of 4")).to_be_visible()
        page.get_by_role("link", name="First answers").click()
        expect(answers).to_have_count(3)

        answers.first.get_by_role("link", name="This answer alone").click()
        expect(answers).to_have_count(1)
        page.get_by_role("link", name="Next tokens").click()
        expect(page.locator(".left-out")).to_contain_text("These are the tokens from 12 on.")
        answers.locator(".token").first.hover()
        expect(page.locator("#tooltip")).to_contain_text("position 12")
        page.get_by_role("link", name="All answers of the group").click()
        expect(answers).to_have_count(3)


def test_turns_show_tool_calls(open_page: OpenPage, address: str) -> None:
    page = open_page(f"{address}#/run/agent/rollouts/6/33?view=turns")
    card = page.locator(".episode").first
    expect(card.locator(".turn .who")).to_have_text(
        ["user", "assistant", "calls calculator", "tool calculator", "assistant"]
    )
    expect(card.locator(".call")).to_contain_text("43 + 75")
    expect(card.locator("table.rewards")).to_contain_text("correct")


def test_rows_of_fixed_data_show_which_tokens_are_trained(open_page: OpenPage, address: str) -> None:
    page = open_page(f"{address}#/run/imitation/examples")
    expect(page.get_by_text("2 of 3 tokens are trained")).to_be_visible()
    tokens = page.locator(".tokens .token")
    assert tokens.first.evaluate("node => node.style.background") == ""
    assert tokens.last.evaluate("node => node.style.background") != ""
    tokens.last.hover()
    expect(page.locator("#tooltip")).to_contain_text("loss mask trained")
    page.locator("select").select_option("1")
    expect(page.locator(".tab-body h2")).to_have_text(["Chosen", "Rejected"])
    expect(page.get_by_text("2 of 9 tokens are trained, the first 3 are here")).to_be_visible()
    expect(page.get_by_role("link", name="Rollouts")).to_have_count(0)


def test_a_run_without_rollouts_says_how_to_keep_them(open_page: OpenPage, address: str) -> None:
    page = open_page(f"{address}#/run/agent-higher-lr/rollouts")
    expect(page.get_by_text("This run keeps no rollouts")).to_be_visible()
    expect(page.get_by_text("rollouts: {keep: sample, per_step: 32}")).to_be_visible()


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("#/run/no-such-run", "Not found"),
        ("#/run/agent/rollouts/6/999999", "Not found"),
        ("#/run/agent/rollouts/777/1", "keeps no rollouts of step 777"),
        ("#/run/broken-recipe", "not valid YAML"),
        ("#/run/half-written", "run.json is damaged"),
        ("#/run/agent/nonsense", "This run has no view"),
        ("#/nowhere", "There is no such page"),
        ("#/run/%E0%A4%A", "Not found"),
        ("#/compare?runs=agent,gone", "Not found"),
    ],
)
def test_what_is_not_there_is_said_nicely(open_page: OpenPage, address: str, where: str, text: str) -> None:
    page = open_page(f"{address}{where}")
    expect(page.locator("main")).to_contain_text(text)
    expect(page.get_by_role("link", name="Podium")).to_be_visible()


@pytest.mark.parametrize(
    "where", ["#/run/agent/rollouts", "#/run/agent/rollouts/5/24", "#/run/agent/rollouts/5/24?view=turns"]
)
def test_html_in_an_answer_stays_text(open_page: OpenPage, address: str, where: str) -> None:
    page = open_page(f"{address}{where}")
    for text in HOSTILE:  # that nothing ran is asserted at the end of every test
        expect(page.locator("main")).to_contain_text(text)
    assert page.locator("main img, main script, main iframe, main svg").count() == 0


def test_html_in_a_held_out_answer_stays_text(open_page: OpenPage, address: str) -> None:
    page = open_page(f"{address}#/run/agent/heldout")
    expect(page.locator("td.said").nth(1)).to_contain_text(HOSTILE[0])
    expect(page.get_by_text("changed", exact=True).first).to_be_visible()
    expect(page.get_by_text("reference: 17")).to_be_visible()


@pytest.mark.parametrize("where", VIEWS.values(), ids=VIEWS)
def test_a_phone_scrolls_only_downwards(open_page: OpenPage, address: str, where: str) -> None:
    page = open_page(f"{address}{where}", is_phone=True)
    expect(page.locator("main")).not_to_contain_text("Loading")
    page.wait_for_load_state("networkidle") if where == "#/" else page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_a_token_is_tapped(open_page: OpenPage, address: str) -> None:
    page = open_page(f"{address}#/run/agent/rollouts/6/33", is_phone=True)
    page.locator(".episode").first.locator(".token").last.tap()
    expect(page.locator("#tooltip")).to_contain_text("version 5")


def test_keys(open_page: OpenPage, address: str) -> None:
    page = open_page(f"{address}#/run/agent")
    expect(page.get_by_role("heading", name="agent")).to_be_visible()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("timeline: zoom in or out")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.keyboard.press("3")
    expect(page.locator("canvas.timeline")).to_be_visible()
    page.keyboard.press("+")
    expect(page.locator("canvas.timeline")).not_to_have_attribute("data-from", "0")
    page.keyboard.press("4")
    expect(page.locator("tbody tr")).to_have_count(50)
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.locator(".episode")).to_have_count(4)
    page.keyboard.press("u")
    expect(page.locator("tbody tr")).to_have_count(50)
    page.keyboard.press("u")
    expect(page.get_by_role("link", name="imitation")).to_be_visible()


def test_dark_follows_the_system_until_the_reader_chooses(open_page: OpenPage, address: str) -> None:
    page = open_page(address, is_dark=True)
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) == "rgb(18, 22, 28)"
    page.keyboard.press("t")
    assert page.evaluate(background) == "rgb(247, 248, 250)"
    page.reload()
    assert page.evaluate(background) == "rgb(247, 248, 250)"


def test_many_steps_are_a_band_that_zooms_into_single_ones(
    open_page: OpenPage, serve: Serve, runs: Path, tmp_path: Path
) -> None:
    shutil.copytree(runs / "imitation", tmp_path / "long")
    lines = [
        json.dumps({"step": step, "time_s": 1.79e9 + step, "loss": 2.0 + (step % 7) / 10}) for step in range(1, 10_001)
    ]
    (tmp_path / "long" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with serve(tmp_path) as url:
        page = open_page(f"{url}#/run/long/curves")
        chart = page.locator('[data-chart="loss"]')
        expect(chart).to_contain_text("band: min to max")
        box = chart.locator(".u-over").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 100, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + 130, box["y"] + 50, steps=4)
        with page.expect_response(re.compile(r"/metrics\?.*from=\d+")) as asked:
            page.mouse.up()
        assert len(asked.value.json()["series"]["loss"]["step"]) > 300
        expect(chart).not_to_contain_text("band: min to max")


def test_smoothing_is_an_average_without_bias_to_the_first_value(open_page: OpenPage, address: str) -> None:
    page = open_page(address)
    found = page.evaluate("import('/chart.js').then((chart) => chart.smoothed([1, null, 3], 0.5))")
    assert found == [1, None, pytest.approx((0.25 * 1 + 0.5 * 3) / 0.75)]
    page.goto(f"{address}#/run/agent/curves")
    chart = page.locator('[data-chart="reward/mean"] canvas')
    before = chart.evaluate("node => node.toDataURL()")
    page.get_by_label("smoothing").fill("0.9")
    expect(page.locator("output").first).to_have_text("0.90")
    page.wait_for_function(
        "before => document.querySelector('[data-chart=\"reward/mean\"] canvas')?.toDataURL() !== before", arg=before
    )
    assert "smooth=0.9" in page.url


def test_another_host_needs_the_token(open_page: OpenPage, serve: Serve, runs: Path) -> None:
    with serve(runs, host="0.0.0.0") as url:
        port = re.search(r":(\d+)/", url)
        token = url.partition("#")[2]
        assert port is not None
        page = open_page(f"http://127.0.0.1:{port[1]}/")
        expect(page.get_by_text("A token is needed")).to_be_visible()
        page = open_page(f"http://127.0.0.1:{port[1]}/#{token}")
        expect(page.locator("tbody tr")).to_have_count(5)
        assert "token" not in page.url
        page.get_by_role("link", name="agent", exact=True).click()
        expect(page.locator("#connection")).to_have_text("connected")  # the stream has the token too
