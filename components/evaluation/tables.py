"""Tables and texts of the report, from which both report.html and report.json are written.

The tables are Table 1 of the CUDA Agent paper together with the figures of this run, the best, worst and
degenerate tasks, the environment, and the cost.
"""

import math
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import Field

from components.core.records import FrozenModel, read_as
from components.evaluation.metrics import SHARES, summarise
from components.evaluation.results import Evaluation, Interval, Summary, TaskResult

FIGURES = ("pass_rate", "faster_rate.eager", "faster_rate.compile", "geomean.eager", "geomean.compile")
SHOWN = 10  # number of best tasks, and of worst tasks, in the report

# Table 1 of arXiv 2602.24286 (KernelBench on H20), by set of tasks and model. The values of each model are in
# the order of `FIGURES`.
PAPER: dict[str, dict[str, tuple[float, float, float, float, float]]] = {
    "overall": {
        "Seed1.6 (base model)": (0.74, 0.436, 0.272, 0.95, 0.69),
        "GLM 4.6": (0.756, 0.448, 0.192, 0.78, 0.57),
        "Kimi K2": (0.668, 0.408, 0.228, 0.93, 0.66),
        "Gemini 3 Pro": (0.912, 0.876, 0.696, 1.92, 1.42),
        "Claude Opus 4.5": (0.952, 0.904, 0.664, 1.99, 1.46),
        "CUDA Agent": (0.988, 0.984, 0.968, 2.60, 2.11),
    },
    "1": {
        "Seed1.6 (base model)": (0.90, 0.63, 0.51, 1.65, 1.25),
        "GLM 4.6": (0.86, 0.57, 0.32, 0.99, 0.73),
        "Kimi K2": (0.85, 0.56, 0.39, 1.43, 1.00),
        "Gemini 3 Pro": (0.95, 0.90, 0.72, 1.99, 1.51),
        "Claude Opus 4.5": (0.96, 0.88, 0.72, 2.03, 1.54),
        "CUDA Agent": (1.00, 0.99, 0.97, 2.48, 1.87),
    },
    "2": {
        "Seed1.6 (base model)": (0.74, 0.40, 0.16, 0.68, 0.50),
        "GLM 4.6": (0.76, 0.43, 0.11, 0.60, 0.42),
        "Kimi K2": (0.65, 0.40, 0.15, 0.93, 0.65),
        "Gemini 3 Pro": (0.93, 0.91, 0.76, 2.03, 1.46),
        "Claude Opus 4.5": (0.98, 0.97, 0.69, 2.24, 1.60),
        "CUDA Agent": (1.00, 1.00, 1.00, 3.27, 2.80),
    },
    "3": {
        "Seed1.6 (base model)": (0.42, 0.12, 0.02, 0.60, 0.40),
        "GLM 4.6": (0.54, 0.24, 0.10, 0.83, 0.62),
        "Kimi K2": (0.34, 0.12, 0.06, 0.40, 0.29),
        "Gemini 3 Pro": (0.80, 0.76, 0.52, 1.58, 1.17),
        "Claude Opus 4.5": (0.88, 0.82, 0.50, 1.52, 1.10),
        "CUDA Agent": (0.94, 0.94, 0.90, 1.80, 1.52),
    },
}
PAPER_TASKS = {"overall": 250, "1": 100, "2": 100, "3": 50}


class Row(FrozenModel):
    """One row of Table 1 of the CUDA Agent paper: the figures of one model on one set of tasks.

    `set` is `overall` for the whole suite, or a level. `tasks` is the number of tasks in the set. `figures`
    and `intervals` are by the names in `FIGURES`, such as pass_rate; the figures of the paper have no
    intervals. `errors` is the number of tasks on which the judge or the policy's server failed, or None for
    figures of the paper. `note` says that the figures come from the paper, and is empty for figures of this
    run.
    """

    set: str
    model: str
    tasks: int
    errors: int | None
    figures: dict[str, float | None]
    intervals: dict[str, Interval] = Field(default_factory=dict)
    note: str = ""


def figure_of(summary: Summary, name: str) -> float | None:
    """Return the figure of `summary` with the dotted name `name`, such as faster_rate.compile.

    The result is None if the figure is, that is, if there is no task on which it is defined.
    """
    value = attrgetter(name)(summary)
    return None if value is None else float(value)


def table_one(before: Evaluation | None, after: Evaluation) -> list[Row]:
    """Return the figures of models in Table 1 of the CUDA Agent paper, and those of this run for comparison.

    The figures are pass rate, shares faster than eager and torch.compile, and geometric means of both
    speed-ups. There are rows for the whole suite and for each level that the evaluation `after` has. `before`
    is the evaluation before training, or None.
    """
    rows = []
    for name in ("overall", *after.levels):
        for model, evaluation in (("this run, before training", before), ("this run", after)):
            sets = {} if evaluation is None else {"overall": evaluation.overall, **evaluation.levels}
            if name in sets:
                summary = sets[name]
                rows.append(
                    Row(
                        set=name,
                        model=model,
                        tasks=summary.tasks,
                        errors=summary.errors,
                        figures={figure: figure_of(summary, figure) for figure in FIGURES},
                        intervals={figure: summary.intervals[figure] for figure in FIGURES},
                    )
                )
        rows += [
            Row(
                set=name,
                model=model,
                tasks=PAPER_TASKS[name],
                errors=None,
                figures=dict(zip(FIGURES, values, strict=True)),
                note="reported, not measured here",
            )
            for model, values in PAPER.get(name, {}).items()
        ]
    return rows


def best(rows: Sequence[TaskResult]) -> list[TaskResult]:
    """Return the results with the largest speed-ups of correct solutions, the largest first, at most `SHOWN`.

    The speed-up is that over torch.compile, or that over eager if the former was not measured. Degenerate
    tasks, on which a wrong kernel could pass, are left out.
    """
    return sorted((row for row in rows if row.correct and not row.degenerate), key=_gain, reverse=True)[
        :SHOWN
    ]


def worst(rows: Sequence[TaskResult]) -> list[TaskResult]:
    """Return the worst results, at most `SHOWN` of them.

    Tasks that were not solved come first, and then the correct solutions with the smallest speed-ups over
    torch.compile, or over eager if the former was not measured. Degenerate tasks, on which a wrong kernel
    could pass, and tasks on which the judge or the policy's server failed are left out.
    """
    judged = [row for row in rows if not row.error and not row.degenerate]
    return sorted(judged, key=lambda row: (row.correct, _gain(row)))[:SHOWN]


def _gain(row: TaskResult) -> float:
    """Return the speed-up over torch.compile, or over eager if the former was not measured, or else 0."""
    return row.ratio("compile") or row.ratio("eager") or 0.0


def without_degenerate(rows: Sequence[TaskResult]) -> Summary | None:
    """Return the figures over the tasks that are not degenerate, or None if no task is degenerate.

    A task is degenerate if a wrong kernel could pass on it.
    """
    sound = [row for row in rows if not row.degenerate]
    return summarise(sound) if len(sound) < len(rows) else None


def cost(results: Path) -> dict[str, float]:
    """Return the device-seconds of each phase of an evaluation, from its cost.json.

    `results` is the folder of the evaluation or its results.json. The result is empty if there is no
    cost.json.
    """
    file = (results if results.is_dir() else results.parent) / "cost.json"
    return read_as(dict[str, float], file, "delete it") if file.is_file() else {}


def environment(rows: Sequence[TaskResult]) -> dict[str, str]:
    """Return the properties of the measuring machines that the verdicts recorded, such as device and torch.

    The result has each property as text by its name. If the verdicts recorded several values of a property,
    the values are joined by commas; a property that no verdict recorded is left out. `torch.compile` has the
    modes of torch.compile, each with the number of tasks on which it was the fastest.
    """
    values = {
        name: sorted({str(row.evidence[name]) for row in rows if name in row.evidence})
        for name in ("device", "torch", "compiler", "judge", "isolation", "clock")
    }
    modes = Counter(str(row.evidence["compile_mode"]) for row in rows if "compile_mode" in row.evidence)
    values["torch.compile"] = [f"{mode} (fastest on {count} tasks)" for mode, count in modes.most_common()]
    return {name: ", ".join(texts) for name, texts in values.items() if texts}


def as_json(
    before: Evaluation | None,
    after: Evaluation,
    costs: dict[str, float],
    environment_of: dict[str, Any],
    gates: list[Any],
    meta: Any,
) -> dict[str, Any]:
    """Return the contents of report.json.

    `before` is the evaluation before training, or None, and `after` the one after training, or the only one.
    `costs` are the device-seconds of each part of the run. `environment_of` is the result of `environment`,
    updated by the properties that the run itself recorded. `gates` and `meta` (such as the id of the run and
    its verdict) are the fields of `report.ReportData` with these names. The sources of tasks and candidates
    are left out, because results.json has them.
    """
    sound = without_degenerate(after.tasks)
    short = {
        *("task_id", "name", "level", "status", "reason"),
        *("milestone", "degenerate", "speedup", "workloads"),
    }
    return {
        "suite": after.suite,
        "suite_digest": after.suite_digest,
        "policy_digest": after.policy_digest,
        "device": after.device,
        "precision": after.precision,
        "dtype": after.dtype,
        "labels": after.labels.model_dump(),
        "run": meta,
        "table_1": [row.model_dump(mode="json") for row in table_one(before, after)],
        "overall": after.overall.model_dump(mode="json"),
        "before": before.overall.model_dump(mode="json") if before is not None else None,
        "levels": {level: summary.model_dump(mode="json") for level, summary in after.levels.items()},
        "without_degenerate": sound.model_dump(mode="json") if sound is not None else None,
        "degenerate": {row.task_id: row.degenerate for row in after.tasks if row.degenerate},
        "best": [row.task_id for row in best(after.tasks)],
        "worst": [row.task_id for row in worst(after.tasks)],
        "gates": gates,
        "environment": environment_of,
        "device_seconds": costs,
        "tasks": [row.model_dump(mode="json", include=short) for row in after.tasks],
    }


def pretty(value: Any) -> str:
    """Return the text of a value, with four significant digits for floats and without brackets or braces.

    A bool becomes yes or no. None, an empty text or collection and a float that is not finite become a dash.
    """
    match value:
        case None | "":
            return "–"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}" if math.isfinite(value) else "–"
        case list() | tuple():
            return ", ".join(map(pretty, value)) or "–"
        case dict():
            return ", ".join(f"{key} {pretty(item)}" for key, item in value.items()) or "–"
        case _:
            return str(value)


def figure(value: float | None, name: str) -> str:
    """Return the text of a value of the figure `name`, such as `pass_rate` or `geomean.eager`.

    Shares of tasks and `attained` are written as per cent, geometric means with a times sign, and other
    figures as plain numbers. The prefixes `change.`, `start.` and `attempts_` of a name have no effect. None
    and a value that is not finite become a dash.
    """
    if value is None or not math.isfinite(value):
        return "–"
    name = name.removeprefix("change.").removeprefix("start.").removeprefix("attempts_")
    if name.startswith("geomean"):
        return f"{value:.2f}×"
    if name.startswith((*SHARES, "attained")):
        return f"{value:.0%}" if abs(value) in (0, 1) else f"{value:.1%}"
    return f"{value:.2f}"


def interval(bounds: Interval | None, name: str) -> str:
    """Return the text of the interval of the figure `name`, such as "51.0% to 62.5%".

    The text is empty if `bounds` is None or one of its ends is None.
    """
    if bounds is None or bounds.low is None or bounds.high is None:
        return ""
    return f"{figure(bounds.low, name)} to {figure(bounds.high, name)}"


def signed(value: float | None, name: str) -> str:
    """Return the text of `value`, which is a change of the figure `name`.

    For a geometric mean, `value` is the figure after training divided by that before, and the text is a
    factor such as ×1.20. For other figures it is the difference: the text is a signed number for
    `mean_reward`, and has percentage points for all others (0.05 becomes +5.0 points). A missing value
    becomes a dash.
    """
    if value is None:
        return "–"
    if name.startswith("geomean"):
        return f"×{value:.2f}"
    return f"{value:+.2f}" if name.startswith("mean_reward") else f"{100 * value:+.1f} points"
