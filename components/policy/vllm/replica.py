"""The state of one vLLM server of a fleet: whether it works, its weights, and how much it can take.

A fleet is several servers with the same model, among which trajectories are divided.
"""

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

from components.policy.vllm.server_client import Load, VllmServer

# Pause between two attempts of a request, and longest pause after failures of a server, in seconds.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 20.0
# A session without a request for this long no longer counts as load of its server, in seconds.
IDLE_SECONDS = 120.0
# A server's number of sequences in flight may grow while less than the share ROOM of its key-value cache is
# in use, and shrinks while more than the share FULL is.
ROOM, FULL = 0.6, 0.9


@dataclass(eq=False)
class Replica:
    """The state of one vLLM server of a fleet, as it was last observed.

    `version` is the name of the weights that the server has, and `weights` are the reports of its workers on
    them (`Fingerprint.weight_report`), None before the first push, which is a replacement of the weights.
    `workers` is their number at the last push. A server is `doubted` if it has failed and was not found to
    work since; it gets no prompts. It is `outdated` if it is known not to have the newest weights, and
    `restarted` if it was found to have lost its weights and no push began since then. `lost` is set while
    `doubted` is true, and after a push in which the server failed. `examining` is held while the server is
    examined, and `examined` is the time.monotonic() at which `doubted` was last assigned. No request is sent
    before the time.monotonic() `resting_until`; `failures` is the number of failures since the last answer.
    `limit` is the number of sequences to keep in flight, and `completed` the number of requests completed
    since `limit` last changed. `load` is what the server last reported. `sessions` has the time.monotonic()
    of the last request of each trajectory, by its name, and infinity while a request is in flight.
    """

    server: VllmServer
    version: str = ""
    weights: Any = None
    workers: int = 0
    doubted: bool = False
    outdated: bool = False
    restarted: bool = False
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    examining: asyncio.Lock = field(default_factory=asyncio.Lock)
    examined: float = 0.0
    resting_until: float = 0.0
    failures: int = 0
    limit: float = 1.0
    load: Load | None = None
    completed: int = 0
    sessions: dict[str, float] = field(default_factory=dict)

    def is_resting(self) -> bool:
        return time.monotonic() < self.resting_until

    def is_usable(self) -> bool:
        return not self.doubted and not self.outdated

    def share(self) -> float:
        """Return the load of the server: its active sessions, divided by its limit of sequences in flight.

        A session is the requests of one trajectory. It is active if it had a request in the last
        IDLE_SECONDS.
        """
        since = time.monotonic() - IDLE_SECONDS
        return sum(last >= since for last in self.sessions.values()) / self.limit

    def doubt(self, doubted: bool) -> None:
        self.doubted, self.examined = doubted, time.monotonic()
        if doubted:
            self.lost.set()
            self.sessions.clear()
        else:
            self.lost.clear()

    def exclude(self) -> None:
        """Record that the server failed in a push, and end its requests, which it may never resume."""
        self.outdated = True
        self.lost.set()
        self.sessions.clear()

    def failed(self) -> None:
        """Record a failure, after which no request is sent to the server for a time.

        The time is at most FIRST_PAUSE_SECONDS * 2^n after n failures in a row, and at most
        LONGEST_PAUSE_SECONDS. A failure during this time is not counted.
        """
        if self.is_resting():
            return
        self.failures += 1
        longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**self.failures)
        self.resting_until = time.monotonic() + longest * random.uniform(0.5, 1.0)

    def read(self, load: Load, context: int) -> None:
        """Adjust the number of sequences in flight (`limit`) to the figures that the server has reported.

        `context` is the largest number of tokens of a sequence. The limit is at least the number of sequences
        of this size that the key-value cache holds. It shrinks by a fifth if more than the share FULL of the
        cache is in use or sequences were preempted since the last report. It grows by a quarter if the
        following holds: less than the share ROOM is in use, no sequence waits, at least 90% as many sessions
        (trajectories) as the limit are active, and at least as many requests as the limit were completed
        since it last changed.
        """
        least = max(1.0, load.cache_tokens // context)
        preempted = self.load is not None and load.preemptions > self.load.preemptions
        is_turned = self.completed >= self.limit and self.share() >= 0.9
        if preempted or load.cache_usage > FULL:
            self.limit, self.completed = 0.8 * self.limit, 0
        elif is_turned and load.cache_usage < ROOM and not load.waiting:
            self.limit, self.completed = 1.25 * self.limit, 0
        self.limit = max(least, self.limit)
        self.load = load
