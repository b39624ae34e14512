"""A sampler that uses vLLM servers and can replace their weights.

The log-probabilities are those of the distribution after temperature (the servers' option `--logprobs-mode`
is processed_logprobs). New weights are sent with vLLM's weight transfer, broadcast to its workers, or loaded
by the servers from disk.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from components.core.errors import UserError
from components.core.params import Params, Policy
from components.policy.checkpoint import load_generation_config
from components.policy.sampler import Completion, stop_ids
from components.policy.vllm.fleet import Fleet
from components.policy.vllm.own_servers import OWN_SERVERS
from components.policy.vllm.server_client import Request, ServerUnavailable, server_addresses
from components.policy.vllm.weights import FleetWeights

# Interval, in seconds, at which a completion that is waited for looks after the servers.
TEND_SECONDS = 2.0


def has_ended(error: UserError) -> bool:
    """Return whether a push failed with `error` because no server answered any more."""
    return isinstance(error.__cause__, ServerUnavailable) and error.__cause__.status == 0


class VllmSampler:
    """A sampler that sends prompts to a fleet of vLLM servers and can replace their weights.

    Equal arguments may give different results, because rounding depends on how vLLM forms batches.
    """

    def __init__(self, fleet: Fleet, stop: tuple[int, ...], settings: Policy, *, version: str):
        """Sample from the servers of `fleet`; a turn ends after any of the token ids `stop`.

        `settings` are the parameters of the section `policy`. `version` is the name of the weights that the
        servers have.
        """
        self.fleet = fleet
        self.weights = FleetWeights(fleet, settings.weight_transfer)
        self.version = version
        self.settings = settings
        self.stop = stop
        self.asleep = False
        # Pushes the present weights again; None if only the caller of `push` can do so.
        self.push_again: Callable[[], None] | None = None
        self.lock = threading.Lock()

    def capacity(self) -> int:
        """Return how many sequences all usable servers can process at once, at least 1.

        The number follows from the figures that the servers report about their caches (`Replica.read`).
        """
        return self.fleet.capacity()

    async def complete(
        self, prompt: Sequence[int], *, max_new_tokens: int, temperature: float, seed: int, session: str
    ) -> Completion:
        """Sample one completion of the token ids `prompt`, of at most `max_new_tokens` tokens.

        It ends after a token that ends a turn, or at the end of the context window, and is empty if the
        prompt fills the window. `session` is a name that all turns of one trajectory share. While the
        completion is awaited, servers that have lost their weights by a restart get them again, if the
        attribute `push_again` is set. Raises UserError if no server completes the request in time
        (`Fleet.complete`). Raises StageFailed or UserError if a server that this process started has ended
        and is not started again (`OwnServers.check`).
        """
        limit = min(max_new_tokens, self.settings.context - len(prompt))
        if limit <= 0:
            return Completion((), (), "length", ())
        completing = asyncio.create_task(
            self.fleet.complete(Request(tuple(prompt), limit, temperature, seed, self.stop), session)
        )
        try:
            while not (await asyncio.wait((completing,), timeout=TEND_SECONDS))[0]:
                OWN_SERVERS.check()
                if self.push_again is not None and self.fleet.has_restarted():
                    await asyncio.to_thread(self._restore, self.push_again)
            return completing.result()
        finally:
            completing.cancel()

    def _restore(self, push_again: Callable[[], None]) -> None:
        with self.lock:
            try:
                if self.fleet.has_restarted():
                    push_again()
            except UserError as error:
                # A server that ended again is started again.
                if not has_ended(error):
                    raise

    def push(
        self, buckets: Iterable[Mapping[str, Tensor]], *, version: str, folder: Path | None = None
    ) -> None:
        """Replace the weights of the servers that answer, and check that all of their workers have them.

        A worker is the process of vLLM that computes on one GPU. `buckets` are dictionaries of tensors by
        name, as `weight_stream.weight_buckets` yields them, and are consumed completely. `version` is the
        name of the new weights. If the parameter policy.weight_transfer is `disk`, the servers load the
        checkpoint `folder`, which must have the same weights. Running completions are treated as
        `policy.push_pause` says. Raises UserError if a worker does not have the new weights, or if no server
        answers.
        """
        if self.asleep:
            self.weights.set_asleep(False)
            self.asleep = False
        self.weights.push(buckets, version=version, folder=folder, pause=self.settings.push_pause)
        self.version = version

    def sleep(self) -> None:
        """Release the GPU memory of the vLLM servers until the next `push`, if `policy.sleep` is set."""
        if self.settings.sleep and not self.asleep:
            self.weights.set_asleep(True)
            self.asleep = True


def open_vllm_sampler(
    params: Params, folder: Path, tokenizer: PreTrainedTokenizerBase, *, version: str
) -> VllmSampler:
    """Return a sampler of vLLM servers: those of `policy.servers`, or servers that this process starts.

    Servers are started only if `policy.servers` is empty. The servers have a model of the same shape as the
    checkpoint `folder`, but perhaps other weights until the first push, which replaces them. `version` is the
    name of the weights. Raises UserError if no server answers, or if one cannot be started, and StageFailed
    if one that this process started has ended too often in a row.
    """
    settings = params.policy
    stop = stop_ids(tokenizer, load_generation_config(folder))
    urls = server_addresses(settings.servers) or OWN_SERVERS.open(params, folder)
    fleet = Fleet(urls, context=settings.context, version=version)
    return VllmSampler(fleet, stop, settings, version=version)
