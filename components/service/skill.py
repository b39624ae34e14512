"""Installation of the skill (agent_workdir/SKILL.md) and of the judge's MCP tools for coding agents.

Claude Code reads `.claude/skills/` and `.mcp.json`, Codex `.agents/skills/` and `.codex/config.toml`, Cursor
`.cursor/skills/` and `.cursor/mcp.json`, all in the project's folder.
"""

import json
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.core.config import PROJECT
from components.core.errors import UserError
from components.core.files import atomic_write

NAME = "cuda-agent-kernels"
SERVER = "cuda-agent-judge"
TEMPLATE = PROJECT / "agent_workdir"
# Folder of skills and configuration file of each agent, relative to the project.
PLACES: Mapping[str, tuple[str, str]] = {
    "claude": (".claude/skills", ".mcp.json"),
    "codex": (".agents/skills", ".codex/config.toml"),
    "cursor": (".cursor/skills", ".cursor/mcp.json"),
}
# Section that is inserted into the installed skill, before the section with the heading BEFORE. The skill is
# written for workspaces with the folder `utils/` of the template, which the user's project does not have.
BEFORE = "## What you may touch"
TOOLS = f"""## How you measure here

This project has the MCP server `{SERVER}` and not the folder `utils/`. For each kernel make a folder, the
workspace, with the three kinds of files below: the module as `model.py`, in the form of a task (`class
Model`, `get_inputs()` returning a list of tensors, `get_init_inputs()` returning the constructor's
arguments), `model_new.py` and `kernels/`. Headers of the judge are there when it builds.

Where the workflow names commands of `utils/`, call the tool `judge` with the absolute path of that folder
instead. It builds, checks and measures, and answers with a verdict, or with a job for the tool `wait`.
`explain` says what a reason means; `tasks` and `task` show tasks of the judge for practice. If no judge
answers, ask for `cuda-agent serve --http 8470` to be started.

"""


def install_skill(agent: str, project: Path, service: str, token: Path | None) -> list[Path]:
    """Write the skill and the MCP configuration of one agent, and return the files that were written.

    `agent` is a key of PLACES, `project` the folder of the agent's project, `service` the address of the
    judge's service, and `token` the file with the token's secret, if one is needed. Raises UserError, before
    anything is written, if the agent is unknown, if the skill's file exists and is not the skill, or if the
    configuration cannot be extended.
    """
    if agent not in PLACES:
        raise UserError(f"{agent}: unknown agent; give one of {', '.join(PLACES)}.")
    if not project.is_dir():
        raise UserError(f"{project}: no such folder; give the project's with --project.")
    skills, settings = PLACES[agent]
    skill, config = project / skills / NAME / "SKILL.md", project / settings
    text = (TEMPLATE / "SKILL.md").read_text().replace(BEFORE, TOOLS + BEFORE, 1)
    if skill.exists() and not _is_ours(skill):
        raise UserError(f"{skill}: another file with this name exists; move it away first.")
    arguments = ["-m", "components.cli", "mcp", "--service", service]
    arguments += ["--token", str(token.resolve())] if token is not None else []
    extended = (_toml if config.suffix == ".toml" else _json)(config, arguments)
    written = []
    for path, content in ((skill, text), (config, extended)):
        if not path.exists() or path.read_text() != content:
            atomic_write(path, content)
            written.append(path)
    return written


def _is_ours(skill: Path) -> bool:
    return skill.is_file() and f"name: {NAME}\n" in skill.read_text(errors="replace")


def _read(config: Path) -> str:
    try:
        return config.read_text() if config.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{config}: cannot be read ({error}); mend it first.") from error


def _json(config: Path, arguments: list[str]) -> str:
    """Return the text of a JSON configuration with the judge's MCP server added and all else kept.

    `arguments` are those of the server's command. Raises UserError if the file is not such a configuration,
    or if it has another server with this name.
    """
    entry = {"command": sys.executable, "args": arguments}
    try:
        record: Any = json.loads(_read(config) or "{}")
        servers = record.setdefault("mcpServers", {})
        other = servers.get(SERVER)
    except (ValueError, AttributeError) as error:
        raise UserError(f"{config}: not a JSON configuration of MCP servers ({error}); mend it.") from error
    if other is not None and "components.cli" not in other.get("args", []):
        raise UserError(f"{config}: it has another server named {SERVER}; rename that one first.")
    servers[SERVER] = entry
    return json.dumps(record, indent=2) + "\n"


def _toml(config: Path, arguments: list[str]) -> str:
    """Return the text of a TOML configuration, at whose end the judge's MCP server is added if it is missing.

    `arguments` are those of the server's command. Raises UserError if the file is not TOML, or if it has a
    server with this name and other arguments.
    """
    text = _read(config)
    try:
        servers = tomllib.loads(text).get("mcp_servers", {})
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{config}: not valid TOML ({error}); mend it.") from error
    if SERVER in servers:
        if servers[SERVER].get("args") != arguments:
            raise UserError(f"{config}: it has another server {SERVER}; remove its section first.")
        return text
    section = (
        f"[mcp_servers.{SERVER}]\ncommand = {json.dumps(sys.executable)}\nargs = {json.dumps(arguments)}\n"
    )
    return f"{text.rstrip()}\n\n{section}" if text.strip() else section
