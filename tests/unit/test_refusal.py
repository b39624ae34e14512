"""Claims about the refusal of a task whose own source fails."""

from types import SimpleNamespace
from typing import cast

import pytest

from components.core.config import resolve
from components.core.errors import TaskError, TaskTooLarge
from components.judge import admission as admission_module
from components.judge.admission import MAX_DETAIL, RUNNER_SHARE, admit, refusal
from components.judge.device_scheduler import DeviceScheduler
from components.judge.role_processes import task_errors
from components.sandbox.runner_factory import RunnerFactory
from components.sandbox.runner_process import RunnerError

WITHOUT_DRIVER = (
    "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and "
    "installed a driver from http://www.nvidia.com/Download/index.aspx"
)


@pytest.mark.parametrize("end", ["", " and more" * 100])
def test_a_refusal_has_the_whole_hint_for_a_task_that_puts_tensors_on_a_gpu(end: str) -> None:
    with pytest.raises(TaskError) as raised, task_errors():
        raise RunnerError("error", WITHOUT_DRIVER + end)
    assert refusal(raised.value).evidence["detail"].endswith("or judge with --device cuda")


def test_a_refusal_says_whether_memory_lacks_and_has_no_long_detail() -> None:
    for error, reason in ((TaskTooLarge("x" * 9999), "too_large"), (TaskError("x" * 9999), "does_not_run")):
        admission = refusal(error)
        assert not admission.admitted and admission.reason == reason
        assert admission.evidence == {"detail": "x" * MAX_DETAIL}


def test_a_source_that_takes_too_long_is_refused_by_a_sentence() -> None:
    expected = r"timed_out: its source needs longer than sandbox\.run_seconds"
    with pytest.raises(TaskError, match=expected), task_errors():
        raise RunnerError("timed_out")


TASK = "class Model: ...\n\n\ndef get_inputs(): ...\n\n\ndef get_init_inputs(): ...\n"


@pytest.mark.parametrize(("headroom", "share"), [(False, 1.0), (True, RUNNER_SHARE)])
def test_only_a_task_of_a_data_set_is_first_tried_with_a_part_of_the_gpu(
    headroom: bool, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[float, int]] = []

    def reference(*_: object, memory_share: float, extra_bytes: int, **__: object) -> None:
        tried.append((memory_share, extra_bytes))
        raise TaskError("needs 20 GB", out_of_memory=True)

    monkeypatch.setattr(admission_module, "TaskReference", reference)
    gpu = cast(DeviceScheduler, SimpleNamespace(is_exclusive=True, reservable_bytes=800))
    factory = cast(RunnerFactory, SimpleNamespace())
    params = resolve("smollm2").params
    found = admit(params, factory, gpu, TASK, (0.0, 1.0), headroom=headroom)
    assert not found.admitted and found.reason == "does_not_run"
    assert tried == [(share, 0), (share, int(800 * share))]
