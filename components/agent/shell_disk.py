"""Limit of the disk space of an agent's shell, and what is removed when the shell exceeds it."""

from collections.abc import Iterable
from pathlib import Path

from components.agent import untrusted_folder
from components.core.files import remove_tree
from components.sandbox.process_tree import halted_by_pid, removed_bytes

# Limit of the total size of all files of the shell, in bytes.
MAX_DISK_BYTES = 256 << 20
# Limit of the number of files and folders of the shell.
MAX_ENTRIES = 10_000
# What exceeds the limit, for the agent.
LIMIT = (
    f"more than {MAX_DISK_BYTES >> 20} MB or {MAX_ENTRIES} files, or a folder that is closed to its owner or "
    "too deep"
)


def is_full(base: Path, pid: int) -> bool:
    """Return whether the files of a shell, with those that are removed but still open, exceed a limit.

    `base` is the folder of all its files, and `pid` its process, which is halted while its open files are
    read.
    """
    used = untrusted_folder.used_bytes(base, MAX_DISK_BYTES, MAX_ENTRIES)
    if used <= MAX_DISK_BYTES:
        used += removed_bytes(halted_by_pid(pid), base.stat().st_dev)
    return used > MAX_DISK_BYTES


def after_end(base: Path, workspace: Path, output: Path, texts: Iterable[str]) -> str:
    """Remove files of a shell that was ended because they exceed a limit, and return what happens to them.

    They stay, but not if they exceed twice the limit: otherwise each further command could add some. `base`
    is the folder of all files, with the folders `workspace` and `output`. `texts` are the names of the
    read-only files of the workspace.
    """
    used = untrusted_folder.used_bytes(base, 2 * MAX_DISK_BYTES, 2 * MAX_ENTRIES)
    if used <= 2 * MAX_DISK_BYTES:
        return "remove some in the next command, which starts a new shell"
    kernels, model = workspace / "kernels", workspace / "model_new.py"
    untrusted_folder.open_up(workspace, "kernels")
    for folder, kept in (
        (workspace, {"model_new.py", "kernels", "utils", *texts}),
        (kernels, untrusted_folder.contents(workspace, "kernels").keys()),
        (output, set[str]()),
    ):
        if folder.is_dir() and not folder.is_symlink():
            for path in folder.iterdir():
                if path.name not in kept or (path == model and path.is_dir()):
                    remove_tree(path)
    return "all files but those in kernels/ and model_new.py were removed"
