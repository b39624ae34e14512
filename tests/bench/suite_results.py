"""Results of an evaluation by task as CSV, and its failures by category with an example of each.

    python tests/bench/suite_results.py HOME/evaluations/EPOCH [OUT.csv]

The evaluation may be unfinished; the tasks that have a result then count. Prints for each level the number of
tasks by status, the correct ones that are faster than a baseline, and the geometric mean of their ratios.
Then follow the failures: status and reason, number, the task that is named first, and the end of what the
judge or the compiler said about it. OUT.csv has a row for each task.
"""

import csv
import sys
from collections import Counter, defaultdict
from pathlib import Path

from components.agent.trajectory import load_trajectories
from components.core.files import read_json
from components.evaluation.results import TaskResult
from components.judge.statistics import geometric_mean

COLUMNS = (
    *("level", "name", "status", "reason", "eager", "eager_low", "eager_high"),
    *("compile", "compile_low", "compile_high", "seconds", "limit_seconds", "attained"),
)
# Largest number of characters of what the judge said about a failure.
SAID = 300


def row_of(result: TaskResult) -> list[object]:
    ratios = [
        value
        for ratio in (result.speedup.eager, result.speedup.compile)
        for value in ((ratio.estimate, ratio.low, ratio.high) if ratio else ("", "", ""))
    ]
    return [
        *(result.level or "", result.name, result.status, result.reason, *ratios),
        *(result.seconds.candidate or "", result.seconds.limit or "", result.attained or ""),
    ]


def level_text(level: object, results: list[TaskResult]) -> str:
    """Return a line on the results of one level."""
    counts = Counter(result.status for result in results).most_common()
    parts = [f"level {level}: {len(results)} tasks", ", ".join(f"{count} {name}" for name, count in counts)]
    for baseline in ("eager", "compile"):
        ratios = [getattr(result.speedup, baseline) for result in results if result.correct]
        known = [ratio for ratio in ratios if ratio is not None]
        if known:
            mean = geometric_mean([ratio.estimate for ratio in known])
            faster = sum(ratio.low > 1 for ratio in known)
            parts.append(f"{faster} faster than {baseline}, mean ratio {mean:.2f} of {len(known)}")
    return "; ".join(parts)


def main() -> None:
    folder = Path(sys.argv[1])
    results = [TaskResult.model_validate(read_json(file)) for file in (folder / "tasks").glob("*.json")]
    results.sort(key=lambda result: (result.level or 0, result.name))
    levels: dict[int, list[TaskResult]] = defaultdict(list)
    failures: dict[str, list[TaskResult]] = defaultdict(list)
    for result in results:
        levels[result.level or 0].append(result)
        if not result.correct:
            failures[f"{result.status} {result.reason}".rstrip()].append(result)
    for level, found in sorted(levels.items()):
        print(level_text(level or "none", found))
    logs = {
        trajectory.task_id: trajectory.final.log
        for trajectory in reversed(load_trajectories(folder / "episodes"))
    }
    for category, found in sorted(failures.items(), key=lambda entry: -len(entry[1])):
        said = " ".join(logs.get(found[0].task_id, "").split())
        print(f"{category}: {len(found)}, such as {found[0].name}: {said[-SAID:]}")
    if len(sys.argv) > 2:
        with Path(sys.argv[2]).open("w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *map(row_of, results)])


if __name__ == "__main__":
    main()
