"""Honest candidates of tests/honest are correct, and compared with eager and with torch.compile."""

from collections.abc import Callable

import judge_fixtures as corpus
import pytest

from components.judge.judge import Judge
from components.judge.verdict import MARGIN

# Builds with torch's headers take minutes; test_torch_extension.py and test_foreign_forms.py have others.
LEFT_OUT = ("published_habits", "torch_types")


@pytest.mark.parametrize("name", [name for name in corpus.names("honest") if name not in LEFT_OUT])
def test_honest_candidate_is_correct(name: str, with_limits: Callable[[float, float], Judge]) -> None:
    judge = with_limits(120, 600)  # seconds that a build with torch's headers needs on a busy machine
    verdict = judge.verdict(corpus.task("honest", name), corpus.files("honest", name), compare_compile=True)
    assert verdict.status == "correct", (verdict.reason, verdict.log)
    assert verdict.speedup.eager is not None and verdict.speedup.compile is not None
    faster = (verdict.speedup.eager.estimate > MARGIN, verdict.speedup.compile.estimate > MARGIN)
    assert verdict.milestone == (3 if all(faster) else 2 if faster[0] else 1)
