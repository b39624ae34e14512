"""Trajectories an hour of the loop that waits for nobody, against a loop that takes each turn together.

    python tests/bench/bench_rollouts.py [--trajectories 64] [--max-turns 20]

Both loops sample the same turns of a small random policy with the same seeds, and wait for the same tool
delays, which are drawn from a log-normal distribution with a long tail. In the lockstep loop, which stands
only in this file, all trajectories are sampled, then all tools are waited for, and then the next turn begins.
The loop of the project is `in_flight.keep_in_flight`.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))

import numpy as np
import torch
from numpy.typing import NDArray
from training_fixtures import tiny_policy, tiny_tokenizer

from components.agent.in_flight import BusyMeter, keep_in_flight
from components.policy.transformers_sampler import TransformersSampler

TOKENS = 12
DELAY, SPREAD = 0.1, 1.5
TURNS, TURNS_SPREAD = 10.0, 0.6


@dataclass(frozen=True)
class Plan:
    """The turns of each trajectory, and the seconds that the tool takes in each turn."""

    turns: NDArray[np.int_]
    delays: NDArray[np.float64]


@dataclass
class Meters:
    """What the loops measure of their samplers and tools."""

    sampling: BusyMeter
    tools: BusyMeter


async def sample(one: TransformersSampler, meters: Meters, index: int, turn: int) -> None:
    with meters.sampling.busy():
        await one.complete(
            [1, 5 + index % 20, 5 + turn],
            max_new_tokens=TOKENS,
            temperature=1.0,
            seed=index * 1000 + turn,
            session=str(index),
        )


async def use_tool(plan: Plan, meters: Meters, index: int, turn: int) -> None:
    with meters.tools.busy():
        await asyncio.sleep(plan.delays[index, turn])


async def independent(one: TransformersSampler, meters: Meters, plan: Plan) -> None:
    async def trajectory(index: int) -> None:
        for turn in range(plan.turns[index]):
            await sample(one, meters, index, turn)
            await use_tool(plan, meters, index, turn)

    waiting = iter(range(len(plan.turns)))
    await keep_in_flight(lambda: next((trajectory(index) for index in waiting), None), one.capacity)


async def lockstep(one: TransformersSampler, meters: Meters, plan: Plan) -> None:
    for turn in range(int(plan.turns.max())):
        live = np.flatnonzero(plan.turns > turn).tolist()
        await asyncio.gather(*(sample(one, meters, index, turn) for index in live))
        await asyncio.gather(*(use_tool(plan, meters, index, turn) for index in live))


def measure(
    loop: Callable[[TransformersSampler, Meters, Plan], Coroutine[None, None, None]],
    one: TransformersSampler,
    plan: Plan,
) -> tuple[float, float, float]:
    """Return the seconds of a loop, and the shares of them in which sampler and tools were idle."""
    meters, started = Meters(BusyMeter(), BusyMeter()), time.monotonic()
    asyncio.run(loop(one, meters, plan))
    seconds = time.monotonic() - started
    return seconds, 1 - meters.sampling.seconds() / seconds, 1 - meters.tools.seconds() / seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--max-turns", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    count, most, rng = options.trajectories, options.max_turns, np.random.default_rng(0)
    drawn = rng.lognormal(np.log(TURNS), TURNS_SPREAD, count)
    plan = Plan(
        np.clip(np.rint(drawn), 1, most).astype(int), rng.lognormal(np.log(DELAY), SPREAD, (count, most))
    )
    policy = tiny_policy()
    one = TransformersSampler(policy, tiny_tokenizer(), batch=count, device="cpu", version="bench")
    one.stop = ()  # A turn ends at the limit of its tokens.
    figures = {loop.__name__: measure(loop, one, plan) for loop in (lockstep, independent)}
    for name, (seconds, sampler, tools) in figures.items():
        print(
            f"{name:12} {seconds:7.1f} s, {3600 * count / seconds:7.0f} trajectories/h, "
            f"idle: sampler {sampler:.2f}, tools {tools:.2f}"
        )
    print(f"{figures['lockstep'][0] / figures['independent'][0]:.2f} times as many trajectories an hour")


if __name__ == "__main__":
    main()
