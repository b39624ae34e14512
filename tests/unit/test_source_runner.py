"""The process of a task's own source leaves nothing behind where it cannot be started."""

import contextlib
import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from components.core.errors import InfrastructureError
from components.judge.source_runner import SourceRunner, TaskData
from components.judge.task_layout import Placement


def test_memory_is_freed_where_no_process_can_be_started() -> None:
    def start(*_: object, **__: object) -> None:
        raise InfrastructureError("the zygote is gone")

    layout: Any = SimpleNamespace(
        placement=Placement(), device="cpu", input_sets=2, inputs=SimpleNamespace(stride=4096), header=dict
    )
    data: Any = SimpleNamespace(
        layout=layout,
        params=SimpleNamespace(device="cpu", sandbox=SimpleNamespace(run_seconds=1.0)),
        scheduler=SimpleNamespace(measuring=contextlib.nullcontext, preparing=contextlib.nullcontext),
        processes=SimpleNamespace(start=start),
        header=lambda *_: {},
    )
    source = SourceRunner(cast(TaskData, data), computes=False)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(InfrastructureError, match="the zygote is gone"):
            source.inputs()
    assert not source.buffers and len(os.listdir("/proc/self/fd")) == before
