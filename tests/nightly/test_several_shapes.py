"""A task with four shapes: how it is admitted and its candidates are judged, on cpu."""

import itertools
from dataclasses import replace

import pytest
from shapes_fixtures import CALLS, CODE, FILES, KERNEL, TASK
from shapes_fixtures import pool as pool

from components.core.config import resolve
from components.core.errors import UserError
from components.core.task import KernelTask
from components.core.workloads import WORKLOADS
from components.judge.judge import Judge
from components.judge.pool.local_pool import Candidate, Job, LocalPool
from components.judge.verdict import WORKLOAD_MARGIN
from components.synthesis.core_composer import compose_tasks


def test_a_candidate_is_built_once_and_measured_on_each_workload(
    cold_judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds, build = [], cold_judge._build
    monkeypatch.setattr(cold_judge, "_build", lambda *given: builds.append(given) or build(*given))
    verdict = cold_judge.verdict(TASK, FILES, compare_compile=None)
    assert (verdict.status, len(builds)) == ("correct", 1), verdict.log
    assert [one.call for one in verdict.workloads] == CALLS
    ratios = [one.speedup.eager.estimate for one in verdict.workloads if one.speedup.eager is not None]
    product = ratios[0] * ratios[1] * ratios[2] * ratios[3]
    assert verdict.speedup.eager is not None
    assert verdict.speedup.eager.estimate == pytest.approx(product**0.25)
    assert verdict.log.splitlines()[3].startswith("get_inputs(128, 64): ")
    seeds = [one["seeds"] for one in verdict.evidence["workloads"]]
    assert len({tuple(one) for one in seeds}) == 4, "each workload has secret inputs of its own"
    assert verdict.milestone == (
        2 if verdict.speedup.eager.estimate > 1.05 and min(ratios) >= WORKLOAD_MARGIN else 1
    )


@pytest.mark.usefixtures("no_compile_baseline")
def test_torch_compile_is_measured_on_a_workload_though_it_alone_is_not_faster_than_eager(
    judge: Judge,
) -> None:
    """The fixture raises the margin above which the only workload of a task is compared."""
    two = KernelTask(code=CODE.replace(", (64, 128), (128, 64)", ""))
    verdict = judge.verdict(two, FILES)
    assert verdict.status == "correct" and verdict.speedup.compile is not None, verdict.log
    assert all(one.speedup.compile is not None for one in verdict.workloads)


def test_the_first_workload_on_which_a_candidate_is_wrong_decides_and_is_named(judge: Judge) -> None:
    text = FILES[KERNEL].replace("sum / columns", "sum / (columns == 512 ? 500 : columns)")
    verdict = judge.verdict(TASK, FILES | {KERNEL: text}, compare_compile=None)
    assert (verdict.status, verdict.milestone) == ("wrong_output", -1)
    assert verdict.reason.startswith("max_error:")
    assert verdict.log.startswith("with the inputs of get_inputs(16, 512): the output is wrong")
    assert [one.call for one in verdict.workloads] == ["get_inputs(16, 512)"]


def test_a_fault_of_the_task_on_one_workload_is_no_fault_of_the_candidate(judge: Judge) -> None:
    broken = KernelTask(code=CODE.replace("(16, 512)", "(-16, 512)"))
    verdict = judge.verdict(broken, FILES, compare_compile=None)
    assert (verdict.status, verdict.reason) == ("infrastructure", "task")
    assert "get_inputs(-16, 512): the task itself fails" in verdict.log
    nonsense = judge.verdict(KernelTask(code=CODE.replace("(16, 512)", "(512,)")), FILES)
    assert (nonsense.status, nonsense.reason, nonsense.workloads) == ("infrastructure", "task", ())
    assert "WORKLOADS[1] has 1 values, and get_inputs takes 2 to 2 arguments" in nonsense.log


def test_a_task_is_admitted_if_each_of_its_workloads_is(judge: Judge) -> None:
    admission = judge.admit(CODE, (1e-9, 1e9))
    assert admission.admitted, admission
    assert [(one["call"], one["inputs"][0]["shape"]) for one in admission.evidence["workloads"]] == [
        (CALLS[0], [4, 2048]),
        (CALLS[1], [16, 512]),
        (CALLS[2], [64, 128]),
        (CALLS[3], [128, 64]),
    ]
    assert 0 < admission.evidence["eager_seconds"] < 1
    assert judge.admit(CODE, (1e-9, 1e9), memory_only=True).admitted
    broken = judge.admit(CODE.replace("(64, 128)", "(64, -1)"), (1e-9, 1e9))
    assert broken.reason == "does_not_run" and broken.evidence["detail"].startswith("get_inputs(64, -1): ")
    faulty = judge.admit(CODE.replace("(64, 128)", "64"), (1e-9, 1e9))
    assert faulty.reason == "does_not_run" and "tuples" in faulty.evidence["detail"]


def test_a_share_of_tasks_of_several_shapes_leaves_the_others_as_they_are() -> None:
    few, none = (
        itertools.islice(compose_tasks(1, resolve("ci", [f"data.workload_share={share}"]).params.data), 200)
        for share in (0.25, 0)
    )
    assert 30 < sum(WORKLOADS in task.code for task in few) < 70
    assert not any(WORKLOADS in task.code for task in none)
    with pytest.raises(UserError, match=r"data\.workload_share.*set it to 0, or data\.operators to core"):
        resolve("ci", ["data.workload_share=0.25", "data.operators=kernelbench"])


def test_the_journal_gives_the_verdict_with_its_workloads_again(pool: LocalPool) -> None:
    job = Job(TASK, Candidate.of(FILES), "journal", compare_compile=None)
    first = pool.submit(job).result()
    assert first.status == "correct" and pool.submit(job).result() == first
    assert pool.submit(replace(job, task=KernelTask(code=CODE.replace("(4, 2048), ", "")))).result() != first
