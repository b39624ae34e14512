"""Figures of a fleet of servers, of which some are restarted."""

import asyncio
from types import SimpleNamespace
from typing import Any

from components.policy.vllm.fleet import Fleet
from components.policy.vllm.replica import Replica
from components.policy.vllm.server_client import Load


def replica(*counts: tuple[int, int]) -> Replica:
    """Return a server whose answers have these numbers of tokens looked up and found in its cache."""
    answers = iter([Load(1000, 0.0, 0, 0, 0, *each) for each in counts])

    async def load() -> Load:
        return next(answers)

    server: Any = SimpleNamespace(load=load)
    return Replica(server)


def test_the_share_of_cached_prefixes_is_that_of_a_step_also_if_a_server_is_restarted() -> None:
    fleet = object.__new__(Fleet)
    fleet.context = 10
    fleet.retries = fleet.moves = fleet.queries = fleet.hits = 0
    steady = replica((0, 0), (100, 50), (200, 125), (300, 200))
    fleet.replicas = [steady, replica((0, 0), (100, 50), (40, 0), (140, 75))]
    shares = []
    for _ in range(4):
        for one in fleet.replicas:
            asyncio.run(fleet._read_load(one))
        shares.append(fleet.figures()["sampler_prefix_hits"])
    assert shares == [0, 0.5, 0.75, 0.75]
