"""Results where no earlier result was: of an honest allocator, and of memory prepared in advance."""

import pytest

from components.judge.timed_runner import TimedRunner

MIB = 1 << 20


@pytest.mark.parametrize(
    ("results", "new", "size", "is_suspicious"),
    [
        (11, 10, MIB, False),  # a heap that grows, with one call in a round
        (32, 11, MIB, False),
        (288, 60, 1 << 16, False),  # which are written in less time than a call takes
        (32, 32, MIB, True),
        (288, 144, MIB, True),
        (32, 32, 64 * MIB, True),
    ],
)
def test_many_large_results_in_new_memory_are_suspicious(
    results: int, new: int, size: int, is_suspicious: bool
) -> None:
    runner = object.__new__(TimedRunner)
    runner.results, runner.new_results, runner.new_bytes = results, new, new * size
    assert runner.prepares_results is is_suspicious
