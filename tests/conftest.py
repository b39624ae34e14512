"""One judge for all tests that need one: its zygote takes seconds to start, a runner milliseconds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
from night import survivor as survivor

from components.core.config import Params, resolve
from components.judge.judge import Judge


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: one that starts last keeps one process busy while the others have nothing left."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def ci_params() -> Params:
    return resolve("ci").params


@pytest.fixture(scope="session")
def judge(ci_params: Params, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    judge = Judge(ci_params, tmp_path_factory.mktemp("judge"))
    yield judge
    judge.close()


@pytest.fixture(scope="session")
def with_limits(judge: Judge) -> Callable[[float, float], Judge]:
    """The same judge with other limits: (run_seconds, build_seconds). It shares runners, builds and benches with the first."""

    def make(run_seconds: float, build_seconds: float) -> Judge:
        sandbox = judge.params.sandbox.model_copy(
            update={"run_seconds": run_seconds, "build_seconds": build_seconds}
        )
        limited = copy.copy(judge)
        limited.params = judge.params.model_copy(update={"sandbox": sandbox})
        limited.builder = copy.copy(judge.builder)
        limited.builder.sandbox = sandbox
        return limited

    return make
