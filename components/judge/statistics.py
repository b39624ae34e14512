"""Statistics of timed rounds: speed-up ratios with a 95 % interval, and the rounds that it needs.

A round is a series of calls that are timed together.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from components.judge.verdict import MARGIN, Ratio

# Smallest time beyond the no-op's time that can be measured, as a share of the no-op's time. The no-op reads
# and writes as many bytes as the outputs have, and any honest candidate must at least write them. A smaller
# difference is noise, and as a divisor it would result in ratios of several hundred.
RESOLVED = 0.2
# Half-width of a 95 % interval of a log-ratio, at or below which a measurement is precise enough. At this
# half-width, equally fast code is seldom measured as 5 % faster (docs/measurements/judge.md).
NARROW = 0.025
# Number of rounds at which an interval is assumed to be twice as wide as estimated.
UNCERTAIN_ROUNDS = 8
# Largest number of rounds for a time that is not a paired ratio, as a multiple of `sandbox.rounds`. More
# rounds would not make such a time more precise, because the load of the machine changes meanwhile.
UNPAIRED_ROUNDS = 4
Z95 = NormalDist().inv_cdf(0.975)


def net(samples: list[float], noop: list[float]) -> np.ndarray:
    """Return the seconds of each round minus the median seconds of the no-op, which computes nothing.

    A round is a series of timed calls. `samples` has the seconds per call in each round of the process that
    is measured, and `noop` those of the no-op. Each result is at least `RESOLVED` times the no-op's median,
    because a smaller difference is noise.
    """
    cost = float(np.median(noop))
    return np.maximum(np.asarray(samples) - cost, RESOLVED * cost)


def paired_ratio(
    baseline: np.ndarray, candidate: np.ndarray, *, process_spread: float = 0.0, resamples: int = 1000
) -> Ratio:
    """Return the median ratio of baseline to candidate seconds over paired rounds, with a 95 % interval.

    A round is a series of timed calls, and paired rounds are measured one after the other on the same inputs.
    `baseline` and `candidate` have the shape [rounds] and the seconds per call in the same rounds, from which
    the no-op's time has been subtracted (`net`). `resamples` is the number of bootstrap samples. The interval
    is computed with a circular block bootstrap, which draws blocks of consecutive rounds instead of single
    rounds, because neighbouring rounds are affected by the same state of the machine. `process_spread` is the
    standard deviation of the log-ratio between two processes that run the same code at different memory
    addresses. This deviation is treated as an independent error: its 95 % half-width is added to the
    interval's in quadrature, on the log scale.
    """
    logs = np.log(baseline) - np.log(candidate)
    count = len(logs)
    block = max(2, math.isqrt(count))
    starts = np.random.default_rng(0).integers(0, count, size=(resamples, -(-count // block)))
    index = ((starts[:, :, None] + np.arange(block)) % count).reshape(resamples, -1)[:, :count]
    middle = float(np.median(logs))
    low, high = (float(edge) for edge in np.quantile(np.median(logs[index], axis=1), [0.025, 0.975]))
    between = Z95 * process_spread
    low, high = middle - math.hypot(middle - low, between), middle + math.hypot(high - middle, between)
    return Ratio(estimate=math.exp(middle), low=math.exp(low), high=math.exp(high))


def geometric_mean(values: Sequence[float | None]) -> float | None:
    """Return the geometric mean of positive values, or None if one of them is None.

    `values` must not be empty.
    """
    present = [value for value in values if value is not None]
    return float(np.exp(np.mean(np.log(present)))) if len(present) == len(values) else None


def mean_ratio(ratios: Sequence[Ratio | None]) -> Ratio | None:
    """Return the geometric mean of ratios with a 95 % interval, or None if one of them is None.

    `ratios` must not be empty. The ratios are treated as independent: on the log scale, the distances of the
    interval's ends from the mean are those of the single intervals, added in quadrature and divided by the
    number of ratios.
    """
    present = [ratio for ratio in ratios if ratio is not None]
    if len(present) < len(ratios):
        return None
    middle, low, high = (
        np.log([getattr(ratio, name) for ratio in present]) for name in ("estimate", "low", "high")
    )
    mean, below, above = np.mean(middle), math.hypot(*(middle - low)), math.hypot(*(high - middle))
    return Ratio(
        estimate=float(np.exp(mean)),
        low=float(np.exp(mean - below / len(present))),
        high=float(np.exp(mean + above / len(present))),
    )


def wanted_rounds(ratio: Ratio, rounds: int, most: int) -> int:
    """Return how many timed rounds there should be in total, after `rounds` of them have resulted in `ratio`.

    A round is a series of timed calls, and `ratio` is a candidate's speed-up with its 95 % interval. `rounds`
    is returned if the interval is narrow (`NARROW`), or if the estimate differs from `MARGIN`, the limit for
    faster code, by at least twice the interval's half-width (on the log scale). The factor of two makes it
    unlikely that repeated checks find a gain that does not exist. An interval from few rounds is uncertain
    itself, so it is assumed to be wider (`UNCERTAIN_ROUNDS`). Otherwise twice as many rounds are returned. No
    rounds are added beyond `most`.
    """
    half_width = math.log(ratio.high / ratio.low) / 2 * (1 + UNCERTAIN_ROUNDS / rounds)
    settled = half_width <= max(NARROW, abs(math.log(ratio.estimate / MARGIN)) / 2)
    return rounds if settled else max(rounds, min(2 * rounds, most))


def precise_rounds(samples: list[list[float]], noop: list[float], rounds: int, most: int) -> int:
    """Return how many rounds there should be in total, after `rounds` rounds have resulted in `samples`.

    A round is a series of timed calls. `samples[i][j]` is the seconds per call of baseline `i` in round `j`,
    and `noop[j]` those of the no-op, a process that computes nothing. `rounds` is returned if the median of
    each baseline, minus the no-op's median, is known with a relative error of at most `NARROW`. Otherwise
    twice as many rounds are returned. No rounds are added beyond `most`. The error of the no-op's median is
    included, because it varies too: a round of the no-op copies all inputs and outputs.
    """
    doubt = 1 + UNCERTAIN_ROUNDS / rounds
    noop_width = _half_width(noop)
    widths = [math.hypot(_half_width(one), noop_width) / float(np.median(net(one, noop))) for one in samples]
    return rounds if all(width * doubt <= NARROW for width in widths) else max(rounds, min(2 * rounds, most))


def _half_width(samples: list[float]) -> float:
    """Return half the width of a 95 % interval of the median of `samples`, in seconds.

    The estimate uses the median absolute deviation, because it is robust to outliers.
    """
    deviation = 1.4826 * float(np.median(np.abs(np.asarray(samples) - np.median(samples))))
    return Z95 * math.sqrt(math.pi / 2 / len(samples)) * deviation
