"""The check of tasks before the first episode: which are left out, and when nothing may begin."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from components.core.config import resolve
from components.core.errors import InfrastructureError, UserError, error_chain
from components.core.progress import Quiet
from components.core.task import KernelTask
from components.judge.pool.local_pool import LocalPool
from components.judge.pool.measurable import check_tasks, left_out
from components.judge.verdict import Admission

EVIDENCE = {"inputs": [], "outputs": [{"shape": [4], "dtype": "float32"}], "parameters": []}
TASKS = [KernelTask(code=f"size = {size}") for size in range(4)]


class Memory:
    """A judge that has memory for tasks below the size `capacity`, and that fails if it is negative."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.asked: Counter[str] = Counter()

    def admit(
        self, code: str, window: tuple[float, float], *, headroom: bool, memory_only: bool
    ) -> Admission:
        assert memory_only and not headroom
        self.asked[code] += 1
        if self.capacity < 0:
            raise InfrastructureError("the zygote is gone")
        if int(code.rpartition(" ")[2]) < self.capacity:
            return Admission(True, "", EVIDENCE)
        return Admission(False, "too_large", {"detail": f"{code} takes 9.0 GB, and 7.2 GB can be used"})

    def check(self, folder: Path, *sets: str, share: float = 0.5) -> dict[str, Admission]:
        """Check all tasks, each of which is listed twice, with this judge and a journal in `folder`."""
        memory: Any = self

        class Pool(LocalPool):
            def start(self) -> Any:
                return memory

        params = resolve("ci", sets).params
        pool, file = Pool(params, folder / "verdicts"), folder / "task_checks.json"
        return check_tasks(TASKS * 2, pool, params, file, least_share=share, origin="tasks", progress=Quiet())


def test_tasks_that_cannot_be_measured_are_left_out_with_count_reason_bytes_and_parameter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Memory(2)
    checks = memory.check(tmp_path)
    assert [checks[task.task_id].admitted for task in TASKS] == [True, True, False, False]
    assert checks[TASKS[0].task_id].evidence == EVIDENCE
    assert memory.asked == {task.code: 1 for task in TASKS}
    sentence = left_out(checks)
    for part in ("2 of 4 tasks", "2 too_large", "size = 2 takes 9.0 GB", "raise sandbox.device_bytes"):
        assert part in sentence and part in caplog.text
    assert left_out({TASKS[0].task_id: checks[TASKS[0].task_id]}) == ""


def test_a_call_that_continues_leaves_out_the_same_tasks_and_other_settings_are_checked_anew(
    tmp_path: Path,
) -> None:
    first, later = Memory(2).check(tmp_path), Memory(4)
    assert later.check(tmp_path) == first and not later.asked
    assert left_out(later.check(tmp_path, "sandbox.device_bytes=9000000000")) == ""
    assert later.asked.total() == 4


def test_a_refusal_is_not_kept_in_the_journal_and_an_admission_is(tmp_path: Path) -> None:
    Memory(2).check(tmp_path)
    (tmp_path / "task_checks.json").unlink()
    again = Memory(4)
    assert left_out(again.check(tmp_path)) == ""
    assert set(again.asked) == {task.code for task in TASKS[2:]}


@pytest.mark.parametrize(
    ("capacity", "share", "says"),
    [
        (1, 0.5, r"1 tasks remain, less than the share of 0\.5 in sandbox\.measurable_share"),
        (0, 0.0, "0 tasks"),
    ],
)
def test_too_few_measurable_tasks_refuse_the_stage(
    tmp_path: Path, capacity: int, share: float, says: str
) -> None:
    with pytest.raises(UserError, match=rf"tasks: . of 4 tasks .*7\.2 GB.*{says}") as refusal:
        Memory(capacity).check(tmp_path, share=share)
    assert refusal.value.exit_code == 2 and not (tmp_path / "task_checks.json").exists()


def test_of_no_tasks_none_is_refused(tmp_path: Path) -> None:
    pool = LocalPool(resolve("ci", ()).params, tmp_path / "verdicts")
    file = tmp_path / "task_checks.json"
    assert check_tasks([], pool, pool.params, file, origin="tasks", progress=Quiet()) == {}


def test_a_judge_that_fails_in_the_check_leaves_out_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"failed in the check of 4 of 4 tasks \(the zygote is gone\)"
    ) as error:
        Memory(-1).check(tmp_path)
    assert any(isinstance(seen, InfrastructureError) for seen in error_chain(error.value)), (
        "a night retries it"
    )
    assert left_out(Memory(4).check(tmp_path)) == ""
