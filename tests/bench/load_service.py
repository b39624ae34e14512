"""Load on the HTTP service: many clients, a third of them hostile, then one caller beside a flood.

    python tests/bench/load_service.py [--clients 64] [--jobs 1000] [--measured 0.1] [--flood 1000]

A service is started with one token for each client. Every client sends its jobs one after another, each of
them twice. Every third client is hostile: its jobs are exploits, and before each it sends a request that has
to be refused. `--measured` is the share of jobs that run in the sandbox; the others are refused by the
screen. Then one token sends `--flood` measured jobs at once, and another one single jobs, alone before it and
beside it.

Prints one JSON object. Exits with 1 if a job was lost or judged twice, if a request was answered otherwise
than it should be, or if the memory of the service grew by more than `--growth` MB after the first third of
the jobs.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))

import httpx
import judge_fixtures as corpus
import psutil
from serve_fixtures import start

from components.service.tokens import Token, create_token

# Candidates of each kind with the status they get: with and without a run in the sandbox.
HOSTILE_RUN = {"zeros": "wrong_output", "segfault": "crashed", "wrong_dtype": "wrong_output"}
HOSTILE_QUICK = {"exit_at_import": "forbidden", "patched_time": "forbidden", "numpy_method": "forbidden"}
MEBIBYTE = 1 << 20


def candidate(name: str, group: str, mark: str) -> dict[str, str]:
    """Return a candidate that differs from all others in a comment; its kernel is built once."""
    files = corpus.files(group, name)
    return files | {"model_new.py": f"{files['model_new.py']}\n# {mark}\n"}


def jobs_of(client: int, number: int, *, runs: bool) -> tuple[dict[str, str], str]:
    """Return the files and the expected status of a client's job."""
    mark = f"{client} {number}"
    if client % 3 == 0:
        kinds = HOSTILE_RUN if runs else HOSTILE_QUICK
        name, status = list(kinds.items())[(client + number) % len(kinds)]
        return candidate(name, "exploits", mark), status
    if runs:
        return candidate("slow", "honest", mark), "correct"
    return {"model_new.py": f"def ModelNew(:  # {mark}"}, "load_failed"


def bad_requests(other_job: str) -> list[tuple[str, str, Any, set[int]]]:
    """Return hostile requests: method, path, content, and the statuses that are right."""
    return [
        ("POST", "/v1/judgements", b"{", {422}),
        ("POST", "/v1/judgements", b"[" * 50_000, {400, 422}),
        ("POST", "/v1/judgements", b" " * (9 << 20), {413}),
        ("POST", "/v1/judgements", json.dumps({"task": "0" * 16, "files": {}}).encode(), {404}),
        ("POST", "/v1/judgements", json.dumps({"files": {}, "code": "x", "epoch": "lucky"}).encode(), {422}),
        ("GET", "/v1/jobs/..%2f..%2fjobs.sqlite", None, {404}),
        ("GET", f"/v1/jobs/{other_job}", None, {404}),
        ("DELETE", f"/v1/jobs/{other_job}", None, {404}),
        ("GET", "/metrics", None, {403}),
    ]


class Load:
    """The state of one run: the service, its tokens, and what was seen."""

    def __init__(self, address: str, process: psutil.Process, secrets: dict[str, str]):
        self.address = address
        self.process = process
        self.secrets = secrets
        self.seen: dict[str, str] = {}
        self.faults: list[str] = []
        self.memory: list[tuple[int, float]] = []
        self.latencies: list[float] = []
        self.task = ""

    def client(self, name: str) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {self.secrets[name]}"}
        return httpx.AsyncClient(base_url=self.address, headers=headers, timeout=600)

    async def judge(self, client: httpx.AsyncClient, files: dict[str, str]) -> dict[str, Any]:
        """Return a job when it is done, and wait as told while the queue is full."""
        request, path = {"task": self.task, "files": files}, "/v1/judgements?wait=60"
        while True:
            answer = await client.post(path, json=request)
            if answer.status_code == 429:
                await asyncio.sleep(float(answer.headers["Retry-After"]))
            elif answer.status_code != 202:
                answer.raise_for_status()
                job: dict[str, Any] = answer.json()
                return job

    async def run_client(self, number: int, jobs: int, every: int) -> None:
        async with self.client(f"client{number}") as client:
            hostile = itertools.cycle(bad_requests(next(iter(self.seen))))
            for index in range(jobs):
                if number % 3 == 0:
                    method, path, content, right = next(hostile)
                    headers = {"Content-Type": "application/json"}
                    answer = await client.request(method, path, content=content, headers=headers)
                    if answer.status_code not in right:
                        self.faults.append(f"{method} {path[:40]}: {answer.status_code}")
                files, status = jobs_of(number, index, runs=(number + index) % every == 0)
                began = time.perf_counter()
                first = await self.judge(client, files)
                self.latencies.append(time.perf_counter() - began)
                if first != await self.judge(client, files):
                    self.faults.append(f"{first['id']}: another answer to the same request")
                if first["verdict"]["status"] != status:
                    self.faults.append(f"{first['id']}: {first['verdict']['status']} instead of {status}")
                self.seen[first["id"]] = first["verdict"]["status"]
                if len(self.seen) % 25 == 0:
                    self.memory.append((len(self.seen), self.process.memory_info().rss / MEBIBYTE))

    async def single(self, number: int, where: str) -> tuple[float, float]:
        """Return the seconds from a job's submission to its verdict, and those that it was queued."""
        async with self.client("single") as client:
            began = time.perf_counter()
            request = {"task": self.task, "files": candidate("slow", "honest", f"single {where} {number}")}
            job = (await client.post("/v1/judgements", json=request)).raise_for_status().json()
            queued = began
            while job["state"] in ("queued", "running"):
                if job["state"] == "queued":
                    queued = time.perf_counter()
                answer = await client.get(f"/v1/jobs/{job['id']}", params={"wait": 0.02})
                job = answer.raise_for_status().json()
            return time.perf_counter() - began, queued - began

    async def flood(self, jobs: int, singles: int) -> dict[str, Any]:
        """Measure single jobs alone and beside a flood of another token, which is cancelled afterwards."""
        alone = [await self.single(number, "alone") for number in range(singles)]
        async with self.client("flood") as client:
            sent = []
            for number in range(jobs):
                request = {"task": self.task, "files": candidate("slow", "honest", f"flood {number}")}
                sent.append((await client.post("/v1/judgements", json=request)).raise_for_status().json())
            beside, between = [], []
            for number in range(singles):
                before = await self.done(client)
                beside.append(await self.single(number, "beside"))
                between.append(await self.done(client) - before)
            last = (await client.get(f"/v1/jobs/{sent[-1]['id']}")).json()
            for job in reversed(sent):
                await client.delete(f"/v1/jobs/{job['id']}")
        return {
            "alone": [round(total, 2) for total, _ in alone],
            "beside": [round(total, 2) for total, _ in beside],
            "queued": [round(queued, 3) for _, queued in beside],
            "measured_between": between,
            "flood_still_queued": last["position"] or 0,
        }

    async def done(self, client: httpx.AsyncClient) -> int:
        """Return how many verdicts the service has given."""
        operator = {"Authorization": f"Bearer {self.secrets['operator']}"}
        text = (await client.get("/metrics", headers=operator)).text
        lines = [line for line in text.splitlines() if line.startswith("cuda_agent_verdicts_total")]
        return int(sum(float(line.split()[-1]) for line in lines))


async def measure(load: Load, chosen: argparse.Namespace) -> dict[str, Any]:
    async with load.client("client0") as client:
        tasks = (await client.get("/v1/tasks")).json()
        load.task = tasks[0]["task_id"]
    async with load.client("single") as client:
        first = await load.judge(client, candidate("slow", "honest", "first"))
        load.seen[first["id"]] = first["verdict"]["status"]
    began = time.perf_counter()
    shares = [
        chosen.jobs // chosen.clients + (n < chosen.jobs % chosen.clients) for n in range(chosen.clients)
    ]
    every = max(1, round(1 / chosen.measured))
    await asyncio.gather(*(load.run_client(number, jobs, every) for number, jobs in enumerate(shares)))
    seconds = time.perf_counter() - began
    async with load.client("client0") as client:
        judged = await load.done(client)
    memory = [size for _, size in load.memory]
    third, last = memory[len(memory) // 3], memory[-1]
    report: dict[str, Any] = {
        "clients": chosen.clients,
        "jobs": len(load.seen),
        "judged": judged,
        "lost": chosen.jobs + 1 - len(load.seen),
        "judged_twice": judged - len(load.seen),
        "seconds": round(seconds, 1),
        "latency": {
            "median": round(statistics.median(load.latencies), 2),
            "largest": round(max(load.latencies), 2),
        },
        "memory_mb": {"first": round(memory[0]), "after a third": round(third), "last": round(last)},
    }
    if last - third > chosen.growth:
        load.faults.append(f"the service's memory grew by {last - third:.0f} MB")
    if chosen.flood:
        report["flood"] = await load.flood(chosen.flood, chosen.singles)
    if report["lost"] or report["judged_twice"]:
        load.faults.append("a job was lost or judged twice")
    return report | {"faults": load.faults}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=1000, help="jobs of all clients together")
    parser.add_argument("--measured", type=float, default=0.1, help="share of jobs that run in the sandbox")
    parser.add_argument("--flood", type=int, default=1000, help="jobs of one token beside the single ones")
    parser.add_argument("--singles", type=int, default=3, help="single jobs alone, and beside the flood")
    parser.add_argument("--growth", type=float, default=100.0, help="largest growth of the memory, MB")
    parser.add_argument("--home", type=Path)
    chosen = parser.parse_args()
    home = chosen.home or Path(tempfile.mkdtemp())
    file, tasks = home / "tokens.json", home / "tasks"
    tasks.mkdir(parents=True)
    (tasks / "1_leaky.py").write_text(corpus.CODE)
    names = [*(f"client{number}" for number in range(chosen.clients)), "flood", "single"]
    secrets = {name: create_token(file, Token(name=name, digest=""), None) for name in names}
    secrets["operator"] = create_token(file, Token(name="operator", digest="", operator=True), None)
    process, address = start(home, "--tokens", str(file), "--tasks", str(tasks))
    try:
        load = Load(address, psutil.Process(process.pid), secrets)
        report = asyncio.run(measure(load, chosen))
    finally:
        process.terminate()
        process.wait()
    print(json.dumps(report, indent=2))
    sys.exit(1 if report["faults"] else 0)


if __name__ == "__main__":
    main()
