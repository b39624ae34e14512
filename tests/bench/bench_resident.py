"""Seconds of `cuda-agent judge` with a judge of its own and with a resident judge, in one run.

    python tests/bench/bench_resident.py [--device cpu] [--repeats 3] [--home FOLDER]

The candidate is the template of agent_workdir. The first call of either kind also fills caches and is left
out. Prints the median of each row and its ratio to the first row.
"""

import argparse
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "components.cli")


def seconds(options: list[str], *more: str) -> float:
    """Return the seconds of one call that ends with a correct candidate."""
    started = time.perf_counter()
    done = subprocess.run(
        [*COMMAND, "judge", "agent_workdir", "--json", *options, *more],
        cwd=PROJECT,
        capture_output=True,
        check=True,
    )
    took = time.perf_counter() - started
    assert json.loads(done.stdout)["status"] == "correct", done.stdout
    return took


@contextlib.contextmanager
def resident(options: list[str]) -> Iterator[None]:
    """Run a resident judge inside the context."""
    process = subprocess.Popen([*COMMAND, "serve", *options], cwd=PROJECT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert any("judging on" in line for line in process.stderr), "the resident judge did not start"
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--home", type=Path)
    chosen = parser.parse_args()
    home = chosen.home or Path(tempfile.mkdtemp())
    options = ["--device", chosen.device, "--home", str(home)]
    rows: dict[str, list[float]] = {}

    def measure(name: str, *more: str) -> None:
        rows[name] = figures = [seconds(options, *more) for _ in range(chosen.repeats + 1)][1:]
        median, first = (statistics.median(row) for row in (figures, next(iter(rows.values()))))
        spread = f"({min(figures):.2f} to {max(figures):.2f})"
        print(f"{name:28}{median:7.2f} s{median / first:7.2f}  {spread}", flush=True)

    measure("own judge, --precise", "--precise")
    measure("own judge")
    with resident(options):
        measure("resident judge, --precise", "--precise")
        measure("resident judge")


if __name__ == "__main__":
    main()
