"""This module determines how much host memory this process can still use.

Both the memory of the machine and the limits of the process's control groups are considered.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class _Version:
    """Names with which one version of Linux's control groups states memory (cgroups(7))."""

    # Name of the memory controller in /proc/self/cgroup and in the mount options; empty for version 2.
    hierarchy: str
    # Files with a group's limit and with its memory in use, in bytes.
    limit: str
    usage: str
    # Line of memory.stat with the file pages that the kernel can free at once.
    reclaimable: str


V2 = _Version("", "memory.max", "memory.current", "inactive_file")
V1 = _Version("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of host memory that are available to this process.

    This is the smallest of the machine's available memory (`MemAvailable` of /proc/meminfo) and, for each of
    the process's control groups and their parents, the limit less the memory in use. Pages of files that are
    not in active use count as available. `root` is the folder that contains proc and sys. The result is too
    small on a virtual machine whose memory grows as it is used; callers then replace it by the parameter
    `sandbox.host_bytes`.
    """
    meminfo = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    return min([1024 * int(meminfo["MemAvailable"].split()[0]), *_left_by_limits(root)])


def _left_by_limits(root: Path) -> Iterator[int]:
    """Yield, for each memory limit of this process's control groups, the bytes that can still be used."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except FileNotFoundError:  # the kernel has no control groups
        return
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        version = V1 if V1.hierarchy in controllers.split(",") else V2
        if version is V2 and controllers:
            continue
        for mount in _mounts(root, version):
            folder = mount / path.lstrip("/")
            # In a container the path may be the host's and the mount the container's own group. Then only
            # the last folder of this walk, the mount itself, exists.
            for level in (folder, *folder.parents):
                left = _left(level, version)
                if left is not None:
                    yield left
                if level == mount:
                    break


def _mounts(root: Path, version: _Version) -> Iterator[Path]:
    """Yield the folders at which control groups of `version` that can limit memory are mounted."""
    for line in (root / "proc/self/mounts").read_text().splitlines():
        _, folder, kind, options, *_ = line.split()
        is_v1 = kind == "cgroup" and V1.hierarchy in options.split(",")
        if is_v1 if version is V1 else kind == "cgroup2":
            yield root / folder.lstrip("/")


def _left(group: Path, version: _Version) -> int | None:
    """Return the bytes that can still be used within a control group's limit, or None if it has no limit."""
    try:
        limit = (group / version.limit).read_text().strip()
        if limit == "max":
            return None
        usage = int((group / version.usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    return max(0, int(limit) - usage + int(stat.get(version.reclaimable, 0)))
