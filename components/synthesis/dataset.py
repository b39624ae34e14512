"""Build a data set of training tasks, from composed tasks or from those of a parquet file.

A task is a PyTorch module that a policy has to make faster. A parquet file of tasks has the columns `ops`,
`data_source` and `code` of the public data set CUDA-Agent-Ops-6K. In this module, a candidate is a task that
is proposed for the data set, and not a kernel.
"""

import contextlib
import itertools
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from components.core.errors import UserError
from components.core.files import check_replaceable
from components.core.params import Data, Params
from components.core.progress import Progress
from components.core.records import TaskDtype
from components.core.task import KernelTask, cast_task, parse_operators, read_rows
from components.synthesis.core_composer import compose_tasks, draw_dtypes
from components.synthesis.dataset_builder import AdmissionPool, DatasetBuilder, TaskCandidate, task_quotas
from components.synthesis.dataset_summary import FILES, DatasetSummary, Rejection
from components.synthesis.model_composer import ModelComposer
from components.synthesis.operator_ablation import split_of
from components.synthesis.operator_table import load_operator_table
from components.synthesis.task_filter import TaskFilter
from components.synthesis.torch_composer import TorchComposer


def build_dataset(
    params: Params, out: Path, pool: AdmissionPool, progress: Progress, seeds: Path | None = None
) -> DatasetSummary:
    """Compose tasks, have the judge check them, and write those that it admits as a data set to `out`.

    `pool` submits tasks to the judge. `out` is a folder, whose files are tasks.parquet, rejected.parquet,
    metrics.json, plots/*.csv and README.md; the result is their summary. Equal parameters and equal answers
    of the judge give an equal data set, in whatever order the answers arrive. `seeds` is the folder for the
    table of mined operators (those of the installed libraries that tasks can use). It is needed if
    data.operators is `torch` or `all`. If data.composer then names a server of a language model, the model
    composes the tasks, and its answers are stored in the folder `answers` beside `seeds`. Raises UserError if
    `seeds` is needed but None, if data.against cannot be read, if too many tasks in a row are refused or not
    needed, if the language model's server fails, or if `out` contains something else than this data set.
    Raises InfrastructureError if the judge itself fails.
    """
    check_replaceable(out, "a data set", FILES)
    data = params.data
    builder = DatasetBuilder(params, pool, progress, task_quotas(data))
    source: Iterator[TaskCandidate]
    if data.operators in ("core", "kernelbench"):
        source = (TaskCandidate(task) for task in compose_tasks(data.seed, data, params.device))
    else:
        if seeds is None:
            raise UserError(
                f"data.operators: {data.operators} needs the folder of the mined table; "
                "give one, or set data.operators to core."
            )
        table = load_operator_table(seeds, progress)
        items: Iterable[KernelTask | Rejection]
        if data.composer:
            names = sorted({template.name for template in table.templates})
            items = ModelComposer(names, data, seeds.parent / "answers")
        else:
            items = TorchComposer(table, data, params.device, modules=data.operators == "all")
        source = (
            TaskCandidate(_cast(item, dtype))
            if isinstance(item, KernelTask)
            else TaskCandidate(item.task, refused=item)
            for item, dtype in zip(items, draw_dtypes(data.seed, data.half_share), strict=False)
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # The composer's tensors are small, and the judge needs the cores.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about many of the mined operators.
            builder.run(source, data.tasks + data.held_out)
    finally:
        torch.set_num_threads(threads)
    return builder.write(out)


def admit_tasks(
    params: Params,
    tasks: Iterable[KernelTask],
    total: int,
    out: Path,
    pool: AdmissionPool,
    progress: Progress,
) -> DatasetSummary:
    """Have the judge check the first `total` of the given tasks, and write the admitted ones to `out`.

    A task (a PyTorch module to be made faster) is admitted if its source passes the filter and the judge can
    measure kernels for it. Tasks that are refused because of their source are not executed. `pool` submits
    tasks to the judge. `out` is a folder that gets a data set, whose files have the names of those that
    `build_dataset` writes, and whose summary is returned. Raises UserError if no task is admitted, if
    data.against cannot be read, or if `out` contains something else than this data set, and
    InfrastructureError if the judge itself fails.
    """
    check_replaceable(out, "a data set", FILES)
    builder = DatasetBuilder(params, pool, progress, None)
    builder.run((TaskCandidate(task) for task in itertools.islice(tasks, total)), total)
    if not builder.admitted:
        reasons = (
            ", ".join(
                f"{reason} {count}"
                for reason, count in Counter(item.reason for item in builder.rejected).most_common()
            )
            or "no rows"
        )
        raise UserError(
            f"{out}: no task was admitted ({reasons}), so nothing was written; "
            "see cuda-agent data check for each row."
        )
    return builder.write(out)


# Columns of the public data set CUDA-Agent-Ops-6K.
PUBLIC = ("ops", "data_source", "code")


def read_public(path: Path, seed: int) -> list[KernelTask]:
    """Return every row of a parquet file as a task (a module to be made faster) that no judge has checked.

    The name of a task is `row N` for row N, counted from 0. `seed` is data.held_out_seed, which decides which
    sequences of operators are held out, so that their tasks are used for evaluation only. Raises UserError if
    the file is not a parquet file or lacks one of the columns of the public data set CUDA-Agent-Ops-6K, which
    are `ops`, `data_source` and `code`.
    """
    tasks = []
    for row, values in enumerate(read_rows(path, *PUBLIC)):
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


def check_rows(tasks: list[KernelTask], data: Data) -> dict[int, Rejection]:
    """Check the source of every task in order, without executing it, and return the refusals by row number.

    `tasks` has the task of each row of a data set, and rows are counted from 0. A refusal has the task, the
    reason and a detail. `TaskFilter.check_source` finds the reasons. A held-out row (for evaluation only) is
    also refused if its operator sequence occurs in a training row. Raises UserError if data.against cannot be
    read.
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


def _cast(task: KernelTask, dtype: TaskDtype) -> KernelTask:
    """Return the task with its module and its floating-point inputs cast to `dtype`.

    If the source lacks a part of a task, such as the class `Model`, the task is returned unchanged; the
    filter of the data set then refuses it.
    """
    with contextlib.suppress(UserError):
        return cast_task(task, dtype)
    return task
