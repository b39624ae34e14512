"""Run one of the two DVC stages of dvc.yaml: mine the table of operators, or build the data set.

python -m components.synthesis.dvc_stages seeds --params params.yaml --out data/seeds
python -m components.synthesis.dvc_stages tasks --params params.yaml --seeds data/seeds --out data/tasks
"""

import argparse
import os
import sys
import traceback
from pathlib import Path

from components.core.config import resolve
from components.core.errors import IsolationUnavailable, UserError
from components.core.files import environment_fault
from components.core.params import Params
from components.core.progress import LineProgress

# Prefix of the last line of a failed stage, which says what is wrong and how to fix it.
ERROR_PREFIX = "error: "


def print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def seeds(params: Params, out: Path) -> str:
    """Mine the table of operators into the folder `out`, and return a line of text on the result.

    If data.operators is `core`, nothing is mined, the folder is only created, and torch is not imported.
    """
    out.mkdir(parents=True, exist_ok=True)
    if params.data.operators == "core":
        return "seeds: the core table, nothing to mine"
    from components.synthesis.operator_table import load_operator_table

    table = load_operator_table(out, LineProgress(print_line))
    return (
        f"seeds: {len(table.operators)} operators in {len(table.templates)} forms, "
        f"{len(table.modules)} modules; {len(table.left_out)} left out"
    )


def tasks(params: Params, seeds: Path, out: Path, verdicts: Path) -> str:
    """Compose tasks, judge them, write the data set to `out`, and return a line of text on the result.

    `seeds` is the folder with the table of mined operators, and `verdicts` that of the journal of verdicts.
    """
    from components.judge.pool.open_pool import open_pool
    from components.synthesis.dataset import build_dataset

    pool = open_pool(params, verdicts)
    try:
        summary = build_dataset(params, out, pool, LineProgress(print_line), seeds)
    finally:
        pool.close()
    refused = ", ".join(f"{reason} {count}" for reason, count in summary.reasons.items()) or "none"
    return (
        f"data set {summary.version[:16]}: {len(summary.admitted)} tasks of {summary.candidates} candidates; "
        f"refused: {refused}"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m components.synthesis.dvc_stages", description="A stage of dvc.yaml."
    )
    parser.add_argument("stage", choices=("seeds", "tasks"))
    parser.add_argument(
        "--params", type=Path, required=True, help="parameter file; its profiles do not count"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seeds", type=Path, default=Path("data/seeds"), help="folder of the mined table")
    parser.add_argument(
        "--verdicts",
        type=Path,
        default=Path(os.environ.get("CUDA_AGENT_VERDICTS", "verdicts")),
        help="journal of verdicts",
    )
    options = parser.parse_args(arguments)
    try:
        # No profile is used here, because every parameter must be decided by the file that DVC tracks and
        # that `dvc exp run -S` changes.
        params = resolve(path=options.params).params
        result = (
            seeds(params, options.out)
            if options.stage == "seeds"
            else tasks(params, options.seeds, options.out, options.verdicts)
        )
    except Exception as error:  # DVC passes on the output but not the exit code.
        sentence = str(error) if isinstance(error, UserError) else environment_fault(error)
        if not sentence:
            traceback.print_exc()
            sentence = f"{type(error).__name__}: {error}"
        print_line(f"{ERROR_PREFIX}{' '.join(sentence.split())}")
        return 3 if isinstance(error, IsolationUnavailable) else 2 if isinstance(error, UserError) else 1
    print_line(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
