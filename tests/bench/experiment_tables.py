"""Tables and charts of the experiment (experiment.py), from the results in its folder."""

from collections.abc import Iterable
from pathlib import Path

from captured_share import (
    Attainable,
    attainable_log,
    equivalence_text,
    gain_text,
    share_rows,
    share_text,
)
from matplotlib.figure import Figure
from seed_differences import POOLED, pooled_text

from components.core.files import read_json
from components.evaluation.results import RESULTS, Evaluation, load_evaluation

ATTAINABLE = "attainable"
# The full run, by the name of its last evaluation, and all its evaluations.
FULL = "stage 4"
ROWS = ("cold start", "stage 1", "stage 2", FULL)
NUMBERS = (0, 1, 2, 4)
TEMPERATURES = (0, 1)


def at(name: str, temperature: int) -> str:
    """Return the name of the folder of the evaluation of a policy at a temperature."""
    return f"evaluation {name}, temperature {temperature}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def row(name: str, found: Evaluation) -> str:
    figures = found.overall
    reward = figures.intervals["mean_reward"]
    eager, fast = figures.geomean.eager, figures.geomean.compile
    ratios = [f"{ratio:.2f}" if ratio is not None else "-" for ratio in (eager, fast)]
    interval = f"{figures.mean_reward:.2f} [{reward.low:.2f}, {reward.high:.2f}]"
    rates = [
        share(figures.pass_rate),
        interval,
        share(figures.faster_rate.eager),
        share(figures.faster_rate.compile),
    ]
    return "| " + " | ".join([name, *rates, *ratios]) + " |"


def found_evaluations(
    out: Path, seeds: list[int], names: Iterable[str], temperature: int
) -> dict[str, Evaluation]:
    """Return the finished evaluations of the named policies of all seeds, by seed and name."""
    folders = {f"{seed} {name}": out / at(f"{seed} {name}", temperature) for seed in seeds for name in names}
    return {name: load_evaluation(folder) for name, folder in folders.items() if (folder / RESULTS).is_file()}


def load_search(out: Path) -> Attainable | None:
    found = out / ATTAINABLE / RESULTS
    return Attainable.model_validate(read_json(found)) if found.is_file() else None


def table(out: Path, seeds: list[int], variants: Iterable[str], temperature: int) -> None:
    """Print a row for every evaluation at one temperature, and one for the best fixed schedule."""
    searched = load_search(out)
    columns = ["", "pass rate", "mean reward", "faster than eager", "faster than compile"]
    columns += ["geomean, eager", "geomean, compile"]
    if searched is not None:
        columns += ["captured share", "search equivalence", "gain per turn"]
    print(f"\nTemperature {temperature}\n\n| {' | '.join(columns)} |\n|" + " --- |" * len(columns))
    evaluations = found_evaluations(out, seeds, (*ROWS, *variants), temperature)
    rows = share_rows(evaluations, searched) if searched is not None else []
    cells = {one.name: f" {share_text(one)} | {equivalence_text(one)} | {gain_text(one)} |" for one in rows}
    for name, evaluation in evaluations.items():
        print(row(name, evaluation) + cells.get(name, ""))
    for one in rows:
        if one.choices:
            choices = ", ".join(f"{name} {value}" for name, value in one.choices.items())
            print(f"| {one.name} ({choices}) |{' |' * 6}{cells[one.name]}")


def difference_table(out: Path, seeds: list[int], variants: Iterable[str], temperature: int) -> None:
    """Print the differences of all rows from the full run over all seeds that have both."""
    searched = load_search(out)
    attainable = (
        {task.task_id: attainable_log(task.outcomes()) for task in searched.tasks} if searched else {}
    )
    print(f"\nDifferences from {FULL}, temperature {temperature}\n")
    print("| | seeds | pass rate | mean reward | captured share | gain per turn |\n|" + " --- |" * 6)
    for name in (*ROWS, *variants):
        pairs = []
        for seed in seeds:
            found = found_evaluations(out, [seed], (name, FULL), temperature)
            if len(found) == len({name, FULL}):
                pairs.append((found[f"{seed} {name}"], found[f"{seed} {FULL}"]))
        if pairs:
            cells = [pooled_text(pairs, figure, attainable, name == FULL) for figure in POOLED]
            print(f"| {name} | {len(pairs)} | {' | '.join(cells)} |")


def plot(out: Path, seeds: list[int], file: Path) -> None:
    """Draw mean reward with intervals, pass rate (dashed) and share faster than torch.compile, by stage."""
    figure = Figure(figsize=(8, 7), layout="constrained")
    reward, rates = figure.subplots(2)
    for index, seed in enumerate(seeds):
        found = found_evaluations(out, [seed], ROWS, TEMPERATURES[0])
        figures = {
            number: found[f"{seed} {stage}"].overall
            for number, stage in zip(NUMBERS, ROWS, strict=True)
            if f"{seed} {stage}" in found
        }
        numbers, every, colour = list(figures), figures.values(), f"C{index}"
        bounds = [each.intervals["mean_reward"] for each in every]
        low, high = [bound.low for bound in bounds], [bound.high for bound in bounds]
        reward.fill_between(numbers, low, high, color=colour, alpha=0.16, linewidth=0)
        reward.plot(numbers, [each.mean_reward for each in every], "o-", color=colour, label=f"seed {seed}")
        rates.plot(numbers, [each.pass_rate for each in every], "o--", color=colour)
        rates.plot(numbers, [each.faster_rate.compile or 0.0 for each in every], "o-", color=colour)
    stages = "stage (0: the cold start)"
    reward.set(xlabel=stages, ylabel="mean reward", ylim=(-1, 3), xticks=NUMBERS)
    rates.set(xlabel=stages, ylabel="passed (dashed), faster than compile", ylim=(0, 1), xticks=NUMBERS)
    reward.legend()
    figure.savefig(file)
