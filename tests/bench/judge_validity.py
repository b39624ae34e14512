"""Validity of the judge's figures: equal code, a known difference, doubled work, a task's own code.

    python tests/bench/judge_validity.py [--device cuda] [REPEATS]

Both arms of a comparison are candidates that repeat the same work a given number of times, each in a runner
of its own, measured in the judge's own rounds and with its own estimator. On cpu, softmax over rows of 4,096
numbers is also judged with itself by the rules `any`, so that the ratio to eager should be 1 for every size.
"""

import argparse
import contextlib
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median, stdev

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))

import judge_fixtures as corpus
import numpy as np

from components.core.config import resolve
from components.core.task import KernelTask
from components.judge.baselines import NOOP
from components.judge.judge import Judge
from components.judge.measurement import Timed, median_seconds, speedup, timed_rounds
from components.judge.staged_inputs import StagedInputs
from components.judge.timed_runner import TimedRunner
from components.judge.verdict import MARGIN, Ratio
from components.sandbox.build import EXTENSION_SUFFIX
from components.sandbox.inside.runner_protocol import RoleHeader
from components.sandbox.runner_factory import sealed_file

RUNNER_SECONDS = 300
REPEATS_PER_RUNNER = 5
"""Fresh runners now and then: two processes of the same code can differ by where their memory lies."""


def small_task(device: str) -> KernelTask:
    return corpus.CUDA_TASK if device == "cuda" else corpus.TASK


def repeating(device: str, times: int) -> dict[str, str]:
    """A candidate that does the whole work of the small task `times` times in each call."""
    cuda = device == "cuda"
    header, name = ("answer.cuh", "forward.cu") if cuda else ("raw.h", "forward.cpp")
    call = "answer(t, stream);" if cuda else 'answer(t); asm volatile("" ::: "memory");'
    folder = corpus.HERE / ("exploits_cuda" if cuda else "exploits")
    kernel = f'#include "{header}"\nKERNEL(forward) {{ for (int i = 0; i < {times}; ++i) {{ {call} }} }}\n'
    return {
        "model_new.py": corpus.MODEL_NEW,
        f"kernels/{name}": kernel,
        f"kernels/{header}": (folder / header).read_text(),
    }


@contextlib.contextmanager
def pair(judge: Judge, first: dict[str, str], second: dict[str, str]) -> Iterator[list[TimedRunner]]:
    """Two candidates in runners of their own, on the small task."""
    arms: list[TimedRunner] = []
    with judge.bench(small_task(judge.params.device)) as bench:
        try:
            for files in (first, second):
                library = judge.builder.build(files).library
                assert library is not None
                header: RoleHeader = {
                    "role": "candidate",
                    "files": {"model_new.py": files["model_new.py"]},
                    "suffix": EXTENSION_SUFFIX,
                    "rules": "kernel-only",
                    "extensions": None,
                    "library_bytes": len(library),
                    "triton_bytes": 0,
                }
                with open(sealed_file(library), "rb") as file:
                    arms.append(TimedRunner(bench.reference, header, file.fileno(), seconds=RUNNER_SECONDS))
                arms[-1].verify("check")
                calls = bench.reference.layout.calls
                staged = StagedInputs(bench.reference, calls).hold(bench.reference.inputs.repeated(calls))
                arms[-1].round("time", staged)
            yield arms
        finally:
            for arm in arms:
                arm.close()


def measured(judge: Judge, arms: list[TimedRunner]) -> Ratio:
    """Seconds of the second arm over those of the first, as a verdict would say it."""
    with judge.bench(small_task(judge.params.device)) as bench:
        noop = bench.baselines.get(NOOP)
        staged = StagedInputs(bench.reference, bench.reference.layout.calls)
        arms_by_name: dict[Timed, TimedRunner] = {"candidate": arms[0], "eager": arms[1], "noop": noop}
        raw = timed_rounds(bench, arms_by_name, ["eager"], staged)
    return speedup(raw, "eager", judge.params.sandbox.process_spread)


@dataclass(frozen=True)
class Validity:
    """Comparisons of candidates whose true ratio of work is `true`, by their pair of processes."""

    true: float
    pairs: list[list[Ratio]]

    def __str__(self) -> str:
        ratios = [ratio for pair in self.pairs for ratio in pair]
        estimates = sorted(ratio.estimate for ratio in ratios)
        faster = sum(estimate > MARGIN for estimate in estimates)
        covered = sum(ratio.low <= self.true <= ratio.high for ratio in ratios)
        middle = estimates[len(estimates) // 2]
        between = [math.log(median(ratio.estimate for ratio in pair)) for pair in self.pairs]
        return (
            f"true {self.true:.3f}: median {middle:.3f} ({middle / self.true - 1:+.1%}), {estimates[0]:.3f}"
            f" to {estimates[-1]:.3f}; called more than 5 % faster {faster} of {len(estimates)}; interval"
            f" holds the truth {covered} of {len(estimates)}; between pairs of processes the log-ratio"
            f" differs by {stdev(between) if len(between) > 1 else math.nan:.4f} (process_spread)"
        )


def validity(judge: Judge, first: int, second: int, repeats: int) -> Validity:
    """`repeats` comparisons of `first` with `second` times the work."""
    one, other = repeating(judge.params.device, first), repeating(judge.params.device, second)
    pairs: list[list[Ratio]] = []
    for _ in range(math.ceil(repeats / REPEATS_PER_RUNNER)):
        with pair(judge, one, other) as arms:
            pairs.append([measured(judge, arms) for _ in range(REPEATS_PER_RUNNER)])
    return Validity(second / first, pairs)


FIXED_COST_WORK = (5, 10, 20, 40)


def fixed_cost(judge: Judge) -> str:
    """What a call costs besides its work: the line through the times of 5 to 40 times the work.

    A cost that does not grow with the work makes twice the work take less than twice the time.
    """
    seconds = []
    for times in FIXED_COST_WORK:
        files = repeating(judge.params.device, times)
        with pair(judge, files, files) as arms, judge.bench(small_task(judge.params.device)) as bench:
            noop = bench.baselines.get(NOOP)
            staged = StagedInputs(bench.reference, bench.reference.layout.calls)
            arms_by_name: dict[Timed, TimedRunner] = {"candidate": arms[0], "eager": arms[1], "noop": noop}
            raw = timed_rounds(bench, arms_by_name, ["eager"], staged)
        seconds.append((median_seconds(raw, "candidate") + median_seconds(raw, "eager")) / 2)
    slope, cost = np.polyfit(FIXED_COST_WORK, seconds, 1)
    times = ", ".join(f"{took * 1e6:.1f}" for took in seconds)
    return (
        f"{times} µs for {', '.join(map(str, FIXED_COST_WORK))} times the work: {slope * 1e6:.2f} µs each and"
        f" {cost * 1e6:.2f} µs besides, so twice the work of ten should read"
        f" {(20 * slope + cost) / (10 * slope + cost):.3f}"
    )


def own_code(judge: Judge, rows: int, repeats: int) -> str:
    """Return the geometric mean and the extremes of the ratios to eager of a task's own code as candidate."""
    module = (
        "import torch\n\nclass {}(torch.nn.Module):\n    def forward(self, x):\n        return x.softmax(1)\n"
    )
    inputs = f"def get_inputs():\n    return [torch.randn({rows}, 4096)]\n"
    code = f"{module.format('Model')}\n{inputs}\ndef get_init_inputs():\n    return []\n"
    ratios = []
    for number in range(repeats):
        files = {"model_new.py": f"{module.format('ModelNew')}# {number}\n"}
        speedup = judge.verdict(KernelTask(code=code), files, compare_compile=None).speedup.eager
        ratios.append(speedup.estimate if speedup else math.nan)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"{mean:.3f}, {min(ratios):.3f} to {max(ratios):.3f}"


def report(judge: Judge, repeats: int) -> None:
    """Equal code, 3 % and 10 % more work, twice the work, and the cost of a call besides its work."""
    pairs = (
        ("A/A", 10, 10),
        ("3 % more work", 33, 34),
        ("10 % more work", 10, 11),
        ("twice the work", 10, 20),
    )
    for name, first, second in pairs:
        print(f"{name}: {validity(judge, first, second, repeats)}", flush=True)
    print(f"cost of a call: {fixed_cost(judge)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("repeats", nargs="?", type=int, default=30, metavar="REPEATS")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(resolve("smoke", (f"device={chosen.device}",)).params, Path(folder))
        try:
            report(judge, chosen.repeats)
        finally:
            judge.close()
    if chosen.device == "cuda":
        return
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(resolve("ci", ("sandbox.rules=any",)).params, Path(folder))
        try:
            for rows in (1, 4, 16, 64, 256, 1024):
                print(f"{rows} rows, own code: {own_code(judge, rows, chosen.repeats)}", flush=True)
        finally:
            judge.close()


if __name__ == "__main__":
    main()
