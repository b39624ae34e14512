"""Claims about gates: each refuses alone and says so, and asking them again needs sound evidence."""

import math
import re
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from promotion_fixtures import (
    PARAMS,
    SOUND,
    THRESHOLDS,
    actions,
    apply_decision,
    evaluation,
    promotion_of,
    task,
)
from promotion_fixtures import home as home

from components.core.config import resolve
from components.core.errors import InfrastructureError, UserError
from components.core.files import digest_file, write_json
from components.core.params import Params
from components.core.progress import Quiet
from components.evaluation.metrics import summarise
from components.evaluation.results import TaskResult
from components.judge.admission import Admission
from components.judge.pool.local_pool import Candidate, Job
from components.judge.verdict import Verdict
from components.registry import gate_runner, gates, models
from components.registry.exploits import Sample, candidates, try_exploits
from components.registry.gates import Compared, Decision
from components.registry.promotion import Promotion


def verdict(
    rows: list[TaskResult],
    champion: list[TaskResult] | None = None,
    sample: Sample = SOUND,
    *,
    start: list[TaskResult] | None = None,
    digests: bool = True,
    report: bool = True,
    **thresholds: Any,
) -> Decision:
    against = evaluation(champion) if champion is not None else None
    asked = THRESHOLDS.model_copy(update=thresholds)
    return gates.decide(
        gate_runner.evaluate_gates(
            asked,
            evaluation(rows),
            evaluation(start or SLOW),
            against,
            sample,
            digests_match=digests,
            report_complete=report,
        ),
        "automatic",
    )


GOOD = [task(i) for i in range(30)]
SLOW = [task(i, eager=0.5, compiled=0.5) for i in range(60)]
FEWER_FAST = [task(i, compiled=2.0 if i % 10 < 8 else 0.9) for i in range(60)]
# Thirty of thirty: the lower end is 0.884, for each level's fifteen 0.782; the geometric means are 2
# without a spread.
REFUSALS: dict[str, Callable[[], Decision]] = {
    "pass_rate": lambda: verdict(GOOD, pass_rate=0.9),
    "faster_rate.eager": lambda: verdict(GOOD, faster_rate_eager=0.9),
    "faster_rate.compile": lambda: verdict(GOOD, faster_rate_compile=0.9),
    "faster_rate.compile.level_2": lambda: verdict(GOOD, faster_rate_compile_by_level={1: 0.7, 2: 0.8}),
    "geomean.eager": lambda: verdict(GOOD, geomean_eager=2.1),
    "geomean.compile": lambda: verdict(GOOD, geomean_compile=2.1),
    "change.faster_rate.compile": lambda: verdict(FEWER_FAST, [task(i) for i in range(60)]),
    "integrity.measured": lambda: verdict([*GOOD[:-1], task(29, status="infrastructure")]),
    "integrity.digests": lambda: verdict(GOOD, digests=False),
    "integrity.report": lambda: verdict(GOOD, report=False),
    "integrity.isolation": lambda: verdict(
        [GOOD[0].model_copy(update={"evidence": {"device": "x", "isolation": "none"}}), *GOOD[1:]]
    ),
    "integrity.exploits": lambda: verdict(
        GOOD, sample=Sample(tried=12, refused=11, wrong=("zeros (correct)",), device="x")
    ),
}


def test_good_figures_pass_every_gate() -> None:
    assert verdict(GOOD, GOOD).verdict == "promoted"


@pytest.mark.parametrize("name", REFUSALS)
def test_each_gate_refuses_alone_and_says_so(name: str) -> None:
    decision = REFUSALS[name]()
    assert decision.verdict == "refused"
    assert [gate.name for gate in decision.gates if not gate.passed] == [name]
    assert len(decision.reasons) == 1 and decision.reasons[0].startswith(f"{name} is")


def test_every_refusal_stands_in_the_registry_and_the_champion_stays(home: Path) -> None:
    promotion = promotion_of(home)
    apply_decision(promotion, "1")
    for name, refuse in REFUSALS.items():
        assert apply_decision(promotion, "2", refuse(), champion="1").action == "refused"
        found = models.describe(promotion.client, PARAMS.model, "2")
        assert found["decision"] == "refused" and found["reasons"][0].startswith(f"{name} is")
    assert models.decided_aliases(promotion.client, PARAMS.model) == {"champion": "1"}
    assert promotion.verify() == []
    assert actions(promotion) == ["promoted"] + ["refused"] * len(REFUSALS)


def test_the_lower_end_of_the_interval_decides_not_the_figure() -> None:
    share = [task(i, status="correct" if i < 6 else "crashed") for i in range(10)]
    found = {gate.name: gate for gate in gates.floors(summarise(share), {}, THRESHOLDS)}["pass_rate"]
    assert found.value == 0.6 and found.low is not None and found.low < 0.5 and not found.passed
    assert "its lower end is" in found.sentence
    many = [task(i, status="correct" if i % 5 < 3 else "crashed") for i in range(400)]
    assert {gate.name: gate for gate in gates.floors(summarise(many), {}, THRESHOLDS)}["pass_rate"].passed


def test_a_task_that_either_side_could_not_be_measured_on_decides_nothing_about_the_champion() -> None:
    found = gates.regression(GOOD, [task(0, status="infrastructure"), *GOOD[1:]], THRESHOLDS)
    assert {gate.value for gate in found} == {0.0}


# Twenty tasks as at the start of a run, each with its speed-up over torch.compile.
START = [task(i, compiled=0.6 + 0.04 * i, status="correct" if i % 5 else "wrong_output") for i in range(20)]
SAME = [
    row.model_copy(update={"speedup": task(i, compiled=(0.6 + 0.04 * i) * (1.02 if i % 2 else 0.99)).speedup})
    for i, row in enumerate(START)
]
FEWER = [task(i, compiled=3.0, status="correct" if i % 4 == 1 else "wrong_output") for i in range(20)]
BETTER = [task(i, compiled=1.5, status="correct" if i % 7 else "wrong_output") for i in range(20)]


@pytest.mark.parametrize(
    ("rows", "outcome", "says"),
    [
        (SAME, "nothing_learned", r"Nothing learned: no figure is better than that of the policy"),
        (
            FEWER,
            "refused",
            r"start\.attempts_pass_rate is -0\.55 .*: its upper end is",
        ),
        (BETTER, "promoted", "gates passed"),
    ],
)
def test_a_version_has_to_be_better_than_the_policy_that_its_run_began_with(
    rows: list[TaskResult], outcome: str, says: str
) -> None:
    lenient = {"pass_rate": 0, "faster_rate_compile": 0, "geomean_eager": 0, "geomean_compile": 0}
    decision = verdict(rows, start=START, faster_rate_eager=0, faster_rate_compile_by_level={}, **lenient)
    assert decision.verdict == outcome and len(decision.reasons) >= 1
    assert re.search(says, decision.reasons[0]), decision.reasons


def test_a_policy_that_did_not_change_seldom_counts_as_better() -> None:
    """Speeds are measured anew with 3 % noise, and one task in twenty has another outcome."""
    draws = np.random.default_rng(0)
    verdicts = []
    for _ in range(60):
        sides = []
        for _ in range(2):
            noise = draws.normal(0, 0.03, 28)
            flips = draws.random(28) < 0.1
            sides.append(
                [
                    task(
                        i,
                        compiled=(0.7 + 0.03 * i) * math.exp(noise[i]),
                        status="correct" if (i % 6 > 0) != flips[i] else "wrong_output",
                    )
                    for i in range(28)
                ]
            )
        better = gates.improvement(*sides)[-1]
        verdicts.append(better.passed)
    assert sum(verdicts) <= 12, sum(verdicts)


@pytest.mark.parametrize(("tasks", "passed"), [(1, False), (5, False), (6, True)])
def test_few_tasks_that_all_get_better_show_nothing(tasks: int, passed: bool) -> None:
    sides = [[task(i, compiled=ratio) for i in range(tasks)] for ratio in (1.3, 1.4)]
    assert gates.improvement(sides[1], sides[0])[-1].passed is passed


@pytest.mark.parametrize(
    ("tasks", "names"),
    [
        (3, ["gate.pass_rate", "gate.improvement"]),
        (5, ["gate.pass_rate", "gate.improvement"]),
        (6, []),
    ],
)
def test_a_suite_that_no_version_can_pass_on_is_named_before_the_run(tasks: int, names: list[str]) -> None:
    found = gates.too_few_tasks(THRESHOLDS, tasks)
    assert {line.partition(":")[0].partition(" is ")[0] for line in found} >= set(names)
    if tasks == 5:
        assert "evaluate at least 6 tasks" in found[0]
    assert bool(found) == bool(names)


def test_an_exploit_sample_from_another_device_proves_nothing() -> None:
    decision = verdict(GOOD, sample=Sample(tried=12, refused=12, wrong=(), device="another"))
    assert decision.verdict == "refused" and "another" in decision.reasons[0]


def test_a_level_that_the_suite_lacks_refuses() -> None:
    decision = verdict([row.model_copy(update={"level": 2}) for row in GOOD])
    assert [gate.name for gate in decision.gates if not gate.passed] == ["faster_rate.compile.level_1"]


class Credulous:
    """A judge that calls the honest answer correct, and whatever else it is told to believe."""

    def __init__(self, *believed: str):
        files = candidates("cpu")
        self.believed = {Candidate.of(files[name]).digest for name in ("honest", *believed)}

    def prepare(self) -> None:
        return

    def submit(self, job: Job) -> Future[Verdict]:
        correct = job.candidate.digest in self.believed
        found: Future[Verdict] = Future()
        found.set_result(
            Verdict(
                status="correct" if correct else "wrong_output",
                milestone=1 if correct else -1,
                evidence={"device": "x"},
            )
        )
        return found

    def admit(self, code: str) -> Future[Admission]:
        raise AssertionError("nothing is admitted here")

    def drop(self) -> None:
        return

    def close(self) -> None:
        return


def with_evaluations(home: Path) -> tuple[Promotion, Params]:
    """Version 1 is champion, version 2 was measured beside it."""
    promotion = promotion_of(home)
    apply_decision(promotion, "1")
    digest = models.find(promotion.client, PARAMS.model, "2").tags["checkpoint.digest"]
    for name, rows, policy in (("candidate", GOOD, digest), ("champion", GOOD, "0"), ("start", SLOW, "1")):
        write_json(
            home / f"{name}.json",
            evaluation(rows).model_copy(update={"policy_digest": policy}).model_dump(mode="json"),
        )
    _, evidence = promotion.evidence("2")
    evidence.pop("report.digest")
    for name, file in (("evaluation", "candidate.json"), ("start.evaluation", "start.json")):
        evidence |= {name: file, f"{name.removesuffix('.evaluation')}.digest": digest_file(home / file)}
    promotion.register("2", evidence)
    champion = Compared(version="1", evaluation="champion.json", digest=digest_file(home / "champion.json"))
    promotion.apply_decision(
        "2",
        Decision(verdict="refused", gates=(), reasons=("too slow.",)),
        champion=champion,
        approval_seconds=1,
    )
    return promotion, resolve(
        "ci",
        (
            "registry.model=policy",
            "registry.experiment=nights",
            "gate.pass_rate=0.8",
            "gate.improvement=true",
        ),
    ).params


def test_gates_asked_again_use_todays_thresholds_and_let_a_person_decide(home: Path) -> None:
    promotion, params = with_evaluations(home)
    number, decision, champion = gate_runner.gate_again(params, promotion, "2", Credulous(), Quiet())
    assert (number, decision.verdict) == ("2", "waiting") and champion is not None, decision.reasons
    assert (champion.version, champion.evaluation) == ("1", "champion.json")
    names = {gate.name for gate in decision.gates}
    assert names >= {"pass_rate", "change.pass_rate", "start.better", "integrity.exploits"}
    promotion.apply_decision(number, decision, champion=champion, approval_seconds=3600)
    assert promotion.approve("2").aliases == {"champion": "2", "previous": "1"}
    number, decision, champion = gate_runner.gate_again(params, promotion, "2", Credulous(), Quiet())
    assert champion is not None and champion.version == "1"
    assert (decision.verdict, decision.reasons) == ("promoted", (f"all {len(decision.gates)} gates passed.",))


def test_a_judge_that_believes_an_exploit_refuses_every_version_by_that_name(home: Path) -> None:
    promotion, params = with_evaluations(home)
    decision = gate_runner.gate_again(params, promotion, "2", Credulous("zeros", "patched_time"), Quiet())[1]
    assert decision.verdict == "refused" and "zeros (correct), patched_time (correct)" in decision.reasons[0]


@pytest.mark.parametrize(("kills", "wrong"), [(2, ()), (3, ("honest (crashed)",))])
def test_a_control_whose_process_was_killed_is_judged_again(kills: int, wrong: tuple[str, ...]) -> None:
    """Seen with faults injected: one kill in the sample refused a night for good."""
    honest = Candidate.of(candidates("cpu")["honest"]).digest

    class Killed(Credulous):
        left = kills

        def submit(self, job: Job) -> Future[Verdict]:
            if job.candidate.digest != honest or not self.left:
                return super().submit(job)
            self.left -= 1
            found: Future[Verdict] = Future()
            found.set_result(Verdict(status="crashed", milestone=-1))
            return found

    sample = try_exploits("cpu", Killed(), epoch="1", progress=Quiet())
    assert sample.wrong == wrong and sample.refused == (0 if wrong else sample.tried)


def test_a_judge_that_fails_on_an_exploit_decides_nothing() -> None:
    """Seen with faults injected: a lost node of judges refused a night for good."""
    zeros = Candidate.of(candidates("cpu")["zeros"]).digest

    class Lost(Credulous):
        def submit(self, job: Job) -> Future[Verdict]:
            if job.candidate.digest != zeros:
                return super().submit(job)
            found: Future[Verdict] = Future()
            found.set_result(
                Verdict(status="infrastructure", reason="judge", log="the judge's Ray actor died")
            )
            return found

    with pytest.raises(
        InfrastructureError, match=r"integrity: the judge failed on zeros \(the judge's Ray actor died\)"
    ):
        try_exploits("cpu", Lost(), epoch="1", progress=Quiet())


def test_a_changed_evaluation_is_no_evidence(home: Path) -> None:
    promotion, params = with_evaluations(home)
    write_json(home / "candidate.json", evaluation(GOOD[:5]).model_dump(mode="json"))
    with pytest.raises(
        UserError, match=r"candidate\.json: is missing or is not what version 2 was measured with"
    ):
        gate_runner.gate_again(params, promotion, "2", Credulous(), Quiet())
    with pytest.raises(UserError, match=r"candidate\.json"):
        apply_decision(promotion, "2", champion="1")
