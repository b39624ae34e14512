"""A client of a vLLM server.

The server runs in a separate Python environment, because vLLM and Prefect need different versions of fastapi.
It must be started with VLLM_SERVER_DEV_MODE=1, which adds the routes for weights, sleep and workers.
docs/training.md has the whole command.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from components.core.errors import UserError
from components.policy.sampler import Completion

# Largest number of requests that are sent at the same time. Further requests wait in this process.
MAX_CONNECTIONS = 256
# Longest wait for one answer, in seconds. It is long, because a turn of 32,768 tokens in a full batch takes
# minutes.
TIMEOUT_SECONDS = 3600.0


@dataclass(frozen=True)
class Request:
    """A sequence to complete until one of the tokens `stop`, with at most `max_tokens` tokens.

    At temperature 0, each token is the most probable one.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    stop: tuple[int, ...]


class RequestRefused(UserError):
    """Exception that is raised if the server answers a request with an error status other than 404."""


class VllmServer:
    """A model on a vLLM server, from which it is sampled and where its weights are updated, over HTTP."""

    def __init__(self, url: str):
        """Connect to the server with the root address `url`, such as http://127.0.0.1:8000.

        Raises UserError if no vLLM server answers.
        """
        self.url = url.rstrip("/")
        if not self.url:
            raise UserError(
                "policy.server: is empty; give the address of a vLLM server, such as http://127.0.0.1:8000."
            )
        limits = httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS)
        self.client = httpx.Client(
            base_url=self.url, timeout=httpx.Timeout(TIMEOUT_SECONDS, connect=10.0), limits=limits
        )
        self._call("GET", "/health")
        if self._call("GET", "/is_sleeping").get("is_sleeping"):
            # A training process that was killed may have left the server in sleep mode.
            self.wake_up()

    def complete(self, request: Request) -> Completion:
        """Return one completion; it is sampled with the weights that the server has."""
        answer = self._call(
            "POST",
            "/v1/completions",
            {
                "prompt": list(request.prompt),
                "max_tokens": request.max_tokens,
                "temperature": request.temperature,
                "seed": request.seed,
                "stop_token_ids": list(request.stop),
                # These are set because otherwise the generation_config of the model would truncate the
                # distribution that is sampled.
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "logprobs": 0,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
                "add_special_tokens": False,
            },
        )
        choice = answer["choices"][0]
        return check_completion(
            choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]
        )

    def init_weight_transfer_engine(self) -> None:
        self._call("POST", "/init_weight_transfer_engine", {"init_info": {}})

    def update_weights(self, updates: Iterable[dict[str, Any]]) -> None:
        """Replace the weights: start an update, send each part of it, and finish it.

        A part is the `update_info` of `components.policy.weights`. The next part is requested from `updates`
        only after vLLM has received the previous one.
        """
        try:
            self._call("POST", "/start_weight_update", {"is_checkpoint_format": True})
        except RequestRefused:
            # A training process that was killed may have left an update unfinished, so it is finished first.
            # All weights are sent again after it.
            self._call("POST", "/finish_weight_update")
            self._call("POST", "/start_weight_update", {"is_checkpoint_format": True})
        for update_info in updates:
            self._call("POST", "/update_weights", {"update_info": update_info})
        self._call("POST", "/finish_weight_update")

    def collective_rpc(self, method: str, arguments: dict[str, str]) -> list[Any]:
        answer = self._call("POST", "/collective_rpc", {"method": method, "kwargs": arguments})
        return list(answer.get("results", []))

    def reset_prefix_cache(self) -> None:
        self._call("POST", "/reset_prefix_cache")

    def sleep(self) -> None:
        self._call("POST", "/sleep?level=1")

    def wake_up(self) -> None:
        self._call("POST", "/wake_up")

    def _call(self, method: str, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the JSON object in the answer, or an empty one if the answer has no content.

        Raises UserError if the server does not answer, has no such route, or refuses the request.
        """
        try:
            response = self.client.request(method, route, json=body)
        except httpx.TransportError as error:
            raise UserError(
                f"policy.server: no vLLM server answers at {self.url} ({type(error).__name__}); "
                "start it as docs/training.md says, then run the same command again."
            ) from error
        if response.status_code == 404:
            raise UserError(
                f"policy.server: {self.url} has no route {route}; "
                "start vLLM with VLLM_SERVER_DEV_MODE=1 and as docs/training.md says."
            )
        if response.is_error:
            raise RequestRefused(
                f"policy.server: {self.url}{route} answered {response.status_code}, "
                f"{' '.join(response.text.split())[:400]}."
            )
        answer: dict[str, Any] = response.json() if response.content else {}
        return answer


def check_completion(ids: Sequence[int], logprobs: Sequence[float], finish_reason: str) -> Completion:
    """Return the completion that vLLM sampled.

    Raises UserError if the completion is not complete: a log-probability is missing, or it ended for another
    reason than `stop` or `length`.
    """
    if len(ids) != len(logprobs) or finish_reason not in ("stop", "length"):
        raise UserError(
            f"policy.backend: vLLM returned {len(ids)} tokens with {len(logprobs)} log-probabilities, "
            f"ended by {finish_reason}; run the same command again."
        )
    return Completion(tuple(ids), tuple(logprobs), finish_reason, "")
