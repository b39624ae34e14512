"""The interface with which components report progress, and its implementations that need no terminal."""

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
    """Ignore a report; functions that report their progress call this if no other receiver is given."""


class Progress(Protocol):
    """A receiver of progress reports.

    A report says that `step` of the `total` steps of `stage` are done. `figures` are numbers with short
    names, such as reward=1.2.
    """

    def update(self, stage: str, step: int, total: int, **figures: float) -> None: ...


class Quiet:
    """A `Progress` that ignores every report."""

    def update(self, stage: str, step: int, total: int, **figures: float) -> None:
        """Ignore the report."""


@dataclass
class Row:
    """The progress of one stage, as its first and its last report give it.

    `started` and `first_step` are the time and the step of the first report, `figures` those of the last
    report that had any, and the other fields those of the last report. The times are in seconds of a
    monotonic clock.
    """

    step: int
    total: int
    started: float
    first_step: int
    updated: float
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def seconds_left(self) -> float | None:
        """Return the estimated seconds until the stage ends, or None if no step has ended yet."""
        done = self.step - self.first_step
        return (self.updated - self.started) / done * (self.total - self.step) if done > 0 else None


class LineProgress:
    """A `Progress` that writes a stage's first and last line, and others at most every LINE_SECONDS.

    `write` is called with each line, and `clock` returns seconds.
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

        `is_new` says that this is the first report of the stage, or that its steps begin again.
        """
        row = self.rows[stage]
        ended = row.step >= row.total
        if is_new or ended or row.updated - self.printed.get(stage, 0.0) >= LINE_SECONDS:
            self.printed[stage] = row.updated
            left = f"  {duration(row.seconds_left)} left" if row.seconds_left and not ended else ""
            self.write(f"{stage:<12} {row.step}/{row.total}  {figures_text(row.figures)}{left}".rstrip())
