"""Large tasks on a GPU: the verdicts in every placement of their data, and the memory that they take.

    python tests/device/large_tasks.py [--device cuda] [--gigabytes 6.4]

The corpus's small task with more rows is judged in each placement at a quarter of a gigabyte for its input,
and at --gigabytes with the placement that the plan chooses, on the whole device and limited to 96 GB. Needs
torch and this project, no pytest. Prints a table and ends with 1 unless every verdict is the expected one and
no task takes more device memory than planned.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import judge_fixtures as corpus
from bench_baselines import largest_use

from components.core.config import resolve
from components.core.task import KernelTask
from components.judge import memory_plan
from components.judge.judge import Judge
from components.judge.task_layout import PLACEMENTS, Placement

COLUMNS = 1024
CANDIDATES = {
    "cuda": (("honest_cuda", "float4", "correct"), ("exploits_cuda", "pointer_cache", "wrong_output")),
    "cpu": (("honest", "simd", "correct"), ("exploits", "pointer_cache", "wrong_output")),
}


def large_task(gigabytes: float) -> KernelTask:
    rows = max(1, int(gigabytes * 1e9 / 4 / COLUMNS))
    return KernelTask(code=corpus.CODE.replace("torch.randn(256, 1024)", f"torch.randn({rows}, {COLUMNS})"))


def check(device: str, gigabytes: float, device_bytes: int, placements: tuple[Placement, ...]) -> bool:
    """Judge the candidates on a task of this size, print a row for each, and return whether all is right."""
    memory_plan.PLACEMENTS = placements
    sets = (f"device={device}", f"sandbox.device_bytes={device_bytes}", "sandbox.run_seconds=300")
    task, good = large_task(gigabytes), True
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(resolve("smoke", sets).params, Path(folder))
        try:
            for group, name, expected in CANDIDATES[device]:
                began = time.monotonic()
                with largest_use(device) as used:
                    verdict = judge.verdict(task, corpus.files(group, name))
                took = time.monotonic() - began
                found = [bench.reference for bench in judge.bench_cache.benches.values()]
                placement = str(found[0].layout.placement) if found else "-"
                planned = found[0].bytes if found else 0
                right = verdict.status == expected and (used[0] <= planned or device_bytes == 0)
                good = good and right
                ratio = verdict.speedup.eager
                print(
                    f"{'OK' if right else 'FAIL':4} {gigabytes:5.2f} GB  limit {device_bytes / 1e9:5.0f} GB"
                    f"  {name:14} {verdict.status} {verdict.reason:24}"
                    f" {f'{ratio.estimate:.2f}x' if ratio else '-':6} planned {planned / 1e9:6.1f} GB"
                    f"  used {used[0] / 1e9:6.1f} GB  {took:5.1f} s  {placement}",
                    flush=True,
                )
                if not right:
                    print("     " + verdict.log.strip()[-300:], flush=True)
        finally:
            judge.close()
    return good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--gigabytes", type=float, default=6.4)
    chosen = parser.parse_args()
    small = min(0.25, chosen.gigabytes)
    marks = [check(chosen.device, small, 0, (placement,)) for placement in PLACEMENTS]
    for limit in (0, 96_000_000_000):
        marks.append(check(chosen.device, chosen.gigabytes, limit, PLACEMENTS))
    print(f"{sum(marks)} of {len(marks)} settings as expected")
    return 0 if all(marks) else 1


if __name__ == "__main__":
    sys.exit(main())
