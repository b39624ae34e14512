"""The report: one HTML file that says whether the new policy was promoted and shows everything that it rests on.

The file needs nothing else: styles, pictures (inline SVG) and the few lines that sort the table are inside, and its own
content policy forbids everything but them. Kernel sources and task names are untrusted text: the template escapes all
of it, and only the charts' own markup passes through.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from pydantic import Field

from components.core.errors import UserError
from components.core.files import atomic_write, read_json, write_json
from components.core.records import FrozenModel
from components.evaluation import tables
from components.evaluation.charts import (
    Series,
    bar_list,
    line_chart,
    speedup_histogram,
    stacked_shares,
    whisker,
)
from components.evaluation.metrics import Change, Interval, TaskResult, changes
from components.evaluation.results import Evaluation, load_evaluation
from components.evaluation.tables import figure_of
from components.judge.verdict import Ratio

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
MILESTONES = {
    -1: ("not correct", "m-1"),
    1: ("correct", "m1"),
    2: ("faster than eager", "m2"),
    3: ("faster than both", "m3"),
}


class Stage(FrozenModel):
    """One training stage: its steps' figures in order (metrics.jsonl) and its result (stage.json)."""

    name: str
    steps: tuple[dict[str, Any], ...] = ()
    result: dict[str, Any] = Field(default_factory=dict)


class ReportData(FrozenModel):
    """Everything that the report shows. `collect` fills it from the files of a run."""

    meta: dict[str, Any]
    """run_id, profile, device, created (text); verdict (promoted | refused | waiting), reasons (texts); model {name,
    version}; environment, cost, commands (each a mapping of text to text or number). All optional."""
    dataset: dict[str, Any]
    """The data set's own figures (metrics.json): version, candidates, surplus, rejected {reason: count}, admitted, train, held_out."""
    stages: tuple[Stage, ...]
    before: Evaluation | None
    after: Evaluation
    gates: tuple[dict[str, Any], ...]
    """Rows of name, value, low, high, threshold, passed."""
    cost: dict[str, float] = Field(default_factory=dict)
    """Device-seconds by what they went into."""


def collect(
    dataset: Path,
    stages: dict[str, Path],
    before: Path | None,
    after: Path,
    gates: list[dict[str, Any]],
    meta: dict[str, Any],
) -> ReportData:
    """Read the files of a run: `dataset` and `stages` are folders, `before` and `after` results.json or their folders.

    A data set or a stage without figures leaves its picture out; a missing evaluation is UserError.
    """
    figures = dataset / "metrics.json"
    read = tuple(_stage(name, folder) for name, folder in stages.items())
    spent = {
        stage.name: float(stage.result["seconds"])
        for stage in read
        if isinstance(stage.result.get("seconds"), int | float)
    }
    for name, results in (("before", before), ("after", after)):
        spent |= {
            f"evaluation {name}, {what}": seconds
            for what, seconds in (tables.cost(results) if results is not None else {}).items()
        }
    return ReportData(
        meta=meta,
        dataset=read_json(figures) if figures.is_file() else {},
        stages=read,
        cost=spent,
        before=load_evaluation(before) if before is not None else None,
        after=load_evaluation(after),
        gates=tuple(gates),
    )


def _stage(name: str, folder: Path) -> Stage:
    lines, result = folder / "metrics.jsonl", folder / "stage.json"
    try:
        steps = (
            tuple(json.loads(line) for line in lines.read_text().splitlines() if line)
            if lines.is_file()
            else ()
        )
        return Stage(name=name, steps=steps, result=read_json(result) if result.is_file() else {})
    except ValueError as error:
        raise UserError(f"{folder}: its figures are damaged ({error}); run the stage again.") from error


def write_evaluation_report(folder: Path, evaluation: Evaluation) -> Path:
    """The report of a single evaluation, beside its results; its path."""
    data = ReportData(
        meta={"title": "evaluation", "device": evaluation.device},
        dataset={},
        stages=(),
        before=None,
        after=evaluation,
        gates=(),
        cost={f"evaluation, {what}": seconds for what, seconds in tables.cost(folder).items()},
    )
    write_report(folder / "report.html", data)
    return folder / "report.html"


def write_report(path: Path, data: ReportData) -> None:
    """Write the report as one self-contained HTML file, and its figures beside it as JSON; each in one step."""
    script = SCRIPT.read_text()
    environment = tables.environment(data.after.tasks) | dict(data.meta.get("environment", {}))
    figures = tables.as_json(
        data.before,
        data.after,
        data.cost,
        environment,
        list(data.gates),
        {k: v for k, v in data.meta.items() if k != "environment"},
    )
    write_json(path.with_suffix(".json"), figures)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    before, after = data.before, data.after
    atomic_write(
        path,
        _template().render(
            data=data,
            meta=data.meta,
            figures=_headline(before, after),
            table_one=[_table_row(row) for row in tables.table_one(before, after)],
            sound=_sound(after),
            gates=[_gate(gate) for gate in data.gates],
            funnel=_funnel(data.dataset),
            curves=[chart for stage in data.stages if (chart := _curves(stage)) is not None],
            stage_table=_stage_table(data.stages),
            distributions=_distributions(before, after),
            fast_p=_fast_p(before, after),
            rows=_task_rows(before, after.tasks),
            best=_task_rows(before, tables.best(after.tasks)),
            worst=_task_rows(before, tables.worst(after.tasks)),
            degenerate=_task_rows(before, [row for row in after.tasks if row.degenerate]),
            environment=environment,
            cost=data.cost | ({"together": sum(data.cost.values())} if len(data.cost) > 1 else {}),
            script=Markup(script),
            script_digest=digest,
        ),
    )


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["pretty"] = pretty
    return environment.from_string(TEMPLATE.read_text())


def pretty(value: Any) -> str:
    """A value for people: four significant digits, no braces; a dash where there is none."""
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


def figure(name: str, value: float | None) -> str:
    """A figure in its own unit: shares as per cent, ratios with a times sign, rewards plain."""
    if value is None or not math.isfinite(value):
        return "–"
    bare = name.removeprefix("change.")
    if bare.startswith("geomean"):
        return f"{value:.2f}×"
    if bare.startswith(("pass_rate", "faster_rate", "beyond_margin", "fast_p")):
        return f"{value:.0%}" if abs(value) in (0, 1) else f"{value:.1%}"
    return f"{value:.2f}"


def _interval(name: str, interval: Interval | Change | None) -> str:
    if interval is None or interval.low is None or interval.high is None:
        return ""
    return f"{figure(name, interval.low)} to {figure(name, interval.high)}"


def _headline(before: Evaluation | None, after: Evaluation) -> list[dict[str, Any]]:
    paired = changes(before.tasks, after.tasks) if before is not None else {}
    cards = []
    for name, title in HEADLINE:
        now, change = figure_of(after.overall, name), paired.get(name)
        neutral = 1.0 if name.startswith("geomean") else 0.0
        direction = ""
        if change is not None and change.low is not None and change.high is not None:
            direction = "up" if change.low > neutral else "down" if change.high < neutral else "same"
        cards.append(
            {
                "title": title,
                "value": figure(name, now),
                "interval": _interval(name, after.overall.intervals.get(name)),
                "before": figure(name, figure_of(before.overall, name)) if before is not None else "",
                "change": _signed(name, change.value) if change is not None else "",
                "change_interval": f"{_signed(name, change.low)} to {_signed(name, change.high)}"
                if direction and change is not None
                else "",
                "direction": direction,
                "over": f"over {figure_of(after.overall, name.replace('geomean', 'geomean_over'))} measured solutions"
                if name.startswith("geomean")
                else "",
            }
        )
    return cards


def _signed(name: str, value: float | None) -> str:
    """A change: a difference with its sign (points for shares), or a factor for geometric means."""
    if value is None:
        return "–"
    if name.startswith("geomean"):
        return f"×{value:.2f}"
    return f"{100 * value:+.1f} points" if not name.startswith("mean_reward") else f"{value:+.2f}"


SETS = {"overall": "whole suite"}


def _table_row(row: tables.Row) -> dict[str, Any]:
    cells = [
        (figure(name, row.figures[name]), _interval(name, row.intervals.get(name))) for name in tables.FIGURES
    ]
    errors = "–" if row.errors is None else row.errors
    return {
        "set": SETS.get(row.set, f"level {row.set}"),
        "model": row.model,
        "tasks": row.tasks,
        "errors": errors,
        "cells": cells,
        "note": row.note,
    }


def _sound(after: Evaluation) -> dict[str, Any] | None:
    """The figures without the degenerate tasks; None when there are none of them."""
    summary = tables.without_degenerate(after.tasks)
    if summary is None:
        return None
    cells = [f"{title} {figure(name, figure_of(summary, name))}" for name, title in HEADLINE]
    return {"tasks": summary.tasks, "text": ", ".join(cells)}


def _gate(gate: dict[str, Any]) -> dict[str, Any]:
    name, value, threshold = str(gate.get("name", "")), gate.get("value"), gate.get("threshold")
    # A floor is held by the interval's lower end (registry/gates.py), a change by the figure itself.
    decisive = gate["low"] if gate.get("low") is not None and not name.startswith("change.") else value
    short = (
        threshold - decisive
        if decisive is not None and threshold is not None and not gate.get("passed")
        else None
    )
    return {
        "name": name.replace("_", " ").replace(".", " · "),
        "value": figure(name, value),
        "interval": _interval(name, Interval(low=gate.get("low"), high=gate.get("high"))),
        "threshold": figure(name, threshold),
        "passed": bool(gate.get("passed")),
        "short": figure(name, short) if short is not None else "",
        "note": gate.get("note", ""),
    }


def _funnel(dataset: dict[str, Any]) -> Markup:
    """Candidates, what took them out, and what was admitted."""
    rejected = dataset.get("rejected") or {}
    rows = [("candidates", dataset.get("candidates"), "muted")]
    rows += [
        (f"− {str(reason).replace('_', ' ')}", count, "bad")
        for reason, count in sorted(rejected.items(), key=lambda item: -item[1])
    ]
    rows += [
        ("− not needed any more", dataset.get("surplus") or None, "muted"),
        ("admitted", dataset.get("admitted"), "good"),
    ]
    rows += [("for training", dataset.get("train"), "after"), ("held out", dataset.get("held_out"), "after")]
    return bar_list(
        [
            (label, float(value), f"{value:,}", colour)
            for label, value, colour in rows
            if isinstance(value, int | float)
        ]
    )


MILESTONE_KEY = re.compile(r"m(?:ilestones?)?[_.](-1|1|2|3)")
CURVES = {
    "reward": "mean reward",
    "explained_variance_held_out": "explained variance, held out",
    "loss": "loss",
}
"""What a stage's curve shows: the first of these that it logged."""


def _curves(stage: Stage) -> dict[str, Any] | None:
    """The stage's curve (reward where it samples, loss otherwise) and its milestone shares; None when it logged neither."""
    steps = [_flat(step) for step in stage.steps]
    key = next((key for key in CURVES if any(_finite(step.get(key)) for step in steps)), None)
    if key is None:
        return None
    points = [
        (float(step.get("step", index)), float(step[key]))
        for index, step in enumerate(steps)
        if _finite(step.get(key))
    ]
    y_range = (-1.05, 3.05) if "reward" in key else None
    line = Series(label=CURVES[key], colour="after", xs=[x for x, _ in points], ys=[y for _, y in points])
    names = {int(found[1]): name for name in steps[0] if (found := MILESTONE_KEY.fullmatch(name))}
    shares = Markup("")
    if set(names) == set(MILESTONES):
        counted = [step for step in steps if all(_finite(step.get(name)) for name in names.values())]
        totals = [sum(float(step[name]) for name in names.values()) or 1.0 for step in counted]
        values = {
            m: [float(step[names[m]]) / total for step, total in zip(counted, totals, strict=True)]
            for m in MILESTONES
        }
        xs = [float(step.get("step", index)) for index, step in enumerate(counted)]
        shares = stacked_shares(
            xs, {MILESTONES[m][0]: (MILESTONES[m][1], values[m]) for m in MILESTONES}, x_label="step"
        )
    return {
        "name": stage.name,
        "curve": line_chart([line], x_label="step", y_label=CURVES[key], y_range=y_range, whole_x=True),
        "shares": shares,
    }


def _flat(step: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in step.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _stage_table(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    return [
        {
            "name": stage.name,
            "steps": len(stage.steps),
            "before": pretty(stage.result.get("reward_before")),
            "after": pretty(stage.result.get("reward_after")),
            "seconds": pretty(stage.result.get("seconds")),
            "stopped": pretty(stage.result.get("stopped")),
        }
        for stage in stages
    ]


def _distributions(before: Evaluation | None, after: Evaluation) -> list[tuple[str, Markup]]:
    charts = []
    for baseline, title in (("eager", "against eager"), ("compile", "against torch.compile")):
        groups = [("before training", "before", before), ("after training", "after", after)]
        found = [
            (
                label,
                colour,
                [
                    r
                    for row in evaluation.tasks
                    if (r := row.ratio("eager" if baseline == "eager" else "compile")) is not None
                ],
            )
            for label, colour, evaluation in groups
            if evaluation is not None
        ]
        charts.append((title, speedup_histogram(found, x_label=f"speed-up {title}")))
    return charts


def _fast_p(before: Evaluation | None, after: Evaluation) -> list[tuple[str, Markup]]:
    charts = []
    for baseline, title in (("eager", "against eager"), ("compile", "against torch.compile")):
        lines = []
        for label, colour, evaluation in (
            ("before training", "before", before),
            ("after training", "after", after),
        ):
            if evaluation is None:
                continue
            curve = evaluation.overall.fast_p
            values = curve.eager if baseline == "eager" else curve.compile
            intervals = [evaluation.overall.intervals[f"fast_p.{baseline}.{p:g}"] for p in curve.p]
            band = [
                (i.low if i.low is not None else v, i.high if i.high is not None else v)
                for i, v in zip(intervals, values, strict=True)
            ]
            lines.append(
                Series(
                    label=label,
                    colour=colour,
                    xs=curve.p,
                    ys=values,
                    band=band if colour == "after" else (),
                    dashed=colour == "before",
                )
            )
        charts.append(
            (title, line_chart(lines, x_label="p", y_label="share correct and > p× as fast", y_range=(0, 1)))
        )
    return charts


def _task_rows(before: Evaluation | None, rows: Sequence[TaskResult]) -> list[dict[str, Any]]:
    earlier = {row.task_id: row for row in before.tasks} if before is not None else {}
    return [
        {
            "task": row,
            "title": row.name or " → ".join(row.ops) or row.task_id,
            "milestone": MILESTONES[row.milestone][0] if not row.error else "not measured",
            "colour": MILESTONES[row.milestone][1] if not row.error else "muted",
            "before": _outcome(earlier.get(row.task_id)),
            "eager": _ratio(row.speedup.eager if row.correct else None),
            "compile": _ratio(row.speedup.compile if row.correct else None),
            "passed": f"{sum(a.status == 'correct' for a in row.attempts)} of {len(row.attempts)}"
            if row.attempts
            else "–",
        }
        for row in rows
    ]


def _outcome(row: TaskResult | None) -> dict[str, Any]:
    if row is None:
        return {"text": "–", "order": -2}
    if row.error:
        return {"text": "not measured", "order": -2}
    return {
        "text": MILESTONES[row.milestone][0] if row.correct else row.status.replace("_", " "),
        "order": row.milestone,
    }


def _ratio(ratio: Ratio | None) -> dict[str, Any]:
    if ratio is None:
        return {"text": "–", "interval": "", "picture": Markup(""), "order": -1.0}
    return {
        "text": f"{ratio.estimate:.2f}×",
        "interval": f"{ratio.low:.2f} to {ratio.high:.2f}",
        "picture": whisker(ratio.estimate, ratio.low, ratio.high),
        "order": ratio.estimate,
    }
