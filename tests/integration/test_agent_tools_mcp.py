"""The judge's MCP tools in a process of their own, and the installation of the skill."""

import asyncio
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from service_fixtures import PARAMS, TASK, TextJudges

from components.core.errors import UserError
from components.service.http_server import bind, serving
from components.service.skill import NAME, SERVER, install_skill

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
    with (
        bind("0", has_tokens=False) as listener,
        serving(judges, PARAMS, tmp_path / "there", [TASK], listener, None),
    ):
        found = asyncio.run(call_all(f"http://127.0.0.1:{listener.getsockname()[1]}", workspace))
    assert found["names"] == {"judge", "wait", "task", "tasks", "explain"}
    answer = found["judged"].structured_content
    assert (answer["status"], answer["reason"]) == ("wrong_output", "max_error:given")
    assert found["waited"].structured_content == answer and judges.measured == [("local", "a")]
    assert found["climbing"].is_error and found["missing"].is_error
    assert TASK.code in json.dumps(found["task"].structured_content).encode().decode("unicode_escape")
    assert TASK.task_id in str(found["tasks"].structured_content)


def test_reasons_are_explained() -> None:
    assert "constant" in explain_reason("max_error:given")
    assert "first error" in explain_reason("compiler")
    assert "wrong_output" in explain_reason("nonsense")


@pytest.mark.parametrize("agent", ["claude", "codex", "cursor"])
def test_a_skill_is_installed_beside_what_others_wrote(tmp_path: Path, agent: str) -> None:
    files = {
        "claude": (".mcp.json", '{"mcpServers": {"other": {"command": "x"}}}'),
        "cursor": (".cursor/mcp.json", '{"mcpServers": {"other": {"command": "x"}}}'),
        "codex": (".codex/config.toml", '[mcp_servers.other]\ncommand = "x"\n'),
    }
    config = tmp_path / files[agent][0]
    config.parent.mkdir(exist_ok=True)
    config.write_text(files[agent][1])
    skill, written = install_skill(agent, tmp_path, "http://127.0.0.1:8470", None)
    assert written == config and skill.parent.name == NAME
    assert skill.read_text().startswith(f"---\nname: {NAME}\ndescription: ")
    text = config.read_text()
    servers = tomllib.loads(text)["mcp_servers"] if agent == "codex" else json.loads(text)["mcpServers"]
    assert set(servers) == {"other", SERVER} and "mcp" in servers[SERVER]["args"]
    assert install_skill(agent, tmp_path, "http://127.0.0.1:8470", None) == []
    skill.write_text("mine")
    with pytest.raises(UserError, match="another file"):
        install_skill(agent, tmp_path, "http://127.0.0.1:8470", None)
    assert skill.read_text() == "mine"
