"""vLLM servers that a process starts for itself: once, when it first samples, and never left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fleet_fixtures import starts, vllm_executable
from train_command_fixtures import train
from training_fixtures import episode, params, stage, tiny_policy, tiny_tokenizer

from components.agent.trajectory import load_trajectories
from components.core import reaper
from components.core.config import PROJECT
from components.core.errors import UserError
from components.core.params import Params
from components.policy.vllm.own_servers import OWN_SERVERS, check_own_servers
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
    with pytest.raises(UserError, match=r"pool\.samplers: 2 GPUs .* CUDA_VISIBLE_DEVICES names 4,GPU-5;"):
        check_own_servers(given(2))
