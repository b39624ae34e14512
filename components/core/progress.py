"""The interface with which components report progress. Components never print."""

from typing import Protocol


class Progress(Protocol):
    """A receiver of progress reports. `figures` are numbers with short names, such as reward=1.2."""

    def update(self, stage: str, step: int, total: int, **figures: float) -> None: ...


class Quiet:
    """A `Progress` that ignores every report."""

    def update(self, stage: str, step: int, total: int, **figures: float) -> None:
        """Ignore the report."""
