"""Reward functions for trainers: the milestone of each answer, measured by the judge's HTTP service.

A milestone is -1 for a wrong answer, 1 for a correct one, 2 if it is also faster than eager PyTorch, and 3 if
it is faster than torch.compile too.

`kernel_reward` has the signature of TRL, `compute_score` that of verl, and `reward_func` that of OpenRLHF.
The environment variable CUDA_AGENT_JUDGE is the service's address and CUDA_AGENT_TOKEN the caller's token. A
task, which is a PyTorch module to make faster, is given by its task_id if the service lists it, or by its
source. Only `reward_func` needs a package besides Python, which is torch.
"""

import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

DEFAULT_ADDRESS = "http://127.0.0.1:8470"
# Text for the end of a prompt, which describes the form of answers that `files_of` reads.
ANSWER_FORMAT = """
Answer with one fenced code block for each file. Its first line is a comment with the file's path:
# model_new.py, or for a kernel // kernels/NAME. The last block of a path counts.
"""
PATH = r"model_new\.py|kernels/\w[\w.-]*"
BLOCK = re.compile(rf"^```[^\n`]*\n(?:(?:#|//)[ \t]*({PATH})[ \t]*\n)?(.*?)^```", re.MULTILINE | re.DOTALL)
# Seconds that one request waits for a verdict, for which a request is repeated while no service answers, and
# between two attempts.
WAIT_SECONDS, RESTART_SECONDS, RETRY_SECONDS = 50, 60.0, 1.0
# Requests to the service at a time.
CONCURRENT = 64
# HTTP statuses of a service that is busy or restarts, after which a request is repeated. It is also repeated
# after 503 with Retry-After; without this header, the judge has failed.
UNAVAILABLE = (429, 502, 504)


class JudgeFailed(RuntimeError):
    """Error raised if the judge's service gives no verdict, through no fault of the files to be judged."""


def files_of(answer: str) -> dict[str, str]:
    """Return the texts of the files of an answer, by path, from its fenced code blocks.

    ANSWER_FORMAT describes the blocks: the first line of each is a comment with the path. A block without a
    path is model_new.py, and the last block of a path counts. The result is empty if there is no block.
    """
    text = answer.encode(errors="replace").decode()  # lone surrogates are no text
    return {path or "model_new.py": source for path, source in BLOCK.findall(text)}


def ask(path: str, request: dict[str, Any] | None = None) -> Any:
    """Return the answer of the service to a request: POST with the JSON body `request`, or GET if it is None.

    `path` is a path of the service, such as `/v1/tasks`. The result is the answer's JSON. A request with a
    body is repeated until its job has ended, and any request while the service is busy. Raises JudgeFailed if
    the service refuses the request, if its judge fails, or if no service answers for RESTART_SECONDS.
    """
    address = os.environ.get("CUDA_AGENT_JUDGE", DEFAULT_ADDRESS).rstrip("/")
    headers = {
        "Authorization": f"Bearer {os.environ.get('CUDA_AGENT_TOKEN', '')}",
        "Content-Type": "application/json",  # of the body, if there is one
    }
    body = None if request is None else json.dumps(request).encode()
    silent_since = time.monotonic()
    while True:
        try:
            message = urllib.request.Request(address + path, body, headers)
            with urllib.request.urlopen(message, timeout=2 * WAIT_SECONDS) as reply:
                if reply.status == 200:
                    return json.load(reply)
        except urllib.error.HTTPError as error:
            after = error.headers.get("Retry-After", "")
            if error.code not in UNAVAILABLE and not (error.code == 503 and after):
                raise JudgeFailed(f"{address}: {error.read(2000).decode(errors='replace')}") from error
            time.sleep(float(after) if after.isdecimal() else RETRY_SECONDS)  # it may be a date
        except OSError as error:
            if time.monotonic() - silent_since > RESTART_SECONDS:
                raise JudgeFailed(f"{address} does not answer: {error}") from error
            time.sleep(RETRY_SECONDS)
            continue
        silent_since = time.monotonic()


def verdict_on(task: str, files: dict[str, str]) -> dict[str, Any]:
    """Return the judge's verdict on a candidate (the files of an implementation), as a JSON object.

    docs/environments.md describes its keys, among them `status`, `milestone` (the reward) and `log`. `task`
    is the task_id or the source of a task, which is a PyTorch module to make faster, and `files` maps paths
    to texts. Raises JudgeFailed if there is no verdict.
    """
    request = {"code" if "\n" in task else "task": task, "files": files}
    job: dict[str, Any] = ask(f"/v1/judgements?wait={WAIT_SECONDS}", request)
    verdict: dict[str, Any] = job["verdict"]
    return verdict


def milestones(tasks: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Return the milestone (reward) of each answer: -1, 1, 2 or 3. An answer without files gets -1.

    `tasks` has the task of each answer: the task_id or the source of a PyTorch module to make faster. Raises
    JudgeFailed if there is no verdict on one of the answers, because no number would be true.
    """

    def milestone(task: str, answer: str) -> float:
        files = files_of(answer)
        return float(verdict_on(task, files)["milestone"]) if files else -1.0

    with ThreadPoolExecutor(CONCURRENT) as threads:
        return list(threads.map(milestone, tasks, answers))


def kernel_reward(
    prompts: Sequence[Any], completions: Sequence[Any], task: Sequence[str], **columns: Any
) -> list[float]:
    """Return the reward of each of TRL's completions, for a data set whose column `task` has the tasks.

    A reward is -1, 1, 2 or 3 (`milestones`). A task is the task_id or the source of a PyTorch module to make
    faster. A completion is a text or a list of messages with `content`. The other arguments are not used.
    Raises JudgeFailed if there is no verdict.
    """
    answers = [
        completion if isinstance(completion, str) else "\n".join(str(turn["content"]) for turn in completion)
        for completion in completions
    ]
    return milestones(task, answers)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Return the reward of verl's answer `solution_str`, in whose data set `ground_truth` is the task.

    The reward is -1, 1, 2 or 3 (`milestones`). The task is the task_id or the source of a PyTorch module to
    make faster. The other arguments are not used. Raises JudgeFailed if there is no verdict.
    """
    return milestones([ground_truth], [solution_str])[0]


def reward_func(
    queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **options: Any
) -> dict[str, Any]:
    """Return the rewards of OpenRLHF's queries (a prompt and its answer), whose labels are the tasks.

    A task is the task_id or the source of a PyTorch module to make faster. `rewards`, and `milestone` in
    `extra_logs`, have the rewards, which are -1, 1, 2 or 3, and `scores` has 1 for a correct answer and 0 for
    any other. The tensors have the shape [queries]. Raises JudgeFailed if there is no verdict on one of the
    answers.
    """
    import torch

    answers = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    rewards = torch.tensor(milestones(labels, answers))
    return {"rewards": rewards, "scores": (rewards > 0).float(), "extra_logs": {"milestone": rewards}}
