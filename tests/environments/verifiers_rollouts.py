"""Rollouts on the taskset's tool server with one place for an open session, so that they displace each other.

    python tests/environments/verifiers_rollouts.py http://127.0.0.1:8471 turns_are_counted_over_sessions

Needs the packages of components/service/client with the extra verifiers.
"""

import asyncio
import json
import sys
import time
import urllib.request

import verifiers.v1 as vf
from cuda_agent_env import EnvironmentFailed
from cuda_agent_kernels import toolset
from cuda_agent_kernels.toolset import KernelState, KernelToolset

FILE = {"file_path": "model_new.py", "content": "import torch"}
SKILL = {"file_path": "SKILL.md"}


def open_sessions(address: str) -> int:
    with urllib.request.urlopen(f"{address}/health") as answer:
        return int(json.load(answer)["sessions"])


def wait_for_sessions(address: str, number: int) -> None:
    """Wait until the server has noticed which sessions were closed."""
    deadline = time.monotonic() + 5
    while open_sessions(address) != number:
        assert time.monotonic() < deadline, f"{open_sessions(address)} sessions are open, not {number}"
        time.sleep(0.05)


def turns_are_counted_over_sessions(server: KernelToolset, address: str) -> None:
    first, second = (KernelState(environment=address, max_turns=turns) for turns in (3, 9))
    server.call(first, "first", "write", FILE)
    for _ in range(2):
        server.call(second, "second", "read", SKILL)  # closes the session of the other rollout
        assert "import torch" in server.call(first, "first", "read", {"file_path": "model_new.py"})
    for _ in range(2):
        server.call(second, "second", "read", SKILL)
        assert server.call(first, "first", "read", SKILL) == "The episode has ended."
    wait_for_sessions(address, 1)


def failed_calls_leave_no_session_open(server: KernelToolset, address: str) -> None:
    for state, arguments, error in (
        (KernelState(environment=address, task_id="none", max_turns=3), SKILL, EnvironmentFailed),
        (KernelState(environment=address, max_turns=3), {"no_parameter": ""}, TypeError),
    ):
        try:
            server.call(state, "rollout", "read", arguments)
        except error:
            wait_for_sessions(address, 0)
        else:
            raise AssertionError(f"no {error}")


def main() -> None:
    address, claim = sys.argv[1:]
    toolset.OPEN_SESSIONS = 1
    server = KernelToolset(vf.SharedToolsetConfig())
    asyncio.run(server.setup())
    claims = (turns_are_counted_over_sessions, failed_calls_leave_no_session_open)
    {check.__name__: check for check in claims}[claim](server, address)
    for session in server.sessions.values():
        session.close()


if __name__ == "__main__":
    main()
