"""Suites, which are the sets of tasks on which policies are evaluated.

The suite `held-out` is the held-out split of the run's data set. `shipped` is the small suite in
docs/examples/suite, whose tasks have the size `evaluation.numel`. Any other suite is the path of a task
file, a folder of task files, a KernelBench checkout (`KernelBench/level1` to `level4`), or a parquet
file. A parquet file may be a data set of this project, the public data set of the CUDA Agent paper
(CUDA-Agent-Ops-6K), or a file of KernelBench on Hugging Face (with the columns `code, level, name,
problem_id`).
"""

import re
from pathlib import Path

from components.core.config import PROJECT
from components.core.errors import UserError, refuse
from components.core.params import Params
from components.core.task import (
    KernelTask,
    cast_task,
    check_contract,
    load_task,
    missing_kernelbench,
    read_rows,
    read_tasks,
)

HELD_OUT = "held-out"
SHIPPED = "shipped"
SHIPPED_FOLDER = PROJECT / "docs" / "examples" / "suite"
LEVEL_FOLDER = re.compile(r"level_?(\d+)")


def load_suite(params: Params, dataset: Path) -> list[KernelTask]:
    """Return the tasks of the suite `evaluation.suite` that have one of the levels `evaluation.levels`.

    `dataset` is the folder or parquet file of the run's data set, which is read only for the suite
    `held-out`. If `evaluation.levels` is empty, all tasks are returned. The tasks are cast to
    `evaluation.dtype`. Raises UserError if the suite does not exist, has no task or no task of these levels,
    or contains a file that is not a task.
    """
    suite, levels = params.evaluation.suite, params.evaluation.levels
    tasks = [cast_task(task, params.evaluation.dtype) for task in _tasks(params, suite, dataset)]
    chosen = [task for task in tasks if not levels or task.level in levels]
    there = ", ".join(map(str, sorted({task.level for task in tasks if task.level is not None}))) or "none"
    refuse(
        (
            not chosen,
            f"evaluation.levels: {suite} has no task of level {', '.join(map(str, levels))}; its levels "
            f"are: {there}. Give some of these, or [] for all tasks.",
        )
    )
    return chosen


def _tasks(params: Params, suite: str, dataset: Path) -> list[KernelTask]:
    path = Path(suite)
    if suite == HELD_OUT:
        path = dataset / "tasks.parquet" if dataset.is_dir() else dataset
        tasks = [task for task in read_tasks(path) if task.split == "held_out"]
    elif suite == SHIPPED:
        tasks = [_sized(task, params.evaluation.numel) for task in _from_folder(SHIPPED_FOLDER)]
    elif path.is_file() and path.suffix == ".parquet":
        tasks = _from_parquet(path)
    elif path.is_file() and path.suffix == ".py":
        tasks = [load_task(path)]
    elif path.is_dir():
        tasks = _from_folder(path)
    else:
        fault = missing_kernelbench(path) or (
            f"{suite} is neither {HELD_OUT}, nor {SHIPPED}, nor a folder, a task file or a parquet file; "
            "give one of these"
        )
        raise UserError(f"evaluation.suite: {fault}.")
    refuse(
        (
            not tasks and suite == HELD_OUT,
            f"{path}: the data set has no held-out tasks; build it with data.held_out of at least 1.",
        ),
        (
            not tasks,
            f"evaluation.suite: {suite} holds no task; give a folder of .py task files, a KernelBench "
            "checkout or a parquet file.",
        ),
    )
    return tasks


def _sized(task: KernelTask, numel: int) -> KernelTask:
    """Return a task of the shipped suite with `numel`, the number of elements of its largest input.

    The number is written to the line `NUMEL = …` of the task's source, and an AssertionError is raised unless
    there is exactly one such line.
    """
    code, count = re.subn(r"(?m)^NUMEL = \d+$", f"NUMEL = {numel}", task.code)
    assert count == 1, f"{task.name}: one line NUMEL = … is the shipped suite's own rule"
    return task.model_copy(update={"code": code, "data_source": SHIPPED})


def _from_folder(folder: Path) -> list[KernelTask]:
    root = folder / "KernelBench" if (folder / "KernelBench").is_dir() else folder
    levels = {path: LEVEL_FOLDER.fullmatch(path.name) for path in sorted(root.iterdir()) if path.is_dir()}
    if any(levels.values()):
        return [
            task.model_copy(update={"level": int(level[1])})
            for path, level in levels.items()
            if level is not None
            for task in _task_files(path)
        ]
    # A snapshot from Hugging Face has its splits in data/, for instance level_1-00000-of-00001.parquet.
    if files := sorted(root.glob("*.parquet")) or sorted(root.glob("data/level_*.parquet")):
        return [task for file in files for task in _from_parquet(file)]
    return _task_files(root)


def _task_files(folder: Path) -> list[KernelTask]:
    """Load the task files in `folder`, sorted by the number with which their names begin, then by name.

    Files whose names begin with an underscore or a dot are left out. Raises UserError if a file is not a
    kernel task.
    """

    def order(path: Path) -> tuple[int, str]:
        number = re.match(r"\d+", path.name)
        return (int(number[0]) if number else 0, path.name)

    return [load_task(path) for path in sorted(folder.glob("[!_.]*.py"), key=order)]


def _from_parquet(path: Path) -> list[KernelTask]:
    tasks, rows = read_tasks(path), read_rows(path)
    for index, task in enumerate(tasks):
        check_contract(task.code, f"{path}: row {index}")
    if not {"level", "name"} <= rows[0].keys():
        return tasks
    numbers = [str(row.get("problem_id") or "").zfill(9) for row in rows]
    order = sorted(
        zip(tasks, numbers, strict=True), key=lambda item: (item[0].level or 0, item[1], item[0].name)
    )
    return [
        task.model_copy(update={"data_source": "KernelBench", "name": task.name.removesuffix(".py")})
        for task, _ in order
    ]
