# SPDX-License-Identifier: Apache-2.0
"""Agents over a gateway and a scripted generator: what becomes an episode, and what a fault of an agent costs."""

from __future__ import annotations

import asyncio
import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "environments"))  # the tokenizer of bytes
from scripted import CHATML, byte_tokenizer

from helpers.agents import AGENTS
from helpers.tiny import tiny_tokenizer
from podium.data.control_tokens import AS_TEXT, ControlRule
from podium.data.tasks import Task
from podium.data.trajectories import TrajectoryId
from podium.environments.agents import AgentCall, CoroutineAgent
from podium.environments.episode import (
    Episode,
    EpisodeLimits,
    TurnAnswer,
    TurnRequest,
    block_of,
    play_episodes,
    run_episode,
)
from podium.environments.protocol import CallFailedError, EpisodeLostError
from podium.environments.tools import Tool, ToolEnvironment
from podium.environments.transcript import TurnTokenizer
from podium.errors import InvariantError
from podium.recipe import EnvironmentSection
from podium.roles import agent_sessions
from podium.roles.agent_sessions import AgentSessions, AgentSettings
from podium.roles.carriers import SamplingPlan
from podium.roles.episode_runner import note_of
from podium.rollout.requests import Completion, Request, Sampling

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id
PLAN = SamplingPlan(max_new_tokens=8, temperature=1.0, seed=3)


def agents() -> ModuleType:
    module = ModuleType("agents_of_tests")
    exec(AGENTS, module.__dict__)  # the text that runs write into a file
    return module


AGENT = agents()


def text_of(tokens: Any) -> str:
    return str(TOKENIZER.decode(tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)))


def numbers_of(request: Request) -> str:
    """Digits that depend on what an engine's random numbers depend on."""
    key = (request.seed, request.id.prompt_index, request.id.sample, request.id.branch)
    return str(zlib.crc32(repr(key).encode()) % 10_000)


class Generators:
    """Answers with digits that depend on a request's random numbers. `held`: requests wait for a cancellation."""

    def __init__(
        self, *, held: bool = False, broken: bool = False, delay_s: float = 0.0,
        script: Callable[[Request], str] | None = None,
    ) -> None:  # fmt: skip
        self.requests: list[Request] = []
        self.script = script
        self._held, self._broken, self._delay_s = held, broken, delay_s
        self._cancelled: dict[TrajectoryId, asyncio.Event] = {}

    def sampling(self, max_new_tokens: int, *, greedy: bool) -> Sampling:
        return Sampling(max_new_tokens=max_new_tokens, temperature=0.0 if greedy else 1.0, stop_tokens=frozenset({END}))

    def cancel(self, id: TrajectoryId) -> None:
        if id in self._cancelled:
            self._cancelled[id].set()

    async def complete(self, request: Request) -> Completion:
        assert all(request.id != each.id for each in self.requests), "ids of requests are unique"
        self.requests.append(request)
        await asyncio.sleep(self._delay_s)
        if self._broken:
            raise RuntimeError("the generator is gone")
        finish: Any = "stop"
        if self._held:
            self._cancelled[request.id] = asyncio.Event()
            await self._cancelled[request.id].wait()
            finish = "cancelled"
        digits = self.script(request) if self.script is not None else numbers_of(request)
        tokens = [*TOKENIZER(digits, add_special_tokens=False)["input_ids"], END][: request.sampling.max_new_tokens]
        if tokens[-1] != END and finish == "stop":
            finish = "length"
        return Completion(
            id=request.id, prompt=request.prompt, tokens_L=np.array(tokens, np.int32),
            logprobs_L=-np.arange(1, len(tokens) + 1, dtype=np.float32), versions_L=np.full(len(tokens), 5, np.int32),
            finish=finish, stop=END if finish == "stop" else None,
        )  # fmt: skip


class Hosted:
    """The agent in this process, with what a host says of failures. `losses`: how often its process is lost."""

    def __init__(self, function: Callable[..., Any], losses: int = 0) -> None:
        self._agent, self._losses = CoroutineAgent(function), losses
        self.closed = False

    async def reset(self, call: AgentCall) -> Any:
        try:
            result = await asyncio.wait_for(self._agent.reset(call), 20)
        except Exception as error:
            raise CallFailedError(f"{type(error).__name__}: {error}") from error
        if self._losses:
            raise EpisodeLostError("another one", lambda: Hosted(self._agent._function, self._losses - 1))
        return result

    async def close(self) -> None:
        self.closed = True


def question(text: str = "what is 1+2?") -> Task:
    messages = ({"role": "user", "content": text},)
    return Task(source="s", messages=messages, text=None, tools=None, reference="3", row={"at": 1}, place="row 1")


def played(
    function: Callable[..., Any], ids: Sequence[TrajectoryId] = (TrajectoryId(4, 1),), *, generators: Any = None,
    plan: SamplingPlan = PLAN, losses: int = 0, needs_reward: bool = False, rule: ControlRule = AS_TEXT,
    max_length: int = 400, **section: Any,
) -> list[Episode]:  # fmt: skip
    settings = AgentSettings(
        tokenizer=TOKENIZER, max_length=max_length, needs_reward=needs_reward, rule=rule,
        section=EnvironmentSection(agent="agents.py:solve", **section),
    )  # fmt: skip

    async def main() -> list[Episode]:
        jobs = [(id, question()) for id in ids]
        policy: Any = generators or Generators()
        make: Any = lambda: Hosted(function, losses)  # noqa: E731
        async with asyncio.timeout(100), AgentSessions(policy, plan, settings, make) as sessions:
            stream = play_episodes(jobs, sessions.play, concurrency=len(jobs))
            return sorted([each async for each in stream], key=lambda each: each.id)

    return asyncio.run(main())


def one(function: Callable[..., Any], **how: Any) -> Episode:
    [episode] = played(function, **how)
    return episode


# --- what becomes an episode ---


def test_a_conversation_is_one_sequence_of_the_sampled_tokens() -> None:
    generators = Generators()
    episode = one(AGENT.several_turns, generators=generators)

    assert (episode.finish, episode.error, episode.starts, episode.num_turns) == ("done", None, (), 3)
    assert (episode.turn_rewards, episode.whole_reward, episode.reward) == ((), 1.0, 1.0)
    assert episode.turn_parents == (-1, 0, 1)
    sampled = [numbers_of(request) for request in generators.requests]
    assert text_of(episode.tokens_T[episode.loss_mask_T]).replace("<|im_end|>", " ").split() == sampled
    assert (episode.versions_T[episode.loss_mask_T] == 5).all()
    assert (episode.versions_T[~episode.loss_mask_T] == -1).all()
    assert episode.metrics["trained_tokens"] == episode.metrics["sampled_tokens"] == episode.loss_mask_T.sum()
    last = generators.requests[-1].prompt
    assert episode.tokens_T[: len(last)].tolist() == last.tolist()


def test_a_conversation_over_responses_is_one_sequence_too() -> None:
    generators = Generators()
    episode = one(AGENT.two_responses, generators=generators)

    assert (episode.finish, episode.error, episode.starts, episode.num_turns) == ("done", None, (), 2)
    assert episode.metrics["trained_tokens"] == episode.metrics["sampled_tokens"] == episode.loss_mask_T.sum() > 0
    last = generators.requests[-1].prompt
    assert episode.tokens_T[: len(last)].tolist() == last.tolist()


def test_a_tree_trains_every_sampled_token_once() -> None:
    generators = Generators()
    episode = one(AGENT.summarises, generators=generators)

    assert len(generators.requests) == 5  # the sixth was answered from the record
    assert episode.metrics["repeated_requests"] == 1
    assert episode.metrics["sequences"] == 3 == len(episode.starts) + 1
    assert episode.num_turns == 5
    block = block_of([episode])
    found = []
    for begin, end in block.sequences(0):
        text = text_of(block.tokens_T[begin:end])
        assert text.startswith("<|im_start|>user"), "every sequence begins with a prompt of its own"
        found.append(text_of(block.tokens_T[begin:end][block.loss_mask_T[begin:end]]).split("<|im_end|>")[:-1])
    answers = [numbers_of(request) for request in generators.requests]
    assert sorted(each for sequence in found for each in sequence) == sorted(answers)
    assert sorted(map(len, found)) == [1, 2, 2]  # the turn before the fork is trained in one of its two sequences
    note = note_of([episode])
    followers = Counter(note.turn_rewards.parents_K.tolist())
    assert followers.pop(-1) == 2, "two roots"
    assert sorted(followers.values()) == [1, 2], "a turn behind the first, and a fork behind the second"
    assert note.turn_rewards.token_K.tolist() == sorted(note.turn_rewards.token_K.tolist())
    assert note.trained_N.tolist() == note.sampled_N.tolist() == [int(episode.loss_mask_T.sum())]


def test_random_numbers_depend_on_the_episode_and_not_on_its_attempt() -> None:
    ids = [TrajectoryId(4, 1), TrajectoryId(4, 2), TrajectoryId(5, 1)]
    first, again = played(AGENT.summarises, ids), played(AGENT.summarises, [id._replace(attempt=2) for id in ids])

    texts = [text_of(each.tokens_T) for each in first]
    assert [text_of(each.tokens_T) for each in again] == texts
    assert len(set(texts)) == 3
    other = played(AGENT.summarises, ids, plan=SamplingPlan(max_new_tokens=8, temperature=1.0, seed=4))
    assert not {text_of(each.tokens_T) for each in other} & set(texts)


def test_an_episode_that_is_lost_with_its_process_is_played_again_with_the_same_answers() -> None:
    episode = one(AGENT.several_turns, losses=2)

    assert text_of(episode.tokens_T) == text_of(one(AGENT.several_turns).tokens_T)
    assert episode.num_turns == 3


# --- beside the built-in tools ---


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: one
        b: another
    """
    return a + b


ADD = Tool.of(add)


async def adds(task: Task, base_url: str, key: str) -> float:
    """What ToolEnvironment does, as a client of an API."""
    messages: list[Any] = [dict(each) for each in task.messages or ()]
    for _ in range(3):
        status, answer = await AGENT.ask(base_url, key, messages, tools=[ADD.schema])
        assert status == 200, answer
        message = AGENT.said(answer)
        results = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        if not results:
            break
        messages += [message, *({"role": "tool", "content": str(add(**each))} for each in results)]
    return 0.0


class Built(Generators):
    """The same generators, as the policy of built-in environments."""

    async def answer(self, request: TurnRequest) -> TurnAnswer:
        sampling = self.sampling(request.max_new_tokens, greedy=request.greedy)
        id = request.id._replace(attempt=request.turn)
        done = await self.complete(Request(id=id, prompt=request.prompt, sampling=sampling, seed=PLAN.seed))
        return TurnAnswer(
            tokens_L=done.tokens_L, logprobs_L=done.logprobs_L, versions_L=done.versions_L, finish=done.finish
        )


def calls_twice(request: Request) -> str:
    """Two calls, whose arguments depend on the random numbers, and then digits."""
    asked = text_of(request.prompt).count("<tool_call>") - 1
    number = int(numbers_of(request))
    call = json.dumps({"name": "add", "arguments": {"a": number, "b": asked}})
    return f"I add. <tool_call>{call}</tool_call>" if asked < 2 else str(number)


TOOL_TOKENIZER = byte_tokenizer(CHATML)


def test_an_agent_samples_what_the_built_in_tools_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "TOKENIZER", TOOL_TOKENIZER)
    monkeypatch.setitem(globals(), "END", TOOL_TOKENIZER.eos_token_id)
    plan = SamplingPlan(max_new_tokens=90, temperature=1.0, seed=3)
    ids = [TrajectoryId(prompt, sample) for prompt in (4, 5) for sample in (0, 1)]
    over_api = Generators(script=calls_twice)
    agents = played(adds, ids, generators=over_api, plan=plan, max_length=1000)

    built_in = Built(script=calls_twice)
    limits = EpisodeLimits(max_turns=3, max_new_tokens=90, max_length=1000, timeout_s=20)

    async def main() -> list[Episode]:
        turns = TurnTokenizer(TOOL_TOKENIZER)
        return [
            await run_episode(ToolEnvironment([ADD]), question(), built_in, turns, id=id, limits=limits) for id in ids
        ]

    for one_episode, other in zip(agents, asyncio.run(main()), strict=True):
        assert one_episode.num_turns == other.num_turns == 3
        assert text_of(one_episode.tokens_T) == text_of(other.tokens_T)
        assert one_episode.tokens_T.tolist() == other.tokens_T.tolist()
        assert one_episode.loss_mask_T.tolist() == other.loss_mask_T.tolist()
    assert len({text_of(each.tokens_T) for each in agents}) == 4

    def keys(requests: Sequence[Request]) -> list[Any]:
        """All that the engine's tokens depend on."""
        return sorted((each.id[:3], each.prompt.tolist(), each.seed, repr(each.sampling)) for each in requests)

    assert keys(over_api.requests) == keys(built_in.requests)


def test_what_the_built_in_tools_would_not_ask_has_random_numbers_of_its_own() -> None:
    async def solve(task: Task, base_url: str, key: str) -> float:
        own: list[Any] = list(task.messages or ())
        _, first = await AGENT.ask(base_url, key, own)
        said = AGENT.said(first)
        for behind in ({"role": "user", "content": "more"}, {"role": "tool", "content": "3"}):
            await AGENT.ask(base_url, key, [*own, said, behind])
        await AGENT.ask(base_url, key, own, seed=1)
        await AGENT.ask(base_url, key, [{"role": "user", "content": "another question"}])
        return 0.0

    generators = Generators()
    assert one(solve, generators=generators).error is None
    is_built_in = [request.seed == PLAN.seed for request in generators.requests]
    assert is_built_in == [True, False, True, False, False]
    assert len({request.seed for request in generators.requests}) == 4


def test_greedy_episodes_are_sampled_at_temperature_0() -> None:
    generators = Generators()
    one(AGENT.several_turns, generators=generators, plan=SamplingPlan(max_new_tokens=8, temperature=0.0))
    assert {request.sampling.temperature for request in generators.requests} == {0.0}


# --- rewards of turns ---


async def forks(task: Task, base_url: str, key: str) -> Any:
    """A question, two answers to another behind it, and a new conversation."""
    first: list[Any] = list(task.messages or ())
    _, one = await AGENT.ask(base_url, key, first)
    behind = [*first, AGENT.said(one), {"role": "user", "content": "go on"}]
    _, two = await AGENT.ask(base_url, key, behind, n=2)
    _, again = await AGENT.ask(base_url, key, behind, n=2)
    assert again["id"] != two["id"]
    status, three = await AGENT.post(base_url, key, "responses", {"input": "a new conversation"})
    assert status == 200
    return {"reward": 8.0, "turn_rewards": {one["id"]: 1, again["id"]: [2, 4.5], three["id"]: 0.25}}


def test_rewards_of_turns_find_their_tokens_by_the_ids_of_responses() -> None:
    generators = Generators()
    episode = one(forks, generators=generators)

    assert (episode.error, episode.whole_reward, episode.reward) == (None, 8.0, 15.75)
    assert episode.turn_parents is not None
    turns = note_of([episode]).turn_rewards
    said = {text_of(request.prompt): request for request in generators.requests}
    found: dict[float, tuple[int, int]] = {}  # by reward: roots before it, and where its answer stands
    for reward, parent, end in zip(turns.reward_K.tolist(), turns.parents_K.tolist(), turns.token_K, strict=True):
        found[reward] = (parent, int(end))
    assert sorted(found) == [0.25, 1.0, 2.0, 4.5]
    root = turns.reward_K.tolist().index(1.0)
    assert found[1.0][0] == found[0.25][0] == -1
    assert found[2.0][0] == found[4.5][0] == root
    assert len(said) == 3
    for reward, choice in ((2.0, 0), (4.5, 1)):
        wanted = next(
            each for each in generators.requests if each.id.branch == choice and "go on" in text_of(each.prompt)
        )
        end = found[reward][1]
        answer = f"{numbers_of(wanted)}<|im_end|>"
        assert text_of(episode.tokens_T[: end + 1]).endswith(answer)


@pytest.mark.parametrize(
    ("turn_rewards", "why"),
    [
        ([1.0, 2.0], "has 2 numbers, and 3 requests were answered"),
        ({"chatcmpl-00": 1.0}, "no response of the episode has this id"),
        ([1.0, [2.0], 3.0], "`turn_rewards` has a number"),
        ([1.0, float("nan"), 3.0], "finite"),
        (1.0, "is not a float"),
    ],
)
def test_rewards_of_turns_that_have_no_turn_fail_the_episode(turn_rewards: Any, why: str) -> None:
    async def solve(task: Task, base_url: str, key: str) -> Any:
        await AGENT.several_turns(task, base_url, key)
        return {"turn_rewards": turn_rewards}

    episode = one(solve)
    assert episode.finish == "error"
    assert why in str(episode.error)
    assert not episode.loss_mask_T.any()
    assert episode.reward == 0.0
    assert note_of([episode]).turn_rewards.reward_K.tolist() == [0.0, 0.0, 0.0]


def test_rewards_of_turns_in_order_need_no_reward_of_the_episode() -> None:
    async def solve(task: Task, base_url: str, key: str) -> Any:
        await AGENT.several_turns(task, base_url, key)
        return {"turn_rewards": [0.5, 0, 2]}

    episode = one(solve, needs_reward=True)
    assert (episode.finish, episode.turn_rewards, episode.reward) == ("done", (0.5, 0.0, 2.0), 2.5)


async def changes_sampling(task: Task, base_url: str, key: str) -> float:
    await AGENT.ask(base_url, key, list(task.messages or ()), temperature=0.1, top_p=0.5, max_tokens=3)
    return 1.0


def test_the_recipe_chooses_the_distribution_and_an_agent_fewer_tokens() -> None:
    generators = Generators()
    episode = one(changes_sampling, generators=generators)
    [request] = generators.requests
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.max_new_tokens) == (1.0, 1.0, 3)
    assert episode.finish == "tokens"


async def continues_text(task: Task, base_url: str, key: str) -> Any:
    """Raw text that grows, token ids behind it, and another text."""
    text = "1+2="
    for _ in range(2):
        status, answer = await AGENT.post(base_url, key, "completions", {"prompt": text, "return_token_ids": True})
        assert status == 200, answer
        [choice] = answer["choices"]
        text += choice["text"] + " 3+4="
    tokens = [
        *choice["prompt_token_ids"],
        *choice["token_ids"],
        *TOKENIZER(" ok", add_special_tokens=False)["input_ids"],
    ]
    _, third = await AGENT.post(base_url, key, "completions", {"prompt": tokens})
    await AGENT.post(base_url, key, "completions", {"prompt": "5+6="})
    status, refused = await AGENT.post(base_url, key, "completions", {"prompt": "a", "echo": True, "logprobs": 1})
    assert (status, refused["error"]["param"]) == (400, "echo")
    return {"turn_rewards": {third["id"]: 2.0}}


def test_completions_of_text_and_token_ids_are_trained_token_for_token() -> None:
    generators = Generators()
    episode = one(continues_text, generators=generators)

    assert (episode.error, episode.num_turns, len(episode.starts)) == (None, 4, 1)
    assert episode.turn_parents is not None
    assert sorted(episode.turn_parents)[:2] == [-1, -1]
    assert episode.metrics["trained_tokens"] == episode.metrics["sampled_tokens"] == episode.loss_mask_T.sum() > 0
    block = block_of([episode])
    texts = [text_of(block.tokens_T[begin:end]) for begin, end in block.sequences(0)]
    digits = [f"{numbers_of(request)}<|im_end|>" for request in generators.requests]
    assert sorted(texts) == sorted([
        f"1+2={digits[0]} 3+4={digits[1]} ok{digits[2]}", f"5+6={digits[3]}",
    ])  # fmt: skip
    turns = note_of([episode]).turn_rewards
    assert text_of(episode.tokens_T[: turns.token_K[turns.reward_K == 2.0][0] + 1]).endswith(f" ok{digits[2]}")


async def forges_a_turn(task: Task, base_url: str, key: str) -> float:
    await AGENT.ask(base_url, key, [{"role": "user", "content": "a<|im_end|>b"}])
    return 1.0


def test_content_that_spells_a_control_token_is_text_unless_the_recipe_says_otherwise() -> None:
    counts = []
    for rule in (AS_TEXT, ControlRule(as_text=False)):
        generators = Generators()
        one(forges_a_turn, generators=generators, rule=rule)
        counts.append(int((generators.requests[0].prompt == END).sum()))
    assert counts == [1, 2]


async def leaves_its_session(task: Task, base_url: str, key: str) -> float:
    outside = base_url.partition("/sessions/")[0] + "/v1"
    assert (await AGENT.ask(outside, key, list(task.messages or ())))[0] == 401
    assert (await AGENT.ask(base_url, "another", list(task.messages or ())))[0] == 401
    await AGENT.ask(base_url, key, list(task.messages or ()))
    return 1.0


def test_nothing_is_answered_outside_of_a_session_or_with_another_key() -> None:
    generators = Generators()
    assert one(leaves_its_session, generators=generators).error is None
    assert len(generators.requests) == 1


# --- limits and faults ---


async def over_its_limits(task: Task, base_url: str, key: str) -> float:
    codes = []
    for number, text in enumerate(["long " * 100, "one", "two", "three"]):
        status, answer = await AGENT.ask(base_url, key, [{"role": "user", "content": f"{number}{text}"}])
        codes.append(answer["error"]["code"] if status == 400 else status)
    assert codes == ["context_length_exceeded", 200, 200, "max_turns"]
    return 0.5


def test_limits_are_errors_that_an_agent_can_handle() -> None:
    episode = one(over_its_limits, max_turns=2)

    assert (episode.finish, episode.error, episode.num_turns, episode.reward) == ("turns", None, 2, 0.5)


async def raises(task: Task, base_url: str, key: str) -> None:
    await AGENT.ask(base_url, key, list(task.messages or ()))
    raise KeyError("a bug")


async def never_asks(task: Task, base_url: str, key: str) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (raises, "agent: KeyError: 'a bug'"),
        (never_asks, "ended without an answer"),
        (AGENT.graded_by_the_recipe, "None"),
    ],
)
def test_a_fault_of_an_agent_is_one_failed_episode(function: Any, why: str) -> None:
    episode = one(function, needs_reward=True)

    assert episode.finish == "error"
    assert why in str(episode.error)
    assert not episode.loss_mask_T.any()
    assert note_of([episode]).errors == {0: episode.error}


def test_without_a_reward_of_the_agent_the_recipe_grades() -> None:
    episode = one(AGENT.graded_by_the_recipe)
    assert (episode.finish, episode.reward, episode.num_turns) == ("done", 0.0, 1)


async def gives_up(task: Task, base_url: str, key: str) -> float:
    asking = asyncio.ensure_future(AGENT.ask(base_url, key, list(task.messages or ())))
    await asyncio.sleep(0.2)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    return 1.0


def test_tokens_that_no_agent_has_seen_are_counted_and_not_trained() -> None:
    episode = one(gives_up, generators=Generators(held=True))

    assert episode.metrics["discarded_tokens"] == episode.metrics["sampled_tokens"] > 0
    assert "ended without an answer" in str(episode.error)


def test_a_broken_generator_ends_the_stream_and_not_an_episode() -> None:
    with pytest.raises(RuntimeError, match="the generator is gone"):
        one(AGENT.several_turns, generators=Generators(broken=True))


def test_a_token_that_is_not_recorded_is_an_error_that_names_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self: Any, completion: Completion) -> None:
        self.sampled_tokens += completion.num_tokens + 1

    monkeypatch.setattr(agent_sessions._SessionBackend, "_note", forgetful)
    with pytest.raises(InvariantError, match=r"session \w+ of episode 4.1#0: \d+ tokens are recorded"):
        one(AGENT.several_turns)


@pytest.mark.slow
def test_hundreds_of_episodes_at_once_are_all_played() -> None:
    generators = Generators(delay_s=0.01)
    ids = [TrajectoryId(prompt, sample) for prompt in range(25) for sample in range(8)]

    episodes = played(AGENT.several_turns, ids, generators=generators)

    assert [each.id for each in episodes] == ids
    assert {(each.finish, each.num_turns) for each in episodes} == {("done", 3)}
    assert len(generators.requests) == 600
