"""Taskset for verifiers v1: `vf-eval cuda-agent-kernels` over the tasks of `cuda-agent environment`.

The policy's tools are those of `KernelEnv`, in one tool server for all rollouts (`toolset.py`), which has a
session for each. When a rollout has ended, the process that scores rollouts opens another session, in which
its final files are judged, and the milestone is the reward. The judgement is usually known by then, since the
environment server judges files as soon as they are written.
"""

import asyncio
import functools
from collections.abc import Iterator

import verifiers.v1 as vf
from cuda_agent_env import Session, Step, list_tasks

from cuda_agent_kernels.toolset import THREADS, KernelState, KernelToolset, open_session

__all__ = ["KernelTaskset"]


class KernelData(vf.TaskData):
    """One task of the environment server at the address `environment`."""

    environment: str
    task_id: str
    max_turns: int


class KernelTask(vf.Task[KernelData, KernelState]):
    """A task of verifiers: to make one module faster; the reward is the milestone: -1, 1, 2 or 3."""

    async def setup(self, trace: vf.Trace) -> None:
        for name in ("environment", "task_id", "max_turns"):
            setattr(trace.state, name, getattr(self.data, name))

    async def finalize(self, trace: vf.Trace) -> None:
        """Have the rollout's files judged, and store the status and the milestone in the rollout's state.

        Raises EnvironmentFailed if the judge fails; the rollout then has no reward.
        """
        work = functools.partial(_judged, self.data, trace.state.files)
        step = await asyncio.get_running_loop().run_in_executor(THREADS, work)
        trace.state.status, trace.state.milestone = step.observation["status"], step.reward

    @vf.reward(weight=1.0)
    async def milestone(self, trace: vf.Trace) -> float:
        return trace.state.milestone

    @vf.metric
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.state.status == "correct")


class KernelConfig(vf.TasksetConfig):
    """Settings of the taskset, for instance `--env.taskset.max-turns 20`."""

    environment: str = ""
    """Address of the environment server; by default CUDA_AGENT_URL, then http://127.0.0.1:8471."""
    max_turns: int = 20
    """Largest number of tool calls of a rollout."""
    message: str = "full"
    """Message of a task: compact (the task's source) or full (how kernels are written, before it)."""


class KernelTaskset(vf.Taskset[KernelTask, KernelConfig]):
    """Taskset of verifiers with all tasks of one environment server."""

    @classmethod
    def toolsets(cls, config: KernelConfig) -> list[vf.Toolset]:
        return [KernelToolset(vf.SharedToolsetConfig())]

    def load(self) -> Iterator[KernelTask]:
        config = self.config
        session = Session(config.environment)
        for task_id in list_tasks(session.url):
            data = KernelData(
                id=task_id,
                prompt=session.reset(task_id, message=config.message).text,
                environment=session.url,
                task_id=task_id,
                max_turns=config.max_turns,
            )
            yield KernelTask(data, config.task)
        session.close()


def _judged(data: KernelData, files: dict[str, str]) -> Step:
    session = open_session(data.environment, data.task_id, 1, files)
    try:
        return session.finish()
    finally:
        session.close()
