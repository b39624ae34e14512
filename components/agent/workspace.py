"""The workspace of one episode: the task, the template's files, and the candidate's files in memory.

The judge receives the files from memory. Shell commands work on a copy of the files inside the sandbox.
"""

from components.agent.starter import starter
from components.core.config import PROJECT
from components.core.task import KernelTask

TEMPLATE = PROJECT / "agent_workdir"
# Files of the template, which the policy may read but not write.
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


def plain_path(path: str) -> str | None:
    """Return `path` relative to the workspace and without empty parts.

    Returns None if the path leads out of the workspace. The workspace itself is the empty string.
    """
    path = path.strip()
    inside = path.removeprefix("/workspace/") if path != "/workspace" else "."
    parts = [part for part in inside.split("/") if part not in ("", ".")]
    return None if ".." in parts or inside.startswith("/") else "/".join(parts)


class Workspace:
    """The files of one workspace.

    `files` holds the texts of the candidate's files by workspace path. The task's `model.py` and the
    template's files are read-only and not in `files`.
    """

    def __init__(self, task: KernelTask):
        self.task = task
        text = starter(task)
        self.files: dict[str, str] = {} if text is None else {"model_new.py": text}

    def writable(self, path: str) -> str | None:
        """Return the normalised path if the policy may write to it, or None.

        These paths are model_new.py and the files directly in kernels/.
        """
        plain = plain_path(path)
        if plain is None:
            return None
        folder, _, name = plain.rpartition("/")
        return plain if plain == "model_new.py" or (folder == "kernels" and name) else None

    def read(self, path: str) -> str | None:
        """Return the text of the file at a normalised path, or None if there is no such file."""
        if path == "model.py":
            return self.task.code
        if path in READ_ONLY:
            return (TEMPLATE / path).read_text()
        return self.files.get(path)

    def paths(self) -> list[str]:
        """Return the sorted paths of all files, including the read-only files."""
        return sorted({"model.py", *READ_ONLY, *self.files})
