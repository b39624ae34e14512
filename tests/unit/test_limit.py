"""The limit of a task's time, what of it a solution attains, and times that cannot be."""

import contextlib
import dataclasses
import json
import random
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest

from components.agent.utilities import utility_output
from components.bootstrap.demonstrations import simulate_outcome
from components.core.config import resolve
from components.evaluation.metrics import summarise
from components.evaluation.results import TaskResult
from components.judge import limit as limits
from components.judge.limit import Limit, checked_limit, limit_of
from components.judge.verdict import Rejected, Seconds, Verdict, rates_line


def layout(dtype: str = "float32", operations: int = 0) -> Any:
    """Return a layout with an input and an output of 1 MB, parameters of 0.5 MB, and 10 calls a round."""
    spec = ((512, 512), dtype)
    description = SimpleNamespace(inputs=[spec, None], outputs=[spec], operations=operations)

    def region(size: int) -> Any:
        return SimpleNamespace(slots=[SimpleNamespace(bytes=size)])

    return SimpleNamespace(
        description=description,
        inputs=region(1_000_000),
        outputs=region(1_000_000),
        parameters=region(500_000),
        calls=10,
    )


def test_the_limit_is_the_larger_of_moving_and_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    # A copy of 1 MB is in a cache and four times as fast as one of 25 MB, which is ten calls'.
    monkeypatch.setattr(limits, "bandwidth", lambda _, size: 1e9 if size == 25_000_000 else 4e9)
    rates = {"float32": 1e10, "float64": 5e9, "bfloat16": 2e10}
    monkeypatch.setattr(limits, "operation_rate", lambda _, dtype, __: rates[dtype])
    found = limit_of(layout(), "cpu", "strict-fp32")
    assert found == Limit(2_500_000, 0, 1e9, 0.0, 0.00025) and found.seconds == 0.0025
    assert limit_of(layout(operations=10**7), "cpu", "strict-fp32").seconds == 0.0025
    assert limit_of(layout(operations=10**8), "cpu", "strict-fp32").seconds == 0.01
    assert limit_of(layout("float64", 10**8), "cpu", "strict-fp32").seconds == 0.02
    assert limit_of(layout("bfloat16", 10**8), "cpu", "strict-fp32").seconds == 0.005


def test_what_is_measured_is_what_a_machine_can_do() -> None:
    small, large = limits.bandwidth("cpu", 1 << 20), limits.bandwidth("cpu", 1 << 27)
    assert large > 1e8 and large / 2 < small < 1e12, "data in a cache is moved no slower"
    assert 1e8 < limits.operation_rate("cpu", "float32", "strict-fp32") < 1e13


def test_a_task_may_have_outputs_without_elements() -> None:
    empty = layout()
    empty.outputs.slots[0].bytes = 0
    assert limit_of(empty, "cpu", "strict-fp32").output_seconds == 0


def test_on_a_gpu_that_others_use_too_the_fastest_of_several_measurements_counts() -> None:
    results = iter([9e9, 1e9, 4e9, 2e9, *[3e9] * 5])
    once: list[float] = []
    assert [limits._largest(once, "cpu", lambda: next(results)) for _ in range(3)] == [9e9] * 3
    several: list[float] = []
    found = [limits._largest(several, "cuda", lambda: next(results, 8e9)) for _ in range(20)]
    assert found == [1e9, *[4e9] * 19] and len(several) == limits.MEASUREMENTS["cuda"]


@pytest.mark.parametrize(
    ("candidate", "eager", "is_refused"),
    [(90.1, 500.0, False), (89.0, 500.0, True), (1.0, 500.0, True), (1.0, 2.0, False)],
)
def test_a_call_takes_no_less_than_writing_its_outputs(
    candidate: float, eager: float, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def same_limit(*_: object) -> Limit:
        measured.append(1)
        return Limit(2_500_000, 0, 1e9, 0.0, output_seconds=100e-6)

    monkeypatch.setattr(limits, "limit_of", same_limit)
    scheduler = SimpleNamespace(measuring=contextlib.nullcontext)
    reference = cast(Any, SimpleNamespace(scheduler=scheduler, layout=None))
    medians = {"candidate": candidate * 1e-6, "eager": eager * 1e-6}
    expected = (
        pytest.raises(Rejected, match=r"at least 100\.00 us") if is_refused else contextlib.nullcontext()
    )
    with expected as caught:
        assert checked_limit(resolve("ci").params, reference, medians).seconds == 0.0025
    assert len(measured) == (2 if is_refused else 1), "a device that looked slow is measured again"
    if caught is not None:
        assert (caught.value.status, caught.value.reason) == ("wrong_output", "impossible_time")


def result(
    status: str, candidate: float, *, compiled: float | None = 3.0, limit: float | None = 1.0
) -> TaskResult:
    seconds = Seconds(candidate=candidate, eager=4.0, compile=compiled, limit=limit)
    return TaskResult.model_validate(
        {"task_id": f"{status} {candidate}", "status": status, "seconds": seconds.model_dump()}
    )


@pytest.mark.parametrize(
    ("row", "attained", "score"),
    [
        (result("correct", 3.0), 1 / 3, 0.5),  # as fast as the faster baseline
        (result("correct", 1.0), 1.0, 1.0),
        (result("correct", 2.0), 0.5, 2 / 3),
        (result("correct", 0.5), 2.0, 1.0),  # it used a structure of its operands
        (result("correct", 4.0, compiled=None), 0.25, 0.5),
        (result("correct", 2.0, limit=3.5), 1.75, None),  # torch.compile is faster than the limit
        (result("correct", 2.0, limit=None), None, None),
        (result("wrong_output", 2.0), None, 0.0),
    ],
)
def test_half_a_point_at_the_baseline_and_one_at_the_limit(
    row: TaskResult, attained: float | None, score: float | None
) -> None:
    assert (row.attained, row.limit_score) == (pytest.approx(attained), pytest.approx(score))


def test_means_are_over_the_tasks_that_have_a_score() -> None:
    rows = [
        result("correct", 3.0),
        result("correct", 1.0),
        result("correct", 2.0, limit=None),
        result("wrong_output", 2.0),
        result("infrastructure", 2.0),
    ]
    found = summarise(rows)
    assert found.limit_score == pytest.approx((0.5 + 1.0 + 0.0) / 3)
    assert found.attained == pytest.approx((1 / 3 + 1) / 2)
    low, high = found.intervals["limit_score"].low, found.intervals["limit_score"].high
    assert low is not None and high is not None and low < found.limit_score < high
    unknown = [result("correct", 3.0, limit=None), result("wrong_output", 2.0)]
    assert summarise(unknown).limit_score is None, "no limit is known, so there is no score"
    assert summarise(unknown[1:]).limit_score == 0
    older = json.loads(found.model_dump_json())
    del older["attained"], older["limit_score"]
    assert type(found).model_validate(older).limit_score is None, "records without limits can be read"


def test_the_rates_that_a_kernel_attains_are_beside_those_of_the_device() -> None:
    limit = dataclasses.asdict(Limit(2_500_000, 0, 2e10, 0.0, 1e-4))
    verdict = Verdict(status="correct", seconds=Seconds(candidate=2.5e-4), evidence={"limit": limit})
    assert rates_line(verdict) == "Memory: 10.0 of 20.0 GB/s."
    assert utility_output("profiling", verdict)[0].splitlines()[-1] == "Memory: 10.0 of 20.0 GB/s."
    products = limit | {"operations": 10_000_000, "operations_per_second": 8e10}
    assert rates_line(verdict.model_copy(update={"evidence": {"limit": products}})) == (
        "Memory: 10.0 of 20.0 GB/s. Products: 40.0 of 80.0 GFLOP/s."
    )
    assert rates_line(verdict.model_copy(update={"evidence": {}})) == ""
    assert rates_line(Verdict(status="timed_out", evidence={"limit": limit})) == ""


def test_a_demonstration_has_the_rates_in_the_words_of_the_utilities() -> None:
    rng = random.Random(0)
    observations = [simulate_outcome("", True, "cpu", rng).observation for _ in range(50)]
    found = [re.search(r"of 3\.\nMemory: ([\d.]+) of ([\d.]+) GB/s\.$", text) for text in observations]
    assert all(match and 0 < float(match[1]) < float(match[2]) for match in found)
