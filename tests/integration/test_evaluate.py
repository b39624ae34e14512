"""The evaluation's durability: what it measures, what it keeps, and that a killed one repeats nothing."""

import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from agent_fixtures import TASK, ScriptedPool, completion, kernel, server
from typer.testing import CliRunner

from components.agent.episode import RolloutRequest
from components.agent.policies import Policy, checkpoint_policy
from components.agent.trajectory import Trajectory, Turn
from components.cli.main import app
from components.cli.policies import find_policy
from components.core.config import resolve
from components.core.errors import UserError
from components.core.files import digest_tree
from components.core.progress import Quiet
from components.core.task import KernelTask
from components.evaluation.evaluate import evaluate
from components.evaluation.metrics import Evaluation, Measurement, load_evaluation
from components.evaluation.report import write_evaluation_report
from components.judge.pool import Candidate, Job
from components.judge.verdict import Admission, Ratio, Seconds, Speedup, Status, Verdict, milestone
from components.registry.gates import integrity

TASKS = [
    KernelTask(code=f"class Model: factor = {index}", ops=("mul",), split="held_out") for index in range(5)
]


def verdict_of(candidate: Candidate) -> Verdict:
    """Return the verdict that the first word of kernels/forward.cpp names."""
    word, _, number = dict(candidate.files)["kernels/forward.cpp"].partition(" ")
    status: Status = (
        "correct" if word == "correct" else "infrastructure" if word == "infrastructure" else "wrong_output"
    )
    ratio = (
        Ratio(estimate=float(number), low=float(number), high=float(number)) if status == "correct" else None
    )
    speedup = Speedup(eager=ratio, compile=ratio)
    return Verdict(
        status=status,
        milestone=milestone(Verdict(status=status, speedup=speedup)),
        seconds=Seconds(candidate=1e-3),
        speedup=speedup,
    )


class LinePool:
    """A pool that judges by `verdict_of`, counts measurements, and is interrupted after `lives` of them."""

    def __init__(self, lives: int = 1000):
        self.lives = lives
        self.measured: Counter[tuple[str, str]] = Counter()

    def submit(self, job: Job) -> Future[Verdict]:
        future: Future[Verdict] = Future()
        self.measured[job.task.task_id, job.epoch] += 1
        if sum(self.measured.values()) > self.lives:
            future.set_exception(KeyboardInterrupt())
        else:
            future.set_result(verdict_of(job.candidate))
        return future

    def drop(self) -> None:
        return

    def close(self) -> None:
        return


class Script:
    """A policy with one written line per attempt and task; counts how often it is asked."""

    name = version = digest = "script"

    def __init__(self, lines: dict[str, list[str]], **evaluation: Any):
        self.lines = lines
        self.asked = 0
        found = resolve("ci", ("policy.batch=4",)).params
        self.params = found.model_copy(update={"evaluation": found.evaluation.model_copy(update=evaluation)})

    def sample(self, request: RolloutRequest) -> list[Trajectory]:
        self.asked += 1
        seen: Counter[str] = Counter()
        found = []
        for task in request.tasks:
            line = self.lines[task.task_id][seen[task.task_id]]
            seen[task.task_id] += 1
            files = {"kernels/forward.cpp": line} if line else {}
            verdict = (
                verdict_of(Candidate.of(files)) if files else Verdict(status="build_failed", reason="nothing")
            )
            found.append(
                Trajectory(
                    task.task_id,
                    (1, 2),
                    (0, 1),
                    (0.0, -1.0),
                    (Turn(line),),
                    (verdict,),
                    float(verdict.milestone),
                    "stop",
                    "v",
                    files,
                )
            )
            request.on_progress(len(found), len(request.tasks))
        return found


ATTEMPTS = [
    ["correct 2", "wrong"],
    ["correct 0.5", "correct 9"],
    ["", ""],
    ["wrong", "correct 9"],
    ["infrastructure", "wrong"],
]
LINES = {task.task_id: lines for task, lines in zip(TASKS, ATTEMPTS, strict=True)}


def run(out: Path, pool: Any, script: Script, tasks: Sequence[KernelTask] = TASKS) -> Evaluation:
    return evaluate(script, tasks, pool, out, epoch="night", progress=Quiet(), seed=0)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.evaluation.evaluate.RETRY_SECONDS", (0.0,))


def test_an_answer_on_which_the_judge_failed_is_measured_again_and_the_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    assert [pool.measured[task.task_id, "evaluation/final/night"] for task in TASKS] == [2, 2, 0, 1, 2]
    monkeypatch.setattr("components.evaluation.evaluate.RETRY_SECONDS", ())
    assert run(tmp_path / "never", Recovering(), Script(LINES)).errors == 3


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
    assert len(pool.measured) == 4, "who wrote nothing is not measured"


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
    ("files", "says"),
    [
        ({}, r"config\.json is missing"),
        ({"config.json": "{}", "manifest.json": '{"files": {}}'}, r"manifest\.json"),
    ],
    ids=["no_model", "no_manifest"],
)
def test_a_folder_that_is_no_sound_policy_is_refused(
    tmp_path: Path, files: dict[str, str], says: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=says):
        checkpoint_policy(tmp_path, resolve("ci").params)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no run was registered here yet"),
        (
            ["--policy", "no-such-folder"],
            "no such folder; give champion, a version's number, a folder, or an address",
        ),
        (["--policy", "."], r"config\.json is missing"),
        (["--levels", "one"], "--levels one: numbers with commas"),
        (["--levels", "4"], "its levels are: 1, 2, 3"),
        (["--policy", "model", "--resume"], "no such evaluation was begun"),
    ],
)
def test_an_evaluation_of_nothing_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=says):
        raise CliRunner().invoke(
            app, ["evaluate", "--home", "home", "--suite", "shipped", *words]
        ).exception or AssertionError("it was accepted")
    assert not (tmp_path / "home").exists()


def said(url: str, **sets: Any) -> Policy:
    """The policy that `--policy URL` names."""
    resolved = resolve("ci", tuple(f"{key}={value}" for key, value in sets.items()))
    return find_policy(url, "", resolved)


def test_a_server_is_evaluated_like_a_folder_and_a_batch_that_it_left_unanswered_is_not_kept(
    tmp_path: Path,
) -> None:
    """A batch that the server left unanswered is not kept, so that it is asked again."""
    talk = [
        (
            200,
            completion(
                "", [("Write", json.dumps({"file_path": "kernels/forward.cpp", "content": kernel(2.0)}))]
            ),
            {},
        ),
        (200, completion("done."), {}),
    ]
    tasks = [TASK, TASK.model_copy(update={"code": TASK.code.replace("tanh", "relu")})]

    def answers(number: int, body: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
        return talk[number] if number < len(talk) else (403, b"gone", {})

    with server(answers) as url:
        policy = said(url, **{"evaluation.attempts": 1, "policy.batch": 1})
        assert (policy.params.policy.prompt, policy.params.evaluation.max_turns) == ("full", 30), (
            "a server is not a tiny policy"
        )
        found = evaluate(
            policy, tasks[:1], ScriptedPool(), tmp_path / "one", epoch="e", progress=Quiet(), seed=0
        )
        assert (found.policy, found.tasks[0].status, found.overall.faster_rate.eager) == (
            f"{url}/v1 tiny",
            "correct",
            1.0,
        )
        with pytest.raises(
            UserError, match=r"the server answers 403: gone; fix the server, the same command continues"
        ):
            evaluate(policy, tasks[1:], ScriptedPool(), tmp_path / "two", epoch="e", progress=Quiet(), seed=0)
        assert not (tmp_path / "two" / "episodes").exists()


def test_a_task_on_which_the_server_failed_is_an_error_and_no_miss(tmp_path: Path) -> None:
    class Failing(Script):
        def sample(self, request: RolloutRequest) -> list[Trajectory]:
            found = super().sample(request)
            return [replace(found[0], finish_reason="server", error="gone"), *found[1:]]

    found = run(tmp_path, LinePool(), Failing(LINES, attempts=1), tasks=TASKS[:2])
    assert [(row.status, row.reason) for row in found.tasks] == [
        ("infrastructure", "server"),
        ("correct", ""),
    ]
    assert found.errors == 1 and found.overall.attempts_pass_rate == 1.0


@pytest.mark.parametrize(
    ("reason", "degenerate"), [("zeros_pass", "zeros_pass"), ("eager_time", ""), ("", "")]
)
def test_a_task_on_which_a_cheat_could_pass_is_marked_and_counts(
    tmp_path: Path, reason: str, degenerate: str
) -> None:
    asked: list[str] = []

    def admit(code: str) -> Future[Admission]:
        asked.append(code)
        future: Future[Admission] = Future()
        future.set_result(Admission(not reason, reason, {}))
        return future

    ours = TASKS[1].model_copy(update={"evidence": {"eager_seconds": 1e-3}})
    found = evaluate(
        Script(LINES),
        [TASKS[0], ours],
        LinePool(),
        tmp_path,
        epoch="night",
        progress=Quiet(),
        seed=0,
        admit=admit,
    )
    assert [row.degenerate for row in found.tasks] == [degenerate, ""] and found.overall.tasks == 2
    assert asked == [TASKS[0].code], "a task of our own data set was admitted when it was made"


def test_tasks_too_large_for_the_device_are_left_out_before_any_attempt_and_listed(tmp_path: Path) -> None:
    refused = {TASKS[1].code: "too_large"}

    def admit(code: str) -> Future[Admission]:
        future: Future[Admission] = Future()
        detail = "judging it takes 99.9 GB of device memory"
        reason = refused.get(code, "")
        future.set_result(Admission(not reason, reason, {"detail": detail}))
        return future

    def evaluated(out: Path) -> Evaluation:
        return evaluate(
            Script(LINES), TASKS[:3], LinePool(), out, epoch="e", progress=Quiet(), seed=0, admit=admit
        )

    found = evaluated(tmp_path / "some")
    assert [row.task_id for row in found.tasks] == [TASKS[0].task_id, TASKS[2].task_id]
    assert [(left.task_id, left.reason) for left in found.not_measurable] == [
        (TASKS[1].task_id, "judging it takes 99.9 GB of device memory")
    ]
    assert load_evaluation(tmp_path / "some") == found and found.overall.errors == 0
    gate = integrity(
        found.overall,
        resolve("ci").params.gate.model_copy(update={"measured": 1.0}),
        digests_match=True,
        isolated=True,
        report_complete=True,
    )[0]
    assert gate.name == "integrity.measured" and gate.passed, "what cannot be measured is no error"
    assert "can be measured on this device" not in write_evaluation_report(tmp_path, found).read_text()
    assert "cannot be measured on this device" in write_evaluation_report(tmp_path, found).read_text()
    refused |= {TASKS[0].code: "does_not_run", TASKS[2].code: "too_large"}
    with pytest.raises(
        UserError, match=r"no task .* can be measured on this device \(judging it takes 99.9 GB"
    ):
        evaluated(tmp_path / "none")
    assert not (tmp_path / "none" / "episodes").exists(), "no attempt was made"
