"""A fleet of vLLM servers with the same model, among which the sessions of a sampler are divided.

A session is the requests of one trajectory. It stays with one server, whose cache has its prefix, until this
server fails or has refused its requests for LOYAL_SECONDS. A request that fails is repeated for at most
PATIENCE_SECONDS. All requests run in a thread of the fleet with an event loop of its own, so that one set of
connections serves every caller. A push is the replacement of the weights of all servers.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import httpx

from components.core.errors import UserError
from components.policy.sampler import Completion
from components.policy.vllm.replica import FIRST_PAUSE_SECONDS, IDLE_SECONDS, Replica
from components.policy.vllm.server_client import (
    EXAMINATION_SECONDS,
    Request,
    ServerUnavailable,
    VllmServer,
)

# Longest time for which a request is repeated while no server serves it, in seconds. A server takes minutes
# to start.
PATIENCE_SECONDS = 1800.0
# Time for which a session stays with a server that answers but refuses its requests, before it moves to
# another one, in seconds. A push of weights takes less.
LOYAL_SECONDS = 30.0
# Interval of the readings of /metrics, in seconds.
READ_SECONDS = 2.0
LOG = logging.getLogger(__name__)
T = TypeVar("T")


class Fleet:
    """Several vLLM servers with the same weights, over which sessions are divided.

    A session is the requests of one trajectory, which one server gets because its cache has their prefix.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        context: int,
        version: str,
        patience: float = PATIENCE_SECONDS,
        loyal: float = LOYAL_SECONDS,
    ):
        """Connect to the vLLM servers at `urls`.

        `context` is the largest number of tokens of a sequence, and `version` the name of the weights that
        the servers have. `patience` is the longest time in seconds for which a request is repeated while no
        server serves it. After `loyal` seconds in which a server answers but refuses the requests of a
        session, which are those of one trajectory, the session moves to another server. A server that does
        not answer is contacted again while other servers are used. It is used after the first push of weights
        in which it takes part. Raises UserError if no server answers, or if a server runs a version of vLLM
        that is too old.
        """
        self.context, self.patience, self.loyal = context, patience, loyal
        # Since the last call of `figures`: repeated requests, moves of sessions to another server, and tokens
        # that were looked up (`Load.prefix_queries`) and found in the caches of all servers.
        self.retries = self.moves = self.queries = self.hits = 0
        # Sessions that have been assigned to a server.
        self.seen: set[str] = set()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="vllm-fleet", daemon=True)
        self.thread.start()
        self.client = httpx.AsyncClient(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None)
        )
        self.replicas = [Replica(VllmServer(url, self.client), version) for url in urls]
        faults = [fault for fault in self.all(self.replicas, self._open) if fault is not None]
        if len(faults) == len(urls):
            self.close()
            raise UserError(
                f"policy.servers: {faults[0]}; start the server with cuda-agent fleet, then run the same "
                "command again."
            ) from faults[0]
        if faults:
            LOG.warning(
                "policy.servers: %d of %d servers cannot be used (%s); the others are, and these are asked "
                "again and used after the next push of weights.",
                len(faults),
                len(urls),
                "; ".join(map(str, faults)),
            )
        self.reading: asyncio.Task[None] | None = None

    def close(self) -> None:
        """End what the fleet does, its connections and its thread; the servers run on."""

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.client.aclose()

        asyncio.run_coroutine_threadsafe(end(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def all(self, replicas: Sequence[Replica], call: Callable[[Replica], Awaitable[T]]) -> list[T]:
        """Return the results of `call` for all of `replicas`, in their order; the calls run concurrently.

        A replica is the state of one vLLM server. The calls run in the fleet's own event loop, and this
        method waits for them. If a call raises an error, the error is raised.
        """

        async def every() -> list[T]:
            return await asyncio.gather(*(call(replica) for replica in replicas))

        return asyncio.run_coroutine_threadsafe(every(), self.loop).result()

    async def complete(self, request: Request, session: str) -> Completion:
        """Return the completion of a request, which is sent to the server of `session`.

        `session` is a name that all requests of one trajectory share. If a server ends a completion early,
        because its weights are about to be replaced, the rest is requested afterwards. Raises UserError if no
        server has returned any token of the completion for `patience` seconds.
        """
        return await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self._complete(request, session), self.loop)
        )

    def capacity(self) -> int:
        """Return the number of sequences that all usable servers can process at the same time, at least 1.

        A server is usable if it answers and has the newest weights.
        """
        return max(1, int(sum(replica.limit for replica in self.replicas if replica.is_usable())))

    def has_lost_weights(self) -> bool:
        """Return whether some server answers, but all servers that answer lack the newest weights.

        This is so if all servers were restarted, for instance.
        """
        return not any(replica.is_usable() for replica in self.replicas) and any(
            replica.outdated and not replica.doubted for replica in self.replicas
        )

    def has_restarted(self) -> bool:
        """Return whether a server that answers was found to have lost its weights since the last push.

        That happens if it was restarted. A push replaces the weights of all servers, so such a server has the
        newest weights again after it.
        """
        return any(replica.restarted and not replica.doubted for replica in self.replicas)

    def figures(self) -> dict[str, float]:
        """Return figures of the servers' health and load by name, for the metrics of a training step.

        They are the number of servers that answer and have the newest weights (`samplers_up`), the numbers of
        running and waiting sequences (`sampler_running`, `sampler_waiting`) and the mean share of the
        key-value cache in use (`sampler_cache_usage`). Three more are about the time since the last call of
        this method: the share of tokens that were found in the cache of prefixes (`sampler_prefix_hits`), the
        number of requests that failed and were repeated (`sampler_retries`) and the number of trajectories
        that moved to another server (`sampler_moves`).
        """
        loads = [replica.load for replica in self.replicas if replica.load is not None]
        found = {
            "samplers_up": float(sum(replica.is_usable() for replica in self.replicas)),
            "sampler_running": float(sum(load.running for load in loads)),
            "sampler_waiting": float(sum(load.waiting for load in loads)),
            "sampler_cache_usage": sum(load.cache_usage for load in loads) / max(1, len(loads)),
            "sampler_prefix_hits": self.hits / max(1, self.queries),
            "sampler_retries": float(self.retries),
            "sampler_moves": float(self.moves),
        }
        self.retries = self.moves = self.queries = self.hits = 0
        return found

    async def _open(self, replica: Replica) -> ServerUnavailable | None:
        """Prepare a server for sampling, and return None, or the error if the server does not answer.

        A server that does not answer is not used until the next push, which replaces the weights of all
        servers. Raises UserError if the server runs a version of vLLM that is too old.
        """
        try:
            await replica.server.open()
            await self._read(replica)
        except ServerUnavailable as error:
            replica.outdated = True  # Its weights are unknown until a push.
            replica.doubt(True)
            return error
        return None

    async def _examine(self, replica: Replica, failed: float) -> None:
        """Find out whether a server that failed answers again and still has its weights.

        `failed` is the time.monotonic() of the failure; a server that was examined since then is not examined
        again. A server that was restarted has the weights with which it was started, so it is not used until
        the next push, which replaces the weights of all servers. The examination does not end a pause or
        sleep of the server. What is found is recorded in `replica`.
        """
        async with replica.examining:
            if replica.examined > failed:
                return
            try:
                await replica.server.probe()
                known = replica.weights
                if (
                    known is not None
                    and not await replica.server.is_asleep()
                    and await replica.server.workers("weight_report", None, EXAMINATION_SECONDS) != known
                ):
                    replica.outdated = replica.restarted = True
            except (ServerUnavailable, UserError):
                replica.failed()
                replica.doubt(True)
            else:
                replica.doubt(False)

    async def _complete(self, request: Request, session: str) -> Completion:
        if self.reading is None:
            self.reading = asyncio.create_task(self._read_loads())
        found = Completion((), (), "abort", ())
        answered = time.monotonic()
        while found.finish_reason == "abort" and len(found.ids) < request.max_tokens:
            waited = time.monotonic() - answered
            if waited > self.patience:
                raise UserError(
                    f"policy.servers: no server has completed a request for {self.patience:g} s; "
                    "start them with cuda-agent fleet, then run the same command again."
                ) from ServerUnavailable("no server is usable")
            replica = self._replica(session, waited > self.loyal)
            part = await self._try(replica, request, found, session) if replica is not None else None
            if part is None or not part.ids:
                await asyncio.sleep(FIRST_PAUSE_SECONDS)
            if part is not None:
                found = Completion(
                    found.ids + part.ids,
                    found.logprobs + part.logprobs,
                    part.finish_reason,
                    found.versions + part.versions,
                )
                answered = time.monotonic() if part.ids else answered
        return found if found.finish_reason != "abort" else replace(found, finish_reason="length")

    async def _try(
        self, replica: Replica, request: Request, found: Completion, session: str
    ) -> Completion | None:
        """Return the completion of the rest of a request by the server of `replica`, or None if it failed.

        `request` is the whole request, of which `found` has been completed so far, and `session` is the name
        that all requests of the trajectory share. The result is None if the request fails, or if it is not
        sent because the server failed shortly before (`Replica.is_resting`). Raises UserError if the server
        refuses the request for good.
        """
        if replica.is_resting():
            return None
        rest = replace(
            request,
            prompt=request.prompt + found.ids,
            max_tokens=request.max_tokens - len(found.ids),
            seed=(request.seed + len(found.ids)) % 2**63,
        )
        # A session whose request is in flight is active until its end.
        replica.sessions[session] = float("inf")
        try:
            part = await self._unless_lost(replica, replica.server.complete(rest, replica.version))
        except ServerUnavailable as error:
            self.retries += 1
            if error.status == 0:
                await self._examine(replica, time.monotonic())
            else:
                replica.failed()
            return None
        finally:
            if session in replica.sessions:
                replica.sessions[session] = time.monotonic()
        replica.failures = 0
        replica.completed += 1
        return part

    async def _unless_lost(self, replica: Replica, request: Coroutine[Any, Any, Completion]) -> Completion:
        """Return the result of `request`, a coroutine that sends a request to the server of `replica`.

        Raises ServerUnavailable as soon as the server is found not to answer, or fails in a push, even if the
        request still runs. Other errors of the request are raised unchanged.
        """
        asked, lost = asyncio.create_task(request), asyncio.create_task(replica.lost.wait())
        try:
            await asyncio.wait((asked, lost), return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
            if replica.doubted:
                raise ServerUnavailable(f"{replica.server.url} no longer answers")
            raise ServerUnavailable(f"{replica.server.url} did not take the new weights", 503)
        finally:
            asked.cancel()
            lost.cancel()

    def _replica(self, session: str, may_move: bool) -> Replica | None:
        """Return the server to which the requests of a session go, or None if no server is usable.

        A session is the requests of one trajectory, and a server is usable if it answers and has the newest
        weights. A session without a server, or whose server has failed, is assigned to the least loaded one.
        `may_move` says whether a session also leaves a server that answers but refuses its requests.
        """
        usable = [replica for replica in self.replicas if replica.is_usable()]
        ready = [replica for replica in usable if not replica.is_resting()]
        own = next((replica for replica in self.replicas if session in replica.sessions), None)
        if own in usable and not (may_move and own not in ready and ready):
            return own
        if not usable:
            return None
        if own is not None:
            del own.sessions[session]
        if session in self.seen:
            self.moves += 1
        self.seen.add(session)
        chosen = min(ready or usable, key=Replica.share)
        chosen.sessions[session] = time.monotonic()
        return chosen

    async def _read_loads(self) -> None:
        """Read the load of all servers every READ_SECONDS, and remove sessions that have long been idle.

        A session is the requests of one trajectory. It is removed after 10 * IDLE_SECONDS without a request.
        A server that does not answer is examined (`_examine`), and then again at every reading until it is
        found to work.
        """
        while True:
            await asyncio.gather(*(self._read_load(replica) for replica in self.replicas))
            await asyncio.sleep(READ_SECONDS)

    async def _read_load(self, replica: Replica) -> None:
        since = time.monotonic() - 10 * IDLE_SECONDS
        for session in [name for name, last in replica.sessions.items() if last < since]:
            del replica.sessions[session]
        if replica.is_resting():
            return
        if replica.doubted:
            await self._examine(replica, time.monotonic())
        elif not replica.outdated:
            try:
                await self._read(replica)
            except ServerUnavailable as error:
                if error.status == 0:
                    await self._examine(replica, time.monotonic())

    async def _read(self, replica: Replica) -> None:
        """Read the load of a server. Raises ServerUnavailable if it does not answer."""
        before, load = replica.load, await replica.server.load()
        # The counts of a server that was restarted begin at 0.
        if (
            before is not None
            and load.prefix_queries >= before.prefix_queries
            and load.prefix_hits >= before.prefix_hits
        ):
            self.queries += load.prefix_queries - before.prefix_queries
            self.hits += load.prefix_hits - before.prefix_hits
        replica.read(load, self.context)
