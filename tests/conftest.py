"""Fixtures that all tests share, and the order in which pytest-xdist gives tests to its workers."""

import copy
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
from run_fixtures import survivor as survivor

from components.core.config import resolve
from components.core.files import remove_tree, user_cache
from components.core.params import Params
from components.judge import measurement
from components.judge.judge import Judge
from components.judge.task_bench import BenchCache

hypothesis.settings.register_profile(
    "any_machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any_machine")

LONGEST = (
    "test_flows.py",
    "test_flows_repeated.py",
    "test_pipeline_surroundings.py",
    "test_deploy.py",
    "test_stage_kills.py",
    "test_service_faults.py",
    "test_stages.py",
    "test_storage.py",
    "test_data.py",
    "test_compile_cache.py",
)
"""Files that take longest: they begin first, so that the workers of pytest-xdist end together."""
DIVISIBLE = (
    "test_admission.py",
    "test_agent_shell.py",
    "test_agent_tools.py",
    "test_cli.py",
    "test_cli_bad_input.py",
    "test_exploits.py",
    "test_exploits_in_depth.py",
    "test_honest_candidates.py",
    "test_judge.py",
    "test_mutations.py",
    "test_surroundings.py",
)
"""Files whose tests share only the session's judge: they come last, one by one to the free worker."""

SAME_GROUP = {"test_flows_repeated": "test_flows"}
"""Files whose tests run in the process of another file's tests and after them, because they share a home."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name not in DIVISIBLE:
            item.add_marker(pytest.mark.xdist_group(SAME_GROUP.get(item.path.stem, item.path.stem)))
    order = {name: place for place, name in enumerate((*LONGEST, "", *DIVISIBLE))}
    items.sort(key=lambda item: order.get(item.path.name, order[""]))


@pytest.fixture(autouse=True, scope="session")
def signing_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let all tests and the processes that they start sign with a key of their own."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture
def outside_tmp() -> Iterator[Path]:
    """Make a folder that is not below /tmp, whose mount a test may change."""
    folder = Path(tempfile.mkdtemp(dir=user_cache("tmp")))
    yield folder
    remove_tree(folder)


@pytest.fixture(scope="session")
def ci_params() -> Params:
    return resolve("ci").params


@pytest.fixture(scope="session")
def judge(ci_params: Params, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    judge = Judge(ci_params, tmp_path_factory.mktemp("judge"))
    yield judge
    judge.close()


@pytest.fixture
def no_compile_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare no candidate with torch.compile, whose start takes seconds for each task."""
    monkeypatch.setattr(measurement, "MARGIN", math.inf)


@pytest.fixture
def cold_judge(judge: Judge) -> Iterator[Judge]:
    """Yield the session's judge with benches of its own, so that patches leave nothing to other tests."""
    other = copy.copy(judge)
    other.bench_cache = BenchCache(judge.bench_cache.capacity)
    yield other
    other.bench_cache.close()


@pytest.fixture(scope="session")
def with_limits(judge: Judge) -> Callable[[float, float], Judge]:
    """Return the session's judge with other limits: (run_seconds, build_seconds)."""

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
