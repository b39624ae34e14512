"""A simulation of the steps of a stage: sampling, tools, judges and training, as the rollout loop runs them.

Trajectories run independently (`agent/in_flight.py`): one begins when fewer run than the samplers hold, and
the sequences that are being generated share the decoding rate. Turns that need a judge wait in a queue and
are judged in the order of their arrival. The trainer takes the first complete trajectories of a step
(`training/trajectory_queue.py`) and trains; with a staleness, the sampling goes on meanwhile. Nothing is
dropped for its age, and prompts are read at once. The simulated time advances to the next event, or by a
small fixed time step if the next event is closer.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Number of time steps in the expected duration of a step, which sets the length of a time step.
TICKS = 4000
# Mean number of forward passes of other sequences for which a new one waits before it joins them.
JOINING = 0.5
# States of a trajectory.
WAITING, GENERATING, TOOL, QUEUED, JUDGED, DONE = range(6)
# Bounds of the cache's use and factors by which a fleet changes the number of trajectories in flight, and
# the seconds between two readings; see `policy/vllm/replica.py` and `policy/vllm/fleet.py`.
ROOM, FULL, GROWTH, CUT, READ_SECONDS = 0.6, 0.9, 1.25, 0.8, 2.0


@dataclass(frozen=True)
class Load:
    """The sizes and distributions of the rollouts of one training step, from which `draw` draws trajectories.

    `turns` (per trajectory), `tokens` (sampled per turn) and `judge_seconds` are medians of log-normal
    distributions, and the fields that end in `_spread` are the standard deviations of the logarithm.
    `max_turns` limits the turns of a trajectory, `max_tokens` the tokens sampled in a turn, and `context` all
    tokens of a trajectory, of which `observation_tokens` are added in each turn. A share `judged_share` of
    the turns needs a judge, and every other turn takes `tool_seconds`.
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


@dataclass(frozen=True)
class Samplers:
    """The capacity of the samplers: decoding rates in tokens/s, and how many trajectories run at a time.

    `sequence_rate` is the largest rate of one sequence, and `total_rate` the largest sum over all sequences.
    At most `in_flight` trajectories run at a time. If `cache_tokens`, the size of the key-value cache, is
    finite, this limit is raised while much of the cache is free, and lowered, but never below `in_flight`,
    when the cache is nearly full.
    """

    sequence_rate: float
    total_rate: float
    in_flight: float
    cache_tokens: float = np.inf


@dataclass(frozen=True)
class Work:
    """The work of trajectories: `turns` [trajectories], and the other fields [trajectories, turns].

    A turn samples `tokens`, then spends `tool_seconds` on tools, and is then judged for `judge_seconds`,
    unless that is 0. `history` is the number of tokens of the trajectory up to the end of the turn, which is
    taken as their number in the key-value cache while the turn is sampled.
    """

    turns: NDArray[np.int_]
    tokens: NDArray[np.float64]
    tool_seconds: NDArray[np.float64]
    judge_seconds: NDArray[np.float64]
    history: NDArray[np.float64]

    def own(self) -> NDArray[np.bool_]:
        """Return a mask [trajectories, turns] of the entries that belong to turns that take place."""
        return np.arange(self.tokens.shape[1]) < self.turns[:, None]


@dataclass(frozen=True)
class Rollout:
    """The result of simulated steps.

    `ends` has the seconds at which the trajectories end, in increasing order, and `trained` those at which
    the training of each step ends. `tokens` is the number of sampled and observed tokens, and `judgements`
    the number of judged candidates. `wait_mean` and `wait_p95` are the mean and the 95th percentile of the
    seconds that a candidate waits for a free judge. `longest_queue` is the largest number of candidates that
    wait at the same time.
    """

    ends: NDArray[np.float64]
    trained: NDArray[np.float64]
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


def draw(load: Load, seed: int, steps: int = 1) -> Work:
    """Draw the work of the trajectories of `steps` steps from the distributions of `load`.

    Equal arguments give equal work.
    """
    rng, count = np.random.default_rng(seed), load.trajectories * steps
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
    return Work(
        turns=np.minimum(turns, 1 + (used < load.context).sum(axis=1).clip(max=most - 1)),
        tokens=tokens,
        tool_seconds=np.where(judged, 0.0, load.tool_seconds),
        judge_seconds=np.where(judged, service, 0.0),
        history=used,
    )


def simulate(
    work: Work,
    samplers: Samplers,
    judges: int,
    *,
    steps: int = 1,
    staleness: int = 0,
    train_seconds: float = 0.0,
    pauses: bool = False,
) -> Rollout:
    """Simulate `steps` steps, which take equal parts of the trajectories of `work`, with `judges` judges.

    At most (`staleness` + 1) times the trajectories of a step have begun and are not yet taken. Each step
    trains for `train_seconds`, during which the samplers stop if `pauses` is set.
    """
    total, own = len(work.turns), work.own()
    count, rows, tokens = total // steps, np.arange(total), work.tokens + JOINING
    tick = _expected_seconds(work, samplers, judges, steps, train_seconds) / TICKS
    state: NDArray[np.int_] = np.full(total, WAITING)
    turn: NDArray[np.int_] = np.zeros(total, dtype=int)
    left, since, ends = np.zeros(total), np.zeros(total), np.zeros(total)
    waits: list[NDArray[np.float64]] = [np.zeros(0)]
    trained: list[float] = []
    now, training_ends, read, worked = 0.0, np.inf, 0.0, 0.0
    limit, begun, turned, longest = samplers.in_flight, 0, 0, 0
    while len(trained) < steps:
        step = len(trained)
        in_flight = begun - int((state == DONE).sum())
        more = min(total - begun, (step + 1 + staleness) * count - begun, int(max(1, limit)) - in_flight)
        if more > 0:
            new = slice(begun, begun + more)
            state[new], left[new] = GENERATING, tokens[new, 0]
            begun, in_flight = begun + more, in_flight + more
        generating, using, serving = state == GENERATING, state == TOOL, state == JUDGED
        rate = min(samplers.sequence_rate, samplers.total_rate / max(1, int(generating.sum())))
        is_paused = pauses and training_ends < np.inf
        sampled = np.inf if is_paused else (left[generating] / rate).min(initial=np.inf)
        next_event = min(sampled, left[using | serving].min(initial=np.inf), training_ends - now)
        passed = max(tick, float(next_event)) if next_event < np.inf else tick
        now += passed
        if not is_paused:
            left[generating] -= passed * rate
        left[using | serving] -= passed
        worked += passed * int(serving.sum())

        written = generating & (left <= 0)
        turned += int(written.sum())
        state[written], left[written] = TOOL, work.tool_seconds[rows, turn][written]
        used = (state == TOOL) & (left <= 0)
        to_judge = used & (work.judge_seconds[rows, turn] > 0)
        state[to_judge], since[to_judge] = QUEUED, now
        over = (used & ~to_judge) | (serving & (left <= 0))
        ended = over & (turn + 1 >= work.turns)
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
            state[taken], left[taken] = JUDGED, work.judge_seconds[taken, turn[taken]]

        if training_ends < np.inf and now >= training_ends:
            trained.append(now)
            training_ends = np.inf
        if training_ends == np.inf and int((state == DONE).sum()) >= (len(trained) + 1) * count:
            training_ends = now + train_seconds
        if samplers.cache_tokens < np.inf and now >= read:
            usage = float(work.history[rows, turn][state == GENERATING].sum()) / samplers.cache_tokens
            if usage > FULL:
                limit, turned = max(samplers.in_flight, CUT * limit), 0
            elif turned >= limit and in_flight >= FULL * limit and usage < ROOM:
                limit, turned = GROWTH * limit, 0
            read = now + READ_SECONDS

    waited = np.concatenate(waits)
    return Rollout(
        ends=np.sort(ends),
        trained=np.array(trained),
        tokens=float(work.history[rows, work.turns - 1].sum()),
        judgements=int(((work.judge_seconds > 0) & own).sum()),
        wait_mean=float(waited.mean()) if len(waited) else 0.0,
        wait_p95=float(np.quantile(waited, 0.95)) if len(waited) else 0.0,
        longest_queue=max(0, longest),
        busy=worked / (judges * now),
    )


def _expected_seconds(work: Work, samplers: Samplers, judges: int, steps: int, train_seconds: float) -> float:
    """Estimate the seconds of a step, as the longest of several times that a step takes at least.

    These are the times that decoding, the trajectories in flight, the judges, the longest trajectory and
    training would take if nothing else limited the step.
    """
    own = work.own()
    sampled = work.tokens / samplers.sequence_rate
    alone = (sampled + work.tool_seconds + work.judge_seconds) * own
    in_flight = samplers.in_flight
    if samplers.cache_tokens < np.inf:
        share = float((sampled * own).sum() / alone.sum())
        in_flight = max(in_flight, FULL * samplers.cache_tokens / float(work.history[own].mean()) / share)
    parts: Sequence[float] = (
        float((work.tokens * own).sum()) / samplers.total_rate / steps,
        float(alone.sum()) / min(len(work.turns), in_flight) / steps,
        float((work.judge_seconds * own).sum()) / judges / steps,
        float(alone.sum(axis=1).max()),
        train_seconds,
    )
    return max(parts)


def enough_judges(work: Work, samplers: Samplers, headroom: float) -> int:
    """Return the least number of judges with which the rollouts last at most `headroom` times the least time.

    The least time is the duration with one judge for each trajectory.
    """
    count = len(work.turns)
    limit = headroom * simulate(work, samplers, count).seconds
    return bisect.bisect_left(
        range(count),
        True,
        lo=1,
        key=lambda judges: simulate(work, samplers, judges).seconds <= limit,
    )
