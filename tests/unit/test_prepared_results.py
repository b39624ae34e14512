"""Results where no earlier result was: of an honest allocator, and of memory prepared in advance."""

import pytest

from components.judge.result_memory import ResultMemory


@pytest.mark.parametrize(
    ("results", "new", "is_suspicious"),
    [
        (11, 10, False),  # a heap that grows, with one call in a round
        (32, 11, False),
        (32, 32, True),
        (288, 60, True),
        (288, 144, True),
    ],
)
def test_many_results_in_new_memory_are_suspicious(results: int, new: int, is_suspicious: bool) -> None:
    memory = ResultMemory([])
    memory.results, memory.new_results = results, new
    assert memory.is_prepared is is_suspicious


@pytest.mark.parametrize(
    ("calls", "new", "may_be"),
    [(1, 0.0, False), (1, 1.0, True), (8, 1.0, True), (32, 2.0, False), (32, 3.0, True)],
)
def test_a_round_with_results_in_new_memory_may_be_too_fast(calls: int, new: float, may_be: bool) -> None:
    memory = ResultMemory([])
    memory.new_in_round = new
    assert memory.may_be_prepared(calls) is may_be
