"""Cost of Prefect, MLflow, DVC and the store for a run in which every stage is cached.

    python tests/bench/bench_overhead.py HOME [--set KEY=VALUE]...

The first run fills HOME (the reduced night of the tests) unless it has run there already. Then the record
of the run is taken away and the command is given again, by a new interpreter: it imports, resolves, starts
or finds Prefect's server, asks DVC, takes every stage from the cache and checks its files, logs to MLflow,
decides, reports and stores. Prints one JSON object. With PREFECT_API_URL and `--set
registry.tracking_uri=…` it measures a stack instead of the embedded defaults.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests" / "fixtures")]
NIGHT_SECONDS = 30 * 60
TIMES = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("home", type=Path, metavar="HOME")
    chosen, more = parser.parse_known_args()
    from run_fixtures import REDUCED, run, words  # needs the whole environment, which --help does not

    home = chosen.home.resolve()
    first = run(home, REDUCED, *more)
    assert first.code == 0, first.stderr_console
    seconds = []
    for _ in range(TIMES):
        (home / "runs" / first.record["run_id"] / "run.json").unlink()
        began = time.monotonic()
        again = subprocess.run(
            [sys.executable, "-m", "components.cli", *words(home, REDUCED, *more)],
            capture_output=True,
            text=True,
            check=False,
            cwd=PROJECT,
        )
        seconds.append(round(time.monotonic() - began, 2))
        assert again.returncode == 0 and all(
            stage["cached"] for stage in json.loads(again.stdout)["stages"]
        ), again.stderr
    best = min(seconds)
    print(
        json.dumps(
            {"cached_night_seconds": seconds, "share_of_a_30_minute_night": round(best / NIGHT_SECONDS, 4)}
        )
    )


if __name__ == "__main__":
    main()
