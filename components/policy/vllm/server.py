"""A client of one vLLM server, whose methods are coroutines.

The server runs in a separate Python environment, because vLLM and Prefect need different versions of fastapi.
It must be started with VLLM_SERVER_DEV_MODE=1, which adds the routes for weights, sleep and workers.
`cuda-agent fleet` starts servers so.
"""

import asyncio
import importlib.util
from collections.abc import Sequence
from typing import Any

import httpx

from components.core.errors import UserError
from components.policy.sampler import Completion
from components.policy.vllm.protocol import Load, Request, VllmProtocol, read_load

# Longest wait for one answer, in seconds. It is long, because a turn of 32,768 tokens in a full batch takes
# minutes.
TIMEOUT_SECONDS = 3600.0
CONNECT_SECONDS = 10.0
# Statuses of an answer after which the same request may succeed later.
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})


def server_addresses(servers: Sequence[str]) -> list[str]:
    """Return the addresses of the vLLM servers for `servers`, the value of the parameter `policy.servers`.

    They are `servers` itself, or the servers that are announced on the Ray cluster if it is ["ray"]. Raises
    UserError if Ray is not installed, there is no cluster, or no server is announced on it.
    """
    if list(servers) != ["ray"]:
        return list(servers)
    if importlib.util.find_spec("ray") is None:
        raise UserError("policy.servers: [ray] needs Ray; install the extra ray, or name the servers.")
    from components.core.ray_cluster import announced

    if not (found := announced()):
        raise UserError(
            "policy.servers: no server is announced on the Ray cluster; start servers with cuda-agent fleet "
            "--announce."
        )
    return found


class ServerUnavailable(ConnectionError):
    """Exception that is raised if a server does not answer, or refuses a request that may succeed later.

    `status` is the HTTP status of the answer, and 0 if there was none.
    """

    def __init__(self, text: str, status: int = 0):
        super().__init__(text)
        self.status = status


class VllmServer:
    """A client of one vLLM server, which samples from the server's model and updates its weights over HTTP.

    `protocol` is that of the server's version once `open` has returned.
    """

    def __init__(self, url: str, client: httpx.AsyncClient):
        """Use the server with the root address `url`, such as http://127.0.0.1:8000."""
        self.url = url.rstrip("/")
        self.client = client
        self.protocol = VllmProtocol("0.24")

    async def probe(self) -> None:
        """Ask the server for its version and set `protocol` accordingly.

        Raises ServerUnavailable if the server does not answer, and UserError if its version is too old.
        """
        await self.call("GET", "/health")
        self.protocol = VllmProtocol(str((await self.call("GET", "/version")).get("version", "")))

    async def open(self, seconds: float) -> None:
        """Ask the server for its version, and end a sleep or pause that a killed training process has left.

        Raises ServerUnavailable if the server does not answer within `seconds`.
        """
        try:
            async with asyncio.timeout(seconds):
                await self.probe()
                if await self.is_asleep():
                    await self.call("POST", "/wake_up")
                if (await self.call("GET", "/is_paused")).get("is_paused"):
                    await self.call("POST", "/resume")
        except TimeoutError as error:
            raise ServerUnavailable(f"{self.url} does not answer") from error

    async def is_asleep(self) -> bool:
        return bool((await self.call("GET", "/is_sleeping")).get("is_sleeping"))

    async def complete(self, request: Request, version: str) -> Completion:
        """Return the completion of a request; `version` is the name of the weights that the server has.

        If the coroutine is cancelled, its connection is closed, and the server aborts the request.
        """
        route, body = self.protocol.completion(request, version)
        return self.protocol.completed(await self.call("POST", route, body), version)

    async def load(self) -> Load:
        return read_load(await self._text("GET", "/metrics"))

    async def workers(self, method: str, arguments: dict[str, Any] | None = None) -> list[Any]:
        """Call the method `method` of every worker of the server, and return one result for each worker."""
        answer = await self.call("POST", "/collective_rpc", {"method": method, "kwargs": arguments or {}})
        return list(answer.get("results", []))

    async def call(self, method: str, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a request to a route of the server, and return the JSON object in the answer.

        `method` is "GET" or "POST". An answer without content gives an empty dictionary. Raises UserError if
        the server has no such route or refuses the request for good, and ServerUnavailable if the request may
        succeed later.
        """
        response = await self._answer(method, route, body)
        answer: dict[str, Any] = response.json() if response.content else {}
        return answer

    async def _text(self, method: str, route: str) -> str:
        return (await self._answer(method, route, None)).text

    async def _answer(self, method: str, route: str, body: dict[str, Any] | None) -> httpx.Response:
        try:
            response = await self.client.request(method, f"{self.url}{route}", json=body)
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise UserError(
                f"policy.servers: {self.url} is no address ({error}); give for instance http://127.0.0.1:8000."
            ) from error
        except httpx.TransportError as error:
            fault = type(error).__name__
            raise ServerUnavailable(f"no vLLM server answers at {self.url} ({fault})") from error
        text = f"{self.url}{route} answered {response.status_code}, {' '.join(response.text.split())[:400]}"
        if response.status_code in PASSING:
            raise ServerUnavailable(text, response.status_code)
        if response.status_code == 404:
            raise UserError(
                f"policy.servers: {self.url} has no route {route}; start vLLM with VLLM_SERVER_DEV_MODE=1, "
                "as cuda-agent fleet does."
            )
        if response.is_error:
            raise UserError(f"policy.servers: {text}; mend the request or the server's options.")
        return response
