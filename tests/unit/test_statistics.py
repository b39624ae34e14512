"""How many rounds there are, by what the rounds so far have shown, and how often an interval is right."""

import numpy as np

from components.judge.statistics import paired_ratio, precise_rounds, wanted_rounds
from components.judge.verdict import MARGIN, Ratio


def test_clear_answers_cost_no_more_rounds() -> None:
    assert wanted_rounds(Ratio(estimate=2.0, low=1.7, high=2.3), 15, 480) == 15
    assert wanted_rounds(Ratio(estimate=1.0, low=0.99, high=1.01), 15, 480) == 15
    assert wanted_rounds(Ratio(estimate=1.06, low=1.0, high=1.12), 15, 480) == 30
    assert wanted_rounds(Ratio(estimate=1.06, low=1.0, high=1.12), 480, 480) == 480


def test_a_figure_is_measured_until_both_its_medians_are_known() -> None:
    def rounds(noop: float, arm: float, most: int = 60, count: int = 15) -> int:
        waves = np.sin(np.arange(1, count + 1) * 2.4)  # as many above as below, none twice
        return precise_rounds([list(1.5 + arm * waves[::-1])], list(1 + noop * waves), count, most)

    assert rounds(0.001, 0.001) == 15
    assert rounds(0.001, 0.05) == rounds(0.05, 0.001) == 30
    assert rounds(0.05, 0.05, most=20) == 20 and rounds(0.05, 0.05, count=60) == 60


def called_faster(true: float, most: int) -> int:
    """Count how many of 100 comparisons read 5 % faster, with rounds that differ by 10 %."""
    noise, found = np.random.default_rng(0), 0
    for _ in range(100):
        pairs, count = true * np.exp(noise.normal(0, 0.1, most)), 0
        wanted = min(15, most)
        while wanted > count:
            count = wanted
            ratio = paired_ratio(pairs[:count], np.ones(count), resamples=150)
            wanted = wanted_rounds(ratio, count, most)
        found += ratio.estimate > MARGIN
    return found


def test_rounds_go_on_until_a_gain_is_told_from_noise() -> None:
    assert called_faster(1.0, most=15) > 3  # so many rounds and no more
    assert called_faster(1.0, most=480) == 0
    assert called_faster(1.1, most=480) >= 99


def covered(process_spread: float) -> int:
    """Count how many of 200 intervals hold 1 for equal code in processes that differ by 1.5 %."""
    noise, found = np.random.default_rng(0), 0
    for _ in range(200):
        pairs = np.exp(noise.normal(0, 0.015) + noise.normal(0, 0.02, 60))
        ratio = paired_ratio(pairs, np.ones(60), process_spread=process_spread, resamples=150)
        found += ratio.low <= 1 <= ratio.high
    return found


def test_the_interval_holds_what_two_processes_of_the_same_code_differ_by() -> None:
    assert 180 <= covered(0.015) <= 199
    assert covered(0.0) < 120
