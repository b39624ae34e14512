"""Sessions of the environment over their WebSocket, and the trainers and clients that speak it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import judge_fixtures as corpus
import pytest
from environment_fixtures import environment_of
from library_environments import python_with
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

from components.core.config import PROJECT
from components.core.params import Params
from components.service import environment

sys.path.insert(0, str(PROJECT / "components" / "service" / "client"))
from cuda_agent_env import EnvironmentFailed, KernelEnv, Session

HONEST = corpus.files("honest", "simd")


@pytest.fixture(scope="module")
def url(ci_params: Params, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with environment_of([corpus.TASK], ci_params, tmp_path_factory.mktemp("environment")) as address:
        yield address


def test_the_milestone_is_given_once_at_the_end(url: str) -> None:
    session = Session(url)
    first = session.reset(corpus.TASK.task_id)
    assert (first.reward, first.done) == (None, False) and "class Model" in first.text
    for path, text in HONEST.items():
        step = session.step("Write", file_path=path, content=text)
        assert (step.reward, step.done) == (None, False), step
    assert "model_new.py" in session.step("Glob", pattern="*.py").text
    last = session.finish()
    assert (last.observation["status"], last.done) == ("correct", True) and last.reward in (1.0, 2.0, 3.0)
    assert "seeds" not in json.dumps(last.observation)
    with pytest.raises(EnvironmentFailed, match="EPISODE_ENDED"):
        session.finish()
    assert not session.reset(max_turns=1).done
    assert session.step("Read", file_path="model.py").reward == -1.0, "the last turn ends the episode"
    session.close()


def test_a_web_page_opens_no_session(url: str) -> None:
    address = url.replace("http", "ws") + "/ws"
    with pytest.raises(InvalidStatus, match="403"):
        connect(address, origin=Origin("https://page.example"))
    connect(address).close()


def test_the_judgements_of_rollouts_that_are_stepped_in_turn_overlap(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer calls the tools of a batch one after another."""
    monkeypatch.setenv("CUDA_AGENT_URL", url)
    rollouts = [KernelEnv() for _ in range(8)]
    started = time.monotonic()
    for number, rollout in enumerate(rollouts):
        rollout.reset(corpus.TASK.task_id)
        for path, text in HONEST.items():
            rollout.write(path, f"{text}\n" + (f"// {number}\n" if path.startswith("kernels/") else ""))
    writing = time.monotonic() - started
    waits = []
    for rollout in rollouts:
        began = time.monotonic()
        assert rollout.get_reward() >= 1
        waits.append(time.monotonic() - began)
    assert max(waits[1:]) < sum(waits) + writing, (writing, waits)
    assert writing < sum(waits), "writing does not wait for a judgement"


def test_faulty_messages_are_answered_with_a_code(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect(url.replace("http", "ws") + "/ws") as client:

        def ask(text: str) -> str:
            client.send(text)
            answer = json.loads(client.recv())
            return str(answer["data"].get("code", answer["type"]))

        assert ask("{") == ask("[]") == ask('{"data": 1}') == "INVALID_JSON"
        assert ask('{"type": "step", "data": {"tool": "Read"}}') == "EPISODE_ENDED"
        assert ask('{"type": "reset", "data": {"task_id": "none"}}') == "NO_SUCH_TASK"
        assert ask('{"type": "reset", "data": {"max_turns": 0}}') == "VALIDATION_ERROR"
        assert ask('{"type": "reset", "data": {"epoch": "mine"}}') == "VALIDATION_ERROR"
        assert ask('{"type": "run"}') == "UNKNOWN_TYPE"
        assert ask('{"type": "state"}') == "state"
        assert ask('{"type": "reset"}') == "observation", "the session goes on after errors"
        monkeypatch.setattr(environment, "MAX_SESSIONS", 1)
        with pytest.raises(EnvironmentFailed, match="CAPACITY_REACHED"):
            Session(url).reset()


@pytest.mark.parametrize("package", ["openenv==0.10.0", "openenv==0.4.1", "openenv-core==0.3.0"])
def test_clients_of_openenv_run_an_episode(package: str, url: str, tmp_path: Path) -> None:
    """Of the newest version, of the first with this name, and of the last with the name before."""
    run(python_with(tmp_path / "openenv", package), "openenv_client.py", url)


def test_trl_makes_two_grpo_steps(url: str, tmp_path: Path) -> None:
    packages = ("torch==2.13.0", "trl==1.16.0", "jmespath", "websockets")
    run(python_with(tmp_path / "trl", *packages), "trl_grpo.py", url)


def run(python: str, script: str, url: str) -> None:
    command = [python, str(Path(__file__).resolve().parents[1] / "environments" / script), url]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"CUDA_AGENT_URL": url})
    assert done.returncode == 0, done.stderr[-2000:]
