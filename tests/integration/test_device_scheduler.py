"""The device scheduler: measurements are alone, preparations are not, and no thread starves."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import judge_fixtures as corpus
import psutil
import pytest
import torch

from components.judge.device_scheduler import MEMORY_SHARE, DeviceScheduler
from components.judge.judge import Judge
from components.judge.task_bench import Bench
from components.sandbox.runner_process import Runner, RunnerError


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> DeviceScheduler:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1000 / MEMORY_SHARE)
    )
    return DeviceScheduler("cuda")


def test_a_measurement_is_alone_and_preparations_are_side_by_side(turns: DeviceScheduler) -> None:
    inside: list[str] = []
    seen: list[tuple[str, ...]] = []
    together = threading.Barrier(3, timeout=60)

    def prepare() -> None:
        with turns.preparing():
            inside.append("prepares")
            together.wait()
            inside.remove("prepares")
        with turns.measuring(), turns.measuring(), turns.preparing(), turns.exclusive_device():
            inside.append("measures")
            seen.append(tuple(inside))
            time.sleep(0.02)
            inside.remove("measures")
        with turns.preparing():
            seen.append(tuple(name for name in inside if name == "measures"))

    threads = [threading.Thread(target=prepare) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(seen) == [(), (), (), *[("measures",)] * 3], "three at the barrier at once, then each alone"


def test_a_measurement_that_waits_goes_before_new_preparations(turns: DeviceScheduler) -> None:
    order: list[str] = []
    first = turns.preparing()
    first.__enter__()

    def measure() -> None:
        with turns.measuring():
            order.append("measured")

    def prepare() -> None:
        with turns.preparing():
            order.append("prepared")

    threads = [threading.Thread(target=measure)]
    threads[0].start()
    while not turns.waiting:
        time.sleep(0.001)
    threads.append(threading.Thread(target=prepare))
    threads[1].start()
    time.sleep(0.05)
    assert order == []
    first.__exit__(None, None, None)
    for thread in threads:
        thread.join(60)
    assert order == ["measured", "prepared"]


def test_memory_is_waited_for_and_the_largest_takes_all(turns: DeviceScheduler) -> None:
    with turns.reserve_memory(600):
        begun = threading.Event()

        def large() -> None:
            with turns.reserve_memory(5000):
                begun.set()

        thread = threading.Thread(target=large)
        thread.start()
        assert not begun.wait(0.1)
    thread.join(60)
    assert begun.is_set() and turns.free == 1000


def test_who_needs_much_memory_is_not_passed_by(turns: DeviceScheduler) -> None:
    order: list[int] = []

    def take(memory: int) -> None:
        with turns.reserve_memory(memory):
            order.append(memory)

    threads = []
    with turns.reserve_memory(600):
        for memory in (900, 100, 300):
            threads.append(threading.Thread(target=take, args=(memory,)))
            threads[-1].start()
            while len(turns.takers) < len(threads):
                time.sleep(0.001)
        assert order == []
    for thread in threads:
        thread.join(60)
    assert order[0] == 900 and turns.free == 1000 and not turns.takers


def test_what_is_only_kept_warm_gives_way(turns: DeviceScheduler) -> None:
    warm = contextlib.ExitStack()
    warm.enter_context(turns.reserve_memory(800))
    turns.relieve = warm.close
    with turns.reserve_memory(500):
        assert turns.free == 500


def test_on_cpu_preparations_go_on_beside_a_measurement() -> None:
    turns = DeviceScheduler("cpu")
    done = threading.Event()

    def prepare() -> None:
        with turns.preparing(), turns.exclusive_device(), turns.reserve_memory(1 << 60):
            done.set()

    with turns.measuring():
        threading.Thread(target=prepare).start()
        assert done.wait(60)


def test_what_works_aside_is_stopped_while_others_measure(turns: DeviceScheduler) -> None:
    worker = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    ours, theirs = socket.socketpair()
    runner = Runner(ours, worker.pid, os.pidfd_open(worker.pid), time.monotonic() + 60)

    def state() -> str:
        return psutil.Process(worker.pid).status()

    def seen(wanted: str) -> bool:
        return any(state() == wanted or time.sleep(0.01) for _ in range(6000))

    measures, go = threading.Event(), threading.Event()

    def measure() -> None:
        with turns.measuring():
            measures.set()
            go.wait(60)

    try:
        with turns.background_work(runner):
            thread = threading.Thread(target=measure)
            thread.start()
            assert measures.wait(60), "nobody waits for who works aside"
            assert seen(psutil.STATUS_STOPPED)
            go.set()
            thread.join(60)
            assert seen(psutil.STATUS_RUNNING)
        with turns.measuring(), turns.background_work(runner):
            assert state() == psutil.STATUS_RUNNING, "who measures may start runners of its own"
    finally:
        runner.close()
        theirs.close()
        worker.wait()


def test_what_stands_still_while_others_measure_is_not_timed_out_by_it(turns: DeviceScheduler) -> None:
    worker = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    ours, theirs = socket.socketpair()
    runner = Runner(ours, worker.pid, os.pidfd_open(worker.pid), time.monotonic() + 0.5)
    measures = threading.Event()

    def measure() -> None:
        with turns.measuring():
            measures.set()
            time.sleep(1.5)
        theirs.send(b"Danswered")

    try:
        with turns.background_work(runner):
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


def test_a_baseline_that_died_is_forgotten_by_what_it_is(turns: DeviceScheduler) -> None:
    closed: list[str] = []
    bench, fastest, default = (
        object.__new__(Bench),
        *(SimpleNamespace(close=partial(closed.append, name)) for name in ("fastest", "default")),
    )
    bench.scheduler, bench.arms = turns, {"compile": default, "compile max-autotune": fastest}
    bench.lose(fastest)
    assert closed == ["fastest"] and list(bench.arms) == ["compile"]


@pytest.mark.parametrize("evaluation", [False, True])
def test_where_a_candidate_holds_the_device_its_baselines_were_started_before(
    evaluation: bool, cold_judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = DeviceScheduler("cpu")  # a GPU's turns; the work is the cpu's
    scheduler.wall, scheduler.total, scheduler.free, scheduler.whole = True, 1 << 40, 1 << 39, 1 << 39
    cold_judge.turns = scheduler
    begun: list[tuple[str, bool]] = []
    start = Bench._arm

    def arm(bench: Bench, role: str) -> Any:
        if role not in bench.arms:
            begun.append((role, scheduler.measurer is not None))
        return start(bench, role)

    monkeypatch.setattr(Bench, "_arm", arm)
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
