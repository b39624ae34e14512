"""vLLM servers in processes of their own: sessions survive the death and the restart of a server."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from fleet_fixtures import free_port, process, sessions, vllm_executable
from prefect_fixtures import wait_for
from ray_fixtures import ray_cluster
from training_fixtures import params, tiny_policy, tiny_tokenizer
from vllm_double import Engine, serving

from components.core.config import PROJECT
from components.core.errors import UserError
from components.planning.ray_cluster import announced
from components.policy.sampler import Completion
from components.policy.vllm.fleet import Fleet
from components.policy.vllm.sampler import VllmSampler
from components.policy.vllm.server_client import server_addresses
from components.policy.weight_stream import weight_buckets

CONTEXT = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    tiny_policy(seed=3).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def test_sessions_of_a_killed_server_end_on_another_and_none_ends_twice(folder: Path) -> None:
    ports = [free_port(), free_port()]
    with ExitStack() as stack:
        servers = [stack.enter_context(process(folder, port, token_seconds=0.02)) for port in ports]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        fleet = Fleet(urls, context=CONTEXT, version="v0", patience=60.0)
        seen: list[int] = []

        async def run() -> list[list[Completion]]:
            running = asyncio.create_task(sessions(fleet, 8, 4, seen=seen))
            while len(seen) < 8:
                await asyncio.sleep(0.01)
            servers[0].send_signal(signal.SIGKILL)
            return await running

        found = asyncio.run(run())
        assert sorted(seen) == sorted([*range(8)] * 4), "every turn was completed exactly once"
        assert all(completion.ids for turns in found for completion in turns)
        assert fleet.figures()["sampler_moves"] >= 1
        assert [replica.is_usable() for replica in fleet.replicas] == [False, True]


def test_a_dead_server_gets_no_push_and_a_restarted_one_no_request_until_the_next(
    folder: Path, tmp_path: Path
) -> None:
    port, trained = free_port(), tiny_policy(seed=8)
    trained.save_pretrained(tmp_path / "new")
    other = Engine(tiny_policy(seed=3), tiny_tokenizer(), CONTEXT, version="0.33.0")
    with serving(other) as url:
        with process(folder, port):
            fleet = Fleet([url, f"http://127.0.0.1:{port}"], context=CONTEXT, version="v0", patience=60.0)
            sets = ("policy.backend=vllm-server", f"policy.context={CONTEXT}", "policy.weight_transfer=disk")
            one = VllmSampler(fleet, (2,), params(*sets).policy, version="v0")

            def push(version: str) -> list[bool]:
                one.push(weight_buckets(trained, 10_000), version=version, folder=tmp_path / "new")
                return [replica.is_usable() for replica in fleet.replicas]

            def used() -> set[str]:
                found = asyncio.run(sessions(fleet, 8, 2))
                return {name for turns in found for completion in turns for name in completion.versions}

            assert push("v1") == [True, True] and used() == {"v1"}
        with process(folder, port):
            assert used() == {"v1"}
            deadline = time.monotonic() + 30
            while not fleet.replicas[1].outdated and time.monotonic() < deadline:
                time.sleep(0.05)
            assert [replica.outdated for replica in fleet.replicas] == [False, True]
            assert push("v2") == [True, True] and used() == {"v2"}
        assert push("v3") == [True, False] and used() == {"v3"}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Ray cluster at RAY_ADDRESS."""
    with ray_cluster({"num_cpus": 1}) as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        yield


def test_a_fleet_is_started_from_vllm_s_own_executable_found_on_ray_and_ends_as_a_whole(
    folder: Path, tmp_path: Path, cluster: None
) -> None:
    with pytest.raises(UserError, match="no server is announced on the Ray cluster"):
        server_addresses(["ray"])
    vllm = vllm_executable(tmp_path, CONTEXT)
    first = free_port()
    arguments = ["--gpus", "4,5,6,7", "--replicas", "2", "--tensor-parallel", "2", "--port", str(first)]
    arguments += ["--announce"]
    sets = ["--set", "policy.context=128", "--home", str(tmp_path / "home"), "--vllm", str(vllm)]
    command = [sys.executable, "-m", "components.cli", "fleet", str(folder), *arguments, *sets]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            urls = [f"http://127.0.0.1:{port}" for port in (first, first + 1)]
            assert line == f"policy.servers=[{','.join(urls)}]"
            assert server_addresses(["ray"]) == urls
            fleet = Fleet(urls, context=CONTEXT, version="v0")
            one = VllmSampler(fleet, (2,), params("policy.weight_transfer=disk").policy, version="v0")
            one.push(weight_buckets(tiny_policy(seed=3), 10_000), version="v1", folder=folder)
            found = asyncio.run(sessions(fleet, 4, 1))
            assert {name for turns in found for turn in turns for name in turn.versions} == {"v1"}
        finally:
            process.terminate()  # not SIGINT, which background processes of a shell ignore
        assert process.wait(60) == 143
    wait_for(lambda: not announced(), 30)
    for url in urls:
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
