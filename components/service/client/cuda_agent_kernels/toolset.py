"""The tool server of the taskset: one process for all rollouts of a worker.

verifiers runs this module as a program.
"""

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import verifiers.v1 as vf
from cuda_agent_env import KernelEnv, Session
from cuda_agent_env.trl import ENDED
from mcp.server.mcpserver import MCPServer
from pydantic import Field

# Sessions that a tool server keeps open; the environment server has 256 for all its callers. A rollout whose
# session was closed goes on with its files and the rest of its turns in a new one.
OPEN_SESSIONS = 64
# Largest number of turns of a session that the environment server accepts.
MOST_TURNS = 200
# Threads in which sessions wait for the environment server, one for each call.
THREADS = ThreadPoolExecutor(256, thread_name_prefix="session")


class KernelState(vf.State):
    """State of a rollout: its task, its files so far, and at its end the verdict on them.

    `environment` is the address of the environment server. `calls` is the number of tool calls that were
    answered, of which there are at most `max_turns`. `status` and `milestone` are those of the verdict.
    """

    environment: str = ""
    task_id: str = ""
    max_turns: int = 1
    calls: int = 0
    files: dict[str, str] = Field(default_factory=dict)
    status: str = ""
    milestone: float | None = None


class KernelToolset(vf.Toolset[vf.SharedToolsetConfig, KernelState]):
    """Tool server of verifiers with the tools write, read and run of all rollouts.

    Calls of different rollouts do not wait for each other.
    """

    TOOL_PREFIX = None

    async def setup(self) -> None:
        self.sessions: OrderedDict[str, Session] = OrderedDict()
        self.locks: dict[str, asyncio.Lock] = {}

    def register(self, mcp: MCPServer) -> None:
        example = KernelEnv()
        for tool in (example.write, example.read, example.run):
            call = self._in_order(self._with_state(self._in_session(tool)))
            mcp.add_tool(call, name=tool.__name__, description=tool.__doc__)

    def _rollout(self) -> str:
        """Return the id of the rollout that made the present tool call."""
        return self._state_channel()[2] or ""

    def _in_order(self, call: Callable[..., Awaitable[str]]) -> Callable[..., Awaitable[str]]:
        """Wrap a tool so that the calls of one rollout, which change the rollout's state, do not overlap."""

        @functools.wraps(call)
        async def ordered(**arguments: str) -> str:
            async with self.locks.setdefault(self._rollout(), asyncio.Lock()):
                return await call(**arguments)

        return ordered

    def _in_session(self, tool: Callable[..., str]) -> Callable[..., Awaitable[str]]:
        """Wrap a tool so that it runs in the session of the rollout that calls it.

        After the call, the rollout's state gets the files of the session.
        """

        @functools.wraps(tool)
        async def call(**arguments: str) -> str:
            work = functools.partial(self.call, self.state, self._rollout(), tool.__name__, arguments)
            return await asyncio.get_running_loop().run_in_executor(THREADS, work)

        return call

    def call(self, state: KernelState, rollout: str, name: str, arguments: dict[str, str]) -> str:
        """Call the tool `name` in a rollout's session, change the rollout's `state`, and return the answer.

        The session is closed if the call fails, and after the last turn. A call after the last turn calls no
        tool and returns ENDED.
        """
        turns = state.max_turns - state.calls
        if turns <= 0:
            return ENDED
        session = self.sessions.pop(rollout, None)  # a session in use is not closed by another rollout's call
        if session is None:
            session = open_session(state.environment, state.task_id, turns, state.files)
        try:
            text: str = getattr(KernelEnv(session), name)(**arguments)
            state.files = session.files()
        except BaseException:
            session.close()
            raise
        state.calls += 1
        if turns == 1:
            session.close()
            return text
        self.sessions[rollout] = session
        while len(self.sessions) > OPEN_SESSIONS:
            self.sessions.popitem(last=False)[1].close()
        return text


def open_session(environment: str, task_id: str, turns: int, files: dict[str, str]) -> Session:
    """Return a session on a task in which `files` are written and `turns` turns are left.

    `environment` is the address of the environment server. Writing a file takes one turn of the session. If
    the number of files and `turns` together exceed MOST_TURNS, fewer turns are left.
    """
    session = Session(environment)
    try:
        session.reset(task_id, max_turns=min(MOST_TURNS, turns + len(files)))
        for path, text in files.items():
            session.step("Write", file_path=path, content=text)
    except BaseException:
        session.close()
        raise
    return session


if __name__ == "__main__":
    KernelToolset.run()
