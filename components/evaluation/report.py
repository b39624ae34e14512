"""Write the report of a run or of a single evaluation as one HTML file.

The report of a run shows the decision on the new policy and all figures on which it is based. The file
contains its styles, its charts (inline SVG) and the script that sorts its tables, and its content security
policy forbids loading anything else. Kernel sources and task names are untrusted text, so the template
escapes everything except the markup of the charts.
"""

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from pydantic import Field

from components.core.errors import UserError
from components.core.files import atomic_write, read_json, write_json
from components.core.records import FrozenModel, read_as
from components.evaluation import tables
from components.evaluation.charts import (
    Series,
    line_chart,
    speedup_histogram,
    stacked_shares,
    whisker,
)
from components.evaluation.metrics import changes
from components.evaluation.results import (
    Baseline,
    Evaluation,
    Interval,
    load_evaluation,
    require_equal_labels,
)
from components.evaluation.tables import figure, figure_of, interval, pretty, signed

TEMPLATE = Path(__file__).with_name("report.html.j2")
SCRIPT = Path(__file__).with_name("report.js")

HEADLINE = (
    ("pass_rate", "pass rate"),
    ("faster_rate.eager", "faster than eager"),
    ("faster_rate.compile", "faster than torch.compile"),
    ("geomean.eager", "speed-up against eager"),
    ("geomean.compile", "speed-up against torch.compile"),
    ("mean_reward", "mean reward"),
)
# Label and CSS class of the colour, by milestone.
MILESTONES = {
    -1: ("not correct", "m-1"),
    1: ("correct", "m1"),
    2: ("faster than eager", "m2"),
    3: ("faster than both", "m3"),
}
BASELINE_TITLES: dict[Baseline, str] = {"eager": "against eager", "compile": "against torch.compile"}


class StageFigures(FrozenModel):
    """Figures of one training stage, read from the files in the folder of the stage.

    `steps` has the metrics of each step in order, from metrics.jsonl. `result` is the contents of stage.json,
    or of unfinished.json if the stage was not finished. Both are empty if the files are missing.
    """

    name: str
    steps: tuple[dict[str, Any], ...] = ()
    result: dict[str, Any] = Field(default_factory=dict)


class ReportData(FrozenModel):
    """Everything that the report of a run or of a single evaluation shows.

    `meta` has the optional keys run_id, profile, device, created (text), verdict (promoted, refused, waiting
    or nothing_learned), reasons (texts), model (name and version), title and environment. `dataset` is the
    contents of the data set's metrics.json, or empty. Each of `gates` (conditions for the promotion of the
    new policy) has the keys of `registry.gates.Gate`: name, value, low, high, threshold, passed and note, and
    `decisive`, the number that is compared with the threshold, or None if it could not be measured.
    `cost` gives the device-seconds of each part of the run. `before` and `after` are the evaluations before
    and after training; `before` is None if there is none.
    """

    meta: dict[str, Any]
    dataset: dict[str, Any]
    stages: tuple[StageFigures, ...]
    before: Evaluation | None
    after: Evaluation
    gates: tuple[dict[str, Any], ...]
    cost: dict[str, float] = Field(default_factory=dict)


def load_report_data(
    dataset: Path,
    stages: dict[str, Path],
    before: Path | None,
    after: Path,
    gates: list[dict[str, Any]],
    meta: dict[str, Any],
) -> ReportData:
    """Read the data of a report from the files of a run.

    `dataset` is the folder of the data set, `stages` are the folders of the training stages by name, and
    `before` and `after` are the evaluations' files results.json or the folders that contain them. `gates`
    (the conditions for the promotion of the new policy) and `meta` (such as the run's id and verdict) become
    the fields of `ReportData` with these names. If the files with the figures of the data set or of a stage
    are missing, these figures are empty, and the report has no chart of them. Raises UserError if an
    evaluation is missing or damaged, or if the figures of the data set or of a stage are damaged.
    """
    metrics = dataset / "metrics.json"
    figures = read_as(dict[str, Any], metrics, "build the data set again") if metrics.is_file() else {}
    loaded = tuple(_load_stage(name, folder) for name, folder in stages.items())
    cost = {
        stage.name: float(stage.result["seconds"])
        for stage in loaded
        if _is_finite(stage.result.get("seconds"))
    }
    for name, results in (("before", before), ("after", after)):
        if results is not None:
            cost |= {f"evaluation {name}, {item}": spent for item, spent in tables.cost(results).items()}
    return ReportData(
        meta=meta,
        dataset=figures,
        stages=loaded,
        cost=cost,
        before=load_evaluation(before) if before is not None else None,
        after=load_evaluation(after),
        gates=tuple(gates),
    )


def _load_stage(name: str, folder: Path) -> StageFigures:
    metrics, result = folder / "metrics.jsonl", folder / "stage.json"
    if not result.is_file():
        result = folder / "unfinished.json"  # of a stage that the night's time budget ended
    try:
        lines = metrics.read_text().splitlines() if metrics.is_file() else []
        return StageFigures(
            name=name,
            steps=tuple(json.loads(line) for line in lines if line),
            result=read_json(result) if result.is_file() else {},
        )
    except ValueError as error:
        raise UserError(f"{folder}: its figures are damaged ({error}); run the stage again.") from error


def write_evaluation_report(folder: Path, evaluation: Evaluation) -> Path:
    """Write the report of a single evaluation to report.html in `folder` and return the path of this file.

    `folder` is the folder with the results of the evaluation. The figures are also written to report.json
    there.
    """
    data = ReportData(
        meta={"title": "evaluation", "device": evaluation.device},
        dataset={},
        stages=(),
        before=None,
        after=evaluation,
        gates=(),
        cost={f"evaluation, {item}": seconds for item, seconds in tables.cost(folder).items()},
    )
    write_report(folder / "report.html", data)
    return folder / "report.html"


def write_report(path: Path, data: ReportData) -> None:
    """Write the report to `path` as one self-contained HTML file.

    The figures are also written as JSON, to the same path with the suffix .json. Existing files are replaced.
    Raises UserError if the evaluations before and after training were judged with different labels
    (`verdict.Labels`: the rules of the judge), or on tasks that were cast to different dtypes.
    """
    script = SCRIPT.read_text()
    before, after = data.before, data.after
    if before is not None:
        require_equal_labels("the evaluation before training", before, "that after it", after)
    environment = tables.environment(after.tasks) | dict(data.meta.get("environment", {}))
    meta = {key: value for key, value in data.meta.items() if key != "environment"}
    write_json(
        path.with_suffix(".json"),
        tables.as_json(before, after, data.cost, environment, list(data.gates), meta),
    )
    text = _template().render(
        data=data,
        meta=data.meta,
        changes=changes(before.tasks, after.tasks) if before is not None else {},
        table_one=tables.table_one(before, after),
        sound=tables.without_degenerate(after.tasks),
        gates=[_gate(gate) for gate in data.gates],
        funnel=_funnel(data.dataset),
        curves=[chart for stage in data.stages if (chart := _curves(stage)) is not None],
        distributions=_distributions(before, after),
        fast_p=_fast_p(before, after),
        limit=_limit(before, after),
        earlier={row.task_id: row for row in before.tasks} if before is not None else {},
        best=tables.best(after.tasks),
        worst=tables.worst(after.tasks),
        degenerate=[row for row in after.tasks if row.degenerate],
        environment=environment,
        cost=data.cost | ({"together": sum(data.cost.values())} if len(data.cost) > 1 else {}),
        script=Markup(script),
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    atomic_write(path, text)


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"pretty": pretty, "figure": figure, "interval": interval, "signed": signed}
    environment.globals |= {
        "HEADLINE": HEADLINE,
        "FIGURES": tables.FIGURES,
        "MILESTONES": MILESTONES,
        "figure_of": figure_of,
        "whisker": whisker,
    }
    return environment.from_string(TEMPLATE.read_text())


def _gate(gate: dict[str, Any]) -> dict[str, Any]:
    name, value, threshold = str(gate.get("name", "")), gate.get("value"), gate.get("threshold")
    decisive = gate.get("decisive")
    missing = None if decisive is None or threshold is None or gate.get("passed") else threshold - decisive
    return {
        "name": name.replace("_", " ").replace(".", " · "),
        "value": figure(value, name),
        "interval": interval(Interval(low=gate.get("low"), high=gate.get("high")), name),
        "threshold": figure(threshold, name),
        "passed": bool(gate.get("passed")),
        "short": figure(missing, name) if missing is not None else "",
        "note": gate.get("note", ""),
    }


def _funnel(dataset: dict[str, Any]) -> list[tuple[str, float, str]]:
    """Return label, length and colour of a bar for each group of tasks that the making of a data set counted.

    The groups are the tasks that were composed, those rejected for each reason, those no longer needed, those
    admitted, and those in each split. The length is the number of tasks, and the colour is a CSS class.
    `dataset` is the contents of the data set's metrics.json; a group whose number it lacks has no bar.
    """
    rejected = sorted((dataset.get("rejected") or {}).items(), key=lambda item: -item[1])
    rows = [
        ("candidates", dataset.get("candidates"), "muted"),
        *((f"− {str(reason).replace('_', ' ')}", count, "bad") for reason, count in rejected),
        ("− not needed any more", dataset.get("surplus") or None, "muted"),
        ("admitted", dataset.get("admitted"), "good"),
        ("for training", dataset.get("train"), "after"),
        ("held out", dataset.get("held_out"), "after"),
    ]
    return [(label, value, colour) for label, value, colour in rows if isinstance(value, int | float)]


# Titles of curves, by metric. For each stage, the first of these metrics that the stage logged is drawn.
CURVES = {
    "reward": "mean reward",
    "explained_variance_held_out": "explained variance, held out",
    "loss": "loss",
}


def _curves(stage: StageFigures) -> dict[str, Any] | None:
    """Return a stage's name, a chart of its main metric by step, and one of the shares of its rewards.

    The keys are `name` and, with markup, `curve` and `shares`. The main metric is the first in `CURVES` that
    the stage logged; without one, the result is None. `shares` shows, by step, the shares of trajectories
    with the milestones -1, 1, 2 and 3 (the rewards of the judge's verdicts), and is empty if the stage did
    not log them.
    """
    key = next((key for key in CURVES if any(_is_finite(step.get(key)) for step in stage.steps)), None)
    if key is None:
        return None
    xs, (ys,) = _points(stage.steps, [key])
    curve = line_chart(
        [Series(label=CURVES[key], colour="after", xs=xs, ys=ys)],
        x_label="step",
        y_label=CURVES[key],
        y_range=(-1.05, 3.05) if "reward" in key else None,
        whole_x=True,
    )
    shares = Markup("")
    names = [f"m_{milestone}" for milestone in MILESTONES]
    if all(name in stage.steps[0] for name in names):
        xs, columns = _points(stage.steps, names)
        totals = [sum(column) or 1.0 for column in zip(*columns, strict=True)]
        areas = {
            label: (colour, [value / total for value, total in zip(column, totals, strict=True)])
            for (label, colour), column in zip(MILESTONES.values(), columns, strict=True)
        }
        shares = stacked_shares(xs, areas, x_label="step")
    return {"name": stage.name, "curve": curve, "shares": shares}


def _points(steps: Sequence[dict[str, Any]], names: Sequence[str]) -> tuple[list[float], list[list[float]]]:
    """Return the numbers of the steps that have all metrics `names`, and a list of values for each metric.

    A step is a dict with the values of its metrics, and has a metric if the value is finite. The number of a
    step is its value of `step`, or else its index in `steps`. Each list has one value for each number.
    """
    used = [
        (float(step.get("step", index)), step)
        for index, step in enumerate(steps)
        if all(_is_finite(step.get(name)) for name in names)
    ]
    return [x for x, _ in used], [[float(step[name]) for _, step in used] for name in names]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _evaluations(before: Evaluation | None, after: Evaluation) -> list[tuple[str, str, Evaluation]]:
    """Return label, colour and record of each evaluation that a chart shows, the one before training first.

    The colour is a name in `charts.VARIABLES`. An evaluation `before` that is None is left out.
    """
    earlier = [("before training", "before", before)] if before is not None else []
    return [*earlier, ("after training", "after", after)]


def _distributions(before: Evaluation | None, after: Evaluation) -> list[tuple[str, Markup]]:
    return [
        (
            title,
            speedup_histogram(
                [
                    (label, colour, [r for row in side.tasks if (r := row.ratio(baseline)) is not None])
                    for label, colour, side in _evaluations(before, after)
                ],
                x_label=f"speed-up {title}",
            ),
        )
        for baseline, title in BASELINE_TITLES.items()
    ]


def _limit(before: Evaluation | None, after: Evaluation) -> Markup:
    """Draw how close solutions and the faster baseline come to the least possible time on each task.

    What is drawn is `TaskResult.attained` and `TaskResult.baseline_attained`: the lower bound for a kernel's
    time (the limit), divided by the measured time of the solution or of the faster of eager and
    torch.compile. The tasks are sorted by the share of this baseline. Returns a chart as inline SVG, or empty
    markup if no limit is known.
    """
    shares = sorted(
        (share, row.task_id) for row in after.tasks if (share := row.baseline_attained) is not None
    )
    places = {task_id: place for place, (_, task_id) in enumerate(shares, start=1)}
    series = [
        Series(
            "faster baseline", "m1", [*range(1, len(shares) + 1)], [share for share, _ in shares], dashed=True
        )
    ]
    for label, colour, side in _evaluations(before, after):
        known = [(places[row.task_id], row.attained) for row in side.tasks if row.task_id in places]
        points = sorted((place, share) for place, share in known if share is not None)
        series.append(Series(label, colour, [x for x, _ in points], [y for _, y in points]))
    return line_chart(
        series, x_label="task, by what the baseline attains", y_label="share of the limit", whole_x=True
    )


def _fast_p(before: Evaluation | None, after: Evaluation) -> list[tuple[str, Markup]]:
    return [
        (
            title,
            line_chart(
                [_fast_p_line(baseline, *evaluation) for evaluation in _evaluations(before, after)],
                x_label="p",
                y_label="share correct and > p× as fast",
                y_range=(0, 1),
            ),
        )
        for baseline, title in BASELINE_TITLES.items()
    ]


def _fast_p_line(baseline: Baseline, label: str, colour: str, side: Evaluation) -> Series:
    curve = side.overall.fast_p
    values: tuple[float, ...] = getattr(curve, baseline)
    if colour == "before":
        return Series(label, colour, curve.p, values, dashed=True)
    intervals = [side.overall.intervals[f"fast_p.{baseline}.{p:g}"] for p in curve.p]
    band = [
        (i.low if i.low is not None else v, i.high if i.high is not None else v)
        for i, v in zip(intervals, values, strict=True)
    ]
    return Series(label, colour, curve.p, values, band)
