"""What a task's process says of the task, from which its memory and its rounds are laid out."""

import importlib
import math
import time
from pathlib import Path

import pytest
from judge_fixtures import CODE

from components.core.config import PROJECT


def test_the_duration_is_that_of_a_call_in_which_the_process_was_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the task's source is written there
    monkeypatch.syspath_prepend(PROJECT / "components" / "sandbox" / "inside")
    reference = importlib.import_module("reference")
    clock, stops = time.perf_counter, iter([0.0, 0.0, 5.0])  # stopped for 5 s in the first call that is timed
    stopped = 0.0

    def with_stop() -> float:
        nonlocal stopped
        stopped += next(stops, 0.0)
        return clock() + stopped

    monkeypatch.setattr(reference, "MOST_TIMING_SECONDS", math.inf)
    monkeypatch.setattr(reference.time, "perf_counter", with_stop)
    described = reference.describe(CODE, "cpu")
    assert 0 < described["seconds"] < 1 and described["inputs"] == [([256, 1024], "float32")]
