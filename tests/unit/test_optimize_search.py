"""The measurements after the attempts of an optimisation."""

from concurrent.futures import Future
from typing import Any

import pytest

from components.agent.optimize.search import _measure_again
from components.core.errors import InfrastructureError
from components.core.progress import Quiet
from components.core.task import KernelTask
from components.judge.pool.local_pool import Candidate, Job
from components.judge.verdict import Ratio, Speedup, Verdict

RIGHT = Verdict(status="correct", speedup=Speedup(eager=Ratio(estimate=2.0, low=1.9, high=2.1)))
FAILED = Verdict(status="infrastructure", reason="judge", log="no device")


@pytest.mark.parametrize("purpose", ["choice", "reported"])
def test_a_judge_that_fails_when_it_measures_again_is_not_a_search_without_gain(purpose: str) -> None:
    class Failing:
        def submit(self, job: Job) -> Future[Verdict]:
            done: Future[Verdict] = Future()
            done.set_result(FAILED if purpose in job.epoch else RIGHT)
            return done

    pool: Any = Failing()
    judged = {Candidate.of({"model_new.py": "x = 1"}): RIGHT}
    with pytest.raises(InfrastructureError, match=r"measured again \(judge: no device\)"):
        _measure_again(KernelTask(code="x = 1"), judged, pool, "epoch", Quiet())
