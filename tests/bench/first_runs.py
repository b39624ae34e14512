"""The default run with several seeds: what a first run learns, and whether the machine is quiet or busy.

    python tests/bench/first_runs.py OUT [--profile smoke] [--seeds 0,1,2] [--busy] [--schedules 0]
        [--set KEY=VALUE] [--table]

Every run has a home of its own. With `--busy`, another process uses one core during the run. The first and
the last policy of each run are also evaluated at temperature 0, with one attempt. With `--schedules`, that
number of fixed schedules is measured on the held-out tasks, which all runs share. Finished runs are kept: a
repeated call goes on where the last one was stopped. `--table` only prints the tables.
"""

import argparse
import contextlib
import json
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from captured_share import Attainable, share_rows
from schedule_search import RESULTS as FOUND
from schedule_search import search

from components.core.config import PROJECT, resolve
from components.core.files import read_json, write_json
from components.core.progress import LineProgress
from components.core.task import read_tasks
from components.evaluation.metrics import changes
from components.evaluation.results import Evaluation, load_evaluation
from components.judge.pool.open_pool import open_pool

REFUSED = 4
GREEDY = ("--set", "evaluation.attempts=1", "--set", "evaluation.temperature=0.0")
# Row of a table: the figure's name in `changes`, the column's title, and whether the figure is a share.
FIGURES = (
    ("attempts_pass_rate", "pass rate", True),
    ("faster_rate.eager", "faster than eager", True),
    ("faster_rate.compile", "faster than compile", True),
    ("attempts_mean_reward", "mean reward", False),
)


def cuda_agent(*words: str) -> dict[str, Any]:
    """Run a command of cuda-agent with --json and return its record."""
    command = [sys.executable, "-m", "components.cli", *words, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=PROJECT, check=False)
    if done.returncode not in (0, REFUSED):
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}; the same call goes on")
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def use_a_core() -> None:
    while True:
        sum(range(10_000))


@contextlib.contextmanager
def load(is_busy: bool) -> Iterator[None]:
    """Keep one core busy while the block runs, if `is_busy`."""
    process = multiprocessing.Process(target=use_a_core, daemon=True)
    if is_busy:
        process.start()
    yield
    if is_busy:
        process.kill()


def run(out: Path, name: str, profile: str, sets: list[str], *, is_busy: bool) -> None:
    """Make the run `name` with its evaluations at temperature 0, unless its record exists."""
    home, file = out / name, out / f"{name}.json"
    if file.is_file():
        return
    with load(is_busy):
        record = cuda_agent("run", "--profile", profile, "--home", str(home), *sets)
    checkpoints = {"before": record["stages"][0]["checkpoint"], "after": record["stages"][-1]["checkpoint"]}
    greedy = {}
    for when, checkpoint in checkpoints.items():
        words = ("evaluate", "--policy", checkpoint, "--profile", profile, "--home", str(home))
        greedy[when] = cuda_agent(*words, *sets, *GREEDY)["report"]
    write_json(file, record | {"greedy": greedy})


def evaluations(record: dict[str, Any], home: Path) -> dict[str, tuple[Evaluation, Evaluation]]:
    """Return the evaluations before and after training by their temperature."""
    after = load_evaluation(home / record["evaluation"]["results"])
    digest = record["stages"][0]["digest"]
    found = [load_evaluation(path) for path in sorted(home.glob("stages/evaluation-*/results.json"))]
    (before,) = [one for one in found if one.policy_digest == digest]
    greedy = [load_evaluation(Path(record["greedy"][when]).parent) for when in ("before", "after")]
    return {"1": (before, after), "0": (greedy[0], greedy[1])}


def row(name: str, temperature: str, record: dict[str, Any], pair: tuple[Evaluation, Evaluation]) -> str:
    """Return the row of a run in a Markdown table, with the figures before and after training."""
    change = changes(pair[0].tasks, pair[1].tasks)
    cells = [name, f"{record['seconds']:.0f}", temperature]
    for figure, _, is_share in FIGURES:
        values = [one.overall.model_dump() for one in pair]
        for part in figure.split("."):
            values = [value[part] for value in values]
        unit = 100 if is_share else 1
        digits = 0 if is_share else 2
        found = change[figure]
        ends = f"{unit * (found.low or 0):+.{digits}f} to {unit * (found.high or 0):+.{digits}f}"
        cells.append(f"{unit * values[0]:.{digits}f} → {unit * values[1]:.{digits}f} ({ends})")
    return f"| {' | '.join([*cells, record['gate']['verdict'].replace('_', ' ')])} |"


def print_tables(out: Path) -> None:
    """Print a table of all finished runs, and one of the fixed schedules if they were measured."""
    print(f"| run | seconds | temperature | {' | '.join(title for _, title, _ in FIGURES)} | verdict |")
    print(f"| --- | --- | --- |{' --- |' * (len(FIGURES) + 1)}")
    finals = {}
    for file in sorted(out.glob("*.json")):
        record, home = read_json(file), out / file.stem
        for temperature, pair in evaluations(record, home).items():
            print(row(file.stem, temperature, record, pair))
        finals[file.stem] = evaluations(record, home)["1"][1]
    if (out / "schedules" / FOUND).is_file():
        attainable = Attainable.model_validate(read_json(out / "schedules" / FOUND))
        print(
            "\n| first answer of | geometric mean over eager, a wrong one counts 1 | tasks |"
            "\n| --- | --- | --- |"
        )
        for found in share_rows(finals, attainable):
            print(f"| {found.name} | {found.geomean:.2f} | {found.tasks} |")


def measure_schedules(out: Path, profile: str, sets: list[str], schedules: int) -> None:
    """Measure fixed schedules on the held-out tasks of the data set that the runs share."""
    params = resolve(profile, tuple(word for word in sets if word != "--set")).params
    file = next(out.glob("*/datasets/*/tasks.parquet"))
    suite = [task for task in read_tasks(file) if task.split == "held_out"]
    place = out / "schedules"
    pool = open_pool(params.model_copy(update={"home": str(place)}), place / "verdicts")
    try:
        progress = LineProgress(lambda line: print(line, flush=True))
        search(suite, params, pool, place, schedules=schedules, epoch="schedules", progress=progress)
    finally:
        pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--profile", default="smoke")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--schedules", type=int, default=0)
    parser.add_argument("--set", dest="sets", action="append", default=[])
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    out = options.out.resolve()
    sets = [word for value in options.sets for word in ("--set", value)]
    if not options.table:
        for seed in options.seeds.split(","):
            name = f"{'busy' if options.busy else 'quiet'}-{seed}"
            run(out, name, options.profile, [*sets, "--set", f"seed={seed}"], is_busy=options.busy)
        if options.schedules:
            measure_schedules(out, options.profile, sets, options.schedules)
    print_tables(out)


if __name__ == "__main__":
    main()
