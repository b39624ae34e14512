"""The pool's claims, held by judges of this machine and by judges of a Ray cluster with two nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import judge_world as world
import pytest

from components.config import BadInput, Params
from components.sandbox.pool import Candidate, Job, LocalPool
from components.sandbox.pools import open_pool

SIMD = world.files("honest", "simd")
MakePool = Callable[[Path], LocalPool]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False})
    made.add_node(num_cpus=1, object_store_memory=80 << 20, resources={"H20": 2})
    yield made.address
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module", params=["local", "ray"])
def make_pool(request: pytest.FixtureRequest, ci_params: Params) -> Iterator[MakePool]:
    made: list[LocalPool] = []
    environment = pytest.MonkeyPatch()
    sandbox = {"pool": request.param, "judges": 1}
    if request.param == "ray":
        environment.setenv("RAY_ADDRESS", request.getfixturevalue("cluster"))
        sandbox["resource"] = "H20"
    params = ci_params.model_copy(update={"sandbox": ci_params.sandbox.model_copy(update=sandbox)})
    warm: list[object] = []

    def make(folder: Path) -> LocalPool:
        """A pool with a journal of its own; all of them share the judges that the first one started."""
        pool = open_pool(params, folder / "verdicts")
        if warm:
            pool._judge = warm[0]
        else:
            warm.append(pool.judge)
        made.append(pool)
        return pool

    yield make
    for pool in made:
        pool.executor.shutdown(cancel_futures=True)
    made[0].close()
    environment.undo()


@pytest.mark.timeout(300)
def test_a_verdict_is_measured_once_per_epoch_and_journalled(make_pool: MakePool, ci_params: Params, tmp_path: Path) -> None:
    pool = make_pool(tmp_path)
    job = Job(world.TASK, Candidate.of(SIMD), "0")
    first = pool.submit(job).result(200)
    assert first.status == "correct" and first.evidence.keys() >= {"seeds"}
    assert pool.submit(job).result(1) == first
    again = LocalPool(ci_params, tmp_path / "verdicts")
    assert again.submit(job).result(1) == first, "a journal means the same to every pool"
    assert pool.submit(Job(world.TASK, Candidate.of(SIMD), "1")).result(200).status == "correct"
    again.close()


@pytest.mark.timeout(300)
def test_what_does_not_build_or_cheats_is_told_from_what_is_right(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool(tmp_path)
    broken = dict(SIMD) | {"kernels/forward.cpp": "this is no C++"}
    futures = [pool.submit(Job(world.TASK, Candidate.of(files), "0")) for files in (broken, world.files("exploits", "zeros"), SIMD)]
    assert [future.result(200).status for future in futures] == ["build_failed", "wrong_output", "correct"]


@pytest.mark.timeout(300)
def test_a_task_is_admitted_or_refused_with_its_reason(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool(tmp_path)
    refused = pool.admit(world.TASK.code.replace("return", "return 0 *", 1)).result(200)
    assert not refused.admitted and refused.reason not in ("", "infrastructure")


@pytest.mark.timeout(300)
def test_an_actor_that_is_killed_is_started_again_and_its_job_is_not_lost(
    cluster: str, ci_params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setenv("RAY_ADDRESS", cluster)
    params = ci_params.model_copy(update={"sandbox": ci_params.sandbox.model_copy(update={"pool": "ray", "judges": 1, "attempts": 5})})
    pool = open_pool(params, tmp_path / "verdicts")
    try:
        future = pool.submit(Job(world.TASK, Candidate.of(SIMD), "0"))
        ray.kill(pool.judge.actors[0], no_restart=False)
        assert future.result(250).status == "correct"
    finally:
        pool.close()


def test_without_a_cluster_the_sentence_says_what_to_start(ci_params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    from components.sandbox import ray_pool

    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: (_ for _ in ()).throw(ConnectionError("refused")))
    with pytest.raises(BadInput, match="ray start --head"):
        ray_pool.connect()
