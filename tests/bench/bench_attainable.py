"""The cost of a search of random schedules: judgements per second, and seconds of one judgement.

    python tests/bench/bench_attainable.py [--profile smoke] [--tasks 28] [--schedules 8] [--set KEY=VALUE]

The tasks are composed and admitted as those of a data set are; the time of that does not count.
"""

import argparse
import itertools
import tempfile
import time
from pathlib import Path

from components.core.config import resolve
from components.core.progress import Quiet
from components.evaluation.attainable import FINALISTS, search
from components.evaluation.captured_share import best_fixed_row, share_text
from components.judge.open_pool import open_pool
from components.synthesis.compose import compose_tasks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", default="smoke")
    parser.add_argument("--tasks", type=int, default=28)
    parser.add_argument("--schedules", type=int, default=8)
    parser.add_argument("--set", dest="sets", action="append", default=[])
    chosen = parser.parse_args()
    params = resolve(chosen.profile, tuple(chosen.sets)).params
    composed = compose_tasks(params.seed, params.data, params.device)
    tasks = list(itertools.islice((task for task in composed if task.split == "held_out"), chosen.tasks))
    with tempfile.TemporaryDirectory() as folder:
        pool = open_pool(params, Path(folder) / "verdicts")
        try:
            admissions = [pool.admit(task.code) for task in tasks]
            tasks = [
                task.model_copy(update={"evidence": admission.result().evidence})
                for task, admission in zip(tasks, admissions, strict=True)
            ]
            began = time.monotonic()
            found = search(
                tasks,
                params,
                pool,
                Path(folder) / "attainable",
                schedules=chosen.schedules,
                epoch="bench",
                progress=Quiet(),
                finalists=FINALISTS,
            )
        finally:
            pool.close()
        seconds = time.monotonic() - began
    assert found is not None
    fixed = best_fixed_row(found)
    print(
        f"{len(found.tasks)} tasks, {len(found.schedules)} of {found.space} schedules: {found.judgements} "
        f"judgements in {seconds:.0f} s, {found.judgements / seconds:.2f} a second, "
        f"{seconds / max(1, found.judgements):.2f} s each; {found.errors} errors"
    )
    if fixed is not None:
        print(f"best fixed schedule {fixed.choices}: captured share {share_text(fixed)}")


if __name__ == "__main__":
    main()
