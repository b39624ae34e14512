"""Warm judges are constructed once for equal parameters, outside of a common lock, and are few."""

import contextlib
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
from components.judge.device_scheduler import DeviceScheduler
from components.judge.judge import Judge
from components.sandbox.runner_factory import RunnerFactory
from components.service import judges as judges_module
from components.service.judges import MOST_WARM, WarmJudges

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

    def __init__(
        self,
        params: Params,
        folder: Path,
        *,
        factory: RunnerFactory | None,
        scheduler: DeviceScheduler,
    ):
        self.constructions[params.sandbox.rounds] += 1
        if params == SLOW:
            self.begun.set()
            assert self.may_end.wait(2 * SECONDS)
            if SlowJudge.failures:
                SlowJudge.failures -= 1
                raise UserError("the folder cannot be used")
        super().__init__(params, folder, factory=factory, scheduler=scheduler)


@pytest.fixture
def judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WarmJudges]:
    monkeypatch.setattr(judges_module, "Judge", SlowJudge)
    SlowJudge.begun.clear()
    SlowJudge.may_end.clear()
    SlowJudge.constructions.clear()
    made = WarmJudges(OWN, tmp_path)
    try:
        yield made
    finally:
        SlowJudge.may_end.set()
        made.close()


def test_only_callers_with_equal_parameters_wait_for_the_construction_of_a_judge(judges: WarmJudges) -> None:
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


def test_a_judge_that_could_not_be_constructed_is_constructed_by_the_next_caller(judges: WarmJudges) -> None:
    SlowJudge.failures = 1
    SlowJudge.may_end.set()
    with pytest.raises(UserError, match="cannot be used"), judges.using(SLOW):
        pass
    assert len(judges.judges) == 1
    with judges.using(SLOW) as judge:
        assert judge.params == SLOW


def test_few_judges_stay_warm_and_they_share_their_runners(judges: WarmJudges) -> None:
    """Sixteen combinations of labels would otherwise be sixteen judges with processes of their own."""
    with judges.using(OWN) as own:
        pass
    for rounds in range(8, 16):
        with judges.using(with_rounds(rounds)) as judge:
            assert judge.runner_factory is own.runner_factory
        assert len(judges.judges) <= MOST_WARM
    newest = {judge.params.sandbox.rounds for judge in judges._constructed()}
    assert newest == {5, 13, 14, 15}
    hurried = resolve("ci", ["sandbox.run_seconds=2"]).params
    with judges.using(hurried) as judge:
        assert judge.runner_factory is not own.runner_factory


def test_a_judge_in_use_is_not_closed_for_another(judges: WarmJudges) -> None:
    SlowJudge.may_end.set()
    with contextlib.ExitStack() as stack:
        used = [stack.enter_context(judges.using(with_rounds(rounds))) for rounds in range(8, 14)]
        assert len(judges.judges) == 7
        broken = {"model_new.py": MODEL_NEW, "kernels/forward.cpp": "not C++"}
        assert used[0].verdict(TASK, broken).status == "build_failed"
    with judges.using(with_rounds(14)):
        assert len(judges.judges) == MOST_WARM
