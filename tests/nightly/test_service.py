"""The HTTP service after a kill, with tokens, and with judges for several settings."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import judge_fixtures as corpus
from serve_fixtures import start

SIMD = corpus.files("honest", "simd")


def test_a_killed_service_judges_its_queue_once_after_a_restart(tmp_path: Path) -> None:
    process, address = start(tmp_path)
    broken = [SIMD | {"kernels/forward.cpp": f"not C++ {number}"} for number in range(12)]
    with httpx.Client(base_url=address, timeout=60) as client:
        jobs = [
            client.post("/v1/judgements", json={"code": corpus.CODE, "files": files}).json()
            for files in broken
        ]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = sorted((tmp_path / "service" / "cpu" / "verdicts").glob("*/*.json"))
    before = {path: path.stat().st_mtime_ns for path in kept}
    assert len(before) < len(jobs), "some were queued"
    process, address = start(tmp_path)
    with httpx.Client(base_url=address, timeout=100) as client:
        for job in jobs:
            done = client.get(f"/v1/jobs/{job['id']}?wait=60").json()
            assert done["state"] == "done" and done["verdict"]["status"] == "build_failed"
            assert done["measurements"] == 1
        text = client.get("/metrics").text
    process.terminate()
    assert process.wait(60) == 143
    assert {path: path.stat().st_mtime_ns for path in before} == before
    count = next(line for line in text.splitlines() if 'verdicts_total{status="build_failed"}' in line)
    assert float(count.split()[-1]) == len(jobs) - len(before)


def test_a_token_is_printed_once_and_opens_the_service(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    made = subprocess.run(
        [sys.executable, "-m", "components.cli", "token", "create", "bob", "--file", str(file), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    secret = json.loads(made.stdout)["token"]
    assert secret not in file.read_text()
    process, address = start(tmp_path, "--tokens", str(file))
    headers = {"Authorization": f"Bearer {secret}"}
    assert httpx.get(f"{address}/v1/tasks", timeout=60).status_code == 401
    assert httpx.get(f"{address}/v1/tasks", headers=headers, timeout=60).status_code == 200
    process.terminate()
    assert process.wait(60) == 143
