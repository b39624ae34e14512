"""Claims about the workloads of a task: their sources, what is refused, and the figures over all of them."""

from pathlib import Path
from typing import Any

import pytest
from agent_fixtures import params

from components.agent.optimize.export import report
from components.agent.optimize.search import Outcome
from components.agent.utilities import utility_output
from components.agent.workspace import Workspace
from components.core.config import PROJECT
from components.core.errors import UserError
from components.core.task import KernelTask, load_task, read_tasks, write_tasks
from components.core.workloads import MAX_WORKLOADS, workloads_of
from components.evaluation.metrics import summarise
from components.evaluation.results import TaskResult
from components.judge.admission import admit_workloads
from components.judge.pool.local_pool import Candidate, Job, verdict_key
from components.judge.statistics import geometric_mean, mean_ratio
from components.judge.verdict import Admission, Ratio, Seconds, Speedup, Verdict, WorkloadFigures, milestone
from components.judge.verdict_making import verdict_over_workloads
from components.policy.prompts import user_message
from components.service.requests import public_verdict

TASK = load_task(PROJECT / "docs" / "examples" / "several_shapes" / "model.py")
LIST = "[(16, 8192), (64, 2048), (256, 512), (2048, 64)]"
CALLS = [f"get_inputs{arguments}" for arguments in ("(16, 8192)", "(64, 2048)", "(256, 512)", "(2048, 64)")]


def with_list(text: str) -> KernelTask:
    return KernelTask(code=TASK.code.replace(LIST, text))


def test_each_workload_is_a_task_whose_get_inputs_takes_no_arguments() -> None:
    pytest.importorskip("torch")
    found = workloads_of(TASK.code, "model.py")
    assert [workload.call for workload in found] == CALLS
    for workload, shape in zip(found, [[16, 8192], [64, 2048], [256, 512], [2048, 64]], strict=True):
        scope: dict[str, Any] = {"__name__": "model"}
        exec(workload.code, scope)
        (tensor,) = scope["get_inputs"]()
        assert list(tensor.shape) == shape
        assert [one.call for one in workloads_of(workload.code, "model.py")] == [""]


def test_a_task_without_workloads_is_one_workload_with_its_own_source() -> None:
    for code in ("x = 1\n", "# WORKLOADS\nx = 1\n", "print(WORKLOADS)\n"):
        assert [(one.call, one.code) for one in workloads_of(code, "model.py")] == [("", code)]


def test_workloads_are_part_of_the_identity_of_a_task_and_of_the_journal(tmp_path: Path) -> None:
    other = with_list("[(16, 8192)]")
    assert other.task_id != TASK.task_id and other.code_digest != TASK.code_digest
    keys = {verdict_key("protocol", Job(task, Candidate(()), "epoch")) for task in (TASK, other)}
    assert len(keys) == 2
    write_tasks(tmp_path / "tasks.parquet", [TASK, other])
    assert [task.task_id for task in read_tasks(tmp_path / "tasks.parquet")] == [TASK.task_id, other.task_id]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "not a list of 1 to 8 tuples"),
        ("{}", "not a list of 1 to 8 tuples"),
        ("[(rows, 2) for rows in (1, 2)]", "not a list of 1 to 8 tuples"),
        ("[16, 64]", "not a list of 1 to 8 tuples"),
        (f"[(1, 2)] * {MAX_WORKLOADS}", "not a list of 1 to 8 tuples"),
        (str([(1, 2)] * (MAX_WORKLOADS + 1)), "not a list of 1 to 8 tuples"),
        ("[(1, 2), (1, 2, 3)]", r"WORKLOADS\[1\] has 3 values, and get_inputs takes 2 to 2 arguments"),
        ("[(1,)]", r"WORKLOADS\[0\] has 1 values"),
        ("[(1, ROWS)]", r"WORKLOADS\[0\] is not a tuple of literals"),
        ("[(1, 2 * 2)]", r"WORKLOADS\[0\] is not a tuple of literals"),
        ("[(1, *(2,))]", r"WORKLOADS\[0\] is not a tuple of literals"),
        ("[(1, {[]: 1})]", r"WORKLOADS\[0\] is not a tuple of literals"),
        ("[(1, 2)]\nWORKLOADS = [(2, 3)]", "WORKLOADS is not assigned once at the top level"),
        ("[(1, 2)]\nWORKLOADS += [(2, 3)]", "WORKLOADS is not assigned once at the top level"),
        ("[(1, 2)]\nCOUNT = len(WORKLOADS)", "or used elsewhere"),
        ("1\nif True:\n    WORKLOADS = [(1, 2)]", "WORKLOADS is not assigned once at the top level"),
    ],
)
def test_faulty_workloads_are_refused_with_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "model.py"
    path.write_text(with_list(text).code)
    with pytest.raises(UserError, match=message) as refused:
        load_task(path)
    assert str(refused.value).startswith(f"{path}: ") and str(refused.value).count(". ") == 0


def test_arguments_may_have_default_values_and_be_of_any_number() -> None:
    for header in ("rows, columns=64", "*sizes"):
        code = with_list("[(16,), [32, 8]]").code.replace(
            "get_inputs(rows, columns)", f"get_inputs({header})"
        )
        assert [one.call for one in workloads_of(code, "x")] == ["get_inputs(16)", "get_inputs(32, 8)"]
    with pytest.raises(UserError, match="takes 1 to 2 arguments"):
        workloads_of(
            with_list("[()]").code.replace("get_inputs(rows, columns)", "get_inputs(rows, columns=64)"), "x"
        )


def ratio(estimate: float) -> Ratio:
    return Ratio(estimate=estimate, low=estimate / 1.1, high=estimate * 1.1)


def part(eager: float, compiled: float | None = None, log: str = "") -> Verdict:
    return Verdict(
        status="correct",
        seconds=Seconds(candidate=1e-4, eager=eager * 1e-4),
        speedup=Speedup(eager=ratio(eager), compile=None if compiled is None else ratio(compiled)),
        evidence={"device": "cpu", "task": f"{eager}", "raw_seconds": {"eager": [eager]}},
        log=log,
    )


def over(*parts: Verdict) -> Verdict:
    return verdict_over_workloads(TASK, CALLS[: len(parts)], parts)


def test_the_figures_over_workloads_are_geometric_means_with_a_narrower_interval() -> None:
    verdict = over(part(1, 2), part(4, 8))
    assert verdict.speedup.eager == mean_ratio([ratio(1), ratio(4)])
    eager = verdict.speedup.eager
    assert eager is not None and eager.estimate == pytest.approx(2)
    assert eager.low == pytest.approx(2 / 1.1 ** (2**-0.5)) and eager.high == pytest.approx(
        2 * 1.1 ** (2**-0.5)
    )
    assert (verdict.speedup.compile or ratio(0)).estimate == pytest.approx(4)
    assert verdict.seconds.eager == pytest.approx(2e-4) and verdict.seconds.limit is None
    assert [one.call for one in verdict.workloads] == CALLS[:2]
    assert verdict.log.splitlines() == [
        "get_inputs(16, 8192): 1.00x eager, 2.00x compile",
        "get_inputs(64, 2048): 4.00x eager, 8.00x compile",
    ]
    assert verdict.evidence["device"] == "cpu" and verdict.evidence["task"] == TASK.code_digest
    assert [one["raw_seconds"]["eager"] for one in verdict.evidence["workloads"]] == [[1], [4]]
    assert mean_ratio([ratio(1), None]) is None and geometric_mean([1.0, None]) is None


@pytest.mark.parametrize(
    ("eager", "compiled", "expected"),
    [
        ((1.5, 1.5), (1.5, 1.5), 3),
        ((3.0, 0.9), (1.5, 0.9), 3),
        ((9.0, 0.89), (9.0, 9.0), 1),
        ((1.5, 1.5), (9.0, 0.89), 2),
        ((1.5, 1.0), (1.5, None), 2),
        ((1.05, 1.05), (9.0, 9.0), 1),
    ],
)
def test_a_milestone_needs_the_mean_and_no_workload_below_nine_tenths(
    eager: tuple[float, float], compiled: tuple[float, float | None], expected: int
) -> None:
    verdict = over(*map(part, eager, compiled))
    assert verdict.milestone == milestone(verdict) == expected
    row = TaskResult(task_id="", status=verdict.status, speedup=verdict.speedup, workloads=verdict.workloads)
    assert row.milestone == expected
    faster = summarise([row])
    assert faster.beyond_margin.eager == (expected > 1)
    assert faster.beyond_margin.compile == all(one and one >= 0.9 for one in compiled)
    assert faster.geomean.eager == pytest.approx(verdict.speedup.eager and verdict.speedup.eager.estimate)


def test_an_input_without_effect_on_one_workload_hides_no_worse_refusal_of_another() -> None:
    admissions = iter(
        [
            Admission(False, "input_1_does_not_matter", {"spread": 1.0, "inputs": [1]}),
            Admission(True, "", {"spread": 1e-5, "inputs": [2]}),
            Admission(False, "zeros_pass", {}),
        ]
    )
    assert admit_workloads(TASK.code, lambda source: next(admissions)).reason == "zeros_pass"
    first = Admission(False, "input_1_does_not_matter", {"spread": 1.0})
    admissions = iter([first, *(Admission(True, "", {"spread": spread}) for spread in (1e-5, 2.0, 3.0))])
    found = admit_workloads(TASK.code, lambda source: next(admissions))
    assert found.reason == "input_1_does_not_matter" and found.evidence["spread"] == 1e-5
    assert [one["call"] for one in found.evidence["workloads"]] == CALLS


def test_a_caller_of_the_service_gets_the_measured_times_of_each_workload_and_no_seed() -> None:
    verdict = over(part(1), part(4))
    hidden = verdict.model_copy(
        update={
            "evidence": verdict.evidence
            | {"workloads": [one | {"seeds": [7]} for one in verdict.evidence["workloads"]]}
        }
    )
    assert public_verdict(hidden).evidence["workloads"] == [
        {"raw_seconds": {"eager": [1]}},
        {"raw_seconds": {"eager": [4]}},
    ]


def test_a_verdict_of_a_task_without_workloads_keeps_its_fields_and_old_records_are_read() -> None:
    record = part(2.0).model_dump()
    assert record.pop("workloads") == ()
    assert Verdict.model_validate(record) == part(2.0)


def test_the_utilities_name_the_workloads() -> None:
    text, code = utility_output("profiling", over(part(1.5), part(0.5)))
    assert code == 0 and text.splitlines()[2:] == [
        "get_inputs(16, 8192): 1.50x eager",
        "get_inputs(64, 2048): 0.50x eager",
    ]
    failed = Verdict(
        status="wrong_output", reason="max_error:given", workloads=(WorkloadFigures(call=CALLS[1]),)
    )
    assert utility_output("verification", failed) == (
        "[FAIL] wrong_output: max_error:given with get_inputs(64, 2048)",
        1,
    )


def test_the_report_of_an_optimisation_has_the_figures_and_the_shapes_of_each_workload() -> None:
    task = admitted([form(16, 8192), form(64, 2048)])
    verdict = over(part(1.5), part(3)).model_copy(update={"milestone": 2})
    outcome = Outcome(task, True, verdict, {}, (), (verdict,), (), 1.0)
    text = report(outcome, params(), "script")
    assert "| `get_inputs(64, 2048)` | 100.0 | 3.000 (2.727 to 3.300) | not measured |\n" in text
    assert "inputs [16, 8192] float32; [64, 2048] float32: other" in text


def form(*shape: int) -> dict[str, object]:
    return {"shape": list(shape), "dtype": "float32"}


def admitted(outputs: list[dict[str, object]]) -> KernelTask:
    shapes = [
        {"call": call, "inputs": [size], "outputs": [output]}
        for call, size, output in zip(CALLS[:2], [form(16, 8192), form(64, 2048)], outputs, strict=True)
    ]
    evidence = {"inputs": [form(16, 8192)], "outputs": [outputs[0]], "parameters": [], "workloads": shapes}
    return with_list("[(16, 8192), (64, 2048)]").model_copy(update={"evidence": evidence})


def test_a_starter_allocates_the_outputs_of_every_workload_or_is_left_out() -> None:
    starter = Workspace(admitted([form(16, 8192), form(64, 2048)])).files["model_new.py"]
    assert "torch.empty_like(x)" in starter and "WORKLOADS" not in starter
    assert "new_empty((x.size(0),))" in Workspace(admitted([form(16), form(64)])).files["model_new.py"]
    assert not Workspace(admitted([form(16, 3), form(64, 5)])).files
    task = admitted([form(16, 8192), form(64, 2048)])
    ended = {name: value for name, value in task.evidence.items() if name != "workloads"}
    assert not Workspace(task.model_copy(update={"evidence": ended})).files


@pytest.mark.parametrize("name", ["a b", "layers.0.weight", "part.import"])
def test_a_parameter_that_no_expression_names_leaves_the_starter_out(name: str) -> None:
    task = admitted([form(16, 8192), form(64, 2048)])
    assert not Workspace(task.model_copy(update={"evidence": task.evidence | {"parameters": [name]}})).files


def test_the_skill_says_which_shapes_are_coming() -> None:
    template = (PROJECT / "agent_workdir" / "SKILL.md").read_text()
    text = Workspace(admitted([form(16), form(64)])).read("SKILL.md")
    assert text is not None and text.startswith(template)
    assert (
        "- `get_inputs(16, 8192)`: float32 [16, 8192]\n- `get_inputs(64, 2048)`: float32 [64, 2048]\n" in text
    )
    assert Workspace(KernelTask(code="x = 1")).read("SKILL.md") == template
    policy = params().policy.model_copy(update={"prompt": "full"})
    prompt = user_message(policy, TASK.code, in_turns=True, device="cpu")
    assert all(f"- `{call}`\n" in prompt for call in CALLS)
