"""The curve of a running stage, read from outside: one JSON line a step in the stage's metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path


def newest_figures(home: Path, stage: str) -> dict[str, float]:
    """The last step's figures, `step` among them, of the stage of that name that wrote last; empty when there is none."""
    curves = sorted(home.glob(f"stages/{stage}-*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    lines = curves[-1].read_text().splitlines() if curves else []
    return (
        {
            name: float(value)
            for name, value in json.loads(lines[-1]).items()
            if isinstance(value, int | float)
        }
        if lines
        else {}
    )
