"""Metrics, suites and the evaluation's durability."""

import contextlib
import math
import pickle
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from components.core.config import resolve
from components.core.errors import UserError
from components.core.params import Params
from components.core.task import KernelTask, write_tasks
from components.evaluation.evaluate import claim
from components.evaluation.metrics import by_level, changes, summarise
from components.evaluation.results import Attempt, TaskResult
from components.evaluation.suites import load_suite
from components.judge.verdict import Ratio, Speedup, Verdict, milestone

TASK = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x) * {factor}

def get_inputs():
    return [torch.rand(8, 8)]

def get_init_inputs():
    return []
"""


def ratio(estimate: float | None) -> Ratio | None:
    return None if estimate is None else Ratio(estimate=estimate, low=estimate * 0.9, high=estimate * 1.1)


def result(
    index: int,
    status: str = "correct",
    eager: float | None = None,
    compile: float | None = None,
    **rest: object,
) -> TaskResult:
    speedup = Speedup(eager=ratio(eager), compile=ratio(compile))
    return TaskResult.model_validate(
        {
            "task_id": f"t{index}",
            "status": status,
            "milestone": milestone(Verdict(status=status, speedup=speedup)),
            "speedup": speedup.model_dump(),
            **rest,
        }
    )


FOUR = [
    result(0, eager=4.0, compile=2.0),
    result(1, eager=1.02, compile=0.5),
    result(2, eager=0.5),
    result(3, status="wrong_output", eager=9.0, compile=9.0),
]


def test_a_summary_can_be_sent_to_another_process() -> None:
    found = summarise([])
    assert pickle.loads(pickle.dumps(found)) == found


def test_golden_figures_of_four_tasks() -> None:
    summary = summarise(FOUR)
    assert (summary.tasks, summary.correct, summary.errors) == (4, 3, 0)
    assert summary.pass_rate == 0.75
    assert (summary.faster_rate.eager, summary.faster_rate.compile) == (0.5, 0.25)
    assert (summary.beyond_margin.eager, summary.beyond_margin.compile) == (0.25, 0.25)
    assert summary.geomean.eager == pytest.approx((4 * 1.02 * 0.5) ** (1 / 3))
    assert summary.geomean.compile == pytest.approx(1.0)
    assert (summary.geomean_over.eager, summary.geomean_over.compile) == (3, 2)
    assert summary.fast_p.eager == (0.75, 0.5, 0.5, 0.5, 0.25, 0.25)
    assert summary.fast_p.compile == (0.75, 0.25, 0.25, 0.25, 0.25, 0.0)
    assert summary.mean_reward == pytest.approx((3 + 1 + 1 - 1) / 4)
    assert summary.milestones == {"-1": 1, "1": 2, "2": 0, "3": 1}


def test_a_wrong_answer_is_never_fast() -> None:
    summary = summarise([result(0, status="wrong_output", eager=100.0, compile=100.0)])
    assert summary.faster_rate.eager == 0
    assert summary.geomean.eager is None


def test_exactly_as_fast_is_not_faster() -> None:
    assert summarise([result(0, eager=1.0, compile=1.0)]).faster_rate.eager == 0


def test_an_infrastructure_failure_stays_in_the_denominator_and_is_counted_apart() -> None:
    summary = summarise([result(0, eager=2.0, compile=2.0), result(1, status="infrastructure")])
    assert summary.errors == 1
    assert summary.pass_rate == 0.5
    assert summary.mean_reward == 3, "nobody is charged for the judge's own fault"
    assert sum(summary.milestones.values()) == 1


@pytest.mark.parametrize("extreme", [0.01, 20.0])
def test_the_geometric_mean_of_a_full_suite_does_not_overflow(extreme: float) -> None:
    assert summarise([result(i, eager=extreme) for i in range(250)]).geomean.eager == pytest.approx(extreme)


@pytest.mark.parametrize("broken", [0.0, math.inf, math.nan])
def test_a_ratio_that_cannot_be_is_not_fast(broken: float) -> None:
    summary = summarise([result(0, eager=broken)])
    assert summary.faster_rate.eager == 0
    assert summary.geomean_over.eager == 0


def test_intervals_hold_the_figure_and_narrow_with_more_tasks() -> None:
    few, many = (
        summarise(FOUR),
        summarise([result(i, status="correct" if i % 4 else "crashed") for i in range(400)]),
    )
    for summary in (few, many):
        interval = summary.intervals["pass_rate"]
        assert interval.low is not None and interval.high is not None and summary.pass_rate is not None
        assert interval.low <= summary.pass_rate <= interval.high
    wide, narrow = few.intervals["pass_rate"], many.intervals["pass_rate"]
    assert (wide.high or 0) - (wide.low or 0) > 3 * ((narrow.high or 0) - (narrow.low or 0))
    # Binomial reference: 1.96 * sqrt(.75 * .25 / 400) = 0.042 on either side.
    assert narrow.low == pytest.approx(0.75 - 0.042, abs=0.01)


def test_all_of_a_few_do_not_prove_all() -> None:
    """Clopper and Pearson's bounds for 7 of 7 and 0 of 7; a plain bootstrap would say [1, 1] and [0, 0]."""
    summary = summarise([result(i) for i in range(7)])
    assert summary.intervals["pass_rate"].low == pytest.approx(0.590, abs=0.001)
    assert summary.intervals["faster_rate.eager"].high == pytest.approx(0.410, abs=0.001)


def test_figures_do_not_depend_on_the_order_of_tasks() -> None:
    assert summarise(FOUR).model_dump(exclude={"intervals"}) == summarise(FOUR[::-1]).model_dump(
        exclude={"intervals"}
    )


def test_equal_results_give_equal_intervals() -> None:
    assert summarise(FOUR) == summarise(FOUR)


def test_json_rows_summarise_like_records() -> None:
    rows = [TaskResult.model_validate(row.model_dump(mode="json")) for row in FOUR]
    assert summarise(rows) == summarise(FOUR)


def test_no_tasks_give_no_figures() -> None:
    summary = summarise([])
    assert summary.tasks == 0 and summary.pass_rate is None and summary.geomean.eager is None


def test_pass_at_k_is_the_unbiased_estimate() -> None:
    def tries(*passed: bool) -> tuple[Attempt, ...]:
        return tuple(Attempt(status="correct" if p else "crashed", reward=1 if p else -1) for p in passed)

    rows = [
        result(0).model_copy(update={"attempts": tries(True, False)}),
        result(1).model_copy(update={"attempts": tries(False, False)}),
    ]
    summary = summarise(rows)
    assert summary.pass_at == {"1": 0.25, "2": 0.5}
    assert summary.attempts_pass_rate == 0.25
    assert summary.attempts_mean_reward == -0.5


def test_levels_are_summarised_apart() -> None:
    levels = by_level(
        [result(0, level=1), result(1, level=2), result(2, status="crashed", level=2), result(3)]
    )
    assert list(levels) == ["1", "2"]
    assert levels["2"].pass_rate == 0.5


def test_a_paired_change_cancels_the_difficulty_of_tasks() -> None:
    before = [result(i, status="correct" if i % 2 else "crashed") for i in range(40)]
    after = [result(i, status="correct" if i % 2 or i == 0 else "crashed") for i in range(40)]
    change = changes(before, after)["pass_rate"]
    assert change.value == pytest.approx(1 / 40)
    assert change.low == 0 and change.high is not None and change.high < 0.1, (
        "one task changed; unpaired the interval would be 0.4 wide"
    )
    assert changes(FOUR, FOUR)["geomean.eager"].value == pytest.approx(1)


def test_a_task_that_the_judge_failed_on_is_no_change() -> None:
    after = [result(i, status="infrastructure" if i % 2 else "correct") for i in range(8)]
    change = changes([result(i) for i in range(8)], after)["pass_rate"]
    assert (change.value, change.low, change.high) == (0, 0, 0)


def suite_params(suite: str) -> Params:
    params = resolve("ci").params
    return params.model_copy(update={"evaluation": params.evaluation.model_copy(update={"suite": suite})})


def test_held_out_is_the_held_out_split(tmp_path: Path) -> None:
    tasks = [KernelTask(code=TASK.format(factor=i), split="held_out" if i % 2 else "train") for i in range(4)]
    write_tasks(tmp_path / "tasks.parquet", tasks)
    found = load_suite(suite_params("held-out"), tmp_path)
    assert [task.task_id for task in found] == [tasks[1].task_id, tasks[3].task_id]
    assert load_suite(suite_params("held-out"), tmp_path / "tasks.parquet") == found


def test_a_kernelbench_checkout_has_levels_and_numeric_order(tmp_path: Path) -> None:
    for level, names in {1: ["10_B", "2_A"], 3: ["1_C"]}.items():
        folder = tmp_path / "KernelBench" / f"level{level}"
        folder.mkdir(parents=True)
        for name in names:
            (folder / f"{name}.py").write_text(TASK.format(factor=len(name) + level))
    for root in (tmp_path, tmp_path / "KernelBench"):
        assert [(task.level, task.name) for task in load_suite(suite_params(str(root)), tmp_path)] == [
            (1, "2_A"),
            (1, "10_B"),
            (3, "1_C"),
        ]


def test_the_hugging_face_layout_loads_like_the_checkout(tmp_path: Path) -> None:
    rows = {
        "code": [TASK.format(factor=2), TASK.format(factor=1)],
        "level": [2, 1],
        "name": ["1_B", "7_A.py"],
        "problem_id": [1, 7],
    }
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "suite.parquet")
    assert [
        (task.level, task.name)
        for task in load_suite(suite_params(str(tmp_path / "suite.parquet")), tmp_path)
    ] == [(1, "7_A"), (2, "1_B")]


def test_a_hugging_face_snapshot_has_a_file_for_each_level(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for level in (2, 1, 4):
        rows = {
            "code": [TASK.format(factor=level)],
            "level": [level],
            "name": [f"{level}_A"],
            "problem_id": [level],
        }
        pyarrow.parquet.write_table(
            pyarrow.table(rows), tmp_path / "data" / f"level_{level}-00000-of-00001.parquet"
        )
    assert [(task.level, task.name) for task in load_suite(suite_params(str(tmp_path)), tmp_path)] == [
        (1, "1_A"),
        (2, "2_A"),
        (4, "4_A"),
    ]


def test_public_columns_and_plain_folders_load(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(
        pyarrow.table({"ops": [["relu"]], "data_source": ["x"], "code": [TASK.format(factor=3)]}),
        tmp_path / "ops.parquet",
    )
    assert load_suite(suite_params(str(tmp_path / "ops.parquet")), tmp_path)[0].ops == ("relu",)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.py").write_text(TASK.format(factor=4))
    (tmp_path / "folder" / "._a.py").write_bytes(b"\xff")  # as archives of macOS have them
    assert load_suite(suite_params(str(tmp_path / "folder")), tmp_path)[0].name == "a"


@pytest.mark.parametrize(
    ("files", "suite", "says"),
    [
        ({}, "nowhere", "nor a folder"),
        ({}, "KernelBench", "git clone https://github.com/ScalingIntelligence/KernelBench"),
        ({}, ".", "holds no task"),
        ({"a.py": "x = 1"}, ".", "add Model, get_inputs(), get_init_inputs()"),
        ({"a.py": "def"}, ".", "not valid Python"),
        ({"s.parquet": "rubbish"}, "s.parquet", "not a readable parquet"),
    ],
)
def test_nonsense_is_refused_with_the_mend(
    tmp_path: Path, files: dict[str, str], suite: str, says: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as error:
        load_suite(suite_params(str(tmp_path / suite)), tmp_path)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"level": [1, 2]}, ""),
        ({"level": [None, 2]}, ""),
        ({"level": ["x", "2"]}, "row 0 is no task (level: Input should be a valid integer"),
        ({"level": [1, 2], "code": [TASK.format(factor=2), None]}, "row 1 is no task (code: Input should be"),
        ({"level": [1, 2], "name": [None, "b"]}, ""),
        ({"level": [1, 2], "name": [3, 4]}, "row 0 is no task (name: Input should be a valid string)"),
        ({"ops": [5, None]}, ""),
        ({"ops": ["5", "['relu']"]}, ""),
    ],
)
def test_a_value_of_a_parquet_file_that_is_none_is_named(
    tmp_path: Path, columns: dict[str, Any], says: str
) -> None:
    rows = {"code": [TASK.format(factor=2), TASK.format(factor=1)], "name": ["a", "b"]} | columns
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "suite.parquet")
    with pytest.raises(UserError) if says else contextlib.nullcontext() as error:
        assert len(load_suite(suite_params(str(tmp_path / "suite.parquet")), tmp_path)) == 2
    assert error is None or says in str(error.value)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 9999])
def test_a_damaged_plan_of_an_evaluation_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UserError, match=r"plan\.json: cannot be read or is damaged .*; delete its folder"):
        claim(tmp_path, {"seed": 1})


def test_a_data_set_without_held_out_tasks_is_refused(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks.parquet", [KernelTask(code=TASK.format(factor=1))])
    with pytest.raises(UserError, match="no held-out tasks"):
        load_suite(suite_params("held-out"), tmp_path)


def shipped(numel: int, levels: list[int]) -> list[KernelTask]:
    params = suite_params("shipped")
    return load_suite(
        params.model_copy(
            update={"evaluation": params.evaluation.model_copy(update={"numel": numel, "levels": levels})}
        ),
        Path("nowhere"),
    )


def test_profiles_of_large_models_are_evaluated_on_the_kernelbench_that_their_tasks_stay_clear_of(
    tmp_path: Path,
) -> None:
    for profile in ("h20-pool", "hf"):
        found = resolve(profile, (f"policy.source={tmp_path}",)).params
        assert found.evaluation.suite == "KernelBench" and found.evaluation.levels == [1, 2, 3]
        assert found.data.against == [found.evaluation.suite]
    other = resolve("h20-pool", ("evaluation.suite=held-out", "evaluation.levels=[]")).params
    assert other.evaluation.suite == "held-out"


def test_levels_of_the_held_out_tasks_are_refused() -> None:
    with pytest.raises(UserError, match=r"evaluation\.levels names levels.*set it to \[\]"):
        resolve("h20-pool", ("evaluation.suite=held-out",))


def test_the_shipped_suite_has_three_levels_at_the_profiles_size() -> None:
    small, large = shipped(262144, []), shipped(16777216, [])
    assert 12 <= len(small) <= 20 and {task.level for task in small} == {1, 2, 3}
    assert len({task.task_id for task in small}) == len(small)
    for task, name in ((small[0], "262144"), (large[0], "16777216")):
        assert f"NUMEL = {name}\n" in task.code
    assert {task.level for task in shipped(262144, [1, 3])} == {1, 3}


@pytest.mark.parametrize("numel", [262144, 524288])
def test_the_shipped_programs_run_and_their_largest_input_has_the_asked_size(numel: int) -> None:
    for task in shipped(numel, []):
        namespace: dict[str, object] = {}
        exec(task.code, namespace)
        inputs = namespace["get_inputs"]()
        model = namespace["Model"](*namespace["get_init_inputs"]())
        assert bool(model(*inputs).isfinite().all()), task.name
        assert 0.9 * numel <= max(value.numel() for value in inputs) <= numel, task.name


def test_a_level_that_the_suite_lacks_is_refused() -> None:
    with pytest.raises(UserError, match="its levels are: 1, 2, 3"):
        shipped(262144, [4])
