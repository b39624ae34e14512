"""The judges of a resident judge are constructed once for equal parameters, outside of a common lock."""

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest
from judge_fixtures import MODEL_NEW, TASK

from components.core.config import resolve
from components.core.errors import UserError
from components.core.params import Params
from components.judge import resident
from components.judge.device_scheduler import DeviceScheduler
from components.judge.judge import Judge
from components.judge.resident import Judges

SECONDS = 30.0


def with_rounds(rounds: int) -> Params:
    return resolve("ci", [f"sandbox.rounds={rounds}", f"sandbox.most_rounds={rounds}"]).params


OWN, SLOW, OTHER = with_rounds(5), with_rounds(6), with_rounds(7)


class SlowJudge(Judge):
    """Judge whose construction with `SLOW` ends when `may_end` is set; the first `failures` fail."""

    begun = threading.Event()
    may_end = threading.Event()
    constructions: ClassVar[Counter[int]] = Counter()
    failures = 0

    def __init__(self, params: Params, folder: Path, *, scheduler: DeviceScheduler):
        self.constructions[params.sandbox.rounds] += 1
        if params == SLOW:
            self.begun.set()
            assert self.may_end.wait(2 * SECONDS)
            if SlowJudge.failures:
                SlowJudge.failures -= 1
                raise UserError("the folder cannot be used")
        super().__init__(params, folder, scheduler=scheduler)


@pytest.fixture
def judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Judges]:
    monkeypatch.setattr(resident, "Judge", SlowJudge)
    SlowJudge.begun.clear()
    SlowJudge.may_end.clear()
    SlowJudge.constructions.clear()
    made = Judges(OWN, tmp_path)
    try:
        yield made
    finally:
        SlowJudge.may_end.set()
        made.close()


def test_only_callers_with_equal_parameters_wait_for_the_construction_of_a_judge(judges: Judges) -> None:
    def used(params: Params) -> Judge:
        with judges.using(params) as judge:
            return judge

    with ThreadPoolExecutor() as threads:
        slow = [threads.submit(used, SLOW) for _ in range(3)]
        assert SlowJudge.begun.wait(SECONDS)
        own, other = threads.submit(used, OWN), threads.submit(used, OTHER)
        try:
            assert other.result(SECONDS) is not own.result(SECONDS)
            broken = {"model_new.py": MODEL_NEW, "kernels/forward.cpp": "not C++"}
            assert own.result().verdict(TASK, broken).status == "build_failed"
            assert not any(future.done() for future in slow)
        finally:
            SlowJudge.may_end.set()
        assert len({id(future.result(SECONDS)) for future in slow}) == 1
    assert SlowJudge.constructions == {5: 1, 6: 1, 7: 1}


def test_a_judge_that_could_not_be_constructed_is_constructed_by_the_next_caller(judges: Judges) -> None:
    SlowJudge.failures = 1
    SlowJudge.may_end.set()
    with pytest.raises(UserError, match="cannot be used"), judges.using(SLOW):
        pass
    assert len(judges.judges) == 1
    with judges.using(SLOW) as judge:
        assert judge.params == SLOW
