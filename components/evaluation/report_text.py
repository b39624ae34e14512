"""Conversion of values, figures, intervals and changes to the texts that a report shows."""

import math
from typing import Any

from components.evaluation.intervals import Interval
from components.evaluation.metrics import SHARES


def pretty(value: Any) -> str:
    """Return the text of a value, with four significant digits for floats and without brackets or braces.

    A missing value, an empty collection and a float that is not finite become a dash.
    """
    match value:
        case None | "":
            return "–"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}" if math.isfinite(value) else "–"
        case list() | tuple():
            return ", ".join(map(pretty, value)) or "–"
        case dict():
            return ", ".join(f"{key} {pretty(item)}" for key, item in value.items()) or "–"
        case _:
            return str(value)


def figure(value: float | None, name: str) -> str:
    """Return the text of a value of the figure `name`, such as `pass_rate` or `geomean.eager`.

    Rates are written as per cent, geometric means with a times sign, and rewards as plain numbers. A missing
    value becomes a dash.
    """
    if value is None or not math.isfinite(value):
        return "–"
    name = name.removeprefix("change.")
    if name.startswith("geomean"):
        return f"{value:.2f}×"
    if name.startswith(SHARES):
        return f"{value:.0%}" if abs(value) in (0, 1) else f"{value:.1%}"
    return f"{value:.2f}"


def interval(bounds: Interval | None, name: str) -> str:
    """Return the text of the interval of the figure `name`, or an empty string if there is no interval."""
    if bounds is None or bounds.low is None or bounds.high is None:
        return ""
    return f"{figure(bounds.low, name)} to {figure(bounds.high, name)}"


def signed(value: float | None, name: str) -> str:
    """Return the text of `value`, which is a change of the figure `name`.

    It is a signed number of percentage points for rates, a signed number for rewards, and a factor for
    geometric means.
    """
    if value is None:
        return "–"
    if name.startswith("geomean"):
        return f"×{value:.2f}"
    return f"{value:+.2f}" if name.startswith("mean_reward") else f"{100 * value:+.1f} points"
