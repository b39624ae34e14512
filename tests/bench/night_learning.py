"""What a policy learned from step to step of a run's stages: its first answers, later turns, and equal tasks.

    python tests/bench/night_learning.py HOME/stages/warmup-… HOME/stages/rejection-… HOME/stages/agentic-…

The folders are those of stages 1, 2 and 4, also of one that is not finished yet, and of evaluations. The
first table has a row for each step: the reward of the first answers (the milestone of the verdict on the
first turn) with a 95 % interval over tasks, how many of them are correct and faster than both baselines, what
the last turn earns more than the first one, and the median ratio of the ends of the interval of the speed-up
over eager. The second table compares the first and the last answers of two steps on the tasks that both have
drawn. Trajectories on which the judge failed are left out.
"""

import argparse
import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from components.evaluation.metrics import bootstrap_counts, percentile_interval
from components.judge.verdict import Verdict

# Verdicts of one trajectory, by turn.
Verdicts = tuple[Verdict, ...]
# Trajectories of one step, by task.
Step = dict[str, list[Verdicts]]


def steps_of(stage: Path, label: str) -> dict[str, Step]:
    """Return the steps of a stage's folder by name, which begins with `label`.

    A step that is not finished is called `sampling`, and so is an evaluation.
    """
    steps: dict[str, Step] = defaultdict(lambda: defaultdict(list))
    for file in sorted(stage.rglob("trajectories.jsonl")):
        name = next((part for part in file.parts if part.startswith("step-")), "sampling")
        for line in file.read_text().splitlines():
            record = json.loads(line)
            verdicts = tuple(map(Verdict.model_validate, record["verdicts"]))
            if verdicts and verdicts[-1].status != "infrastructure":
                steps[f"{label} {name}"][record["task_id"]].append(verdicts)
    return steps


def mean_text(values: Sequence[float]) -> str:
    """Return the mean of one value for each task, with its 95 % interval."""
    samples = bootstrap_counts(len(values)) @ np.array(values) / len(values)
    interval = percentile_interval(samples[1:])
    return f"{samples[0]:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def rewards(step: Step, turn: int) -> dict[str, float]:
    """Return the mean reward of the answers of the first turn (0) or the last one (-1) to each task."""
    return {task: statistics.fmean(one[turn].milestone for one in found) for task, found in step.items()}


def row(name: str, step: Step) -> list[str]:
    found = [verdicts for own in step.values() for verdicts in own]
    gains = [statistics.fmean(one[-1].milestone - one[0].milestone for one in own) for own in step.values()]
    ratios = [one.speedup.eager for verdicts in found for one in verdicts if one.speedup.eager is not None]
    widths = [ratio.high / ratio.low for ratio in ratios]
    return [
        name,
        str(len(found)),
        str(len(step)),
        mean_text(list(rewards(step, 0).values())),
        f"{statistics.fmean(one[0].status == 'correct' for one in found):.0%}",
        f"{statistics.fmean(one[0].milestone == 3 for one in found):.0%}",
        f"{statistics.fmean(map(len, found)):.1f}",
        mean_text(gains),
        f"{statistics.median(widths):.2f}" if widths else "",
    ]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", type=Path, nargs="+")
    stages = parser.parse_args().stages
    kinds = [stage.name.partition("-")[0] for stage in stages]
    steps: dict[str, Step] = {}
    for stage, kind in zip(stages, kinds, strict=True):
        steps |= steps_of(stage, kind if kinds.count(kind) == 1 else stage.name)
    if not steps:
        parser.error("the folders have no trajectories; give those of stages, such as HOME/stages/warmup-…")
    head = "step, trajectories, tasks, reward of first answers, correct, faster than both, verdicts".split(
        ", "
    )
    head += ["last turn over first", "ends of an interval"]
    print(table(head, [row(name, step) for name, step in steps.items()]))
    pairs = []
    for (earlier, one), (later, other) in itertools.combinations(steps.items(), 2):
        shared = sorted(one.keys() & other.keys())
        if shared:
            changes = [
                mean_text([rewards(other, turn)[task] - rewards(one, turn)[task] for task in shared])
                for turn in (0, -1)
            ]
            pairs.append([earlier, later, str(len(shared)), *changes])
    head = ["earlier", "later", "tasks of both", "change of first answers", "change of last answers"]
    print(f"\n{table(head, pairs)}")


if __name__ == "__main__":
    main()
