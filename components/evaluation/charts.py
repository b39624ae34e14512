"""This module draws the charts of the reports as inline SVG.

Every public function returns complete markup, in which labels are escaped and numbers are formatted. Colours
are names of CSS classes of the page's style sheet, so that the same markup can be shown in light and dark
mode.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 12, 34


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    `xs` and `ys` are the coordinates of its points in order, and `colour` is a CSS class. `band` holds the
    interval (low, high) of each point, or is empty if there are no intervals.
    """

    label: str
    colour: str
    xs: Sequence[float]
    ys: Sequence[float]
    band: Sequence[tuple[float, float]] = ()
    dashed: bool = False


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    y_range: tuple[float, float] | None = None,
    whole_x: bool = False,
) -> Markup:
    """Draw lines over a common x axis.

    `y_range` replaces the range of the values on the y axis. With `whole_x`, the ticks of the x axis are
    whole numbers. Returns empty markup if there is no point.
    """
    xs = [x for line in series for x in line.xs]
    ys = [y for line in series for y in line.ys] + [
        edge for line in series for pair in line.band for edge in pair
    ]
    if not xs:
        return Markup("")
    x_low, x_high = min(xs), max(xs)
    y_low, y_high = y_range or _padded(min(ys), max(ys))
    x = _scale(x_low, x_high if x_high > x_low else x_low + 1, LEFT, WIDTH - RIGHT)
    y = _scale(y_low, y_high, HEIGHT - BOTTOM, TOP)
    parts = _axes(x, y, _ticks(x_low, x_high, whole=whole_x), _ticks(y_low, y_high), x_label, y_label)
    for line in series:
        if line.band:
            edge = [low for low, _ in line.band] + [high for _, high in reversed(line.band)]
            outline = _points(x, y, [*line.xs, *reversed(line.xs)], edge)
            parts.append(f'<polygon class="band {line.colour}" points="{outline}"/>')
        parts.append(
            f'<polyline class="line {line.colour}{" dashed" if line.dashed else ""}" '
            f'points="{_points(x, y, line.xs, line.ys)}"/>'
        )
        if len(line.xs) <= 40:
            parts += [
                f'<circle class="dot {line.colour}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="2.6"/>'
                for a, b in zip(line.xs, line.ys, strict=True)
            ]
    return _chart(parts, f"{y_label} by {x_label}", [(line.label, line.colour) for line in series])


def stacked_shares(
    xs: Sequence[float], shares: Mapping[str, tuple[str, Sequence[float]]], *, x_label: str
) -> Markup:
    """Draw stacked areas whose values add up to one at every x.

    `shares` maps the label of each area to its colour and values; the first area is at the bottom. Returns
    empty markup if `xs` is empty.
    """
    if not xs:
        return Markup("")
    if len(xs) == 1:
        # The area of a single step would have no width, so it is drawn one step wide.
        xs, shares = (
            [xs[0], xs[0] + 1],
            {label: (colour, [values[0]] * 2) for label, (colour, values) in shares.items()},
        )
    x = _scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    y = _scale(0, 1, HEIGHT - BOTTOM, TOP)
    floor = [0.0] * len(xs)
    areas = []
    for colour, values in shares.values():
        top = [low + value for low, value in zip(floor, values, strict=True)]
        outline = _points(x, y, [*xs, *reversed(xs)], [*top, *reversed(floor)])
        areas.append(f'<polygon class="area {colour}" points="{outline}"/>')
        floor = top
    ticks = [(value, f"{value:.0%}") for value in (0, 0.25, 0.5, 0.75, 1)]
    axes = _axes(x, y, _ticks(min(xs), max(xs), whole=True), ticks, x_label, "share of trajectories")
    labels = [(label, colour) for label, (colour, _) in shares.items()]
    return _chart([*areas, *axes], "milestone shares by step", labels)


def speedup_histogram(groups: Sequence[tuple[str, str, Sequence[float]]], *, x_label: str) -> Markup:
    """Draw a histogram of speed-ups for each group, with bins whose width is a factor of sqrt(2).

    Each group is a tuple of label, colour and ratios. Returns empty markup if there is no ratio.
    """
    # Number of ratios of each group in each bin. Bin i begins at 2^(i / 2).
    counts = [Counter(math.floor(2 * math.log2(value)) for value in values) for _, _, values in groups]
    used = [index for group in counts for index in group]
    if not used:
        return Markup("")
    low, high = min(-2, *used), max(1, *used) + 1
    top = max(count for group in counts for count in group.values())
    x = _scale(low / 2, high / 2, LEFT, WIDTH - RIGHT)
    y = _scale(0, top * 1.08, HEIGHT - BOTTOM, TOP)
    slot = (x(0.5) - x(0)) / (len(groups) + 0.35)
    bars = [
        f'<rect class="fill {colour}" x="{x(index / 2) + slot * (0.175 + number):.1f}" '
        f'y="{y(group[index]):.1f}" width="{max(slot - 1, 1):.1f}" height="{y(0) - y(group[index]):.1f}"/>'
        for number, ((_, colour, _), group) in enumerate(zip(groups, counts, strict=True))
        for index in range(low, high)
    ]
    stride = max(1, math.ceil((high - low) / 2 / 10))
    x_ticks = [
        (float(power), _times(2.0**power))
        for power in range(math.ceil(low / 2), math.floor(high / 2) + 1, stride)
    ]
    axes = _axes(x, y, x_ticks, _ticks(0, top, whole=True), x_label, "tasks")
    even = f'<line class="even" x1="{x(0):.1f}" x2="{x(0):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
    return _chart([*axes, *bars, even], x_label, [(label, colour) for label, colour, _ in groups])


def whisker(estimate: float, low: float, high: float) -> Markup:
    """Return an SVG of a speed-up with its interval on a small logarithmic axis from 1/8 to 8.

    A vertical line in the centre marks a speed-up of 1. Values outside the axis are drawn at its ends.
    """
    x = _scale(-3, 3, 2, 118)

    def place(value: float) -> float:
        return x(max(-3.0, min(3.0, math.log2(value)))) if value > 0 else x(-3)

    colour = "good" if low > 1 else "bad" if high < 1 else "muted"
    return Markup(
        f'<svg class="whisker" viewBox="0 0 120 14" width="120" height="14" aria-hidden="true">'
        f'<line class="even" x1="60" x2="60" y1="0" y2="14"/>'
        f'<line class="line {colour}" x1="{place(low):.1f}" x2="{place(high):.1f}" y1="7" y2="7"/>'
        f'<circle class="dot {colour}" cx="{place(estimate):.1f}" cy="7" r="3"/></svg>'
    )


Scale = Callable[[float], float]


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _padded(low: float, high: float) -> tuple[float, float]:
    margin = 0.06 * (high - low) or 0.5
    return low - margin, high + margin


def _ticks(low: float, high: float, *, whole: bool = False) -> list[tuple[float, str]]:
    """Return about five round numbers between low and high for the ticks of an axis, with their labels.

    With `whole`, the distance between the ticks is a whole number.
    """
    raw = (high - low or 1.0) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw)
    step = max(1.0, round(step)) if whole else step
    indices = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return [(index * step, f"{index * step:.10g}") for index in indices]


def _axes(
    x: Scale,
    y: Scale,
    x_ticks: list[tuple[float, str]],
    y_ticks: list[tuple[float, str]],
    x_label: str,
    y_label: str,
) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    return [
        *(
            f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
            f'<text class="tick end" x="{LEFT - 6}" y="{y(value) + 3.5:.1f}">{escape(text)}</text>'
            for value, text in y_ticks
        ),
        *(
            f'<text class="tick middle" x="{x(value):.1f}" y="{bottom + 14}">{escape(text)}</text>'
            for value, text in x_ticks
        ),
        f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>',
        f'<text class="tick middle" x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 4}">{escape(x_label)}</text>',
        f'<text class="tick middle" transform="translate(11 {(TOP + bottom) / 2:.0f}) rotate(-90)">'
        f"{escape(y_label)}</text>",
    ]


def _times(value: float) -> str:
    return f"{value:g}×" if value >= 1 else f"1/{1 / value:g}×"


def _points(x: Scale, y: Scale, xs: Sequence[float], ys: Sequence[float]) -> str:
    return " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(xs, ys, strict=True))


def _chart(parts: Sequence[str], title: str, labels: Sequence[tuple[str, str]]) -> Markup:
    """Return an SVG with the elements `parts`, followed by a legend.

    `title` describes the chart for screen readers. `labels` are the pairs of label and colour of the legend.
    """
    keys = "".join(f'<span><i class="key {colour}"></i>{escape(label)}</span>' for label, colour in labels)
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'{"".join(parts)}</svg><div class="legend">{keys}</div>'
    )
