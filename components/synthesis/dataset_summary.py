"""Write the files of a data set besides its tasks: rejected candidates, metrics, plots and the data card.

A candidate is a task (a module to be made faster) that was proposed for the data set.
"""

import csv
import io
import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from components.bootstrap.operator_chain import canonical
from components.core.files import atomic_write, write_json
from components.core.params import Params
from components.core.task import KernelTask

# Names of everything in the folder of a data set.
FILES = ("tasks.parquet", "rejected.parquet", "metrics.json", "plots", "README.md")
# Reasons for the rejection of candidates whose source may not be valid Python.
UNREADABLE = ("no_code", "cut_off", "contract")
# Reasons for a rejection without executing the source.
FIRST_LOOK = (
    *UNREADABLE,
    "hostile",
    "foreign_import",
    "mislabelled",
    "duplicate_source",
    "duplicate_graph",
    "similar_to_evaluation",
)
# Columns of rejected.parquet that contain texts.
REJECTED_TEXTS = ("data_source", "code", "task_id", "split", "reason", "detail")
# Number of bins of the distribution of similarities.
BINS = 20
# Quantiles of the distributions in the data card.
QUANTILES = (0, 0.1, 0.5, 0.9, 1)


@dataclass(frozen=True)
class Rejection:
    """A rejected candidate (a task that was proposed for a data set) with the reason and a detail.

    The reason is a word that programs can read, such as "duplicate_graph", and the detail a text for people.
    """

    task: KernelTask
    reason: str
    detail: str


@dataclass(frozen=True)
class DatasetSummary:
    """The result of one build of a data set: its version and the candidates it admitted and rejected.

    A candidate is a proposed task, which is admitted if neither the filter of sources nor the judge refuses
    it. `version` is a digest of the tasks without measured values. `candidates` is the number of candidates
    that were admitted, rejected or left out. `surplus` is the number of those that were left out without the
    judge's answer, because no more tasks of their split (training or held out) and kind were needed.
    `similarities` has the highest similarity (0 to 1) of each compared candidate to an evaluation program,
    which is the source of a benchmark's task, in ascending order.
    """

    version: str
    candidates: int
    surplus: int
    admitted: tuple[KernelTask, ...]
    rejected: tuple[Rejection, ...]
    similarities: tuple[float, ...] = ()

    @property
    def reasons(self) -> dict[str, int]:
        """Return the number of rejections for each reason, the most frequent reason first."""
        return dict(Counter(rejection.reason for rejection in self.rejected).most_common())

    @property
    def funnel(self) -> list[tuple[str, int]]:
        """Return the name of each step of the build, and the number of proposed tasks that remain after it.

        The steps are "composed", "new and clean" (the source was not refused), "executed" (the judge checked
        the task) and "admitted".
        """
        unseen = self.candidates - sum(
            count for reason, count in self.reasons.items() if reason in FIRST_LOOK
        )
        return [
            ("composed", self.candidates),
            ("new and clean", unseen),
            ("executed", unseen - self.surplus),
            ("admitted", len(self.admitted)),
        ]


def write_summary(folder: Path, params: Params, summary: DatasetSummary) -> None:
    """Write the files that describe a data set into `folder`, which has its tasks.parquet.

    The files are rejected.parquet (the refused tasks with the reasons), metrics.json, plots/*.csv and
    README.md (the data card). `params` are the parameters of the build, and `summary` is its result.
    """
    _write_rejected(folder / "rejected.parquet", summary.rejected)
    figures = metrics(summary)
    write_json(folder / "metrics.json", figures)
    bins = Counter(min(int(value * BINS), BINS - 1) for value in summary.similarities)
    plots: dict[str, list[tuple[Any, ...]]] = {
        "funnel": [("step", "candidates"), *summary.funnel],
        "reasons": [("reason", "candidates"), *summary.reasons.items()],
        "similarity": [
            ("similarity", "candidates"),
            *((f"{index / BINS:.2f}", bins[index]) for index in range(BINS)),
        ],
    }
    for name, rows in plots.items():
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        atomic_write(folder / "plots" / f"{name}.csv", text.getvalue())
    atomic_write(folder / "README.md", card(params, summary, figures))


def metrics(summary: DatasetSummary) -> dict[str, Any]:
    """Return the figures of a data set by name, which `dvc metrics show` and the report show.

    Examples are `admitted`, the number of its tasks, and `rejected`, the number of refused tasks by reason.
    The eager times are in seconds. The headroom of a task is the time of torch.compile divided by the least
    time that any kernel can take. The similarity is that to the nearest evaluation program (the source of a
    benchmark's task). The groups `similarity`, `headroom` and `eager_seconds` are empty if they were
    determined for no task.
    """
    times = [task.evidence["eager_seconds"] for task in summary.admitted]
    left = [task.evidence["headroom"] for task in summary.admitted if "headroom" in task.evidence]
    splits = Counter(task.split for task in summary.admitted)
    sources = Counter(task.data_source for task in summary.admitted)
    mix = Counter(len(task.ops) for task in summary.admitted if task.data_source != "transformers")
    return {
        "version": summary.version,
        "candidates": summary.candidates,
        "surplus": summary.surplus,
        "admitted": len(summary.admitted),
        "train": splits["train"],
        "held_out": splits["held_out"],
        "rejected": summary.reasons,
        "operator_mix": {str(count): round(mix[count] / mix.total(), 4) for count in sorted(mix)},
        "sources": {
            source: round(count / max(len(summary.admitted), 1), 4)
            for source, count in sorted(sources.items())
        },
        "operators": len({canonical(name) for task in summary.admitted for name in task.ops}),
        "similarity": {"median": round(statistics.median(near), 4), "highest": round(near[-1], 4)}
        if (near := summary.similarities)
        else {},
        "headroom": {
            "median": statistics.median(left),
            "from_1.5": sum(value >= 1.5 for value in left) / len(left),
        }
        if left
        else {},
        "operator_sequences": len({task.ops for task in summary.admitted}),
        "eager_seconds": {"lowest": min(times), "median": statistics.median(times), "highest": max(times)}
        if times
        else {},
    }


def card(params: Params, summary: DatasetSummary, figures: dict[str, Any]) -> str:
    """Return the Markdown text of the data card, which is the README.md of the data set.

    `params` are the parameters of the build, `summary` is its result, and `figures` the result of `metrics`.
    """
    funnel = "\n".join(f"| {step} | {count} |" for step, count in summary.funnel)
    reasons = (
        "\n".join(f"| {reason} | {count} |" for reason, count in summary.reasons.items()) or "| none | 0 |"
    )
    mix = ", ".join(f"{source}: {share:.1%}" for source, share in figures["sources"].items())
    shown = {
        "eager time of one call (ms)": sorted(
            task.evidence["eager_seconds"] * 1e3 for task in summary.admitted
        ),
        "headroom: torch.compile's time over the physical floor": sorted(
            t.evidence["headroom"] for t in summary.admitted if "headroom" in t.evidence
        ),
        "similarity to the nearest evaluation program (all candidates)": list(summary.similarities),
    }
    spread = "\n".join(
        f"| {name} | {' | '.join(f'{value:.3g}' for value in np.quantile(values, QUANTILES))} |"
        for name, values in shown.items()
        if values
    )
    uses = Counter(canonical(name) for task in summary.admitted for name in task.ops)
    often = ", ".join(f"{name} {count}" for name, count in uses.most_common(10))
    against = ", ".join(Path(path).name for path in params.data.against) or "none given"
    left = figures["headroom"]
    room = f"- {left['from_1.5']:.0%} of the tasks have headroom of 1.5 or more.\n" if left else ""
    by = f" by the model {params.data.composer_model}" if params.data.composer else ""
    library = "" if params.data.operators != "all" else LIBRARY
    return f"""---
pretty_name: Kernel tasks {summary.version[:16]}
tags: [kernel-generation, pytorch]
configs:
- config_name: default
  data_files:
  - split: tasks
    path: tasks.parquet
---

# Kernel tasks, version {summary.version[:16]}

{figures["train"]} training and {figures["held_out"]} held-out tasks, composed{by} with seed
{params.data.seed} for device {params.device} at precision {params.precision}, operators:
{params.data.operators}. Held-out tasks (column `split`) have operator sequences that occur in no training
task and no demonstration.

| step | candidates |
| --- | --- |
{funnel}

| refused because | candidates |
| --- | --- |
{reasons}

| | lowest | 10 % | half | 90 % | highest |
| --- | --- | --- | --- | --- | --- |
{spread}

- Kinds of task: {mix}.
- Distinct operators: {figures["operators"]}; distinct operator sequences: {figures["operator_sequences"]}. \
Most frequent: {often}.
- The window of eager times was {params.data.eager_seconds[0] * 1e3:g} to \
{params.data.eager_seconds[1] * 1e3:g} ms.
- Kept clear of (similarity at most {params.data.max_similarity:g}): {against}.
{room}{library}
`tasks.parquet` has the columns of the public data set (`ops`, `data_source`, `code`), then `task_id`, \
`split`, `name` and the admission's evidence as JSON. `rejected.parquet` holds every refused candidate with \
its reason, `plots/` some figures of this card as CSV.

```python
datasets.load_dataset("this/folder", split="tasks")   # or pandas.read_parquet("this/folder/tasks.parquet")
```
"""


LIBRARY = (
    "- Tasks of the kind `transformers` hold source of the transformers library, "
    "which is licensed under Apache-2.0.\n"
)


def _write_rejected(path: Path, rejected: tuple[Rejection, ...]) -> None:
    rows = [
        item.task.model_dump(include={"ops", "data_source", "code", "split"})
        | {"task_id": "" if item.reason in UNREADABLE else item.task.task_id}
        | {"reason": item.reason, "detail": item.detail}
        for item in rejected
    ]
    texts = ((name, pyarrow.string()) for name in REJECTED_TEXTS)
    schema = pyarrow.schema([("ops", pyarrow.list_(pyarrow.string())), *texts])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), path)
