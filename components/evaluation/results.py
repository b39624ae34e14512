"""Record of one evaluation, and functions that read the records of evaluations and runs."""

from pathlib import Path
from typing import Any

from components.core.errors import UserError
from components.core.files import read_json
from components.core.records import FrozenModel
from components.evaluation.metrics import Summary, TaskResult

RESULTS = "results.json"


class Evaluation(FrozenModel):
    """Record of one evaluation, which is the contents of results.json."""

    suite: str
    # Digest of the task ids in order. Two evaluations with equal digests have the same tasks.
    suite_digest: str
    policy: str
    policy_digest: str
    device: str
    precision: str
    epoch: str
    seed: int
    tasks: tuple[TaskResult, ...]
    overall: Summary
    levels: dict[str, Summary]
    # Number of tasks on which the judge itself failed, so that they were neither solved nor failed.
    errors: int


def read_record(file: Path) -> dict[str, Any]:
    """Return the contents of `file`, the run.json of a finished run.

    Raises UserError if the file is damaged.
    """
    try:
        record: dict[str, Any] = read_json(file)
        _ = record["stages"], record["evaluation"].keys(), record["dataset"]["version"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file}: not the record of a run; delete it, and the same cuda-agent run writes it anew "
            f"from what the home holds."
        ) from error
    return record


def load_evaluation(path: Path) -> Evaluation:
    """Return the evaluation in `path`, which is a results.json or the folder that contains it.

    Raises UserError if the file is missing or damaged.
    """
    file = path / RESULTS if path.is_dir() else path
    try:
        return Evaluation.model_validate(read_json(file))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file}: not the results of an evaluation ({str(error).splitlines()[0]}); evaluate again "
            f"into an empty folder."
        ) from error
