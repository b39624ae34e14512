"""This module computes the milestone of a verdict, which is the reward of a trajectory.

The milestone is -1, 1, 2 or 3, by correctness and speed of the candidate (CUDA Agent, eq. 1).
"""

from typing import Literal

from components.judge.verdict import Verdict

# Ratio of baseline time to candidate time above which a candidate is called faster.
MARGIN = 1.05


def milestone(verdict: Verdict) -> Literal[-1, 1, 2, 3]:
    """Return -1 if not correct, 1 if correct, 2 if faster than eager, 3 if faster than torch.compile too.

    The milestone is computed from the verdict's status and measured ratios. The field `milestone` of the
    verdict is not read.
    """
    if verdict.status != "correct":
        return -1
    eager, compiled = verdict.speedup.eager, verdict.speedup.compile
    if eager is None or not eager.estimate > MARGIN:  # `not … > …` is also True for NaN
        return 1
    return 3 if compiled is not None and compiled.estimate > MARGIN else 2
