"""Why run B beat run A: what differed in data, code and parameters, which tasks changed hands, and whether that is chance.

Both sides are paired by task. Yes-or-no outcomes are compared by McNemar's exact test: only the tasks on which the sides
differ count, and under chance each falls to either side like a coin. Speed-ups are compared by a sign-flip permutation
test on the log ratios of the tasks that both solved, exact up to 16 of them, sampled above. Neither assumes a shape.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from components.agent.reward import MARGIN
from components.core.errors import UserError
from components.core.files import read_json
from components.core.records import FrozenModel
from components.evaluation.metrics import BASELINES, Change, TaskResult, changes
from components.evaluation.results import RESULTS, Evaluation, load_evaluation, read_record

RUN_FILE, SETTINGS = "run.json", "settings.json"
SIGNIFICANT = 0.05
EXACT_UP_TO = 16
FLIPS = 20_000


class Side(FrozenModel):
    """One run or evaluation: its figures by task, and what it was made of (empty where it was not written down)."""

    name: str
    evaluation: Evaluation
    params: dict[str, Any] = Field(default_factory=dict)
    """By dotted key."""
    dataset: str = ""
    sources: dict[str, str] = Field(default_factory=dict)
    """Digest of every source file."""


class PairedTest(FrozenModel):
    """A paired test. `better` and `worse` are tasks on which B did better or worse than A."""

    name: str
    tasks: int
    better: int
    worse: int
    p_value: float

    @property
    def significant(self) -> bool:
        return self.p_value < SIGNIFICANT


class TaskChange(FrozenModel):
    """A task whose outcome differs: solved or not, or faster by more than the margin."""

    task_id: str
    name: str
    kind: Literal["won", "lost"]
    before: str
    after: str


class Comparison(FrozenModel):
    """How `second` differs from `first`."""

    first: str
    second: str
    dataset: tuple[str, str] | None
    """Both versions where they differ."""
    code: tuple[str, ...]
    """Source files that differ."""
    params: dict[str, tuple[Any, Any]]
    """Dotted key -> both values, where they differ; None where one side lacks it."""
    unknown: tuple[str, ...]
    """What could not be compared since a side did not write it down."""
    tasks: int
    """Tasks that both evaluated."""
    changes: dict[str, Change]
    """Second minus first, paired (geomeans: the ratio), with 95 % intervals."""
    tests: tuple[PairedTest, ...]
    changed: tuple[TaskChange, ...]


def open_side(home: Path, name: str) -> Side:
    """A run of `home` by the beginning of its id, or the folder of an evaluation; UserError when there is none, or two."""
    folder = Path(name)
    if (folder / RESULTS).is_file():
        return Side(name=name, evaluation=load_evaluation(folder), params=_plan(folder))
    beginning = f"{glob.escape(name)}*" if name and "/" not in name else ""
    found = (
        sorted(path for path in (home / "runs").glob(beginning) if (path / RUN_FILE).is_file())
        if beginning
        else []
    )
    found += (
        sorted(path for path in (home / "evaluations").glob(beginning) if (path / RESULTS).is_file())
        if beginning and not found
        else []
    )
    if len(found) != 1:
        what = f"{len(found)} begin with it" if found else "there is no such finished run or evaluation"
        raise UserError(f"{name}: {what} in {home}; give more of its id, or the folder of an evaluation.")
    if found[0].parent.name == "evaluations":
        return Side(name=found[0].name, evaluation=load_evaluation(found[0]), params=_plan(found[0]))
    record = read_record(found[0] / RUN_FILE)
    if "results" not in record["evaluation"]:
        raise UserError(
            f"{found[0] / RUN_FILE}: evaluation.results is missing, the run is of an older release; give the folder of its evaluation."
        )
    settings: dict[str, Any] = read_json(found[0] / SETTINGS) if (found[0] / SETTINGS).is_file() else {}
    return Side(
        name=found[0].name,
        evaluation=load_evaluation(home / record["evaluation"]["results"]),
        params=_flat(settings.get("params", {})),
        dataset=record["dataset"]["version"],
        sources=settings.get("sources", {}),
    )


def _plan(folder: Path) -> dict[str, Any]:
    """An evaluation's own parameters, as its plan names them."""
    plan: dict[str, Any] = read_json(folder / "plan.json") if (folder / "plan.json").is_file() else {}
    return _flat({key: value for key, value in plan.items() if key != "epoch"})


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {
            key: leaf for name, item in value.items() for key, leaf in _flat(item, f"{prefix}{name}.").items()
        }
    return {prefix.removesuffix("."): value}


def compare(first: Side, second: Side) -> Comparison:
    """How `second` differs from `first`; UserError when they have no task in common."""
    before = {row.task_id: row for row in first.evaluation.tasks}
    pairs = [(before[row.task_id], row) for row in second.evaluation.tasks if row.task_id in before]
    if not pairs:
        raise UserError(
            f"{second.name}: has no task in common with {first.name}; evaluate both on one suite with cuda-agent evaluate."
        )
    names = sorted(set(first.params) | set(second.params)) if first.params and second.params else []
    sources = sorted(set(first.sources) | set(second.sources)) if first.sources and second.sources else []
    known = {
        "parameters": first.params and second.params,
        "code": first.sources and second.sources,
        "data": first.dataset and second.dataset,
    }
    different = bool(first.dataset and second.dataset) and first.dataset != second.dataset
    return Comparison(
        first=first.name,
        second=second.name,
        dataset=(first.dataset, second.dataset) if different else None,
        code=tuple(name for name in sources if first.sources.get(name) != second.sources.get(name)),
        params={
            name: (first.params.get(name), second.params.get(name))
            for name in names
            if first.params.get(name) != second.params.get(name)
        },
        unknown=tuple(name for name, there in known.items() if not there),
        tasks=len(pairs),
        changes=changes([a for a, _ in pairs], [b for _, b in pairs]),
        tests=paired_tests(pairs),
        changed=tuple(found for a, b in pairs if (found := _changed(a, b)) is not None),
    )


def paired_tests(pairs: Sequence[tuple[TaskResult, TaskResult]]) -> tuple[PairedTest, ...]:
    """Paired tests of every outcome over (first, second) results of the same task. Tasks that the judge failed on are left out."""
    pairs = [(a, b) for a, b in pairs if not a.error and not b.error]
    found = [_mcnemar("solved", [(a.correct, b.correct) for a, b in pairs])]
    for baseline in BASELINES:
        fast = [((a.ratio(baseline) or 0) > 1, (b.ratio(baseline) or 0) > 1) for a, b in pairs]
        found.append(_mcnemar(f"faster than {baseline}", fast))
        ratios = [(a.ratio(baseline), b.ratio(baseline)) for a, b in pairs]
        found.append(
            _sign_flip(
                f"speed-up against {baseline}",
                [math.log(y / x) for x, y in ratios if x is not None and y is not None],
            )
        )
    return tuple(found)


def _mcnemar(name: str, outcomes: Sequence[tuple[bool, bool]]) -> PairedTest:
    """Exact, two-sided: the binomial tail of the discordant pairs, doubled."""
    better = sum(b and not a for a, b in outcomes)
    worse = sum(a and not b for a, b in outcomes)
    n = better + worse
    tail = sum(math.comb(n, k) for k in range(min(better, worse) + 1)) / 2**n
    return PairedTest(name=name, tasks=len(outcomes), better=better, worse=worse, p_value=min(1.0, 2 * tail))


def _sign_flip(name: str, differences: Sequence[float]) -> PairedTest:
    """Two-sided permutation test of the mean difference: under chance each difference could as well have the other sign."""
    better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    values = np.asarray(differences, dtype=float)
    n = len(values)
    if n <= EXACT_UP_TO:
        signs = np.array(list(product((1.0, -1.0), repeat=n))).reshape(2**n, n)
    else:
        drawn = np.random.default_rng(0).choice((1.0, -1.0), size=(FLIPS, n))
        # The observed order is one of the possible ones, so a p-value is never 0.
        signs = np.vstack([np.ones((1, n)), drawn])
    sums = np.abs(signs @ values)
    return PairedTest(
        name=name, tasks=n, better=better, worse=worse, p_value=float(np.mean(sums >= sums[0] - 1e-12))
    )


def _changed(a: TaskResult, b: TaskResult) -> TaskChange | None:
    """Whether B won or lost the task against A: by solving it, or by more than the margin of speed against eager."""
    if a.error or b.error:
        return None
    kind: Literal["won", "lost"] | None = None
    x, y = a.ratio("eager"), b.ratio("eager")
    if a.correct != b.correct:
        kind = "won" if b.correct else "lost"
    elif x is not None and y is not None and not 1 / MARGIN <= y / x <= MARGIN:
        kind = "won" if y > x else "lost"
    if kind is None:
        return None
    return TaskChange(
        task_id=b.task_id, name=b.name or " ".join(b.ops), kind=kind, before=_outcome(a), after=_outcome(b)
    )


def _outcome(row: TaskResult) -> str:
    ratio = row.ratio("eager")
    return f"{ratio:.2f}x eager" if ratio is not None else row.status.replace("_", " ")
