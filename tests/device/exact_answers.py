"""The correctness criterion on a device: exact answers are right, and twice the allowed error is wrong.

    python tests/device/exact_answers.py [--device cuda] [--calls 20] [--seeds 1] [--operators]
        [--only CHECK...]

Tries ten forms of which exact answers were once refused, reductions of rows of up to 2^20 elements, ten forms
in float16 and bfloat16 with their near-misses and, with --operators, every operator that tasks are composed
of. Needs torch and this project, no pytest. Ends with 1 if a property is broken.
"""

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))

import exactness

from components.core.config import resolve
from components.core.progress import Quiet
from components.synthesis.operator_table import load_operator_table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--calls", type=int, default=20, help="calls of each form and distribution")
    parser.add_argument("--seeds", type=int, default=1, help="repeat all with as many seeds")
    parser.add_argument("--operators", action="store_true", help="try the whole table of operators too")
    parser.add_argument("--only", nargs="+", metavar="CHECK", help="of forms, reductions, half, operators")
    options = parser.parse_args()
    params, broken = resolve("smoke", (f"device={options.device}",)).params, 0
    checks: dict[str, Callable[[int], exactness.Tally]] = {
        "forms": lambda seed: exactness.checked_forms(params, options.calls, seed, options.device),
        "reductions": lambda seed: exactness.checked_reductions(
            params, (1 << 10, 1 << 14, 1 << 17, 1 << 20), seed, options.device
        ),
        # The calls of a form are divided among the variants of its inputs.
        "half": lambda seed: exactness.checked_half(
            params, -(-options.calls // len(exactness.VARIANTS)), seed, options.device
        ),
    }
    if options.operators:
        with tempfile.TemporaryDirectory() as folder:
            templates = load_operator_table(Path(folder), Quiet()).templates
        checks["operators"] = lambda seed: exactness.checked_templates(
            templates, params, seed, options.device
        )
    for name, seed in itertools.product(options.only or checks, range(options.seeds)):
        began = time.monotonic()
        tally = checks[name](seed)
        broken += len(tally.wrong)
        print(
            f"{name:12} seed {seed}: {tally.calls} calls, {tally.flagged} outputs compared with float64, "
            f"{tally.inexact} beyond the tolerance, {len(tally.wrong)} wrong, "
            f"{time.monotonic() - began:.1f} s",
            flush=True,
        )
        print(*tally.wrong[:20], sep="\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
