"""From raw samples to a paired ratio with an interval."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from components.agent.reward import MARGIN
from components.judge.verdict import Ratio

RESOLVED = 0.2
"""Smallest share of the no-op's own cost that a difference to it can resolve.

The no-op reads and writes as many bytes as the outputs have, and any honest candidate must at least write them; a
smaller difference is noise, and as a divisor it would make a ratio of hundreds.
"""

NARROW = 0.025
"""Half a 95 % interval of the log-ratio that is narrow enough: equal code then reads 5 % faster less than once in a thousand times."""
UNCERTAIN_ROUNDS = 8
"""Of so many rounds the interval is taken for twice as wide as it says."""
LONGEST = 4
"""A figure without a partner gets so many times the rounds at most: what differs after those changes from minute to minute."""


def net(samples: list[float], noop: list[float]) -> np.ndarray:
    """Seconds of each round less the median cost of the no-op rounds (DESIGN §5), never below what can be resolved."""
    cost = float(np.median(noop))
    return np.maximum(np.asarray(samples) - cost, RESOLVED * cost)


def paired_ratio(
    baseline: np.ndarray, candidate: np.ndarray, *, process_spread: float = 0.0, resamples: int = 1000
) -> Ratio:
    """Median of the paired log-ratios baseline / candidate, and its 95 % interval by a circular block bootstrap.

    Neighbouring rounds share the machine's state, so blocks of them are drawn, not single rounds. Two processes of the same
    code differ for as long as they live, by where their memory lies, which no round shows: `process_spread` is the standard
    deviation of that log-ratio, and widens the interval as an independent error does.
    """
    logs = np.log(baseline) - np.log(candidate)
    count = len(logs)
    block = max(2, math.isqrt(count))
    generator = np.random.default_rng(0)
    starts = generator.integers(0, count, size=(resamples, -(-count // block)))
    index = ((starts[:, :, None] + np.arange(block)) % count).reshape(resamples, -1)[:, :count]
    middle = float(np.median(logs))
    low, high = (float(edge) for edge in np.quantile(np.median(logs[index], axis=1), [0.025, 0.975]))
    between = NormalDist().inv_cdf(0.975) * process_spread
    low, high = middle - math.hypot(middle - low, between), middle + math.hypot(high - middle, between)
    return Ratio(estimate=math.exp(middle), low=math.exp(low), high=math.exp(high))


def wanted_rounds(ratio: Ratio, rounds: int, most: int) -> int:
    """How many rounds there should be when `rounds` gave `ratio`: no more when its interval is narrow, or far from the margin
    that counts as faster; else twice as many, up to `most`.

    Far is twice the interval's half width, so that looking again and again makes no false gain likely. An interval from few
    rounds is itself uncertain, and is taken for wider than it says.
    """
    half_width = math.log(ratio.high / ratio.low) / 2 * (1 + UNCERTAIN_ROUNDS / rounds)
    settled = half_width <= max(NARROW, abs(math.log(ratio.estimate / MARGIN)) / 2)
    return rounds if settled else max(rounds, min(2 * rounds, most))


def precise_rounds(raw: dict[str, list[float]], rounds: int, most: int) -> int:
    """How many rounds there should be after `rounds` of them gave `raw`, seconds by arm, the no-op among them: no more when each arm's
    median net of the no-op's is known to `NARROW` either way, else twice as many, up to `most`.

    Both medians count, since a round of the no-op copies inputs and outputs too, gigabytes where the task has them: a product with one
    vector (8.6 GB of inputs) took 2.64 ms and, seconds before, 0.34 ms more, eager and compiled alike (five rounds each, H200).
    """
    doubt = 1 + UNCERTAIN_ROUNDS / rounds
    errors = {name: _half_width(samples) for name, samples in raw.items()}
    widths = [
        math.hypot(errors[name], errors["noop"]) / float(np.median(net(raw[name], raw["noop"])))
        for name in raw
        if name != "noop"
    ]
    return rounds if all(width * doubt <= NARROW for width in widths) else max(rounds, min(2 * rounds, most))


def _half_width(samples: list[float]) -> float:
    """Half a 95 % interval of the median, in the unit of `samples`, from their median absolute deviation: outliers are many here."""
    deviation = 1.4826 * float(np.median(np.abs(np.asarray(samples) - np.median(samples))))
    return NormalDist().inv_cdf(0.975) * math.sqrt(math.pi / 2 / len(samples)) * deviation
