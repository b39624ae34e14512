"""The evaluation's durability: what it measures, what it keeps, and that a killed one repeats nothing."""

import json
import random
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from evaluation_fixtures import LINES, TASKS, LinePool, Script, run
from evaluation_fixtures import at_once as at_once

from components.agent.episode import RolloutRequest
from components.agent.trajectory import Trajectory
from components.core.errors import InfrastructureError, StageFailed, UserError
from components.core.files import digest_tree
from components.evaluation.report import write_evaluation_report
from components.evaluation.results import Measurement, load_evaluation
from components.judge.pool.local_pool import Job
from components.judge.verdict import Admission, Ratio, Speedup, Verdict


def test_an_answer_on_which_the_judge_failed_is_measured_again_and_the_others_are_not(
    tmp_path: Path,
) -> None:
    class Recovering(LinePool):
        def submit(self, job: Job) -> Future[Verdict]:
            if self.measured[job.task.task_id, job.epoch] == 0 and job.task in TASKS[:2]:
                self.measured[job.task.task_id, job.epoch] += 1
                lost: Future[Verdict] = Future()
                lost.set_result(
                    Verdict(status="infrastructure", reason="judge", log="the judge's Ray actor died")
                )
                return lost
            return super().submit(job)

    pool = Recovering()
    assert (
        run(tmp_path / "again", pool, Script(LINES)).tasks
        == run(tmp_path / "calm", LinePool(), Script(LINES)).tasks
    )
    assert [pool.measured[task.task_id, "evaluation/final/night"] for task in TASKS] == [2, 2, 0, 0, 2]


def test_a_task_that_cannot_be_measured_is_tried_once(tmp_path: Path) -> None:
    class Slow(LinePool):
        def submit(self, job: Job) -> Future[Verdict]:
            found = super().submit(job)
            if job.task == TASKS[0]:
                found = Future()
                found.set_result(Verdict(status="infrastructure", reason="task", log="it takes too long"))
            return found

    pool = Slow()
    with pytest.raises(StageFailed, match=r"on 2 of 5 tasks .*1 task: it takes too long"):
        run(tmp_path, pool, Script(LINES))
    assert [pool.measured[task.task_id, "evaluation/final/night"] for task in TASKS] == [1, 1, 0, 0, 2]


def test_only_kernels_that_may_be_right_are_compared_with_all_modes_of_torch_compile(tmp_path: Path) -> None:
    pool = LinePool()
    run(tmp_path, pool, Script(LINES | {TASKS[1].task_id: ["crashed", "wrong"]}))
    assert [pool.compared.get(task.task_id) for task in TASKS] == [True, False, None, None, True]


def test_a_judge_that_fails_on_more_than_a_quarter_of_the_tasks_ends_the_evaluation_until_it_works(
    tmp_path: Path,
) -> None:
    class Failing(LinePool):
        """A pool that always fails on the first two tasks."""

        def submit(self, job: Job) -> Future[Verdict]:
            found = super().submit(job)
            if job.task in TASKS[:2]:
                found = Future()
                found.set_result(Verdict(status="infrastructure", reason="judge", log="the GPU is gone"))
            return found

    with pytest.raises(
        StageFailed,
        match=r"failed on 3 of 5 tasks \(2 judge: the GPU is gone; 1 infrastructure: \), .* which continues",
    ) as failed:
        run(tmp_path, Failing(), Script(LINES))
    assert failed.value.exit_code == 1 and isinstance(failed.value.__cause__, InfrastructureError)
    assert not (tmp_path / "results.json").exists(), "no gate can read it"
    pool = LinePool()
    found = run(tmp_path, pool, Script({}))
    assert found.errors == 1 and found.overall.correct == 2
    assert {task_id for task_id, _ in pool.measured} == {TASKS[index].task_id for index in (0, 1, 4)}


def test_an_attempt_that_the_judge_ended_is_an_error_and_many_stop_the_evaluation(tmp_path: Path) -> None:
    class Losing(Script):
        """A policy on whose first `lost` attempts the judge fails in a tool call, for the reason `why`."""

        lost, why = 1, "judge"

        def sample(self, request: RolloutRequest) -> list[Trajectory]:
            verdict = Verdict(status="infrastructure", reason=self.why, log="the zygote is gone")
            ended = {"verdicts": (verdict,), "reward": None, "finish_reason": "judge", "error": verdict.log}
            sampled = super().sample(request)
            return [
                replace(one, **ended) if request.first + index < self.lost else one
                for index, one in enumerate(sampled)
            ]

    pool, policy = LinePool(), Losing(LINES)
    found = run(tmp_path / "one", pool, policy, TASKS[:4])
    assert found.errors == 1 and found.tasks[0].error and found.tasks[0].attempts[0].reward is None
    assert pool.measured[TASKS[0].task_id, "evaluation/final/night"] == 0, "half an attempt is no answer"
    many = Losing(LINES)
    many.lost = 2
    with pytest.raises(
        StageFailed, match=r"failed on 2 of 4 attempts \(2 judge: the zygote is gone\).* continues"
    ):
        run(tmp_path / "many", LinePool(), many)
    assert not (tmp_path / "many" / "episodes").exists()
    assert run(tmp_path / "many", LinePool(), Script(LINES)).errors == 1
    many.why, many.seen = "task", Counter()
    faulty = run(tmp_path / "faulty", LinePool(), many, TASKS[:4])
    assert faulty.errors == 1 and faulty.tasks[0].error, "a task whose own source fails ends no batch"


def test_the_first_attempts_final_answer_counts_measured_anew(tmp_path: Path) -> None:
    pool = LinePool()
    found = run(tmp_path, pool, Script(LINES))
    assert [row.status for row in found.tasks] == [
        "correct",
        "correct",
        "build_failed",
        "wrong_output",
        "infrastructure",
    ]
    assert found.overall.pass_rate == 0.4 and found.overall.faster_rate.eager == 0.2, (
        "a second attempt's 9x counts for nothing"
    )
    assert found.overall.attempts_pass_rate == pytest.approx(4 / 9), (
        "over all attempts but the judge's own failures"
    )
    assert found.errors == 1
    assert {epoch for _, epoch in pool.measured} == {"evaluation/final/night"}
    assert len(pool.measured) == 3, "who wrote nothing or what is wrong is not measured"


def test_the_first_answer_of_each_attempt_is_kept_with_its_verdict_in_the_episode(tmp_path: Path) -> None:
    class Improving(Script):
        """A policy whose first kernel is wrong or half as fast as its last one."""

        def sample(self, request: RolloutRequest) -> list[Trajectory]:
            first = Verdict(status="correct", speedup=Speedup(eager=Ratio(estimate=0.5, low=0.4, high=0.6)))
            return [replace(one, verdicts=(first, *one.verdicts)) for one in super().sample(request)]

    found = run(tmp_path / "better", LinePool(), Improving(LINES))
    assert [row.attempts[0].first for row in found.tasks] == [Measurement(status="correct", eager=0.5)] * 5
    only = run(tmp_path / "single", LinePool(), Script(LINES))
    assert [row.attempts[0].first for row in only.tasks] == [
        Measurement(status="correct", eager=2.0),
        Measurement(status="correct", eager=0.5),
        Measurement(status="build_failed"),
        Measurement(status="wrong_output"),
        Measurement(status="infrastructure"),
    ]


@pytest.mark.parametrize(
    ("attempts", "turns", "changed", "is_shared"),
    [
        (1, 1, {}, True),
        (2, 1, {}, False),
        (1, 2, {}, False),
        (1, 1, {"device": "cuda"}, False),
        (1, 1, {"device": "cuda", "compile_modes": "default"}, True),
    ],
)
def test_the_only_answer_of_one_turn_is_measured_once(
    attempts: int, turns: int, changed: dict[str, str], is_shared: bool, tmp_path: Path
) -> None:
    """A job of the episode with the key of the final measurement has its stored verdict."""
    asked: list[tuple[str, bool]] = []

    class Asked(Script):
        def sample(self, request: RolloutRequest) -> list[Trajectory]:
            asked.append((request.epoch, request.compare_compile))
            return super().sample(request)

    pool, policy = LinePool(), Asked(LINES, attempts=attempts, max_turns=turns)
    modes = {"compile_modes": changed.get("compile_modes", "all")}
    sandbox = policy.params.sandbox.model_copy(update=modes)
    device = changed.get("device", "cpu")
    policy.params = policy.params.model_copy(update={"sandbox": sandbox, "device": device})
    run(tmp_path / "out", pool, policy)
    (final,) = {epoch for _, epoch in pool.measured}
    assert {(epoch == final, compares) for epoch, compares in asked} == {(is_shared, is_shared)}


def test_results_json_is_the_evaluation(tmp_path: Path) -> None:
    found = run(tmp_path, LinePool(), Script(LINES))
    assert load_evaluation(tmp_path) == found
    written = json.loads((tmp_path / "results.json").read_text())
    assert {"suite", "policy", "tasks", "overall", "levels", "errors"} <= set(written)
    assert {"task_id", "level", "status", "milestone", "speedup"} <= set(written["tasks"][0])


@pytest.mark.parametrize("lives", [0, 1, 2, 3])
def test_a_killed_evaluation_goes_on_to_the_same_results_and_repeats_nothing(
    tmp_path: Path, lives: int
) -> None:
    whole = run(tmp_path / "whole", LinePool(), Script(LINES))
    script, pool = Script(LINES), LinePool(lives)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", pool, script)
    assert not (tmp_path / "killed" / "results.json").exists()
    known = {path.stem for path in (tmp_path / "killed" / "tasks").glob("*.json")}
    asked, pool = script.asked, LinePool()
    resumed = run(tmp_path / "killed", pool, script)
    assert resumed == whole
    assert script.asked == asked, "episodes are not sampled again"
    assert not known & {task_id for task_id, _ in pool.measured}, "no final answer is measured twice"


@pytest.mark.parametrize("batch", [1, 3, 50])
def test_an_evaluation_goes_on_with_another_batch_to_the_same_seeds_and_results(
    tmp_path: Path, batch: int
) -> None:
    class Full(Script):
        """A policy that runs out of memory in its second batch."""

        def sample(self, request: RolloutRequest) -> list[Trajectory]:
            if self.asked == 1 and self.params.policy.batch == 4:
                raise MemoryError
            return super().sample(request)

    undisturbed, script = Script(LINES), Full(LINES)
    whole = run(tmp_path / "whole", LinePool(), undisturbed)
    with pytest.raises(MemoryError):
        run(tmp_path / "killed", LinePool(), script)
    policy = script.params.policy.model_copy(update={"batch": batch})
    script.params = script.params.model_copy(update={"policy": policy})
    assert run(tmp_path / "killed", LinePool(), script) == whole
    assert script.seeds == undisturbed.seeds and len(set(script.seeds)) == 10, "every attempt has its own"


class SlowPool(LinePool):
    """Takes 50 ms for each judgement, and logs the task and whether its result existed already."""

    def __init__(self, out: Path):
        super().__init__()
        self.out = out

    def submit(self, job: Job) -> Future[Verdict]:
        known = (self.out / "tasks" / f"{job.task.task_id}.json").exists()
        with (self.out.parent / "judged").open("a") as log:
            log.write(f"{job.task.task_id} {known}\n")
        time.sleep(0.05)
        return super().submit(job)


def evaluate_slowly(out: Path) -> None:
    run(out, SlowPool(out), Script(LINES))


def test_ten_sigkills_at_random_moments_give_the_report_of_an_undisturbed_evaluation(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", LinePool(), Script(LINES))
    out, chance = tmp_path / "killed", random.Random(0)
    fork = get_context("fork")
    for _ in range(10):
        process = fork.Process(target=evaluate_slowly, args=(out,))
        process.start()
        process.join(chance.uniform(0.02, 0.6))
        process.kill()
        process.join()
    assert run(out, SlowPool(out), Script(LINES)) == whole
    for folder in ("whole", "killed"):
        write_evaluation_report(tmp_path / folder, load_evaluation(tmp_path / folder))
    reports = [
        json.loads((tmp_path / folder / "report.json").read_text()) | {"device_seconds": None}
        for folder in ("whole", "killed")
    ]
    assert reports[0] == reports[1]
    assert not any(line.endswith("True") for line in (tmp_path / "judged").read_text().splitlines()), (
        "what is known is not judged again"
    )


def test_a_finished_evaluation_is_only_read(tmp_path: Path) -> None:
    run(tmp_path, LinePool(), Script(LINES))
    before = digest_tree(tmp_path)
    script, pool = Script(LINES), LinePool()
    run(tmp_path, pool, script)
    assert script.asked == 0 and not pool.measured and digest_tree(tmp_path) == before


def test_another_evaluation_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    run(tmp_path, LinePool(), Script(LINES))
    with pytest.raises(UserError, match=r"another evaluation.*suite_digest"):
        run(tmp_path, LinePool(), Script(LINES), tasks=TASKS[:3])
    with pytest.raises(UserError, match=r"another evaluation.*evaluation"):
        run(tmp_path, LinePool(), Script(LINES, attempts=1))


def test_a_task_that_stands_twice_is_measured_once_and_counts_twice(tmp_path: Path) -> None:
    twin = TASKS[0].model_copy(update={"name": "twin", "level": 2})
    lines = LINES | {TASKS[0].task_id: ["correct 2"] * 4}
    pool = LinePool()
    found = run(tmp_path, pool, Script(lines), tasks=[TASKS[0], twin])
    assert [(row.name, row.level) for row in found.tasks] == [("", None), ("twin", 2)]
    assert found.overall.correct == 2 and sum(pool.measured.values()) == 1


@pytest.mark.parametrize(
    ("reason", "degenerate"), [("zeros_pass", "zeros_pass"), ("eager_time", ""), ("", "")]
)
def test_a_task_on_which_a_cheat_could_pass_is_marked_if_it_is_solved_and_counts(
    tmp_path: Path, reason: str, degenerate: str
) -> None:
    pool = LinePool()
    pool.unsound = reason
    ours = TASKS[1].model_copy(update={"evidence": {"eager_seconds": 1e-3}})
    found = run(tmp_path, pool, Script(LINES), tasks=[TASKS[0], ours, TASKS[3]])
    assert [row.degenerate for row in found.tasks] == [degenerate, "", ""] and found.overall.tasks == 3
    assert load_evaluation(tmp_path) == found
    assert pool.admitted == [TASKS[0].code], (
        "a task of our own data set was admitted when it was made, and the third one was not solved"
    )


def test_a_policy_is_told_the_shapes_that_the_check_of_a_task_found(tmp_path: Path) -> None:
    class Describing(LinePool):
        def check(self, code: str) -> Future[Admission]:
            found: Future[Admission] = Future()
            found.set_result(Admission(True, "", {"outputs": code}))
            return found

    class Told(Script):
        def sample(self, request: RolloutRequest) -> list[Trajectory]:
            told.extend(task.evidence for task in request.tasks)
            return super().sample(request)

    told: list[dict[str, Any]] = []
    ours = TASKS[1].model_copy(update={"evidence": {"eager_seconds": 1e-3}})
    run(tmp_path, Describing(), Told(LINES, attempts=1), tasks=[TASKS[0], ours])
    assert told == [{"outputs": TASKS[0].code}, ours.evidence]
