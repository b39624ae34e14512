"""Exact answers over the whole operator table and over rows of up to 2^20 elements."""

import exactness
import torch

from components.core.params import Params
from components.synthesis.mined_operators import OperatorTable


def test_no_operator_refuses_an_exact_answer_or_accepts_twice_the_error(
    ci_params: Params, table: OperatorTable
) -> None:
    tally = exactness.checked_templates(table.templates, ci_params, seed=torch.seed() % 2**31)
    assert tally.calls == 6 * len(table.templates) and tally.wrong == []


def test_long_reductions_accept_exact_answers_only(ci_params: Params) -> None:
    tally = exactness.checked_reductions(ci_params, (1 << 14, 1 << 17, 1 << 20), seed=torch.seed() % 2**31)
    assert tally.calls == 12 * 3 * 6 and tally.wrong == []


def test_many_calls_of_the_forms_that_were_refused(ci_params: Params) -> None:
    tally = exactness.checked_forms(ci_params, calls=6, seed=torch.seed() % 2**31)
    assert tally.calls == 6 * 6 * len(exactness.FORMS) and tally.wrong == []


def test_no_exact_answer_in_half_precision_is_refused(ci_params: Params) -> None:
    tally = exactness.checked_half(ci_params, calls=4, seed=torch.seed() % 2**31)
    assert tally.calls == 4 * 480 and tally.wrong == []
