"""A client of one vLLM server, whose requests and answers have the form of the server's version.

The server runs in a separate Python environment, because vLLM and Prefect need different versions of fastapi.
It must be started with VLLM_SERVER_DEV_MODE=1, which adds the routes for weights, sleep and workers, as
`cuda-agent fleet` does. The routes and fields are those of vLLM 0.24 and 0.33, which differ in one point that
matters here: since 0.33, a route for token ids reports which weights sampled each token.
"""

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from components.core.errors import UserError, refuse
from components.policy.sampler import Completion

# Longest wait for one answer, in seconds. It is long, because a turn of 32,768 tokens in a full batch takes
# minutes.
TIMEOUT_SECONDS = 3600.0
CONNECT_SECONDS = 10.0
# Longest wait for one of the answers that show whether a server works and has its weights, in seconds.
EXAMINATION_SECONDS = 60.0
# Statuses of an answer after which the same request may succeed later.
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
# Oldest version of vLLM that can be used, and first version that reports which weights sampled each token.
OLDEST, TOKEN_VERSIONS = (0, 24), (0, 33)
# Reasons for which a completion ends. With `abort` a server ends requests before a push of weights; the rest
# of such a completion is sampled with another request.
ENDS = ("stop", "length", "abort")
# Patterns of a line of /metrics (name, labels, value) and of one label in it (name, value).
METRIC = re.compile(r"^(vllm:\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Request:
    """A request to complete the token ids `prompt` until one of the tokens `stop`, by at most `max_tokens`.

    At temperature 0, each token is the most probable one.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    stop: tuple[int, ...]


@dataclass(frozen=True)
class Load:
    """Figures that a vLLM server reports about itself.

    `cache_tokens` is the number of tokens that the key-value cache holds, and `cache_usage` the share of it
    in use. `running` and `waiting` are numbers of sequences. `preemptions` is the number of sequences that
    were interrupted because the cache was full. `prefix_queries` and `prefix_hits` are the numbers of tokens
    that were looked up and found in the cache of prefixes. These last three are counted from the server's
    start.
    """

    cache_tokens: int
    cache_usage: float
    running: int
    waiting: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int


class ServerUnavailable(ConnectionError):
    """Exception that is raised if a server does not answer, or refuses a request that may succeed later.

    `status` is the HTTP status of the answer, and 0 if there was none.
    """

    def __init__(self, text: str, status: int = 0):
        super().__init__(text)
        self.status = status


class VllmServer:
    """A client of one vLLM server, which samples from the server's model and updates its weights over HTTP.

    `names_versions` says whether the server reports which weights sampled each token, once `probe` or `open`
    has returned.
    """

    def __init__(self, url: str, client: httpx.AsyncClient):
        """Use the server with the root address `url`, such as http://127.0.0.1:8000."""
        self.url = url.rstrip("/")
        self.client = client
        self.names_versions = False

    async def probe(self) -> None:
        """Ask the server for its version and set `names_versions` accordingly.

        A version without numbers, such as that of a development build, is taken for 0.33, the first one that
        names the weights of each token. Raises ServerUnavailable if the server does not answer, and UserError
        if its version is older than 0.24.
        """
        await self.call("GET", "/health", seconds=EXAMINATION_SECONDS)
        answer = await self.call("GET", "/version", seconds=EXAMINATION_SECONDS)
        version = str(answer.get("version", ""))
        numbers = re.match(r"(\d+)\.(\d+)", version)
        number = tuple(map(int, numbers.groups())) if numbers else TOKEN_VERSIONS
        if number < OLDEST:
            raise UserError(
                f"policy.servers: a server runs vLLM {version}, and 0.24 is the oldest that can be used; "
                "install a newer one."
            )
        self.names_versions = number >= TOKEN_VERSIONS

    async def open(self) -> None:
        """Ask the server for its version, and end a sleep or pause that a killed training process has left.

        Raises ServerUnavailable if the server does not answer, and UserError if its version is older than
        0.24.
        """
        await self.probe()
        if await self.is_asleep():
            await self.call("POST", "/wake_up", seconds=EXAMINATION_SECONDS)
        if (await self.call("GET", "/is_paused", seconds=EXAMINATION_SECONDS)).get("is_paused"):
            await self.call("POST", "/resume", seconds=EXAMINATION_SECONDS)

    async def is_asleep(self) -> bool:
        answer = await self.call("GET", "/is_sleeping", seconds=EXAMINATION_SECONDS)
        return bool(answer.get("is_sleeping"))

    async def complete(self, request: Request, version: str) -> Completion:
        """Return the completion of a request; `version` is the name of the weights that the server has.

        If the coroutine is cancelled, its connection is closed, and the server aborts the request. Raises
        ServerUnavailable if the request may succeed later, and UserError if the server refuses it for good or
        its answer is not complete.
        """
        route, body = self._completion_request(request, version)
        return self._completion(await self.call("POST", route, body), version)

    async def load(self) -> Load:
        return read_load((await self._answer("GET", "/metrics", None, EXAMINATION_SECONDS)).text)

    async def workers(
        self,
        method: str,
        arguments: dict[str, Any] | None = None,
        seconds: float = TIMEOUT_SECONDS,
    ) -> list[Any]:
        """Call the method `method` of every worker of the server, and return one result for each worker.

        A worker is the process of vLLM that computes on one GPU. `arguments` are the keyword arguments of the
        method, and `seconds` is the longest time for which the server may send nothing. Raises UserError if
        the server refuses the call for good, and ServerUnavailable if it may succeed later.
        """
        body = {"method": method, "kwargs": arguments or {}}
        return list((await self.call("POST", "/collective_rpc", body, seconds)).get("results", []))

    async def call(
        self,
        method: str,
        route: str,
        body: dict[str, Any] | None = None,
        seconds: float = TIMEOUT_SECONDS,
    ) -> dict[str, Any]:
        """Send a request to a route of the server, and return the JSON object in the answer.

        `method` is "GET" or "POST", and `seconds` is the longest time for which the server may send nothing.
        An answer without content gives an empty dictionary. Raises UserError if the server has no such route
        or refuses the request for good, and ServerUnavailable if the request may succeed later.
        """
        response = await self._answer(method, route, body, seconds)
        answer: dict[str, Any] = response.json() if response.content else {}
        return answer

    async def _answer(
        self, method: str, route: str, body: dict[str, Any] | None, seconds: float
    ) -> httpx.Response:
        timeout = httpx.Timeout(seconds, connect=CONNECT_SECONDS)
        try:
            response = await self.client.request(method, f"{self.url}{route}", json=body, timeout=timeout)
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise UserError(
                f"policy.servers: {self.url} is no address ({error}); give for instance http://127.0.0.1:8000."
            ) from error
        except httpx.TransportError as error:
            raise ServerUnavailable(
                f"no vLLM server answers at {self.url} ({type(error).__name__})"
            ) from error
        text = f"{self.url}{route} answered {response.status_code}, {' '.join(response.text.split())[:400]}"
        if response.status_code in PASSING:
            raise ServerUnavailable(text, response.status_code)
        refuse(
            (
                response.status_code == 404,
                f"policy.servers: {self.url} has no route {route}; start vLLM with VLLM_SERVER_DEV_MODE=1, "
                "as cuda-agent fleet does.",
            ),
            (response.is_error, f"policy.servers: {text}; mend the request or the server's options."),
        )
        return response

    def _completion_request(self, request: Request, salt: str) -> tuple[str, dict[str, Any]]:
        """Return the route and the JSON body with which this version of vLLM is asked for a completion.

        Requests share cached prefixes only if their `salt`, the name of the weights, is equal.
        """
        sampling = {
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
        }
        cache = {"cache_salt": salt} if salt else {}
        if self.names_versions:
            body = {"token_ids": list(request.prompt), "sampling_params": sampling | {"detokenize": False}}
            return "/inference/v1/generate", body | cache
        tokens = {"return_token_ids": True, "return_tokens_as_token_ids": True, "add_special_tokens": False}
        return "/v1/completions", {"prompt": list(request.prompt), **sampling, **tokens, **cache}

    def _completion(self, answer: Mapping[str, Any], version: str) -> Completion:
        """Return the completion in the JSON object `answer` of the server.

        `version` names the weights of its tokens if the answer does not. Raises UserError if there is not one
        log-probability and one name of weights for each token, or if the completion ended for another reason
        than "stop", "length" and "abort".
        """
        choice = answer["choices"][0]
        logprobs = choice["logprobs"] or {}
        values = (
            [token["logprob"] for token in logprobs.get("content") or ()]
            if self.names_versions
            else logprobs.get("token_logprobs") or ()
        )
        ids = choice["token_ids"] or ()
        versions = tuple(
            span["version"]
            for span in choice.get("weight_versions") or ()
            for _ in range(span["start"], span["end"])
        ) or (version,) * len(ids)
        finish_reason = choice["finish_reason"]
        if len(ids) != len(values) or len(versions) != len(ids) or finish_reason not in ENDS:
            raise UserError(
                f"policy.backend: vLLM returned {len(ids)} tokens with {len(values)} log-probabilities and "
                f"{len(versions)} versions, ended by {finish_reason}; run the same command again."
            )
        return Completion(tuple(ids), tuple(values), finish_reason, versions)


def read_load(text: str) -> Load:
    """Return the figures in `text`, a server's answer of /metrics, summed over its engines.

    A figure that is missing is 0.
    """
    sums: dict[str, float] = {}
    cache = 0
    for name, labels, value in METRIC.findall(text):
        if name == "vllm:cache_config_info":
            known = dict(LABEL.findall(labels))
            blocks, size = (known.get(key, "0") for key in ("num_gpu_blocks", "block_size"))
            cache += int(blocks) * int(size) if blocks.isdigit() and size.isdigit() else 0
        else:
            sums[name] = sums.get(name, 0.0) + float(value)

    def total(name: str) -> int:
        return int(sums.get(f"vllm:{name}", sums.get(f"vllm:{name}_total", 0.0)))

    return Load(
        cache_tokens=cache,
        cache_usage=sums.get("vllm:kv_cache_usage_perc", 0.0),
        running=total("num_requests_running"),
        waiting=total("num_requests_waiting"),
        preemptions=total("num_preemptions"),
        prefix_queries=total("prefix_cache_queries"),
        prefix_hits=total("prefix_cache_hits"),
    )


def server_addresses(servers: Sequence[str]) -> list[str]:
    """Return the addresses of the vLLM servers for `servers`, the value of the parameter `policy.servers`.

    They are `servers` itself, or the servers that are announced on the Ray cluster if it is ["ray"]. Raises
    UserError if Ray is not installed, there is no cluster, or no server is announced on it.
    """
    if list(servers) != ["ray"]:
        return list(servers)
    if importlib.util.find_spec("ray") is None:
        raise UserError("policy.servers: [ray] needs Ray; install the extra ray, or name the servers.")
    from components.planning.ray_cluster import announced

    if not (found := announced()):
        raise UserError(
            "policy.servers: no server is announced on the Ray cluster; start servers with cuda-agent fleet "
            "--announce."
        )
    return found
