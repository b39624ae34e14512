"""The judge's MCP tools in a process of their own and over HTTP, and the installation of the skill."""

import asyncio
import contextlib
import json
import re
import sys
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_fixtures import PARAMS, TASK, TextJudges, token

from components.core.errors import UserError
from components.service.http_server import bind, serving
from components.service.skill import NAME, SERVER, install_skill
from components.service.tokens import TokenFile, create_token

pytest.importorskip("mcp", reason="the extra serve is not installed")
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

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
    assert found["climbing"].is_error and "is no id" in str(found["climbing"].content)
    assert found["missing"].is_error and "no such f" in str(found["missing"].content)
    assert TASK.code in json.dumps(found["task"].structured_content).encode().decode("unicode_escape")
    assert TASK.task_id in str(found["tasks"].structured_content)


@contextlib.asynccontextmanager
async def session_over_http(address: str, secret: str) -> AsyncIterator[ClientSession]:
    headers = {"Authorization": f"Bearer {secret}"}
    async with (
        create_mcp_http_client(headers=headers) as client,
        streamable_http_client(f"{address}/mcp", http_client=client) as streams,
        ClientSession(streams[0], streams[1]) as session,
    ):
        await session.initialize()
        yield session


async def call_over_http(address: str, secrets: dict[str, str]) -> dict[str, Any]:
    progress: list[str] = []

    async def note(elapsed: float, total: float | None, message: str | None) -> None:
        progress.append(message or "")

    request = {"files": {"model_new.py": "sleep 0.3"}, "task_id": TASK.task_id}
    async with session_over_http(address, secrets["bob"]) as bob:
        names = {tool.name for tool in (await bob.list_tools()).tools}
        judged = await bob.call_tool("judge", request, progress_callback=note)
        own = await bob.call_tool("judge", {"files": {"model_new.py": "b"}, "code": TASK.code})
        path = await bob.call_tool("judge", {"workspace": "/etc", "task_id": TASK.task_id})
        tasks = await bob.call_tool("tasks", {})
        explained = await bob.call_tool("explain", {"reason": "wrong_output"})
    async with session_over_http(address, secrets["eve"]) as eve:
        other = await eve.call_tool("wait", {"job": (judged.structured_content or {})["job"]})
        refused = await eve.call_tool("judge", {"files": {}, "code": TASK.code.replace("0.3", "0.4")})
    return locals()


def test_an_agent_on_another_machine_sends_files_with_its_token(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    rights = {"bob": {}, "eve": {"own_tasks": False}}
    secrets = {name: create_token(path, token(name, **more), None) for name, more in rights.items()}
    judges = TextJudges()
    with (
        bind("0", has_tokens=True) as listener,
        serving(judges, PARAMS, tmp_path / "there", [TASK], listener, TokenFile(path)),
    ):
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        found = asyncio.run(call_over_http(address, secrets))
        refused = {
            name: httpx.post(f"{address}/mcp", json={}, headers=headers)
            for name, headers in {
                "none": {},
                "guess": {"Authorization": "Bearer guess"},
                "page": {"Authorization": f"Bearer {secrets['bob']}", "Origin": "https://evil.example"},
            }.items()
        }
    assert found["names"] == {"judge", "wait", "task", "tasks", "explain"}
    answer = found["judged"].structured_content
    assert (answer["status"], answer["state"]) == ("wrong_output", "done") and found["progress"]
    assert judges.measured == [("bob", "sleep 0.3"), ("bob", "b")]
    assert not found["own"].is_error and not found["explained"].is_error
    assert found["path"].is_error, "no path of the server is read"
    assert found["other"].is_error and "no job" in str(found["other"].content)
    assert found["refused"].is_error and "may only name tasks" in str(found["refused"].content)
    assert {name: answer.status_code for name, answer in refused.items()} == {
        "none": 401,
        "guess": 401,
        "page": 403,
    }


def test_a_web_page_cannot_use_the_tools_of_a_service_without_tokens(tmp_path: Path) -> None:
    with (
        bind("0", has_tokens=False) as listener,
        serving(TextJudges(), PARAMS, tmp_path, [TASK], listener, None),
    ):
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for headers, status in (
            ({"Origin": "https://evil.example"}, 403),
            ({"Host": "evil.example"}, 400),
            ({"Origin": "http://localhost.evil.example"}, 403),
            ({"Origin": "http://localhost:6274", "Accept": "application/json"}, 406),
        ):
            assert httpx.post(f"{address}/mcp", json={}, headers=headers).status_code == status


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
    named = set(re.findall(r"the tool `(\w+)`", skill.read_text()))
    assert named == {"judge", "wait"} and SERVER in skill.read_text(), "the tools replace those of utils/"
    text = config.read_text()
    servers = tomllib.loads(text)["mcp_servers"] if agent == "codex" else json.loads(text)["mcpServers"]
    assert set(servers) == {"other", SERVER} and "mcp" in servers[SERVER]["args"]
    assert install_skill(agent, tmp_path, "http://127.0.0.1:8470", None) == []
    skill.write_text("mine")
    with pytest.raises(UserError, match="another file"):
        install_skill(agent, tmp_path, "http://127.0.0.1:8470", None)
    assert skill.read_text() == "mine"
