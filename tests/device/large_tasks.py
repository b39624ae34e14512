"""Large tasks on a GPU: the verdicts in every placement of their data, and the memory that they take.

    python tests/device/large_tasks.py [--device cuda] [--gigabytes 6.4] [--seconds 600]

The corpus's small task with more rows is judged at --gigabytes for its input with the placement that the plan
chooses, limited to 96 GB and on the whole device, and in each placement at a quarter of a gigabyte. Needs
torch and this project, no pytest. Prints a table, with what used the device's memory when most of it was in
use. Ends with 1 unless every setting was begun within --seconds, every verdict is the expected one, no task
takes more device memory than planned, and the tasks of --gigabytes share buffers.
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
from device_memory import largest_use

from components.core.config import resolve
from components.core.task import KernelTask
from components.judge import memory_plan
from components.judge.judge import Judge
from components.judge.task_layout import PLACEMENTS, Placement

COLUMNS = 1024
# Round options for one round of each input distribution beside the first, which is not counted.
ROUNDS = ("sandbox.rounds=6", "sandbox.most_rounds=6")
LIMIT_BYTES = 96_000_000_000
CANDIDATES = {
    "cuda": (("honest_cuda", "float4", "correct"), ("exploits_cuda", "pointer_cache", "wrong_output")),
    "cpu": (("honest", "simd", "correct"), ("exploits", "pointer_cache", "wrong_output")),
}


def large_task(gigabytes: float) -> KernelTask:
    rows = max(1, int(gigabytes * 1e9 / 4 / COLUMNS))
    return KernelTask(code=corpus.CODE.replace("torch.randn(256, 1024)", f"torch.randn({rows}, {COLUMNS})"))


def check(
    device: str,
    gigabytes: float,
    device_bytes: int,
    placements: tuple[Placement, ...],
    *,
    must_share: bool = False,
) -> bool:
    """Judge the candidates on a task of this size, print a row for each, and return whether all is right.

    `must_share` tells whether a placement without shared buffers is wrong.
    """
    vars(memory_plan)["PLACEMENTS"] = placements
    sets = (
        f"device={device}",
        f"sandbox.device_bytes={device_bytes}",
        "sandbox.run_seconds=300",
        *ROUNDS,
    )
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
                shares = bool(found) and found[0].layout.placement.shares_buffers
                right = verdict.status == expected and used.bytes <= planned and (shares or not must_share)
                good = good and right
                ratio = verdict.speedup.eager
                print(
                    f"{'OK' if right else 'FAIL':4} {gigabytes:5.2f} GB  limit {device_bytes / 1e9:5.0f} GB"
                    f"  {name:14} {verdict.status} {verdict.reason:24}"
                    f" {f'{ratio.estimate:.2f}x' if ratio else '-':6} planned {planned / 1e9:6.1f} GB"
                    f"  used {used.bytes / 1e9:6.1f} GB  {took:5.1f} s  {placement}",
                    flush=True,
                )
                if device == "cuda":
                    print(f"     at most in use: {used}", flush=True)
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
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no other setting after so long"
    )
    chosen = parser.parse_args()
    end = time.monotonic() + chosen.seconds
    small, is_gpu = min(0.25, chosen.gigabytes), chosen.device == "cuda"
    settings = [
        (chosen.gigabytes, LIMIT_BYTES, PLACEMENTS, is_gpu),
        (chosen.gigabytes, 0, PLACEMENTS, is_gpu),
        *((small, 0, (placement,), False) for placement in PLACEMENTS),
    ]
    marks = []
    for gigabytes, limit, placements, must_share in settings:
        if time.monotonic() < end:
            marks.append(check(chosen.device, gigabytes, limit, placements, must_share=must_share))
    print(f"{sum(marks)} of {len(settings)} settings as expected, {len(settings) - len(marks)} not begun")
    return 0 if sum(marks) == len(settings) else 1


if __name__ == "__main__":
    sys.exit(main())
