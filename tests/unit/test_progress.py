"""Progress as people read it, and faults of the machine that are recognised in errors of libraries."""

import errno
from pathlib import Path

import pytest

from components.cli.progress_view import ProgressView, duration
from components.core.files import environment_fault


def test_a_full_disk_is_recognised_however_a_library_wraps_it() -> None:
    plain = OSError(errno.ENOSPC, "No space left on device", "/somewhere/file")
    assert "/somewhere/file: the disk is full" in environment_fault(plain)
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory", "/proc/x")
    assert "/proc/x: cannot be written there" in environment_fault(missing)
    assert not environment_fault(FileNotFoundError(errno.ENOENT, "No such file or directory", "/data/x"))
    long = OSError(errno.ENAMETOOLONG, "File name too long", "/data/x")
    assert "/data/x: cannot be written there" in environment_fault(long)
    wrapped = RuntimeError("could not save")
    wrapped.__cause__ = plain
    assert "disk is full" in environment_fault(wrapped)
    assert "disk is full" in environment_fault(
        RuntimeError("I/O error: No space left on device (os error 28)")
    )
    assert "disk is full" in environment_fault(
        RuntimeError("(sqlite3.OperationalError) database or disk is full")
    )
    assert environment_fault(RuntimeError("a bug")) == ""


def test_a_write_to_a_full_device_is_a_full_disk() -> None:
    with pytest.raises(OSError) as caught, Path("/dev/full").open("w") as file:
        file.write("x" * 100_000)
    assert "disk is full" in environment_fault(caught.value)


class Lines:
    """A console that keeps its lines."""

    is_terminal = False

    def __init__(self) -> None:
        self.lines: list[str] = []

    def print(self, text: str, **_: object) -> None:
        self.lines.append(text)


def test_plain_progress_is_rate_limited_and_always_shows_the_end() -> None:
    now = [0.0]
    lines = Lines()
    with ProgressView(lines, clock=lambda: now[0]) as view:  # a console of its own kind
        for step in range(1, 101):
            now[0] += 1.0
            view.update("warmup", step, 100, reward=step / 100, m_3=0.5)
    assert 15 <= len(lines.lines) <= 22
    assert lines.lines[-1].startswith("warmup       100/100") and "m_3 50%" in lines.lines[-1]
    assert "left" in lines.lines[5]


def test_durations_read_like_a_clock() -> None:
    assert [duration(seconds) for seconds in (None, 5.4, 65)] == ["", "5s", "1m05s"]
