"""Comparing two runs: what differed, what was won and lost, and that chance is not called a difference."""

import itertools
import math
import random
from pathlib import Path

import pytest

from components.core.errors import UserError
from components.core.files import write_json
from components.evaluation.compare import Side, compare, open_side, paired_tests
from components.evaluation.metrics import summarise
from components.evaluation.results import Evaluation, TaskResult
from components.judge.verdict import Labels, Ratio, Speedup, WorkloadFigures


def result(index: int, speed: float = 2.0, status: str = "correct") -> TaskResult:
    ratio = Ratio(estimate=speed, low=speed, high=speed)
    return TaskResult.model_validate(
        {
            "task_id": f"t{index}",
            "name": f"task {index}",
            "status": status,
            "speedup": Speedup(eager=ratio, compile=ratio),
        }
    )


def evaluation(rows: list[TaskResult]) -> Evaluation:
    return Evaluation(
        suite="s",
        suite_digest="0",
        policy="p",
        policy_digest="1",
        device="cpu",
        precision="strict-fp32",
        epoch="e",
        seed=0,
        tasks=tuple(rows),
        overall=summarise(rows),
        levels={},
        errors=0,
    )


def side(name: str, rows: list[TaskResult], **rest: object) -> Side:
    return Side.model_validate({"name": name, "evaluation": evaluation(rows)} | rest)


def p_values(before: list[TaskResult], after: list[TaskResult]) -> dict[str, float]:
    return {test.name: test.p_value for test in paired_tests(list(zip(before, after, strict=True)))}


def test_what_differed_is_named() -> None:
    a = side(
        "a",
        [result(0)],
        params={"seed": 0, "warmup.steps": 4},
        dataset="d1",
        sources={"components/x.py": "1", "flows/y.py": "2"},
    )
    b = side(
        "b",
        [result(0)],
        params={"seed": 1, "warmup.steps": 4},
        dataset="d2",
        sources={"components/x.py": "9", "flows/y.py": "2"},
    )
    found = compare(a, b)
    assert (
        found.params == {"seed": (0, 1)}
        and found.code == ("components/x.py",)
        and found.dataset == ("d1", "d2")
        and found.unknown == ()
    )
    assert compare(a, a).params == {} and compare(a, a).dataset is None


def test_tasks_won_and_lost_are_those_whose_outcome_changed() -> None:
    before = [
        result(0, status="crashed"),
        result(1, 2.0),
        result(2, 2.0),
        result(3, 1.0),
        result(4, 2.0),
        result(5),
    ]
    after = [
        result(0, 2.0),
        result(1, status="wrong_output"),
        result(2, 2.02),
        result(3, 2.0),
        result(4, status="infrastructure"),
        result(5),
    ]
    changed = {
        change.task_id: (change.kind, change.before, change.after)
        for change in compare(side("a", before), side("b", after)).changed
    }
    assert changed == {
        "t0": ("won", "crashed", "2.00x eager"),
        "t1": ("lost", "2.00x eager", "wrong output"),
        "t3": ("won", "1.00x eager", "2.00x eager"),
    }


def test_mcnemar_gives_the_textbook_value() -> None:
    """1 lost and 9 won: 2 * (1 + 10) / 2^10."""
    before = [result(i, status="crashed" if i < 9 else "correct") for i in range(20)]
    after = [result(i, status="crashed" if i == 19 else "correct") for i in range(20)]
    assert p_values(before, after)["solved"] == pytest.approx(22 / 1024)


def test_sign_flips_are_counted_exactly_for_few_tasks() -> None:
    speeds = [1.3, 1.1, 0.9, 1.5, 1.2]
    logs = [math.log(speed) for speed in speeds]
    extreme = sum(
        abs(sum(s * d for s, d in zip(signs, logs, strict=True))) >= abs(sum(logs)) - 1e-12
        for signs in itertools.product((1, -1), repeat=5)
    )
    found = p_values([result(i, 1.0) for i in range(5)], [result(i, speed) for i, speed in enumerate(speeds)])
    assert found["speed-up against eager"] == pytest.approx(extreme / 32)


def test_chance_is_seldom_called_significant_and_a_real_gain_always_is() -> None:
    chance = random.Random(0)
    false_alarms = 0
    for _ in range(60):
        before, after = ([result(i, math.exp(chance.gauss(0, 0.3))) for i in range(30)] for _ in range(2))
        false_alarms += p_values(before, after)["speed-up against eager"] < 0.05
        faster = [result(i, math.exp(chance.gauss(0.4, 0.3))) for i in range(30)]
        assert p_values(before, faster)["speed-up against eager"] < 0.05
    assert false_alarms <= 8


def test_nothing_to_compare_is_no_difference() -> None:
    assert set(p_values([result(0)], [result(0)]).values()) == {1.0}
    with pytest.raises(UserError, match="no task in common"):
        compare(side("a", [result(0)]), side("b", [result(1)]))


def test_runs_are_found_by_the_beginning_of_their_id(tmp_path: Path) -> None:
    write_json(
        tmp_path / "stages" / "evaluation-1" / "results.json", evaluation([result(0)]).model_dump(mode="json")
    )
    for name in ("abc1", "abc2"):
        record = {
            "stages": [],
            "evaluation": {"results": "stages/evaluation-1/results.json"},
            "dataset": {"version": "d"},
        }
        write_json(tmp_path / "runs" / name / "run.json", record)
        write_json(
            tmp_path / "runs" / name / "settings.json",
            {"params": {"warmup": {"steps": int(name[-1])}}, "sources": {"x": "1"}},
        )
    found = compare(open_side(tmp_path, "abc1"), open_side(tmp_path, "abc2"))
    assert found.params == {"warmup.steps": (1, 2)} and found.unknown == ()
    assert open_side(tmp_path, str(tmp_path / "stages" / "evaluation-1")).dataset == ""
    number_as_path = '{"stages": [], "evaluation": {"results": 5}, "dataset": {"version": "d"}}'
    for number, damage in enumerate(("", "{", "[]", '{"stages": []}', number_as_path, "[" * 9999)):
        (tmp_path / "runs" / f"bad{number}").mkdir()
        (tmp_path / "runs" / f"bad{number}" / "run.json").write_text(damage)
        with pytest.raises(UserError, match=r"run\.json: not the record of a run; delete it"):
            open_side(tmp_path, f"bad{number}")
    for damage in ("{", "[1]", '{"params": [1]}', '{"sources": {"x": 5}}', "[" * 9999):
        (tmp_path / "runs" / "abc1" / "settings.json").write_text(damage)
        with pytest.raises(UserError, match=r"abc1/settings\.json: cannot be read or is damaged"):
            open_side(tmp_path, "abc1")
    for name, says in {
        "abc": "2 begin with it",
        "z": "no such finished run",
        "/etc": "no such finished run",
    }.items():
        with pytest.raises(UserError, match=says):
            open_side(tmp_path, name)


def test_other_labels_are_not_compared() -> None:
    one, other = side("a", [result(0)]), side("b", [result(0)])
    labelled = other.evaluation.model_copy(update={"labels": Labels(rules="any")})
    with pytest.raises(UserError, match=r"b: judged with rules any.*same labels"):
        compare(one, other.model_copy(update={"evaluation": labelled}))


def test_tasks_in_another_dtype_are_not_compared() -> None:
    one, other = side("a", [result(0)]), side("b", [result(0)])
    cast = other.evaluation.model_copy(update={"dtype": "bfloat16"})
    with pytest.raises(UserError, match=r"b: its tasks were cast to bfloat16.*evaluation\.dtype"):
        compare(one, other.model_copy(update={"evaluation": cast}))


def test_a_solution_that_is_slower_on_one_workload_is_not_called_faster() -> None:
    slow = WorkloadFigures(call="get_inputs(1)", speedup=result(0, 0.5).speedup)
    before = [result(index, 0.9) for index in range(8)]
    after = [result(index).model_copy(update={"workloads": (slow,)}) for index in range(8)]
    assert p_values(before, [result(index) for index in range(8)])["faster than eager"] < 0.05
    assert p_values(before, after)["faster than eager"] == 1
