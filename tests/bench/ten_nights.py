"""Nights in a row, each from the champion with new tasks: reward and rates on one fixed suite, by night.

    python tests/bench/ten_nights.py OUT [--profile smoke] [--nights 10] [--seeds 0,1,2] [--set KEY=VALUE]
        [--table]

Every seed has a home of its own. Its first night starts from policy.base, each later one from the champion,
and data.seed changes from night to night while data.held_out_seed stays. All nights of all seeds are
evaluated on the held-out tasks of one data set, which is built first. Night 0 is the first policy of all.
Finished nights are kept in OUT/nights.json: a repeated call goes on where the last one was stopped, and one
with another profile or other parameters is refused. The table and nights.svg are written to OUT after each
night; `--table` only writes them.
"""

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from components.core.config import PROJECT
from components.core.files import atomic_write
from components.core.task import read_tasks, write_tasks

SUITE = "suite.parquet"
REFUSED = 4
FIGURES = {
    "mean reward": lambda found: found["mean_reward"],
    "pass rate": lambda found: found["pass_rate"],
    "faster than eager": lambda found: found["faster_rate"]["eager"],
    "faster than torch.compile": lambda found: found["faster_rate"]["compile"],
}


def cuda_agent(*words: str, allowed: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """Run a command of cuda-agent with --json and return its record."""
    command = [sys.executable, "-m", "components.cli", *words, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=PROJECT, check=False)
    if done.returncode not in allowed:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}; the same call goes on")
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def make_suite(out: Path, profile: str, sets: list[str]) -> None:
    """Write the held-out tasks of a data set of the profile to OUT/suite.parquet, unless it exists."""
    if (out / SUITE).is_file():
        return
    place = ("--home", str(out / "home"), "--out", str(out / "tasks"))
    cuda_agent("data", "build", "--profile", profile, *place, *sets)
    tasks = read_tasks(out / "tasks" / "tasks.parquet")
    write_tasks(out / SUITE, [task for task in tasks if task.split == "held_out"])


def run_night(out: Path, profile: str, seed: int, night: int, sets: list[str]) -> dict[str, Any]:
    """Run one night of a seed, or continue it if it was stopped."""
    number = 1000 * seed + night
    fixed = {
        "policy.source": "champion",
        "coldstart.seed": seed,
        "seed": number,
        "data.seed": number,
        "data.held_out": 1,
        "evaluation.suite": json.dumps(str(out / SUITE)),
    }
    words = [word for key, value in fixed.items() for word in ("--set", f"{key}={value}")]
    home = str(out / f"seed-{seed}")
    return cuda_agent("run", "--profile", profile, "--home", home, *words, *sets, allowed=(0, REFUSED))


def rows_of(seed: int, night: int, record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the row of a night, and before that of the first night the row of the policy it started from."""

    def figures(found: dict[str, Any]) -> dict[str, Any]:
        return {name: of(found) for name, of in FIGURES.items()}

    about = {"start": "", "version": "", "verdict": "first policy"}
    first = {"seed": seed, "night": 0, **about, **figures(record["cold_start"]), "seconds": 0.0}
    about = {
        "start": record["night"]["start"],
        "version": record["model"]["version"],
        "verdict": record["gate"]["verdict"],
    }
    ended = {"seed": seed, "night": night, **about, **figures(record["evaluation"])}
    ended["seconds"] = record["seconds"]
    return [first, ended] if night == 1 else [ended]


def read_rows(stored: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of finished nights; exit if they were made with other settings than `settings`."""
    if not stored.is_file():
        return []
    kept: dict[str, Any] = json.loads(stored.read_text())
    if settings not in ({}, kept["settings"]):
        sys.exit(f"{stored}: was made with {kept['settings']}, not {settings}; give another folder")
    rows: list[dict[str, Any]] = kept["rows"]
    return rows


def write_table(out: Path, rows: list[dict[str, Any]]) -> str:
    """Write nights.md, and return its text."""

    def cell(value: object) -> str:
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    cells = [list(rows[0]), ["---"] * len(rows[0]), *([*map(cell, row.values())] for row in rows)]
    lines = [f"| {' | '.join(line)} |" for line in cells]
    text = "\n".join(lines) + "\n"
    (out / "nights.md").write_text(text)
    return text


@rc_context({"svg.fonttype": "none", "svg.hashsalt": "nights", "axes.grid": True, "axes.grid.axis": "y"})
def write_plot(out: Path, rows: list[dict[str, Any]]) -> None:
    """Draw each figure by night, one line for each seed, to nights.svg, with rings on promoted versions."""
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    panels = figure.subplots(1, len(FIGURES))
    for axes, name in zip(panels, FIGURES, strict=True):
        measured = [row for row in rows if row[name] is not None]
        for seed in sorted({row["seed"] for row in rows}):
            own = [row for row in measured if row["seed"] == seed]
            nights = [row["night"] for row in own]
            axes.plot(nights, [row[name] for row in own], "o-", markersize=3, label=f"seed {seed}")
        promoted = [row for row in measured if row["verdict"] == "promoted"]
        nights = [row["night"] for row in promoted]
        values = [row[name] for row in promoted]
        axes.plot(nights, values, "o", color="#444", fillstyle="none", label="promoted")
        axes.set(title=name, xlabel="night")
        axes.spines[["left", "top", "right"]].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if name == "mean reward":
            axes.set_ylim(-1, 3.1)
        else:
            axes.set_ylim(0, 1.03)
            axes.yaxis.set_major_formatter(PercentFormatter(1))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=9, frameon=False)
    figure.savefig(out / "nights.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--profile", default="smoke")
    parser.add_argument("--nights", type=int, default=10)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--set", dest="sets", action="append", default=[])
    parser.add_argument("--table", action="store_true")
    chosen = parser.parse_args()
    out = chosen.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    sets = [word for item in chosen.sets for word in ("--set", item)]
    stored, settings = out / "nights.json", {"profile": chosen.profile, "sets": sorted(chosen.sets)}
    rows = read_rows(stored, {} if chosen.table else settings)
    if not chosen.table:
        make_suite(out, chosen.profile, sets)
        done = {(row["seed"], row["night"]) for row in rows}
        wanted = itertools.product(map(int, chosen.seeds.split(",")), range(1, chosen.nights + 1))
        for seed, night in wanted:
            if (seed, night) not in done:
                rows += rows_of(seed, night, run_night(out, chosen.profile, seed, night, sets))
                atomic_write(stored, json.dumps({"settings": settings, "rows": rows}, indent=1))
                write_table(out, rows)
                write_plot(out, rows)
    if not rows:
        sys.exit(f"{stored}: there is no finished night yet")
    print(write_table(out, rows), end="")
    write_plot(out, rows)


if __name__ == "__main__":
    main()
