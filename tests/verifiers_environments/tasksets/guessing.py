# SPDX-License-Identifier: Apache-2.0
"""An environment of several turns: the environment speaks as the user, and judges the whole episode."""

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData]):
    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class GuessTaskset(vf.Taskset[GuessTask]):
    def load(self):
        return [GuessTask(GuessData(number=number)) for number in (3, 5)]


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as player:
            said = await player.turn("Guess my number.")
            while not said.terminated and said.last_reply.strip() != str(task.data.number):
                said = await player.turn("Higher." if int(said.last_reply) < task.data.number else "Lower.")

    async def finalize(self, task, episode):
        (trace,) = episode.traces
        trace.record_reward("found", float(trace.last_reply.strip() == str(task.data.number)), 1.0)


__all__ = ["GuessEnv", "GuessTaskset"]
