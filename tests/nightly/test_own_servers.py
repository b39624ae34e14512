"""vLLM servers that a process starts for itself: once, when it first samples, and never left behind."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fleet_fixtures import free_port, starts, vllm_executable
from train_command_fixtures import train
from training_fixtures import episode, params, stage, tiny_policy, tiny_tokenizer

from components.agent.policies import open_sampler
from components.agent.trajectory import load_trajectories
from components.core import reaper
from components.core.config import PROJECT
from components.core.errors import StageFailed, UserError
from components.core.params import Params
from components.policy.sampler import Completion
from components.policy.vllm import start
from components.policy.vllm.own_servers import OWN_SERVERS, check_own_servers
from components.policy.vllm.sampler import VllmSampler
from components.policy.vllm.weights import FleetWeights
from components.training.rollouts import TrainedPolicy
from components.training.run_stage import run_stage
from components.training.stage import CHECKPOINT, Stage

CONTEXT = 128
SMALL = ("warmup.steps=2", "warmup.learning_rate=0.01", "warmup.critic_warmup_steps=0")


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(reaper.VARIABLE, "")
    yield vllm_executable(tmp_path / "bin", CONTEXT)
    OWN_SERVERS.close()


def sets(vllm: Path, *more: str) -> tuple[str, ...]:
    own: tuple[str, ...] = ("policy.backend=vllm-server", "policy.servers=[]", f"policy.context={CONTEXT}")
    return (
        *own,
        "policy.weight_transfer=disk",
        f"policy.vllm={vllm}",
        f"home={vllm.parent.parent}/home",
        *more,
    )


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_ended(vllm: Path) -> None:
    deadline = time.monotonic() + 60
    while any(is_alive(process) for server in starts(vllm) for process in server):
        assert time.monotonic() < deadline, "a server was left behind"
        time.sleep(0.1)


def test_the_stages_of_a_process_share_one_server_which_is_started_when_one_samples(
    vllm: Path, tmp_path: Path
) -> None:
    with closing(OWN_SERVERS):
        first = stage(tmp_path, "warmup", *sets(vllm, *SMALL))
        assert not starts(vllm)
        run_stage(first, episode)
        again = ("agentic.advantages=group", "agentic.learning_rate=0.01", "agentic.steps=2")
        second = stage(tmp_path, "agentic", *sets(vllm, *again), actor=first.out / CHECKPOINT)
        run_stage(second, episode)
        records = [
            json.loads(line)
            for each in (first, second)
            for line in (each.out / "metrics.jsonl").read_text().splitlines()
        ]
        # Only the newest weights agree with the trainer's to rounding.
        assert len(records) == 4 and max(record["sampler_difference"] for record in records) < 1e-4
        assert len(starts(vllm)) == 1 and all(map(is_alive, starts(vllm)[0]))
        # A model of another configuration cannot be pushed into it.
        other = tiny_policy()
        other.config.rms_norm_eps = 0.1
        other.save_pretrained(tmp_path / "other")
        tiny_tokenizer().save_pretrained(tmp_path / "other")
        OWN_SERVERS.open(params(*sets(vllm)), tmp_path / "other")
        assert [is_alive(server[0]) for server in starts(vllm)] == [False, True]
    wait_until_ended(vllm)


def test_a_server_that_is_killed_within_a_step_is_started_again_with_the_weights_of_the_step(
    vllm: Path, tmp_path: Path
) -> None:
    made = stage(tmp_path, "warmup", *sets(vllm, *SMALL))

    async def killing(request: Any, index: int, *others: Any) -> Any:
        if request.epoch.endswith("/1") and index == 5 and len(starts(vllm)) == 1:
            os.kill(starts(vllm)[0][0], signal.SIGKILL)
        return await episode(request, index, *others)

    run_stage(made, killing)
    assert len(starts(vllm)) == 2
    (folder,) = (made.out / "trajectories").glob("step-0001")
    versions = {name for trajectory in load_trajectories(folder) for name, _ in trajectory.versions}
    assert len(versions) == 1 and versions.pop().endswith("+1")
    last = json.loads((made.out / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["sampler_difference"] < 1e-4 and last["sampler_retries"] > 0


@pytest.mark.parametrize("method", ["_begin", "_end"])
def test_a_server_that_is_killed_before_or_during_a_push_is_waited_for_and_gets_all_weights(
    method: str, vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(FleetWeights, method)

    def killing(weights: FleetWeights, *arguments: Any) -> Any:
        if weights.fleet.replicas[0].version.endswith("+0") and len(starts(vllm)) == 1:
            os.kill(starts(vllm)[0][0], signal.SIGKILL)
        return original(weights, *arguments)

    monkeypatch.setattr(FleetWeights, method, killing)
    made = stage(tmp_path, "warmup", *sets(vllm, *SMALL))
    run_stage(made, episode)
    assert len(starts(vllm)) == 2
    last = json.loads((made.out / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 1 and last["sampler_difference"] < 1e-4


def test_a_server_that_ends_in_an_evaluation_is_started_again_with_its_weights_but_not_for_ever(
    vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(start, "POLL_SECONDS", 0.05)
    caplog.set_level("INFO", "components")
    tokenizer, folders = tiny_tokenizer(), [tmp_path / "first", tmp_path / "evaluated"]
    for seed, folder in enumerate(folders):
        tiny_policy(seed).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    given = params(*sets(vllm))
    OWN_SERVERS.open(given, folders[0])
    sampler = open_sampler(given, folders[1], tokenizer, version="evaluated")

    def complete() -> Completion:
        coroutine = sampler.complete([1, 5, 6], max_new_tokens=6, temperature=0.0, seed=0, session="s")
        return asyncio.run(coroutine)

    before = complete()
    assert set(before.versions) == {"evaluated"}
    os.kill(starts(vllm)[0][0], signal.SIGKILL)
    assert complete() == before and len(starts(vllm)) == 2
    vllm.write_text("#!/bin/sh\necho the GPU has fallen off the bus >&2\nexit 5\n")
    os.kill(starts(vllm)[1][0], signal.SIGKILL)
    log = given.home + "/vllm/server-0.log"
    with pytest.raises(
        StageFailed,
        match=rf"^{log}: .* has ended with code 5 \(the GPU has fallen off the bus\), 3 times in a row, and "
        "is not started again; mend what the log says, and run the same command again",
    ):
        complete()
    assert "has ended with code -9" in caplog.text


SLOW_SERVER = f"""#!{sys.executable}
import http.server, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
time.sleep(1)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[4])), Handler).serve_forever()
"""


def test_a_server_says_while_it_starts_for_how_long_and_where_its_log_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "REPORT_SECONDS", 0.2)
    monkeypatch.setattr(start, "POLL_SECONDS", 0.1)
    vllm, said = tmp_path / "vllm", list[str]()
    vllm.write_text(SLOW_SERVER)
    vllm.chmod(0o755)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    launch = start.Launch(url, (str(vllm), "serve", "model", "--port", str(port)), ("0",), tmp_path / "log")
    with start.running([launch], said.append):
        *starting, ready = said
    assert len(starting) > 1 and {re.sub(r"\d+ s", "N s", line) for line in starting} == {
        f"The vLLM server at {url} has been starting for N s; its log is {launch.log}."
    }
    assert re.fullmatch(rf"The vLLM server at {url} is ready after [1-9]\d* s\.", ready)


def test_a_server_that_ends_while_it_starts_is_one_sentence_with_the_last_line_of_its_log(
    tmp_path: Path,
) -> None:
    log, vllm = tmp_path / "log", tmp_path / "vllm"
    log.write_text("a line of an earlier server\n")
    for script, line in (
        ("echo loading; echo no such model >&2; echo", "no such model"),
        ("", "it is empty"),
    ):
        vllm.write_text(f"#!/bin/sh\n{script}\nexit 3\n")
        vllm.chmod(0o755)
        launch = start.Launch("http://127.0.0.1:9", (str(vllm),), ("0",), log)
        with (
            pytest.raises(UserError, match=rf"^{log}: the server at .* ended with code 3 \({line}\); mend"),
            start.running([launch], print),
        ):
            pass


def test_weights_that_several_ranks_would_have_to_gather_within_a_step_are_not_waited_for(
    tmp_path: Path,
) -> None:
    made = stage(tmp_path, "warmup", "engine.zero_stage=3")
    fleet: Any = SimpleNamespace(has_lost_weights=lambda: True)
    policy: Any = SimpleNamespace(
        stage=made,
        world=SimpleNamespace(size=2),
        sampler=VllmSampler(fleet, (2,), made.params.policy, version="v"),
        _gathers=lambda: TrainedPolicy._gathers(policy),
    )
    with pytest.raises(
        StageFailed, match=r"^warmup: the vLLM servers lost their weights .* same command again"
    ):
        TrainedPolicy._restore(policy)


PROGRAM = """
import asyncio, sys
from pathlib import Path
from training_fixtures import episode, stage
from components.core.errors import StageFailed
from components.core.signals import handle_signals
from components.training.run_stage import run_stage

async def judged(request, index, *others):
    found = await episode(request, index, *others)
    if sys.argv[2] == "raise":
        raise ValueError("the training failed")
    if sys.argv[2] == "wait":
        print("sampled", flush=True)
        await asyncio.sleep(3)
    return found

handle_signals()
try:
    run_stage(stage(Path(sys.argv[1]), "warmup", *sys.argv[3:]), judged)
except StageFailed as error:
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize(
    ("does", "sent", "code"),
    [
        ("end", None, 0),
        ("raise", None, 1),
        ("wait", signal.SIGTERM, 143),
        ("wait", signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_the_server_ends_with_its_process(
    does: str, sent: signal.Signals | None, code: int, vllm: Path, tmp_path: Path
) -> None:
    paths = os.pathsep.join((str(PROJECT), str(PROJECT / "tests" / "fixtures")))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), does, *sets(vllm, *SMALL)]
    with subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        if sent is not None:
            while process.stdout.readline().strip() != "sampled":
                assert process.poll() is None
            process.send_signal(sent)
        assert process.wait(120) == code
    assert len(starts(vllm)) == 1
    if sent is not signal.SIGKILL:
        assert not is_alive(starts(vllm)[0][0]), "it ended before the process"
    wait_until_ended(vllm)


def test_without_an_executable_nothing_is_begun(tmp_path: Path) -> None:
    made: Stage = stage(tmp_path, "warmup")
    chosen = [word for value in sets(tmp_path / "bin" / "vllm") for word in ("--set", value)]
    folders = ("--input", str(made.actor), "--dataset", str(made.dataset), "--output", str(made.out))
    done = train("warmup", *folders, *chosen)
    assert done.returncode == 2 and not made.out.exists()
    assert done.stderr.strip() == (
        f"cuda-agent: policy.vllm: there is no executable {tmp_path}/bin/vllm; give that of the environment "
        "in which vLLM is installed, for instance /opt/vllm/bin/vllm."
    )


def test_gpus_of_samplers_are_those_after_the_trainer_s(vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def given(count: int) -> Params:
        return params(*sets(vllm, f"pool.samplers={count}"))

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5")
    check_own_servers(given(0))
    check_own_servers(given(1))
    with pytest.raises(UserError, match=r"pool\.samplers: 2 .* CUDA_VISIBLE_DEVICES is 4,GPU-5;"):
        check_own_servers(given(2))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"pool\.samplers: 1 .* each rank of the trainer one, but"):
        check_own_servers(given(1))
