# SPDX-License-Identifier: Apache-2.0
"""Episodes with scripted policies: limits, rewards where they belong, and failures that end one episode only."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted import CHATML, COUNTING, ScriptedPolicy, answer, byte_tokenizer, encoded, task

from podium.data.tasks import Task
from podium.data.trajectories import TrajectoryId
from podium.environments.environment_factory import environment_maker
from podium.environments.episode import (
    Episode,
    EpisodeLimits,
    Policy,
    TurnAnswer,
    TurnRequest,
    block_of,
    run_episode,
    run_episodes,
)
from podium.environments.protocol import Environment, Observation, Outcome, SingleTurn, Turn
from podium.environments.tools import ToolEnvironment
from podium.environments.transcript import TurnTokenizer
from podium.errors import RecipeError
from podium.recipe.on_policy import EnvironmentSection

TOKENIZER = byte_tokenizer(CHATML)
TURNS = TurnTokenizer(TOKENIZER)
LIMITS = EpisodeLimits(max_turns=4, max_new_tokens=100, timeout_s=10.0)
ASK = '<tool_call>{"name": "multiply", "arguments": {"a": 17, "b": 23}}</tool_call>'


def multiply(a: int, b: int) -> int:
    """Multiplies."""
    return a * b


class Guessing:
    """The model guesses a number; the nearer the better, and 42 ends it."""

    def __init__(self) -> None:
        self.closed = False

    async def reset(self, task: Any, /) -> Observation:
        return Observation(messages="Guess.")

    async def step(self, turn: Turn, /) -> Outcome:
        if not turn.text.isdigit():
            return Outcome(messages="A number.", reward=-1.0, metrics={"words": 1.0})
        guess = int(turn.text)
        return Outcome(messages="Higher." if guess < 42 else "Lower.", reward=0.5, done=guess == 42)

    async def close(self) -> None:
        self.closed = True


def play(
    environment: Environment,
    policy: Policy,
    *,
    limits: EpisodeLimits = LIMITS,
    turns: TurnTokenizer = TURNS,
    **named: Any,
) -> Episode:
    """One episode about `task`, 17*23? by default."""

    async def main() -> Episode:
        async with asyncio.timeout(30):
            about = named.pop("task", task())
            return await run_episode(environment, about, policy, turns, id=TrajectoryId(3, 1), limits=limits, **named)

    return asyncio.run(main())


def says(*lines: str) -> ScriptedPolicy:
    return ScriptedPolicy(TOKENIZER, lines)


# --- what an episode is -------------------------------------------------------------------------------------------


def test_a_tool_is_called_and_its_result_answered() -> None:
    policy = says(ASK, "391")
    episode = play(ToolEnvironment([multiply]), policy)

    prompt = "<|im_start|>system\nTools as <tool_call>: multiply<|im_end|>\n<|im_start|>user\n17*23?<|im_end|>\n"
    result = "\n<|im_start|>user\n<tool_response>391</tool_response><|im_end|>\n<|im_start|>assistant\n"
    parts = [prompt + "<|im_start|>assistant\n", ASK + "<|im_end|>", result, "391<|im_end|>"]
    assert TOKENIZER.decode(episode.tokens_T.tolist()) == "".join(parts)
    lengths = [len(encoded(TOKENIZER, part)) for part in parts]
    assert episode.loss_mask_T.tolist() == [number % 2 == 1 for number in range(4) for _ in range(lengths[number])]
    assert episode.turn_ends == (sum(lengths[:2]) - 1, sum(lengths) - 1)
    assert episode.num_prompt_tokens == lengths[0]
    assert (episode.finish, episode.error, episode.num_turns, episode.answer) == ("done", None, 2, "391")
    assert [message["role"] for message in episode.messages] == ["user", "assistant", "tool", "assistant"]
    assert episode.num_prompt_messages == 1
    assert episode.metrics == {"turns": 2.0, "tool_calls": 1.0, "failed_tool_calls": 0.0, "tool_faults": 0.0}


def test_every_turn_has_the_whole_conversation_so_far() -> None:
    policy = says(ASK, "391")
    episode = play(ToolEnvironment([multiply]), policy, greedy=True)
    first, second = policy.requests
    assert (first.id, first.turn, first.greedy) == (TrajectoryId(3, 1), 0, True)
    assert first.prompt.tolist() == episode.tokens_T[: episode.num_prompt_tokens].tolist()
    assert (second.id, second.turn) == (TrajectoryId(3, 1), 1)
    assert second.prompt.tolist() == episode.tokens_T[: -len(encoded(TOKENIZER, "391<|im_end|>"))].tolist()
    assert second.prompt.dtype == np.int32


def test_rewards_belong_to_turns_and_add_up() -> None:
    environment = Guessing()
    episode = play(environment, says("what?", "50", "42"))
    assert episode.turn_rewards == (-1.0, 0.5, 0.5)
    assert episode.reward == 0.0
    assert episode.finish == "done"
    assert episode.metrics == {"words": 1.0}
    assert len(episode.turn_ends) == 3
    end = encoded(TOKENIZER, "<|im_end|>")[0]
    assert [episode.tokens_T[position] for position in episode.turn_ends] == [end] * 3
    assert environment.closed


def test_what_is_said_with_the_last_outcome_is_recorded_and_not_tokenized() -> None:
    episode = play(Guessing(), says("42"))
    assert episode.messages[-1] == {"role": "user", "content": "Lower."}
    assert episode.answer == "42"
    assert TOKENIZER.decode(episode.tokens_T.tolist()).endswith("assistant\n42<|im_end|>")


def test_a_single_turn_ends_after_the_first_answer() -> None:
    episode = play(SingleTurn(), says("391"))
    assert (episode.finish, episode.num_turns, episode.turn_rewards) == ("done", 1, (0.0,))


def test_raw_text_is_continued_without_a_template() -> None:
    class Shell:
        def reset(self, task: Any, /) -> None:
            return None

        def step(self, turn: Turn, /) -> Outcome:
            return Outcome(messages="$ ", done=turn.text == "exit\n")

    tokenizer = byte_tokenizer(None, eos="</s>")
    policy = ScriptedPolicy(tokenizer, ["ls\n", "exit\n"], end="")
    episode = play(Shell(), policy, turns=TurnTokenizer(tokenizer), task=task(text="$ "))
    assert tokenizer.decode(episode.tokens_T.tolist()) == "$ ls\n$ exit\n"
    assert [message["role"] for message in episode.messages] == ["user", "assistant", "user", "assistant", "user"]


def test_versions_and_logprobs_are_those_of_the_policy() -> None:
    episode = play(SingleTurn(), says("42"))
    assert episode.versions_T[episode.loss_mask_T].tolist() == [3, 3, 3]
    assert episode.behavior_logprobs_T[episode.loss_mask_T].tolist() == [-0.5, -1.0, -1.5]
    assert set(episode.versions_T[~episode.loss_mask_T].tolist()) == {-1}


def test_episodes_become_a_block() -> None:
    episodes = [play(SingleTurn(), says(text)) for text in ("1", "22")]
    block = block_of(episodes)
    assert list(block.ids) == [TrajectoryId(3, 1)] * 2
    assert block.lengths_N.tolist() == [len(episode.tokens_T) for episode in episodes]
    assert block.loss_mask_T.sum() == 5
    assert len(block_of([]).ids) == 0


# --- limits -------------------------------------------------------------------------------------------------------


def test_the_model_has_so_many_turns() -> None:
    limits = EpisodeLimits(max_turns=2, max_new_tokens=100)
    episode = play(Guessing(), says("1", "2", "3"), limits=limits)
    assert (episode.finish, episode.num_turns, episode.turn_rewards) == ("turns", 2, (0.5, 0.5))
    assert TOKENIZER.decode(episode.tokens_T.tolist()).endswith("assistant\n2<|im_end|>")


def test_an_answer_that_is_cut_off_is_stepped_and_ends_the_episode_if_the_environment_has_no_more_to_say() -> None:
    limits = EpisodeLimits(max_turns=4, max_new_tokens=10)
    policy = says("The answer to this is 391.")
    episode = play(ToolEnvironment([multiply]), policy, limits=limits)
    assert policy.requests[0].max_new_tokens == 10
    assert (episode.finish, episode.num_turns, episode.loss_mask_T.sum()) == ("tokens", 1, 10)
    assert episode.answer == "The answer"


def test_a_truncated_call_comes_back_as_an_error_that_can_be_fixed() -> None:
    limits = EpisodeLimits(max_turns=4, max_new_tokens=20)
    episode = play(ToolEnvironment([multiply]), says(ASK, "391"), limits=limits)
    assert re.search("^error: .*</tool_call>", episode.messages[2]["content"])
    assert (episode.finish, episode.metrics["failed_tool_calls"]) == ("done", 1.0)


def test_an_answer_that_is_cut_off_can_be_followed_by_another() -> None:
    limits = EpisodeLimits(max_turns=4, max_new_tokens=3)
    episode = play(Guessing(), says("hello", "42"), limits=limits)
    assert episode.finish == "done"
    assert episode.turn_rewards == (-1.0, 0.5)
    text = TOKENIZER.decode(episode.tokens_T.tolist())
    assert "assistant\nhel<|im_end|>\n<|im_start|>user\nA number.<|im_end|>" in text
    assert episode.loss_mask_T.sum() == 3 + 3


@pytest.mark.parametrize("where", ["episode", "context"])
def test_tokens_of_the_environment_count_towards_the_limit(where: str) -> None:
    """`12` and its end are 3 tokens, the reply 27: newline, im_start, user and newline (5), `Higher.` (7), im_end,
    newline, im_start, assistant and newline (10). So the second answer begins behind 30 tokens."""
    assert len(encoded(TOKENIZER, "\n<|im_start|>user\nHigher.<|im_end|>\n<|im_start|>assistant\n")) == 27
    begin = len(encoded(TOKENIZER, "<|im_start|>user\nGuess.<|im_end|>\n<|im_start|>assistant\n"))

    def limited(tokens: int) -> EpisodeLimits:
        if where == "episode":
            return EpisodeLimits(max_turns=4, max_new_tokens=100, max_episode_tokens=tokens)
        return EpisodeLimits(max_turns=4, max_new_tokens=100, max_length=begin + tokens)

    no_room = play(Guessing(), says("12", "42"), limits=limited(30))
    assert (no_room.finish, no_room.num_turns, len(no_room.tokens_T)) == ("tokens", 1, begin + 3)
    policy = says("12", "42")
    one_token = play(Guessing(), policy, limits=limited(31))
    assert policy.requests[1].max_new_tokens == 1
    assert (one_token.finish, one_token.num_turns, len(one_token.tokens_T)) == ("tokens", 2, begin + 31)
    assert play(Guessing(), says("12", "42"), limits=limited(33)).finish == "done"


def test_a_prompt_that_fills_the_context_is_an_error() -> None:
    episode = play(SingleTurn(), says("4"), limits=EpisodeLimits(max_turns=1, max_new_tokens=4, max_length=10))
    assert episode.finish == "error"
    assert "at most 10" in str(episode.error)


# --- failures -----------------------------------------------------------------------------------------------------


class Broken:
    """Does in one method what it is told to, and else guesses."""

    def __init__(self, method: str, fault: Any) -> None:
        self._method, self._fault, self._inner = method, fault, Guessing()

    async def reset(self, task: Any, /) -> Any:
        return await self._fault() if self._method == "reset" else await self._inner.reset(task)

    async def step(self, turn: Turn, /) -> Any:
        return await self._fault() if self._method == "step" and turn.number == 1 else await self._inner.step(turn)

    async def close(self) -> None:
        if self._method == "close":
            await self._fault()


async def _raises() -> None:
    raise ValueError("no more cheese")


async def _hangs() -> None:
    await asyncio.Event().wait()


def gives(value: Any) -> Any:
    async def give() -> Any:
        return value

    return give


@pytest.mark.parametrize(
    ("method", "fault", "why"),
    [
        ("reset", _raises, "^reset: ValueError: no more cheese"),
        ("reset", _hangs, r"^reset: TimeoutError: .*0\.2 s"),
        ("reset", gives("hello"), r"^reset .*\bstr\b.*\bObservation\b"),
        ("reset", gives(Observation(messages="a", text="b")), "^reset .*messages.* text"),
        ("reset", gives(Observation(messages=[])), "^reset .*`messages`.*empty"),
        ("step", _raises, "^step: ValueError: no more cheese"),
        ("step", _hangs, r"^step: TimeoutError: .*0\.2 s"),
        ("step", gives(None), r"^step .*\bNone\b.*\bOutcome\b"),
        ("step", gives(Outcome()), r"^step .*no messages"),
        ("step", gives(Outcome(messages=[{"role": "user"}])), r"step: messages\[0\] \(user\) .*`content`"),
        ("step", gives(Outcome(done=True, reward=float("nan"))), r"^step .*reward nan\b"),
        ("step", gives(Outcome(done=True, reward="much")), "^step .*'much'"),  # type: ignore[arg-type]
        ("step", gives(Outcome(done=True, metrics={"a": "b"})), "^step .*'b'"),  # type: ignore[dict-item]
        ("step", gives(Outcome(messages="half \ud83d")), "the tokenizer"),
    ],
)
def test_an_environment_at_fault_ends_its_episode_with_the_reason(method: str, fault: Any, why: str) -> None:
    limits = EpisodeLimits(max_turns=4, max_new_tokens=100, timeout_s=0.2)
    episode = play(Broken(method, fault), says("1", "2", "3"), limits=limits)
    assert episode.finish == "error"
    assert re.search(why, str(episode.error))
    assert not episode.loss_mask_T.any()
    if method == "step":
        assert (episode.num_turns, (episode.versions_T >= 0).sum()) == (2, 4)
        assert episode.turn_rewards[0] == 0.5
    else:
        assert (episode.num_turns, len(episode.tokens_T), episode.turn_rewards) == (0, 0, ())


def test_every_call_of_a_turn_has_its_own_time() -> None:
    """Two calls that hang for 0.1 s each, in a step that other environments would get 0.15 s for."""

    async def multiply(a: int, b: int) -> int:
        await asyncio.Event().wait()
        return 0

    limits = EpisodeLimits(max_turns=4, max_new_tokens=200, timeout_s=0.15)
    episode = play(ToolEnvironment([multiply], timeout_s=0.1), says(ASK + ASK, "391"), limits=limits)
    assert episode.finish == "done"
    results = [message["content"] for message in episode.messages if message["role"] == "tool"]
    assert len(results) == 2
    assert all(re.search(r"^error: multiply .*0\.1 s", result) for result in results)


@pytest.mark.parametrize("fault", [_raises, _hangs])
def test_a_close_that_fails_is_counted_and_spoils_nothing(fault: Any) -> None:
    limits = EpisodeLimits(max_turns=4, max_new_tokens=100, timeout_s=0.2)
    episode = play(Broken("close", fault), says("42"), limits=limits)
    assert (episode.finish, episode.reward, episode.metrics) == ("done", 0.5, {"close_failed": 1.0})


def test_a_template_that_rewrites_ends_the_episode_instead_of_drifting() -> None:
    tokenizer = byte_tokenizer(COUNTING)
    episode = play(Guessing(), ScriptedPolicy(tokenizer, ["1", "2"]), turns=TurnTokenizer(tokenizer))
    assert episode.finish == "error"
    assert "chat template" in str(episode.error)


class Answers:
    """Gives these answers, or raises them."""

    def __init__(self, *answers: TurnAnswer | Exception) -> None:
        self._answers = answers

    async def answer(self, request: TurnRequest, /) -> TurnAnswer:
        found = self._answers[request.turn]
        if isinstance(found, Exception):
            raise found
        return found


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (TurnAnswer(**dict.fromkeys(("tokens_L", "logprobs_L", "versions_L"), np.empty(0, np.int32)), finish="error",
                    error="too long"), "turn 1 (error): too long"),
        (answer([50, 51], "cancelled"), "turn 1 (cancelled)"),
        (answer([], "stop"), "turn 1 with no token"),
    ],
)  # fmt: skip
def test_an_engine_that_does_not_answer_ends_the_episode(broken: TurnAnswer, why: str) -> None:
    first = answer(encoded(TOKENIZER, "1<|im_end|>"))
    episode = play(Guessing(), Answers(first, broken))
    assert episode.finish == "unanswered"
    assert why in str(episode.error)
    assert not episode.loss_mask_T.any()
    assert episode.num_turns == 1 + (len(broken.tokens_L) > 0)


def test_a_broken_policy_is_not_an_episodes_fault() -> None:
    environment = Guessing()
    with pytest.raises(ConnectionError):
        play(environment, Answers(ConnectionError("gone")))
    assert environment.closed


# --- many at a time -----------------------------------------------------------------------------------------------


def jobs(count: int) -> list[tuple[TrajectoryId, Task]]:
    return [(TrajectoryId(number, 0), task(f"{number}*3?")) for number in range(count)]


def play_all(
    make: Any,
    work: Iterator[tuple[TrajectoryId, Task]] | Sequence[tuple[TrajectoryId, Task]],
    policy: Policy,
    **named: Any,
) -> list[Episode]:
    async def main() -> list[Episode]:
        async with asyncio.timeout(60):
            settings = {"limits": LIMITS, "concurrency": 1000, **named}
            return [episode async for episode in run_episodes(make, work, policy, TURNS, **settings)]

    return asyncio.run(main())


class Together:
    """Answers the first turn only when so many episodes wait for it: they are all under way at the same time."""

    def __init__(self, count: int, inner: Policy) -> None:
        self._count, self._inner, self._all = count, inner, asyncio.Event()

    async def answer(self, request: TurnRequest, /) -> TurnAnswer:
        if request.turn == 0:
            self._count -= 1
            if self._count == 0:
                self._all.set()
            await self._all.wait()
        return await self._inner.answer(request)


@pytest.mark.slow
@pytest.mark.serial
def test_a_thousand_episodes_run_at_the_same_time() -> None:
    def line(request: TurnRequest) -> str:
        number = request.id.prompt_index
        return str(number * 3) if request.turn else ASK.replace("23", "3").replace("17", f"{number}")

    async def times(a: int, b: int) -> int:
        """Multiplies."""
        return a * b

    def make() -> Environment:
        return ToolEnvironment([multiply if next(kinds) % 10 == 0 else times])

    times.__name__ = "multiply"
    kinds = iter(range(1000))
    began = time.monotonic()
    episodes = play_all(make, jobs(1000), Together(1000, ScriptedPolicy(TOKENIZER, line)))
    assert time.monotonic() - began < 15  # some 2 s on a free core
    assert sorted(episode.id.prompt_index for episode in episodes) == list(range(1000))
    assert all(episode.answer == str(3 * episode.id.prompt_index) for episode in episodes)
    assert all(episode.messages[2]["content"] == episode.answer for episode in episodes)


def test_no_more_than_the_concurrency_are_under_way_and_jobs_are_read_as_places_become_free() -> None:
    begun: list[int] = []
    most = 0

    def reading() -> Iterator[tuple[TrajectoryId, Task]]:
        nonlocal most
        for job in jobs(50):
            begun.append(job[0].prompt_index)
            most = max(most, len(begun) - policy.ended)
            yield job

    class Counting(ScriptedPolicy):
        ended = 0

        async def answer(self, request: TurnRequest, /) -> TurnAnswer:
            found = await super().answer(request)
            self.ended += 1
            return found

    policy = Counting(TOKENIZER, ["1"])
    episodes = play_all(SingleTurn, reading(), policy, concurrency=7)
    assert len(episodes) == 50
    assert most == 7


def test_one_bad_environment_in_many_spoils_only_its_own_episode() -> None:
    made = iter(range(40))

    def make() -> Environment:
        number = next(made)
        if number == 5:
            raise FileNotFoundError("no map")
        fault = {7: _raises, 8: _hangs}.get(number)
        return Guessing() if fault is None else Broken("reset", fault)

    limits = EpisodeLimits(max_turns=4, max_new_tokens=100, timeout_s=0.3)
    episodes = play_all(make, jobs(40), says("42"), limits=limits)
    errors = {episode.id.prompt_index: str(episode.error) for episode in episodes if episode.finish == "error"}
    assert set(errors) == {5, 7, 8}
    assert "FileNotFoundError: no map" in errors[5]
    assert len(episodes) == 40


def test_finished_episodes_come_out_before_a_broken_policys_exception() -> None:
    class Failing(ScriptedPolicy):
        async def answer(self, request: TurnRequest, /) -> TurnAnswer:
            if request.id.prompt_index == 3:
                raise ConnectionError("gone")
            return await super().answer(request)

    async def main() -> list[int]:
        seen: list[int] = []
        running = run_episodes(SingleTurn, jobs(10), Failing(TOKENIZER, ["1"]), TURNS, limits=LIMITS, concurrency=1)
        try:
            async for episode in running:
                seen.append(episode.id.prompt_index)  # noqa: PERF401 -- what came before the exception counts
        except ConnectionError:
            seen.append(-1)
        assert len(asyncio.all_tasks()) == 1
        return seen

    assert asyncio.run(main()) == [0, 1, 2, -1]


def test_a_caller_that_stops_early_leaves_nothing_running() -> None:
    closed = 0

    class Patient(Guessing):
        async def close(self) -> None:
            nonlocal closed
            closed += 1

    class Endless(ScriptedPolicy):
        async def answer(self, request: TurnRequest, /) -> TurnAnswer:
            if request.id.prompt_index > 0:
                await asyncio.Event().wait()
            return await super().answer(request)

    async def main() -> None:
        running = run_episodes(Patient, jobs(5), Endless(TOKENIZER, ["42"]), TURNS, limits=LIMITS, concurrency=5)
        async with asyncio.timeout(30), contextlib.aclosing(running) as episodes:
            async for episode in episodes:
                assert episode.id.prompt_index == 0
                break
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert closed == 5


# --- from a recipe ------------------------------------------------------------------------------------------------


def test_a_recipe_without_an_environment_asks_once() -> None:
    assert isinstance(environment_maker(None)(), SingleTurn)


def test_a_recipe_names_tools_or_a_class(tmp_path: Path) -> None:
    file = tmp_path / "world.py"
    file.write_text(
        "def add(a: int, b: int) -> int:\n    return a + b\n\n"
        "class World:\n    def __init__(self, size=1):\n        self.size = size\n"
        "    def reset(self, task):\n        pass\n    def step(self, turn):\n        pass\n\n"
        "class Half:\n    def reset(self, task):\n        pass\n"
    )
    tools = environment_maker(EnvironmentSection(tools=(f"{file}:add",)))
    assert isinstance(tools(), ToolEnvironment)
    assert tools() is not tools()
    world: Any = environment_maker(EnvironmentSection(environment=f"{file}:World", options={"size": 3}))()
    assert world.size == 3
    with pytest.raises(RecipeError, match=r"environment\.environment: .*:Half .*'step'"):
        environment_maker(EnvironmentSection(environment=f"{file}:Half"))
    with pytest.raises(RecipeError, match=r"^environment\.tools: "):
        environment_maker(EnvironmentSection())
