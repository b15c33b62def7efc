# SPDX-License-Identifier: Apache-2.0
"""A taskset with a tool, which runs in a server of the rollout."""

import verifiers.v1 as vf
from adding_tools import AddToolset


class AddTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class AddTask(vf.Task[vf.TaskData, vf.State, AddTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [AddToolset(config.tools)]

    @vf.reward
    async def said(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == "it is 5")


class AddTasksetConfig(vf.TasksetConfig):
    task: AddTaskConfig = AddTaskConfig()


class AddTaskset(vf.Taskset[AddTask, AddTasksetConfig]):
    def load(self):
        return [AddTask(vf.TaskData(prompt="2+3?"), self.config.task)]


__all__ = ["AddTaskset"]
