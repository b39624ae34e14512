"""A command in other surroundings: mounts, limits, variables and a system-call filter of its own, which nothing else on the machine notices.

    python tests/surroundings.py JSON

The program makes a user namespace, in which its user has the same uid and all rights, and a mount namespace, changes what the JSON
object says, and becomes the command. It needs no root. What it starts has an ordinary user's rights, also where root calls it, since no
other uid exists in that user namespace.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 8, 32, 0x1000, 0x4000, 1 << 18


@dataclass(frozen=True)
class Surroundings:
    """What differs from the test's own surroundings."""

    bound: dict[str, str] = field(default_factory=dict)
    """Folders by the folder on which they are mounted."""
    read_only: tuple[str, ...] = ()
    noexec: tuple[str, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of a memory file system to be mounted on each folder."""
    settings: dict[str, str] = field(default_factory=dict)
    """Files below /proc/sys that belong to the user namespace, and what is written into each."""
    variables: dict[str, str | None] = field(default_factory=dict)
    """Environment variables; None removes one."""
    limits: dict[str, int] = field(default_factory=dict)
    """Hard limits by their names in `resource`."""
    umask: int = 0o022
    refused: tuple[str, ...] = ()
    """System calls that a filter answers with EPERM."""


def run(
    command: list[str], surroundings: Surroundings, cwd: Path, seconds: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run `command` there to its end."""
    order = json.dumps(asdict(surroundings) | {"command": command, "cwd": str(cwd)})
    return subprocess.run(
        [sys.executable, __file__, order], capture_output=True, text=True, timeout=seconds, check=False
    )


def _mount(source: str, target: str, kind: str = "none", flags: int = 0, data: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode() or None) != 0:
        raise OSError(ctypes.get_errno(), f"mount {target}: {os.strerror(ctypes.get_errno())}")


def _refuse(names: tuple[str, ...]) -> None:
    import pyseccomp

    program = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for name in names:
        program.add_rule(pyseccomp.ERRNO(1), name)
    program.add_rule(pyseccomp.ERRNO(38), "clone3")
    program.add_rule(
        pyseccomp.ERRNO(1), "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, CLONE_NEWUSER, CLONE_NEWUSER)
    )
    program.load()


def become(order: Mapping) -> None:
    """Change the surroundings of this process and execute the command; never returns."""
    uid, gid = os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _mount("none", "/", flags=MS_REC | MS_PRIVATE)
    for target, source in order["bound"].items():
        _mount(source, target, flags=MS_BIND | MS_REC)
    for target, size in order["sizes"].items():
        _mount("tmpfs", target, "tmpfs", data=f"size={size},mode=1777")
    for names, flag in ((order["read_only"], MS_RDONLY), (order["noexec"], MS_NOEXEC)):
        for target in names:
            _mount(target, target, flags=MS_BIND | MS_REC)
            _mount("none", target, flags=MS_REMOUNT | MS_BIND | flag)
    for name, value in order["settings"].items():
        Path("/proc/sys", name).write_text(value)
    for name, value in order["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    os.umask(order["umask"])
    variables = os.environ | {name: value for name, value in order["variables"].items() if value is not None}
    for name, value in order["variables"].items():
        if value is None:
            variables.pop(name, None)
    if order["refused"]:
        _refuse(order["refused"])
    os.chdir(order["cwd"])
    os.execvpe(order["command"][0], order["command"], variables)


if __name__ == "__main__":
    become(json.loads(sys.argv[1]))
