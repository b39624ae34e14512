"""Compare the data, code, parameters and results of two runs or evaluations, which are called sides.

The results of both sides are paired by task. Yes-or-no outcomes are compared using McNemar's exact test.
Speed-ups are compared using a sign-flip permutation test on the log ratios of the tasks that both sides
solved. The permutation test is exact if the ratios have at most SIGN_FLIPS combinations of signs, as those of
14 tasks have. Neither test assumes a normal distribution.
"""

import glob
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import scipy
from pydantic import BaseModel, Field

from components.core.config import flatten_values
from components.core.errors import UserError
from components.core.files import read_json
from components.core.records import FrozenModel, T, read_as
from components.evaluation.metrics import changes
from components.evaluation.results import (
    BASELINES,
    RESULTS,
    Estimate,
    Evaluation,
    TaskResult,
    load_evaluation,
    require_equal_labels,
)
from components.judge.verdict import MARGIN

RUN_FILE, SETTINGS, PLAN = "run.json", "settings.json", "plan.json"
SIGNIFICANT = 0.05
# Largest number of sign flips that are tried; if there are more, this number of them is drawn at random.
SIGN_FLIPS = 2**14


class Side(FrozenModel):
    """One run or evaluation: its results, and its parameters, data set and code if they were recorded.

    `name` is its id or its folder, for messages. `params` has the values of the parameters by dotted key,
    `dataset` is the version of the data set, and `sources` has the digests of the source files by path. Each
    of these three is empty if it was not recorded.
    """

    name: str
    evaluation: Evaluation
    params: dict[str, Any] = Field(default_factory=dict)
    dataset: str = ""
    sources: dict[str, str] = Field(default_factory=dict)


class Settings(BaseModel):
    """The content of settings.json: parameters in nested sections, and digests of source files by path."""

    params: dict[str, Any] = Field(default_factory=dict)
    sources: dict[str, str] = Field(default_factory=dict)


class PairedTest(FrozenModel):
    """Result of a two-sided paired test of two runs or evaluations, the first and the second side.

    `name` says what is compared, such as "solved". `tasks` is the number of tasks that were compared.
    `better` and `worse` are the numbers of tasks on which the second side did better or worse than the first.
    """

    name: str
    tasks: int
    better: int
    worse: int
    p_value: float

    @property
    def significant(self) -> bool:
        return self.p_value < SIGNIFICANT


class TaskChange(FrozenModel):
    """A task that was won or lost by the second of two runs or evaluations, which are called sides.

    A task is won if only the second side solved it, or if both solved it and the speed-up over eager of the
    second side is larger than the speed-up of the first side by more than the factor 1.05 (`MARGIN`). It is
    lost in the opposite cases. `before` and `after` describe the outcomes of the first and the second side,
    such as "1.20x eager" or "build failed".
    """

    task_id: str
    name: str
    kind: Literal["won", "lost"]
    before: str
    after: str


class Comparison(FrozenModel):
    """Differences between two runs or evaluations (sides), whose names are `first` and `second`.

    `dataset` (versions of both sides), `code` (paths of source files), `params` (values of both sides by
    dotted key) and `changed` (tasks) contain only differences; `dataset` is None if there is none. `unknown`
    lists which of "parameters", "code" and "data" were not recorded by both sides, so that they cannot be
    compared. `changes` has the paired differences of the figures by name, second minus first, or second over
    first for geometric means, with 95 % intervals. `tests` are the results of `paired_tests`. `tasks` is the
    number of tasks that both sides have.
    """

    first: str
    second: str
    dataset: tuple[str, str] | None
    code: tuple[str, ...]
    params: dict[str, tuple[Any, Any]]
    unknown: tuple[str, ...]
    tasks: int
    changes: dict[str, Estimate]
    tests: tuple[PairedTest, ...]
    changed: tuple[TaskChange, ...]


def open_side(home: Path, name: str) -> Side:
    """Load a finished run or evaluation.

    `name` is the folder of an evaluation, or the beginning of the id of a run or evaluation in `home`, the
    folder of all runs. Evaluations are searched only if no run has this beginning. Raises UserError if none
    is found, if more than one run or more than one evaluation is found, or if the record is damaged.
    """
    if (Path(name) / RESULTS).is_file():
        return _evaluation_side(name, Path(name))
    folders: list[Path] = []
    if name and "/" not in name:
        pattern = f"{glob.escape(name)}*"
        folders = sorted(file.parent for file in (home / "runs").glob(f"{pattern}/{RUN_FILE}")) or sorted(
            file.parent for file in (home / "evaluations").glob(f"{pattern}/{RESULTS}")
        )
    if len(folders) != 1:
        what = f"{len(folders)} begin with it" if folders else "there is no such finished run or evaluation"
        raise UserError(f"{name}: {what} in {home}; give more of its id, or the folder of an evaluation.")
    folder = folders[0]
    if folder.parent.name == "evaluations":
        return _evaluation_side(folder.name, folder)
    record = read_record(folder / RUN_FILE)
    settings = _read_if_there(Settings, folder / SETTINGS)
    return Side(
        name=folder.name,
        evaluation=load_evaluation(home / record["evaluation"]["results"]),
        params=flatten_values(settings.params),
        dataset=record["dataset"]["version"],
        sources=settings.sources,
    )


def read_record(file: Path) -> dict[str, Any]:
    """Return the contents of `file`, the run.json of a finished run.

    Raises UserError if the file is damaged or lacks the stages, the evaluation's results or the version of
    the data set, and OSError if it cannot be read.
    """
    try:
        record: dict[str, Any] = read_json(file)
        # This raises TypeError unless all of these are texts.
        "".join(
            [
                record["evaluation"]["results"],
                record["dataset"]["version"],
                *(stage["checkpoint"] for stage in record["stages"]),
            ]
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{file}: not the record of a run; delete it, and the same cuda-agent run writes it anew "
            f"from what the home holds."
        ) from error
    return record


def _evaluation_side(name: str, folder: Path) -> Side:
    plan: dict[str, Any] = _read_if_there(dict, folder / PLAN)
    params = {key: value for key, value in flatten_values(plan).items() if key != "epoch"}
    return Side(name=name, evaluation=load_evaluation(folder), params=params)


def _read_if_there(kind: type[T], file: Path) -> T:
    """Return the content of a JSON file as a value of the class `kind`; without the file, `kind()`."""
    remedy = "delete it, and the rest is compared without the parameters"
    return read_as(kind, file, remedy) if file.is_file() else kind()


def compare(first: Side, second: Side) -> Comparison:
    """Return how the second of two runs or evaluations differs from the first.

    Parameters, code and data are compared, and the results on the tasks that both have. Raises UserError if
    they have no task in common, or if they were judged with different labels (`judge.verdict.Labels`, the
    rules of the judge) or on tasks that were cast to different dtypes.
    """
    require_equal_labels(second.name, second.evaluation, first.name, first.evaluation)
    earlier = {row.task_id: row for row in first.evaluation.tasks}
    pairs = [(earlier[row.task_id], row) for row in second.evaluation.tasks if row.task_id in earlier]
    if not pairs:
        raise UserError(
            f"{second.name}: has no task in common with {first.name}; "
            "evaluate both on one suite with cuda-agent evaluate."
        )
    recorded = {
        "parameters": first.params and second.params,
        "code": first.sources and second.sources,
        "data": first.dataset and second.dataset,
    }
    other_data = recorded["data"] and first.dataset != second.dataset
    return Comparison(
        first=first.name,
        second=second.name,
        dataset=(first.dataset, second.dataset) if other_data else None,
        code=tuple(_differences(first.sources, second.sources)),
        params=_differences(first.params, second.params),
        unknown=tuple(name for name, present in recorded.items() if not present),
        tasks=len(pairs),
        changes=changes([a for a, _ in pairs], [b for _, b in pairs]),
        tests=paired_tests(pairs),
        changed=tuple(change for a, b in pairs if (change := _changed(a, b)) is not None),
    )


def _differences(first: dict[str, Any], second: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the pair of the values of the first and the second side for each key whose values differ.

    A side is one of the compared runs or evaluations. A value is None if the side lacks the key. The result
    is empty if one of the mappings is empty, because that side did not record the values then.
    """
    keys = sorted(first.keys() | second.keys()) if first and second else []
    return {key: (first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)}


def paired_tests(pairs: Sequence[tuple[TaskResult, TaskResult]]) -> tuple[PairedTest, ...]:
    """Test whether two sides differ in tasks solved, in tasks faster than a baseline, and in speed-up.

    `pairs` are the results of the first and the second side (compared runs or evaluations) on each task.
    Tasks on which the judge or the policy's server failed are left out. Returns the test on solved tasks and,
    for each of the baselines eager and torch.compile, one on faster tasks and one on speed-ups.
    """
    pairs = [(a, b) for a, b in pairs if not a.error and not b.error]
    tests = [_mcnemar("solved", [(a.correct, b.correct) for a, b in pairs])]
    for baseline in BASELINES:
        ratios = [(a.ratio(baseline), b.ratio(baseline)) for a, b in pairs]
        faster = [(a.ratio_everywhere(baseline) > 1, b.ratio_everywhere(baseline) > 1) for a, b in pairs]
        differences = [math.log(y / x) for x, y in ratios if x is not None and y is not None]
        tests += [
            _mcnemar(f"faster than {baseline}", faster),
            _sign_flip(f"speed-up against {baseline}", differences),
        ]
    return tuple(tests)


def _mcnemar(name: str, outcomes: Sequence[tuple[bool, bool]]) -> PairedTest:
    """Return the result of McNemar's exact two-sided test on pairs of yes-or-no outcomes.

    `name` becomes the name of the result. Each pair has the outcomes of the first and the second side
    (compared runs or evaluations) on one task. The test is a sign test of the pairs whose outcomes differ.
    The p-value is 1 if there are none.
    """
    better = sum(b and not a for a, b in outcomes)
    worse = sum(a and not b for a, b in outcomes)
    p_value = float(scipy.stats.binomtest(better, better + worse).pvalue) if better or worse else 1.0
    return PairedTest(name=name, tasks=len(outcomes), better=better, worse=worse, p_value=p_value)


def _sign_flip(name: str, differences: Sequence[float]) -> PairedTest:
    """Return the result of a two-sided permutation test of the mean of paired differences.

    `name` becomes the name of the result. There is a difference for each task, and a positive one means that
    the second of the compared sides is better. Under the null hypothesis, each difference has either sign
    with equal probability. With fewer than two differences the p-value is 1.
    """
    values = np.asarray(differences, dtype=float)
    found = (
        scipy.stats.permutation_test(
            (values,),
            np.mean,
            permutation_type="samples",
            vectorized=True,
            n_resamples=SIGN_FLIPS,
            batch=2**10,
            rng=0,
        )
        if len(values) > 1
        else None
    )
    return PairedTest(
        name=name,
        tasks=len(values),
        better=int(np.sum(values > 0)),
        worse=int(np.sum(values < 0)),
        p_value=1.0 if found is None else float(found.pvalue),
    )


def _changed(a: TaskResult, b: TaskResult) -> TaskChange | None:
    """Return the record of a task that was won or lost, as `TaskChange` defines it.

    `a` and `b` are the results on the task of the first and the second of the compared runs or evaluations.
    Returns None if the task was neither won nor lost, or if the judge or the policy's server failed on it.
    """
    if a.error or b.error:
        return None
    x, y = a.ratio("eager"), b.ratio("eager")
    if a.correct != b.correct:
        won = b.correct
    elif x is not None and y is not None and not 1 / MARGIN <= y / x <= MARGIN:
        won = y > x
    else:
        return None
    return TaskChange(
        task_id=b.task_id,
        name=b.name or " ".join(b.ops),
        kind="won" if won else "lost",
        before=_outcome(a),
        after=_outcome(b),
    )


def _outcome(row: TaskResult) -> str:
    ratio = row.ratio("eager")
    return f"{ratio:.2f}x eager" if ratio is not None else row.status.replace("_", " ")
