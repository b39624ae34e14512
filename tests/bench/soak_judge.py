"""Many evaluations in a row by one judge, a third of them hostile: does its memory grow, do descriptors leak?

    python tests/bench/soak_judge.py [N]

Prints resident memory, open descriptors, threads and living runners after the warm-up and at every tenth of
the way. Few rounds: nothing here is a timing.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))

import judge_fixtures as corpus
import psutil

from components.core.config import resolve
from components.core.errors import InfrastructureError
from components.judge.judge import Judge

HONEST = ("simd", "naive", "two_pass", "scratch_buffer", "static_output", "two_outputs")
HOSTILE = (
    "segfault",
    "native_exit",
    "stale_after_calls",
    "poisoned_parameters",
    "output_flood",
    "fork_symbol",
    "walls",
    "exit_at_import",
    "loud_neighbour",
)
WARM_UP = 30


def state(done: int, started: float) -> None:
    process = psutil.Process()
    runners = sum(
        p.info["uids"] is not None and p.info["uids"].real == 65534 for p in psutil.process_iter(["uids"])
    )
    resident = process.memory_info().rss / 2**20
    print(
        f"after {done:5}: {resident:7.1f} MiB resident, {process.num_fds()} descriptors,"
        f" {process.num_threads()} threads, {runners} processes of uid 65534,"
        f" {time.monotonic() - started:.0f} s",
        flush=True,
    )


def evaluate(judge: Judge, number: int) -> str:
    hostile = number % 3 == 2
    names = HOSTILE if hostile else HONEST
    group, name = ("exploits" if hostile else "honest"), names[number // 3 % len(names)]
    files = corpus.files(group, name)
    if number % 10 == 0:  # now and then a new text, so that builds and the build cache take part
        files |= {f: text + f"\n// {number}\n" for f, text in files.items() if f.endswith(".cpp")}
    try:
        return judge.verdict(corpus.task(group, name), files).status
    except InfrastructureError:
        return "infrastructure"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("count", nargs="?", type=int, default=1000, metavar="N")
    count = parser.parse_args().count
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(resolve("ci", ("sandbox.rounds=3", "sandbox.most_rounds=3")).params, Path(folder))
        try:
            for number in range(WARM_UP):
                evaluate(judge, number)
            started, said = time.monotonic(), Counter[str]()
            state(0, started)
            for number in range(count):
                said[evaluate(judge, number)] += 1
                if (number + 1) % max(1, count // 10) == 0:
                    state(number + 1, started)
        finally:
            judge.close()
    print(", ".join(f"{status} {times}" for status, times in sorted(said.items())))


if __name__ == "__main__":
    main()
