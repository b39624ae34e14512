"""A small world for tests of the agent: a judge that decides by the text of a kernel, policies that say what is written
for them, and an HTTP server that speaks as much of the OpenAI protocol as a test tells it to."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from transformers import PreTrainedTokenizerBase

from components.agent.reward import milestone
from components.bootstrap.tokenizer import train_tokenizer
from components.core.config import Params, resolve
from components.core.task import KernelTask
from components.judge.pool import Candidate, Job
from components.judge.verdict import Admission, Ratio, Seconds, Speedup, Verdict
from components.policy.chat_client import ChatTurn, NativeCall
from components.policy.sampler import Completion

CODE = """import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        x = torch.tanh(x)
        return x


def get_inputs():
    return [torch.randn(256, 512)]


def get_init_inputs():
    return []
"""
FORM = {"shape": [256, 512], "dtype": "float32"}
EVIDENCE: dict[str, Any] = {"inputs": [FORM], "outputs": [FORM], "parameters": [], "eager_seconds": 1e-3}
TASK = KernelTask(code=CODE, evidence=EVIDENCE)
MEASURE = "bash utils/compile.sh && python3 -m utils.verification && python3 -m utils.profiling"


def kernel(speed: float | str) -> str:
    """A kernel whose verdict is in its text: its speed-up, or the status of its failure."""
    return f"// {speed}\n"


def verdict_of(files: dict[str, str]) -> Verdict:
    """What the judge of this world says: by the first line of kernels/forward.cpp."""
    said = files.get("kernels/forward.cpp", "// build_failed").splitlines()[0].removeprefix("// ").strip()
    try:
        speed = float(said)
    except ValueError:
        status: Any = said if said in ("build_failed", "crashed", "infrastructure") else "wrong_output"
        reason = {"build_failed": "compiler", "wrong_output": "max_error:given"}.get(status, "")
        return Verdict(
            status=status, reason=reason, log="error: expected ';'" if status == "build_failed" else ""
        )
    speedup = Speedup(
        eager=Ratio(estimate=speed, low=speed * 0.9, high=speed * 1.1),
        compile=Ratio(estimate=speed / 2, low=speed * 0.45, high=speed * 0.55),
    )
    seconds = Seconds(candidate=1e-3 / speed, eager=1e-3, compile=5e-4)
    return Verdict(
        status="correct",
        speedup=speedup,
        seconds=seconds,
        milestone=milestone(Verdict(status="correct", speedup=speedup)),
        evidence={"clock": "cpu"},
    )


class World:
    """A judge pool by `verdict_of`; `judged` lists every job in order."""

    def __init__(self, admission: Admission | None = None):
        self.judged: list[tuple[Candidate, str]] = []
        self.admission = admission or Admission(True, "", EVIDENCE)
        self.lock = threading.Lock()

    def prepare(self) -> None:
        return

    def submit(self, job: Job) -> Future[Verdict]:
        with self.lock:
            self.judged.append((job.candidate, job.epoch))
        done: Future[Verdict] = Future()
        done.set_result(verdict_of(dict(job.candidate.files)))
        return done

    def admit(self, code: str) -> Future[Admission]:
        done: Future[Admission] = Future()
        done.set_result(self.admission)
        return done

    def drop(self) -> None:
        return

    def close(self) -> None:
        return


def params(**policy: Any) -> Params:
    found = resolve("ci").params
    return found.model_copy(update={"policy": found.policy.model_copy(update=policy)})


def tokenizer(context: int = 4096) -> PreTrainedTokenizerBase:
    return train_tokenizer(
        [{"role": "user", "content": CODE}, {"role": "assistant", "content": call("Bash", command=MEASURE)}],
        400,
        context,
    )


def call(name: str, **arguments: Any) -> str:
    """A call in Hermes tags."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def write(speed: float | str) -> str:
    return call("Write", file_path="kernels/forward.cpp", content=kernel(speed))


class Script:
    """A sampler that says `lines(sequence, turn)`; `cut` turns end at the token limit instead of their end."""

    version = "script"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        lines: Callable[[int, int], str],
        cut: Callable[[int, int], bool] = lambda i, t: False,
    ):
        self.tokenizer = tokenizer
        self.lines = lines
        self.cut = cut
        self.turn = 0
        self.prompts: list[list[list[int]]] = []

    def generate(
        self, prompts: list[list[int]], *, max_new_tokens: int, temperature: float, seed: int
    ) -> list[Completion]:
        self.prompts.append([list(prompt) for prompt in prompts])
        said = []
        for index in range(len(prompts)):
            ids = self.tokenizer.encode(self.lines(index, self.turn), add_special_tokens=False)
            cut = self.cut(index, self.turn)
            ids = ids[:max_new_tokens] if cut else [*ids, self.tokenizer.eos_token_id]
            said.append(Completion(tuple(ids), (-0.5,) * len(ids), "length" if cut else "stop"))
        self.turn += 1
        return said


class Talk:
    """A chat that says `turns` one after another, native calls where a turn is a list of (name, arguments text)."""

    version = "talk"

    def __init__(self, turns: Sequence[str | list[tuple[str, str]] | Exception]):
        self.turns = list(turns)
        self.heard: list[list[dict[str, Any]]] = []
        self.described: list[int] = []

    def turn(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]],
        max_new_tokens: int,
        temperature: float,
        seed: int,
    ) -> ChatTurn:
        self.heard.append([dict(message) for message in messages])
        self.described.append(len(tools))
        said = self.turns.pop(0)
        if isinstance(said, Exception):
            raise said
        calls: tuple[NativeCall, ...] = ()
        if isinstance(said, list):
            calls = tuple(
                NativeCall.model_validate({"id": f"c{i}", "function": {"name": n, "arguments": a}})
                for i, (n, a) in enumerate(said)
            )
        return ChatTurn(
            content=said if isinstance(said, str) else "",
            calls=calls,
            finish_reason="stop",
            prompt_tokens=0,
            completion_tokens=0,
        )

    def close(self) -> None:
        return


@contextlib.contextmanager
def server(answers: Callable[[int, dict[str, Any]], tuple[int, bytes, dict[str, str]]]) -> Iterator[str]:
    """The address of a server that gives `answers(number of the request, its body)`: status, body, headers. Status 0 hangs up."""
    count = iter(range(1_000_000))

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            return

        def reply(self, body: dict[str, Any]) -> None:
            status, text, headers = answers(next(count), body)
            if status == 0:
                self.close_connection = True
                self.connection.close()
                return
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"data": [{"id": "tiny"}]}).encode())

        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = (
            128  # with the standard library's five, connections that come at once are reset on a busy machine
        )

    with Server(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_address[1]}"
        finally:
            running.shutdown()  # before its socket is closed: serving a closed one is a loop that takes a core


def completion(content: str, calls: Sequence[tuple[str, str]] = (), finish: str = "stop") -> bytes:
    """The body of a chat completion."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": f"c{i}", "type": "function", "function": {"name": n, "arguments": a}}
            for i, (n, a) in enumerate(calls)
        ]
    return json.dumps(
        {
            "choices": [{"message": message, "finish_reason": finish}],
            "usage": {"prompt_tokens": 9, "completion_tokens": 3},
        }
    ).encode()
