"""The device scheduler: measurements are alone, preparations are not, and no thread starves."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import judge_fixtures as corpus
import psutil
import pytest
import torch

from components.core.config import resolve
from components.judge import baselines
from components.judge.baselines import COMPILE, Baseline, BaselineCache
from components.judge.device_scheduler import MEMORY_SHARE, DeviceScheduler
from components.judge.judge import Judge
from components.judge.pool.local_pool import LocalPool
from components.sandbox.runner_process import Runner, RunnerError
from components.sandbox.unsuspended_time import unsuspended_seconds


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> DeviceScheduler:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1000 / MEMORY_SHARE)
    )
    return DeviceScheduler("cuda")


def test_a_measurement_is_alone_and_preparations_are_side_by_side(scheduler: DeviceScheduler) -> None:
    inside: list[str] = []
    seen: list[tuple[str, ...]] = []
    together = threading.Barrier(3, timeout=60)

    def prepare() -> None:
        with scheduler.preparing():
            inside.append("prepares")
            together.wait()
            inside.remove("prepares")
        with (
            scheduler.measuring(),
            scheduler.preparing(),
            scheduler.measuring(),
        ):
            inside.append("measures")
            seen.append(tuple(inside))
            time.sleep(0.02)
            inside.remove("measures")
        with scheduler.preparing():
            seen.append(tuple(name for name in inside if name == "measures"))

    threads = [threading.Thread(target=prepare) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(seen) == [(), (), (), *[("measures",)] * 3], "three at the barrier at once, then each alone"


def test_a_thread_that_prepares_may_prepare_again_while_a_measurement_waits(
    scheduler: DeviceScheduler,
) -> None:
    # A task's reference data are closed in a preparation, and each of their processes in one of its own.
    done = threading.Event()

    def measure() -> None:
        with scheduler.measuring():
            pass

    def prepare() -> None:
        with scheduler.preparing():
            waiting.start()
            while not scheduler.measurement_queue:
                time.sleep(0.001)
            with scheduler.preparing():
                done.set()

    waiting = threading.Thread(target=measure, daemon=True)
    threading.Thread(target=prepare, daemon=True).start()
    assert done.wait(30), "both wait for each other"
    waiting.join(30)
    assert not waiting.is_alive() and not scheduler.preparing_threads


def test_a_measurement_that_waits_goes_before_new_preparations(scheduler: DeviceScheduler) -> None:
    order: list[str] = []
    first = scheduler.preparing()
    first.__enter__()

    def measure() -> None:
        with scheduler.measuring():
            order.append("measured")

    def prepare() -> None:
        with scheduler.preparing():
            order.append("prepared")

    threads = [threading.Thread(target=measure)]
    threads[0].start()
    while not scheduler.measurement_queue:
        time.sleep(0.001)
    threads.append(threading.Thread(target=prepare))
    threads[1].start()
    time.sleep(0.05)
    assert order == []
    first.__exit__(None, None, None)
    for thread in threads:
        thread.join(60)
    assert order == ["measured", "prepared"]


def test_memory_is_waited_for_and_the_largest_takes_all(scheduler: DeviceScheduler) -> None:
    with scheduler.reserve_memory(600):
        begun = threading.Event()

        def large() -> None:
            with scheduler.reserve_memory(5000):
                begun.set()

        thread = threading.Thread(target=large)
        thread.start()
        assert not begun.wait(0.1)
    thread.join(60)
    assert begun.is_set() and scheduler.free_bytes == 1000


@pytest.mark.parametrize(
    ("sets", "share"),
    [
        ((), 0.0),
        (("policy.backend=vllm-server", "policy.servers=[]", "policy.gpu_memory_share=0.25"), 0.25),
        (("policy.backend=vllm-server", "policy.servers=[http://127.0.0.1:8000]"), 0.0),
        (("policy.backend=vllm-server", "pool.samplers=1", "policy.weight_transfer=disk"), 0.0),
    ],
)
def test_a_sampler_on_the_judges_gpu_keeps_its_memory(
    sets: tuple[str, ...],
    share: float,
    scheduler: DeviceScheduler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[tuple[float, float]] = []
    with (
        monkeypatch.context() as patch,
        contextlib.closing(LocalPool(resolve("ci", sets).params, tmp_path)) as pool,
    ):
        patch.setattr(DeviceScheduler, "leave", lambda _, *memory: left.append(memory))
        assert isinstance(pool.judge, Judge) and left == [(share, 0.0)]
    scheduler.leave(0.25, 200)
    with scheduler.reserve_memory(5000):
        assert scheduler.free_bytes == 0
    assert scheduler.free_bytes == scheduler.reservable_bytes == 580, (
        "the share of both that is ever reserved"
    )
    scheduler.leave(0.5, 600)
    assert scheduler.reservable_bytes == 1, "nothing is left, and 0 would be no limit"


def test_who_needs_much_memory_is_passed_only_by_what_fits_beside_it(scheduler: DeviceScheduler) -> None:
    order: list[int] = []
    done = threading.Event()

    def take(memory: int) -> None:
        with scheduler.reserve_memory(memory):
            order.append(memory)
            done.wait(60)

    threads = {memory: threading.Thread(target=take, args=(memory,)) for memory in (850, 300, 100, 60)}
    with scheduler.reserve_memory(600):
        for memory in (850, 300):
            threads[memory].start()
            while memory not in scheduler.memory_queue.values():
                time.sleep(0.001)
        threads[100].start()
        while order != [100]:
            time.sleep(0.001)
        threads[60].start()
        while list(scheduler.memory_queue.values()) != [850, 300, 60]:
            time.sleep(0.001)
        assert order == [100], "850 of 1000 are kept free for the first, so that 50 are left, not 60"
        done.set()
    for thread in threads.values():
        thread.join(60)
    assert order.index(850) < order.index(300)
    assert scheduler.free_bytes == 1000 and not scheduler.memory_queue and not scheduler.reserved


def test_what_is_only_kept_warm_gives_way(scheduler: DeviceScheduler) -> None:
    warm = contextlib.ExitStack()
    warm.enter_context(scheduler.reserve_memory(800))
    scheduler.release_idle_memory = warm.close
    with scheduler.reserve_memory(500):
        assert scheduler.free_bytes == 500


def test_on_cpu_preparations_go_on_beside_a_measurement() -> None:
    scheduler = DeviceScheduler("cpu")
    done = threading.Event()

    def prepare() -> None:
        with scheduler.preparing(), scheduler.reserve_memory(1 << 60):
            done.set()

    with scheduler.measuring():
        threading.Thread(target=prepare).start()
        assert done.wait(60)


def test_what_works_aside_is_stopped_while_others_measure(scheduler: DeviceScheduler) -> None:
    worker = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    ours, theirs = socket.socketpair()
    runner = Runner(ours, worker.pid, os.pidfd_open(worker.pid), unsuspended_seconds() + 60)

    def state() -> str:
        return psutil.Process(worker.pid).status()

    def seen(wanted: str) -> bool:
        return any(state() == wanted or time.sleep(0.01) for _ in range(6000))

    measures, go = threading.Event(), threading.Event()

    def measure() -> None:
        with scheduler.measuring():
            measures.set()
            go.wait(60)

    try:
        with scheduler.background_work(runner):
            thread = threading.Thread(target=measure)
            thread.start()
            assert measures.wait(60), "nobody waits for who works aside"
            assert seen(psutil.STATUS_STOPPED)
            go.set()
            thread.join(60)
            assert seen(psutil.STATUS_RUNNING)
        with scheduler.measuring(), scheduler.background_work(runner):
            assert state() == psutil.STATUS_RUNNING, "who measures may start runners of its own"
    finally:
        runner.close()
        theirs.close()
        worker.wait()


def test_what_stands_still_while_others_measure_is_not_timed_out_by_it(scheduler: DeviceScheduler) -> None:
    worker = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    ours, theirs = socket.socketpair()
    runner = Runner(ours, worker.pid, os.pidfd_open(worker.pid), unsuspended_seconds() + 0.5)
    measures = threading.Event()

    def measure() -> None:
        with scheduler.measuring():
            measures.set()
            time.sleep(1.5)
        theirs.send(b"Danswered")

    try:
        with scheduler.background_work(runner):
            thread = threading.Thread(target=measure)
            thread.start()
            assert measures.wait(60) and runner.receive() == b"answered"
            thread.join(60)
            with pytest.raises(RunnerError, match="timed_out"):
                runner.receive()
    finally:
        runner.close()
        theirs.close()
        worker.wait()


def test_a_baseline_that_died_is_forgotten_by_what_it_is() -> None:
    closed: list[str] = []
    cache, fastest, default = (
        object.__new__(BaselineCache),
        *(SimpleNamespace(close=partial(closed.append, name)) for name in ("fastest", "default")),
    )
    runners: dict[Baseline, Any] = {COMPILE: default, Baseline("compile", "max-autotune"): fastest}
    cache.runners = runners
    cache.drop_runner(runners[Baseline("compile", "max-autotune")])
    assert closed == ["fastest"] and list(cache.runners) == [COMPILE]


@pytest.mark.parametrize("evaluation", [False, True])
def test_where_a_candidate_holds_the_device_its_baselines_were_started_before(
    evaluation: bool, cold_judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = DeviceScheduler("cpu")  # a GPU's rules; the work is the cpu's
    scheduler.is_exclusive, scheduler.device_bytes = True, 1 << 40
    scheduler.free_bytes = scheduler.reservable_bytes = 1 << 39
    cold_judge.scheduler = scheduler
    begun: list[tuple[str, bool]] = []
    start = baselines.start_baseline

    def recorded(reference: Any, baseline: Baseline, **limits: float) -> Any:
        begun.append((str(baseline), scheduler.measuring_thread is not None))
        return start(reference, baseline, **limits)

    monkeypatch.setattr(baselines, "start_baseline", recorded)
    with ThreadPoolExecutor(4) as four:
        asked = [
            four.submit(
                cold_judge.verdict, corpus.TASK, corpus.files("honest", name), compare_compile=evaluation
            )
            for name in ("naive", "simd", "lean", "naive")
        ]
        assert {future.result(timeout=600).status for future in asked} == {"correct"}
    assert sorted(begun) == [("compile", False), ("eager", False), ("noop", False)], (
        "each once, and none while somebody measures"
    )


def test_callers_measure_in_turn_however_many_threads_they_have(scheduler: DeviceScheduler) -> None:
    order: list[str] = []

    def measure(caller: str) -> None:
        with scheduler.on_behalf_of(caller), scheduler.measuring():
            order.append(caller)

    threads = []
    with scheduler.measuring():
        for caller in ("many", "many", "many", "one", "other", "one"):
            threads.append(threading.Thread(target=measure, args=(caller,)))
            threads[-1].start()
            while len(scheduler.measurement_queue) < len(threads):
                time.sleep(0.001)
    for thread in threads:
        thread.join(60)
    assert order == ["many", "one", "other", "many", "one", "many"]


def test_a_process_that_cannot_be_paused_leaves_the_device_to_others(scheduler: DeviceScheduler) -> None:
    def fail() -> None:
        raise OSError("too many open files")

    runner: Any = SimpleNamespace(resume=lambda: None, pause=fail, extend_deadline=lambda: None)

    def measure() -> str:
        with scheduler.measuring():
            return "measured"

    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        with scheduler.background_work(runner), pytest.raises(OSError, match="too many open files"):
            first.submit(measure).result(60)
        assert second.submit(measure).result(60) == "measured"


def test_what_is_kept_warm_stays_if_only_the_turn_was_waited_for(scheduler: DeviceScheduler) -> None:
    released: list[int] = []
    with ThreadPoolExecutor(2) as threads, contextlib.ExitStack() as held:
        held.enter_context(scheduler.reserve_memory(500))

        def reserve(size: int) -> int:
            with scheduler.reserve_memory(size):
                return threading.get_ident()

        first = threads.submit(reserve, 800)
        while not scheduler.memory_queue:
            time.sleep(0.01)
        second = threads.submit(reserve, 250)  # they are free, but the first needs them
        while len(scheduler.memory_queue) < 2:
            time.sleep(0.01)
        scheduler.release_idle_memory = lambda: released.append(threading.get_ident())
        while len(released) < 3:
            time.sleep(0.01)
        scheduler.release_idle_memory = lambda: None
        held.close()
        assert set(released) == {first.result(60)} and second.result(60)
