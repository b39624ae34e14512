"""Trainers of others on the HTTP service: TRL with the reward function, verifiers with the taskset."""

import json
import os
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from agent_fixtures import params
from judge_fixtures import TASK
from library_environments import python_with
from served_policy import learn, served, with_closed_streams
from service_fixtures import service_of

from components.core.config import PROJECT
from components.core.params import Params
from components.core.task import KernelTask

CODE = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x):
        return torch.tanh(x) * 0.5

def get_inputs():
    return [torch.randn({rows}, 1024)]

def get_init_inputs():
    return []
"""
# One candidate answers all tasks, which differ in their sizes.
TASKS = [KernelTask(code=CODE.format(rows=rows), name=f"rows_{rows}") for rows in range(128, 256, 16)]
# Those whose message the policy knows; with the others it may make no call.
LEARNT = TASKS[::4]
FILES = {
    "model_new.py": """import torch
import torch.nn as nn
import cuda_extension

class ModelNew(nn.Module):
    def forward(self, x):
        out = torch.empty_like(x)
        cuda_extension.forward(x, out)
        return out
""",
    "kernels/forward.cpp": """#include "binding_registry.h"
#include "vec.h"
KERNEL(forward) {
  const float* x = f32(t[0]);
  float* y = f32(t[1]);
#pragma omp simd
  for (int64_t i = 0; i < t[0].numel; ++i) y[i] = vtanh(x[i]) * 0.5f;
}
""",
}

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")


def conversation(task: KernelTask) -> list[dict[str, Any]]:
    """The task's message, and the turn in which the policy writes both files."""
    calls = [
        {"type": "function", "function": {"name": "write", "arguments": {"file_path": path, "content": text}}}
        for path, text in FILES.items()
    ]
    return [
        {"role": "user", "content": task.code},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]


def wait_for(address: str) -> None:
    for _ in range(200):
        try:
            urllib.request.urlopen(f"{address}/health").close()
            return
        except OSError:
            time.sleep(0.3)
    raise AssertionError("the server of the policy did not start")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return python_with(
        tmp_path_factory.mktemp("verifiers"),
        f"{PROJECT / 'components' / 'service' / 'client'}[verifiers]",
        "verifiers==0.4.0",
    )


def test_trl_makes_two_grpo_steps(ci_params: Params, tmp_path: Path) -> None:
    python = python_with(tmp_path / "trl", "torch==2.13.0", "trl==1.16.0", "jmespath")
    script = str(PROJECT / "tests" / "environments" / "trl_grpo.py")
    with service_of([TASK], ci_params, tmp_path / "judge") as judge:
        # DeepSpeed in an earlier test of this process may have set the variables of a rank.
        own = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        environment = own | {"CUDA_AGENT_JUDGE": judge}
        done = subprocess.run([python, script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]


def test_vf_eval_rewards_eight_rollouts_with_their_milestones(
    python: str, ci_params: Params, tmp_path: Path
) -> None:
    policy = tmp_path / "policy"
    learn(
        policy,
        [conversation(task) for task in LEARNT],
        params(prompt="compact", context=2048, hidden=64, feed_forward=128, head_dim=16),
    )
    with (
        service_of(TASKS, ci_params, tmp_path / "judge") as judge,
        served(policy) as server,
        with_closed_streams(server) as streams,
    ):
        wait_for(server)
        settings = {
            "env.taskset.message": "code",
            "env.agent.harness.id": "null",
            "env.agent.runtime.type": "subprocess",
            "env.agent.max-turns": "2",
            "sampling.temperature": "0",
            "sampling.max-tokens": "700",
            "client.base-url": f"{streams}/v1",
            "max-concurrent": "2",
            "output-dir": str(tmp_path / "outputs"),
            "model": str(policy),
        }
        done = subprocess.run(
            [
                Path(python).with_name("vf-eval"),
                "cuda-agent-kernels",
                *(word for name, value in settings.items() for word in (f"--{name}", value)),
                "--no-push",
                "--no-rich",
            ],
            capture_output=True,
            text=True,
            # The program of the harness is a script that uv installs.
            env=os.environ
            | {"PATH": f"{Path(python).parent}:{PROJECT / '.venv' / 'bin'}:{os.environ['PATH']}"}
            | {"CUDA_AGENT_JUDGE": judge},
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [traces] = (tmp_path / "outputs").glob("**/traces.jsonl")
    rollouts = [json.loads(line)["traces"][0] for line in traces.read_text().splitlines()]
    assert len(rollouts) == 8 and not any(rollout["errors"] for rollout in rollouts), rollouts[0]["errors"]
    rewards = {
        rollout["task"]["data"]["id"]: rollout["rewards"]["milestone"]["score"] for rollout in rollouts
    }
    assert rewards.keys() == {task.task_id for task in TASKS} and set(rewards.values()) <= {-1, 1, 2, 3}
    assert all(rewards[task.task_id] >= 1 for task in LEARNT), rewards
