"""The interface by which components report their progress, and implementations that need no terminal."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from components.core.text import duration, figures_text

# Least number of seconds between two lines of one stage.
LINE_SECONDS = 5.0
# Type of a function that is called with a description of each step of some work when the step begins.
Report = Callable[[str], None]


def ignore(text: str) -> None:
    """Ignore a report; functions that report the steps of their work call this if no other receiver is given.

    `text` is the description of a step.
    """


class Progress(Protocol):
    """A receiver of progress reports.

    A report says that `step` of the `total` steps of `stage`, such as "evaluation", are done. `figures` are
    numbers with short names, such as reward=1.2.
    """

    def update(self, stage: str, step: int, total: int, **figures: float) -> None: ...


class Quiet:
    """A `Progress` that ignores every report."""

    def update(self, stage: str, step: int, total: int, **figures: float) -> None:
        """Ignore the report, whose arguments `Progress` defines."""


@dataclass
class Row:
    """The progress of one stage (a named part of a run), as its first and its last report give it.

    `step` of `total` steps were done at the last report. `started` and `first_step` are the time and the step
    of the first report, and `updated` is the time of the last one. `figures` are those of the last report
    that had any. The times are in seconds of a monotonic clock.
    """

    step: int
    total: int
    started: float
    first_step: int
    updated: float
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def seconds_left(self) -> float | None:
        """Return the estimated seconds from the last report to the end of the stage.

        The estimate is the mean time of the steps since the first report, times the number of steps that are
        left. It is None if no step has ended since the first report.
        """
        done = self.step - self.first_step
        return (self.updated - self.started) / done * (self.total - self.step) if done > 0 else None


class LineProgress:
    """A `Progress` that writes lines of text about each stage, a named part of a run.

    The first and the last report of a stage give a line each. Other reports give one only if the stage had
    none for LINE_SECONDS. `write` is called with each line, and `clock` returns seconds.
    """

    def __init__(self, write: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic):
        self.write = write
        self.clock = clock
        self.rows: dict[str, Row] = {}
        self.printed: dict[str, float] = {}

    def update(self, stage: str, step: int, total: int, **figures: float) -> None:
        now = self.clock()
        is_new = stage not in self.rows or step < self.rows[stage].step
        if is_new:
            self.rows[stage] = Row(step, total, now, step, now)
        row = self.rows[stage]
        row.step, row.total, row.updated = step, total, now
        row.figures = figures or row.figures
        self.print_progress(stage, is_new=is_new)

    def print_progress(self, stage: str, *, is_new: bool) -> None:
        """Write a line about a stage that is new, has ended, or has had no line for LINE_SECONDS.

        `is_new` says that the last report was the first one of the stage, or that its steps have begun again.
        In all other cases nothing is written.
        """
        row = self.rows[stage]
        ended = row.step >= row.total
        if is_new or ended or row.updated - self.printed.get(stage, 0.0) >= LINE_SECONDS:
            self.printed[stage] = row.updated
            left = f"  {duration(row.seconds_left)} left" if row.seconds_left and not ended else ""
            self.write(f"{stage:<12} {row.step}/{row.total}  {figures_text(row.figures)}{left}".rstrip())
