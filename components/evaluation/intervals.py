"""Bootstrap intervals of figures that are ratios of two sums over tasks.

The numerators of such a figure for all bootstrap samples are one matrix product, and so are the denominators.
"""

import math

import numpy as np
from numpy.typing import NDArray

from components.core.records import FrozenModel

# Number of bootstrap samples, and share of them that an interval covers.
RESAMPLES = 2000
COVERAGE = 0.95

Array = NDArray[np.float64]


class Interval(FrozenModel):
    """A 95 % interval from bootstrap samples of the tasks, or an exact binomial one for shares of 0 and 1.

    `low` and `high` are its ends, in the unit of the figure. Both are None if there is no task on which the
    figure is defined.
    """

    low: float | None
    high: float | None


class Estimate(Interval):
    """The value of a figure, or of its change between two evaluations, with its 95 % interval.

    `value` is None if there is no task on which the figure is defined.
    """

    value: float | None


def bootstrap_counts(tasks: int) -> Array:
    """Return how often each of `tasks` tasks occurs in the whole set, and in each bootstrap sample of it.

    The shape is [1 + RESAMPLES, tasks]. The first row, that of the whole set, is 1 everywhere. A fixed seed
    draws the same samples in every call with the same number of tasks.
    """
    if tasks == 0:
        return np.zeros((1 + RESAMPLES, 0))
    shares = np.full(tasks, 1 / tasks)
    samples = np.random.default_rng(0).multinomial(tasks, shares, size=RESAMPLES)
    return np.vstack([np.ones(tasks), samples])


def quotients(figure: tuple[Array, Array], counts: Array) -> Array:
    """Return the value of a figure for each of several samples of the tasks, with shape [samples].

    The figure is a ratio of two sums over tasks. `figure` has the numerator and the denominator of each task,
    both [tasks], and `counts` says how often each sample has each task, [samples, tasks]. The value is NaN if
    the sum of the denominators is 0.
    """
    numerator, denominator = counts @ figure[0], counts @ figure[1]
    quotient: Array = np.divide(
        numerator, denominator, out=np.full(len(counts), math.nan), where=denominator > 0
    )
    return quotient


def percentile_interval(samples: Array) -> Interval:
    """Return the 95 % percentile interval of a figure from its values for all bootstrap samples.

    `samples` has the shape [samples]. Samples that are NaN are left out. Both ends are None if all samples
    are NaN.
    """
    samples = samples[~np.isnan(samples)]
    if len(samples) == 0:
        return Interval(low=None, high=None)
    low, high = np.quantile(samples, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Interval(low=float(low), high=float(high))
