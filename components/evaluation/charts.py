"""Draw the charts of the reports with matplotlib, as inline SVG.

Every public function returns complete markup, in which labels are escaped. Colours are names of CSS variables
in the style sheet of the report's page, so that the same markup can be shown in light and dark mode.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

# Variables of the style sheet. matplotlib accepts only colours that it knows, so charts are drawn in the
# colours #000001, #000002 and so on, which `_svg` replaces by these variables.
VARIABLES = ("soft", "rule", "after", "before", "m-1", "m1", "m2", "m3")
COLOURS = {name: f"#{number:06x}" for number, name in enumerate(VARIABLES, start=1)}
# Settings of matplotlib. At 72 dots per inch, a point is a pixel of a chart that is 560 pixels wide.
STYLE: Any = {
    "figure.figsize": (560 / 72, 240 / 72),
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.edgecolor": COLOURS["soft"],
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.xmargin": 0,
    "grid.color": COLOURS["rule"],
    "text.color": COLOURS["soft"],
    "axes.labelcolor": COLOURS["soft"],
    "xtick.color": COLOURS["soft"],
    "ytick.color": COLOURS["soft"],
    "xtick.major.size": 0,
    "xtick.major.pad": 6,
    "ytick.major.size": 0,
    "ytick.major.pad": 6,
    "font.size": 11,
    "text.parse_math": False,
    "lines.linewidth": 2,
    "lines.markersize": 5,
    "svg.fonttype": "none",
    "svg.hashsalt": "chart",
}
# Parts of matplotlib's SVG that are left out: its style sheet and fonts, because the page has its own,
# clipping paths, names of all elements except marks, and addresses of standards.
LEFT_OUT = re.compile(
    r'<defs>\s*<(style|clipPath).*?</defs>| clip-path="[^"]*"| id="(?!m[0-9a-f]{10})[^"]*"'
    r'| xmlns(:\w+)?="[^"]*"|font-\w+: [^;]*; ',
    re.DOTALL,
)


@dataclass(frozen=True)
class Series:
    """One line of a chart, which the legend shows as `label`.

    `xs` and `ys` are the coordinates of its points in order, and `colour` is a name in VARIABLES, such as
    after. `band` holds the interval (low, high) of each point, or is empty if there are no intervals. If
    `dashed` is true, the line is dashed.
    """

    label: str
    colour: str
    xs: Sequence[float]
    ys: Sequence[float]
    band: Sequence[tuple[float, float]] = ()
    dashed: bool = False


@rc_context(STYLE)
def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    y_range: tuple[float, float] | None = None,
    whole_x: bool = False,
) -> Markup:
    """Draw lines over a common x axis, and return the chart with its legend as inline SVG.

    `x_label` and `y_label` are the titles of the axes. `y_range` is the range (low, high) of the y axis; if
    it is None, the values determine the range. With `whole_x`, the ticks of the x axis are whole numbers.
    Returns empty markup if there is no point.
    """
    if not any(line.xs for line in series):
        return Markup("")
    axes = _axes(x_label, y_label)
    for line in series:
        colour = COLOURS[line.colour]
        if line.band:
            low, high = zip(*line.band, strict=True)
            axes.fill_between(line.xs, low, high, color=colour, alpha=0.16, linewidth=0)
        marker = "o" if len(line.xs) <= 40 else ""
        axes.plot(line.xs, line.ys, "--" if line.dashed else "-", marker=marker, color=colour)
    if y_range is not None:
        axes.set_ylim(y_range)
    if whole_x:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _svg(axes, f"{y_label} by {x_label}", [(line.label, line.colour) for line in series])


@rc_context(STYLE)
def stacked_shares(
    xs: Sequence[float], shares: Mapping[str, tuple[str, Sequence[float]]], *, x_label: str
) -> Markup:
    """Draw stacked areas whose values add up to one at every x, and return the chart as inline SVG.

    `shares` maps the label of each area to its colour (a name in VARIABLES) and its values, one for each of
    `xs`; the first area is at the bottom. `x_label` is the title of the x axis. Returns empty markup if `xs`
    is empty.
    """
    if not xs:
        return Markup("")
    values = np.array([column for _, column in shares.values()])
    if len(xs) == 1:
        # The area of a single step would have no width, so it is drawn one step wide.
        xs, values = [xs[0], xs[0] + 1], values.repeat(2, axis=1)
    axes = _axes(x_label, "share of trajectories")
    axes.stackplot(xs, values, colors=[COLOURS[colour] for colour, _ in shares.values()], linewidth=0)
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    return _svg(axes, "milestone shares by step", [(label, colour) for label, (colour, _) in shares.items()])


@rc_context(STYLE)
def speedup_histogram(groups: Sequence[tuple[str, str, Sequence[float]]], *, x_label: str) -> Markup:
    """Draw a histogram of speed-ups for each group, and return the chart with its legend as inline SVG.

    The axis is logarithmic, and each bin is a factor of sqrt(2) wide. Each group is a tuple of label, colour
    (a name in VARIABLES) and ratios. `x_label` is the title of the x axis and of the chart. Returns empty
    markup if there is no ratio.
    """
    powers = [np.log2(values) for _, _, values in groups]
    every = np.concatenate(powers)
    if not every.size:
        return Markup("")
    bins = np.arange(np.floor(2 * min(-1, every.min())), np.floor(2 * max(0.5, every.max())) + 2) / 2
    axes = _axes(x_label, "tasks")
    axes.hist(powers, bins=list(bins), color=[COLOURS[colour] for _, colour, _ in groups], rwidth=0.8)
    axes.axvline(0, color=COLOURS["soft"], linestyle=":", linewidth=1)
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda power, _: _times(2.0**power)))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    return _svg(axes, x_label, [(label, colour) for label, colour, _ in groups])


def whisker(estimate: float, low: float, high: float) -> Markup:
    """Return an SVG of the speed-up `estimate` with its interval on a small logarithmic axis from 1/8 to 8.

    The interval is from `low` to `high`. A vertical line in the centre marks a speed-up of 1. Values outside
    the axis are drawn at its ends.
    """

    def place(value: float) -> str:
        return f"{60 + 58 * math.log2(min(max(value, 1 / 8), 8)) / 3:.1f}"

    colour = "good" if low > 1 else "bad" if high < 1 else "muted"
    return Markup(
        f'<svg class="whisker" viewBox="0 0 120 14" width="120" height="14" aria-hidden="true">'
        f'<line class="even" x1="60" x2="60" y1="0" y2="14"/>'
        f'<line class="line {colour}" x1="{place(low)}" x2="{place(high)}" y1="7" y2="7"/>'
        f'<circle class="dot {colour}" cx="{place(estimate)}" cy="7" r="3"/></svg>'
    )


def _axes(x_label: str, y_label: str) -> Axes:
    axes = Figure(layout="constrained").subplots()
    axes.set(xlabel=x_label, ylabel=y_label)
    return axes


def _times(value: float) -> str:
    return f"{value:g}×" if value >= 1 else f"1/{1 / value:g}×"


def _svg(axes: Axes, title: str, labels: Sequence[tuple[str, str]]) -> Markup:
    """Return the inline SVG of a chart, followed by a legend in HTML.

    `axes` has what matplotlib has drawn. `title` describes the chart for screen readers. `labels` are the
    pairs of label and colour (a CSS class) of the legend.
    """
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    cast(Figure, axes.figure).savefig(buffer, format="svg", metadata=nothing)
    text = buffer.getvalue()
    text = LEFT_OUT.sub("", text[text.index("<svg") :])
    text = re.sub(r"#0000(\w\w)\b", lambda found: f"var(--{VARIABLES[int(found[1], 16) - 1]})", text)
    head = f'<svg class="chart" role="img" aria-label="{escape(title)}"'
    keys = "".join(f'<span><i class="key {colour}"></i>{escape(label)}</span>' for label, colour in labels)
    return Markup(f'{text.replace("<svg", head, 1)}<div class="legend">{keys}</div>')
