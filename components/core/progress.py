"""The interface with which components report progress. Components never print."""

from collections.abc import Callable
from typing import Protocol

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
