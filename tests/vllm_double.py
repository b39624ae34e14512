"""A small server with the routes of vLLM 0.24 that this project uses, and a real model behind them.

Routes, bodies, answers and the order that vLLM insists on follow its sources (`entrypoints/openai/completion`,
`entrypoints/serve/dev/{rlhf,rpc,sleep,cache}`, `distributed/weight_transfer/ipc_engine`, `v1/worker/gpu_worker`). What
it cannot show: CUDA memory, batching, vLLM's own rounding. tests/device/vllm_backends.py shows those on a GPU.
"""

from __future__ import annotations

import base64
import json
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch.multiprocessing.reductions import rebuild_tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from components.policy.checkpoint import load_model
from components.policy.transformers_sampler import TransformersSampler
from components.policy.vllm_worker import Fingerprint


class Server(ThreadingHTTPServer):
    """Room for as many connections at once as a sampler opens; of those beyond the standard library's five some are reset on a busy machine."""

    request_queue_size = 128


class Worker(Fingerprint):
    """What `collective_rpc` reaches."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, context: int):
        self.model = model
        self.context = context
        self.sampler = TransformersSampler(model, tokenizer, batch=8, device="cpu", version="")
        self.initialised = self.updating = self.asleep = False
        self.loses_updates = False
        """Whether an update is acknowledged and thrown away."""
        self.calls: list[str] = []
        self.lock = threading.Lock()

    def get_model(self) -> PreTrainedModel:
        assert not self.asleep, "a sleeping worker's memory is not mapped"
        return self.model

    def reload_weights(self, weights_path: str) -> None:
        self._load(dict(load_model(Path(weights_path)).named_parameters()))

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        assert init_info == {}, "the ipc backend takes none"
        self.initialised = True

    def start_weight_update(self, is_checkpoint_format: bool) -> None:
        assert not self.updating, "start_weight_update called while a weight update is already active."
        self.updating = is_checkpoint_format

    def update_weights(self, update_info: dict[str, Any]) -> None:
        assert self.initialised and self.updating and not self.asleep
        assert (
            set(update_info) == {"names", "dtype_names", "shapes", "packed", "ipc_handles_pickled"}
            and update_info["packed"] is False
        )
        handles = pickle.loads(base64.b64decode(update_info["ipc_handles_pickled"]))
        tensors = [rebuild_tensor(*handle["cpu"]) for handle in handles]
        assert [list(tensor.shape) for tensor in tensors] == update_info["shapes"]
        assert [str(tensor.dtype) for tensor in tensors] == [
            f"torch.{name}" for name in update_info["dtype_names"]
        ]
        self._load(dict(zip(update_info["names"], tensors, strict=True)))

    def finish_weight_update(self) -> None:
        assert self.updating, "finish_weight_update called without a matching start_weight_update."
        self.updating = False

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        if not self.loses_updates:
            self.model.load_state_dict(tensors, strict=False)

    def completions(self, body: dict[str, Any]) -> dict[str, Any]:
        assert not self.asleep, "asleep"
        prompt, limit = body["prompt"], body["max_tokens"]
        if len(prompt) + limit > self.context:
            raise ValueError(f"This model's maximum context length is {self.context} tokens.")
        assert (
            body["return_token_ids"]
            and body["stop_token_ids"] == [self.sampler.end_of_turn]
            and (body["top_p"], body["top_k"]) == (1.0, 0)
        )
        with self.lock:
            (found,) = self.sampler.generate(
                [prompt], max_new_tokens=limit, temperature=body["temperature"], seed=body["seed"]
            )
        names = [f"token_id:{token}" for token in found.ids]
        logprobs = {
            "tokens": names,
            "token_logprobs": list(found.logprobs),
            "text_offset": [],
            "top_logprobs": [{} for _ in names],
        }
        choice = {
            "index": 0,
            "text": "",
            "finish_reason": found.finish_reason,
            "logprobs": logprobs,
            "token_ids": list(found.ids),
            "prompt_token_ids": prompt,
        }
        return {"object": "text_completion", "choices": [choice]}

    def answer(self, route: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The JSON of an answer, None for an empty one."""
        match route:
            case "/health" | "/reset_prefix_cache":
                return None
            case "/sleep" | "/wake_up":
                self.asleep = route == "/sleep"
                return None
            case "/is_sleeping":
                return {"is_sleeping": self.asleep}
            case "/v1/completions":
                return self.completions(body)
            case "/init_weight_transfer_engine":
                self.init_weight_transfer_engine(body["init_info"])
            case "/start_weight_update":
                self.start_weight_update(body.get("is_checkpoint_format", True))
            case "/update_weights":
                self.update_weights(body["update_info"])
            case "/finish_weight_update":
                self.finish_weight_update()
            case "/collective_rpc":
                return {"results": [getattr(self, body["method"])(**body.get("kwargs", {}))]}
        return {"message": "done"}


ROUTES = {
    "/health",
    "/reset_prefix_cache",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/v1/completions",
    "/collective_rpc",
}
ROUTES |= {"/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"}


@contextmanager
def serving(worker: Worker, *, development: bool = True) -> Iterator[str]:
    """The address of a server around `worker`; without `development` it has the public routes alone."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}"))

        def _answer(self, body: dict[str, Any]) -> None:
            route = urlsplit(self.path).path
            worker.calls.append(route)
            if route not in (ROUTES if development else {"/health", "/v1/completions"}):
                return self._send(404, {"detail": "Not Found"})
            try:
                return self._send(200, worker.answer(route, body))
            except ValueError as error:
                return self._send(400, {"error": {"message": str(error), "code": 400}})
            except (AssertionError, AttributeError) as error:
                return self._send(500, {"error": {"message": str(error), "code": 500}})

        def _send(self, status: int, answer: dict[str, Any] | None) -> None:
            data = b"" if answer is None else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            return

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
