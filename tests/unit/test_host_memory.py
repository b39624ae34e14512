"""Host memory by the machine and by the limits of control groups."""

from pathlib import Path

import pytest

from components.core.config import resolve
from components.judge import memory_plan
from components.judge.device_scheduler import DeviceScheduler
from components.judge.memory_plan import HOST_SHARE, MemoryBudget, available_bytes

GIB = 1 << 30


def machine(root: Path, membership: str, mounts: str, files: dict[str, str]) -> Path:
    """Write a machine with 64 GiB of available memory below `root`."""
    texts = {
        "proc/meminfo": "MemTotal:       100000000 kB\nMemAvailable:   67108864 kB\n",
        "proc/self/cgroup": membership,
        "proc/self/mounts": mounts,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(group: str, limit: str, usage: int, inactive: int = 0) -> dict[str, str]:
    return {
        f"{group}memory.max": f"{limit}\n",
        f"{group}memory.current": f"{usage}\n",
        f"{group}memory.stat": f"anon 1\ninactive_file {inactive}\n",
    }


V2_MOUNT = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n"


def test_without_limits_it_is_what_the_machine_reports(tmp_path: Path) -> None:
    files = v2("job/", "max", 5 * GIB)
    assert available_bytes(machine(tmp_path, "0::/job\n", V2_MOUNT, files)) == 64 * GIB


def test_the_smallest_limit_of_all_parents_counts(tmp_path: Path) -> None:
    files = v2("a/b/", "max", GIB) | v2("a/", str(16 * GIB), 6 * GIB) | v2("", str(48 * GIB), 6 * GIB)
    assert available_bytes(machine(tmp_path, "0::/a/b\n", V2_MOUNT, files)) == 10 * GIB


def test_file_pages_that_can_be_freed_are_available(tmp_path: Path) -> None:
    files = v2("", str(16 * GIB), 15 * GIB, inactive=9 * GIB)
    assert available_bytes(machine(tmp_path, "0::/\n", V2_MOUNT, files)) == 10 * GIB


def test_memory_beyond_a_limit_is_none_and_not_negative(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, "0::/\n", V2_MOUNT, v2("", str(GIB), 2 * GIB))) == 0


def test_this_machine_has_some() -> None:
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    assert 0 < available_bytes() <= 1024 * int(meminfo["MemTotal"].split()[0])


def test_a_parameter_replaces_what_the_machine_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "available_bytes", lambda: 10 * GIB)
    scheduler = DeviceScheduler("cpu")
    for sets, expected in (((), 10 * GIB), (("sandbox.host_bytes=1000000000000",), 10**12)):
        budget = MemoryBudget.of(resolve("ci", sets).params, scheduler)
        assert budget.host_bytes == int(HOST_SHARE * expected)
