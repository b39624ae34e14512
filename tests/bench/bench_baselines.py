"""The baselines of a suite, measured in two passes: how well they agree, and which tasks fit the device.

    python tests/bench/bench_baselines.py SUITE OUT.json --profile h200 --levels 1,2,3 --every 4 \
        --set precision=tf32 --set sandbox.device_bytes=96000000000

Every pass makes each task's runners anew, and the second begins when the first has ended. What torch.compile
makes of a task is taken from the user's cache if it is there. OUT.json is written after every task; a
repeated command goes on where the last one ended. The tables give, for each level, the tasks that were
measured, those that take too much memory with the reason, and the seconds of both passes; for each task
OUT.json has its placement, the bytes of device memory that were planned, and the largest number of bytes that
all processes used (if tasks are measured one at a time, with --workers 1).
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from device_memory import largest_use

from components.core.config import resolve
from components.core.errors import InfrastructureError, TaskError, TaskTooLarge
from components.core.files import read_json, write_json
from components.core.task import KernelTask
from components.evaluation.suites import load_suite
from components.judge.baselines import EAGER, baseline_seconds, compile_modes, start_available
from components.judge.judge import Judge
from components.judge.task_bench import TaskBench

PASSES = ("first", "second")


def measured(judge: Judge, code: str) -> dict[str, Any]:
    """Return seconds of a call of eager and of each mode of torch.compile, and what that took."""
    began = time.monotonic()
    try:
        bench = TaskBench(judge.params, judge.runner_factory, judge.scheduler, code)
        with contextlib.closing(bench), largest_use(judge.params.device) as used:
            available = start_available(bench.baselines, [EAGER, *compile_modes(bench.reference)])
            with judge.scheduler.measuring():
                seconds = baseline_seconds(bench.baselines, available)
    except TaskTooLarge as error:
        return {"not_measurable": str(error)}
    except (TaskError, InfrastructureError, torch.OutOfMemoryError) as error:
        return {"fault": str(error)[:300]}
    return {
        "seconds": {"eager" if name == EAGER else name.mode: took for name, took in seconds.items()},
        "took": round(time.monotonic() - began, 2),
        "placement": asdict(bench.reference.layout.placement),
        "planned_bytes": bench.reference.bytes,
        "used_bytes": used.bytes,
    }


def print_levels(tasks: dict[str, dict[str, Any]]) -> None:
    """Print one row for each level and pass, and the reasons why tasks were not measured."""
    print("level pass    measured  too large  failed  seconds")
    for level in sorted({task["level"] or 0 for task in tasks.values()}):
        rows = [task for task in tasks.values() if (task["level"] or 0) == level]
        for name in PASSES:
            found = [row[name] for row in rows if name in row]
            kinds = Counter(
                "too large" if "not_measurable" in one else "failed" if "fault" in one else "measured"
                for one in found
            )
            took = sum(one.get("took", 0.0) for one in found)
            counts = f"{kinds['measured']:8} {kinds['too large']:10} {kinds['failed']:7}"
            print(f"{level:5} {name:7} {counts} {took:8.1f}")
    for task in tasks.values():
        reasons = {task.get(name, {}).get(kind) for name in PASSES for kind in ("not_measurable", "fault")}
        for reason in sorted(filter(None, reasons)):
            print(f"level {task['level']} {task['name']}: {reason}")


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
    parser.add_argument("--workers", type=int, help="tasks that are prepared at the same time")
    parser.add_argument("--set", dest="sets", action="append", default=[])
    chosen = parser.parse_args()
    params = resolve(
        chosen.profile,
        (f"evaluation.suite={chosen.suite}", f"evaluation.levels=[{chosen.levels}]", *chosen.sets),
    ).params
    suite = load_suite(params, Path())[:: chosen.every]
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
                    return measured(judge, task.code) if time.monotonic() < end else None

                with ThreadPoolExecutor(chosen.workers or params.sandbox.build_workers) as workers:
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
    print_levels(tasks)
    for arm, figures in agreement(tasks).items():
        print(
            f"{arm:16} {figures['tasks']:4} tasks  median {figures['median']:.2%}  95th percentile"
            f" {figures['p95']:.2%}"
        )


if __name__ == "__main__":
    main()
