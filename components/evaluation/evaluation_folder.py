"""Files that every evaluation keeps in its folder: its settings (plan.json) and its cost (cost.json)."""

from pathlib import Path
from typing import Any

from components.core.errors import UserError
from components.core.files import read_json, write_json


def claim(out: Path, plan: dict[str, Any]) -> None:
    """Write `plan` to plan.json in `out`, or compare it with the plan that is already there.

    Raises UserError if the two plans differ.
    """
    file = out / "plan.json"
    if not file.is_file():
        write_json(file, plan)
        return
    begun = read_json(file)
    different = sorted(key for key in plan if begun.get(key) != plan[key])
    if different:
        raise UserError(
            f"{out}: holds another evaluation (its {', '.join(different)} differ); "
            "give another folder or delete this one."
        )


def add_cost(out: Path, phase: str, seconds: float) -> None:
    """Add `seconds`, during which `phase` occupied the device, to cost.json in `out`."""
    file = out / "cost.json"
    costs: dict[str, float] = read_json(file) if file.is_file() else {}
    write_json(file, costs | {phase: round(costs.get(phase, 0.0) + seconds, 3)})
