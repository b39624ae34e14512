"""Results where no earlier result was: of an honest allocator, and of memory prepared in advance."""

import pytest

from components.judge.timed_runner import TimedRunner


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
    runner = object.__new__(TimedRunner)
    runner.results, runner.new_results = results, new
    assert runner.prepares_results is is_suspicious
