"""The judge's MCP tools in a process of their own."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from service_fixtures import TASK, TextJudges, text_service

pytest.importorskip("mcp", reason="the extra serve is not installed")
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

from components.service.mcp_server import explain_reason


async def call_all(address: str, workspace: Path) -> dict[str, Any]:
    arguments = ["-m", "components.cli", "mcp", "--service", address]
    parameters = StdioServerParameters(command=sys.executable, args=arguments)
    async with stdio_client(parameters) as streams, ClientSession(*streams) as session:
        await session.initialize()
        names = {tool.name for tool in (await session.list_tools()).tools}
        tasks = await session.call_tool("tasks", {})
        judged = await session.call_tool("judge", {"workspace": str(workspace)})
        job = (judged.structured_content or {})["job"]
        waited = await session.call_tool("wait", {"job": job})
        climbing = await session.call_tool("wait", {"job": "../../etc/passwd"})
        missing = await session.call_tool("judge", {"workspace": str(workspace / "none")})
        task = await session.call_tool("task", {"task_id": TASK.task_id})
    return locals()


def test_an_agent_judges_a_workspace_by_mcp(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    (workspace / "kernels").mkdir(parents=True)
    (workspace / "model.py").write_text(TASK.code)
    (workspace / "model_new.py").write_text("a")
    judges = TextJudges()
    with text_service(tmp_path / "there", judges) as address:
        found = asyncio.run(call_all(address, workspace))
    assert found["names"] == {"judge", "wait", "task", "tasks", "explain"}
    answer = found["judged"].structured_content
    assert (answer["status"], answer["reason"]) == ("wrong_output", "max_error:given")
    assert found["waited"].structured_content == answer and judges.measured == [("local", "a")]
    assert found["climbing"].is_error and "is no id" in str(found["climbing"].content)
    assert found["missing"].is_error and "no such f" in str(found["missing"].content)
    assert TASK.code in json.dumps(found["task"].structured_content).encode().decode("unicode_escape")
    assert TASK.task_id in str(found["tasks"].structured_content)


def test_reasons_are_explained() -> None:
    assert "constant" in explain_reason("max_error:given")
    assert "first error" in explain_reason("compiler")
    assert "wrong_output" in explain_reason("nonsense")
