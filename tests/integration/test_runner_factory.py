"""The processes that runners are forked from: how long they live, and what is said when one is killed."""

import contextlib
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import judge_fixtures as corpus
import psutil
import pytest

from components.core.errors import InfrastructureError
from components.core.params import Params
from components.judge.judge import Judge
from components.sandbox.build import build_result_channel
from components.sandbox.runner_factory import RunnerFactory


def test_zygote_outlives_the_thread_that_asked_for_it(ci_params: Params, tmp_path: Path) -> None:
    runner_factory = RunnerFactory(ci_params.sandbox, "cpu", tmp_path, build_result_channel())
    with ThreadPoolExecutor(1) as executor:
        process = executor.submit(runner_factory._zygote, "plain").result().process
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    runner_factory.close()


def test_a_closed_runner_factory_has_no_process_left(ci_params: Params, tmp_path: Path) -> None:
    runner_factory = RunnerFactory(ci_params.sandbox, "cpu", tmp_path, build_result_channel())
    lingers = subprocess.Popen(["sleep", "1"])
    runner_factory.pidfds.append(os.pidfd_open(lingers.pid))
    runner_factory.close()
    assert lingers.poll() is not None
    assert runner_factory.pidfds == []


def test_a_candidate_is_not_blamed_when_the_process_is_killed_that_its_own_was_forked_from(
    ci_params: Params, tmp_path: Path
) -> None:
    steps: list[str] = []
    endless = corpus.files("exploits", "endless_loop")
    with contextlib.closing(Judge(ci_params, tmp_path)) as judge, ThreadPoolExecutor(1) as executor:
        judged = executor.submit(judge.verdict, corpus.TASK, endless, report=steps.append)
        while "comparing outputs with the reference" not in steps:
            assert not judged.done(), judged.result()
            time.sleep(0.05)
        started = psutil.Process(judge.runner_factory.zygotes["plain"].process.pid).children(recursive=True)
        min((one for one in started if "python" in one.name()), key=psutil.Process.create_time).kill()
        with pytest.raises(InfrastructureError, match="holds torch ended while it judged"):
            judged.result(60)
        assert judge.verdict(corpus.TASK, corpus.files("honest", "simd")).status == "correct"
