"""Build a data set of training tasks, from composed tasks or from given ones."""

import itertools
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from components.core.errors import UserError
from components.core.params import Params
from components.core.progress import Progress
from components.core.task import KernelTask
from components.synthesis.compose import compose_tasks
from components.synthesis.dataset_builder import AdmissionPool, DatasetBuilder, TaskCandidate
from components.synthesis.dataset_summary import DatasetSummary
from components.synthesis.model_composer import ModelComposer
from components.synthesis.operator_table import load_operator_table
from components.synthesis.quotas import task_quotas
from components.synthesis.torch_composer import TorchComposer


def check_output_folder(out: Path) -> None:
    """Raise UserError unless `out` does not exist, is an empty folder, or contains a data set."""
    is_usable = out.is_dir() and (not any(out.iterdir()) or (out / "tasks.parquet").is_file())
    if not is_usable and (out.exists() or out.is_symlink()):
        raise UserError(f"{out}: holds something else than a data set; give a new or empty folder.")


def build_dataset(
    params: Params, out: Path, pool: AdmissionPool, progress: Progress, seeds: Path | None = None
) -> DatasetSummary:
    """Build a data set and write it to the folder `out`.

    The files are tasks.parquet, rejected.parquet, metrics.json, plots/*.csv and README.md. Equal parameters
    and verdicts give an equal data set, whatever the order of the verdicts is. `seeds` is the folder with the
    table of mined operators, which is not needed if data.operators is `core`. If data.composer names a server
    of a language model, its answers are stored in the folder `answers` beside `seeds`. Raises UserError if
    data.against cannot be read, if too many candidates in a row are refused, if the composer
    finds nothing new, or if `out` contains another data set. Raises InfrastructureError if the judge fails.
    """
    check_output_folder(out)
    data = params.data
    builder = DatasetBuilder(params, pool, progress, task_quotas(data))
    source: Iterator[TaskCandidate]
    if data.operators == "core":
        source = (TaskCandidate(task) for task in compose_tasks(data.seed, data, params.device))
    else:
        if seeds is None:
            raise UserError(
                f"data.operators: {data.operators} needs the folder of the mined table; "
                "give one, or set data.operators to core."
            )
        table = load_operator_table(seeds, progress)
        if data.composer:
            names = sorted({template.name for template in table.templates})
            source = (
                TaskCandidate(item)
                if isinstance(item, KernelTask)
                else TaskCandidate(item.task, refused=item)
                for item in ModelComposer(names, data, seeds.parent / "answers")
            )
        else:
            builder.composer = TorchComposer(table, data, params.device, modules=data.operators == "all")
            source = (TaskCandidate(draft.task, draft=draft) for draft in builder.composer)
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
    """Judge the first `total` of the given tasks, and write a data set of the admitted ones to `out`.

    Tasks that are refused because of their source are not judged. The files have the names of those that
    `build_dataset` writes. Raises UserError if no task is admitted or if `out` contains another data set.
    """
    check_output_folder(out)
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
