"""What one call can gain on a GPU by answering for all calls of a round, and what prevents it costs.

    python tests/device/first_call.py [--repeats 20] [--modes round,call,single] [--skip-turns]

For each way of giving inputs (`MODES`) the exploits `batch` and `batch_weights` are judged
beside honest work of the same kind, then a kernel beside itself and beside 10 % more work on the small task,
whose interval and time show the price. At last the script measures what a round trip between two processes
costs if the first one uses the device in it, which decides whether a judge could copy inputs and outputs of
each call itself. Needs torch and this project, no pytest.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import judge_fixtures as corpus
import judge_validity
import torch

from components.core.config import resolve
from components.core.task import KernelTask
from components.judge.judge import Judge
from components.judge.verdict import Verdict

SMALL = corpus.task("honest_cuda", "small")
# Task, honest candidate and exploit, by what the exploit saves.
CASES: dict[str, tuple[KernelTask, str, str]] = {
    "launches, 64 KB a call": (SMALL, "small", "batch"),
    "launches, 8 MB a call": (corpus.CUDA_TASK, "plain", "batch"),
    "reading 64 MB of weights": (corpus.task("honest_cuda", "gemv"), "gemv", "batch_weights"),
}
# Parameters by the name of a way to give inputs; `single` has one call in each of many rounds.
MODES = {
    "round": ("sandbox.input_delivery=round",),
    "call": ("sandbox.input_delivery=call",),
    "single": (
        *("sandbox.input_delivery=round", "sandbox.sets_per_round=1", "sandbox.round_seconds=1e-6"),
        *("sandbox.rounds=48", "sandbox.most_rounds=384"),
    ),
}
TURNS = 300
SIZES = (1 << 13, 1 << 17, 1 << 20, 1 << 23)


def row(name: str, verdict: Verdict, took: float) -> str:
    eager, raw = verdict.speedup.eager, verdict.evidence.get("raw_seconds", {})
    noop = f"{1e6 * median(raw['noop']):6.1f} µs" if raw.get("noop") else "-"
    own = f"{1e6 * verdict.seconds.candidate:6.1f} µs" if verdict.seconds.candidate else "-"
    ratio = f"{eager.estimate:.2f} [{eager.low:.2f}, {eager.high:.2f}]" if eager else "-"
    return (
        f"  {name:24} {verdict.status + ' ' + verdict.reason:32.32} of eager {ratio:20} a call {own:10} no-op"
        f" {noop:10} {len(raw.get('noop', []))} rounds, {took:.1f} s"
    )


def gains(judge: Judge) -> None:
    """Print the verdicts of honest work and of the exploit on each task, and the gain of the latter."""
    for name, (task, honest, exploit) in CASES.items():
        print(f" {name}", flush=True)
        seconds = []
        for group, candidate in (("honest_cuda", honest), ("exploits_cuda", exploit)):
            began = time.monotonic()
            verdict = judge.verdict(task, corpus.files(group, candidate))
            print(row(f"{group}/{candidate}", verdict, time.monotonic() - began), flush=True)
            if verdict.log and verdict.status != "correct":
                print(f"    {verdict.log.strip()[-300:]}", flush=True)
            seconds.append(verdict.seconds.candidate)
        if seconds[0] and seconds[1]:
            print(f"  the exploit is {seconds[0] / seconds[1]:.2f} times as fast as honest work", flush=True)


def price(judge: Judge, repeats: int) -> None:
    """Print the accuracy of figures on the small task, and the seconds that a comparison takes."""
    judge_validity.small_task = lambda device: SMALL
    for name, first, second in (("A/A, one launch", 1, 1), ("A/A, ten launches", 10, 10), ("+10 %", 10, 11)):
        began = time.monotonic()
        found = judge_validity.validity(judge, first, second, repeats)
        widths = [ratio.high / ratio.low - 1 for pair in found.pairs for ratio in pair]
        took = (time.monotonic() - began) / len(widths)
        print(f"  {name}: {found}; interval {median(widths):.1%} wide; {took:.2f} s each", flush=True)


def answer_turns(connection: Connection) -> None:
    """Make one launch for each message and answer it, until the other end is closed."""
    values = torch.zeros(2048, device="cuda")
    torch.cuda.synchronize()
    connection.send_bytes(b"R")
    while connection.recv_bytes() == b"G":
        values.add_(1)
        torch.cuda.synchronize()
        connection.send_bytes(b"D")


def turns() -> None:
    """Print the median time of a round trip to another process that launches a kernel, by what is done in it.

    The other process works on the device between any two operations of this one.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=answer_turns, args=(theirs,), daemon=True)
    process.start()
    ours.recv_bytes()
    operations: dict[str, Callable[[], object]] = {"nothing": lambda: None}
    for size in SIZES:
        first, second = (torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2))
        host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        operations |= {
            f"kernel over {size >> 10} KB": lambda first=first: first.add_(1),
            f"copy on the device, {size >> 10} KB": lambda first=first, second=second: first.copy_(second),
            f"copy from pinned memory, {size >> 10} KB": lambda first=first, host=host: first.copy_(
                host, non_blocking=True
            ),
            f"copy to pinned memory, {size >> 10} KB": lambda first=first, host=host: host.copy_(
                first, non_blocking=True
            ),
        }
    for name, operation in operations.items():
        times = []
        for _ in range(TURNS):
            began = time.perf_counter()
            operation()
            torch.cuda.synchronize()
            ours.send_bytes(b"G")
            ours.recv_bytes()
            times.append(time.perf_counter() - began)
        low, high = (1e6 * sorted(times)[int(share * TURNS)] for share in (0.1, 0.9))
        print(
            f"  {name:36} {1e6 * median(times):7.1f} µs (10 to 90 %: {low:.1f} to {high:.1f})",
            flush=True,
        )
    ours.send_bytes(b"E")
    process.join()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=20, help="comparisons of each kind for the price")
    parser.add_argument("--modes", default=",".join(MODES), help="names of ways to give inputs")
    parser.add_argument("--skip-turns", action="store_true", help="leave out the round trips")
    chosen = parser.parse_args()
    for mode in chosen.modes.split(","):
        print(mode, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            judge = Judge(resolve("smoke", ("device=cuda", *MODES[mode])).params, Path(folder))
            try:
                gains(judge)
                price(judge, chosen.repeats)
            finally:
                judge.close()
    if not chosen.skip_turns:
        print("round trips", flush=True)
        turns()
    return 0


if __name__ == "__main__":
    sys.exit(main())
