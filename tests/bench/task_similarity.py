"""How similar composed tasks are to the programs of KernelBench: a histogram, and the most similar tasks.

    python tests/bench/task_similarity.py KERNELBENCH [--tasks 300] [--seed 1] [--device cuda]
        [--profile h20-pool] [--set KEY=VALUE]

KERNELBENCH is a checkout. The similarity of a task is that to its nearest program of all levels, from 0 to 1
(`components/synthesis/contamination.py`); `data.max_similarity` leaves out what is above it. Ends with 1 if a
task would be left out.
"""

import argparse
import collections
import itertools
import sys

from components.core.config import resolve
from components.synthesis.contamination import EvaluationPrograms
from components.synthesis.core_composer import compose_tasks


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernelbench")
    parser.add_argument("--tasks", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--profile", default="h20-pool")
    parser.add_argument("--set", action="append", default=[], dest="sets")
    asked = parser.parse_args()
    sets = ("data.operators=kernelbench", "data.half_share=0", *asked.sets)
    data = resolve(asked.profile, sets).params.data
    programs = EvaluationPrograms([asked.kernelbench])
    found = sorted(
        (*programs.nearest(task.code), " ".join(task.ops))
        for task in itertools.islice(compose_tasks(asked.seed, data, asked.device), asked.tasks)
    )
    counts = collections.Counter(int(10 * similarity) for similarity, _, _ in found)
    for tenth in sorted(counts):
        print(f"{tenth / 10:.1f} to {(tenth + 1) / 10:.1f}: {counts[tenth]}")
    for similarity, origin, operators in reversed(found[-5:]):
        print(f"{similarity:.3f}  {operators}  {origin}")
    print(f"{len(found)} tasks, {len(programs.programs)} programs, at most {found[-1][0]:.3f}")
    return int(found[-1][0] > data.max_similarity)


if __name__ == "__main__":
    sys.exit(main())
