"""The search of random schedules: what it judges, what it keeps, and that a killed one repeats nothing."""

import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from captured_share import Attainable, best_fixed_row
from schedule_search import draw_schedules, search

from components.bootstrap.kernel_writer import all_schedules
from components.core.config import PROJECT, resolve
from components.core.errors import UserError
from components.core.progress import Quiet
from components.core.task import KernelTask, write_tasks
from components.judge.pool.local_pool import Job, LocalPool
from components.judge.verdict import Ratio, Speedup, Status, Verdict
from components.synthesis.core_composer import write_source

PARAMS = resolve("ci").params
CODES = [
    write_source((("gelu", ()), ("tanh", ())), (64, 1024)),
    write_source((("softmax", ()), ("sigmoid", ())), (64, 1024)),
]
SHAPES = {"inputs": [{"shape": [64, 1024]}], "outputs": [{"shape": [64, 1024]}], "parameters": []}
TASKS = [KernelTask(code=code, evidence=SHAPES) for code in CODES]
OTHER = KernelTask(code="class Model: ...", evidence=SHAPES)


class TextPool:
    """A pool whose verdicts depend on the kernel's text only, with a slower second measurement.

    A kernel whose text contains a word of `failing` has the verdict `infrastructure` while it is there.
    """

    def __init__(self, failing: tuple[str, ...] = (), wrong: tuple[str, ...] = ()):
        self.failing = failing
        self.wrong = wrong
        self.measured: Counter[tuple[str, str, str]] = Counter()

    def prepare(self) -> Future[None]:
        raise NotImplementedError

    def submit(self, job: Job) -> Future[Verdict]:
        assert job.compare_compile is None, "no figure needs torch.compile"
        files = dict(job.candidate.files)
        text = next(text for name, text in files.items() if name.startswith("kernels/"))
        assert "model_new.py" in files
        phase = job.epoch.rpartition("/")[2]
        self.measured[job.task.task_id, text, phase] += 1
        future: Future[Verdict] = Future()
        status: Status = "correct"
        if any(word in text for word in self.wrong):
            status = "wrong_output"
        if any(word in text for word in self.failing):
            status = "infrastructure"
        speed = 1 + len(text) % 7 / (1 if phase == "first" else 2)
        ratio = Ratio(estimate=speed, low=speed, high=speed) if status == "correct" else None
        future.set_result(Verdict(status=status, speedup=Speedup(eager=ratio)))
        return future

    def drop(self) -> None:
        return

    def close(self) -> None:
        return


def run(out: Path, pool: Any, schedules: int = 6, tasks: list[KernelTask] = TASKS, **more: Any) -> Attainable:
    arguments = {"schedules": schedules, "epoch": "e", "progress": Quiet()} | more
    return search(tasks, PARAMS, pool, out, **arguments)


def test_equal_kernels_are_judged_once_and_other_tasks_are_left_out_and_counted(tmp_path: Path) -> None:
    pool = TextPool()
    found = run(tmp_path, pool, tasks=[*TASKS, OTHER, TASKS[0]])
    assert set(pool.measured.values()) == {1}
    assert [len(task.kernels) for task in found.tasks] == [6, 6] and found.left_out == 1
    assert [set(task.kernels) for task in found.tasks] == [set(task.first) for task in found.tasks]
    assert found.judgements == len(pool.measured) and found.errors == 0
    assert all(task.second.keys() == task.first.keys() for task in found.tasks)
    assert best_fixed_row(found) is not None


def test_no_wrong_kernel_is_measured_again(tmp_path: Path) -> None:
    wrong = run(tmp_path, TextPool(wrong=("(",)))
    assert all(not task.second for task in wrong.tasks)


def test_a_draw_is_the_beginning_of_a_larger_one_and_ends_with_the_space() -> None:
    assert draw_schedules("cpu", 3) == draw_schedules("cpu", 5)[:3]
    space = all_schedules("cpu")
    assert sorted(map(str, draw_schedules("cpu", len(space) + 1))) == sorted(map(str, space))


def test_a_judge_that_failed_is_counted_and_asked_again_by_a_later_call(tmp_path: Path) -> None:
    failing = TextPool(failing=("(",))
    found = run(tmp_path, failing)
    assert found.errors == found.judgements == len(failing.measured)
    assert not any(task.outcomes() for task in found.tasks) and best_fixed_row(found) is None
    (tmp_path / "results.json").unlink()
    again = TextPool()
    assert run(tmp_path, again).errors == 0 and again.measured.keys() > failing.measured.keys()


class Interrupted:
    """Progress that raises KeyboardInterrupt at one of its reports."""

    def __init__(self, report: int):
        self.left = report

    def update(self, stage: str, step: int, total: int, **figures: float) -> None:
        assert step <= total
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.mark.parametrize("lives", [1, 3, 7])
def test_an_interrupted_search_repeats_nothing(tmp_path: Path, lives: int) -> None:
    whole = run(tmp_path / "whole", TextPool())
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", TextPool(), progress=Interrupted(lives))
    again = TextPool()
    assert run(tmp_path / "killed", again) == whole
    assert again.measured.total() == whole.judgements - lives
    assert run(tmp_path / "killed", TextPool(failing=("(",))) == whole, "a finished search is only read"


def test_another_search_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    run(tmp_path, TextPool())
    with pytest.raises(UserError, match=r"another evaluation.*schedules"):
        run(tmp_path, TextPool(), schedules=5)


PATHS = {"PYTHONPATH": os.pathsep.join((str(PROJECT), str(PROJECT / "tests" / "bench")))}
PROGRAM = """
import sys
from pathlib import Path
from components.core.config import resolve
from components.core.progress import Quiet
from components.core.task import read_tasks
from schedule_search import search
from components.judge.pool.local_pool import LocalPool

folder = Path(sys.argv[1])
params = resolve("ci").params
pool = LocalPool(params, folder / "verdicts", folder / "judge")
search(read_tasks(folder / "tasks.parquet"), params, pool, folder / "attainable", schedules=3, epoch="e",
       progress=Quiet())
pool.close()
"""


@pytest.mark.timeout(300)
def test_a_search_with_a_real_judge_that_was_killed_judges_nothing_twice(tmp_path: Path) -> None:
    pool = LocalPool(PARAMS, tmp_path / "verdicts", tmp_path / "judge")
    try:
        evidence = [pool.admit(code).result().evidence for code in CODES]
        tasks = [KernelTask(code=code, evidence=one) for code, one in zip(CODES, evidence, strict=True)]
        write_tasks(tmp_path / "tasks.parquet", tasks)
        admitted = len(list((tmp_path / "verdicts").rglob("*.json")))
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=PROJECT, env=os.environ | PATHS
        )
        try:
            while process.poll() is None and not list((tmp_path / "attainable").glob("tasks/*.json")):
                time.sleep(0.01)
            assert process.poll() is None, "it ended before it was killed"
        finally:
            process.kill()
            process.wait()
        known = len(list((tmp_path / "verdicts").rglob("*.json"))) - admitted
        asked: list[Job] = []
        ask = pool.ask

        def counted(job: Job) -> Verdict:
            asked.append(job)
            return ask(job)

        pool.ask = counted  # type: ignore[method-assign]
        found = run(tmp_path / "attainable", pool, schedules=3, tasks=tasks)
        assert known >= 1 and len(asked) == found.judgements - known
        assert not (tmp_path / "attainable" / "results.json").read_text().count('"infrastructure"')
        assert [task.task_id for task in found.tasks] == [task.task_id for task in tasks]
        assert found.errors == 0 and all(task.second for task in found.tasks)
        asked.clear()
        assert run(tmp_path / "elsewhere", pool, schedules=3, tasks=tasks).tasks == found.tasks and not asked
    finally:
        pool.close()
