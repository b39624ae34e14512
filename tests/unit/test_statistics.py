"""How many rounds there are, by what the rounds so far have shown."""

import numpy as np

from components.judge.statistics import precise_rounds, wanted_rounds
from components.judge.verdict import Ratio


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
