"""The workspace of one episode: the task, the template and the candidate's files, all in memory.

The judge takes the files as they are; a shell command gets a copy inside the sandbox.
"""

from __future__ import annotations

from components.agent.starter import starter
from components.core.config import PROJECT
from components.core.task import KernelTask

TEMPLATE = PROJECT / "agent_workdir"
READ_ONLY = (
    "SKILL.md",
    "binding.cpp",
    "binding_registry.h",
    "vec.h",
    "utils/compile.sh",
    "utils/compile.py",
    "utils/verification.py",
    "utils/profiling.py",
    "utils/ask.py",
)
"""Files of the template that the candidate may read and not write."""


def plain_path(path: str) -> str | None:
    """Return the path relative to the workspace, or None when it leads out of it."""
    path = path.strip()
    inside = path.removeprefix("/workspace/") if path != "/workspace" else "."
    parts = [part for part in inside.split("/") if part not in ("", ".")]
    return None if ".." in parts or inside.startswith("/") else "/".join(parts)


class Workspace:
    """The candidate's files by workspace path; `model.py` and the template's files are read-only."""

    def __init__(self, task: KernelTask):
        self.task = task
        text = starter(task)
        self.files: dict[str, str] = {} if text is None else {"model_new.py": text}

    def writable(self, path: str) -> str | None:
        """Return the normalised path if the candidate may write it, else None."""
        plain = plain_path(path)
        if plain is None:
            return None
        folder, _, name = plain.rpartition("/")
        return plain if plain == "model_new.py" or (folder == "kernels" and name) else None

    def read(self, path: str) -> str | None:
        """Return the text of the file at a normalised path, or None."""
        if path == "model.py":
            return self.task.code
        if path in READ_ONLY:
            return (TEMPLATE / path).read_text()
        return self.files.get(path)

    def paths(self) -> list[str]:
        """Return the path of every file, sorted."""
        return sorted({"model.py", *READ_ONLY, *self.files})
