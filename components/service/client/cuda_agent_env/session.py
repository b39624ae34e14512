"""A client for one session of the environment server, over a WebSocket in OpenEnv's wire form."""

import contextlib
import json
import os
import urllib.request
from dataclasses import dataclass
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

# Address of the server unless the environment variable CUDA_AGENT_URL names another.
DEFAULT_URL = "http://127.0.0.1:8471"
# Largest message in bytes.
MESSAGE_BYTES = 16 << 20


class EnvironmentFailed(RuntimeError):
    """Error raised if the server answers with an error, whose `code` is, for instance, JUDGE_FAILED."""

    def __init__(self, code: str, message: str):
        super().__init__(f"{code}: {message}")
        self.code = code


@dataclass(frozen=True)
class Step:
    """Answer of the server to a reset or a step.

    `text` is the task's message or the tool's output. `done` is true at the end of the episode; `reward` is
    the milestone then, and None before. `observation` has all fields of the server's observation.
    """

    text: str
    reward: float | None
    done: bool
    observation: dict[str, Any]


def list_tasks(url: str = "") -> list[str]:
    """Return the ids of the tasks of the server at `url`.

    By default, `url` is the value of CUDA_AGENT_URL, or DEFAULT_URL.
    """
    address = url or os.environ.get("CUDA_AGENT_URL", DEFAULT_URL)
    with urllib.request.urlopen(f"{address.rstrip('/')}/kernels/tasks") as answer:
        return [task["task_id"] for task in json.load(answer)["tasks"]]


class Session:
    """Client of one session of the environment server, which connects to it at the first reset.

    By default, `url` is the value of CUDA_AGENT_URL, or DEFAULT_URL. `last` is the server's last answer to a
    reset or a step. Every method that sends a message raises EnvironmentFailed if the answer is an error.
    """

    def __init__(self, url: str = ""):
        self.last: Step | None = None
        self.url = url or os.environ.get("CUDA_AGENT_URL", DEFAULT_URL)
        self.connection: ClientConnection | None = None

    def reset(self, task_id: str = "", *, max_turns: int = 20, message: str = "full") -> Step:
        """Begin an episode on the task `task_id`, or on a random one if it is empty.

        Returns the first message of the episode. It is the task's source if `message` is "compact". If it is
        "full", instructions for writing kernels come before the source. The episode ends with the tool call
        number `max_turns` at the latest.
        """
        return self._ask("reset", {"task_id": task_id, "max_turns": max_turns, "message": message})

    def step(self, tool: str, **arguments: Any) -> Step:
        """Make one call of the tool `tool`; the server's route /metadata lists the tools and arguments."""
        return self._ask("step", {"tool": tool, "arguments": arguments})

    def finish(self) -> Step:
        """End the episode with the files as they are, and wait for the reward."""
        return self.step("Finish")

    def files(self) -> dict[str, str]:
        """Return the texts of the candidate's files as they are now, by path."""
        files: dict[str, str] = self._send("state", {})["files"]
        return files

    def _ask(self, kind: str, data: dict[str, Any]) -> Step:
        found = self._send(kind, data)
        step = Step(found["observation"]["text"], found["reward"], found["done"], found["observation"])
        self.last = step
        return step

    def _send(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        if self.connection is None:
            address = self.url.rstrip("/").replace("http", "ws", 1) + "/ws"
            # A judgement can take longer than any keep-alive interval.
            self.connection = connect(address, max_size=MESSAGE_BYTES, ping_interval=None)
        with contextlib.suppress(ConnectionClosed):  # a refused session has its error still to be read
            self.connection.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self.connection.recv())
        if answer["type"] == "error":
            raise EnvironmentFailed(answer["data"]["code"], answer["data"]["message"])
        found: dict[str, Any] = answer["data"]
        return found

    def close(self) -> None:
        """End the session by closing its connection; the next call opens a new session."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
