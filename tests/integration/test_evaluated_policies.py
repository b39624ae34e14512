"""Which policies are evaluated: folders and servers are, and anything else is refused in one sentence."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agent_fixtures import TASK, ScriptedPool, completion, kernel, server
from evaluation_fixtures import LINES, TASKS, LinePool, Script, run
from evaluation_fixtures import at_once as at_once
from typer.testing import CliRunner

from components.agent.episode import RolloutRequest
from components.agent.policies import Policy, checkpoint_policy
from components.agent.trajectory import Trajectory
from components.cli.evaluation import evaluation_epoch
from components.cli.main import app
from components.cli.models import find_policy
from components.core.config import resolve
from components.core.errors import UserError
from components.core.progress import Quiet
from components.evaluation.evaluate import evaluate


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, r"manifest\.json is missing"),
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
            "no such folder; give champion, a version's number, a folder, rules, or an address",
        ),
        (["--policy", "."], r"config\.json is missing"),
        (["--levels", "4"], "its levels are: 1, 2, 3"),
        (["--levels", "1,x"], "evaluation.levels = .*valid integer"),
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


def test_an_evaluation_continues_with_another_batch_and_with_no_other_attempts() -> None:
    def epoch(*sets: str) -> str:
        return evaluation_epoch("digest", [TASK], resolve("ci", sets).params)

    assert epoch() == epoch("policy.batch=3", "pool.judges=2", "data.held_out=7", "home=elsewhere")
    assert len({epoch(), epoch("evaluation.attempts=9"), epoch("sandbox.rounds=9"), epoch("seed=9")}) == 4


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
