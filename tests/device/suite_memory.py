"""Which tasks of a suite can be judged on this GPU, and on one with less memory: the plan for each task.

    python tests/device/suite_memory.py SUITE OUT.json [--levels 1,2,3] [--gigabytes 96 0] [--workers 8] \
        [--seconds 600] [--set KEY=VALUE]

Every task's source runs once on the device, at its own sizes, in the sandbox, which describes its inputs,
parameters, outputs and largest use of memory. From this description the judge plans where it keeps the data
for each size of memory in --gigabytes (0: all of the device) as it does before it judges a candidate. Nothing
is timed. Prints for each level and size the tasks that can be measured, by placement, and those that cannot,
with the reason. OUT.json has the planned bytes of each task; a repeated command describes only what it lacks.
Needs torch and this project, no pytest. Ends with 1 if a task could not be described.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from components.core.config import resolve
from components.core.errors import InfrastructureError, TaskError, TaskTooLarge
from components.core.files import read_json, write_json
from components.core.params import Params
from components.core.task import KernelTask
from components.evaluation.suites import load_suite
from components.judge.judge import Judge
from components.judge.memory_plan import MemoryBudget, memory_need, plan_layout
from components.judge.role_processes import task_errors
from components.judge.task_description import Description
from components.judge.task_layout import Placement, Sizing
from components.sandbox.inside.runner_protocol import RoleHeader


def name_of(placement: Placement) -> str:
    """Return a few words for where a placement keeps the data."""
    host = [
        word
        for word, is_there in (
            ("references", placement.references_on_host),
            ("inputs", placement.inputs_on_host),
        )
        if is_there
    ]
    return ("shared buffers" if placement.shares_buffers else "own buffers") + (
        f", {' and '.join(host)} on the host" if host else ""
    )


def planned(judge: Judge, params: Params, description: Description) -> dict[str, Any]:
    """Return the placement and the bytes of a task's plan, or why it cannot be judged."""
    budget = MemoryBudget.of(params, judge.scheduler)
    try:
        layout = plan_layout(description, params, Sizing(), budget)
    except TaskTooLarge as error:
        return {"not_measurable": str(error)}
    need = memory_need(layout, budget.runner_bytes)
    return {
        "placement": name_of(layout.placement),
        "device": need.device,
        "host": need.host,
        "calls": layout.calls,
    }


def described(judge: Judge, sizes: dict[str, Params], code: str) -> dict[str, Any]:
    """Describe a task on the device, and return its plan for each size of memory."""
    began = time.monotonic()
    try:
        header: RoleHeader = {"role": "describe", "code": code, "precision": judge.params.precision}
        seconds = judge.params.sandbox.run_seconds
        with (
            judge.scheduler.reserve_memory(judge.scheduler.reservable_bytes // 8),
            task_errors(),
            contextlib.ExitStack() as cleanup,
        ):
            runner = judge.runner_factory.spawn(header, seconds=seconds)
            cleanup.callback(runner.close, wait=True)  # it has the memory that is reserved
            description = Description.model_validate_json(runner.receive())
    except TaskTooLarge as error:
        return {"plans": {name: {"not_measurable": str(error)} for name in sizes}}
    except (TaskError, InfrastructureError, torch.OutOfMemoryError) as error:
        return {"fault": str(error)[-300:]}
    return {
        "took": round(time.monotonic() - began, 2),
        "peak": description.peak_bytes,
        "plans": {name: planned(judge, params, description) for name, params in sizes.items()},
    }


def print_table(tasks: dict[str, dict[str, Any]], sizes: list[str]) -> None:
    """Print a row for each level and size of memory, and the reasons."""
    print(f"{'level':5} {'memory':12} {'tasks':>5} {'measurable':>10}  placements")
    for level in sorted({task["level"] or 0 for task in tasks.values()}):
        rows = [task for task in tasks.values() if (task["level"] or 0) == level]
        for size in sizes:
            plans = [row["plans"][size] for row in rows if "plans" in row]
            kinds = Counter(plan["placement"] for plan in plans if "placement" in plan)
            placements = "; ".join(f"{count} {kind}" for kind, count in kinds.most_common())
            print(f"{level:5} {size:12} {len(rows):5} {kinds.total():10}  {placements}")
    for task in tasks.values():
        reasons = {
            size: plan["not_measurable"]
            for size, plan in task.get("plans", {}).items()
            if "not_measurable" in plan
        }
        for size, reason in reasons.items():
            print(f"not measurable with {size}: level {task['level']} {task['name']}: {reason}")
        if "fault" in task:
            print(f"not described: level {task['level']} {task['name']}: {task['fault']}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite")
    parser.add_argument("out", type=Path)
    parser.add_argument("--profile", default="h200")
    parser.add_argument("--levels", default="1,2,3")
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[96, 0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="describe no task after so long")
    parser.add_argument("--set", dest="sets", action="append", default=[])
    options = parser.parse_args()
    sets = (f"evaluation.suite={options.suite}", f"evaluation.levels=[{options.levels}]", *options.sets)
    sizes = {
        f"{size:g} GB" if size else "the device": resolve(
            options.profile, (*sets, f"sandbox.device_bytes={int(size * 1e9)}")
        ).params
        for size in options.gigabytes
    }
    params = resolve(options.profile, sets).params
    suite = load_suite(params, Path())
    tasks: dict[str, dict[str, Any]] = read_json(options.out)["tasks"] if options.out.is_file() else {}
    missing = [task for task in suite if "plans" not in tasks.get(task.task_id, {})]
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(params, Path(folder))
        try:

            def one(task: KernelTask) -> dict[str, Any] | None:
                return described(judge, sizes, task.code) if time.monotonic() < end else None

            with ThreadPoolExecutor(options.workers) as workers:
                for task, found in zip(missing, workers.map(one, missing), strict=True):
                    if found is not None:
                        tasks[task.task_id] = {"name": task.name, "level": task.level, **found}
                        write_json(options.out, {"device": params.device, "tasks": tasks})
        finally:
            judge.close()
    print_table(tasks, list(sizes))
    undescribed = sum("plans" not in tasks.get(task.task_id, {}) for task in suite)
    print(f"{len(suite) - undescribed} of {len(suite)} tasks were described")
    return 1 if undescribed else 0


if __name__ == "__main__":
    sys.exit(main())
