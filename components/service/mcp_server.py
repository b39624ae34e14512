"""Tools for coding agents by the Model Context Protocol, which send requests to the judge's HTTP service.

The tools are served on standard input and output (`cuda-agent mcp`). No call takes longer than
`CALL_SECONDS`, because clients end calls after 60 seconds: `judge` answers with a verdict or with the id of a
job, for which `wait` waits further.
"""

import re
import time
from pathlib import Path
from typing import Any

import httpx
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, Field

from components.core.config import PROJECT
from components.core.errors import UserError
from components.judge.candidate import read_candidate
from components.judge.verdict import Verdict, counter_lines, rates_line

# Longest call of a tool, and time between two progress notifications, in seconds.
CALL_SECONDS, PROGRESS_SECONDS = 45.0, 5.0
INSTRUCTIONS = (
    "Judges CUDA and C++ kernels for PyTorch modules: builds them, checks outputs on secret inputs, and "
    "times them against eager PyTorch and torch.compile. Figures are measured; nothing printed counts. For "
    "each kernel make a workspace: a folder with the module as model.py (class Model, get_inputs, "
    "get_init_inputs), model_new.py and kernels/. Where the skill names commands of utils/, call judge with "
    "the absolute path of this folder instead; explain says what a reason means."
)
# Row of the table of reasons in SKILL.md: statuses with reasons, and what to do.
REASON_ROW = re.compile(r"^\| (`\w+: .*?) \| (.*) \|$", re.MULTILINE)


class Answer(BaseModel):
    """Answer of the tools `judge` and `wait`: the main fields of a verdict, or a job that is not done.

    `job` is the id of the job. `state` is that of the job: queued, running, done, failed or cancelled.
    `status` is that of the verdict, such as correct or wrong_output; it and the fields after it are empty
    until the job is done. `milestone` is the reward: -1 for wrong files, 1 for correct ones, 2 if they are
    also faster than eager PyTorch, and 3 if they are also faster than torch.compile.
    """

    job: str
    state: str
    status: str = ""
    reason: str = ""
    milestone: int | None = Field(default=None, description="1 right, 2 beats eager, 3 torch.compile too")
    speedup: dict[str, str] = Field(
        default_factory=dict, description="times as fast as each baseline, with 95 % interval"
    )
    rates: str = Field(default="", description="attained rates beside those that the device was measured at")
    counters: list[str] = Field(default_factory=list, description="what the GPU counted, kernel by kernel")
    log: str = ""
    measurements: int = Field(default=1, description="how often this candidate was measured for you")
    next: str = Field(default="", description="what to call next")


def make_mcp_server(client: httpx.AsyncClient) -> MCPServer[Any]:
    """Return an MCP server, whose tools send requests to the judge's HTTP service by `client`."""
    server: MCPServer[Any] = MCPServer("cuda-agent-judge", instructions=INSTRUCTIONS, log_level="ERROR")

    async def ask(method: str, path: str, **options: Any) -> Any:
        try:
            answer = await client.request(method, path, timeout=CALL_SECONDS, **options)
            record = answer.json()
            if answer.is_error:
                raise ToolError(record["error"])
            return record
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise ToolError(
                f"no judge answers at {client.base_url} ({error!r}); start one: cuda-agent serve --http 8470"
            ) from error

    async def ended(job: dict[str, Any], context: Context[Any, Any]) -> Answer:
        began = time.monotonic()
        while job["state"] in ("queued", "running"):
            elapsed = time.monotonic() - began
            if elapsed > CALL_SECONDS - PROGRESS_SECONDS:
                break
            await context.report_progress(elapsed, CALL_SECONDS, job["progress"] or job["state"])
            asked = time.monotonic()
            job = await ask("GET", f"/v1/jobs/{job['id']}", params={"wait": PROGRESS_SECONDS})
            if time.monotonic() - asked < PROGRESS_SECONDS / 2:  # it has ended, or the service is ending
                break
        return _short(job)

    @server.tool()
    async def tasks() -> list[dict[str, Any]]:
        """List the tasks of the judge, PyTorch modules to make faster: task_id, name, level."""
        return [
            {name: task[name] for name in ("task_id", "name", "level")}
            for task in await ask("GET", "/v1/tasks")
        ]

    @server.tool()
    async def task(task_id: str) -> dict[str, Any]:
        """Return the source of a task, the PyTorch module to make faster: code, beside task_id and name."""
        record: dict[str, Any] = await ask("GET", f"/v1/tasks/{_plain(task_id)}")
        return {name: text for name, text in record.items() if name != "prompt"}

    @server.tool()
    async def judge(
        workspace: str, context: Context[Any, Any], task_id: str = "", measurement: int = 1
    ) -> Answer:
        """Judge a workspace's candidate (model_new.py, kernels/) on its model.py or on a listed task.

        Give the absolute path. Equal files get the verdict that is known; `measurement` 2 measures anew. The
        answer has the verdict or, after 45 seconds, the id of a job for `wait`.
        """
        folder = Path(workspace)
        try:
            files = read_candidate(folder)
            code = "" if task_id else (folder / "model.py").read_text()
        except (UserError, OSError, UnicodeDecodeError) as error:
            raise ToolError(str(error)) from error
        body = {"files": files, "task": task_id, "code": code, "measurement": measurement}
        return await ended(await ask("POST", "/v1/judgements", json=body), context)

    @server.tool()
    async def wait(job: str, context: Context[Any, Any]) -> Answer:
        """Wait for a job of `judge`, up to 45 seconds.

        The answer has the verdict, or only the state of the job if it has no verdict then.
        """
        return await ended(await ask("GET", f"/v1/jobs/{_plain(job)}"), context)

    @server.tool()
    def explain(reason: str) -> str:
        """Explain a verdict's status or reason, such as `wrong_output` or `max_error:scaled`."""
        return explain_reason(reason)

    return server


def explain_reason(reason: str) -> str:
    """Return the meaning of a verdict's status or reason, and what to do about it.

    The result has the rows of the table of reasons in agent_workdir/SKILL.md that name `reason` or, if none
    does, the part of `reason` before its colon. If there is no such row either, the result lists all
    statuses.
    """
    rows = REASON_ROW.findall((PROJECT / "agent_workdir" / "SKILL.md").read_text())
    for word in filter(None, (reason.strip(), reason.partition(":")[0].strip())):
        pattern = re.compile(rf"\b{re.escape(word)}\b")
        if found := [f"{codes}: {text}" for codes, text in rows if pattern.search(codes)]:
            return "\n".join(found)
    return "No such reason; the statuses are: " + ", ".join(
        sorted({codes.split(":")[0] for codes, _ in rows})
    )


def _plain(identifier: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{1,64}", identifier):
        raise ToolError(f"{identifier[:100]!r} is no id; ids are hexadecimal digits")
    return identifier


def _short(job: dict[str, Any]) -> Answer:
    if job["verdict"] is None:
        following = f"wait(job={job['id']})" if job["state"] in ("queued", "running") else ""
        return Answer(job=job["id"], state=job["state"], next=following)
    verdict = Verdict.model_validate(job["verdict"])
    return Answer(
        job=job["id"],
        state=job["state"],
        status=verdict.status,
        reason=verdict.reason,
        milestone=verdict.milestone,
        speedup={
            name: f"{ratio.estimate:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
            for name, ratio in verdict.speedup
            if ratio is not None
        },
        rates=rates_line(verdict),
        counters=counter_lines(verdict),
        log=verdict.log,
        measurements=job["measurements"],
        next="" if verdict.status == "correct" else "explain(reason), then change the files and judge again",
    )
