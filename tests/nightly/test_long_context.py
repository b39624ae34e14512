"""The GPU machines' program for long trajectories, on two processes and a tiny shape."""

import subprocess
import sys
from pathlib import Path

from components.core import config


def test_sequence_parallelism_changes_neither_loss_nor_gradient(tmp_path: Path) -> None:
    program = config.PROJECT / "tests" / "device" / "long_context.py"
    small = ("--device", "cpu", "--model", "tiny", "--gpus", "2", "--lengths", "201", "402", "--only", "2x")
    ran = subprocess.run(
        [sys.executable, str(program), *small, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    lines = ran.stdout.splitlines()
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
    for length in (201, 402):
        (compared,) = [line for line in lines if f" at {length}:" in line]
        assert compared.startswith("OK   2xactor-sp1-full and 2xactor-sp2-full")
        for case in ("2xactor-sp1-full", "2xactor-sp2-full", "2xcritic-sp2-full"):
            assert any(line.split()[:2] == [case, str(length)] for line in lines), ran.stdout
