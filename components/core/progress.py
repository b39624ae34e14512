"""Progress for people: components report through this interface and never print."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """One live view of the run. `figures` are short name -> number pairs such as reward=1.2."""

    def update(self, stage: str, step: int, total: int, **figures: float) -> None: ...


class Quiet:
    """Reports nothing."""

    def update(self, stage: str, step: int, total: int, **figures: float) -> None:
        return
