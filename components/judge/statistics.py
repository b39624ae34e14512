"""Statistics of timed rounds: paired ratios with an interval, and how many rounds are enough."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from components.agent.reward import MARGIN
from components.judge.verdict import Ratio

RESOLVED = 0.2
"""Smallest difference to the no-op that can be resolved, as a share of the no-op's own cost.

The no-op reads and writes as many bytes as the outputs have, and any honest candidate must at least write
them. A smaller difference is noise, and as a divisor it would result in ratios of several hundred.
"""
NARROW = 0.025
"""Half the width of a 95 % interval of the log-ratio that counts as narrow.

At this width code that is equally fast is seldom measured as 5 % faster (docs/judge.md).
"""
UNCERTAIN_ROUNDS = 8
"""Number of rounds at which an interval is assumed to be twice as wide as estimated."""
UNPAIRED_ROUNDS = 4
"""Most rounds for a time that is not a paired ratio, as a multiple of `sandbox.rounds`.

Over more rounds than this, such a time mostly varies with the load of the machine.
"""
Z95 = NormalDist().inv_cdf(0.975)


def net(samples: list[float], noop: list[float]) -> np.ndarray:
    """Return the seconds of each round less the no-op's median cost, but at least what can be resolved."""
    cost = float(np.median(noop))
    return np.maximum(np.asarray(samples) - cost, RESOLVED * cost)


def paired_ratio(
    baseline: np.ndarray, candidate: np.ndarray, *, process_spread: float = 0.0, resamples: int = 1000
) -> Ratio:
    """Return the median paired ratio of baseline to candidate, with a 95 % interval.

    The interval comes from a circular block bootstrap: neighbouring rounds share the machine's state, so
    blocks of rounds are drawn instead of single rounds. `process_spread` is the standard deviation of the
    log-ratio between two processes of the same code, whose memory is at different addresses. It widens the
    interval as an independent error does.
    """
    logs = np.log(baseline) - np.log(candidate)
    count = len(logs)
    block = max(2, math.isqrt(count))
    generator = np.random.default_rng(0)
    starts = generator.integers(0, count, size=(resamples, -(-count // block)))
    index = ((starts[:, :, None] + np.arange(block)) % count).reshape(resamples, -1)[:, :count]
    middle = float(np.median(logs))
    low, high = (float(edge) for edge in np.quantile(np.median(logs[index], axis=1), [0.025, 0.975]))
    between = Z95 * process_spread
    low, high = middle - math.hypot(middle - low, between), middle + math.hypot(high - middle, between)
    return Ratio(estimate=math.exp(middle), low=math.exp(low), high=math.exp(high))


def wanted_rounds(ratio: Ratio, rounds: int, most: int) -> int:
    """Return how many rounds there should be after `rounds` of them gave `ratio`: the same, or twice as many.

    The rounds are enough if the interval is narrow, or if the ratio is at least twice the interval's half
    width away from the margin that counts as faster. The factor of two makes false gains by repeated looks
    unlikely. An interval from few rounds is itself uncertain and is assumed to be wider. The answer is at
    most `most`.
    """
    half_width = math.log(ratio.high / ratio.low) / 2 * (1 + UNCERTAIN_ROUNDS / rounds)
    settled = half_width <= max(NARROW, abs(math.log(ratio.estimate / MARGIN)) / 2)
    return rounds if settled else max(rounds, min(2 * rounds, most))


def precise_rounds(samples: list[list[float]], noop: list[float], rounds: int, most: int) -> int:
    """Return how many rounds there should be after `rounds` of them gave `samples`, seconds of each baseline.

    The rounds are enough if each median, net of the no-op's, is known to `NARROW` either way; otherwise there
    should be twice as many, at most `most`. The uncertainty of the no-op's median counts as well, since a
    round of the no-op copies all inputs and outputs too.
    """
    doubt = 1 + UNCERTAIN_ROUNDS / rounds
    noop_width = _half_width(noop)
    widths = [math.hypot(_half_width(one), noop_width) / float(np.median(net(one, noop))) for one in samples]
    return rounds if all(width * doubt <= NARROW for width in widths) else max(rounds, min(2 * rounds, most))


def _half_width(samples: list[float]) -> float:
    """Return half the width of a 95 % interval of the median.

    The estimate uses the median absolute deviation, which is robust to outliers.
    """
    deviation = 1.4826 * float(np.median(np.abs(np.asarray(samples) - np.median(samples))))
    return Z95 * math.sqrt(math.pi / 2 / len(samples)) * deviation
