"""Claims about gates: each refuses alone and says so, and asking them again needs sound evidence."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from promotion_fixtures import PARAMS, SOUND, THRESHOLDS, apply_decision, evaluation, promotion_of, task
from promotion_fixtures import home as home

from components.core.config import resolve
from components.core.errors import InfrastructureError, UserError
from components.core.files import digest_file, write_json
from components.core.params import Params
from components.core.progress import Quiet
from components.evaluation.metrics import TaskResult, summarise
from components.judge.pool.local_pool import Candidate, Job
from components.judge.verdict import Verdict
from components.registry import gate_runner, gates, models
from components.registry.exploits import Sample, candidates, try_exploits
from components.registry.gates import Decision
from components.registry.promotion import Promotion


def verdict(
    rows: list[TaskResult],
    champion: list[TaskResult] | None = None,
    sample: Sample = SOUND,
    *,
    digests: bool = True,
    report: bool = True,
    **thresholds: Any,
) -> Decision:
    against = evaluation(champion) if champion is not None else None
    asked = THRESHOLDS.model_copy(update=thresholds)
    return gates.decide(
        gate_runner.evaluate_gates(
            asked, evaluation(rows), against, sample, digests_match=digests, report_complete=report
        ),
        "automatic",
    )


GOOD = [task(i) for i in range(30)]
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
    assert models.aliases(promotion.client, PARAMS.model) == {"champion": "1"} and promotion.verify() == []
    assert [entry.action for entry in promotion.chain.entries()] == ["promoted"] + ["refused"] * len(REFUSALS)


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

    def drop(self) -> None:
        return

    def close(self) -> None:
        return


def with_evaluations(home: Path) -> tuple[Promotion, Params]:
    """Version 1 is champion, version 2 was measured beside it."""
    promotion = promotion_of(home)
    apply_decision(promotion, "1")
    digest = models.find(promotion.client, PARAMS.model, "2").tags["checkpoint.digest"]
    for name, rows, policy in (("candidate", GOOD, digest), ("champion", GOOD, "0")):
        write_json(
            home / f"{name}.json",
            evaluation(rows).model_copy(update={"policy_digest": policy}).model_dump(mode="json"),
        )
    tags = {"evaluation": "candidate.json", "evaluation.digest": digest_file(home / "candidate.json")}
    tags |= {
        "compared.version": "1",
        "compared.evaluation": "champion.json",
        "compared.digest": digest_file(home / "champion.json"),
    }
    for name, value in tags.items():
        promotion.client.set_model_version_tag(PARAMS.model, "2", name, value)
    return promotion, resolve(
        "ci", ("registry.model=policy", "registry.experiment=nights", "gate.pass_rate=0.8")
    ).params


def test_gates_asked_again_use_todays_thresholds_and_let_a_person_decide(home: Path) -> None:
    promotion, params = with_evaluations(home)
    number, decision, champion = gate_runner.gate_again(
        params, promotion.client, home, "2", Credulous(), Quiet()
    )
    assert (number, decision.verdict, champion) == ("2", "waiting", "1"), decision.reasons
    assert {gate.name for gate in decision.gates} >= {"pass_rate", "change.pass_rate", "integrity.exploits"}
    apply_decision(promotion, number, decision, champion)
    assert promotion.approve("2").aliases == {"champion": "2", "previous": "1"}


def test_a_judge_that_believes_an_exploit_refuses_every_version_by_that_name(home: Path) -> None:
    promotion, params = with_evaluations(home)
    decision = gate_runner.gate_again(
        params, promotion.client, home, "2", Credulous("zeros", "patched_time"), Quiet()
    )[1]
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
        UserError, match=r"candidate\.json: the evaluation of version 2 is missing or changed"
    ):
        gate_runner.gate_again(params, promotion.client, home, "2", Credulous(), Quiet())
    with pytest.raises(UserError, match=r"candidate\.json"):
        apply_decision(promotion, "2", champion="1")
