"""Server of environment sessions, in the wire form of OpenEnv.

A WebSocket `/ws` is one session. Its messages have a `type` (`reset`, `step`, `state` or `close`) and `data`.
The data of `reset` are `task_id`, `max_turns` and `message`, those of `step` are `tool` and `arguments`. An
answer has the type `observation` and the data `observation`, `reward` and `done`, or the type `error` and the
data `code` and `message`. Clients of OpenEnv use this form; nothing of OpenEnv is imported.
"""

import asyncio
import json
import secrets
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any, Literal

from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from pydantic import Field, ValidationError
from starlette.middleware.trustedhost import TrustedHostMiddleware

from components.core.errors import InfrastructureError
from components.core.params import Params
from components.core.records import FrozenModel
from components.core.task import KernelTask
from components.judge.pool import JudgePool
from components.judge.version import VERSION
from components.service.app import LOOPBACK_HOSTS
from components.service.sessions import Observation, Session, tools

# Sessions that may be open at the same time; each step of a session occupies a thread.
MAX_SESSIONS = 256
# Seconds without a message after which a session is closed. It exceeds the longest judgement.
IDLE_SECONDS = 1800.0
# Largest message, in characters.
MESSAGE_CHARACTERS = 4 << 20
SPLIT = "tasks"


class Reset(FrozenModel):
    """Data of the message `reset`, which begins an episode."""

    task_id: str = Field("", description="a task of this server; a random one if it is empty")
    max_turns: int = Field(20, ge=1, le=200, description="the episode ends with this tool call")
    message: Literal["compact", "full"] = Field("full", description="full: SKILL.md before the task's source")


class Action(FrozenModel):
    """Data of the message `step`, which is one tool call; the call `Finish` ends the episode."""

    tool: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class RequestError(Exception):
    """Error in a client's message, which is answered with `code` and a text, and does not end the session."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


class Sessions:
    """The open sessions of a server, with the threads in which their steps run."""

    def __init__(self, tasks: list[KernelTask], params: Params, pool: JudgePool):
        self.tasks = {task.task_id: task for task in tasks}
        self.params = params
        self.pool = pool
        # Equal candidates of all sessions share one measurement while the server runs.
        self.epoch = f"environment/{secrets.token_hex(8)}"
        self.threads = ThreadPoolExecutor(MAX_SESSIONS, thread_name_prefix="session")
        self.open = 0

    def make(self) -> Session:
        return Session(self.tasks, self.params, self.pool, self.epoch)

    def close(self) -> None:
        self.pool.drop()
        self.threads.shutdown(wait=True, cancel_futures=True)


def _answer(session: Session, kind: str, data: Any) -> dict[str, Any]:
    """Return the JSON answer to one message, which has the type `kind` and the data `data`.

    Raises RequestError if the type or the data are not valid, or if the judge fails.
    """
    try:
        if kind == "reset":
            reset = Reset.model_validate(data)
            return _observation(session.reset(reset.task_id, reset.max_turns, reset.message), None, False)
        if kind == "step":
            action = Action.model_validate(data)
            return _observation(*session.step(action.tool, action.arguments))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "data"
        raise RequestError("VALIDATION_ERROR", f"{kind}: {place}: {first['msg']}") from error
    except KeyError as error:
        raise RequestError("NO_SUCH_TASK", "reset: no such task; list them at /kernels/tasks") from error
    except ValueError as error:
        raise RequestError("EPISODE_ENDED", f"{kind}: {error}") from error
    except (InfrastructureError, CancelledError) as error:
        raise RequestError("JUDGE_FAILED", f"{kind}: {error}") from error
    if kind == "state":
        workspace = session.workspace
        data = {
            "episode_id": workspace.task.task_id if workspace is not None else None,
            "step_count": session.turn,
            "files": dict(workspace.files) if workspace is not None else {},
        }
        return {"type": "state", "data": data}
    raise RequestError("UNKNOWN_TYPE", f"{kind[:40]}: no such message; send reset, step, state or close")


def _observation(observation: Observation, reward: float | None, done: bool) -> dict[str, Any]:
    return {
        "type": "observation",
        "data": {"observation": observation.model_dump(), "reward": reward, "done": done},
    }


def _error(code: str, message: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code}}


async def _serve(socket: WebSocket, session: Session, sessions: Sessions) -> None:
    """Answer the messages of one session until it is closed or idle."""

    async def in_thread(work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(sessions.threads, work, *arguments)

    try:
        while True:
            text = await asyncio.wait_for(socket.receive_text(), IDLE_SECONDS)
            try:
                if len(text) > MESSAGE_CHARACTERS:
                    raise RequestError("TOO_LARGE", f"a message has at most {MESSAGE_CHARACTERS} characters")
                message = json.loads(text)
                kind, data = str(message["type"]), message.get("data", {})
                if kind == "close":
                    return
                answer = await in_thread(_answer, session, kind, data)
            except RequestError as error:
                answer = _error(error.code, str(error))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                answer = _error("INVALID_JSON", "send a JSON object with type and data")
            await socket.send_json(answer)
    except (WebSocketDisconnect, TimeoutError, KeyError):  # The last: a message of bytes.
        return
    finally:
        await in_thread(session.close)


def make_environment(sessions: Sessions) -> FastAPI:
    """Return the ASGI application of an environment server with these sessions."""
    app = FastAPI(title="CUDA Agent environment", version=VERSION)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOOPBACK_HOSTS)

    @app.websocket("/ws")
    async def session(socket: WebSocket) -> None:
        if "origin" in socket.headers:  # Browsers send it: a web page, and no trainer.
            await socket.close(1008)
            return
        await socket.accept()
        if sessions.open >= MAX_SESSIONS:
            await socket.send_json(_error("CAPACITY_REACHED", f"{MAX_SESSIONS} sessions are open"))
            await socket.close()
            return
        sessions.open += 1
        try:
            await _serve(socket, sessions.make(), sessions)
        finally:
            sessions.open -= 1

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {"status": "healthy", "version": VERSION, "sessions": sessions.open}

    @app.get("/metadata")
    def metadata() -> dict[str, Any]:
        """Describe the environment, with the tools that a step can call."""
        return {
            "name": "kernels",
            "description": "Make a PyTorch module faster; the reward is the judge's milestone, once.",
            "version": VERSION,
            "tools": tools(),
        }

    @app.get("/schema")
    def schema() -> dict[str, Any]:
        return {
            "action": Action.model_json_schema(),
            "observation": Observation.model_json_schema(),
            "state": {"type": "object"},
        }

    @app.get("/kernels/splits")
    def splits() -> dict[str, list[str]]:
        return {"splits": [SPLIT]}

    @app.get("/kernels/tasks")
    def tasks() -> dict[str, list[dict[str, Any]]]:
        """List the tasks by id and name."""
        return {
            "tasks": [
                {"task_id": task_id, "name": task.name, "level": task.level}
                for task_id, task in sessions.tasks.items()
            ]
        }

    return app
