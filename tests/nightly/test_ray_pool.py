"""The judge pool on this machine, on a service and on a cluster of two nodes; ranks on the cluster."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import judge_fixtures as corpus
import psutil
import pytest
import ray
import ray_fixtures
import training_fixtures
from prefect_fixtures import wait_for
from ray.util.placement_group import remove_placement_group
from safetensors.torch import load_file
from serve_fixtures import start

from components.core.config import PROJECT
from components.core.errors import UserError
from components.core.params import Params
from components.judge.pool.local_pool import Candidate, Job, LocalPool
from components.judge.pool.open_pool import open_pool
from components.judge.pool.ray_pool import RayBackend
from components.planning import ray_cluster
from components.training import critic
from components.training.ray_launcher import run_on_ray
from components.training.run_stage import run_stage

SIMD = corpus.files("honest", "simd")
MakePool = Callable[[Path], LocalPool]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with ray_fixtures.ray_cluster({"num_cpus": 2}, {"num_cpus": 2, "resources": {"H20": 2}}) as address:
        yield address


def with_pool(params: Params, **pool: Any) -> Params:
    return params.model_copy(update={"pool": params.pool.model_copy(update=pool)})


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    process, address = start(tmp_path_factory.mktemp("service"))
    yield address
    process.terminate()
    process.wait(60)


@pytest.fixture(scope="module", params=["local", "ray", "http"])
def make_pool(request: pytest.FixtureRequest, ci_params: Params) -> Iterator[MakePool]:
    made: list[LocalPool] = []
    environment = pytest.MonkeyPatch()
    params = ci_params
    if request.param == "ray":
        environment.setenv("RAY_ADDRESS", request.getfixturevalue("cluster"))
        params = with_pool(ci_params, judges=1, resource="H20")
    if request.param == "http":
        params = with_pool(ci_params, service=request.getfixturevalue("service"))
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
        pool.threads.close()
    made[0].close()
    environment.undo()


@pytest.mark.timeout(300)
def test_a_verdict_is_measured_once_per_epoch_and_journalled(
    make_pool: MakePool, ci_params: Params, tmp_path: Path
) -> None:
    pool = make_pool(tmp_path)
    job = Job(corpus.TASK, Candidate.of(SIMD), "0")
    first = pool.submit(job).result(600)
    assert first.status == "correct" and first.evidence.keys() >= {"raw_seconds"}
    assert pool.submit(job).result(30) == first
    again = LocalPool(ci_params, tmp_path / "verdicts")
    assert again.submit(job).result(30) == first, "a journal means the same to every pool"
    assert pool.submit(Job(corpus.TASK, Candidate.of(SIMD), "1")).result(600).status == "correct"
    again.close()


@pytest.mark.timeout(300)
def test_what_does_not_build_or_cheats_is_told_from_what_is_right(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool(tmp_path)
    broken = dict(SIMD) | {"kernels/forward.cpp": "this is no C++"}
    futures = [
        pool.submit(Job(corpus.TASK, Candidate.of(files), "0"))
        for files in (broken, corpus.files("exploits", "zeros"), SIMD)
    ]
    assert [future.result(600).status for future in futures] == ["build_failed", "wrong_output", "correct"]


@pytest.mark.timeout(300)
def test_a_task_is_admitted_or_refused_with_its_reason(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool(tmp_path)
    refused = pool.admit(corpus.TASK.code.replace("return", "return 0 *", 1)).result(600)
    assert not refused.admitted and refused.reason not in ("", "infrastructure")


class Failures(dict[str, int]):
    """The judges that failed on a job, by its key, which remembers those that are forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __setitem__(self, key: str, place: int) -> None:
        self.seen.append((key, place))
        super().__setitem__(key, place)


@pytest.mark.timeout(300)
def test_a_job_whose_judge_is_killed_at_work_is_judged_by_another(
    cluster: str, ci_params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    sandbox = ci_params.sandbox.model_copy(update={"attempts": 5})
    params = with_pool(ci_params.model_copy(update={"sandbox": sandbox}), judges=2)
    pool = open_pool(params, tmp_path / "verdicts")
    try:
        future = pool.submit(Job(corpus.TASK, Candidate.of(SIMD), "0"))
        judges = pool.judge
        judges.failed = failures = Failures()
        place = wait_for(lambda: 1 in judges.loads and judges.loads.index(1) + 1, 240) - 1
        # In the actor: whether it has started what builds and measures.
        wait_for(
            lambda: ray.get(
                judges.actors[place].__ray_call__.remote(lambda _: bool(psutil.Process().children()))
            ),
            120,
        )
        ray.kill(judges.actors[place], no_restart=False)
        assert future.result(600).status == "correct"
        assert failures.seen == [(corpus.TASK.task_id, place)], "the other one judged it"
        assert failures == {}, "after a success no judge is avoided"
    finally:
        pool.close()


def test_without_a_cluster_the_sentence_says_what_to_start(
    ci_params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: (_ for _ in ()).throw(ConnectionError("refused")))
    with pytest.raises(UserError, match="ray start --head"):
        ray_cluster.connect()


def free_cores() -> float:
    found: float = ray.available_resources().get("CPU", 0.0)
    return found


def judges_there() -> set[str]:
    return {name for name in ray.util.list_named_actors() if "-judge-" in name}


@pytest.mark.timeout(300)
def test_every_process_of_a_run_finds_the_judges_that_one_has_started(
    cluster: str, ci_params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    ray_cluster.connect()
    params, before = with_pool(ci_params, judges=2), judges_there()
    first = RayBackend(params)
    try:

        @ray.remote(num_cpus=0)
        def in_a_rank(run: str) -> tuple[list[str], bool]:
            os.environ[ray_cluster.RUN] = run
            judges = RayBackend(params)
            found = [ray.get(actor.incarnation.remote()) for actor in judges.actors]
            judges.close()  # leaves them to the process that started them
            return found, judges.group is None

        program = (
            "import sys, ray; from components.core.params import Params\n"
            "from components.judge.pool.ray_pool import RayBackend\n"
            "judges = RayBackend(Params.model_validate_json(sys.argv[1])); assert judges.group is None\n"
            "print(*(ray.get(actor.incarnation.remote()) for actor in judges.actors))"
        )
        started = [ray.get(actor.incarnation.remote()) for actor in first.actors]
        assert ray.get(in_a_rank.remote(os.environ[ray_cluster.RUN])) == (started, True)
        command = [sys.executable, "-c", program, params.model_dump_json()]
        child = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
        assert child.stdout.split() == started, child.stderr
        assert len(judges_there() - before) == 2, "nothing was opened twice"
    finally:
        first.close()
    wait_for(lambda: judges_there() <= before, 60)


def test_a_role_never_gets_the_places_of_another(
    cluster: str, ci_params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    monkeypatch.setattr(ray_cluster, "RESERVE_SECONDS", 2.0)
    params = with_pool(ci_params, resource="H20")
    ray_cluster.connect()
    judges = ray_cluster.reserve(params, "judges", 1)
    try:
        with pytest.raises(
            # The other one may be that of the judge of other tests.
            UserError,
            match=r"pool\.trainers: 2 need 2 CPU .* and 2 H20 \([01] free\); wait for",
        ):
            ray_cluster.reserve(params, "trainers", 2)
    finally:
        remove_placement_group(judges)
    with pytest.raises(UserError, match="2 trainers and 1 judges need 3 H20, and the Ray cluster has 2"):
        ray_cluster.check_capacity(with_pool(params, trainers=2, judges=1))


@pytest.mark.timeout(300)
def test_judges_end_with_the_run_also_if_it_is_killed(
    cluster: str, ci_params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    monkeypatch.delenv(ray_cluster.RUN, raising=False)
    ray_cluster.connect()
    before = judges_there()
    program = (
        "import sys, time, os, ray; from components.core.params import Params\n"
        "from components.judge.pool.ray_pool import RayBackend\n"
        "judges = RayBackend(Params.model_validate_json(sys.argv[1])); judges.prepare()\n"
        "print(ray.get(judges.actors[0].__ray_call__.remote(lambda _: os.getpid())), flush=True)\n"
        "time.sleep(600)"
    )
    settings = with_pool(ci_params, judges=2).model_dump_json()
    environment = {name: value for name, value in os.environ.items() if name != ray_cluster.RUN}
    with subprocess.Popen(
        [sys.executable, "-c", program, settings],
        cwd=PROJECT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        judge = psutil.Process(int(run.stdout.readline()))
        processes = [judge, *judge.children(recursive=True)]
        assert len(processes) > 1 and len(judges_there() - before) == 2
        free = free_cores()
        run.kill()
    wait_for(lambda: free_cores() >= free + 2, 60)
    wait_for(lambda: not any(process.is_running() for process in processes), 60)
    assert judges_there() <= before


class Told:
    """A progress that remembers."""

    def __init__(self) -> None:
        self.updates: list[tuple[str, int, int]] = []

    def update(self, stage: str, step: int, total: int, **figures: float) -> None:
        self.updates.append((stage, step, total))


@pytest.mark.timeout(300)
def test_two_ranks_that_ray_train_places_make_what_one_process_makes(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    sets = (
        "critic.epochs=2",
        "critic.learning_rate=0.01",
        "critic.min_explained_variance=-100",
        "critic.batch=8",
        "engine.tokens_per_microbatch=64",
    )
    sampled = training_fixtures.stage(tmp_path, "warmup", "warmup.steps=1")
    run_stage(sampled, training_fixtures.episode)
    alone = dataclasses.replace(
        training_fixtures.stage(tmp_path, "critic", *sets), actor=sampled.actor, trajectories=(sampled.out,)
    )
    placed = training_fixtures.params(*sets, "pool.trainers=2")
    told = Told()
    result = run_on_ray(
        dataclasses.replace(alone, params=placed, out=tmp_path / "ray", progress=told), tmp_path / "verdicts"
    )
    assert told.updates[-1] == ("critic", 2, 2)
    assert result.figures["trajectories"] == critic.run(alone).figures["trajectories"]
    heads = [
        load_file(folder / "checkpoint" / "value_head.safetensors")
        for folder in (alone.out, tmp_path / "ray")
    ]
    for name, tensor in heads[0].items():
        assert float((tensor - heads[1][name]).abs().max()) < 1e-5, name
