"""Environment for verifiers: a taskset over the tasks that the judge's HTTP service lists.

`vf-eval cuda-agent-kernels` runs the environment. The policy writes files with the tool `write` and has them
measured with the tool `judge`. One tool server serves all rollouts of a worker. The reward is the milestone
of the files at the end of a rollout: -1 if they are wrong or there are none, 1 if they are correct, 2 if they
are faster than eager PyTorch, 3 if they are faster than torch.compile too. The service is the one that the
environment variables of cuda_agent_reward.py name.
"""

import asyncio
import functools
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Literal

import verifiers.v1 as vf
from cuda_agent_reward import PATH, ask, verdict_on
from mcp.server.mcpserver import MCPServer
from pydantic import Field

# End of a prompt, because the instructions for writing kernels name commands where there are tools here.
TOOLS = """
There is no shell. The tool write(file_path, content) writes a file, and the tool judge() does what the
commands of utils/ do: it builds the files, checks their outputs and measures them.
"""


class KernelState(vf.State):
    """State of a rollout: its task, its files so far by path, and at its end the verdict on them.

    Of the verdict, `status` (such as correct) and `milestone` (the reward: -1, 1, 2 or 3) are kept.
    """

    task_id: str = ""
    files: dict[str, str] = Field(default_factory=dict)
    status: str = ""
    milestone: float = -1.0


class KernelToolset(vf.Toolset[vf.SharedToolsetConfig, KernelState]):
    """Tool server of all rollouts, with the tools `write` and `judge`.

    Calls of one rollout run one after another, and calls of different rollouts at the same time.
    """

    TOOL_PREFIX = None

    async def setup(self) -> None:
        self.locks: defaultdict[str | None, asyncio.Lock] = defaultdict(asyncio.Lock)

    def register(self, mcp: MCPServer) -> None:
        for tool in (self.write, self.judge):
            mcp.add_tool(self._in_order(self._with_state(tool)), name=tool.__name__, description=tool.__doc__)

    def _in_order(self, call: Callable[..., Awaitable[str]]) -> Callable[..., Awaitable[str]]:
        """Wrap a tool so that the calls of one rollout, which change the rollout's state, do not overlap."""

        @functools.wraps(call)
        async def ordered(**arguments: str) -> str:
            async with self.locks[self._state_channel()[2]]:
                return await call(**arguments)

        return ordered

    async def write(self, file_path: str, content: str) -> str:
        """Write a whole file of the candidate: model_new.py or kernels/NAME."""
        if not re.fullmatch(PATH, file_path):
            return f"{file_path}: only model_new.py and kernels/NAME can be written"
        self.state.files[file_path] = content.encode(errors="replace").decode()
        return f"wrote {file_path}"

    async def judge(self) -> str:
        """Build, check and measure the files that were written; equal files are measured once."""
        verdict = await asyncio.to_thread(verdict_on, self.state.task_id, self.state.files)
        speedups = [
            f"{ratio['estimate']:.3f} times as fast as {baseline}"
            for baseline, ratio in verdict["speedup"].items()
            if ratio is not None
        ]
        head = f"{verdict['status']} {verdict['reason']}".strip()
        return "\n".join(filter(None, [head, verdict["log"], *speedups]))


class KernelTask(vf.Task[vf.TaskData, KernelState]):
    """A task of verifiers: to make one PyTorch module faster.

    The task's id is the task_id under which the judge's service lists the module.
    """

    async def setup(self, trace: vf.Trace) -> None:
        trace.state.task_id = self.data.id

    async def finalize(self, trace: vf.Trace) -> None:
        """Have the rollout's files judged, and store status and milestone in the rollout's state.

        The milestone is the reward, -1, 1, 2 or 3. A rollout without files keeps the milestone -1. Raises
        JudgeFailed if there is no verdict, so that the rollout has an error and no reward.
        """
        if trace.state.files:
            verdict = await asyncio.to_thread(verdict_on, self.data.id, trace.state.files)
            trace.state.status, trace.state.milestone = verdict["status"], float(verdict["milestone"])

    @vf.reward(weight=1.0)
    async def milestone(self, trace: vf.Trace) -> float:
        return trace.state.milestone

    @vf.metric
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.state.status == "correct")


class KernelConfig(vf.TasksetConfig):
    """Settings of the taskset: `message` selects the policy's first message.

    With `prompt` it says how kernels are written and has the task's source; with `code` it is the source
    alone.
    """

    message: Literal["prompt", "code"] = "prompt"
    """The policy's first message: how kernels are written and the task's source, or the source alone."""


class KernelTaskset(vf.Taskset[KernelTask, KernelConfig]):
    """Taskset of verifiers with all tasks (PyTorch modules to make faster) that the judge's service lists."""

    @classmethod
    def toolsets(cls, config: KernelConfig) -> list[vf.Toolset[Any, Any]]:
        return [KernelToolset(vf.SharedToolsetConfig())]

    def load(self) -> Iterator[KernelTask]:
        for listed in ask("/v1/tasks"):
            task = ask(f"/v1/tasks/{listed['task_id']}")
            prompt = task["code"] if self.config.message == "code" else task["prompt"] + TOOLS
            yield KernelTask(
                vf.TaskData(id=task["task_id"], name=task["name"], prompt=prompt), self.config.task
            )


__all__ = ["KernelTaskset"]

if __name__ == "__main__":
    KernelToolset.run()
