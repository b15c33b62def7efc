# SPDX-License-Identifier: Apache-2.0
"""Rewards from a judge behind an endpoint: a server on the loopback answers as each test says."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.judge_server import KEY, Reply, blocks_of, judge_server
from podium.data.trajectories import TrajectoryId
from podium.environments.grading import EpisodeGrader, Grade
from podium.environments.judge_endpoint import JudgeEndpoint, JudgeError, JudgeTally, Waiting, read_key
from podium.environments.judges import pairs_of
from podium.environments.rewards import JudgingPlace, Sample, build_rewards
from podium.errors import RecipeError
from podium.recipe.judges import JudgeSection
from podium.recipe.on_policy import JudgeReward, VerifierReward

# Long enough for a busy machine.
PATIENT_S = 30.0


def section(url: str = "http://127.0.0.1:1/v1", **changes: Any) -> JudgeSection:
    return JudgeSection.model_validate({"base_url": url, "model": "m", "rubric": "Be right.", **changes})


def sample(answer: str, number: int = 0, **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "id": TrajectoryId(0, number), "group": 0, "prompt_text": "1+2=", "messages": None, "answer": answer,
        "reference": "3", "row": {}, "source": "sums", "num_tokens": 1,
    }  # fmt: skip
    return Sample(**(values | changes))


def graded(judge: JudgeSection, answers: Sequence[str], *, judging: JudgingPlace | None = None) -> list[Grade]:
    rewards = build_rewards([JudgeReward(judge=judge)], judging=judging)

    async def grades() -> list[Grade]:
        async with EpisodeGrader(rewards, timeout_s=0.01) as grader:  # a judge has deadlines of its own
            return await grader.grade([sample(answer, number) for number, answer in enumerate(answers)])

    return asyncio.run(grades())


def scored(scores: dict[str, float]) -> Callable[[dict[str, Any]], Reply]:
    return lambda body: Reply(text=json.dumps({"score": scores[blocks_of(body)["ANSWER"]]}))


def prefers(points: dict[str, float], tie: float = 0.0) -> Callable[[dict[str, Any]], Reply]:
    """Prefers the answer with more points, and none where they differ by `tie` or less."""

    def answer(body: dict[str, Any]) -> Reply:
        blocks = blocks_of(body)
        ahead = points[blocks["ANSWER A"]] - points[blocks["ANSWER B"]]
        return Reply(text=json.dumps({"better": "tie" if abs(ahead) <= tie else "A" if ahead > 0 else "B"}))

    return answer


class FakeTime:
    """A clock that moves only by waiting."""

    def __init__(self) -> None:
        self.now_s, self.waits_s = 100.0, list[float]()
        self.waiting = Waiting(now_s=lambda: self.now_s, wait=self._wait, chance=lambda: 1.0)

    async def _wait(self, seconds: float) -> None:
        self.waits_s.append(seconds)
        self.now_s += seconds


def asked(judge: JudgeSection, time: FakeTime, key: str | None = None) -> tuple[str, JudgeTally]:
    """One request's answer."""

    async def ask() -> tuple[str, JudgeTally]:
        endpoint, tally = JudgeEndpoint(judge, key, waiting=time.waiting), JudgeTally()
        try:
            return await endpoint.ask(endpoint.body([]), str, tally), tally
        finally:
            endpoint.close()

    return asyncio.run(ask())


def scripted(*replies: Reply) -> Callable[[dict[str, Any]], Reply]:
    left = iter(replies)
    return lambda body: next(left)


def test_a_score_becomes_a_reward_from_0_to_1() -> None:
    with judge_server(scored({"3": 10, "4": 2.5, "no": 0})) as server:
        grades = graded(section(server.url), ["3", "4", "no"])

    assert [grade.total for grade in grades] == [1.0, 0.25, 0.0]
    assert {body["model"] for body in server.requests} == {"m"}
    assert {(body["temperature"], body["max_tokens"]) for body in server.requests} == {(0, 1024)}
    assert server.headers[0]["path"] == "/v1/chat/completions"
    assert all("Authorization" not in headers for headers in server.headers)


def test_fields_of_the_request_replace_the_defaults() -> None:
    changes = {"max_tokens": None, "max_completion_tokens": 9, "temperature": 0.5}
    with judge_server(scored({"a": 2})) as server:
        assert graded(section(server.url, request=changes, score_range=[1, 3]), ["a"])[0].total == 0.5

    assert {name: server.requests[0].get(name) for name in changes} == changes


def test_costs_are_counted() -> None:
    price = {"tokens_in": 2.0, "tokens_out": 30.0}
    with judge_server(scored({"a": 1, "b": 2})) as server:
        grades = graded(section(server.url, price=price, concurrency=1), ["a", "b", "a"])

    extras = [{name.removeprefix("judge/judge/"): value for name, value in grade.extras.items()} for grade in grades]
    paid = {"requests": 1, "retries": 0, "cache_hits": 0, "tokens_in": 100, "tokens_out": 10, "cost": 0.0005}
    free = {"requests": 0, "retries": 0, "cache_hits": 1, "tokens_in": 0, "tokens_out": 0, "cost": 0.0}
    assert extras == [paid, paid, free]
    assert len(server.requests) == 2


def test_without_a_cache_the_same_answer_is_judged_again() -> None:
    with judge_server(scored({"a": 1})) as server:
        graded(section(server.url, cache="none"), ["a", "a", "a"])

    assert len(server.requests) == 3


def test_win_rates_within_a_group() -> None:
    with judge_server(prefers({"a": 3, "b": 2, "c": 2, "d": 0})) as server:
        grades = graded(section(server.url, compare="group"), ["a", "b", "c", "d"])

    # a wins 3 of 3; b and c tie with each other, win against d and lose against a; d wins none.
    assert [grade.total for grade in grades] == [1.0, 0.5, 0.5, 0.0]
    assert len(server.requests) == 12  # 6 pairs in both orders
    totals = [sum(grade.extras[f"judge/judge/{name}"] for grade in grades) for name in ("comparisons", "agreeing")]
    assert totals == [6.0, 6.0]


def test_a_judge_that_prefers_the_first_one_agrees_with_itself_never_and_rewards_all_alike() -> None:
    with judge_server(lambda body: Reply(text='{"better": "A"}')) as server:
        grades = graded(section(server.url, compare="group"), ["a", "b", "c"])

    assert [grade.total for grade in grades] == [0.5, 0.5, 0.5]
    totals = [sum(grade.extras[f"judge/judge/{name}"] for grade in grades) for name in ("comparisons", "agreeing")]
    assert totals == [3.0, 0.0]


def test_equal_answers_tie_without_being_judged() -> None:
    with judge_server(prefers({"a": 1, "b": 0})) as server:
        grades = graded(section(server.url, compare="group"), ["a", "a", "b"])

    assert [grade.total for grade in grades] == [0.75, 0.75, 0.0]
    assert len(server.requests) == 2  # a and b in both orders; the second a's are in the cache


def test_comparisons_with_the_reference() -> None:
    with judge_server(prefers({"good": 2, "3": 1, "bad": 0})) as server:
        grades = graded(section(server.url, compare="reference"), ["good", "bad", "3"])

    assert [grade.total for grade in grades] == [1.0, 0.0, 0.5]
    [grade] = asyncio.run(_grade_without_reference(section(server.url, compare="reference")))
    assert grade.error == "judge the row has no reference to compare the answer with"


async def _grade_without_reference(judge: JudgeSection) -> list[Grade]:
    async with EpisodeGrader(build_rewards([JudgeReward(judge=judge)]), timeout_s=1.0) as grader:
        return await grader.grade([sample("a", reference=None)])


@pytest.mark.parametrize(("count", "opponents"), [(5, None), (8, 2), (8, 4), (7, 6), (4, 6), (2, 2), (9, 4)])
def test_each_answer_has_the_same_number_of_opponents_once(count: int, opponents: int | None) -> None:
    pairs = [frozenset(pair) for pair in pairs_of(count, opponents)]

    assert len(set(pairs)) == len(pairs)
    wanted = count - 1 if opponents is None else min(opponents, count - 1)
    assert [sum(one in pair for pair in pairs) for one in range(count)] == [wanted] * count


def test_a_group_of_one_and_a_failed_comparison_are_failures() -> None:
    def answer(body: dict[str, Any]) -> Reply:
        broken = "c" in (blocks_of(body)["ANSWER A"], blocks_of(body)["ANSWER B"]) and "a" in blocks_of(body).values()
        return Reply(text="I cannot tell." if broken else '{"better": "tie"}')

    with judge_server(answer) as server:
        grades = graded(section(server.url, compare="group"), ["a", "b", "c"])
        alone = graded(section(server.url, compare="group"), ["a"])

    assert [grade.total for grade in grades] == [None, 0.5, None]
    assert "cannot be read: there is no JSON object with `better` in it: 'I cannot tell.'" in str(grades[0].error)
    assert alone[0].error == "judge the group has no other answer to compare with"


def test_an_unreadable_answer_is_asked_for_once_more_and_then_an_error() -> None:
    with judge_server(scripted(Reply(text="hm"), Reply(text='{"score": 5}'))) as server:
        assert graded(section(server.url), ["a"])[0].total == 0.5
    with judge_server(scripted(Reply(text="hm"), Reply(text='{"score": 50}'))) as server:
        [grade] = graded(section(server.url), ["a"])

    assert grade.total is None
    assert "asked for twice, cannot be read: the score 50 is not in the range from 0 to 10" in str(grade.error)
    assert grade.extras["judge/judge/tokens_in"] == 200.0  # it is paid for


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (Reply(body=b"<html>"), "has no text in choices[0].message.content"),
        (Reply(body=b"[" * 200_000), "has no text"),
        (Reply(body=b'{"choices": []}'), "has no text"),
        (Reply(text=None), "has no text"),
        (Reply(body=b" " * (5 << 20)), "larger than 4 MiB"),
        (Reply(text="{", finish_reason="length"), "cut off. Raise judge.request.max_tokens"),
        (Reply(status=404, body=b'{"error": {"message": "no such model"}}'), "answered 404 Not Found: no such model"),
        (Reply(status=302, headers={"Location": "http://127.0.0.1:1/"}), "redirects are not followed"),
        (Reply(status=429, body=b'{"error": {"code": "insufficient_quota", "message": "p"}}'), "Too Many Requests: p"),
    ],
)  # fmt: skip
def test_what_another_try_cannot_mend_is_an_error_at_once(reply: Reply, error: str) -> None:
    with judge_server(lambda body: reply) as server, pytest.raises(JudgeError) as raised:
        asked(section(server.url), time := FakeTime())

    assert error in str(raised.value)
    assert (len(server.requests), time.waits_s) == (1, [])


def test_retries_wait_twice_as_long_each_time() -> None:
    busy = [Reply(status=status, body=b"") for status in (429, 500, 503, 529)]
    with judge_server(scripted(*busy, Reply(text="fine"))) as server:
        text, tally = asked(section(server.url), time := FakeTime())

    assert (text, tally.requests, tally.retries) == ("fine", 5, 4)
    assert time.waits_s == [1.0, 2.0, 4.0, 8.0]


def test_after_the_last_retry_it_is_an_error() -> None:
    asleep = Reply(status=503, body=b'{"error": "asleep"}')
    with judge_server(lambda body: asleep) as server, pytest.raises(JudgeError) as raised:
        asked(section(server.url, retries=2), FakeTime())

    assert str(raised.value) == (
        "the endpoint answered 503 Service Unavailable: asleep; it was sent 3 times (judge.retries)"
    )
    assert len(server.requests) == 3


def test_a_connection_that_is_refused_is_tried_again() -> None:
    with judge_server(scripted()) as server:
        pass
    time = FakeTime()
    with pytest.raises(JudgeError, match="no connection to the endpoint"):
        asked(section(server.url), time)

    assert time.waits_s == [1.0, 2.0, 4.0, 8.0]


def test_the_endpoint_says_how_long_to_wait_and_the_deadline_ends_it() -> None:
    wait = Reply(status=429, headers={"Retry-After": "20"}, body=b"")
    with judge_server(scripted(wait, wait, wait, Reply(text="fine"))) as server:
        text, _ = asked(section(server.url), time := FakeTime())
        assert (text, time.waits_s) == ("fine", [20.0, 20.0, 20.0])
    with judge_server(lambda body: wait) as server, pytest.raises(JudgeError) as raised:
        asked(section(server.url, deadline_s=50), time := FakeTime())

    assert time.waits_s == [20.0, 20.0]
    assert "another try after 20.0 s would be later than 50 s (judge.deadline_s)" in str(raised.value)


def test_a_request_that_is_not_answered_is_given_up_and_its_connection_closed() -> None:
    never = threading.Event()
    with judge_server(scripted(Reply(text="late", wait=never), Reply(text="fine"))) as server:
        text, tally = asked(section(server.url, timeout_s=0.3), FakeTime())
        never.set()

    assert (text, tally.requests, tally.retries) == ("fine", 2, 1)


def test_a_deadline_shorter_than_the_timeout_ends_a_judgement() -> None:
    never = threading.Event()
    with judge_server(lambda body: Reply(text="late", wait=never)) as server:
        with pytest.raises(JudgeError, match=r"did not answer within 0\.3 s \(judge\.deadline_s\)"):
            asked(section(server.url, deadline_s=0.3, retries=0), FakeTime())
        never.set()


def test_requests_keep_their_distance_also_over_several_graders() -> None:
    async def ask(judge: JudgeSection, time: FakeTime) -> None:
        endpoint = JudgeEndpoint(judge, None, share=2, waiting=time.waiting)
        for _ in range(4):
            await endpoint.ask(endpoint.body([]), str, JudgeTally())
        endpoint.close()

    with judge_server(lambda body: Reply(text="fine")) as server:
        asyncio.run(ask(section(server.url, requests_per_second=4), time := FakeTime()))

    assert time.waits_s == [0.5, 0.5, 0.5]  # two graders: 2 requests per second for each


def test_requests_at_the_same_time_are_limited() -> None:
    barrier = threading.Barrier(3)

    def answer(body: dict[str, Any]) -> Reply:
        barrier.wait(PATIENT_S)  # 3 are open at once
        return Reply(text='{"score": 10}')

    with judge_server(answer) as server:
        grades = graded(section(server.url, concurrency=3), [f"answer {number}" for number in range(9)])

    assert [grade.total for grade in grades] == [1.0] * 9
    assert server.most_open == 3


def test_a_resumed_run_reads_the_cache_of_the_run_folder(tmp_path: Path) -> None:
    place = JudgingPlace(folder=tmp_path / "judge_cache")
    with judge_server(scored({"a": 1, "b": 2, "c": 4})) as server:
        judge = section(server.url, cache="run_folder")
        graded(judge, ["a", "b"], judging=place)
        [file] = place.folder.glob("*.jsonl") if place.folder else []
        with file.open("a") as half:
            half.write('{"key": "00')  # the process was killed
        grades = graded(judge, ["a", "b", "c"], judging=place)
        graded(judge.model_copy(update={"rubric": "Be kind."}), ["a"], judging=place)

    assert [grade.total for grade in grades] == [0.1, 0.2, 0.4]
    assert len(server.requests) == 4  # a, b and c, and a by another rubric


def test_the_key_is_in_requests_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JUDGE_KEY", f" {KEY}\n")
    echo = {"error": {"message": f"Incorrect API key provided: {KEY}."}}

    def answer(body: dict[str, Any]) -> Reply:
        status = {"a": 200, "b": 401, "c": 400}[blocks_of(body)["ANSWER"]]
        return Reply(text='{"score": 1}', status=status, body=None if status == 200 else json.dumps(echo).encode())

    with judge_server(answer) as server:
        judge = section(server.url, api_key_env="JUDGE_KEY", cache="run_folder")
        grades = graded(judge, ["a", "b", "c"], judging=JudgingPlace(folder=tmp_path))

    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    assert "401 Unauthorized. Look at judge.api_key_env" in str(grades[1].error)
    assert "Incorrect API key provided: [key]." in str(grades[2].error)
    output = capfd.readouterr()
    files = "".join(file.read_text() for file in tmp_path.rglob("*") if file.is_file())
    assert "score" in files
    for text in (files, repr(grades), output.out, output.err, judge.model_dump_json(), repr(server.requests)):
        assert KEY not in text


def test_a_key_is_read_from_a_file_and_refused_without_being_shown(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    assert read_key(section(api_key_file=str(file)), "reward.0.judge") == KEY
    file.write_text(f"{KEY}\nX-Header: 1")
    for judge, error in (
        (section(api_key_file=str(file)), "several lines"),
        (section(api_key_file=str(tmp_path / "none")), r"cannot be read \(FileNotFoundError\)"),
        (section(api_key_env="NO_SUCH_VARIABLE"), "NO_SUCH_VARIABLE is not set"),
    ):
        with pytest.raises(RecipeError, match=error) as raised:
            read_key(judge, "reward.0.judge")
        assert KEY not in str(raised.value)
        assert str(raised.value).startswith("reward.0.judge.api_key_")


def test_a_judge_stands_beside_other_rewards() -> None:
    with judge_server(scored({"3": 4, "4": 8})) as server:
        sections = [VerifierReward(verifier="numeric", weight=2.0), JudgeReward(judge=section(server.url), weight=0.5)]
        rewards = build_rewards(sections)

        async def grades() -> list[Grade]:
            async with EpisodeGrader(rewards, timeout_s=PATIENT_S) as grader:
                return await grader.grade([sample("3"), sample("4", 1)])

        assert [grade.total for grade in asyncio.run(grades())] == [2.0 + 0.5 * 0.4, 0.5 * 0.8]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"base_url": "ftp://host/v1"}, "expected a URL"),
        ({"base_url": "https://user:secret@host/v1"}, "password would be stored"),
        ({"base_url": "https://host/v1?key=1"}, "without a query"),
        ({"base_url": "http://host/v1", "api_key_env": "K"}, "without encryption"),
        ({"api_key_env": "K", "api_key_file": "f"}, "Remove one"),
        ({"score_range": [3, 3]}, "not below"),
        ({"score_range": [0, 1], "compare": "group"}, "win rates"),
        ({"opponents": 3, "compare": "group"}, "even number"),
        ({"opponents": 2}, "even number"),
        ({"request": {"stream": True}}, "Podium sets stream itself"),
    ],
)
def test_what_a_judge_cannot_have_is_refused(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error) as raised:
        section(**{"base_url": "http://127.0.0.1:1/v1", **changes})
    assert "secret" not in str(raised.value) or "base_url" in changes


def test_a_key_may_go_where_nobody_can_read_it() -> None:
    for url in ("https://host/v1", "http://127.0.0.9/v1", "http://localhost:8/v1", "http://[::1]:8/v1"):
        assert section(url, api_key_env="K").has_key
    assert section("http://host/v1", api_key_env="K", plain_http=True).has_key
    assert not section("http://host/v1").has_key


def test_the_longest_time_of_a_batch_allows_every_judgement_its_deadline() -> None:
    judge = section(deadline_s=10, concurrency=4, requests_per_second=2, retries=1, compare="group")
    # 8 episodes in groups of 4: 24 requests, 12 for each of 4 places of two graders.
    assert judge.longest_s(8, 4) == 10 * (1 + 24 / 4) + 24 * 3 / 2
    assert judge.longest_s(8, 4, share=2) == 10 * (1 + 24 / 2) + 2 * 24 * 3 / 2
    assert section(deadline_s=10, concurrency=4).longest_s(8, 4) == 30.0
