"""The baselines of a suite, measured in two passes: how well the passes agree (docs/evaluation.md).

    python tests/bench/bench_baselines.py SUITE OUT.json --profile h200 --levels 1,2,3 --every 4 \
        --set precision=tf32

Every pass makes each task's runners anew, and the second begins when the first has ended. OUT.json is
written after every task; a repeated command goes on where the last one ended.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from components.core.config import resolve
from components.core.errors import InfrastructureError, TaskError
from components.core.files import read_json, write_json
from components.core.task import KernelTask
from components.evaluation.suites import load_suite
from components.judge.compile_baseline import COMPILE_MODES, baseline_seconds, start_available
from components.judge.judge import Judge
from components.judge.task_bench import EAGER, TaskBench

PASSES = ("first", "second")


def measured(judge: Judge, code: str, modes: list[str]) -> dict[str, Any]:
    """Return seconds of a call of eager and of each named mode of torch.compile, and the time that took."""
    began = time.monotonic()
    compiled = [mode for mode in COMPILE_MODES[judge.params.device] if mode.mode in modes]
    try:
        with judge.scheduler.reserve_memory(judge.scheduler.reservable_bytes // 8):  # for the description
            bench = TaskBench(judge.params, judge.runner_factory, judge.scheduler, code)
        with contextlib.closing(bench):
            bench.fill()
            available = start_available(bench, [EAGER, *compiled])
            with judge.scheduler.measuring():
                seconds = baseline_seconds(bench, available)
    except (TaskError, InfrastructureError, torch.OutOfMemoryError) as error:
        return {"fault": str(error)[:300]}
    by_name = {"eager" if name == EAGER else name.mode: took for name, took in seconds.items()}
    return {"seconds": by_name, "took": round(time.monotonic() - began, 2)}


def agreement(tasks: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return per baseline the tasks measured in both passes and the relative difference of the two."""
    found: dict[str, list[float]] = {}
    for record in tasks.values():
        first, second = (record.get(name, {}).get("seconds", {}) for name in PASSES)
        for arm in first.keys() & second.keys():
            found.setdefault(arm, []).append(abs(second[arm] / first[arm] - 1))
    return {
        arm: {
            "tasks": len(values),
            "median": statistics.median(values),
            "p95": float(np.quantile(values, 0.95)),
        }
        for arm, values in sorted(found.items())
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite")
    parser.add_argument("out", type=Path)
    parser.add_argument("--profile", default="smoke")
    parser.add_argument("--levels", default="")
    parser.add_argument("--every", type=int, default=1, help="take each n-th task")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop after so long; a repeated command goes on"
    )
    parser.add_argument(
        "--modes", help="of torch.compile, separated by commas; all that the device has where it is left out"
    )
    parser.add_argument("--set", dest="sets", action="append", default=[])
    chosen = parser.parse_args()
    params = resolve(
        chosen.profile,
        (f"evaluation.suite={chosen.suite}", f"evaluation.levels=[{chosen.levels}]", *chosen.sets),
    ).params
    suite = load_suite(params, Path())[:: chosen.every]
    modes = chosen.modes.split(",") if chosen.modes else [mode.mode for mode in COMPILE_MODES[params.device]]
    tasks: dict[str, dict[str, Any]] = read_json(chosen.out)["tasks"] if chosen.out.is_file() else {}
    end = time.monotonic() + chosen.seconds
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(params, Path(folder))
        try:
            for name in PASSES:
                open_tasks = [
                    task
                    for task in suite
                    if name not in tasks.setdefault(task.task_id, {"name": task.name, "level": task.level})
                ]

                def one(task: KernelTask) -> dict[str, Any] | None:
                    return measured(judge, task.code, modes) if time.monotonic() < end else None

                with ThreadPoolExecutor(params.sandbox.build_workers) as workers:
                    for task, found in zip(open_tasks, workers.map(one, open_tasks), strict=True):
                        if found is not None:
                            tasks[task.task_id][name] = found
                            write_json(
                                chosen.out,
                                {
                                    "device": params.device,
                                    "precision": params.precision,
                                    "agreement": agreement(tasks),
                                    "tasks": tasks,
                                },
                            )
                            print(name, task.level, task.name, found, flush=True)
        finally:
            judge.close()
    for arm, figures in agreement(tasks).items():
        print(
            f"{arm:16} {figures['tasks']:4} tasks  median {figures['median']:.2%}  95th percentile"
            f" {figures['p95']:.2%}"
        )


if __name__ == "__main__":
    main()
