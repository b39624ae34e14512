"""The file metrics.jsonl of a stage: one JSON object per step, readable while the stage runs.

This module does not import torch.
"""

import json
import math
from pathlib import Path

from components.core.files import atomic_write

# Metrics of a step or of a whole stage, by name.
Figures = dict[str, float]
METRICS = "metrics.jsonl"


class MetricsFile:
    """Metrics of the finished steps of a stage, in memory and in its file metrics.jsonl.

    A resumed stage drops the metrics of the steps that it repeats.
    """

    def __init__(self, stage_folder: Path, *, start: int, writes: bool):
        """Read the records of the steps before `start`; `writes` must be True only on rank 0."""
        self.path = stage_folder / METRICS
        self.writes = writes
        lines = self.path.read_text().splitlines() if self.path.is_file() else []
        self.records: list[dict[str, float | None]] = [
            record for record in map(json.loads, lines) if record["step"] < start
        ]

    def write(self, step: int, figures: Figures) -> None:
        """Append the record of a step, and write the file if `writes` is true.

        A figure that is NaN or infinite becomes null.
        """
        self.records.append(
            {"step": step}
            | {name: float(value) if math.isfinite(value) else None for name, value in figures.items()}
        )
        if self.writes:
            atomic_write(self.path, "".join(json.dumps(record) + "\n" for record in self.records))

    def mean(self, name: str, records: slice) -> float:
        """Return the mean of the figure `name` over a slice of the records; NaN if no record has it."""
        values = [value for record in self.records[records] if (value := record.get(name)) is not None]
        return math.fsum(values) / len(values) if values else math.nan


def newest_figures(home: Path, stage: str) -> Figures:
    """Return the last record of the most recently written metrics file of a stage named `stage` below `home`.

    The step's number is included under `step`, and null figures are left out. Returns an empty dictionary if
    there is no record.
    """
    files = sorted(home.glob(f"stages/{stage}-*/{METRICS}"), key=lambda path: path.stat().st_mtime)
    lines = files[-1].read_text().splitlines() if files else []
    record = json.loads(lines[-1]) if lines else {}
    return {name: float(value) for name, value in record.items() if isinstance(value, int | float)}
