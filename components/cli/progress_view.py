"""The display of a run's progress and of the tables at its end, on standard error.

On a terminal, the progress is one table of the stages, which is updated in place. Elsewhere it is printed as
lines.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from components.core.progress import LineProgress
from components.core.text import FIGURES, before_name, duration, figures_row, figures_text, format_number


class ProgressView(LineProgress):
    """A receiver of progress reports (`Progress`) that shows a live table on a terminal; a context manager.

    If `console` is no terminal, it prints lines instead. `clock` returns seconds.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic):
        super().__init__(self.note, clock=clock)
        self.console = console
        self.live: Live | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live = Live(
                console=self.console, refresh_per_second=4, get_renderable=self.render, transient=True
            )
            self.live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.__exit__(kind, error, trace)
            self.live = None

    def print_progress(self, stage: str, *, is_new: bool) -> None:
        if self.live is None:
            super().print_progress(stage, is_new=is_new)

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def render(self) -> Table:
        return plain_table(
            ("stage", "step", "figures", "time left"),
            (
                (
                    stage,
                    f"{row.step}/{row.total}",
                    figures_text(row.figures),
                    "done" if row.step >= row.total else duration(row.seconds_left),
                )
                for stage, row in self.rows.items()
            ),
        )


def plain_table(
    columns: Iterable[str], rows: Iterable[Iterable[str | Text]], *, show_header: bool = True
) -> Table:
    """Return a table without lines between its cells, with the headings `columns` and the cells `rows`."""
    table = Table(*columns, box=None, padding=(0, 2, 0, 0), show_header=show_header)
    for row in rows:
        table.add_row(*row)
    return table


def evaluation_table(summary: Any, console: Console, title: str = "") -> None:
    """Print the figures of one evaluation as a table, below `title` if it is given.

    `summary` is a components.evaluation.results.Summary.
    """
    table = plain_table(("tasks", *FIGURES[1:]), [figures_row(str(summary.tasks), summary.model_dump())])
    console.print(*filter(None, (title, table)), sep="\n")


def final_table(record: Mapping[str, Any], commands: Mapping[str, str], console: Console) -> None:
    """Print the record of a finished run on `console`.

    The stages, the figures of both evaluations (before and after training), the decision of the gates
    (conditions of promotion) and the path of the report are printed. `record` is the content of the run's
    file run.json. `commands` has the commands that open web pages, by the page's name; they are printed at
    the end.
    """
    data = record["dataset"]
    stages = [
        (
            stage["name"],
            format_number(stage["reward_before"]),
            format_number(stage["reward_after"]),
            "cached" if stage["cached"] else format_number(stage["seconds"], "{:.1f}"),
            "/".join(stage["checkpoint"].split("/")[-2:]),
        )
        for stage in record["stages"]
    ]
    evaluations = ((before_name(record), record.get("cold_start")), ("after", record["evaluation"]))
    figures = [figures_row(name, found) for name, found in evaluations if found is not None]
    gate, model = record["gate"], record["model"]
    verdict = f"{model['name']} version {model['version']}: {gate['verdict'].replace('_', ' ')}"
    for part in (
        f"run {record['run_id']}  profile {record['profile']}  {record['device']}  "
        f"{duration(record['seconds'])}",
        f"data set {data['version'][:12]}  {data['tasks']} tasks, {data['held_out']} held out",
        plain_table(("stage", "reward before", "reward after", "seconds", "checkpoint"), stages),
        plain_table(FIGURES, figures),
        Text(f"\n{verdict}", "bold green" if gate["verdict"] == "promoted" else "bold"),
        *(f"  {reason}" for reason in gate["reasons"]),
        f"\nreport   {record['report']}",
        *(f"{name:<8} {command}" for name, command in commands.items()),
    ):
        console.print(part, highlight=False, soft_wrap=True)


def comparison_tables(found: Any, console: Console) -> None:
    """Print the differences between two runs on `console`.

    These are data, code and parameters, the changes of figures with intervals, paired tests, and the tasks
    whose result changed. `found` is a components.evaluation.compare.Comparison.
    """
    console.print(f"{found.second} against {found.first}, {found.tasks} tasks in common", highlight=False)
    unknown = ", ".join(found.unknown)
    differences = [
        *([f"data set {found.dataset[0][:12]} -> {found.dataset[1][:12]}"] if found.dataset else []),
        *(f"code {name}" for name in found.code),
        *(f"{name} {before} -> {after}" for name, (before, after) in found.params.items()),
        *([f"not written down on both sides, so not compared: {unknown}"] if unknown else []),
    ]
    for difference in differences or ["the same data, code and parameters"]:
        console.print(f"  {difference}", highlight=False, soft_wrap=True)
    changes = []
    for name in ("pass_rate", "faster_rate.eager", "faster_rate.compile", "geomean.eager", "geomean.compile"):
        change, pattern = found.changes[name], "x{:.3f}" if name.startswith("geomean") else "{:+.1%}"
        value, low, high = (
            format_number(number, pattern) for number in (change.value, change.low, change.high)
        )
        changes.append((name, value, f"{low} to {high}"))
    console.print(plain_table(("figure", "change", "95 % interval"), changes))
    tests = [
        (
            *(test.name, str(test.tasks), str(test.better), str(test.worse), f"{test.p_value:.3g}"),
            "significant" if test.significant else "may be chance",
        )
        for test in found.tests
    ]
    console.print(plain_table(("paired test", "tasks", "better", "worse", "p", ""), tests))
    changed = [
        (change.task_id, change.kind, change.before, change.after, change.name)
        for change in sorted(found.changed, key=lambda change: change.kind)
    ]
    console.print(
        plain_table(("task", "", "before", "after", "what"), changed) if changed else "no task changed hands."
    )
