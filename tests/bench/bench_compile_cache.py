"""Seconds until torch.compile is ready in a judge, in two judges one after the other that share a cache.

    python tests/bench/bench_compile_cache.py [--profile smoke] [--set device=cuda]

The cache is empty at first. Prints for each task and each mode of torch.compile the seconds of the first and
of the second judge with their ratio, whether the second found everything in the cache, and the microseconds
of a call in both.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from components.core.config import resolve
from components.judge.baselines import COMPILE, COMPILE_MODES, baseline_seconds, start_available
from components.judge.judge import Judge
from components.judge.task_bench import TaskBench

TASK = """
import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(512, 512)
        self.norm = nn.LayerNorm(512)
        self.conv = nn.Conv2d(8, 16, 3)

    def forward(self, x):
        return {expression}

def get_inputs():
    return [torch.randn({shape})]

def get_init_inputs():
    return []
"""
TASKS = {
    "layer norm, gelu": ("F.gelu(self.norm(x)) * x", "512, 512"),
    "linear, softmax": ("torch.softmax(F.gelu(self.linear(x)), -1)", "512, 512"),
    "conv, relu, mean": ("self.conv(x).relu().mean((2, 3))", "8, 8, 64, 64"),
}
# Task that is compiled first in each judge, so that no figure includes the start of the zygotes.
FIRST = ("torch.sigmoid(x)", "64, 64")
Row = tuple[float, bool, float]


def source(expression: str, shape: str) -> str:
    return TASK.format(expression=expression, shape=shape)


def one_judge(profile: str, sets: tuple[str, ...], folder: Path) -> dict[str, Row]:
    """Return by task and mode: seconds until it is ready, whether it was cached, seconds of a call."""
    params, rows = resolve(profile, sets).params, dict[str, Row]()
    with contextlib.closing(Judge(params, folder)) as judge:
        for task, code in {
            "": source(*FIRST),
            **{name: source(*form) for name, form in TASKS.items()},
        }.items():
            with contextlib.closing(TaskBench(params, judge.runner_factory, judge.scheduler, code)) as bench:
                for mode in COMPILE_MODES[params.device] if task else (COMPILE,):
                    started = time.monotonic()
                    if not start_available(bench.baselines, [mode]):
                        continue
                    took, runner = time.monotonic() - started, bench.baselines.get(mode)
                    with judge.scheduler.measuring():
                        call = baseline_seconds(bench.baselines, [mode])[mode]
                    if task:
                        rows[f"{task}, {mode.mode}"] = (took, runner.is_cached, call)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", default="smoke")
    parser.add_argument("--set", dest="sets", action="append", default=[])
    parser.add_argument("--judge", type=Path, help="run one judge with this folder; for the command itself")
    chosen = parser.parse_args()
    if chosen.judge is not None:
        print(json.dumps(one_judge(chosen.profile, tuple(chosen.sets), chosen.judge)))
        return
    with tempfile.TemporaryDirectory() as folder:
        passes: list[dict[str, Row]] = []
        for name in ("first", "second"):
            done = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--judge", f"{folder}/{name}"],
                env=os.environ | {"XDG_CACHE_HOME": f"{folder}/cache"},
                stdout=subprocess.PIPE,
                check=True,
            )
            passes.append(json.loads(done.stdout))
    first, second = passes
    for name, (before, _, call) in first.items():
        after, is_cached, call_after = second[name]
        kind = "all from the cache" if is_cached else "COMPILED AGAIN"
        print(
            f"{name:32}{before:8.2f} s{after:8.2f} s  {before / after:5.1f} times  {kind};"
            f" a call {1e6 * call:.0f} and {1e6 * call_after:.0f} us"
        )
    totals = [sum(row[0] for row in rows.values()) for rows in passes]
    print(f"{'all':32}{totals[0]:8.2f} s{totals[1]:8.2f} s  {totals[0] / totals[1]:5.1f} times")


if __name__ == "__main__":
    main()
