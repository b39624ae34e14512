"""Write the record of a finished run as Markdown, for Prefect's page and MLflow's description of the run."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from components.core.text import (
    FIGURES,
    before_name,
    duration,
    figures_row,
    format_number,
)


def stages_table(record: Mapping[str, Any]) -> str:
    """Return the data set and the stages of a run as a Markdown table.

    `record` is the content of the run's run.json.
    """
    data = record["dataset"]
    rows = [("dataset", _yes(data["cached"]), duration(data["seconds"]), "", "", data["version"][:12])]
    rows += [
        (
            stage["name"],
            _yes(stage["cached"]),
            duration(stage["seconds"]),
            format_number(stage["reward_before"]),
            format_number(stage["reward_after"]),
            f"`{stage['digest'][:12]}` in {Path(stage['checkpoint']).parent.name}",
        )
        for stage in record["stages"]
    ]
    return markdown_table(
        ("stage", "cached", "duration", "reward before", "reward after", "checkpoint"), rows
    )


def verdict(record: Mapping[str, Any]) -> str:
    """Return the gates' verdict on a run's model version, its reasons and both evaluations, as Markdown.

    The evaluations are those before and after training. `record` is the content of the run's run.json.
    """
    model, gate = record["model"], record["gate"]
    evaluations = ((before_name(record), record["cold_start"]), ("after", record["evaluation"]))
    return "\n".join(
        [
            f"**{model['name']} version {model['version']}: {gate['verdict']}**",
            "",
            *(f"- {reason}" for reason in gate["reasons"]),
            "",
            markdown_table(FIGURES, [figures_row(name, figures) for name, figures in evaluations]),
        ]
    )


def gates_table(record: Mapping[str, Any]) -> str:
    """Return a Markdown table of the gates of a run's version, with figures, intervals and thresholds.

    `record` is the content of the run's run.json.
    """
    rows = [
        (
            gate["name"],
            "passed" if gate["passed"] else "**failed**",
            format_number(gate["value"]),
            "" if gate["low"] is None else f"{gate['low']:.3g} to {gate['high']:.3g}",
            format_number(gate["threshold"]),
        )
        for gate in record["gate"]["gates"]
    ]
    return markdown_table(("gate", "", "figure", "95 % interval", "threshold"), rows)


def markdown_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(columns)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _yes(value: bool) -> str:
    return "yes" if value else "no"
