"""A build of a data set that is killed and repeated."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from components.core.config import PROJECT
from components.core.task import dataset_version


def test_a_build_killed_anywhere_comes_to_the_version_of_an_undisturbed_one(tmp_path: Path) -> None:
    """Kill a build at five random moments; the undisturbed one measures for itself in another journal."""
    subprocess.run(
        [sys.executable, PROJECT / "tests" / "fixtures" / "build_process.py", tmp_path, "5"],
        check=True,
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
    )
    report = json.loads((tmp_path / "kills.json").read_text())
    assert report["whole"] == [0, 0] and report["codes"].count(-signal.SIGKILL) >= 3, report
    one, other = (tmp_path / home / "tasks" / "tasks.parquet" for home in ("killed", "undisturbed"))
    assert dataset_version(one) == dataset_version(other), report
    assert one.read_bytes() != other.read_bytes(), "the times of both were measured, not copied"
