"""Judge each task of a suite against itself: a table of times, limits, and ratios that should be 1.

    python tests/device/suite_fairness.py SUITE OUT.csv [--profile h200] [--levels 1,2,3] [--seconds 3600] \
        [--workers 8] [--set KEY=VALUE]

The candidate of a task is the task's own module, judged by the rules `any` with weights by seed, so its
speed-up over eager is 1 if the judge is fair. The verdict also has the seconds of eager and of the fastest
mode of torch.compile, or with --set sandbox.compile_modes=default those of the default mode. Every fifth task
is judged first, then the others, so that a run that --seconds ends early has tasks of all kinds. A repeated
command judges the tasks that OUT.csv lacks, and those whose status is `infrastructure` again.

OUT.csv has a row for each task. `total_s` are the seconds from the task's source to the verdict while other
tasks are judged too, and `held_s` the seconds of exclusive use of the device. Prints for each level the tasks
by status, and of the ratio, the seconds of held device and the attained share of the limit the mean (that of
the ratio is geometric), the median and the extremes; then the tasks whose interval is more than 3 % away from
1. With --seconds 0 it judges nothing and prints the table of OUT.csv. Needs torch and this project, no
pytest.
"""

import argparse
import contextlib
import csv
import math
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from components.core.config import resolve
from components.core.errors import InfrastructureError
from components.core.records import Device
from components.core.task import KernelTask
from components.evaluation.suites import load_suite
from components.judge.device_scheduler import DeviceScheduler
from components.judge.judge import Judge
from components.judge.verdict import Verdict

COLUMNS = (
    *("level", "name", "status", "reason", "ratio", "low", "high"),
    *("eager_s", "compile_s", "limit_s", "attained", "total_s", "held_s"),
)
LABELS = ("sandbox.rules=any", "sandbox.weights=seed", "evaluation.dtype=float32")
# Largest distance of the end of an interval from 1 that is not printed.
MARGIN = 0.03


class CountingScheduler(DeviceScheduler):
    """Scheduler that counts for each thread the seconds for which it had the device to itself."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.held: Counter[int] = Counter()

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        is_inner = self._is_measuring
        with super().measuring():
            started = time.monotonic()
            try:
                yield
            finally:
                if not is_inner:
                    self.held[threading.get_ident()] += time.monotonic() - started


def row(task: KernelTask, verdict: Verdict, total: float, held: float) -> dict[str, object]:
    ratio, seconds = verdict.speedup.eager, verdict.seconds
    better = min((one for one in (seconds.eager, seconds.compile) if one), default=None)
    attained = seconds.limit / better if seconds.limit and better else None
    numbers = (
        *((ratio.estimate, ratio.low, ratio.high) if ratio else (None, None, None)),
        *(seconds.eager, seconds.compile, seconds.limit, attained, total, held),
    )
    shown = ["" if number is None else f"{number:.4g}" for number in numbers]
    return dict(zip(COLUMNS, (task.level, task.name, verdict.status, verdict.reason, *shown), strict=True))


def column(rows: Sequence[dict[str, str]], name: str) -> list[float]:
    """Return the numbers of a column in ascending order, without those of rows that have none."""
    return sorted(float(one[name]) for one in rows if one[name])


def print_table(out: Path) -> None:
    with out.open() as file:
        rows = list(csv.DictReader(file))
    for level in sorted({one["level"] for one in rows}):
        chosen = [one for one in rows if one["level"] == level]
        ratios, held, attained = (column(chosen, name) for name in ("ratio", "held_s", "attained"))
        counts = Counter(f"{one['status']} {one['reason']}".strip() for one in chosen)
        kinds = ", ".join(f"{number} {kind}" for kind, number in counts.most_common())
        compiled = [one for one in chosen if one["compile_s"] and one["eager_s"]]
        faster = sum(float(one["compile_s"]) < float(one["eager_s"]) for one in compiled)
        print(f"level {level}: {kinds}; torch.compile faster than eager {faster} of {len(compiled)}")
        for name, figures, digits in (("ratio", ratios, 4), ("held s", held, 1), ("attained", attained, 3)):
            if figures:
                mean = statistics.geometric_mean(figures) if name == "ratio" else statistics.mean(figures)
                shown = (mean, statistics.median(figures), figures[0], figures[-1])
                texts = " ".join(f"{figure:.{digits}f}" for figure in shown)
                print(f"  {name} of {len(figures)}: {texts}")
    for one in rows:
        if one["ratio"] and not float(one["low"]) - MARGIN <= 1 <= float(one["high"]) + MARGIN:
            print(f"level {one['level']} {one['name']}: {one['ratio']} [{one['low']}, {one['high']}]")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite")
    parser.add_argument("out", type=Path)
    parser.add_argument("--profile", default="h200")
    parser.add_argument("--levels", default="1,2,3")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no task after so long")
    parser.add_argument("--workers", type=int, default=8, help="tasks that are prepared at the same time")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE")
    chosen = parser.parse_args()
    if not chosen.seconds:
        print_table(chosen.out)
        return
    sets = (f"evaluation.suite={chosen.suite}", f"evaluation.levels=[{chosen.levels}]", *LABELS, *chosen.sets)
    params = resolve(chosen.profile, sets).params
    suite = load_suite(params, Path())
    kept: list[dict[str, str]] = []
    if chosen.out.exists():
        with chosen.out.open() as file:
            kept = [one for one in csv.DictReader(file) if one["status"] != "infrastructure"]
    known = {(one["level"], one["name"]) for one in kept}
    ordered = [task for offset in range(5) for task in suite[offset::5]]
    ordered = [task for task in ordered if (str(task.level), task.name) not in known]
    end = time.monotonic() + chosen.seconds
    with chosen.out.open("w") as file, tempfile.TemporaryDirectory() as folder:
        rows = csv.DictWriter(file, COLUMNS)
        rows.writeheader()
        rows.writerows(kept)
        file.flush()
        scheduler = CountingScheduler(params.device)
        with contextlib.closing(Judge(params, Path(folder), scheduler=scheduler)) as judge:
            scheduler.release_idle_memory = judge.bench_cache.close_unused

            def one(task: KernelTask) -> dict[str, object] | None:
                started, thread = time.monotonic(), threading.get_ident()
                before = scheduler.held[thread]
                if started > end:
                    return None
                files = {"model_new.py": f"{task.code}\n\nModelNew = Model\n"}
                try:
                    verdict = judge.verdict(task, files, compare_compile=True)
                except InfrastructureError as error:
                    verdict = Verdict(status="infrastructure", reason="judge", log=str(error))
                print(f"{task.level} {task.name} {verdict.status} {verdict.log[:300]}", flush=True)
                return row(task, verdict, time.monotonic() - started, scheduler.held[thread] - before)

            with ThreadPoolExecutor(chosen.workers) as workers:
                for found in workers.map(one, ordered):
                    if found is not None:
                        rows.writerow(found)
                        file.flush()
    print_table(chosen.out)


if __name__ == "__main__":
    main()
