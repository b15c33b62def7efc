# SPDX-License-Identifier: Apache-2.0
"""A taskset of one question each, with two rewards and a metric."""

import asyncio

import verifiers.v1 as vf

FAILED: list[str] = []


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        await asyncio.sleep(0)
        if self.data.answer == "broken":
            raise ValueError("no such sum")
        if self.data.answer == "broken once" and not FAILED:
            FAILED.append(trace.id)
            raise ValueError("not yet")
        return float(len(trace.last_reply) < 4)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    largest: int = 9


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self):
        for number in range(self.config.largest + 1):
            answer = {7: "broken", 8: "broken once"}.get(number, str(number + 1))
            yield SumsTask(SumsData(prompt=f"{number}+1?", answer=answer), self.config.task)


__all__ = ["SumsTaskset"]
