"""Ask the judge for its verdict on the files in the current folder, with the standard library only.

    python3 judge.py                       prints what was wrong, or the times and the milestone
    python3 judge.py --reward FOLDER       also writes reward.json and verdict.json there

The task is model.py beside this script. CUDA_AGENT_JUDGE is the address of `cuda-agent serve --http`, and
CUDA_AGENT_TOKEN a token, if the service requires one. With --reward the candidate is measured anew. The exit
code is 0 for every verdict on the candidate, and 1 if there is none.
"""

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

# Seconds that one request waits for a result, and that it may take beyond that.
WAIT_SECONDS, TRANSFER_SECONDS = 50, 30
# Seconds for which a service that does not answer is asked again, and between two requests.
SILENT_SECONDS, RETRY_SECONDS = 120.0, 2.0
# Largest request that the service reads, in bytes.
BODY_BYTES = 8 << 20
# Number of the measurement that the writer of a candidate gets, and of the one that gives the reward.
OWN, REWARD = 1, 2
# The labels by which rewards are given, whatever the service's own are.
LABELS = {"rules": "kernel-only", "weights": "state_dict", "tolerance": "strict"}


def candidate(folder: Path) -> dict[str, str]:
    """Return the texts of model_new.py and kernels/* in `folder` by path, without links and hidden files."""
    paths = [folder / "model_new.py", *sorted((folder / "kernels").glob("*"))]
    return {
        path.relative_to(folder).as_posix(): path.read_bytes().decode(errors="replace")
        for path in paths
        if path.is_file() and not path.is_symlink() and not path.name.startswith(".")
    }


def ask(path: str, body: object = None) -> tuple[int, dict[str, Any], float]:
    """Send a request to a path of the service, and return the status, the answer and a delay.

    The request is a POST of `body` as JSON, or a GET if `body` is None. The delay is the number of seconds
    after which to ask again. The request is repeated while the service cannot be reached. Exits with a
    sentence if this takes longer than SILENT_SECONDS.
    """
    address = os.environ.get("CUDA_AGENT_JUDGE", "http://127.0.0.1:8470").rstrip("/")
    headers = {"Content-Type": "application/json"}
    if token := os.environ.get("CUDA_AGENT_TOKEN", ""):
        headers["Authorization"] = f"Bearer {token}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, headers)
    silent_since = time.monotonic()
    while True:
        try:
            with urllib.request.urlopen(request, timeout=WAIT_SECONDS + TRANSFER_SECONDS) as answer:
                return answer.status, json.load(answer), 0.0
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            fields = json.loads(text) if text.startswith("{") else {"error": text}
            return error.code, fields, float(error.headers.get("Retry-After") or RETRY_SECONDS)
        except OSError as error:
            if time.monotonic() - silent_since > SILENT_SECONDS:
                sys.exit(f"CUDA_AGENT_JUDGE: no judge answers at {address} ({error}).")
            time.sleep(RETRY_SECONDS)


def verdict(task: str, files: dict[str, str], measurement: int) -> dict[str, Any]:
    """Return the judge's verdict on a candidate as a dictionary.

    `task` is the source of the task, and `files` has the candidate's texts by path. `measurement` is the
    number of the measurement: the same number gives the same verdict, and a new one measures anew. A
    candidate that is larger than the service accepts gets the verdict `load_failed`. Exits with a sentence if
    the judge fails or refuses the request, or if the judgement was cancelled.
    """
    too_large = {"status": "load_failed", "reason": "too_large", "milestone": -1}
    body = {"code": task, "files": files, "labels": LABELS, "measurement": measurement}
    if len(json.dumps(body)) > BODY_BYTES:
        return too_large
    path = f"/v1/judgements?wait={WAIT_SECONDS}"
    sent: object = body
    while True:
        status, job, seconds = ask(path, sent)
        if job.get("verdict") is not None:
            found: dict[str, Any] = job["verdict"]
            return found
        if job.get("state") in ("queued", "running"):
            path, sent = f"/v1/jobs/{job['id']}?wait={WAIT_SECONDS}", None
        elif status == 413:
            return too_large
        elif status in (429, 502, 504):
            time.sleep(seconds)
        elif job.get("state") == "cancelled":
            sys.exit("The judge gave no verdict: the judgement was cancelled; ask for it again.")
        elif status == 401:
            sys.exit(f"CUDA_AGENT_TOKEN (of the test: CUDA_AGENT_TEST_TOKEN): {job.get('error', status)}")
        else:
            sys.exit(f"The judge gave no verdict: {job.get('error', status)}")


def report(found: dict[str, Any]) -> str:
    """Return the lines that are printed for a verdict: the fault with its log, or speed-up and milestone."""
    if found["status"] != "correct":
        return f"[FAIL] {found['status']}: {found['reason']}\n{found.get('log', '')}".strip()
    ratios = [f"{ratio['estimate']:.2f}x {name}" for name, ratio in found["speedup"].items() if ratio]
    return f"[PASS] Speed-up: {', '.join(ratios)}. Milestone: {found['milestone']} of 3."


def main() -> None:
    parser = argparse.ArgumentParser(description="Have the files in this folder judged.")
    parser.add_argument("--reward", type=Path, help="folder for reward.json and verdict.json")
    reward: Path | None = parser.parse_args().reward
    task = Path(__file__).with_name("model.py").read_text()
    found = verdict(task, candidate(Path.cwd()), OWN if reward is None else REWARD)
    print(report(found))
    if reward is not None:
        reward.mkdir(parents=True, exist_ok=True)
        (reward / "verdict.json").write_text(json.dumps(found))
        (reward / "reward.json").write_text(json.dumps({"reward": found["milestone"]}))


if __name__ == "__main__":
    main()
