"""A simulation of the rollouts of one training step.

All sequences that are being generated share the decoding rate of the samplers. Turns that need a judge wait
in a queue and are judged in the order of their arrival. The step ends with its last trajectory. The simulated
time advances to the next event, or by a small fixed time step if the next event is closer.
"""

import bisect
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Number of time steps in the expected duration of the rollouts, which sets the length of a time step.
TICKS = 4000
GENERATING, TOOL, QUEUED, JUDGED, DONE = range(5)


@dataclass(frozen=True)
class Load:
    """The description of the rollouts of one training step, from which `simulate` draws trajectories.

    `turns` (per trajectory), `tokens` (sampled per turn) and `judge_seconds` are medians of log-normal
    distributions, and the fields that end in `_spread` are the standard deviations of the logarithm.
    `max_turns` limits the turns of a trajectory, `max_tokens` the tokens sampled in a turn, and `context` all
    tokens of a trajectory, of which `observation_tokens` are added in each turn. A share `judged_share` of
    the turns needs a judge, and every other turn takes `tool_seconds`. `sequence_rate` is the largest
    decoding rate of one sequence and `total_rate` that of all sequences together, in tokens/s.
    """

    trajectories: int
    turns: float
    turns_spread: float
    max_turns: int
    tokens: float
    tokens_spread: float
    max_tokens: int
    context: int
    observation_tokens: float
    judged_share: float
    judge_seconds: float
    judge_spread: float
    tool_seconds: float
    sequence_rate: float
    total_rate: float


@dataclass(frozen=True)
class Rollout:
    """The result of a simulated step of sampling trajectories whose candidates a pool of judges measures.

    `ends` has the seconds at which the trajectories end, in increasing order. `tokens` is the number of
    sampled and observed tokens, and `judgements` the number of judged candidates. `wait_mean` and `wait_p95`
    are the mean and the 95th percentile of the seconds that a candidate waits for a free judge.
    `longest_queue` is the largest number of candidates that wait at the same time.
    """

    ends: NDArray[np.float64]
    tokens: float
    judgements: int
    wait_mean: float
    wait_p95: float
    longest_queue: int
    # Share of the judges' total time in which they judge, from 0 to 1.
    busy: float

    @property
    def seconds(self) -> float:
        return float(self.ends[-1])

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.ends, share))


def simulate(load: Load, judges: int, seed: int) -> Rollout:
    """Simulate the rollouts of one step, in which `judges` judges work at the same time.

    The random numbers depend on the seed but not on the number of judges, so that simulations with different
    numbers of judges can be compared.
    """
    rng, count = np.random.default_rng(seed), load.trajectories
    turns = np.clip(
        np.rint(rng.lognormal(np.log(load.turns), load.turns_spread, count)), 1, load.max_turns
    ).astype(int)
    most = int(turns.max())
    tokens = np.clip(
        rng.lognormal(np.log(load.tokens), load.tokens_spread, (count, most)), 1, load.max_tokens
    )
    judged = rng.random((count, most)) < load.judged_share
    judged[np.arange(count), turns - 1] = True  # The final answer is always judged.
    service = rng.lognormal(np.log(load.judge_seconds), load.judge_spread, (count, most))
    # A trajectory ends when its context is full.
    used = np.cumsum(tokens + load.observation_tokens, axis=1)
    turns = np.minimum(turns, 1 + (used < load.context).sum(axis=1).clip(max=most - 1))
    own = np.arange(most) < turns[:, None]

    generation = float((tokens * own).sum()) / min(load.total_rate, load.sequence_rate * count)
    judging = float((service * (judged & own)).sum()) / judges
    alone = float(
        ((tokens / load.sequence_rate + np.where(judged, service, load.tool_seconds)) * own).sum(axis=1).max()
    )
    tick = max(generation, judging, alone) / TICKS

    state = np.full(count, GENERATING)
    turn: NDArray[np.int_] = np.zeros(count, dtype=int)
    left = tokens[:, 0].copy()
    since, ends = np.zeros(count), np.zeros(count)
    rows = np.arange(count)
    waits: list[NDArray[np.float64]] = [np.zeros(0)]
    now, longest, worked = 0.0, 0, 0.0
    while (state != DONE).any():
        generating, using, serving = state == GENERATING, state == TOOL, state == JUDGED
        rate = min(load.sequence_rate, load.total_rate / max(1, int(generating.sum())))
        next_event = np.where(generating, left / rate, np.where(using | serving, left, np.inf)).min()
        step = max(tick, float(next_event))
        now += step
        left[generating] -= step * rate
        left[using | serving] -= step
        worked += step * int(serving.sum())

        written = generating & (left <= 0)
        to_judge = written & judged[rows, turn]
        state[to_judge], since[to_judge] = QUEUED, now
        at_tool = written & ~to_judge
        state[at_tool], left[at_tool] = TOOL, load.tool_seconds

        over = (using | serving) & (left <= 0)
        ended = over & (turn + 1 >= turns)
        state[ended], ends[ended] = DONE, now
        goes_on = over & ~ended
        turn[goes_on] += 1
        state[goes_on], left[goes_on] = GENERATING, tokens[rows[goes_on], turn[goes_on]]

        queue = np.flatnonzero(state == QUEUED)
        free = judges - int((state == JUDGED).sum())
        longest = max(longest, len(queue) - free)
        if len(queue) and free > 0:
            taken = queue[np.argsort(since[queue], kind="stable")[:free]]
            waits.append(now - since[taken])
            state[taken], left[taken] = JUDGED, service[taken, turn[taken]]

    waited = np.concatenate(waits)
    return Rollout(
        ends=np.sort(ends),
        tokens=float((tokens * own).sum() + load.observation_tokens * turns.sum()),
        judgements=int((judged & own).sum()),
        wait_mean=float(waited.mean()) if len(waited) else 0.0,
        wait_p95=float(np.quantile(waited, 0.95)) if len(waited) else 0.0,
        longest_queue=max(0, longest),
        busy=worked / (judges * now),
    )


def enough_judges(load: Load, headroom: float, seed: int) -> int:
    """Return the least number of judges with which the rollouts last at most `headroom` times the least time.

    The least time is the duration with one judge for each trajectory.
    """
    limit = headroom * simulate(load, load.trajectories, seed).seconds
    return bisect.bisect_left(
        range(load.trajectories),
        True,
        lo=1,
        key=lambda judges: simulate(load, judges, seed).seconds <= limit,
    )
