"""Exploits over HTTP and by MCP, and exploits of what the service tells.

For each kind of answer one exploit is judged over HTTP. The same files sent by MCP have to be the same job,
and its answer is the same verdict.
"""

import asyncio
import contextlib
import json
import math
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import judge_fixtures as corpus
import pytest
import service_exploits

from components.core.config import resolve
from components.judge import measurement
from components.judge.pool.local_pool import journal_path
from components.service.jobs import JobService
from components.service.judges import WarmJudges
from components.service.server import bind, serving

pytest.importorskip("mcp", reason="the extra serve is not installed")
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

# One exploit for each status, and for each set of limits or copies of their own.
EXPECTED = {name: corpus.expected(name) for name in corpus.names("exploits")}
LIMITS = {"run_seconds", "build_seconds", "together"}
BY_KIND = {(one["status"], *sorted(LIMITS & one.keys())): name for name, one in EXPECTED.items()}
NAMES = sorted(BY_KIND.values())
# Exploits that never end by themselves; a service with shorter limits judges them.
ENDLESS = [name for name in NAMES if {"run_seconds", "build_seconds"} & corpus.expected(name).keys()]
PARAMS = resolve("ci").params
SANDBOX = PARAMS.sandbox.model_copy(update={"run_seconds": 8, "build_seconds": 4})
HURRIED = PARAMS.model_copy(update={"sandbox": SANDBOX})
HONEST_SPEEDUP = 12.0  # as in tests/integration/test_exploits.py


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def addresses(folder: Path) -> Iterator[list[str]]:
    """Serve the same judges with the usual limits and with short ones, and compare with eager only."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(measurement, "MARGIN", math.inf)
        judges = stack.enter_context(contextlib.closing(WarmJudges(PARAMS, folder / "judge")))
        found = []
        for name, params in (("usual", PARAMS), ("hurried", HURRIED)):
            listener = stack.enter_context(bind("0", has_tokens=False))
            service = JobService(judges, params, folder / name, [corpus.TASK])
            stack.callback(service.close)
            stack.enter_context(serving(service, listener))
            found.append(f"http://127.0.0.1:{listener.getsockname()[1]}")
        yield found


def judged(address: str, name: str, measurement: int = 1) -> Any:
    code, files = corpus.task("exploits", name).code, corpus.files("exploits", name)
    return asked(address, {"code": code, "files": files, "measurement": measurement})


def asked(address: str, request: dict[str, Any]) -> Any:
    with httpx.Client(base_url=address, timeout=100) as client:
        answer = client.post("/v1/judgements?wait=60", json=request)
        while answer.status_code == 202:
            answer = client.get(f"/v1/jobs/{answer.json()['id']}?wait=60")
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def by_http(addresses: list[str]) -> dict[str, list[Any]]:
    """Return the jobs of each exploit; those that need several copies are measured at the same time."""
    found = {}
    with ThreadPoolExecutor(8) as executor:
        for names, address in ((ENDLESS, addresses[1]), (sorted({*NAMES} - {*ENDLESS}), addresses[0])):
            sent = {
                name: [
                    executor.submit(judged, address, name, number + 1)
                    for number in range(corpus.expected(name).get("together", 1))
                ]
                for name in names
            }
            found |= {name: [job.result() for job in jobs] for name, jobs in sent.items()}
    return found


@pytest.fixture(scope="module")
def by_mcp(addresses: list[str], by_http: dict[str, list[Any]], folder: Path) -> dict[str, Any]:
    """Return the answer to each exploit's workspace, after all were judged over HTTP."""

    async def ask(address: str, names: list[str]) -> dict[str, Any]:
        parameters = StdioServerParameters(
            command=sys.executable, args=["-m", "components.cli", "mcp", "--service", address]
        )
        answers = {}
        async with stdio_client(parameters) as streams, ClientSession(*streams) as session:
            await session.initialize()
            for name in names:
                workspace = folder / "workspaces" / name
                files = corpus.files("exploits", name) | {"model.py": corpus.task("exploits", name).code}
                for path, text in files.items():
                    (workspace / path).parent.mkdir(parents=True, exist_ok=True)
                    (workspace / path).write_text(text)
                answers[name] = await session.call_tool("judge", {"workspace": str(workspace)})
        return answers

    usual = [name for name in NAMES if name not in ENDLESS]
    return asyncio.run(ask(addresses[0], usual)) | asyncio.run(ask(addresses[1], ENDLESS))


@pytest.mark.parametrize("name", NAMES)
def test_an_exploit_over_http_gets_the_verdict_that_it_gets_locally(
    name: str, by_http: dict[str, list[Any]]
) -> None:
    expected = corpus.expected(name)
    for job in by_http[name]:
        verdict = job["verdict"]
        assert verdict["status"] in expected["status"].split("|"), verdict
        assert verdict["reason"].startswith(expected["reason"]), verdict
        ratio = verdict["speedup"]["eager"]
        assert ratio is None or "times_honest" in expected or ratio["estimate"] < HONEST_SPEEDUP


@pytest.mark.parametrize("name", NAMES)
def test_an_exploit_by_mcp_is_the_same_job_with_the_same_verdict(
    name: str, by_http: dict[str, list[Any]], by_mcp: dict[str, Any]
) -> None:
    answer = by_mcp[name].structured_content
    assert answer is not None, by_mcp[name]
    job = by_http[name][0]
    assert (answer["job"], answer["measurements"]) == (job["id"], len(by_http[name]))
    for field in ("status", "reason", "milestone", "log"):
        assert answer[field] == job["verdict"][field]


@pytest.mark.parametrize("name", service_exploits.EXPLOITS)
def test_an_exploit_of_what_the_service_tells_fails(name: str, addresses: list[str]) -> None:
    exploit, log = service_exploits.EXPLOITS[name]

    def ask(files: dict[str, str]) -> Any:
        return asked(addresses[0], {"code": corpus.CODE, "files": files})

    verdict = ask(exploit(ask))["verdict"]
    assert verdict["status"] == "wrong_output" and verdict["log"].startswith(log), verdict


def test_the_seeds_would_tell_what_is_verified_and_are_not_told(addresses: list[str], folder: Path) -> None:
    """The journal has the seeds that draw the verified inputs, and no answer has any of them."""

    def ask(files: dict[str, str]) -> Any:
        return asked(addresses[0], {"code": corpus.CODE, "files": files})

    job = ask(corpus.files("honest", "simd"))
    record = json.loads(journal_path(folder / "usual" / "verdicts", job["id"]).read_text())
    seeds = record["evidence"]["seeds"]
    assert {*service_exploits.words_of(seeds)} & {*service_exploits.told_words(ask)}
    with httpx.Client(base_url=addresses[0], timeout=100) as client:
        paths = (f"/v1/jobs/{job['id']}", "/v1/settings", "/metrics")
        told = "".join(client.get(path).text for path in paths)
    assert job["id"] in told and not [seed for seed in seeds if str(seed) in told]
