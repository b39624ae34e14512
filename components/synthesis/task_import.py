"""Import tasks from a parquet file with the columns of the data set CUDA-Agent-Ops-6K, and check its rows."""

import ast
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from components.core.errors import UserError
from components.core.params import Data
from components.core.task import KernelTask
from components.synthesis.compose import split_of
from components.synthesis.contamination import count_subtrees, similarity
from components.synthesis.dataset_summary import Rejection
from components.synthesis.task_filter import TaskFilter

# Columns of the public data set CUDA-Agent-Ops-6K.
PUBLIC = ("ops", "data_source", "code")


def read_public(path: Path, seed: int) -> list[KernelTask]:
    """Return every row of a parquet file as a task without evidence, whose name is the number of the row.

    `seed` is data.held_out_seed, which determines the tasks that are held out. Raises UserError if the file
    is not a parquet file or lacks one of the columns of the public data set, which are `ops`, `data_source`
    and `code`.
    """
    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise UserError(
            f"{path}: not a readable parquet ({' '.join(str(error).split())[:120]}); "
            f"give a file with the columns {', '.join(PUBLIC)}."
        ) from error
    missing = [name for name in PUBLIC if name not in table.column_names]
    if missing:
        raise UserError(
            f"{path}: column {missing[0]} is missing; a parquet of tasks has the columns {', '.join(PUBLIC)}."
        )
    tasks = []
    for row, values in enumerate(table.select(list(PUBLIC)).to_pylist()):
        ops = parse_operators(values["ops"])
        code, source = (
            value if isinstance(value, str) else "" for value in (values["code"], values["data_source"])
        )
        tasks.append(
            KernelTask(
                code=code,
                ops=ops,
                data_source=source or "parquet",
                split=split_of(ops, seed),
                name=f"row {row}",
            )
        )
    return tasks


def parse_operators(value: Any) -> tuple[str, ...]:
    """Return the names of operators in a value of the column `ops`.

    The value is a list, a text with a list in JSON or Python syntax, or a text of names with commas between
    them.
    """
    if isinstance(value, str):
        for read in (json.loads, ast.literal_eval):
            try:
                value = read(value)
                break
            except (ValueError, SyntaxError):
                continue
    if isinstance(value, str):
        value = value.split(",")
    return tuple(str(name).strip() for name in value or () if str(name).strip())


def check_rows(tasks: list[KernelTask], data: Data) -> dict[int, Rejection]:
    """Check the source of every row in order, without executing it, and return the refusals by row number.

    `tasks` has one task for each row. A held-out row is refused if its operator sequence also occurs in a
    training row.
    """
    task_filter = TaskFilter(data)
    trained = {task.ops for task in tasks if task.split == "train"}
    refused = {}
    for row, task in enumerate(tasks):
        reason, detail = task_filter.check_source(task.model_copy(update={"name": f"row {row}"}))
        if not reason and task.split == "held_out" and task.ops in trained:
            reason, detail = "held_out_is_trained_on", " > ".join(task.ops)
        if reason:
            refused[row] = Rejection(task, reason, detail)
    return refused


def nearest_tasks(task: KernelTask, others: list[KernelTask], count: int) -> list[tuple[float, KernelTask]]:
    """Return the `count` tasks of `others` that are most similar to `task`, with their similarity (0 to 1).

    The most similar task is first. `task` itself is left out.
    """
    subtrees = count_subtrees(task.code)
    near = (
        (similarity(subtrees, count_subtrees(other.code)), other)
        for other in others
        if other.task_id != task.task_id
    )
    return sorted(near, key=lambda pair: (-pair[0], pair[1].task_id))[:count]
