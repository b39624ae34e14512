"""The correctness criterion on a device: exact answers are right, and twice the allowed error is wrong.

    python tests/device/exact_answers.py [--device cuda] [--calls 20] [--seed 0]

Needs torch and this project, no pytest; takes less than a minute on a GPU. Ends with 1 if a property is
broken.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))

import exactness

from components.core.config import resolve


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--calls", type=int, default=20, help="calls of each form and distribution")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    params, broken = resolve("smoke", (f"device={options.device}",)).params, 0
    for name, check in {
        "forms": lambda: exactness.checked_forms(params, options.calls, options.seed, options.device),
        "reductions": lambda: exactness.checked_reductions(
            params, (1 << 10, 1 << 17, 1 << 20), options.seed, options.device
        ),
    }.items():
        began = time.monotonic()
        tally = check()
        broken += len(tally.wrong)
        print(
            f"{name:12} {tally.calls} calls, {tally.flagged} outputs compared with float64, "
            f"{tally.inexact} beyond the tolerance, {len(tally.wrong)} wrong, "
            f"{time.monotonic() - began:.1f} s"
        )
        print(*tally.wrong[:20], sep="\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
