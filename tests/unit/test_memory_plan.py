"""The memory that judging takes, planned for every task of KernelBench at its own sizes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from components.core.config import resolve
from components.core.errors import TaskTooLarge
from components.judge.device_scheduler import MEMORY_SHARE
from components.judge.memory_plan import MemoryBudget, memory_need, plan_layout
from components.judge.task_description import Description
from components.judge.task_layout import PLACEMENTS, Sizing, TaskLayout

SIZES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data/kernelbench_sizes.json").read_text()
)["tasks"]
BASE = resolve().params
ADMISSION = Sizing(
    round_share=0.25, min_correctness_sets=2, timed_sets=2, keep_references=False, one_process=True
)
HOST_BYTES = 128 << 30


def description(task: dict[str, Any], **changes: Any) -> Description:
    """What a runner of the task would report; its parameters are tensors of one size."""
    count = task["state_tensors"]
    values = {
        "init_inputs": [],
        "inputs": [value if isinstance(value, list) else None for value in task["inputs"]],
        "scalars": [None if isinstance(value, list) else [value] for value in task["inputs"]],
        "outputs": task["outputs"],
        "state": [(str(i), [task["state_bytes"] // 4 // count], "float32") for i in range(count)],
        "parameters": [],
        "seconds": 0.005,
        "peak_bytes": task["peak_bytes"],
        "operations": 0,
    }
    return Description.model_validate(values | changes)


def budget(total: int, host: int = HOST_BYTES) -> MemoryBudget:
    return MemoryBudget(int(MEMORY_SHARE * total), total, int(0.8 * host))


def test_a_round_has_fewer_calls_before_buffers_are_shared() -> None:
    # Two inputs and an output of 32 MB, in calls of 90 us: 21 of them take 27 GB, and 16 take 23 GB.
    tensor = [[1 << 23], "float32"]
    sizes = {"inputs": [tensor] * 2, "outputs": [tensor], "peak_bytes": 1 << 27}
    small = description(sizes | {"state_tensors": 1, "state_bytes": 4}, state=[], seconds=9e-5)

    def planned(gigabytes: int, device_bytes: int) -> tuple[bool, int]:
        params = resolve("smollm2", (f"sandbox.device_bytes={device_bytes}",)).params
        layout = plan_layout(small, params, Sizing(), MemoryBudget(gigabytes * 10**9, 0, HOST_BYTES))
        return layout.placement.shares_buffers, layout.calls

    assert [planned(size, 0) for size in (28, 24, 17, 15)] == [
        (False, 21),
        (False, 16),
        (False, 8),
        (True, 2),
    ]
    # Others use the device too: the least number of calls, unless the task needs little of the budget.
    assert [planned(size, 1 << 34) for size in (28, 17, 15)] == [(False, 8), (False, 8), (True, 2)]
    assert planned(120, 1 << 34) == (False, 21)
    # What the profile gives to the judge is enough for twice the least number of calls.
    own = resolve("smollm2").params
    assert plan_layout(small, own, Sizing(), budget(own.sandbox.device_bytes)).calls == 16


@pytest.mark.parametrize("sizing", [Sizing(), ADMISSION], ids=["candidates", "admission"])
@pytest.mark.parametrize("total", [141_000_000_000, 96_000_000_000], ids=["141 GB", "96 GB"])
def test_every_kernelbench_task_of_levels_1_to_3_fits(total: int, sizing: Sizing) -> None:
    allowed, checked = budget(total), 0
    for task in SIZES:
        try:
            layout = plan_layout(description(task), BASE, sizing, allowed)
        except TaskTooLarge:
            assert (task["level"], task["problem"]) == (4, 18), "parameters of 11 GB and a call of 25 GB"
            continue
        checked += 1
        need = memory_need(layout, allowed.runner_bytes)
        assert need.device <= allowed.device_bytes and need.host <= allowed.host_bytes, task["name"]
        # All that exists at once whatever the placement: the call itself and the judge's copy of its inputs.
        assert need.timed >= task["peak_bytes"] + layout.inputs.stride, task["name"]
        assert need.fill >= task["float64_peak_bytes"], task["name"]
        if layout.placement.shares_buffers and not sizing.one_process:
            assert need.deferred >= task["float64_peak_bytes"] + layout.inputs.stride, task["name"]
        assert layout.calls >= 1 and layout.input_sets >= len(layout.distributions) + 2
    assert checked == (269 if total < 100_000_000_000 else 270)


def test_small_tasks_keep_the_fastest_placement_and_all_correctness_sets() -> None:
    layouts = [plan_layout(description(task), BASE, Sizing(), budget(141_000_000_000)) for task in SIZES]
    fast = [layout for layout in layouts if layout.placement == PLACEMENTS[0]]
    assert len(fast) >= 190
    assert all(len(layout.distributions) >= 6 for layout in fast if layout.call_bytes < 1 << 28)


@pytest.mark.parametrize("gigabytes", [3.2, 6.4])
@pytest.mark.parametrize("total", [150_000_000_000, 96_000_000_000], ids=["H200", "96 GB"])
def test_the_tasks_that_are_checked_on_a_gpu_fit_and_share_buffers(total: int, gigabytes: float) -> None:
    """Sizes of tests/device/large_tasks.py and check_gpu.py: an elementwise chain that has three tensors."""
    shape = [int(gigabytes * 1e9 / 4 / 1024), 1024]
    chain = description(SIZES[0]).model_copy(
        update={
            "inputs": [(shape, "float32")],
            "scalars": [None],
            "outputs": [(shape, "float32")],
            "state": [("scale", [1024], "float32")],
            "peak_bytes": 3 * 4 * shape[0] * shape[1],
            "operations": 0,
        }
    )
    allowed = budget(total)
    layout = plan_layout(chain, BASE, Sizing(), allowed)
    need, tensor = memory_need(layout, allowed.runner_bytes), 4 * shape[0] * shape[1]
    assert layout.placement.shares_buffers and need.device <= allowed.device_bytes
    # The judge's inputs, the buffers of candidate and baselines, and what eager computes in its round.
    assert need.timed >= 9 * tensor
    # Inputs, their copy in float64 with two intermediate results, and the expected output.
    assert need.deferred >= (1 + 3 * 2 + 2) * tensor


def test_buffers_of_timed_runners_are_not_counted_beside_a_deferred_call() -> None:
    task = max(SIZES, key=lambda task: task["peak_bytes"])
    layout = TaskLayout.of(description(task), BASE.sandbox, "cuda", Sizing(), PLACEMENTS[1])
    more = dataclasses.replace(layout, capacity=layout.capacity + 1)
    before, after = memory_need(layout, 0), memory_need(more, 0)
    assert after.timed > before.timed and after.deferred == before.deferred


def test_less_device_memory_never_gives_a_faster_placement() -> None:
    order = {placement: rank for rank, placement in enumerate(PLACEMENTS)}
    for task in SIZES[::5]:
        ranks = [
            order[plan_layout(description(task), BASE, Sizing(), budget(size * 10**9)).placement]
            for size in (1000, 300, 141, 96)
        ]
        assert ranks == sorted(ranks), task["name"]


def test_a_task_that_fits_nowhere_is_refused_with_the_figures() -> None:
    largest = max(SIZES, key=lambda task: task["peak_bytes"])
    with pytest.raises(TaskTooLarge, match=r"takes [\d.]+ GB of device memory and [\d.]+ GB of host memory"):
        plan_layout(description(largest), BASE, Sizing(), budget(24_000_000_000))
    with pytest.raises(TaskTooLarge, match="of host memory"):
        plan_layout(description(largest), BASE, Sizing(), budget(96_000_000_000, host=8 << 30))


def test_a_call_that_is_too_large_for_cpu_is_refused() -> None:
    cpu = resolve("smoke").params
    with pytest.raises(TaskTooLarge, match="can be measured on cpu"):
        plan_layout(description(SIZES[20]), cpu, Sizing(), MemoryBudget(0, 0, HOST_BYTES))


def test_parameters_that_no_runner_on_cpu_can_have_are_refused() -> None:
    """The judge copies them for every runner, and a source that took over its runner may report any size."""
    reported = description(SIZES[0] | {"inputs": [[[4], "float32"]], "outputs": [[[4], "float32"]]})
    state = [("weight", [1 << 38], "float32")]
    with pytest.raises(TaskTooLarge, match=r"its parameters take 1099\.5 GB, and at most [\d.]+ GB"):
        cpu = resolve("smoke").params
        plan_layout(
            reported.model_copy(update={"state": state}), cpu, Sizing(), MemoryBudget(0, 0, HOST_BYTES)
        )
