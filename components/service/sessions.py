"""Sessions of the environment server: episodes whose tool calls a trainer or an agent elsewhere makes.

A step is one tool call. The milestone is the only reward, and is given once, when the episode ends. Files are
judged as soon as they are written, so that a trainer that makes the calls of many rollouts one after another
does not wait for one judgement after another.
"""

import secrets
from concurrent.futures import Future
from typing import Any, Literal

from components.agent.tool_parser import Request
from components.agent.tool_schemas import descriptions
from components.agent.tools import Tools
from components.agent.workspace import Workspace
from components.core.errors import InfrastructureError
from components.core.params import Params
from components.core.records import FrozenModel
from components.core.task import KernelTask
from components.judge.pool import Candidate, Job, JudgePool
from components.judge.verdict import Verdict, milestone
from components.policy.prompts import user_message

# Name of the tool call that ends an episode.
FINISH = "Finish"
# Beginning of the paths of kernels. A candidate is judged in advance when it has one.
KERNELS = "kernels/"


class Observation(FrozenModel):
    """The answer of a session to a reset or a step.

    `text` is the task's message after a reset, and the tool's observation after a step. `turn` is the number
    of steps so far. `status` and `reason` are those of the final verdict at the end of an episode, and empty
    before.
    """

    text: str
    task_id: str
    turn: int
    turns_left: int
    status: str = ""
    reason: str = ""


class Session:
    """Session of the environment server, which has one episode at a time; `reset` begins another one.

    `tasks` are the tasks by task id, of which `reset` chooses one. `epoch` is the name under which all
    sessions of the server share one measurement of equal candidates, so that a caller cannot repeat a
    measurement until it is fast by chance.
    """

    def __init__(self, tasks: dict[str, KernelTask], params: Params, pool: JudgePool, epoch: str):
        self.tasks = tasks
        self.params = params
        self.pool = pool
        self.epoch = epoch
        self.turn = 0
        self.max_turns = 1
        self.done = True
        self.workspace: Workspace | None = None
        self.tools: Tools | None = None

    def reset(
        self, task_id: str = "", max_turns: int = 20, message: Literal["compact", "full"] = "full"
    ) -> Observation:
        """Begin an episode on a task, or on a random one without `task_id`, and return its first message.

        The message is the task's source, with SKILL.md before it if `message` is `full`. Raises KeyError if
        there is no such task.
        """
        self.close()
        task = self.tasks[task_id] if task_id else secrets.choice(list(self.tasks.values()))
        self.workspace = Workspace(task)
        self.tools = Tools(self.workspace, self.params.sandbox, self._judge, read_first=False)
        self.turn, self.max_turns, self.done = 0, max_turns, False
        policy = self.params.policy.model_copy(update={"prompt": message})
        text = user_message(policy, task.code, in_turns=True, device=self.params.device)
        return self._observation(text)

    def step(self, tool: str, arguments: dict[str, Any]) -> tuple[Observation, float | None, bool]:
        """Make one tool call, and return the observation, the reward and whether the episode has ended.

        The episode ends with the call `Finish` or the last turn. The reward is the milestone then, and None
        before. Raises ValueError if the episode has ended, and InfrastructureError if the judge itself fails;
        the episode then has no reward.
        """
        if self.done or self.tools is None or self.workspace is None:
            raise ValueError("the episode has ended; send a reset first")
        self.turn += 1
        text = "" if tool == FINISH else self.tools.run(Request(tool, arguments)).observation
        if tool != FINISH and self.turn < self.max_turns:
            if any(path.startswith(KERNELS) for path in self.workspace.files):
                self._submit()
            return self._observation(text), None, False
        self.done = True
        verdict = self._judge()
        if verdict.status == "infrastructure":
            raise InfrastructureError(f"the judge failed ({verdict.reason}), and no reward is given")
        return self._observation(text, verdict), float(milestone(verdict)), True

    def _submit(self) -> "Future[Verdict]":
        assert self.workspace is not None
        candidate = Candidate.of(self.workspace.files)
        return self.pool.submit(Job(self.workspace.task, candidate, self.epoch))

    def _judge(self) -> Verdict:
        return self._submit().result()

    def _observation(self, text: str, verdict: Verdict | None = None) -> Observation:
        assert self.workspace is not None
        return Observation(
            text=text,
            task_id=self.workspace.task.task_id,
            turn=self.turn,
            turns_left=0 if self.done else self.max_turns - self.turn,
            status=verdict.status if verdict is not None else "",
            reason=verdict.reason if verdict is not None else "",
        )

    def close(self) -> None:
        """End the episode without a reward, and end the processes of its shell."""
        self.done = True
        if self.tools is not None:
            self.tools.close()
            self.tools = None


def tools() -> list[Any]:
    """Return descriptions of the tools and of the call `Finish` in the form that chat templates take."""
    finish = {
        "name": FINISH,
        "description": "End the episode with the files as they are; the reward is given once, for them.",
        "parameters": {"type": "object", "properties": {}},
    }
    return [*descriptions(), {"type": "function", "function": finish}]
