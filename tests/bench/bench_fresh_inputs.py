"""Ratio of the seconds of a verdict with inputs that no earlier call had to those with repeated inputs.

Tasks that the profile smoke composes are judged two ways: as they are, so that inputs are mixed, and
with rounded inputs, so that `get_inputs` draws each call. The candidate is the task's own source, so nothing
is built, and torch.compile is not measured. The seconds without new inputs are those of the same verdict with
the time of making its inputs replaced by that of copying stored ones.

    python tests/bench/bench_fresh_inputs.py [--device cuda]
"""

import argparse
import itertools
import re
import sys
import tempfile
import time
import unittest.mock
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from components.core.config import resolve
from components.core.task import KernelTask
from components.judge.judge import Judge
from components.judge.staged_inputs import StagedInputs
from components.synthesis.core_composer import compose_tasks

TASKS, REPEATS = 12, 3


def ratio(judge: Judge, task: KernelTask) -> float:
    """Return the ratio of one verdict."""
    took = {"fresh": 0.0, "repeated": 0.0}
    original = StagedInputs.hold_fresh

    def hold_fresh(staged: StagedInputs, calls: int, number: int) -> StagedInputs:
        began = time.perf_counter()
        staged.hold(staged.reference.inputs.repeated(calls))
        copied = time.perf_counter()
        original(staged, calls, number)
        took["repeated"] += copied - began
        took["fresh"] += time.perf_counter() - copied
        return staged

    files = {"model_new.py": task.code.replace("class Model(", "class ModelNew(")}
    with unittest.mock.patch.object(StagedInputs, "hold_fresh", hold_fresh):
        began = time.perf_counter()
        verdict = judge.verdict(task, files, compare_compile=None)
        seconds = time.perf_counter() - began
    assert verdict.status == "correct", verdict
    return (seconds - took["repeated"]) / (seconds - took["fresh"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args().device
    params = resolve("smoke", (f"device={device}", "sandbox.rules=any")).params
    tasks = list(itertools.islice(compose_tasks(params.data.seed, params.data, params.device), TASKS))
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(params, Path(folder))
        for name, suffix in (("mixed", ""), ("drawn", ".round(decimals=2)")):
            first, later = list[float](), list[float]()
            for task in tasks:
                code = re.sub(r"(torch\.randn\([^)]*\))", rf"\1{suffix}", task.code)
                found = [ratio(judge, KernelTask(code=code)) for _ in range(REPEATS)]
                first.append(found[0])
                later += found[1:]
            for when, ratios in (("first verdict on a task", first), ("later ones", later)):
                print(
                    f"inputs {name}, {when}: {np.median(ratios):.3f} (median),"
                    f" {min(ratios):.3f} to {max(ratios):.3f}",
                    flush=True,
                )
        judge.close()


if __name__ == "__main__":
    main()
