"""Both ends of a round on cuda whose inputs are given call by call, with buffers in host memory."""

import contextlib
import dataclasses
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from components.core.config import resolve
from components.judge.device_scheduler import DeviceScheduler
from components.judge.task_description import Description
from components.judge.task_layout import (
    MAX_DELIVERED_BYTES,
    PLACEMENTS,
    Placement,
    RunnerMemory,
    Sizing,
    TaskLayout,
)
from components.judge.timed_runner import Operation, TimedRunner
from components.sandbox import runner_factory
from components.sandbox.build import build_result_channel
from components.sandbox.runner_process import Runner, RunnerError

CALLS, COLUMNS = 5, 1000
# A model of the tests, which gets its input and all inputs that its process can see.
Model = Callable[[torch.Tensor, list[torch.Tensor]], Any]


def layout(
    mode: str = "call", device: Any = "cuda", placement: Placement = PLACEMENTS[0], rows: int = 3
) -> TaskLayout:
    form = [([rows, COLUMNS], "float32")]
    description = Description.model_validate(
        {
            "init_inputs": [],
            "inputs": form,
            "scalars": [None],
            "outputs": form,
            "state": [],
            "parameters": [],
            "seconds": 1.0,
            "peak_bytes": 0,
            "operations": 0,
        }
    )
    sandbox = resolve("smoke", (f"sandbox.input_delivery={mode}",)).params.sandbox
    return TaskLayout.of(description, sandbox, device, Sizing(), placement)


def test_only_small_calls_on_a_gpu_are_given_one_by_one() -> None:
    assert layout().by_call
    assert not layout("round").by_call
    assert not layout(device="cpu").by_call
    assert not layout(placement=PLACEMENTS[1]).by_call
    large = layout(rows=MAX_DELIVERED_BYTES // (2 * 4 * COLUMNS) + 1)
    assert large.call_bytes > MAX_DELIVERED_BYTES and not large.by_call


class ThreadRunner(Runner):
    """Runner that is a thread of this process."""

    def cpu_seconds(self) -> float:
        return 0.0

    def stop(self) -> None:
        pass

    def signal(self, number: object) -> None:
        pass

    def set_cores(self, cores: object) -> None:
        pass


@pytest.fixture
def runner_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Import the code of a runner as its process does."""
    for folder in (runner_factory.INSIDE_FOLDER, build_result_channel()):
        monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    module = __import__("runner")
    yield module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == Path(module.__file__).parent:
            del sys.modules[name]


def run_round(
    runner_module: ModuleType, model: Model, operation: Operation = "time", calls: int = CALLS
) -> tuple[torch.Tensor, torch.Tensor, TimedRunner]:
    """Run one round of `model`; return inputs and results, one row of bytes a call, and the judge's side."""
    plan = layout()
    memory = RunnerMemory.allocate("cpu", dataclasses.replace(plan, device="cpu"))
    plan_header = plan.header(plan.runner_sets, memory.buffers)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    shared = runner_module.SharedTensors.__new__(runner_module.SharedTensors)
    shared.device, shared.layout, shared.buffers, shared.pinned = "cpu", plan_header, memory.buffers, []
    shared.pin = lambda name: None
    visible = [shared.tensors("inputs", i)[0] for i in range(plan.capacity)] + shared.tensors("next_inputs")
    arguments = [tuple(shared.arguments(i)) for i in range(plan.capacity)]

    def serve() -> None:
        delivery = sys.modules["delivery"].CallDelivery(theirs, shared, inspects=False)
        with contextlib.suppress(OSError):  # the judge has ended the round
            for order in runner_module.orders(theirs.fileno()):
                if order["op"] != "warm":
                    calls = delivery.calls if order["op"] == "time" else delivery.checked_calls
                    extra = () if order["op"] == "time" else (lambda output: [output],)
                    calls(lambda x: model(x, visible), arguments[: order["sets"]], *extra)
                theirs.send(b"D")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    judge = TimedRunner.__new__(TimedRunner)
    judge.layout, judge.memory, judge.role, judge.inputs = plan, memory, "candidate", memory.buffers["inputs"]
    judge.scheduler = DeviceScheduler("cpu")
    judge.runner = runner = ThreadRunner(ours, 0, 0, time.monotonic() + 20)
    staged = torch.randn(calls, plan.inputs.stride // 4).view(torch.uint8)
    try:
        seconds = judge._call_round(runner, operation, calls, staged.view(-1))
        assert seconds > 0
    finally:
        ours.close()
        thread.join(5)
    results = memory.results[: plan.outputs.stride * calls].view(calls, -1)
    return staged, results, judge


def floats(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.float32)[:, : 3 * COLUMNS]


@pytest.mark.parametrize("operation", ["time", "check"])
def test_every_call_gets_its_inputs_and_delivers_its_outputs(
    runner_module: ModuleType, operation: Operation
) -> None:
    inputs, results, judge = run_round(runner_module, lambda x, _: 2 * x, operation)
    assert torch.equal(floats(results), 2 * floats(inputs))
    assert not judge.inputs_changed


def test_no_later_input_exists_while_a_call_runs(runner_module: ModuleType) -> None:
    """What the exploit `batch` does: it computes all that lies in the buffers when a round begins."""
    seen: list[set[float]] = []

    def model(x: torch.Tensor, visible: list[torch.Tensor]) -> torch.Tensor:
        seen.append({float(tensor.view(-1)[0]) for tensor in visible})
        return x.clone()

    inputs, _, _ = run_round(runner_module, model)
    marks = [float(row[0]) for row in floats(inputs)]
    for call in range(CALLS):
        assert marks[call] in seen[call]
        assert seen[call].isdisjoint(marks[call + 1 :])


def test_results_that_are_computed_later_are_wrong(runner_module: ModuleType) -> None:
    """A call that leaves its work to the last one of the round: the judge has read its outputs by then."""
    left: list[tuple[torch.Tensor, torch.Tensor]] = []

    def model(x: torch.Tensor, _: list[torch.Tensor]) -> torch.Tensor:
        left.append((x, torch.zeros_like(x)))
        if len(left) == CALLS:
            for source, target in left:
                target.copy_(2 * source)
        return left[-1][1]

    inputs, results, _ = run_round(runner_module, model)
    right = [torch.equal(a, 2 * b) for a, b in zip(floats(results), floats(inputs), strict=True)]
    assert right == [False] * (CALLS - 1) + [True]


def test_a_changed_input_is_seen(runner_module: ModuleType) -> None:
    _, _, judge = run_round(runner_module, lambda x, _: x.mul_(2))
    assert judge.inputs_changed


def test_a_runner_that_reports_before_it_is_asked_is_ended(runner_module: ModuleType) -> None:
    def model(x: torch.Tensor, _: list[torch.Tensor]) -> torch.Tensor:
        connection = sys._getframe(2).f_locals["self"].connection
        connection.send(b"C")
        return x

    with pytest.raises(RunnerError, match="protocol"):
        run_round(runner_module, model)
